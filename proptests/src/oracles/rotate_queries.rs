//! Oracle of `rotate_queries`.

use turboquant_wgpu::Rotation;

use crate::arithmetic::{Arithmetic, SMALLEST_NORMAL, inv_sqrt_error, rht, spread};

/// Values, each with the bound on its error.
#[derive(Clone, Debug, Default)]
pub struct Bounded {
    /// References.
    pub values: Vec<f64>,
    /// Bounds.
    pub errors: Vec<f64>,
}

impl Bounded {
    /// Values that are known exactly: what a device left in a buffer.
    #[must_use]
    pub fn exact(values: &[f32]) -> Self {
        Self {
            values: values.iter().map(|&v| f64::from(v)).collect(),
            errors: vec![0.0; values.len()],
        }
    }
}

/// RHT(q; polar), for a finite query. A query with a NaN or an infinity in it is the zero query.
#[must_use]
pub fn polar(arithmetic: Arithmetic, rotation: &Rotation, q: &[f32]) -> Bounded {
    if q.iter().any(|v| !v.is_finite()) {
        return Bounded {
            values: vec![0.0; q.len()],
            errors: vec![0.0; q.len()],
        };
    }
    let exact: Vec<f64> = q.iter().map(|&v| f64::from(v)).collect();
    transform(
        arithmetic,
        rotation,
        &rotation.polar,
        &exact,
        &vec![0.0; q.len()],
    )
}

/// RHT(q_rot; jl), judged on a rotated query with its errors (none for what a device left).
///
/// The kernel transforms q_rot before it is scaled back by an exact power of two, so a q_rot that fell
/// into the subnormals there was still exact here: the allowance for flushing covers it.
#[must_use]
pub fn jl(arithmetic: Arithmetic, rotation: &Rotation, q_rot: &Bounded) -> Bounded {
    transform(
        arithmetic,
        rotation,
        &rotation.jl,
        &q_rot.values,
        &q_rot.errors,
    )
}

/// An element is off by γ_{log₂ d + 1}·Σ|x|/√d (stages and factor), by the factor's own error, by what
/// the inputs' errors sum to, and by what may have been flushed.
fn transform(
    arithmetic: Arithmetic,
    rotation: &Rotation,
    signs: &turboquant_wgpu::Signs,
    x: &[f64],
    errors: &[f64],
) -> Bounded {
    let head_dim = rotation.head_dim();
    let largest = x.iter().fold(0.0_f64, |m, v| m.max(v.abs()));
    // In the scaled computation the largest element is at least 1 and sums below 2^-126 may vanish;
    // besides, inputs and results may.
    let flush = head_dim.get() as f64 * SMALLEST_NORMAL * (2.0 + largest);
    let values = rht(signs, x);
    let independent = arithmetic.transform(head_dim, 1) * (spread(x) + spread(errors));
    let carried = spread(errors);
    let common = inv_sqrt_error(head_dim);
    let errors = values
        .iter()
        .map(|v| independent + carried + common * v.abs() + flush)
        .collect();
    Bounded { values, errors }
}
