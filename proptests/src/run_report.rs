//! What a run has found, as it is written to JSON.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::adapters::Device;
use crate::probes::Probes;
use crate::regressions::Judgement;
use crate::runner::{Shard, Summary};

/// Everything one run has found.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport {
    /// Version of the program.
    pub tqcheck: &'static str,
    /// The git revision that it was built from, if known.
    pub git_revision: Option<String>,
    /// When the run ended.
    pub date: String,
    /// Seed of the cases.
    pub seed: u64,
    /// Which part of the cases.
    pub shard: Shard,
    /// True if it was stopped before its end: what lacks a result was not run.
    pub interrupted: bool,
    /// The adapters.
    pub adapters: Vec<AdapterReport>,
    /// One for each property and adapter, in the order of the run.
    pub results: Vec<PropertyReport>,
}

/// An adapter and what its probes saw.
#[derive(Clone, Debug, Serialize)]
pub struct AdapterReport {
    /// `backend:adapter`.
    pub adapter: String,
    /// Its driver's name and version.
    pub driver: String,
    /// What the bounds assume of it; none of a run that was stopped.
    pub probes: Option<Probes>,
}

impl AdapterReport {
    /// Of a device, its probes run if they have not been.
    #[must_use]
    pub fn new(device: &Device, interrupted: bool) -> Self {
        Self {
            adapter: device.label.clone(),
            driver: device.driver.clone(),
            probes: (!interrupted).then(|| device.probes().clone()),
        }
    }
}

/// One property on one adapter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PropertyReport {
    /// The property.
    pub property: String,
    /// The adapter's label.
    pub adapter: String,
    /// `holds`, `expected_failure` or `fails`.
    pub verdict: &'static str,
    /// Why it fails, or is expected to.
    pub reason: Option<String>,
    /// Cases drawn.
    pub cases: u64,
    /// Cases that hold.
    pub held: u64,
    /// Cases not checked, by reason.
    pub not_checked: BTreeMap<String, u64>,
    /// Seconds.
    pub seconds: f64,
    /// Cases a second.
    pub rate: f64,
    /// Values compared.
    pub compared: u64,
    /// Discrete values judged.
    pub discrete: u64,
    /// Those of them with more than one right answer.
    pub free: u64,
    /// Largest observed error as a share of its bound.
    pub largest: f64,
    /// RMS error over the f32 twin's, where floats were compared.
    pub drift: Option<f64>,
    /// The shrunk case of a violation, as TOML.
    pub shrunk: Option<String>,
}

impl PropertyReport {
    /// Of a summary and what the known failures make of it.
    #[must_use]
    pub fn new(property: &str, adapter: &str, summary: &Summary, judgement: &Judgement) -> Self {
        let evidence = &summary.evidence;
        let (verdict, reason) = match judgement {
            Judgement::Pass => ("holds", None),
            Judgement::ExpectedFailure(why) => ("expected_failure", Some(why.clone())),
            Judgement::Fail(why) => ("fails", Some(why.clone())),
        };
        Self {
            property: property.to_owned(),
            adapter: adapter.to_owned(),
            verdict,
            reason,
            cases: summary.cases(),
            held: summary.held,
            not_checked: summary.not_checked.clone(),
            seconds: summary.elapsed.as_secs_f64(),
            rate: summary.rate(),
            compared: evidence.compared,
            discrete: evidence.discrete,
            free: evidence.free,
            largest: evidence.largest,
            drift: (evidence.drift.n > 0).then(|| evidence.drift.ratio()),
            shrunk: summary.broken.as_ref().map(|b| b.shrunk.to_toml()),
        }
    }
}
