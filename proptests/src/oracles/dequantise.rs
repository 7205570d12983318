//! Dequantised keys and values in f64, for end-to-end comparison and inspection.

use turboquant_wgpu::twin::{KeyRecord, ValueRecord};
use turboquant_wgpu::{Gain, Rotation};

use crate::arithmetic::inverse_rht;

/// The value vector that a record stands for: n · RHT⁻¹(centroid(code); polar).
#[must_use]
pub fn value(rotation: &Rotation, record: &ValueRecord) -> Vec<f64> {
    let centroids = rotation.head_dim().codebook().centroids.map(f64::from);
    let norm = f64::from(record.norm);
    let y: Vec<f64> = (0..rotation.head_dim().get())
        .map(|i| norm * centroids[usize::from(record.code(i))])
        .collect();
    inverse_rht(&rotation.polar, &y)
}

/// The key vector whose dot product with a query is the (unscaled) score:
/// n · RHT⁻¹(centroid(code) + ρ·g·√d·RHT⁻¹(±1/√d; jl); polar).
#[must_use]
pub fn key(rotation: &Rotation, record: &KeyRecord, gain: Gain) -> Vec<f64> {
    let head_dim = rotation.head_dim();
    let d = head_dim.get();
    let centroids = head_dim.codebook().centroids.map(f64::from);
    let norm = f64::from(record.norm);
    let factor = f64::from(record.residual_norm) * super::gain::gain(gain, head_dim);
    let signs: Vec<f64> = (0..d)
        .map(|i| if record.sign(i) { 1.0 } else { -1.0 })
        .collect();
    let sketch = inverse_rht(&rotation.jl, &signs);
    let y: Vec<f64> = (0..d)
        .map(|i| norm * (centroids[usize::from(record.code(i))] + factor * sketch[i]))
        .collect();
    inverse_rht(&rotation.polar, &y)
}
