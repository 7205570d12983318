//! A case on a device: its buffers, its cache, and what the device left in them.

use turboquant_wgpu::layout::{DeviceLayout, DeviceRegion, Kind};
use turboquant_wgpu::twin::{KeyRecord, ValueRecord};
use turboquant_wgpu::{Attend, Cache, CacheConfig, Counters, Error, HeadDim, Queries, Rows};

use crate::adapters::Device;
use crate::case::Case;
use crate::readback;
use crate::verdict::Failure;

/// What buffers hold before anything is written: as a norm it is a NaN, as a float a large number, so that what
/// reads it by mistake shows.
pub const PATTERN: u32 = 0x7fc1_a5a5;

impl From<crate::case::CaseError> for Failure {
    fn from(error: crate::case::CaseError) -> Self {
        match error {
            crate::case::CaseError::Shape(e) => e.into(),
            other => Self::NotChecked(other.to_string()),
        }
    }
}

/// A case's cache on a device, filled with [`PATTERN`] and then encoded.
pub struct Fixture<'a> {
    /// The device.
    pub device: &'a Device,
    /// The case.
    pub case: &'a Case,
    /// Its cache.
    pub cache: Cache,
    /// Its keys.
    pub keys: Vec<f32>,
    /// Its values.
    pub values: Vec<f32>,
}

/// Raw words of a layer, and what it counted.
pub struct Raw {
    /// Words of the key buffer.
    pub keys: Vec<u32>,
    /// Words of the value buffer.
    pub values: Vec<u32>,
    /// Counters.
    pub counters: Counters,
}

impl<'a> Fixture<'a> {
    /// Makes the cache, fills its buffers with the pattern, and encodes the case's rows, `encode_split` at a
    /// time. Nothing is submitted yet: `encoder` holds it.
    ///
    /// # Errors
    /// A case that the library or the adapter does not take.
    pub fn encode(
        device: &'a Device,
        case: &'a Case,
        encoder: &mut wgpu::CommandEncoder,
    ) -> Result<Self, Failure> {
        let mut fixture = Self::empty(device, case)?;
        fixture.encode_rows(encoder, case.encode_split)?;
        Ok(fixture)
    }

    /// Makes the cache and fills its buffers with the pattern.
    ///
    /// # Errors
    /// A case that the library or the adapter does not take.
    pub fn empty(device: &'a Device, case: &'a Case) -> Result<Self, Failure> {
        Self::with(device, case, case.keys()?, case.values()?)
    }

    /// [`Fixture::empty`] with other tensors than the case's own, of the same shape.
    ///
    /// # Errors
    /// A case that the library or the adapter does not take.
    pub fn with(
        device: &'a Device,
        case: &'a Case,
        keys: Vec<f32>,
        values: Vec<f32>,
    ) -> Result<Self, Failure> {
        let cache = new_cache(device, case, case.capacity)?;
        Ok(Self {
            device,
            case,
            cache,
            keys,
            values,
        })
    }

    /// Encodes all rows, `split` at a time.
    ///
    /// # Errors
    /// The library's.
    pub fn encode_rows(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        split: u32,
    ) -> Result<(), Failure> {
        let (keys, values) = (self.keys.clone(), self.values.clone());
        self.encode_at(encoder, &keys, &values, 0, split)
    }

    /// Encodes rows of keys and values from timestep `first` on, `split` rows at a time.
    ///
    /// # Errors
    /// The library's.
    pub fn encode_at(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        keys: &[f32],
        values: &[f32],
        first: u32,
        split: u32,
    ) -> Result<(), Failure> {
        let row = self.case.n_kv_heads as usize * self.case.head_dim as usize;
        let all = (keys.len() / row) as u32;
        if all == 0 {
            return Ok(());
        }
        let keys = upload(self.device, keys);
        let values = upload(self.device, values);
        for done in (0..all).step_by(split as usize) {
            let rows = split.min(all - done);
            let position = first + done;
            let at = |buffer| Rows {
                buffer,
                offset: u64::from(done) * 4 * row as u64,
            };
            let layer = self.case.layer;
            self.cache
                .encode(encoder, layer, at(&keys), at(&values), rows, position)?;
        }
        Ok(())
    }

