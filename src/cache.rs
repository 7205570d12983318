//! The compressed KV cache on a device.

use std::num::NonZeroU32;
use std::ops::Range;

use bytemuck::bytes_of;

use crate::blob::{BlobHeader, BlobWriter};
use crate::gpu::check_limit;
use crate::heads::query_heads_per_kv_head;
use crate::layout::{DeviceLayout, DeviceRegion, Kind, LayerShape};
use crate::params::{AttentionParams, EncodeParams, RotateParams};
use crate::{Error, Gain, Gpu, HeadDim, Pending, Rotation, gate};

/// Split lengths that are multiples of this leave no lane of `attention` idle.
const TILE: u32 = 64;
/// The automatic split length is at least this: shorter splits cost more in merging than they
/// bring in parallel work.
const SHORTEST_AUTOMATIC_SPLIT: u32 = 256;
/// Workgroups that automatic splitting aims at, enough to fill a large GPU several times.
const AUTOMATIC_WORKGROUPS: u64 = 2048;
/// Partial results of one dispatch take at most this many bytes, if one row's fit; more rows than that are
/// cut into several dispatches.
const PARTIALS_BYTES: u64 = 64 << 20;

/// Usages of every buffer that a caller may inspect.
const CACHE_USAGES: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE
    .union(wgpu::BufferUsages::COPY_SRC)
    .union(wgpu::BufferUsages::COPY_DST);
/// Shaders index words with a u32: no binding may be longer, whatever the device allows.
const ADDRESSABLE_BYTES: u64 = 4 << 32;

/// Words of a layer's counter buffer.
const COUNTERS: usize = 8;
const KEY_COUNTERS: u32 = 0;
const VALUE_COUNTERS: u32 = 3;
const QUERY_COUNTER: u32 = 6;
/// The last word of the counter buffer, copied to the end of everything that is read back. wgpu maps a
/// staging buffer even if it has refused the commands that were to fill it, and would deliver zeros.
const DELIVERED: [u8; 4] = *b"done";
const DELIVERED_OFFSET: u64 = 4 * (COUNTERS as u64 - 1);

/// Shape of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Elements of a key, value or query vector.
    pub head_dim: HeadDim,
    /// KV heads of each layer; 0 for a layer without a cache (a convolution layer, say).
    pub n_kv_heads: Vec<u32>,
    /// Timesteps that each layer can hold.
    pub capacity: u32,
    /// Seed of the rotations. A snapshot reads right only in a cache with the same seed.
    pub seed: u64,
}

/// Rows in a caller's buffer: where a [rows, heads, head_dim] f32 tensor begins.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The buffer, with usage `STORAGE`.
    pub buffer: &'a wgpu::Buffer,
    /// Byte offset of the first row, a multiple of 4.
    pub offset: u64,
}

impl<'a> From<&'a wgpu::Buffer> for Rows<'a> {
    fn from(buffer: &'a wgpu::Buffer) -> Self {
        Self { buffer, offset: 0 }
    }
}

/// How the sequence is cut for attention. Every choice gives the same result but for rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvSplit {
    /// Chosen from the number of query rows and the sequence length.
    #[default]
    Automatic,
    /// Parts of this many timesteps.
    Len(NonZeroU32),
}

/// What an attention pass computes.
#[derive(Clone, Debug, PartialEq)]
pub struct Attend {
    /// Query rows to attend, among those last rotated. Row j's output goes to row j.
    pub rows: Range<u32>,
    /// Absolute position of query row 0: row j sees timesteps ≤ start_pos + j.
    pub start_pos: u32,
    /// How the sequence is cut.
    pub split: KvSplit,
    /// Factor of every score, 1/√head_dim as a rule.
    pub scale: f32,
    /// Factor of the residual term.
    pub gain: Gain,
}

/// Vectors of one kind that were not encoded as they were. Counts wrap at 2^32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VectorCounts {
    /// Became the zero record for a NaN or an infinity.
    pub non_finite: u32,
    /// Became the zero record for a norm below 1e-12.
    pub vanishing: u32,
    /// Norm past the largest f16, stored as 65504.
    pub saturated: u32,
}

/// What a layer has counted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Key vectors.
    pub keys: VectorCounts,
    /// Value vectors.
    pub values: VectorCounts,
    /// Query vectors that became the zero query for a NaN or an infinity.
    pub non_finite_queries: u32,
}

/// Both blobs of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// A `TQK1` blob.
    pub keys: Vec<u8>,
    /// A `TQV1` blob.
    pub values: Vec<u8>,
}

/// Rotated queries and the scratch of their attention, for up to a fixed number of rows.
///
/// One object serves any number of layers one after the other. Passes that are recorded into different
/// encoders and share one object run in the order of submission, like with every buffer.
#[derive(Debug)]
pub struct Queries {
    gpu: Gpu,
    head_dim: HeadDim,
    n_heads: u32,
    capacity: u32,
    rotated: wgpu::Buffer,
    partials: Option<wgpu::Buffer>,
    /// Rows last rotated, and by which rotation.
    held: Option<(u32, Rotation)>,
}

