//! Measures, on an adapter, what the error bounds assume of it.
//!
//! Each [`Probe`] is one primitive that the shaders use, over thousands of inputs: those that the kernels give it
//! (domain `kernels`) and, where it differs, all that WGSL's accuracy table speaks of (domain `table`).
//! References are exact or f64. Behaviours that WGSL leaves open (rounding, fusing, flushing) are named.
//! A primitive outside the table is the adapter's defect, and [`Probes::broken_for`] says which
//! properties rest on it.

pub mod dispatch;
mod draw;
pub mod judge;
mod measure;

use crate::properties::{self, Stage};
use serde::Serialize;

use crate::adapters::Device;

pub use measure::rounding;

/// What a probe saw.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Seen {
    /// The largest error, or how many results were wrong.
    Number(f64),
    /// Which behaviour.
    Text(String),
}

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(n) if n.fract() == 0.0 => write!(f, "{n}"),
            Self::Number(n) if *n < 1e4 => write!(f, "{n:.3}"),
            Self::Number(n) => write!(f, "{n:.1e}"),
            Self::Text(text) => write!(f, "{text}"),
        }
    }
}

/// A primitive, measured.
#[derive(Clone, Debug, Serialize)]
pub struct Probe {
    /// The primitive.
    pub name: String,
    /// Whose inputs: `kernels`, `table`, or nothing where both are the same.
    pub domain: &'static str,
    /// Unit of `limit` and of a number seen.
    pub unit: String,
    /// The largest value that WGSL, or the kernels, allow.
    pub limit: Option<f64>,
    /// What was seen.
    pub seen: Seen,
    /// Within the limit, or a behaviour that is allowed.
    pub kept: bool,
    /// The worst input, or what to know.
    pub note: String,
}

impl Probe {
    /// A probe that has seen nothing yet, and so is not kept.
    #[must_use]
    pub fn new(name: &str, domain: &'static str, unit: &str, limit: Option<f64>) -> Self {
        Self {
            name: name.to_owned(),
            domain,
            unit: unit.to_owned(),
            limit,
            seen: Seen::Text("nothing".to_owned()),
            kept: false,
            note: String::new(),
        }
    }

    fn not_run(self, why: &str) -> Self {
        Self {
            seen: Seen::Text("not run".to_owned()),
            kept: false,
            note: why.to_owned(),
            ..self
        }
    }

    fn with_note(self, note: &str) -> Self {
        Self {
            note: note.to_owned(),
            ..self
        }
    }

    /// The primitive with its domain.
    #[must_use]
    pub fn title(&self) -> String {
        match self.domain {
            "" => self.name.clone(),
            domain => format!("{} ({domain})", self.name),
        }
    }

    /// The primitive, what was seen, the limit and the worst input, in a line.
    #[must_use]
    pub fn describe(&self) -> String {
        let limit = self.limit.map_or_else(String::new, |limit| {
            format!(" {}, limit {limit}", self.unit)
        });
        format!("{}: {}{limit}: {}", self.title(), self.seen, self.note)
    }

    /// The properties whose verdict rests on this probe. None rests on inputs that no kernel gives.
    #[must_use]
    pub fn carries(&self) -> Vec<&'static str> {
        let stages = RESTS
            .iter()
            .find(|(names, _)| names.contains(&self.name.as_str()))
            .filter(|_| self.domain != "table")
            .map_or(&[][..], |(_, stages)| stages);
        properties::ALL
            .iter()
            .filter(|p| p.stages.iter().any(|s| stages.contains(s)))
            .map(|p| p.name)
            .collect()
    }
}

/// Stages by the probes that they rest on: the operations of their kernels, as the bounds count them. What is
/// not here (sqrt, the f16 conversions built into WGSL, workgroup memory at the start) the
/// kernels do without; it is measured so that a kernel that wants it can know.
static RESTS: &[(&[&str], &[Stage])] = &[
    (
        &[
            "rounding of x + y",
            "rounding of x - y",
            "rounding of x * y",
            "subnormal as input of x * y",
            "subnormal from x * y",
            "subnormal from x + y",
            "a * b + c",
            "fusing of a * b + c",
            "min, max",
            "select beside NaN",
            "bitcast",
            "u32 through storage",
            "workgroups beyond x",
        ],
        &[Stage::Encode, Stage::Rotate, Stage::Attend],
    ),
    (&["inverseSqrt", "dot", "norm_to_f16"], &[Stage::Encode]),
    (
        &["x / y", "exp", "weight", "f16_to_norm", "u32 to f32"],
        &[Stage::Attend],
    ),
];

/// All probes of an adapter, and what follows for the bounds.
#[derive(Clone, Debug, Serialize)]
pub struct Probes {
    /// Every probe.
    pub list: Vec<Probe>,
    /// The unit roundoff that the bounds use.
    pub unit_roundoff: f64,
    /// Some operation flushes f32 subnormals to zero.
    pub flushes_subnormals: bool,
}

impl Probes {
    /// Runs all of them.
    #[must_use]
    pub fn run(device: &Device) -> Self {
        let list = measure::all(device);
        let flushes_subnormals = list
            .iter()
            .any(|p| p.name.starts_with("subnormal") && p.seen != Seen::Text("kept".to_owned()));
        Self {
            list,
            unit_roundoff: device.arithmetic.unit_roundoff,
            flushes_subnormals,
        }
    }

    /// Those outside their limit.
    pub fn broken(&self) -> impl Iterator<Item = &Probe> {
        self.list.iter().filter(|p| !p.kept)
    }

    /// Those outside their limit that a property rests on.
    pub fn broken_for(&self, property: &str) -> impl Iterator<Item = &Probe> {
        self.broken()
            .filter(move |p| p.carries().contains(&property))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_property_rests_on_something() {
        for property in properties::ALL {
            assert!(!property.stages.is_empty(), "{}", property.name);
            for stage in property.stages {
                assert!(RESTS.iter().any(|(_, stages)| stages.contains(stage)));
            }
        }
    }

    #[test]
    fn a_broken_probe_is_held_against_the_properties_that_rest_on_it() {
        let probes = Probes {
            list: vec![
                Probe::new("exp", "kernels", "ULP", Some(1.0)),
                Probe::new("inverseSqrt", "table", "ULP", Some(2.0)),
                Probe::new("sqrt", "", "ULP", Some(2.0)),
            ],
            unit_roundoff: 0.0,
            flushes_subnormals: false,
        };
        assert_eq!(probes.broken().count(), 3);
        let titles: Vec<String> = probes.broken_for("attention").map(Probe::title).collect();
        assert_eq!(titles, ["exp (kernels)"]);
        assert_eq!(probes.broken_for("encode_keys").count(), 0);
    }
}
