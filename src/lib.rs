#![forbid(unsafe_code)]
#![warn(missing_docs)]
//! TurboQuant-compressed KV cache on wgpu.

pub mod blob;
pub mod codebook;
mod error;
pub mod gate;
pub mod half_float;
pub mod layout;
pub mod rotation;

pub use blob::{Blob, BlobError, BlobHeader, BlobWriter};
pub use codebook::{Codebook, HeadDim};
pub use error::Error;
pub use gate::{RestorePlan, RestoreRefusal};
pub use layout::LayerShape;
pub use rotation::{Rotation, Signs};
