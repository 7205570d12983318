//! Flash decoding over an uncompressed cache in f16, by a kernel of our own: what compression has to beat.

use turboquant_wgpu::Gpu;

use crate::job::Job;
use crate::shape::Shape;
use crate::workload::{Record, Workload};
use crate::{Error, data};

const SOURCE: &str = include_str!("../shaders/flash_decode_f16.wgsl");
/// Query heads of a workgroup.
const HEADS: u32 = 4;
/// Splits are no shorter: a shorter one would be mostly its own start and merge.
const LEAST_SPLIT: u32 = 128;

/// The parameter block, as `Params` in the shader.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Params {
    n_heads: u32,
    n_kv_heads: u32,
    timesteps: u32,
    rows: u32,
    start_pos: u32,
    n_splits: u32,
    split: u32,
    scale: f32,
}

/// Keys and values of each turn, [n_kv_heads, timesteps, head_dim] of f16.
type Tensors = Vec<[wgpu::Buffer; 2]>;

struct Flash {
    attend: wgpu::ComputePipeline,
    merge: wgpu::ComputePipeline,
    /// For each turn, of both pipelines.
    bindings: Vec<[wgpu::BindGroup; 2]>,
    /// Workgroups of both pipelines.
    workgroups: [(u32, u32); 2],
}

pub(crate) fn setup(gpu: &Gpu, job: &Job, turns: u32) -> Result<Workload, Error> {
    if !job.kernel.attends() {
        return Err(Error::Unsupported(format!(
            "it has no {}: f16 is stored as it comes",
            job.kernel.name()
        )));
    }
    let limits = gpu.device().limits();
    let bytes = job.bytes_f16() / 2;
    for (name, limit) in [
        (
            "max_storage_buffer_binding_size",
            limits.max_storage_buffer_binding_size,
        ),
        ("max_buffer_size", limits.max_buffer_size),
    ] {
        if bytes > limit {
            return Err(Error::Unsupported(format!(
                "its keys take {bytes} bytes: {name} is {limit}"
            )));
        }
    }
    let q_floats = u64::from(job.rows)
        * u64::from(job.shape.n_heads)
        * u64::from(job.shape.head_dim.get_u32());
    guarded(gpu, || {
        let tensors = (0..u64::from(turns))
            .map(|turn| [2 * turn, 2 * turn + 1].map(|seed| data::source_f16(gpu, bytes / 2, seed)))
            .collect();
        let queries = data::source(gpu, q_floats, 3);
        let output = data::output(gpu, q_floats);
        let n_splits = n_splits(job, gpu.device().adapter_info().device_type);
        let flash = Flash::new(gpu, job, n_splits, &tensors, &queries, &output)?;
        Ok(Workload::Device(Box::new(flash)))
    })
}

/// Runs something that creates wgpu objects, and returns what wgpu says against it: else that ends the process.
fn guarded<T>(gpu: &Gpu, create: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let device = gpu.device();
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let created = create();
    for scope in [memory, validation] {
        if let Some(error) = pollster::block_on(scope.pop()) {
            return Err(Error::Refused {
                what: "the attention in f16".to_owned(),
                message: error.to_string(),
            });
        }
    }
    created
}

/// So many that the device has something to do, and no more.
fn n_splits(job: &Job, device_type: wgpu::DeviceType) -> u32 {
    let wanted = match device_type {
        wgpu::DeviceType::Cpu => 16,
        // 16 workgroups for each of the 132 multiprocessors of the largest GPUs of today.
        _ => 2112,
    };
    let most = job.shape.seq_len.div_ceil(LEAST_SPLIT);
    let others = job.rows * job.shape.n_kv_heads * chunks(job.shape);
    u32::div_ceil(wanted, others).clamp(1, most)
}

/// Workgroups that share the query heads of a KV head.
fn chunks(shape: Shape) -> u32 {
    (shape.n_heads / shape.n_kv_heads).div_ceil(HEADS)
}

