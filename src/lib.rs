#![forbid(unsafe_code)]
#![warn(missing_docs)]
//! TurboQuant-compressed KV cache on wgpu.

pub mod blob;
pub mod cache;
pub mod codebook;
mod error;
mod gain;
pub mod gate;
mod gpu;
pub mod half_float;
pub mod heads;
pub mod layout;
mod params;
mod pending;
pub mod rotation;
pub mod shaders;
pub mod twin;

pub use blob::{Blob, BlobError, BlobHeader, BlobWriter};
pub use cache::{
    Attend, Cache, CacheConfig, Counters, KvSplit, Queries, Rows, Snapshot, VectorCounts,
};
pub use codebook::{Codebook, HeadDim};
pub use error::Error;
pub use gain::Gain;
pub use gate::{RestorePlan, RestoreRefusal};
pub use gpu::{Gpu, GpuOptions};
pub use layout::LayerShape;
pub use pending::Pending;
pub use rotation::{Rotation, Signs};
