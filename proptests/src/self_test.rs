//! Known answers, asked before any verdict: an adapter that gets a sum of 64 lanes wrong is not asked about
//! attention.

use turboquant_wgpu::Gpu;

use crate::probes::dispatch::{self, Program};

const SOURCE: &str = include_str!("../shaders/self_test.wgsl");

/// Tests reductions and barriers over 64, 128 and 256 lanes.
///
/// # Errors
/// What was computed instead of the known answer, or why nothing was.
pub fn run(gpu: &Gpu) -> Result<(), String> {
    let lanes_allowed = gpu.device().limits().max_compute_invocations_per_workgroup;
    for lanes in [64, 128, 256] {
        if lanes <= lanes_allowed {
            reduction(gpu, lanes)?;
        }
    }
    Ok(())
}

fn reduction(gpu: &Gpu, lanes: u32) -> Result<(), String> {
    let constants = [("LANES", f64::from(lanes))];
    let program = Program {
        constants: &constants,
        ..Program::new(SOURCE, &["reduce"])
    };
    let results = dispatch::run(gpu, program, &[0], 2 + lanes as usize, [1, 1])
        .map_err(|why| format!("self-test: {why}"))?;
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