impl Flash {
    fn new(
        gpu: &Gpu,
        job: &Job,
        n_splits: u32,
        tensors: &Tensors,
        queries: &wgpu::Buffer,
        output: &wgpu::Buffer,
    ) -> Result<Self, Error> {
        let device = gpu.device();
        let Shape {
            n_heads,
            n_kv_heads,
            head_dim,
            seq_len,
        } = job.shape;
        let d = head_dim.get_u32();
        let vectors = u64::from(job.rows) * u64::from(n_heads);
        let partials = data::output(gpu, vectors * u64::from(n_splits) * u64::from(d + 2));
        let params = Params {
            n_heads,
            n_kv_heads,
            timesteps: seq_len,
            rows: job.rows,
            start_pos: job.start_pos(),
            n_splits,
            split: seq_len.div_ceil(n_splits),
            scale: head_dim.inv_sqrt(),
        };
        let uniform = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("parameters"),
            size: size_of::<Params>() as u64,
            usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        gpu.queue()
            .write_buffer(&uniform, 0, bytemuck::bytes_of(&params));
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some("flash_decode_f16"),
            source: wgpu::ShaderSource::Wgsl(SOURCE.into()),
        });
        let pipeline = |name| {
            device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(name),
                layout: None,
                module: &module,
                entry_point: Some(name),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &[("HEAD_DIM", f64::from(d))],
                    // As the library's are: every word is written before it is read.
                    zero_initialize_workgroup_memory: false,
                },
                cache: None,
            })
        };
        let (attend, merge) = (pipeline("flash_decode_f16"), pipeline("merge_splits"));
        let bind = |pipeline: &wgpu::ComputePipeline, buffers: &[(u32, &wgpu::Buffer)]| {
            let entries: Vec<wgpu::BindGroupEntry<'_>> = buffers
                .iter()
                .map(|(binding, buffer)| wgpu::BindGroupEntry {
                    binding: *binding,
                    resource: buffer.as_entire_binding(),
                })
                .collect();
            device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &pipeline.get_bind_group_layout(0),
                entries: &entries,
            })
        };
        let bindings = tensors
            .iter()
            .map(|[keys, values]| {
                [
                    bind(
                        &attend,
                        &[
                            (0, &uniform),
                            (1, keys),
                            (2, values),
                            (3, queries),
                            (4, &partials),
                        ],
                    ),
                    bind(&merge, &[(0, &uniform), (4, &partials), (5, output)]),
                ]
            })
            .collect();
        let most = u64::from(device.limits().max_compute_workgroups_per_dimension);
        let parts = u64::from(job.rows)
            * u64::from(n_kv_heads)
            * u64::from(chunks(job.shape))
            * u64::from(n_splits);
        let spilt = |n: u64| {
            let y = n.div_ceil(most);
            if y > most {
                return Err(Error::Unsupported(format!("{n} workgroups")));
            }
            // Both are at most `most`, a u32.
            Ok((n.div_ceil(y) as u32, y as u32))
        };
        Ok(Self {
            attend,
            merge,
            bindings,
            workgroups: [spilt(parts)?, spilt(vectors)?],
        })
    }
}

