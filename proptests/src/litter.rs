//! A dispatch that leaves rubbish in workgroup memory.

use turboquant_wgpu::Gpu;

const SOURCE: &str = include_str!("../shaders/litter.wgsl");
/// More than a small GPU runs at once, so that every unit is littered.
const WORKGROUPS: u32 = 256;

/// The pipeline of the dispatch, and what it writes to.
pub struct Litter {
    pipeline: wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
}

impl Litter {
    /// Compiles the shader.
    #[must_use]
    pub fn new(gpu: &Gpu) -> Self {
        let device = gpu.device();
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some("litter"),
            source: wgpu::ShaderSource::Wgsl(SOURCE.into()),
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some("litter"),
            layout: None,
            module: &module,
            entry_point: None,
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        });
        let sink = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("litter"),
            size: 4 * 64 * u64::from(WORKGROUPS),
            usage: wgpu::BufferUsages::STORAGE,
            mapped_at_creation: false,
        });
        let bind_group = device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &[wgpu::BindGroupEntry {
                binding: 0,
                resource: sink.as_entire_binding(),
            }],
        });
        Self {
            pipeline,
            bind_group,
        }
    }

    /// Records the dispatch.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder) {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &self.bind_group, &[]);
        pass.dispatch_workgroups(WORKGROUPS, 1, 1);
    }
}