impl Queries {
    /// Room for `rows` rows of `n_heads` query heads.
    ///
    /// # Errors
    /// [`Error::ZeroSize`], [`Error::TooLarge`], [`Error::OutOfMemory`], [`Error::DeviceLost`].
    pub fn new(gpu: &Gpu, head_dim: HeadDim, n_heads: u32, rows: u32) -> Result<Self, Error> {
        for (what, n) in [("n_heads", n_heads), ("rows", rows)] {
            if n == 0 {
                return Err(Error::ZeroSize { what });
            }
        }
        let bytes = (u64::from(rows) * u64::from(n_heads))
            .saturating_mul(8 * u64::from(head_dim.get_u32()));
        let rotated = gpu.buffer("rotated queries", bytes, CACHE_USAGES)?;
        Ok(Self {
            gpu: gpu.clone(),
            head_dim,
            n_heads,
            capacity: rows,
            rotated,
            partials: None,
            held: None,
        })
    }

    /// Query heads of a row.
    #[must_use]
    pub fn n_heads(&self) -> u32 {
        self.n_heads
    }

    /// Rows there is room for.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The rotated queries, [rows, n_heads, 2, head_dim] f32: rotated by `polar`, then by `jl` as
    /// well. For inspection (usages `STORAGE`, `COPY_SRC`, `COPY_DST`).
    #[must_use]
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.rotated
    }

    /// The scratch for partial results, made or grown to `bytes`.
    fn partials(&mut self, bytes: u64) -> Result<&wgpu::Buffer, Error> {
        let enough = |b: &wgpu::Buffer| b.size() >= bytes;
        if !self.partials.as_ref().is_some_and(enough) {
            // Passes already recorded keep the old buffer alive.
            self.partials = Some(self.gpu.buffer(
                "partial attention results",
                bytes,
                wgpu::BufferUsages::STORAGE,
            )?);
        }
        self.partials
            .as_ref()
            .ok_or_else(|| Error::Rejected("no partials".to_owned()))
    }
}

/// One layer's buffers.
#[derive(Debug)]
struct Layer {
    rotation: Rotation,
    keys: Store,
    values: Store,
    counters: wgpu::Buffer,
    len: u32,
}

#[derive(Debug)]
struct Store {
    layout: DeviceLayout,
    buffer: wgpu::Buffer,
}

impl Store {
    fn new(gpu: &Gpu, kind: Kind, shape: LayerShape, capacity: u32) -> Result<Self, Error> {
        let layout = DeviceLayout::new(kind, shape, capacity)?;
        let buffer = gpu.buffer(cache_name(kind), layout.bytes(), CACHE_USAGES)?;
        Ok(Self { layout, buffer })
    }
}

/// A compressed KV cache: a key and a value buffer for each attention layer.
///
/// Operations record into the caller's encoder and take effect when that is submitted; lengths are
/// kept on the host as of recording. Nothing is recorded by a call that returns an error.
/// The encoder has to be of the cache's device: wgpu has no way to ask, and refuses a foreign one
/// when it is finished.
///
/// Keys are expected after their rotary position embedding.
#[derive(Debug)]
pub struct Cache {
    gpu: Gpu,
    config: CacheConfig,
    layers: Vec<Option<Layer>>,
}

impl Cache {
    /// Allocates the buffers of every layer and compiles the kernels if that has not been done.
    ///
    /// It is async for the sake of browsers, where a kernel's verdict takes a turn of the event loop;
    /// on native targets it never waits.
    ///
    /// # Errors
    /// [`Error::TooLarge`] naming the limit, before anything is allocated; [`Error::ZeroSize`] for no
    /// capacity; [`Error::OutOfMemory`]; [`Error::Rejected`] if a kernel does not compile; a lost device.
    pub async fn new(gpu: &Gpu, config: CacheConfig) -> Result<Self, Error> {
        // All sizes are checked before the first allocation.
        if config.capacity == 0 {
            return Err(Error::ZeroSize { what: "capacity" });
        }
        for &n_kv_heads in config.n_kv_heads.iter().filter(|&&n| n > 0) {
            let shape = LayerShape {
                head_dim: config.head_dim,
                n_kv_heads,
            };
            for kind in [Kind::Keys, Kind::Values] {
                let bytes = DeviceLayout::new(kind, shape, config.capacity)?.bytes();
                gpu.check_buffer_size(cache_name(kind), bytes, CACHE_USAGES)?;
            }
        }
        u32::try_from(config.n_kv_heads.len()).map_err(|_| Error::TooLarge {
            what: "layers",
            found: config.n_kv_heads.len() as u128,
            limit_name: "u32",
            limit: u64::from(u32::MAX),
        })?;
        gpu.prepare(config.head_dim).await?;
        let layers = config
            .n_kv_heads
            .iter()
            .enumerate()
            .map(|(index, &n_kv_heads)| {
                if n_kv_heads == 0 {
                    return Ok(None);
                }
                let shape = LayerShape {
                    head_dim: config.head_dim,
                    n_kv_heads,
                };
                Ok(Some(Layer {
                    rotation: Rotation::new(config.head_dim, config.seed, index as u32),
                    keys: Store::new(gpu, Kind::Keys, shape, config.capacity)?,
                    values: Store::new(gpu, Kind::Values, shape, config.capacity)?,
                    counters: gpu.buffer_filled(
                        "counters",
                        DELIVERED_OFFSET + 4,
                        CACHE_USAGES,
                        |words| {
                            words[DELIVERED_OFFSET as usize..].copy_from_slice(&DELIVERED);
                            Ok(())
                        },
                    )?,
                    len: 0,
                }))
            })
            .collect::<Result<_, Error>>()?;
        Ok(Self {
            gpu: gpu.clone(),
            config,
            layers,
        })
    }

