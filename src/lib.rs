#![forbid(unsafe_code)]
#![warn(missing_docs)]
//! A KV cache on the GPU in about 3 bits an element.
//!
//! Keys and values of a transformer's attention are compressed as they come, by TurboQuant
//! (arXiv:2504.19874): a randomised Hadamard rotation, a 2-bit quantiser made for what the rotation does to
//! any vector, and for keys one sign an element of what the quantiser left over. Attention reads the compressed
//! form; nothing is ever decompressed to memory. The kernels are WGSL and need no optional feature, so
//! that one source serves every adapter that wgpu has.
//!
//! The engine keeps its device, queue, encoders and its K, V, Q and output buffers. This crate records
//! into its encoders.
//!
//! ```
//! use turboquant_wgpu::{
//!     Attend, Cache, CacheConfig, Error, Gain, Gpu, GpuOptions, HeadDim, KvSplit, Queries, Snapshot,
//! };
//!
//! /// One token through one layer: 32 query heads over 8 KV heads.
//! async fn demo(
//!     device: wgpu::Device,
//!     queue: wgpu::Queue,
//!     [k, v, q, output]: [&wgpu::Buffer; 4],
//! ) -> Result<Snapshot, Error> {
//!     let head_dim = HeadDim::D128;
//!     let gpu = Gpu::new(device, queue, GpuOptions::default())?;
//!     let config = CacheConfig { head_dim, n_kv_heads: vec![8; 16], capacity: 4096, seed: 7 };
//!     let mut cache = Cache::new(&gpu, config).await?;
//!     let mut queries = Queries::new(&gpu, head_dim, 32, 1)?;
//!
//!     let mut encoder = gpu.device().create_command_encoder(&Default::default());
//!     let (layer, rows, position) = (3, 1, 0);
//!     cache.encode(&mut encoder, layer, k.into(), v.into(), rows, position)?;
//!     cache.rotate(&mut encoder, layer, q.into(), rows, &mut queries)?;
//!     let attend = Attend {
//!         rows: 0..rows,
//!         start_pos: position,
//!         split: KvSplit::Automatic,
//!         scale: head_dim.inv_sqrt(),
//!         gain: Gain::Unbiased,
//!     };
//!     cache.attend(&mut encoder, layer, &mut queries, output.into(), &attend)?;
//!     let snapshot = cache.snapshot(&mut encoder, layer)?;
//!     gpu.queue().submit([encoder.finish()]);
//!     snapshot.await
//! }
//! ```
//!
//! # Shapes
//!
//! All f32, dense, the last index fastest; a tensor may begin at any byte offset that is a multiple of 4.
//!
//! | tensor | shape |
//! |---|---|
//! | keys and values of [`Cache::encode`] | rows, n_kv_heads of the layer, head_dim |
//! | queries of [`Cache::rotate`], output of [`Cache::attend`] | rows, n_heads, head_dim |
//!
//! head_dim is 32, 64, 128 or 256. n_heads is a multiple of each layer's n_kv_heads, which may differ
//! from layer to layer and be 0 for a layer without attention.
//!
//! # Memory
//!
//! Bytes on the device for one key and one value vector, reserved for the whole capacity:
//!
//! | head_dim | key | value | both | both in f16 | ratio |
//! |---|---|---|---|---|---|
//! | 32 | 16 | 12 | 28 | 128 | 4.6 |
//! | 64 | 28 | 20 | 48 | 256 | 5.3 |
//! | 128 | 52 | 36 | 88 | 512 | 5.8 |
//! | 256 | 100 | 68 | 168 | 1024 | 6.1 |
//!
//! A [`Queries`] takes 8 · head_dim bytes for each row and head, and scratch for partial results: at most
//! 64 MiB, or what one row needs if that is more.
//!
//! # What the engine does
//!
//! * It passes keys *after* their rotary position embedding. They cannot be moved to other positions
//!   afterwards ([`Cache::shift_positions`]).
//! * It submits what was recorded. Lengths are counted as of recording: an encoder that is dropped leaves them
//!   ahead of the device, until [`Cache::truncate`] takes them back. Encoders may be submitted in
//!   another order than they were recorded in where the passes themselves do not depend on it.
//! * It polls the device, or waits with [`Pending::wait`], or awaits a [`Pending`], which polls by itself.
//! * It keeps encoders and buffers to the device of the [`Gpu`].
//! * It reads [`Cache::counters`] if it wants to know of vectors with a NaN or an infinity in them: they
//!   are stored as zeros, not as an error.
//!
//! # Errors
//!
//! Every call judges its arguments first: one that returns an [`Error`] has recorded nothing and
//! changed nothing. What was found, what was expected and which limit was passed is in the error. Bytes of
//! a snapshot may be hostile; the [`gate`] judges both blobs whole before a byte is written. This crate
//! does not panic. wgpu does where it is given no other way out: if a driver reports the loss of the
//! device during a poll, or if the engine's own error handler does.
//!
//! # Modules
//!
//! Each kernel exists three times under one name: as WGSL, as a plain f32 loop, and as an oracle in the
//! verification harness, which bounds what rounding may do to the result.
//!
//! | kernel ([`shaders`]) | twin ([`twin`]) | what it does |
//! |---|---|---|
//! | `encode_keys` | [`twin::encode_keys`] | a key vector to codes, signs and two norms |
//! | `encode_values` | [`twin::encode_values`] | a value vector to codes and a norm |
//! | `rotate_queries` | [`twin::rotate_queries`] | a query into the bases of codes and signs |
//! | `attention`, `merge_attention` | [`twin::attention()`] | causal attention, in parts, and their sum |
//!
//! [`cache`] records them. [`rotation`], [`codebook`] and [`half_float`] are the arithmetic that all
//! share, [`layout`] the only place where sizes and offsets are computed, [`heads`] the rule of grouped
//! queries, [`blob`] the bytes of a snapshot, [`gate`] the way back in.

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
pub use shaders::KernelVariant;

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
