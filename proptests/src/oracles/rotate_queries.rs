//! Oracle of `rotate_queries`.

use turboquant_wgpu::Rotation;

use crate::arithmetic::{Arithmetic, SMALLEST_NORMAL, inv_sqrt_error, l2, rht, spread};

/// Values, each with the bound on its error.
#[derive(Clone, Debug, Default)]
pub struct Bounded {
    /// References.
    pub values: Vec<f64>,
    /// Bounds.
    pub errors: Vec<f64>,
    /// Bound on the Euclidean norm of all errors together, which is less than the elements' bounds would
    /// give: every stage of a transform is orthogonal up to scale.
    pub errors_l2: f64,
}

impl Bounded {
    /// Values that are known exactly: what a device left in a buffer.
    #[must_use]
    pub fn exact(values: &[f32]) -> Self {
        Self {
            values: values.iter().map(|&v| f64::from(v)).collect(),
            errors: vec![0.0; values.len()],
            errors_l2: 0.0,
        }
    }

    /// The most that the errors can sum to with these weights, whose Euclidean norm is given.
    #[must_use]
    pub fn carried(&self, weights: &[f64], weights_l2: f64) -> f64 {
        if self.errors_l2 == 0.0 {
            return 0.0;
        }
        let elements: f64 = self
            .errors
            .iter()
            .zip(weights)
            .map(|(e, w)| e * w.abs())
            .sum();
        elements.min(self.errors_l2 * weights_l2)
    }
}

/// RHT(q; polar), for a finite query. A query with a NaN or an infinity in it is the zero query.
#[must_use]
pub fn polar(arithmetic: Arithmetic, rotation: &Rotation, q: &[f32]) -> Bounded {
    if q.iter().any(|v| !v.is_finite()) {
        return Bounded::exact(&vec![0.0; q.len()]);
    }
    transform(arithmetic, rotation, &rotation.polar, &Bounded::exact(q))
}

/// RHT(q_rot; jl), judged on a rotated query with its errors (none for what a device left).
///
/// The kernel transforms q_rot before it is scaled back by an exact power of two, so a q_rot that fell
/// into the subnormals there was still exact here: the allowance for flushing covers it.
#[must_use]
pub fn jl(arithmetic: Arithmetic, rotation: &Rotation, q_rot: &Bounded) -> Bounded {
    transform(arithmetic, rotation, &rotation.jl, q_rot)
}

/// An element is off by γ_{log₂ d + 1}·Σ|x|/√d (stages and factor), by the factor's own error, by what
/// the inputs' errors sum to, and by what may have been flushed. All elements together are off by
/// γ_{log₂ d + 1}·‖x‖₂ and so on, since every stage is orthogonal up to scale.
fn transform(
    arithmetic: Arithmetic,
    rotation: &Rotation,
    signs: &turboquant_wgpu::Signs,
    x: &Bounded,
) -> Bounded {
    let head_dim = rotation.head_dim();
    let d = head_dim.get() as f64;
    let largest = x.values.iter().fold(0.0_f64, |m, v| m.max(v.abs()));
    // In the scaled computation the largest element is at least 1 and sums below 2^-126 may vanish;
    // besides, inputs and results may.
    let flush = d * SMALLEST_NORMAL * (2.0 + largest);
    let values = rht(signs, &x.values);
    let gamma = arithmetic.transform(head_dim, 1);
    let common = inv_sqrt_error(head_dim);
    let carried = spread(&x.errors).min(x.errors_l2);
    let independent = gamma * (spread(&x.values) + carried);
    let size = l2(&x.values) + x.errors_l2;
    Bounded {
        errors: values
            .iter()
            .map(|v| independent + carried + common * v.abs() + flush)
            .collect(),
        errors_l2: x.errors_l2 + (gamma + common) * size + flush * d.sqrt(),
        values,
    }
}
