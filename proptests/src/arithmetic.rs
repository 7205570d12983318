//! What the error bounds assume about a device's f32 arithmetic, and the building blocks of running
//! error analysis.
//!
//! Source: Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., chapter 3, for γ_k and
//! the running analysis; W3C WGSL, "Floating Point Evaluation", for the accuracy of each operation.
//!
//! Every bound here holds for any order of summation, fused or not: the depth of a sum enters,
//! its order does not.

use turboquant_wgpu::HeadDim;

/// Gap between neighbouring floats relative to the lower of them: one ULP is at most this.
pub const ULP: f64 = 1.0 / 8_388_608.0;

/// Smallest normal f32. A result below may be flushed to zero.
pub const SMALLEST_NORMAL: f64 = 1.175_494_350_822_287_5e-38;

/// How f32 operations round, and how deep the norm's sums are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arithmetic {
    /// Unit roundoff u: 2^-23 by the standard, which lets a result go to either neighbour, and
    /// 2^-24 where rounding to nearest has been established.
    pub unit_roundoff: f64,
    /// Sums run over the whole vector in sequence (the CPU twin), not over 16 elements a lane and then
    /// over the lanes (the kernels).
    pub sequential: bool,
}

impl Arithmetic {
    /// What WGSL guarantees: the neighbour on either side.
    pub const STANDARD: Self = Self {
        unit_roundoff: ULP,
        sequential: false,
    };
    /// A device that rounds to nearest.
    pub const NEAREST: Self = Self {
        unit_roundoff: ULP / 2.0,
        sequential: false,
    };
    /// The CPU twin.
    pub const TWIN: Self = Self {
        unit_roundoff: ULP / 2.0,
        sequential: true,
    };

    /// γ_k = k·u/(1 − k·u): relative error of a product of k factors (1 + δ), |δ| ≤ u, and of a sum
    /// whose every term passes through at most k roundings.
    #[must_use]
    pub fn gamma(&self, k: usize) -> f64 {
        let ku = k as f64 * self.unit_roundoff;
        ku / (1.0 - ku)
    }

    /// Roundings that a term of a vector's sum of squares passes through: its own product, and the
    /// additions after it.
    #[must_use]
    pub fn norm_depth(&self, head_dim: HeadDim) -> usize {
        if self.sequential {
            head_dim.get()
        } else {
            16 + head_dim.get() / 16
        }
    }

    /// Relative error of 1/√S for a sum of squares S of the kernels' depth: S is off by γ, its
    /// root by half of that, and inverseSqrt by 2 ULP.
    #[must_use]
    pub fn inverse_norm(&self, head_dim: HeadDim) -> f64 {
        compose(&[self.gamma(self.norm_depth(head_dim)) / 2.0, 2.0 * ULP])
    }

    /// Relative error of the norm √S, computed as S · inverseSqrt(S).
    #[must_use]
    pub fn norm(&self, head_dim: HeadDim) -> f64 {
        compose(&[
            self.gamma(self.norm_depth(head_dim)) / 2.0,
            2.0 * ULP,
            self.unit_roundoff,
        ])
    }

    /// Relative error, with respect to Σ|x|/√d, of one element of RHT(x) with `extra` roundings besides
    /// those of the log₂ d stages.
    ///
    /// An element is a sum of d terms in a tree of depth log₂ d.
    #[must_use]
    pub fn transform(&self, head_dim: HeadDim, extra: usize) -> f64 {
        self.gamma(head_dim.log2() as usize + extra)
    }
}

/// Relative error of a product of factors with the given relative errors.
#[must_use]
pub fn compose(errors: &[f64]) -> f64 {
    errors.iter().map(|e| 1.0 + e).product::<f64>() - 1.0
}

/// How far the f32 constant 1/√d is from 1/√d, relatively. It is a factor of every transform.
#[must_use]
pub fn inv_sqrt_error(head_dim: HeadDim) -> f64 {
    (f64::from(head_dim.inv_sqrt()) * (head_dim.get() as f64).sqrt() - 1.0).abs()
}

/// Orthonormal Walsh–Hadamard transform in f64, natural order.
pub fn hadamard(x: &mut [f64]) {
    let mut half = 1;
    while half < x.len() {
        for block in x.chunks_exact_mut(2 * half) {
            let (low, high) = block.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let scale = 1.0 / (x.len() as f64).sqrt();
    x.iter_mut().for_each(|v| *v *= scale);
}

/// RHT(x; signs) in f64.
#[must_use]
pub fn rht(signs: &turboquant_wgpu::Signs, x: &[f64]) -> Vec<f64> {
    let mut y: Vec<f64> = x
        .iter()
        .enumerate()
        .map(|(i, &v)| if signs.is_positive(i) { v } else { -v })
        .collect();
    hadamard(&mut y);
    y
}

/// The inverse of [`rht`] in f64.
#[must_use]
pub fn inverse_rht(signs: &turboquant_wgpu::Signs, y: &[f64]) -> Vec<f64> {
    let mut x = y.to_vec();
    hadamard(&mut x);
    for (i, v) in x.iter_mut().enumerate() {
        if !signs.is_positive(i) {
            *v = -*v;
        }
    }
    x
}

/// Euclidean norm.
#[must_use]
pub fn l2(x: &[f64]) -> f64 {
    x.iter().map(|v| v * v).sum::<f64>().sqrt()
}

/// Σ|x|/√d: the most that errors of the size of x can sum to in one element of a transform.
#[must_use]
pub fn spread(x: &[f64]) -> f64 {
    x.iter().map(|v| v.abs()).sum::<f64>() / (x.len() as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gamma_exceeds_the_sum_of_its_roundings() {
        let a = Arithmetic::STANDARD;
        for k in [1, 9, 128] {
            assert!(a.gamma(k) > k as f64 * a.unit_roundoff);
            assert!(a.gamma(k) < k as f64 * a.unit_roundoff * 1.001);
        }
        approx::assert_relative_eq!(compose(&[0.5, 1.0]), 2.0);
    }

    /// The bound on a transform's element covers what f32 does, on many vectors.
    #[test]
    fn the_transform_bound_covers_the_twin() {
        use rand_xoshiro::rand_core::{Rng, SeedableRng};
        let mut rng = rand_xoshiro::Xoshiro256StarStar::seed_from_u64(1);
        let mut largest: f64 = 0.0;
        for head_dim in HeadDim::ALL {
            let signs = turboquant_wgpu::Signs::from_seed(head_dim, 5);
            for _ in 0..200 {
                let x: Vec<f32> = (0..head_dim.get())
                    .map(|_| (rng.next_u64() >> 40) as f32 / 8_388_608.0 - 1.0)
                    .collect();
                let exact: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
                let reference = rht(&signs, &exact);
                let bound = Arithmetic::TWIN.transform(head_dim, 1) * spread(&exact);
                let mut y = x;
                turboquant_wgpu::rotation::rht(head_dim, &signs, &mut y);
                for (a, b) in y.iter().zip(&reference) {
                    let allowed = bound + inv_sqrt_error(head_dim) * b.abs();
                    largest = largest.max((f64::from(*a) - b).abs() / allowed);
                }
            }
        }
        assert!(largest < 1.0, "observed/bound {largest}");
        assert!(
            largest > 1e-2,
            "a bound this loose tests nothing: {largest}"
        );
    }
}
