//! The library's own kernels.

use turboquant_wgpu::{Attend, Cache, CacheConfig, Gain, Gpu, KvSplit, Queries};

use crate::clock::run;
use crate::job::{Job, Kernel};
use crate::workload::{Record, Workload};
use crate::{Error, data};

/// Rows of random data that a cache is filled from, again and again.
pub(crate) const FILL_ROWS: u32 = 4096;

pub(crate) struct Ours {
    job: Job,
    cache: Cache,
    /// One for each turn: a layer's queries are rotated for that layer.
    queries: Vec<Queries>,
    /// Keys and values of each turn.
    sources: Vec<[wgpu::Buffer; 2]>,
    output: wgpu::Buffer,
}

pub(crate) fn setup(gpu: &Gpu, job: &Job, turns: u32) -> Result<Workload, Error> {
    Ok(Workload::Device(Box::new(Ours::new(gpu, job, turns)?)))
}

impl Ours {
    /// With a layer for each turn.
    pub(crate) fn new(gpu: &Gpu, job: &Job, turns: u32) -> Result<Self, Error> {
        let shape = job.shape;
        let d = shape.head_dim.get_u32();
        let config = CacheConfig {
            head_dim: shape.head_dim,
            n_kv_heads: vec![shape.n_kv_heads; turns as usize],
            capacity: job.capacity(),
            seed: 7,
        };
        let mut cache = pollster::block_on(Cache::new(gpu, config))?;
        let kv_row = u64::from(shape.n_kv_heads) * u64::from(d);
        let q_floats = u64::from(job.rows) * u64::from(shape.n_heads) * u64::from(d);
        let mut queries = Vec::new();
        let mut sources = Vec::new();
        match job.kernel {
            Kernel::Encode => {
                let floats = u64::from(job.rows) * kv_row;
                for turn in 0..u64::from(turns) {
                    let seed = 2 * turn;
                    sources.push([seed, seed + 1].map(|seed| data::source(gpu, floats, seed)));
                }
            }
            Kernel::Rotate | Kernel::Decode | Kernel::Prefill => {
                for turn in 0..turns {
                    let source = data::source(gpu, q_floats, u64::from(turn));
                    let mut rotated = Queries::new(gpu, shape.head_dim, shape.n_heads, job.rows)?;
                    if job.kernel.attends() {
                        let mut encoder = gpu.device().create_command_encoder(&Default::default());
                        cache.rotate(
                            &mut encoder,
                            turn,
                            (&source).into(),
                            job.rows,
                            &mut rotated,
                        )?;
                        run(gpu, encoder)?;
                    } else {
                        sources.push([source.clone(), source]);
                    }
                    queries.push(rotated);
                }
            }
        }
        if job.kernel.attends() {
            fill(gpu, &mut cache, kv_row)?;
        }
        Ok(Self {
            job: *job,
            cache,
            queries,
            sources,
            output: data::output(gpu, q_floats),
        })
    }

    /// Bytes of the cache's buffers.
    pub(crate) fn cache_bytes(&self) -> u64 {
        self.cache.device_bytes()
    }
}

/// Fills every layer to its capacity.
fn fill(gpu: &Gpu, cache: &mut Cache, kv_row: u64) -> Result<(), Error> {
    let capacity = cache.config().capacity;
    let rows = capacity.min(FILL_ROWS);
    let [keys, values] = [1, 2].map(|seed| data::source(gpu, u64::from(rows) * kv_row, seed));
    let n_layers = cache.config().n_kv_heads.len() as u32;
    for layer in 0..n_layers {
        for position in (0..capacity).step_by(rows as usize) {
            let n = rows.min(capacity - position);
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            cache.encode(
                &mut encoder,
                layer,
                (&keys).into(),
                (&values).into(),
                n,
                position,
            )?;
            run(gpu, encoder)?;
        }
    }
    Ok(())
}

impl Record for Ours {
    fn record(&mut self, encoder: &mut wgpu::CommandEncoder, turn: u32) -> Result<(), Error> {
        let rows = self.job.rows;
        let turns = self.cache.config().n_kv_heads.len() as u32;
        let layer = turn % turns;
        let at = layer as usize;
        match self.job.kernel {
            Kernel::Encode => {
                let [keys, values] = &self.sources[at];
                self.cache
                    .encode(encoder, layer, keys.into(), values.into(), rows, 0)?;
            }
            Kernel::Rotate => {
                let [source, _] = &self.sources[at];
                let queries = &mut self.queries[at];
                self.cache
                    .rotate(encoder, layer, source.into(), rows, queries)?;
            }
            Kernel::Decode | Kernel::Prefill => {
                let attend = Attend {
                    rows: 0..rows,
                    start_pos: self.job.start_pos(),
                    split: KvSplit::Automatic,
                    scale: self.job.shape.head_dim.inv_sqrt(),
                    gain: Gain::Unbiased,
                };
                let queries = &mut self.queries[at];
                self.cache
                    .attend(encoder, layer, queries, (&self.output).into(), &attend)?;
            }
        }
        Ok(())
    }
}
