//! The kernels of cera 0.5.5, the engine that the format comes from, dispatched by its own code on our device.

use std::sync::OnceLock;

use cera::backend::wgpu::GpuContext;
use cera::model::gpu_turboquant::{TqGpuCache, TqMode};
use cera::model::{BlockType, ModelConfig, ScalarMultipliers};
use cera::turboquant::head_dim_supported;
use turboquant_wgpu::Gpu;

use crate::clock::run;
use crate::job::{Job, Kernel};
use crate::ours::FILL_ROWS;
use crate::workload::{Record, Workload};
use crate::{Error, data};

struct Cera {
    job: Job,
    turns: u32,
    context: GpuContext,
    cache: TqGpuCache,
    /// Keys and values, or queries twice, of each turn.
    sources: Vec<[wgpu::Buffer; 2]>,
    output: wgpu::Buffer,
}

pub(crate) fn setup(gpu: &Gpu, job: &Job, turns: u32) -> Result<Workload, Error> {
    let shape = job.shape;
    let d = shape.head_dim.get();
    if !head_dim_supported(d) {
        return Err(Error::Unsupported(format!(
            "it has no kernels for head_dim {d}"
        )));
    }
    let context = context(gpu)?;
    let config = config(job, turns as usize);
    let refused = |message: String| Error::Refused {
        what: format!("cera's {}", job.kernel.name()),
        message,
    };
    // wgpu ends the process for an error that nobody has asked for.
    let scope = gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
    let built = build(gpu, job, turns, context, &config);
    if let Some(error) = pollster::block_on(scope.pop()) {
        return Err(refused(error.to_string()));
    }
    Ok(Workload::Device(Box::new(built?)))
}

fn build(
    gpu: &Gpu,
    job: &Job,
    turns: u32,
    context: GpuContext,
    config: &ModelConfig,
) -> Result<Cera, Error> {
    let shape = job.shape;
    let rows = job.rows;
    let cache = TqGpuCache::new(
        &context,
        config,
        job.capacity() as usize,
        rows as usize,
        TqMode { seed: 7 },
    )
    .map_err(|e| Error::Refused {
        what: "cera's cache".to_owned(),
        message: e.to_string(),
    })?;
    let d = u64::from(shape.head_dim.get_u32());
    let kv_row = u64::from(shape.n_kv_heads) * d;
    let q_floats = u64::from(rows) * u64::from(shape.n_heads) * d;
    let mut sources = Vec::new();
    match job.kernel {
        Kernel::Encode => {
            let floats = u64::from(rows) * kv_row;
            for turn in 0..u64::from(turns) {
                let seed = 2 * turn;
                sources.push([seed, seed + 1].map(|seed| data::source(gpu, floats, seed)));
            }
        }
        Kernel::Rotate => {
            for turn in 0..u64::from(turns) {
                let source = data::source(gpu, q_floats, turn);
                sources.push([source.clone(), source]);
            }
        }
        Kernel::Decode | Kernel::Prefill => {
            let capacity = job.capacity();
            let n = capacity.min(FILL_ROWS);
            let [keys, values] = [1, 2].map(|seed| data::source(gpu, u64::from(n) * kv_row, seed));
            for position in (0..capacity).step_by(n as usize) {
                let n = n.min(capacity - position) as usize;
                cache.write_params(&context, config, n, position as usize, 1.0);
                for layer in 0..turns as usize {
                    let mut encoder = gpu.device().create_command_encoder(&Default::default());
                    cache.encode_kv(&context, &mut encoder, layer, &keys, &values, n);
                    run(gpu, encoder)?;
                }
            }
        }
    }
    let start_pos = if job.kernel.attends() {
        job.start_pos()
    } else {
        0
    };
    let scale = shape.head_dim.inv_sqrt();
    cache.write_params(&context, config, rows as usize, start_pos as usize, scale);
    if job.kernel.attends() {
        let source = data::source(gpu, q_floats, 3);
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let (rows, heads) = (rows as usize, shape.n_heads as usize);
        cache.rotate_queries(&context, &mut encoder, 0, &source, rows, heads);
        run(gpu, encoder)?;
    }
    Ok(Cera {
        job: *job,
        turns,
        context,
        cache,
        sources,
        output: data::output(gpu, q_floats),
    })
}

/// cera's context on our device. Only cera itself can make one, and it opens the adapter that it prefers: its device
/// is put out of the way, but never dropped, since some drivers hang over that.
fn context(gpu: &Gpu) -> Result<GpuContext, Error> {
    static OWN: OnceLock<Result<GpuContext, String>> = OnceLock::new();
    let own = OWN.get_or_init(|| GpuContext::new().map_err(|e| format!("{e:#}")));
    let own = own.as_ref().map_err(|message| Error::Refused {
        what: "cera's context".to_owned(),
        message: message.clone(),
    })?;
    let info = gpu.device().adapter_info();
    let limits = gpu.device().limits();
    let mut context = own.clone();
    context.device = gpu.device().clone();
    context.queue = gpu.queue().clone();
    context.adapter_name = info.name;
    context.backend = format!("{:?}", info.backend);
    context.max_storage_buffer_binding_size = limits.max_storage_buffer_binding_size;
    context.max_buffer_size = limits.max_buffer_size;
    context.min_storage_buffer_offset_alignment = limits.min_storage_buffer_offset_alignment.into();
    context.profiler = None;
    Ok(context)
}

/// A model of attention layers alone, one for each turn.
fn config(job: &Job, layers: usize) -> ModelConfig {
    let shape = job.shape;
    let (n_heads, n_kv_heads) = (shape.n_heads as usize, shape.n_kv_heads as usize);
    let head_dim = shape.head_dim.get();
    ModelConfig {
        architecture: "lfm2".into(),
        n_layers: layers,
        hidden_size: n_heads * head_dim,
        intermediate_size: n_heads * head_dim,
        n_heads,
        n_kv_heads,
        head_dim,
        vocab_size: 32,
        max_seq_len: job.capacity() as usize,
        rope_theta: 10_000.0,
        rms_norm_eps: 1e-5,
        block_types: vec![BlockType::Attention; layers],
        conv_kernel_size: None,
        kv_heads_per_layer: vec![n_kv_heads; layers],
        scalars: ScalarMultipliers::default(),
        moe: None,
        is_causal: true,
        class_labels: Vec::new(),
    }
}

impl Record for Cera {
    fn record(&mut self, encoder: &mut wgpu::CommandEncoder, turn: u32) -> Result<(), Error> {
        let layer = (turn % self.turns) as usize;
        let rows = self.job.rows as usize;
        let n_heads = self.job.shape.n_heads as usize;
        match self.job.kernel {
            Kernel::Encode => {
                let [keys, values] = &self.sources[layer];
                self.cache
                    .encode_kv(&self.context, encoder, layer, keys, values, rows);
            }
            Kernel::Rotate => {
                let [source, _] = &self.sources[layer];
                self.cache
                    .rotate_queries(&self.context, encoder, layer, source, rows, n_heads);
            }
            Kernel::Decode | Kernel::Prefill => {
                self.cache
                    .attention(&self.context, encoder, layer, &self.output, rows, n_heads);
            }
        }
        Ok(())
    }
}
