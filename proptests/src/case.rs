//! One check, described by everything that determines it.

use serde::{Deserialize, Serialize};
use turboquant_wgpu::heads::query_heads_per_kv_head;
use turboquant_wgpu::twin::AttentionShape;
use turboquant_wgpu::{Error, Gain, HeadDim, KernelVariant, KvSplit, LayerShape, Rotation};

use crate::inputs::{Context, Data, Family, InputError, generate};
use crate::sequence::Sequence;

/// Everything that one check depends on. Small, readable, and saved as TOML: the same case gives the
/// same buffers and the same dispatches on every adapter, whatever becomes of the strategies that
/// drew it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Name of the property that checks it.
    pub property: String,
    /// Elements of a vector.
    pub head_dim: u32,
    /// Query heads.
    pub n_heads: u32,
    /// KV heads.
    pub n_kv_heads: u32,
    /// Timesteps that the layer can hold.
    pub capacity: u32,
    /// Timesteps encoded.
    pub rows: u32,
    /// Timesteps encoded by one call.
    pub encode_split: u32,
    /// Layer whose rotation is used; the layers before it have no cache.
    pub layer: u32,
    /// Seed of the cache.
    pub cache_seed: u32,
    /// Query rows.
    pub q_rows: u32,
    /// Position of query row 0.
    pub start_pos: u32,
    /// Query rows attended by one call.
    pub q_split: u32,
    /// Timesteps of a KV split; 0 for the automatic choice.
    pub kv_split: u32,
    /// Factor of every score.
    pub scale: f32,
    /// Factor of the residual term.
    #[serde(with = "gain_name")]
    pub gain: Gain,
    /// Variant of the kernels, where the adapter can run it; by default the library's choice.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        with = "variant_name"
    )]
    pub variant: Option<KernelVariant>,
    /// Key vectors, [rows, n_kv_heads, head_dim].
    pub keys: Data,
    /// Value vectors, [rows, n_kv_heads, head_dim].
    pub values: Data,
    /// Query vectors, [q_rows, n_heads, head_dim].
    pub queries: Data,
    /// What the property `model` does, on caches of its own; it takes from the fields above what vectors, heads
    /// and attention have in common.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<Sequence>,
}

