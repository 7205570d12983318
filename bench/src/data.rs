//! Source buffers of random normal numbers.

use half::f16;
use half::slice::HalfFloatSliceExt;
use rand_xoshiro::Xoshiro256StarStar;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use turboquant_wgpu::Gpu;

/// The host draws no more numbers than this; longer buffers repeat them. 16 MiB.
const DRAWN: usize = 4 << 20;

/// `n` normal deviates, the same for the same seed (Box and Muller, 1958).
pub(crate) fn normal(n: usize, seed: u64) -> Vec<f32> {
    let mut bits = Xoshiro256StarStar::seed_from_u64(seed);
    // 53 bits of a uniform draw in (0, 1].
    let mut uniform = move || ((bits.next_u64() >> 11) + 1) as f64 / (1_u64 << 53) as f64;
    (0..n.div_ceil(2))
        .flat_map(|_| {
            let radius = (-2.0 * uniform().ln()).sqrt();
            let (sin, cos) = (std::f64::consts::TAU * uniform()).sin_cos();
            [(radius * cos) as f32, (radius * sin) as f32]
        })
        .take(n)
        .collect()
}

/// A storage buffer of normal deviates, `floats` long.
pub(crate) fn source(gpu: &Gpu, floats: u64, seed: u64) -> wgpu::Buffer {
    let drawn = normal((floats as usize).min(DRAWN), seed);
    repeated(gpu, 4 * floats, bytemuck::cast_slice(&drawn))
}

/// A storage buffer of normal deviates in f16, `halves` long.
pub(crate) fn source_f16(gpu: &Gpu, halves: u64, seed: u64) -> wgpu::Buffer {
    let drawn: Vec<f16> = normal((halves as usize).min(DRAWN), seed)
        .into_iter()
        .map(f16::from_f32)
        .collect();
    repeated(
        gpu,
        2 * halves,
        bytemuck::cast_slice(drawn.reinterpret_cast()),
    )
}

/// A storage buffer of these bytes.
#[cfg(test)]
pub(crate) fn upload(gpu: &Gpu, bytes: &[u8]) -> wgpu::Buffer {
    repeated(gpu, bytes.len() as u64, bytes)
}

/// A storage buffer of `size` bytes, which repeats those that are given.
fn repeated(gpu: &Gpu, size: u64, bytes: &[u8]) -> wgpu::Buffer {
    let buffer = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: Some("source"),
        size,
        usage: wgpu::BufferUsages::STORAGE
            | wgpu::BufferUsages::COPY_DST
            | wgpu::BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    });
    for start in (0..size).step_by(bytes.len().max(1)) {
        let n = (size - start).min(bytes.len() as u64) as usize;
        gpu.queue().write_buffer(&buffer, start, &bytes[..n]);
    }
    buffer
}

/// A storage buffer for results, `floats` long.
pub(crate) fn output(gpu: &Gpu, floats: u64) -> wgpu::Buffer {
    gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: Some("output"),
        size: 4 * floats,
        usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviates_are_normal() {
        let x = normal(100_001, 3);
        assert_eq!(x.len(), 100_001);
        let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / x.len() as f64;
        let square = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
        // Seven standard deviations of the mean and of the mean square.
        assert!(mean.abs() < 7.0 / (x.len() as f64).sqrt(), "{mean}");
        assert!(
            (square - 1.0).abs() < 7.0 * (2.0 / x.len() as f64).sqrt(),
            "{square}"
        );
        assert_ne!(normal(4, 1), normal(4, 2));
    }
}
