//! Small compute dispatches: words in, words out. For the self-test and the probes.

use turboquant_wgpu::Gpu;
use wgpu::util::DeviceExt;

use crate::adapters::WAIT_LIMIT;

/// What results hold before a dispatch: no answer.
pub const UNWRITTEN: u32 = 0xdead_beef;

/// A WGSL module and which of its entry points to dispatch, one after the other.
#[derive(Clone, Copy)]
pub struct Program<'a> {
    /// WGSL.
    pub source: &'a str,
    /// Entry points, in order. Binding 0 of group 0 is the input, binding 1 the results.
    pub entries: &'a [&'a str],
    /// Values of `override` constants.
    pub constants: &'a [(&'a str, f64)],
    /// Have workgroup memory zeroed at the start.
    pub zero_workgroup_memory: bool,
}

impl<'a> Program<'a> {
    /// A program of one entry point.
    #[must_use]
    pub fn new(source: &'a str, entries: &'a [&'a str]) -> Self {
        Self {
            source,
            entries,
            constants: &[],
            zero_workgroup_memory: false,
        }
    }
}

/// Runs a program and reads its results, within [`WAIT_LIMIT`].
///
/// # Errors
/// What wgpu or the driver objects to, or a wait that failed.
pub fn run(
    gpu: &Gpu,
    program: Program,
    inputs: &[u32],
    n_results: usize,
    workgroups: [u32; 2],
) -> Result<Vec<u32>, String> {
    let name = program.entries.join(", ");
    let device = gpu.device();
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some("probe"),
        source: wgpu::ShaderSource::Wgsl(program.source.into()),
    });
    let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
        label: None,
        entries: &[true, false].map(|read_only| wgpu::BindGroupLayoutEntry {
            binding: u32::from(!read_only),
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Storage { read_only },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        }),
    });
    let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        bind_group_layouts: &[Some(&layout)],
        ..Default::default()
    });
    let pipelines: Vec<wgpu::ComputePipeline> = program
        .entries
        .iter()
        .map(|entry| {
            device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(entry),
                layout: Some(&pipeline_layout),
                module: &module,
                entry_point: Some(entry),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: program.constants,
                    zero_initialize_workgroup_memory: program.zero_workgroup_memory,
                },
                cache: None,
            })
        })
        .collect();
    let buffer = |contents: &[u32], usage| {
        device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
            label: None,
            contents: bytemuck::cast_slice(contents),
            usage: wgpu::BufferUsages::STORAGE | usage,
        })
    };
    let inputs = buffer(inputs, wgpu::BufferUsages::empty());
    let results = buffer(&vec![UNWRITTEN; n_results], wgpu::BufferUsages::COPY_SRC);
    let bind_group = device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &layout,
        entries: &[(0, &inputs), (1, &results)].map(|(binding, b)| wgpu::BindGroupEntry {
            binding,
            resource: b.as_entire_binding(),
        }),
    });
    let refused = [
        pollster::block_on(validation.pop()),
        pollster::block_on(internal.pop()),
    ];
    if let Some(error) = refused.into_iter().flatten().next() {
        return Err(format!("{name}: {error}"));
    }
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_bind_group(0, &bind_group, &[]);
        for pipeline in &pipelines {
            pass.set_pipeline(pipeline);
            pass.dispatch_workgroups(workgroups[0], workgroups[1], 1);
        }
    }
    let read = crate::readback::record(gpu, &mut encoder, &[&results]);
    gpu.queue().submit([encoder.finish()]);
    let mut read = read
        .wait(gpu)
        .map_err(|e| format!("{name}: {e} (limit {WAIT_LIMIT:?})"))?;
    Ok(read.remove(0))
}