    /// Submits the encoder and reads the layer's buffers and counters.
    ///
    /// # Errors
    /// A timeout, a lost device, or an error that wgpu reported aside.
    pub fn read_raw(&self, mut encoder: wgpu::CommandEncoder) -> Result<Raw, Failure> {
        let layer = self.case.layer;
        let buffers = [
            self.cache.buffer(layer, Kind::Keys)?,
            self.cache.buffer(layer, Kind::Values)?,
        ];
        let read = readback::record(&self.device.gpu, &mut encoder, &buffers);
        let counters = self.cache.counters(&mut encoder, layer)?;
        self.device.submit(encoder);
        let mut words = read.wait(&self.device.gpu)?;
        let counters = self.device.wait(counters)?;
        self.settle()?;
        let values = words.pop().unwrap_or_default();
        let keys = words.pop().unwrap_or_default();
        Ok(Raw {
            keys,
            values,
            counters,
        })
    }

    /// Turns errors that wgpu reported aside into a failure.
    ///
    /// # Errors
    /// The first of them.
    pub fn settle(&self) -> Result<(), Failure> {
        match self.device.take_errors().into_iter().next() {
            Some(error) => Err(Error::Rejected(error).into()),
            None => Ok(()),
        }
    }

    /// Layout of one of the layer's buffers.
    ///
    /// # Errors
    /// The library's.
    pub fn layout(&self, kind: Kind) -> Result<DeviceLayout, Failure> {
        Ok(self.cache.layout(self.case.layer, kind)?)
    }
}

/// A cache for the case with its buffers full of the pattern.
///
/// # Errors
/// The library's.
pub fn new_cache(device: &Device, case: &Case, capacity: u32) -> Result<Cache, Failure> {
    let mut n_kv_heads = vec![0; case.layer as usize];
    n_kv_heads.push(case.n_kv_heads);
    let config = CacheConfig {
        head_dim: case.head_dim()?,
        n_kv_heads,
        capacity,
        seed: u64::from(case.cache_seed),
    };
    let cache = pollster::block_on(Cache::new(&device.gpu, config))?;
    for kind in [Kind::Keys, Kind::Values] {
        let buffer = cache.buffer(case.layer, kind)?;
        fill(device, buffer);
    }
    Ok(cache)
}

/// Fills a buffer (usage `COPY_DST`) with the pattern.
pub fn fill(device: &Device, buffer: &wgpu::Buffer) {
    let words = vec![PATTERN; (buffer.size() / 4) as usize];
    device
        .gpu
        .queue()
        .write_buffer(buffer, 0, bytemuck::cast_slice(&words));
}

/// A buffer with usages `STORAGE` and `COPY_SRC` that holds `data`.
#[must_use]
pub fn upload(device: &Device, data: &[f32]) -> wgpu::Buffer {
    upload_words(device, bytemuck::cast_slice(data))
}

/// A buffer with usages `STORAGE` and `COPY_SRC` that holds these words.
#[must_use]
pub fn upload_words(device: &Device, data: &[u32]) -> wgpu::Buffer {
    use wgpu::util::DeviceExt;
    device
        .gpu
        .device()
        .create_buffer_init(&wgpu::util::BufferInitDescriptor {
            label: Some("input"),
            contents: bytemuck::cast_slice(data),
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC,
        })
}

/// An output buffer of `elements` f32, full of the pattern.
#[must_use]
pub fn output(device: &Device, elements: usize) -> wgpu::Buffer {
    let buffer = device.gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: Some("output"),
        size: 4 * elements as u64,
        usage: wgpu::BufferUsages::STORAGE
            | wgpu::BufferUsages::COPY_SRC
            | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    fill(device, &buffer);
    buffer
}

/// What an attention pass left: rotated queries and outputs.
pub struct Attended {
    /// [q_rows, n_heads, 2, head_dim].
    pub rotated: Vec<f32>,
    /// [q_rows, n_heads, head_dim].
    pub out: Vec<f32>,
}

