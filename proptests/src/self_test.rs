//! Known answers, asked before any verdict: an adapter that gets a sum of 64 lanes wrong is not asked about
//! attention.

use turboquant_wgpu::Gpu;
use wgpu::util::DeviceExt;

use crate::adapters::WAIT_LIMIT;
use crate::arithmetic::Arithmetic;

const SOURCE: &str = include_str!("../shaders/self_test.wgsl");
/// Pairs whose sums and products must be rounded to establish rounding to nearest.
const PAIRS: usize = 16_384;

/// Tests reductions and barriers over 64, 128 and 256 lanes, and finds out how the adapter rounds.
///
/// # Errors
/// What was computed instead of the known answer, or why nothing was.
pub fn run(gpu: &Gpu) -> Result<Arithmetic, String> {
    let lanes_allowed = gpu.device().limits().max_compute_invocations_per_workgroup;
    for lanes in [64, 128, 256] {
        if lanes <= lanes_allowed {
            reduction(gpu, lanes)?;
        }
    }
    rounding(gpu)
}

fn reduction(gpu: &Gpu, lanes: u32) -> Result<(), String> {
    let constants = [("LANES", f64::from(lanes))];
    let results = dispatch(gpu, "reduce", &constants, &[0.0; 2], 2 + lanes as usize, 1)?;
    let sum = lanes * (lanes + 1) / 2;
    // After a full turn every lane has its own number back, and lane 0 has seen all of them.
    let expected = [sum, sum].into_iter().chain(1..=lanes);
    for (i, (found, expected)) in results.iter().zip(expected).enumerate() {
        if *found != expected {
            return Err(format!(
                "self-test: reduction over {lanes} lanes: result {i} is {found}, expected {expected}: \
                 barriers or workgroup memory do not work"
            ));
        }
    }
    Ok(())
}

/// Sums and products of random pairs against rounding to nearest. All alike establishes u = 2^-24; else the
/// standard's u = 2^-23 stays, and results further off than a neighbour are a failure.
fn rounding(gpu: &Gpu) -> Result<Arithmetic, String> {
    use rand_xoshiro::rand_core::{Rng, SeedableRng};
    let mut rng = rand_xoshiro::Xoshiro256StarStar::seed_from_u64(0x726f_756e_6400);
    let mut number = || {
        let bits = rng.next_u64();
        // Significand and sign at random, exponents from −8 to 7: nothing overflows or is subnormal.
        let exponent = 119 + (bits >> 40 & 15) as u32;
        f32::from_bits((bits as u32 & 0x807f_ffff) | exponent << 23)
    };
    let inputs: Vec<f32> = (0..2 * PAIRS).map(|_| number()).collect();
    let results = dispatch(
        gpu,
        "round",
        &[("LANES", 64.0)],
        &inputs,
        2 * PAIRS,
        PAIRS.div_ceil(64) as u32,
    )?;
    let mut nearest = true;
    for (pair, found) in inputs.chunks_exact(2).zip(results.chunks_exact(2)) {
        let (x, y) = (f64::from(pair[0]), f64::from(pair[1]));
        // Both are exact in f64: products of 24-bit significands, sums of near exponents.
        for (exact, bits) in [(x + y, found[0]), (x * y, found[1])] {
            let rounded = exact as f32;
            let found = f32::from_bits(bits);
            nearest &= found == rounded;
            let neighbours = [rounded.next_down(), rounded, rounded.next_up()];
            if !neighbours.contains(&found) {
                return Err(format!(
                    "self-test: {x:e} and {y:e} give {found:e}, expected {exact:e} rounded to a neighbour"
                ));
            }
        }
    }
    Ok(if nearest {
        Arithmetic::NEAREST
    } else {
        Arithmetic::STANDARD
    })
}

/// Runs an entry point and reads its results; they start as a pattern that is no answer.
fn dispatch(
    gpu: &Gpu,
    entry: &str,
    constants: &[(&str, f64)],
    inputs: &[f32],
    n_results: usize,
    workgroups: u32,
) -> Result<Vec<u32>, String> {
    let device = gpu.device();
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some("self-test"),
        source: wgpu::ShaderSource::Wgsl(SOURCE.into()),
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
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(entry),
        layout: Some(&pipeline_layout),
        module: &module,
        entry_point: Some(entry),
        compilation_options: wgpu::PipelineCompilationOptions {
            constants,
            zero_initialize_workgroup_memory: false,
        },
        cache: None,
    });
    let buffer = |contents: &[u8], usage| {
        device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
            label: None,
            contents,
            usage,
        })
    };
    let inputs = buffer(bytemuck::cast_slice(inputs), wgpu::BufferUsages::STORAGE);
    let results = buffer(
        bytemuck::cast_slice(&vec![0xdead_beef_u32; n_results]),
        wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC,
    );
    let bind_group = device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &layout,
        entries: &[&inputs, &results].map(|b| wgpu::BindGroupEntry {
            binding: u32::from(std::ptr::eq(b, &results)),
            resource: b.as_entire_binding(),
        }),
    });
    if let Some(error) = pollster::block_on(scope.pop()) {
        return Err(format!("self-test: {entry}: {error}"));
    }
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &bind_group, &[]);
        pass.dispatch_workgroups(workgroups, 1, 1);
    }
    let read = crate::readback::record(gpu, &mut encoder, &[&results]);
    gpu.queue().submit([encoder.finish()]);
    let mut read = read
        .wait(gpu)
        .map_err(|e| format!("self-test: {entry}: {e} (limit {WAIT_LIMIT:?})"))?;
    Ok(read.remove(0))
}
