//! Given tensors on a device: encode, read the records, attend. For the commands that bring data of their own.

use turboquant_wgpu::blob::decode_kind;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::{AttentionShape, KeyRecord, ValueRecord};
use turboquant_wgpu::{Attend, Cache, CacheConfig, Error, HeadDim, KvSplit, Queries};

use crate::adapters::Device;
use crate::fixture::{output, upload};
use crate::readback;

/// One layer of a model on a device.
pub struct Session<'a> {
    /// The device.
    pub device: &'a Device,
    /// Elements of a vector.
    pub head_dim: HeadDim,
    /// KV heads.
    pub n_kv_heads: u32,
    /// Query heads.
    pub n_heads: u32,
    /// Layer whose rotation is used.
    pub layer: u32,
    /// Seed of the cache.
    pub seed: u64,
}

/// A layer that has been encoded, and what the device holds of it.
pub struct Encoded {
    /// The cache.
    pub cache: Cache,
    /// Key records, head after head.
    pub keys: Vec<KeyRecord>,
    /// Value records, head after head.
    pub values: Vec<ValueRecord>,
    /// Bytes of the layer's two buffers.
    pub bytes: u64,
}

impl Session<'_> {
    /// Encodes whole tensors, [rows, n_kv_heads, head_dim].
    ///
    /// # Errors
    /// The library's.
    pub fn encode(&self, k: &[f32], v: &[f32]) -> Result<Encoded, Error> {
        let rows = (k.len() / (self.n_kv_heads as usize * self.head_dim.get())) as u32;
        let mut n_kv_heads = vec![0; self.layer as usize];
        n_kv_heads.push(self.n_kv_heads);
        let config = CacheConfig {
            head_dim: self.head_dim,
            n_kv_heads,
            capacity: rows.max(1),
            seed: self.seed,
        };
        let mut cache = pollster::block_on(Cache::new(&self.device.gpu, config))?;
        let mut encoder = self.device.encoder();
        if rows > 0 {
            let (keys, values) = (upload(self.device, k), upload(self.device, v));
            cache.encode(
                &mut encoder,
                self.layer,
                (&keys).into(),
                (&values).into(),
                rows,
                0,
            )?;
        }
        let pending = cache.snapshot(&mut encoder, self.layer)?;
        self.device.submit(encoder);
        let snapshot = self.device.wait(pending)?;
        let keys = decode_kind(Kind::Keys, &snapshot.keys)?;
        let values = decode_kind(Kind::Values, &snapshot.values)?;
        Ok(Encoded {
            keys: KeyRecord::read_all(&keys, self.head_dim),
            values: ValueRecord::read_all(&values, self.head_dim),
            bytes: cache.device_bytes(),
            cache,
        })
    }

    /// Attends queries, [rows, n_heads, head_dim].
    ///
    /// # Errors
    /// The library's.
    pub fn attend(
        &self,
        encoded: &Encoded,
        q: &[f32],
        shape: AttentionShape,
    ) -> Result<Vec<f32>, Error> {
        let gpu = &self.device.gpu;
        let mut queries = Queries::new(gpu, self.head_dim, self.n_heads, shape.rows)?;
        let (source, out) = (upload(self.device, q), output(self.device, q.len()));
        let mut encoder = self.device.encoder();
        let cache = &encoded.cache;
        cache.rotate(
            &mut encoder,
            self.layer,
            (&source).into(),
            shape.rows,
            &mut queries,
        )?;
        let attend = Attend {
            rows: 0..shape.rows,
            start_pos: shape.start_pos,
            split: KvSplit::Automatic,
            scale: shape.scale,
            gain: shape.gain,
        };
        cache.attend(
            &mut encoder,
            self.layer,
            &mut queries,
            (&out).into(),
            &attend,
        )?;
        let read = readback::record(gpu, &mut encoder, &[&out]);
        self.device.submit(encoder);
        let words = read.wait(gpu)?.remove(0);
        Ok(words.into_iter().map(f32::from_bits).collect())
    }
}