    /// What the cache was made with.
    #[must_use]
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Timesteps that a layer holds.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::LayerWithoutCache`].
    pub fn len(&self, layer: u32) -> Result<u32, Error> {
        Ok(self.layer(layer)?.len)
    }

    /// True if a layer holds nothing.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::LayerWithoutCache`].
    pub fn is_empty(&self, layer: u32) -> Result<bool, Error> {
        Ok(self.len(layer)? == 0)
    }

    /// The rotation of a layer.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::LayerWithoutCache`].
    pub fn rotation(&self, layer: u32) -> Result<&Rotation, Error> {
        Ok(&self.layer(layer)?.rotation)
    }

    /// The shape of a layer.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::LayerWithoutCache`].
    pub fn shape(&self, layer: u32) -> Result<LayerShape, Error> {
        Ok(self.layer(layer)?.keys.layout.shape())
    }

    /// Layout of one of a layer's buffers.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::LayerWithoutCache`].
    pub fn layout(&self, layer: u32, kind: Kind) -> Result<DeviceLayout, Error> {
        Ok(self.layer(layer)?.store(kind).layout)
    }

    /// One of a layer's buffers, for inspection (usages `STORAGE`, `COPY_SRC`, `COPY_DST`).
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::LayerWithoutCache`].
    pub fn buffer(&self, layer: u32, kind: Kind) -> Result<&wgpu::Buffer, Error> {
        Ok(&self.layer(layer)?.store(kind).buffer)
    }

    /// Bytes of all device buffers of the cache, counters aside.
    #[must_use]
    pub fn device_bytes(&self) -> u64 {
        self.layers
            .iter()
            .flatten()
            .map(|l| l.keys.layout.bytes() + l.values.layout.bytes())
            .sum()
    }

    fn layer(&self, layer: u32) -> Result<&Layer, Error> {
        match self.layers.get(layer as usize) {
            Some(Some(found)) => Ok(found),
            Some(None) => Err(Error::LayerWithoutCache { layer }),
            None => Err(self.no_such_layer(layer)),
        }
    }

    fn layer_mut(&mut self, layer: u32) -> Result<&mut Layer, Error> {
        let error = self.no_such_layer(layer);
        match self.layers.get_mut(layer as usize) {
            Some(Some(found)) => Ok(found),
            Some(None) => Err(Error::LayerWithoutCache { layer }),
            None => Err(error),
        }
    }

    fn no_such_layer(&self, layer: u32) -> Error {
        Error::NoSuchLayer {
            found: layer,
            n_layers: self.layers.len() as u32,
        }
    }

    /// Compresses `rows` rows of keys and values into the layer, from timestep `position` on.
    ///
    /// `keys` and `values` are [rows, n_kv_heads, head_dim] f32. Rows that the layer already holds are
    /// overwritten; the layer then holds at least `position + rows`.
    ///
    /// # Errors
    /// No such layer, or one without a cache; rows past the capacity; a position past the
    /// layer's length; buffers without usage `STORAGE`, too small, or misaligned; the cache's own
    /// buffers as a source; a lost device.
    pub fn encode(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        layer: u32,
        keys: Rows<'_>,
        values: Rows<'_>,
        rows: u32,
        position: u32,
    ) -> Result<(), Error> {
        let found = self.layer(layer)?;
        let shape = found.keys.layout.shape();
        let end = u64::from(position) + u64::from(rows);
        if end > u64::from(self.config.capacity) {
            return Err(Error::RowsOutOfRange {
                what: "encode: the cache's capacity",
                start: u64::from(position),
                end,
                limit: u64::from(self.config.capacity),
            });
        }
        if position > found.len {
            return Err(Error::Hole {
                layer,
                position,
                len: found.len,
            });
        }
        if rows == 0 {
            return Ok(());
        }
        let row_bytes = 4 * u64::from(shape.n_kv_heads) * u64::from(shape.head_dim.get_u32());
        let mut dispatches = Vec::new();
        for (kind, source) in [(Kind::Keys, keys), (Kind::Values, values)] {
            let name = match kind {
                Kind::Keys => "keys",
                Kind::Values => "values",
            };
            self.check_not_own(name, source.buffer)?;
            check_rows(name, source, u64::from(rows) * row_bytes)?;
            for chunk in chunks(&self.gpu, "a row of the source", 0..rows, row_bytes)? {
                dispatches
                    .push(self.encode_dispatch(found, kind, source, row_bytes, chunk, position)?);
            }
        }
        record(encoder, &dispatches);
        let layer = self.layer_mut(layer)?;
        // `end` is at most the capacity, a u32.
        layer.len = layer.len.max(end as u32);
        Ok(())
    }

    fn encode_dispatch(
        &self,
        layer: &Layer,
        kind: Kind,
        source: Rows<'_>,
        row_bytes: u64,
        chunk: Range<u32>,
        position: u32,
    ) -> Result<Dispatch<'_>, Error> {
        let store = layer.store(kind);
        let layout = &store.layout;
        let shape = layout.shape();
        let rows = chunk.end - chunk.start;
        let (source, source_start) = self.bind(
            Rows {
                offset: source.offset + u64::from(chunk.start) * row_bytes,
                ..source
            },
            u64::from(rows) * row_bytes,
        );
        let pipelines = self.gpu.pipelines(shape.head_dim)?;
        let (pipeline, counters_start) = match kind {
            Kind::Keys => (&pipelines.encode_keys, KEY_COUNTERS),
            Kind::Values => (&pipelines.encode_values, VALUE_COUNTERS),
        };
        let params = EncodeParams {
            rows,
            n_kv_heads: shape.n_kv_heads,
            position: position + chunk.start,
            capacity: layout.capacity(),
            source_start,
            signs_start: layout.region_start(DeviceRegion::Signs),
            norms_start: layout.region_start(DeviceRegion::Norms),
            counters_start,
            polar: layer.rotation.polar.words(),
            jl: layer.rotation.jl.words(),
        };
        let vectors = u64::from(rows) * u64::from(shape.n_kv_heads);
        self.dispatch(
            pipeline,
            bytes_of(&params),
            &[
                source,
                store.buffer.as_entire_buffer_binding(),
                layer.counters.as_entire_buffer_binding(),
            ],
            vectors.div_ceil(vectors_per_workgroup(shape.head_dim)),
        )
    }

    /// Rotates `rows` query rows for this layer into `queries`.
    ///
    /// `source` is [rows, n_heads, head_dim] f32.
    ///
    /// # Errors
    /// No such layer, or one without a cache; more rows than `queries` has room for; another head
    /// dimension; a buffer without usage `STORAGE`, too small, or misaligned; a lost device.
    pub fn rotate(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        layer: u32,
        source: Rows<'_>,
        rows: u32,
        queries: &mut Queries,
    ) -> Result<(), Error> {
        let found = self.layer(layer)?;
        let head_dim = self.config.head_dim;
        self.check_queries(queries, found)?;
        if rows > queries.capacity {
            return Err(Error::RowsOutOfRange {
                what: "rotate: the room in the queries",
                start: 0,
                end: u64::from(rows),
                limit: u64::from(queries.capacity),
            });
        }
        let row_bytes = 4 * u64::from(queries.n_heads) * u64::from(head_dim.get_u32());
        if rows > 0 {
            check_distinct(
                "queries",
                source.buffer,
                "rotated queries",
                &queries.rotated,
            )?;
            self.check_not_own("queries", source.buffer)?;
            check_rows("queries", source, u64::from(rows) * row_bytes)?;
            let mut dispatches = Vec::new();
            for chunk in chunks(&self.gpu, "a row of the queries", 0..rows, 2 * row_bytes)? {
                let n = u64::from(chunk.end - chunk.start);
                let (source, source_start) = self.bind(
                    Rows {
                        offset: source.offset + u64::from(chunk.start) * row_bytes,
                        ..source
                    },
                    n * row_bytes,
                );
                let (rotated, rotated_start) = self.bind(
                    Rows {
                        buffer: &queries.rotated,
                        offset: u64::from(chunk.start) * 2 * row_bytes,
                    },
                    n * 2 * row_bytes,
                );
                let n_vectors = n * u64::from(queries.n_heads);
                let params = RotateParams {
                    n_vectors: n_vectors as u32,
                    source_start,
                    rotated_start,
                    counter: QUERY_COUNTER,
                    polar: found.rotation.polar.words(),
                    jl: found.rotation.jl.words(),
                };
                dispatches.push(self.dispatch(
                    &self.gpu.pipelines(head_dim)?.rotate_queries,
                    bytes_of(&params),
                    &[source, rotated, found.counters.as_entire_buffer_binding()],
                    n_vectors.div_ceil(vectors_per_workgroup(head_dim)),
                )?);
            }
            record(encoder, &dispatches);
        }
        queries.held = Some((rows, found.rotation));
        Ok(())
    }

    /// Attends rows of rotated queries to the layer and writes [rows, n_heads, head_dim] f32 to
    /// `output`, row j to row j.
    ///
    /// # Errors
    /// No such layer, or one without a cache; queries that were not rotated for this layer, or
    /// fewer rows of them; positions past what the layer holds; heads that do not divide; a scale
    /// that is not finite; an output without usage `STORAGE`, too small, misaligned, or one of
    /// the inputs; a lost device.
    pub fn attend(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        layer: u32,
        queries: &mut Queries,
        output: Rows<'_>,
        attend: &Attend,
    ) -> Result<(), Error> {
        let found = self.layer(layer)?;
        let shape = found.keys.layout.shape();
        let head_dim = shape.head_dim;
        self.check_queries(queries, found)?;
        let Range { start, end } = attend.rows.clone();
        let held = match &queries.held {
            Some((rows, rotation)) if *rotation == found.rotation => *rows,
            Some(_) => return Err(Error::ForeignRotation { layer }),
            None => 0,
        };
        if start > end || end > held {
            return Err(Error::RowsOutOfRange {
                what: "attend: the rotated queries",
                start: u64::from(start),
                end: u64::from(end),
                limit: u64::from(held),
            });
        }
        if !attend.scale.is_finite() {
            return Err(Error::NotFinite {
                what: "scale",
                found: attend.scale,
            });
        }
        if start == end {
            return Ok(());
        }
        let visible = u64::from(attend.start_pos) + u64::from(end);
        if visible > u64::from(found.len) {
            return Err(Error::RowsOutOfRange {
                what: "attend: the timesteps that the layer holds",
                start: u64::from(attend.start_pos) + u64::from(start),
                end: visible,
                limit: u64::from(found.len),
            });
        }
        check_distinct("output", output.buffer, "rotated queries", &queries.rotated)?;
        self.check_not_own("output", output.buffer)?;
        let row_bytes = 4 * u64::from(queries.n_heads) * u64::from(head_dim.get_u32());
        check_rows("output", output, u64::from(end) * row_bytes)?;

        // `visible` is at most the length, a u32.
        let visible = visible as u32;
        let group_heads = u64::from(queries.n_heads / shape.n_kv_heads);
        let pipelines = self.gpu.pipelines(head_dim)?;
        let attention = pipelines.attention(u64::from(end - start) * group_heads);
        let blocks = |rows: u64| {
            (rows * group_heads).div_ceil(attention.block) * u64::from(shape.n_kv_heads)
        };
        let split_len = match attend.split {
            KvSplit::Len(len) => len.get(),
            KvSplit::Automatic => automatic_split_len(blocks(u64::from(end - start)), visible),
        };
        let n_splits = visible.div_ceil(split_len);
        let row_parts = u64::from(queries.n_heads) * u64::from(n_splits);
        // An accumulator of head_dim, a maximum and a sum.
        let row_partials = row_parts.saturating_mul((u64::from(head_dim.get_u32()) + 2) * 4);
        let limits = self.gpu.limits();
        let most = limits
            .max_storage_buffer_binding_size
            .min(limits.max_buffer_size)
            .min(ADDRESSABLE_BYTES);
        check_limit(
            "partial results of one row (n_heads × KV splits × (head_dim + 2) × 4 bytes)",
            row_partials,
            "max_storage_buffer_binding_size",
            most,
        )?;
        let rows_at_once = (PARTIALS_BYTES.min(most) / row_partials).max(1);
        let rows_at_once = rows_at_once.min(u64::from(end - start)) as u32;
        let partials = queries
            .partials(u64::from(rows_at_once) * row_partials)?
            .clone();

        let mut dispatches = Vec::new();
        let row_bytes_bound = row_bytes * 2;
        for limit_chunk in chunks(
            &self.gpu,
            "a row of the queries",
            start..end,
            row_bytes_bound,
        )? {
            let mut first = limit_chunk.start;
            while first < limit_chunk.end {
                let rows = rows_at_once.min(limit_chunk.end - first);
                let n = u64::from(rows);
                let (source, queries_start) = self.bind(
                    Rows {
                        buffer: &queries.rotated,
                        offset: u64::from(first) * 2 * row_bytes,
                    },
                    n * 2 * row_bytes,
                );
                let (destination, destination_start) = self.bind(
                    Rows {
                        offset: output.offset + u64::from(first) * row_bytes,
                        ..output
                    },
                    n * row_bytes,
                );
                let params = AttentionParams {
                    rows,
                    row_base: first,
                    start_pos: attend.start_pos,
                    n_heads: queries.n_heads,
                    n_kv_heads: shape.n_kv_heads,
                    capacity: self.config.capacity,
                    split_len,
                    n_splits,
                    key_signs_start: found.keys.layout.region_start(DeviceRegion::Signs),
                    key_norms_start: found.keys.layout.region_start(DeviceRegion::Norms),
                    value_norms_start: found.values.layout.region_start(DeviceRegion::Norms),
                    queries_start: queries_start / 4,
                    destination_start,
                    scale: attend.scale,
                    gain: attend.gain.factor(head_dim),
                    padding: 0,
                    polar: found.rotation.polar.words(),
                };
                dispatches.push(self.dispatch(
                    &attention.pipeline,
                    bytes_of(&params),
                    &[
                        found.keys.buffer.as_entire_buffer_binding(),
                        found.values.buffer.as_entire_buffer_binding(),
                        source,
                        partials.as_entire_buffer_binding(),
                    ],
                    blocks(n) * u64::from(n_splits),
                )?);
                dispatches.push(self.dispatch(
                    &pipelines.merge_attention,
                    bytes_of(&params),
                    &[partials.as_entire_buffer_binding(), destination],
                    n * u64::from(queries.n_heads),
                )?);
                first += rows;
            }
        }
        record(encoder, &dispatches);
        Ok(())
    }

    /// Shortens a layer to `len` timesteps. What lay behind is never read again.
    ///
    /// # Errors
    /// No such layer, or one without a cache; a length past what the layer holds.
    pub fn truncate(&mut self, layer: u32, len: u32) -> Result<(), Error> {
        let found = self.layer_mut(layer)?;
        if len > found.len {
            return Err(Error::RowsOutOfRange {
                what: "truncate: the timesteps that the layer holds",
                start: 0,
                end: u64::from(len),
                limit: u64::from(found.len),
            });
        }
        found.len = len;
        Ok(())
    }

    /// Moves a layer's keys to other positions: always refused, unless by 0, since keys are stored after
    /// their rotary embedding.
    ///
    /// # Errors
    /// [`Error::ShiftUnsupported`]; no such layer, or one without a cache.
    pub fn shift_positions(&self, layer: u32, shift: i64) -> Result<(), Error> {
        self.layer(layer)?;
        if shift == 0 {
            Ok(())
        } else {
            Err(Error::ShiftUnsupported { layer, shift })
        }
    }

    /// Copies what a layer holds into a pair of blobs.
    ///
    /// Recorded into `encoder`, so it sees what that encoder and everything submitted before it have
    /// written. The result comes once the encoder is submitted and has run.
    ///
    /// # Errors
    /// No such layer, or one without a cache; [`Error::TooLarge`] if what the layer holds, keys and values
    /// together, passes the device's `max_buffer_size`; [`Error::OutOfMemory`]; a lost device.
    pub fn snapshot(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        layer: u32,
    ) -> Result<Pending<Snapshot>, Error> {
        let found = self.layer(layer)?;
        let seq_len = found.len;
        let stores = [&found.keys, &found.values];
        let shape = found.keys.layout.shape();
        let record_words: u64 = stores
            .iter()
            .flat_map(|s| s.layout.kind().device_regions())
            .map(|r| u64::from(r.record_words(shape.head_dim)))
            .sum();
        let bytes = 4 * record_words * u64::from(shape.n_kv_heads) * u64::from(seq_len);
        let staging = if bytes == 0 {
            None
        } else {
            let staging = self.gpu.buffer(
                "snapshot",
                bytes + 4,
                wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            )?;
            let mut at = 0;
            for store in stores {
                for &region in store.layout.kind().device_regions() {
                    for head in 0..shape.n_kv_heads {
                        let from = store.layout.head_bytes(region, head, seq_len);
                        let len = from.end - from.start;
                        encoder.copy_buffer_to_buffer(&store.buffer, from.start, &staging, at, len);
                        at += len;
                    }
                }
            }
            encoder.copy_buffer_to_buffer(&found.counters, DELIVERED_OFFSET, &staging, at, 4);
            Some(staging)
        };
        Ok(Pending::record(&self.gpu, encoder, staging, move |bytes| {
            let mut rest = if bytes.is_empty() {
                bytes
            } else {
                delivered(bytes)?
            };
            Ok(Snapshot {
                keys: to_blob(Kind::Keys, shape, seq_len, &mut rest)?,
                values: to_blob(Kind::Values, shape, seq_len, &mut rest)?,
            })
        }))
    }

    /// Replaces what a layer holds with a pair of blobs and returns their length.
    ///
    /// The gate ([`gate::plan_for`]) judges both blobs before anything is recorded.
    /// Timesteps from the new length on keep their old bytes and are never read.
    ///
    /// # Errors
    /// [`Error::RestoreRefused`] with the gate's reason; no such layer; [`Error::OutOfMemory`]; a
    /// lost device. The layer is then as it was.
    pub fn restore(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        layer: u32,
        keys: &[u8],
        values: &[u8],
    ) -> Result<u32, Error> {
        let seq_len = self.restore_all(encoder, &[(layer, keys, values)])?;
        Ok(seq_len.first().copied().unwrap_or_default())
    }

    /// [`Cache::restore`] for several layers, each with its keys and values: all of them or none.
    ///
    /// # Errors
    /// Those of [`Cache::restore`], for the first layer that is refused. Every layer is then as it
    /// was.
    pub fn restore_layers(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        layers: &[(u32, &[u8], &[u8])],
    ) -> Result<(), Error> {
        self.restore_all(encoder, layers).map(|_| ())
    }

    fn restore_all(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        layers: &[(u32, &[u8], &[u8])],
    ) -> Result<Vec<u32>, Error> {
        let mut plans = Vec::new();
        for &(layer, keys, values) in layers {
            let shape = match self.layers.get(layer as usize) {
                None => return Err(self.no_such_layer(layer)),
                Some(found) => found.as_ref().map(|l| l.keys.layout.shape()),
            };
            let plan = gate::plan_for(shape, self.config.capacity, keys, values)
                .map_err(|reason| Error::RestoreRefused { layer, reason })?;
            plans.push((layer, plan));
        }
        // All staging buffers are made before the first copy is recorded.
        let mut staged = Vec::new();
        for (layer, plan) in &plans {
            let found = self.layer(*layer)?;
            for store in [&found.keys, &found.values] {
                let kind = store.layout.kind();
                let bytes: u64 = plan.writes(kind).map(|w| w.len).sum();
                if bytes == 0 {
                    continue;
                }
                let staging = self.gpu.buffer_filled(
                    "restore",
                    bytes,
                    wgpu::BufferUsages::COPY_SRC,
                    |mut out| {
                        for write in plan.writes(kind) {
                            let (part, rest) = out.split_at_mut(write.len as usize);
                            write.copy_into(part)?;
                            out = rest;
                        }
                        Ok(())
                    },
                )?;
                staged.push((plan, store, staging));
            }
        }
        for (plan, store, staging) in &staged {
            let mut at = 0;
            for write in plan.writes(store.layout.kind()) {
                encoder.copy_buffer_to_buffer(staging, at, &store.buffer, write.offset, write.len);
                at += write.len;
            }
        }
        let mut lengths = Vec::new();
        for (layer, plan) in plans {
            self.layer_mut(layer)?.len = plan.seq_len();
            lengths.push(plan.seq_len());
        }
        Ok(lengths)
    }

    /// Reads what a layer has counted.
    ///
    /// # Errors
    /// No such layer, or one without a cache; a lost device.
    pub fn counters(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        layer: u32,
    ) -> Result<Pending<Counters>, Error> {
        let found = self.layer(layer)?;
        let bytes = found.counters.size();
        let staging = self.gpu.buffer(
            "counters readback",
            bytes,
            wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        )?;
        encoder.copy_buffer_to_buffer(&found.counters, 0, &staging, 0, bytes);
        Ok(Pending::record(
            &self.gpu,
            encoder,
            Some(staging),
            |bytes| {
                let bytes = delivered(bytes)?;
                let word = |i: u32| {
                    let at = 4 * i as usize;
                    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
                };
                let vectors = |first: u32| VectorCounts {
                    non_finite: word(first),
                    vanishing: word(first + 1),
                    saturated: word(first + 2),
                };
                Ok(Counters {
                    keys: vectors(KEY_COUNTERS),
                    values: vectors(VALUE_COUNTERS),
                    non_finite_queries: word(QUERY_COUNTER),
                })
            },
        ))
    }

    /// Refuses a caller's buffer that is one of the cache's own, of whatever layer: as an output it
    /// would overwrite what is stored there.
    fn check_not_own(&self, name: &'static str, buffer: &wgpu::Buffer) -> Result<(), Error> {
        for layer in self.layers.iter().flatten() {
            for kind in [Kind::Keys, Kind::Values] {
                check_distinct(name, buffer, cache_name(kind), &layer.store(kind).buffer)?;
            }
        }
        Ok(())
    }

    /// Checks that queries are of this cache's device and of the layer's shape.
    fn check_queries(&self, queries: &Queries, layer: &Layer) -> Result<(), Error> {
        if queries.gpu.device() != self.gpu.device() {
            return Err(Error::ForeignDevice { what: "queries" });
        }
        let shape = layer.keys.layout.shape();
        if queries.head_dim != shape.head_dim {
            return Err(Error::ForeignQueries {
                what: "head_dim",
                found: u64::from(queries.head_dim.get_u32()),
                expected: u64::from(shape.head_dim.get_u32()),
            });
        }
        query_heads_per_kv_head(queries.n_heads, shape.n_kv_heads)?;
        Ok(())
    }

    /// A binding of `bytes` bytes from `rows` on. Binding offsets have a coarse alignment: the binding begins
    /// at the last multiple before, and the rest, in elements, goes to the kernel.
    fn bind<'a>(&self, rows: Rows<'a>, bytes: u64) -> (wgpu::BufferBinding<'a>, u32) {
        let alignment = u64::from(self.gpu.limits().min_storage_buffer_offset_alignment);
        let rest = rows.offset % alignment;
        let binding = wgpu::BufferBinding {
            buffer: rows.buffer,
            offset: rows.offset - rest,
            size: std::num::NonZeroU64::new(rest + bytes),
        };
        (binding, (rest / 4) as u32)
    }

    /// Makes one dispatch ready: its own parameter buffer, so that no other pass can overwrite it
    /// in whatever order encoders are submitted, and its bind group.
    fn dispatch<'a>(
        &self,
        pipeline: &'a wgpu::ComputePipeline,
        params: &[u8],
        buffers: &[wgpu::BufferBinding<'_>],
        workgroups: u64,
    ) -> Result<Dispatch<'a>, Error> {
        let workgroups = self
            .gpu
            .workgroups("workgroups of a dispatch", workgroups)?;
        let params = self.gpu.buffer_filled(
            "parameters",
            params.len() as u64,
            wgpu::BufferUsages::UNIFORM,
            |out| {
                out.copy_from_slice(params);
                Ok(())
            },
        )?;
        let params = params.as_entire_buffer_binding();
        let entries: Vec<_> = std::iter::once(&params)
            .chain(buffers)
            .zip(0..)
            .map(|(binding, index)| wgpu::BindGroupEntry {
                binding: index,
                resource: wgpu::BindingResource::Buffer(binding.clone()),
            })
            .collect();
        let bind_group = self.gpu.guarded(|| {
            self.gpu
                .device()
                .create_bind_group(&wgpu::BindGroupDescriptor {
                    label: None,
                    layout: &pipeline.get_bind_group_layout(0),
                    entries: &entries,
                })
        })?;
        Ok(Dispatch {
            pipeline,
            bind_group,
            workgroups,
        })
    }
}

impl Layer {
    fn store(&self, kind: Kind) -> &Store {
        match kind {
            Kind::Keys => &self.keys,
            Kind::Values => &self.values,
        }
    }
}

/// A dispatch that has been checked and only waits to be recorded.
struct Dispatch<'a> {
    pipeline: &'a wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
    workgroups: (u32, u32),
}

/// Records dispatches, in order, into one pass.
fn record(encoder: &mut wgpu::CommandEncoder, dispatches: &[Dispatch<'_>]) {
    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
    for dispatch in dispatches {
        pass.set_pipeline(dispatch.pipeline);
        pass.set_bind_group(0, &dispatch.bind_group, &[]);
        pass.dispatch_workgroups(dispatch.workgroups.0, dispatch.workgroups.1, 1);
    }
}

/// Vectors that a workgroup of `encode_*` or `rotate_queries` takes: 64 lanes of 16
/// elements each.
fn vectors_per_workgroup(head_dim: HeadDim) -> u64 {
    64 * 16 / u64::from(head_dim.get_u32())
}

/// Timesteps of a split, for `blocks` blocks of queries that see up to `visible` timesteps.
fn automatic_split_len(blocks: u64, visible: u32) -> u32 {
    let longest = visible.div_ceil(SHORTEST_AUTOMATIC_SPLIT);
    let wanted = (AUTOMATIC_WORKGROUPS / blocks.max(1)).clamp(1, u64::from(longest.max(1)));
    // `wanted` is at most `longest`, a u32.
    let len = visible.div_ceil(wanted as u32);
    len.max(1).checked_next_multiple_of(TILE).unwrap_or(len)
}

/// What was read back, less the mark that says that it was.
fn delivered(bytes: &[u8]) -> Result<&[u8], Error> {
    bytes.strip_suffix(&DELIVERED).ok_or(Error::NotSubmitted)
}

const fn cache_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Keys => "key cache",
        Kind::Values => "value cache",
    }
}

fn check_distinct(
    first: &'static str,
    a: &wgpu::Buffer,
    second: &'static str,
    b: &wgpu::Buffer,
) -> Result<(), Error> {
    if a == b {
        Err(Error::AliasedBuffers { first, second })
    } else {
        Ok(())
    }
}

/// Checks that `bytes` bytes from `rows` on can be bound as storage.
fn check_rows(name: &'static str, rows: Rows<'_>, bytes: u64) -> Result<(), Error> {
    let usage = rows.buffer.usage();
    if !usage.contains(wgpu::BufferUsages::STORAGE) {
        return Err(Error::BufferUsage {
            buffer: name,
            found: usage,
            expected: wgpu::BufferUsages::STORAGE,
        });
    }
    if !rows.offset.is_multiple_of(4) {
        return Err(Error::MisalignedOffset {
            buffer: name,
            found: rows.offset,
        });
    }
    let expected = rows.offset.saturating_add(bytes);
    if rows.buffer.size() < expected {
        return Err(Error::BufferTooSmall {
            buffer: name,
            found: rows.buffer.size(),
            expected,
            offset: rows.offset,
        });
    }
    Ok(())
}

/// Cuts rows into chunks, each of which one binding can cover.
fn chunks(
    gpu: &Gpu,
    what: &'static str,
    rows: Range<u32>,
    row_bytes: u64,
) -> Result<Vec<Range<u32>>, Error> {
    let limits = gpu.limits();
    // A binding begins up to one alignment before its first row.
    let most = limits
        .max_storage_buffer_binding_size
        .min(ADDRESSABLE_BYTES)
        .saturating_sub(u64::from(limits.min_storage_buffer_offset_alignment));
    check_limit(what, row_bytes, "max_storage_buffer_binding_size", most)?;
    let at_once = u32::try_from(most / row_bytes).unwrap_or(u32::MAX);
    let mut chunks = Vec::new();
    let mut start = rows.start;
    while start < rows.end {
        let end = start.saturating_add(at_once).min(rows.end);
        chunks.push(start..end);
        start = end;
    }
    Ok(chunks)
}

/// Builds a blob from the copied device words, head after head in each region, and moves `rest` on.
fn to_blob(
    kind: Kind,
    shape: LayerShape,
    seq_len: u32,
    rest: &mut &[u8],
) -> Result<Vec<u8>, Error> {
    let mut writer = BlobWriter::new(BlobHeader {
        kind,
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim.get_u32(),
        seq_len,
    })?;
    if seq_len > 0 {
        for &region in kind.device_regions() {
            let len = 4 * region.record_words(shape.head_dim) as usize * seq_len as usize;
            for head in 0..shape.n_kv_heads {
                let (bytes, after) = rest
                    .split_at_checked(len)
                    .ok_or_else(|| Error::Rejected("a snapshot's copy is short".to_owned()))?;
                writer.fill_head(region, head, bytes)?;
                *rest = after;
            }
        }
    }
    Ok(writer.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn automatic_splits_cover_the_sequence_and_fill_the_device() {
        assert_eq!(automatic_split_len(32, 1), 64);
        assert_eq!(automatic_split_len(32, 131_072).div_ceil(64), 32);
        assert_eq!(
            automatic_split_len(1 << 20, 1000),
            1024,
            "many rows need no splits"
        );
        for visible in [1, 63, 64, 65, 255, 257, 100_000, u32::MAX] {
            for blocks in [1, 7, 32, 1 << 40] {
                let len = automatic_split_len(blocks, visible);
                assert!(
                    len > 0
                        && u64::from(len) * u64::from(visible.div_ceil(len)) >= u64::from(visible)
                );
            }
        }
    }
}