impl Fixture<'_> {
    /// Rotates the case's queries and attends them, `q_split` rows at a time; submits and reads.
    ///
    /// # Errors
    /// The library's, a timeout, a lost device.
    pub fn attend(
        &self,
        encoder: wgpu::CommandEncoder,
        queries: &[f32],
    ) -> Result<Attended, Failure> {
        self.attend_as(self.case, encoder, queries)
    }

    /// [`Fixture::attend`] with the splits, positions and factors of another case.
    ///
    /// # Errors
    /// The library's, a timeout, a lost device.
    pub fn attend_as(
        &self,
        case: &Case,
        encoder: wgpu::CommandEncoder,
        queries: &[f32],
    ) -> Result<Attended, Failure> {
        let parts: Vec<_> = (0..case.q_rows)
            .step_by(case.q_split as usize)
            .map(|first| first..case.q_rows.min(first.saturating_add(case.q_split)))
            .collect();
        self.attend_parts(case, encoder, queries, &parts)
    }

    /// Rotates all of the queries and attends just these rows of them, one call for each range.
    ///
    /// # Errors
    /// The library's, a timeout, a lost device.
    pub fn attend_parts(
        &self,
        case: &Case,
        mut encoder: wgpu::CommandEncoder,
        queries: &[f32],
        parts: &[std::ops::Range<u32>],
    ) -> Result<Attended, Failure> {
        let gpu = &self.device.gpu;
        let source = upload(self.device, queries);
        let mut scratch = Queries::new(gpu, case.head_dim()?, case.n_heads, case.q_rows)?;
        fill(self.device, scratch.buffer());
        let out = output(self.device, queries.len());
        let layer = case.layer;
        self.cache.rotate(
            &mut encoder,
            layer,
            (&source).into(),
            case.q_rows,
            &mut scratch,
        )?;
        for rows in parts {
            let attend = Attend {
                rows: rows.clone(),
                start_pos: case.start_pos,
                split: case.kv_split(),
                scale: case.scale,
                gain: case.gain,
            };
            self.cache
                .attend(&mut encoder, layer, &mut scratch, (&out).into(), &attend)?;
        }
        let read = readback::record(gpu, &mut encoder, &[scratch.buffer(), &out]);
        self.device.submit(encoder);
        let words = read.wait(gpu)?;
        self.settle()?;
        let mut floats = words
            .into_iter()
            .map(|w| w.into_iter().map(f32::from_bits).collect());
        Ok(Attended {
            rotated: floats.next().unwrap_or_default(),
            out: floats.next().unwrap_or_default(),
        })
    }
}

/// The key record of (`head`, `timestep`) in a device buffer's words.
#[must_use]
pub fn key_record(layout: &DeviceLayout, words: &[u32], head: u32, timestep: u32) -> KeyRecord {
    let norms = words[layout.slot(DeviceRegion::Norms, head, timestep) as usize];
    KeyRecord {
        codes: bytes(layout, words, DeviceRegion::Codes, head, timestep),
        signs: bytes(layout, words, DeviceRegion::Signs, head, timestep),
        norm: half::f16::from_bits(norms as u16),
        residual_norm: half::f16::from_bits((norms >> 16) as u16),
    }
}

/// The value record of (`head`, `timestep`) in a device buffer's words. The high half of the norm word is the
/// caller's to judge.
#[must_use]
pub fn value_record(layout: &DeviceLayout, words: &[u32], head: u32, timestep: u32) -> ValueRecord {
    let norms = words[layout.slot(DeviceRegion::Norms, head, timestep) as usize];
    ValueRecord {
        codes: bytes(layout, words, DeviceRegion::Codes, head, timestep),
        norm: half::f16::from_bits(norms as u16),
    }
}

fn bytes(
    layout: &DeviceLayout,
    words: &[u32],
    region: DeviceRegion,
    head: u32,
    timestep: u32,
) -> Vec<u8> {
    let first = layout.slot(region, head, timestep) as usize;
    let n = region.record_words(layout.shape().head_dim) as usize;
    words[first..first + n]
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .collect()
}

/// Elements of one vector.
#[must_use]
pub fn vector(data: &[f32], head_dim: HeadDim, index: usize) -> &[f32] {
    let d = head_dim.get();
    &data[index * d..(index + 1) * d]
}
