//! Operations on several caches, one after the other: what a case of the property `model` carries.

use serde::{Deserialize, Serialize};

use crate::case::CaseError;

/// Caches, and what is done to them.
///
/// Vectors have the case's head dimension and come from its families; a layer has as many query heads for each
/// KV head as the case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sequence {
    /// The caches, all on one device.
    pub caches: Vec<CacheShape>,
    /// What is done to them.
    #[serde(default)]
    pub operations: Vec<Operation>,
}

/// One cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheShape {
    /// KV heads of each layer; 0 for a layer without a cache.
    pub n_kv_heads: Vec<u32>,
    /// Timesteps that each layer can hold.
    pub capacity: u32,
    /// Seed of its rotations.
    pub seed: u32,
}

/// One operation on a layer. `cache` counts round the caches there are, so that a sequence stays one when shrinking
/// drops a cache. An operation that the library has to refuse is a legal one: the model says that it is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum Operation {
    /// Compresses rows.
    Encode {
        /// Which cache.
        cache: u32,
        /// Which layer.
        layer: u32,
        /// First timestep.
        position: u32,
        /// Timesteps.
        rows: u32,
        /// Added to the seeds of the case's keys and values.
        seed: u32,
        /// What is wrong with the buffers.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fault: Option<EncodeFault>,
    },
    /// Rotates queries and attends them.
    Attend {
        /// Which cache.
        cache: u32,
        /// Which layer.
        layer: u32,
        /// Position of query row 0.
        start_pos: u32,
        /// Query rows.
        rows: u32,
        /// Added to the seed of the case's queries.
        seed: u32,
        /// What is wrong with the call.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fault: Option<AttendFault>,
    },
    /// Shortens a layer.
    Truncate {
        /// Which cache.
        cache: u32,
        /// Which layer.
        layer: u32,
        /// Its new length.
        len: u32,
    },
    /// Asks for a shift of positions.
    Shift {
        /// Which cache.
        cache: u32,
        /// Which layer.
        layer: u32,
        /// By how much.
        by: i32,
    },
    /// Takes a snapshot and keeps it.
    Snapshot {
        /// Which cache.
        cache: u32,
        /// Which layer.
        layer: u32,
    },
    /// Restores a pair of blobs.
    Restore {
        /// Which cache.
        cache: u32,
        /// Which layer.
        layer: u32,
        /// Which blobs.
        blobs: Blobs,
        /// What happens to them on the way.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        damage: Option<Damage>,
    },
    /// Submits what has been recorded and judges it. Else that happens at the end, or when a snapshot is needed.
    Submit,
}

/// What is wrong with an encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EncodeFault {
    /// The values lack one element.
    ShortValues,
    /// The keys begin in the middle of a word.
    MisalignedKeys,
    /// The values cannot be bound.
    UnboundValues,
    /// The keys are the layer's own key buffer.
    OwnBuffer,
}

/// What is wrong with an attend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttendFault {
    /// One row more is attended than was rotated.
    MoreRows,
    /// The queries were last rotated for another cache.
    Foreign,
    /// The scale is a NaN.
    Scale,
    /// The output lacks one element.
    ShortOutput,
    /// The output is the rotated queries.
    OwnOutput,
}

/// Where a pair of blobs comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Blobs {
    /// An earlier snapshot, counted round those there are; of any cache and layer. If there is none, an empty
    /// cache's headers.
    Snapshot(u32),
    /// The CPU twin's, for the layer.
    Twin {
        /// Timesteps.
        rows: u32,
        /// Added to the seeds of the case's keys and values.
        seed: u32,
    },
    /// Zero records of any shape.
    Zeros {
        /// KV heads, at least 1.
        n_kv_heads: u32,
        /// Elements of a vector, a multiple of 8.
        head_dim: u32,
        /// Timesteps.
        rows: u32,
    },
}

/// What happens to a pair of blobs before it is restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Damage {
    /// There are no keys.
    NoKeys,
    /// There are no values.
    NoValues,
    /// There is neither.
    Neither,
    /// Each stands in the other's place.
    Swapped,
    /// The keys lack their last byte.
    ShortKeys,
    /// The values lack their last byte.
    ShortValues,
    /// The values have a byte more.
    LongValues,
    /// The keys' magic is of another version.
    Magic,
    /// The last residual norm is a NaN; nothing if there is none.
    NanResidual,
    /// The last value norm is −0; nothing if there is none.
    NegativeNorm,
    /// The values are zero records of one timestep more.
    OtherLength,
}

impl Sequence {
    /// Checks that it can be run.
    ///
    /// # Errors
    /// What is out of range.
    pub fn check(&self) -> Result<(), CaseError> {
        let require = |field, found: u64, range: std::ops::RangeInclusive<u64>| {
            if range.contains(&found) {
                return Ok(());
            }
            Err(CaseError::Range {
                field,
                found,
                expected: format!("{} to {}", range.start(), range.end()),
            })
        };
        require("caches", self.caches.len() as u64, 1..=16)?;
        require("operations", self.operations.len() as u64, 0..=10_000)?;
        for cache in &self.caches {
            require("layers", cache.n_kv_heads.len() as u64, 1..=64)?;
            for &n in &cache.n_kv_heads {
                require("n_kv_heads", u64::from(n), 0..=64)?;
            }
            require("capacity", u64::from(cache.capacity), 1..=4096)?;
        }
        for operation in &self.operations {
            match *operation {
                Operation::Restore {
                    blobs: Blobs::Twin { rows, .. },
                    ..
                } => require("rows", u64::from(rows), 0..=8192)?,
                Operation::Restore {
                    blobs:
                        Blobs::Zeros {
                            n_kv_heads,
                            head_dim,
                            rows,
                        },
                    ..
                } => {
                    require("n_kv_heads", u64::from(n_kv_heads), 1..=256)?;
                    require("head_dim / 8", u64::from(head_dim) / 8, 1..=128)?;
                    require("head_dim mod 8", u64::from(head_dim) % 8, 0..=0)?;
                    require("rows", u64::from(rows), 0..=8192)?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}