/// Why a case cannot be run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CaseError {
    /// Its shape is not one that the library takes.
    #[error(transparent)]
    Shape(#[from] Error),
    /// Its data cannot be made.
    #[error(transparent)]
    Input(#[from] InputError),
    /// A count is out of range.
    #[error("{field} is {found}: expected {expected}")]
    Range {
        /// Which field.
        field: &'static str,
        /// Its value.
        found: u64,
        /// What it has to be.
        expected: String,
    },
    /// It is no TOML of a case.
    #[error("not a case: {0}")]
    Parse(String),
}

impl Case {
    /// Parses a saved case and checks it.
    ///
    /// # Errors
    /// Text that is no case, or a case that cannot be run.
    pub fn from_toml(text: &str) -> Result<Self, CaseError> {
        let case: Self = toml::from_str(text).map_err(|e| CaseError::Parse(e.to_string()))?;
        case.check()?;
        Ok(case)
    }

    /// The case as TOML.
    #[must_use]
    pub fn to_toml(&self) -> String {
        // Only maps with non-string keys and the like fail, and a case has none.
        toml::to_string(self).unwrap_or_else(|e| format!("# not serialisable: {e}\n"))
    }

    /// Checks that the case asks for something the library takes.
    ///
    /// # Errors
    /// What is out of range.
    pub fn check(&self) -> Result<(), CaseError> {
        self.head_dim()?;
        query_heads_per_kv_head(self.n_heads, self.n_kv_heads)?;
        let at_least_one = [
            ("capacity", self.capacity),
            ("encode_split", self.encode_split),
            ("q_split", self.q_split),
        ];
        for (field, found) in at_least_one {
            require(field, found, found >= 1, || "at least 1".to_owned())?;
        }
        let fits = self.rows <= self.capacity;
        require("rows", self.rows, fits, || {
            format!("at most the capacity {}", self.capacity)
        })?;
        let end = u64::from(self.start_pos) + u64::from(self.q_rows);
        let seen = end <= u64::from(self.rows);
        require("start_pos", self.start_pos, seen, || {
            format!("start_pos + q_rows at most the rows {}", self.rows)
        })?;
        // A saved case is small; one that is not was damaged, or made to exhaust the machine.
        let elements = u64::from(self.rows) * u64::from(self.n_kv_heads)
            + u64::from(self.q_rows) * u64::from(self.n_heads);
        let most = 1 << 22;
        require("rows", self.rows, elements <= most, || {
            format!("at most {most} vectors in all")
        })?;
        require("layer", self.layer, self.layer < 1024, || {
            "below 1024".to_owned()
        })?;
        require("capacity", self.capacity, self.capacity <= 1 << 22, || {
            "at most 2^22".to_owned()
        })?;
        self.sequence.as_ref().map_or(Ok(()), Sequence::check)
    }

    /// The head dimension.
    ///
    /// # Errors
    /// One that is not supported.
    pub fn head_dim(&self) -> Result<HeadDim, Error> {
        HeadDim::try_from(self.head_dim)
    }

    /// The rotation of the case's layer.
    ///
    /// # Errors
    /// An unsupported head dimension.
    pub fn rotation(&self) -> Result<Rotation, Error> {
        Ok(Rotation::new(
            self.head_dim()?,
            u64::from(self.cache_seed),
            self.layer,
        ))
    }

    /// The layer's shape.
    ///
    /// # Errors
    /// An unsupported head dimension.
    pub fn shape(&self) -> Result<LayerShape, Error> {
        Ok(LayerShape {
            head_dim: self.head_dim()?,
            n_kv_heads: self.n_kv_heads,
        })
    }

    /// What an attention pass computes.
    #[must_use]
    pub fn attention_shape(&self) -> AttentionShape {
        AttentionShape {
            rows: self.q_rows,
            n_heads: self.n_heads,
            start_pos: self.start_pos,
            scale: self.scale,
            gain: self.gain,
        }
    }

    /// How the sequence is cut.
    #[must_use]
    pub fn kv_split(&self) -> KvSplit {
        std::num::NonZeroU32::new(self.kv_split).map_or(KvSplit::Automatic, KvSplit::Len)
    }

    /// The key tensor.
    ///
    /// # Errors
    /// Data that cannot be made for this shape.
    pub fn keys(&self) -> Result<Vec<f32>, CaseError> {
        self.tensor(&self.keys, self.rows, self.n_kv_heads)
    }

    /// The value tensor.
    ///
    /// # Errors
    /// Data that cannot be made for this shape.
    pub fn values(&self) -> Result<Vec<f32>, CaseError> {
        self.tensor(&self.values, self.rows, self.n_kv_heads)
    }

    /// The query tensor.
    ///
    /// # Errors
    /// Data that cannot be made for this shape.
    pub fn queries(&self) -> Result<Vec<f32>, CaseError> {
        self.tensor(&self.queries, self.q_rows, self.n_heads)
    }

    /// The case with data of these families, chosen by each tensor's seed. A family that asks for another head
    /// dimension, or does not take the exponent, is left out.
    #[must_use]
    pub fn with_families(mut self, families: &[Family]) -> Self {
        let head_dim = self.head_dim;
        for data in [&mut self.keys, &mut self.values, &mut self.queries] {
            let fitting: Vec<Family> = families
                .iter()
                .copied()
                .filter(|f| f.needs_head_dim().is_none_or(|d| d.get_u32() == head_dim))
                .collect();
            if let Some(&family) = fitting.get(data.seed as usize % fitting.len().max(1)) {
                data.family = family;
                data.exponent = 0;
            }
        }
        self
    }

    /// The case with small tensors held literally, so that it survives changes of the families that drew
    /// them. A case that is too large for that, or whose data cannot be made, keeps its descriptors.
    #[must_use]
    pub fn literal(mut self) -> Self {
        /// More elements than this are no longer read by anyone.
        const MOST: u64 = 1024;
        let Ok(rotation) = self.rotation() else {
            return self;
        };
        let (kv, q) = ((self.rows, self.n_kv_heads), (self.q_rows, self.n_heads));
        for (data, (rows, heads)) in [
            (&mut self.keys, kv),
            (&mut self.values, kv),
            (&mut self.queries, q),
        ] {
            let elements = u64::from(rows) * u64::from(heads) * u64::from(self.head_dim);
            let context = Context {
                rotation: &rotation,
                rows,
                heads,
            };
            if (1..=MOST).contains(&elements)
                && let Ok(frozen) = data.frozen(&context)
            {
                *data = frozen;
            }
        }
        self
    }

    fn tensor(&self, data: &Data, rows: u32, heads: u32) -> Result<Vec<f32>, CaseError> {
        let rotation = self.rotation()?;
        let context = Context {
            rotation: &rotation,
            rows,
            heads,
        };
        Ok(generate(data, &context)?)
    }
}

fn require(
    field: &'static str,
    found: u32,
    holds: bool,
    expected: impl FnOnce() -> String,
) -> Result<(), CaseError> {
    if holds {
        return Ok(());
    }
    Err(CaseError::Range {
        field,
        found: u64::from(found),
        expected: expected(),
    })
}

/// Gains by name.
mod gain_name {
    use serde::{Deserialize, Deserializer, Serializer};
    use turboquant_wgpu::Gain;

    fn name(gain: Gain) -> &'static str {
        match gain {
            Gain::Unbiased => "unbiased",
            Gain::MinimumError => "minimum-error",
            Gain::Cera => "cera",
        }
    }

    pub fn serialize<S: Serializer>(gain: &Gain, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(name(*gain))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Gain, D::Error> {
        let found = String::deserialize(deserializer)?;
        Gain::ALL
            .into_iter()
            .find(|g| name(*g) == found)
            .ok_or_else(|| {
                serde::de::Error::custom(format!(
                    "gain \"{found}\": expected unbiased, minimum-error or cera"
                ))
            })
    }
}

/// Kernel variants by name.
mod variant_name {
    use serde::{Deserialize, Deserializer, Serializer};
    use turboquant_wgpu::KernelVariant;

    pub fn serialize<S: Serializer>(
        variant: &Option<KernelVariant>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match variant {
            Some(variant) => serializer.serialize_str(variant.name()),
            None => serializer.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<KernelVariant>, D::Error> {
        let found = String::deserialize(deserializer)?;
        match KernelVariant::by_name(&found) {
            Some(variant) => Ok(Some(variant)),
            None => Err(serde::de::Error::custom(format!(
                "variant \"{found}\": expected {}",
                KernelVariant::ALL.map(KernelVariant::name).join(" or ")
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case() -> Case {
        Case {
            property: "attention".to_owned(),
            head_dim: 64,
            n_heads: 6,
            n_kv_heads: 2,
            capacity: 20,
            rows: 17,
            encode_split: 5,
            layer: 3,
            cache_seed: 7,
            q_rows: 2,
            start_pos: 15,
            q_split: 1,
            kv_split: 0,
            scale: 0.125,
            gain: Gain::MinimumError,
            variant: Some(KernelVariant::Subgroup),
            keys: Data::new(Family::Normal, 1),
            values: Data::new(Family::Uniform, 2),
            queries: Data::new(Family::Normal, 3),
            sequence: None,
        }
    }

    #[test]
    fn a_case_survives_toml() {
        let case = case();
        let text = case.to_toml();
        assert_eq!(Case::from_toml(&text), Ok(case), "{text}");
    }

    #[test]
    fn a_literal_case_holds_the_same_tensors_and_survives_toml() {
        let case = Case {
            rows: 2,
            q_rows: 1,
            start_pos: 1,
            ..case()
        };
        let literal = case.clone().literal();
        assert!(literal.keys.literal.is_some() && literal.queries.literal.is_some());
        assert_eq!(literal.keys(), case.keys());
        assert_eq!(literal.queries(), case.queries());
        assert_eq!(Case::from_toml(&literal.to_toml()), Ok(literal));
        let large = super::Case { rows: 20, ..case };
        assert!(large.literal().keys.literal.is_none());
    }

    #[test]
    fn what_is_no_case_is_refused_with_its_reason() {
        let text = case().to_toml();
        for (from, to, reason) in [
            ("head_dim = 64", "head_dim = 48", "48"),
            ("n_heads = 6", "n_heads = 5", "multiple"),
            ("rows = 17", "rows = 21", "capacity 20"),
            ("start_pos = 15", "start_pos = 4294967295", "start_pos"),
            ("encode_split = 5", "encode_split = 0", "at least 1"),
            ("minimum-error", "most", "gain \"most\""),
            ("layer = 3", "layer = 3\nlair = 2", "lair"),
            ("layer = 3", "layer = -1", "layer"),
        ] {
            assert!(text.contains(from), "{from}");
            let error = Case::from_toml(&text.replacen(from, to, 1))
                .expect_err(to)
                .to_string();
            assert!(error.contains(reason), "{to}: {error}");
        }
    }
}
