//! What a run has found, as it is written to JSON.

use serde::Serialize;

use crate::clock::Source;
use crate::job::Kernel;
use crate::stats::Summary;

/// Everything one run has found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Name of the adapter.
    pub adapter: String,
    /// Its backend.
    pub backend: String,
    /// What kind of device it is.
    pub device_type: String,
    /// Its driver and the driver's version.
    pub driver: String,
    /// Versions of what was measured.
    pub versions: Versions,
    /// The git revision that the program was built from, if known.
    pub git_revision: Option<String>,
    /// When it was measured.
    pub date: String,
    /// Which clock the times of the rows come from.
    pub timing: Source,
    /// Why they do not come from the device, if they do not.
    pub timing_note: Option<String>,
    /// From opening the device to the first output of attention, with everything compiled, in nanoseconds.
    pub first_result_ns: f64,
    /// The device's copy speed.
    pub copy: Copy,
    /// One for each kernel and shape.
    pub rows: Vec<Row>,
    /// What was left out.
    pub skipped: Vec<Skipped>,
}

/// Versions of what was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Versions {
    /// Of the library.
    pub turboquant_wgpu: &'static str,
    /// Of the program that measured.
    pub tqcheck: &'static str,
    /// Of wgpu, as required.
    pub wgpu: &'static str,
    /// Of the baseline, if it is built in.
    pub cera: Option<&'static str>,
}

/// The device's copy speed from buffer to buffer.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Copy {
    /// Bytes read and bytes written together.
    pub bytes: u64,
    /// Both, in 10^9 bytes a second.
    pub gb_per_s: f64,
    /// Which clock.
    pub timing: Source,
    /// Times of one copy.
    #[serde(flatten)]
    pub time: Summary,
}

/// Times of one implementation of a job.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Measured {
    /// Which clock `time` was read from.
    pub timing: Source,
    /// By the better clock.
    #[serde(flatten)]
    pub time: Summary,
    /// By the host's, from the submission until the wait returned.
    pub host: Summary,
    /// Sets of inputs that were used in turn.
    pub turns: u32,
}

/// One kernel of the library over one shape.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The kernel.
    pub kernel: Kernel,
    /// Which variant of it.
    pub variant: String,
    /// The shape's name.
    pub shape: String,
    /// Query heads.
    pub n_heads: u32,
    /// KV heads.
    pub n_kv_heads: u32,
    /// Elements of a vector.
    pub head_dim: u32,
    /// Timesteps in the cache.
    pub seq_len: u32,
    /// Rows encoded, rotated or attended.
    pub rows: u32,
    /// Its times.
    #[serde(flatten)]
    pub measured: Measured,
    /// Bytes that have to be read at least.
    pub bytes: u64,
    /// Those bytes over the median time, in 10^9 bytes a second.
    pub gb_per_s: f64,
    /// The time that those bytes take at the copy's speed.
    pub floor_ns: f64,
    /// The median as a multiple of that.
    pub floor_ratio: f64,
    /// Other implementations of the same job.
    pub baselines: Vec<BaselineRow>,
}

/// Another implementation of a row's job.
#[derive(Clone, Debug, Serialize)]
pub struct BaselineRow {
    /// Which.
    pub name: &'static str,
    /// Its times.
    #[serde(flatten)]
    pub measured: Measured,
    /// Its median over the library's: above 1 the library is faster.
    pub ratio: f64,
}

/// Something that was not measured.
#[derive(Clone, Debug, Serialize)]
pub struct Skipped {
    /// The implementation.
    pub implementation: &'static str,
    /// The kernel.
    pub kernel: Kernel,
    /// The shape's name.
    pub shape: String,
    /// Rows of the job.
    pub rows: u32,
    /// Why.
    pub reason: String,
}
