//! What can go wrong, with what was found, what was expected and where.

use crate::{BlobError, RestoreRefusal};

/// Every error of the library. Nothing is recorded, written or changed by a call that returns one.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The quantiser is not tabulated for this head dimension.
    #[error("head_dim {found} is not supported: expected 32, 64, 128 or 256")]
    UnsupportedHeadDim {
        /// The head dimension asked for.
        found: u32,
    },
    /// A count that has to be at least 1 is 0.
    #[error("{what} is 0: expected at least 1")]
    ZeroSize {
        /// Name of the count.
        what: &'static str,
    },
    /// A size passes a limit of the adapter, of the device or of the format.
    #[error("{what}: {found} is over {limit_name} = {limit}")]
    TooLarge {
        /// What was measured.
        what: &'static str,
        /// Its size.
        found: u128,
        /// Name of the limit.
        limit_name: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The number of query heads is not a multiple of the number of KV heads.
    #[error("n_heads {n_heads} is not a multiple of the layer's n_kv_heads {n_kv_heads}")]
    HeadsDoNotDivide {
        /// Query heads.
        n_heads: u32,
        /// KV heads of the layer.
        n_kv_heads: u32,
    },
    /// A layer index past the cache's layers.
    #[error("layer {found}: the cache has {n_layers} layers")]
    NoSuchLayer {
        /// The layer asked for.
        found: u32,
        /// Layers of the cache.
        n_layers: u32,
    },
    /// The layer was declared without a cache (0 KV heads).
    #[error("layer {layer} has no cache")]
    LayerWithoutCache {
        /// The layer.
        layer: u32,
    },
    /// A range of rows that does not lie in the cache or in the queries.
    #[error("{what}: rows {start}..{end} do not lie within 0..{limit}")]
    RowsOutOfRange {
        /// Which rows.
        what: &'static str,
        /// First row.
        start: u64,
        /// One past the last row.
        end: u64,
        /// What bounds them.
        limit: u64,
    },
    /// Rows would be written past the end of what the layer holds and leave a hole.
    #[error("layer {layer}: position {position} leaves a hole after the {len} rows it holds")]
    Hole {
        /// The layer.
        layer: u32,
        /// First row to write.
        position: u32,
        /// Rows the layer holds.
        len: u32,
    },
    /// A buffer without a usage that the operation needs.
    #[error("{buffer} buffer has usages {found:?}: expected {expected:?} among them")]
    BufferUsage {
        /// Which buffer.
        buffer: &'static str,
        /// Usages it was created with.
        found: wgpu::BufferUsages,
        /// The usage that is missing.
        expected: wgpu::BufferUsages,
    },
    /// A buffer is too small for the rows asked for.
    #[error("{buffer} buffer has {found} bytes: expected at least {expected} (offset {offset})")]
    BufferTooSmall {
        /// Which buffer.
        buffer: &'static str,
        /// Its size in bytes.
        found: u64,
        /// Bytes needed, the offset included.
        expected: u64,
        /// Byte offset of the first row.
        offset: u64,
    },
    /// A byte offset that is no multiple of 4.
    #[error("{buffer} buffer: offset {found} is not a multiple of 4 bytes")]
    MisalignedOffset {
        /// Which buffer.
        buffer: &'static str,
        /// The offset.
        found: u64,
    },
    /// The same buffer is passed as input and as output of one pass.
    #[error("the {first} and {second} buffers are the same: expected two")]
    AliasedBuffers {
        /// One role.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// Queries of another shape than the layer's.
    #[error("queries: {what} is {found}, the layer's is {expected}")]
    ForeignQueries {
        /// What differs.
        what: &'static str,
        /// The queries' own.
        found: u64,
        /// The layer's.
        expected: u64,
    },
    /// Queries that were rotated for another layer, or for a cache with another seed.
    #[error("the queries were not rotated for layer {layer} of this cache")]
    ForeignRotation {
        /// The layer they should attend to.
        layer: u32,
    },
    /// An object that was made on another device than the cache.
    #[error("{what}: made on another device than the cache")]
    ForeignDevice {
        /// Which object.
        what: &'static str,
    },
    /// A parameter that is not a finite number.
    #[error("{what} is {found}: expected a finite number")]
    NotFinite {
        /// Which parameter.
        what: &'static str,
        /// Its value.
        found: f32,
    },
    /// The caller's slice has the wrong length.
    #[error("{what} has {found} elements: expected {expected}")]
    WrongLength {
        /// Which slice.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length that the shape asks for.
        expected: usize,
    },
    /// Keys cannot be shifted to other positions: they are stored after the rotary embedding.
    #[error(
        "layer {layer}: keys are stored after their rotary embedding and cannot be shifted by {shift}"
    )]
    ShiftUnsupported {
        /// The layer.
        layer: u32,
        /// The shift asked for.
        shift: i64,
    },
    /// Two blobs that are not a pair of keys and values of one shape.
    #[error("the blobs are not a pair: {what} differs")]
    MismatchedBlobs {
        /// What differs.
        what: &'static str,
    },
    /// A snapshot blob is malformed.
    #[error("{0}")]
    Blob(#[from] BlobError),
    /// The restore gate refused the pair of blobs.
    #[error("layer {layer}: restore refused: {reason}")]
    RestoreRefused {
        /// The layer.
        layer: u32,
        /// Why.
        reason: RestoreRefusal,
    },
    /// No adapter answers to the description.
    #[error("no adapter: {0}")]
    NoAdapter(String),
    /// The adapter lacks something the kernels need, or refused to make a device.
    #[error("adapter unusable: {0}")]
    AdapterUnusable(String),
    /// The device is lost or was destroyed. Everything on it is gone.
    #[error("the device is lost: {0}")]
    DeviceLost(String),
    /// A wait for the GPU outlasted its limit. The work may still end later.
    #[error("the GPU did not finish within {0:?}")]
    Timeout(core::time::Duration),
    /// The encoder that was to deliver a result was dropped, or refused by wgpu, before it ran.
    #[error("the commands were dropped before they ran")]
    NotSubmitted,
    /// The device ran out of memory.
    #[error("out of device memory: {0}")]
    OutOfMemory(String),
    /// wgpu refused an object that this crate was about to record: one of the caller's buffers is
    /// destroyed or of another device; otherwise a bug of this crate, reported rather than hidden.
    #[error("wgpu refused a command: {0}")]
    Rejected(String),
}

impl Error {
    /// What wgpu said against an object. Not a `From`, which would be public.
    pub(crate) fn from_wgpu(error: wgpu::Error) -> Self {
        match error {
            wgpu::Error::OutOfMemory { source } => Self::OutOfMemory(source.to_string()),
            other => Self::Rejected(other.to_string()),
        }
    }
}