impl Record for Flash {
    fn record(&mut self, encoder: &mut wgpu::CommandEncoder, turn: u32) -> Result<(), Error> {
        let bindings = &self.bindings[turn as usize % self.bindings.len()];
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for ((pipeline, bindings), (x, y)) in [&self.attend, &self.merge]
            .into_iter()
            .zip(bindings)
            .zip(self.workgroups)
        {
            pass.set_pipeline(pipeline);
            pass.set_bind_group(0, bindings, &[]);
            pass.dispatch_workgroups(x, y, 1);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use half::slice::HalfFloatSliceExt;

    use super::*;
    use crate::clock::{download, run};
    use crate::job::Kernel;

    /// The first adapter there is. Without one this shows nothing, which is a failure where an adapter is
    /// required.
    fn gpu() -> Option<Gpu> {
        match pollster::block_on(Gpu::open_default(wgpu::Backends::all())) {
            Ok(gpu) => Some(gpu),
            Err(error) => {
                let required = std::env::var_os("TQCHECK_REQUIRE").is_some();
                assert!(!required, "an adapter is required: {error}");
                eprintln!("not checked: {error}");
                None
            }
        }
    }

    /// Attention of one row and head in f64, and Σ p·|v| of each element.
    fn reference(
        job: &Job,
        [k, v]: [&[f16]; 2],
        q: &[f32],
        row: usize,
        head: usize,
    ) -> [Vec<f64>; 2] {
        let d = job.shape.head_dim.get();
        let n_heads = job.shape.n_heads as usize;
        let kv_head = head / (n_heads / job.shape.n_kv_heads as usize);
        let vector = |x: &[f16], t: usize| -> Vec<f64> {
            let at = (kv_head * job.shape.seq_len as usize + t) * d;
            x[at..at + d].iter().map(|x| x.to_f64()).collect()
        };
        let q = &q[(row * n_heads + head) * d..][..d];
        let visible = job.start_pos() as usize + row + 1;
        let scores: Vec<f64> = (0..visible)
            .map(|t| {
                let dot: f64 = vector(k, t)
                    .iter()
                    .zip(q)
                    .map(|(k, q)| k * f64::from(*q))
                    .sum();
                dot * f64::from(job.shape.head_dim.inv_sqrt())
            })
            .collect();
        let maximum = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - maximum).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut out = [vec![0.0; d], vec![0.0; d]];
        for (t, weight) in weights.iter().enumerate() {
            for (i, v) in vector(v, t).iter().enumerate() {
                out[0][i] += weight / sum * v;
                out[1][i] += weight / sum * v.abs();
            }
        }
        out
    }

    /// Every element within what errors of the scores and of exp may do to it, for every head_dim, groups that
    /// fill a workgroup and ones that do not, splits of every kind.
    #[test]
    fn outputs_are_those_of_f64() {
        let Some(gpu) = gpu() else { return };
        let mut worst: f64 = 0.0;
        for (name, rows, n_splits) in [
            ("1x1-d32-s1", 1, 1),
            ("4x1-d32-s257", 1, 3),
            ("6x2-d64-s130", 3, 2),
            ("9x3-d64-s63", 1, 1),
            ("8x2-d128-s600", 1, 5),
            ("7x1-d128-s65", 65, 1),
            ("5x1-d256-s300", 2, 7),
            ("2x2-d256-s17", 1, 17),
        ] {
            let job = Job {
                kernel: Kernel::Decode,
                shape: name.parse().expect("a shape"),
                rows,
            };
            let d = job.shape.head_dim.get();
            let kv = job.shape.n_kv_heads as usize * job.shape.seq_len as usize * d;
            let [k, v] = [1, 2].map(|seed| -> Vec<f16> {
                let normal = data::normal(kv, seed).into_iter();
                normal.map(|x| f16::from_f32(2.0 * x)).collect()
            });
            let q_floats = rows as usize * job.shape.n_heads as usize * d;
            let q = data::normal(q_floats, 3);
            let queries = data::source(&gpu, q_floats as u64, 3);
            let output = data::output(&gpu, q_floats as u64);
            let tensors = vec![
                [&k, &v].map(|x| data::upload(&gpu, bytemuck::cast_slice(x.reinterpret_cast()))),
            ];
            let mut flash = guarded(&gpu, || {
                Flash::new(&gpu, &job, n_splits, &tensors, &queries, &output)
            })
            .expect("it is built");
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            flash.record(&mut encoder, 0).expect("recorded");
            run(&gpu, encoder).expect("it runs");
            let found: Vec<f32> = download(&gpu, &output).expect("an output");
            assert_eq!(found.len(), q_floats);
            for (vector, found) in found.chunks_exact(d).enumerate() {
                let n_heads = job.shape.n_heads as usize;
                let (row, head) = (vector / n_heads, vector % n_heads);
                let [expected, size] = reference(&job, [&k, &v], &q, row, head);
                for (i, found) in found.iter().enumerate() {
                    // Scores are sums of d products of a few units, and exp is within 3 + 2|x| ULP with |x|
                    // below 100: 1e-4 of Σ p·|v| is beyond both, and far below what a lost timestep does.
                    let share = (f64::from(*found) - expected[i]).abs() / (1e-4 * size[i]);
                    assert!(
                        share <= 1.0,
                        "{name} row {row} head {head} element {i}: found {found}, expected {}",
                        expected[i]
                    );
                    worst = worst.max(share);
                }
            }
        }
        assert!(worst > 1e-4, "a bound that nothing comes near: {worst}");
    }

    #[test]
    fn a_device_is_given_enough_workgroups_and_no_idle_splits() {
        let job = |name: &str, rows| Job {
            kernel: Kernel::Decode,
            shape: name.parse().expect("a shape"),
            rows,
        };
        let gpu = wgpu::DeviceType::DiscreteGpu;
        assert_eq!(n_splits(&job("32x8-d128-s131072", 1), gpu), 264);
        assert_eq!(n_splits(&job("32x8-d128-s1024", 1), gpu), 8);
        assert_eq!(n_splits(&job("32x8-d128-s4096", 512), gpu), 1);
        let cpu = wgpu::DeviceType::Cpu;
        assert_eq!(n_splits(&job("32x8-d128-s131072", 1), cpu), 2);
    }
}
