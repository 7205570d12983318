//! The factor of the residual term in a score.

use core::f64::consts::{FRAC_2_PI, FRAC_PI_2};

use crate::HeadDim;

/// The QJL gain g in score = scale · n · (Σ q_rot·centroid + ρ · g · Σ ±q_jl).
///
/// The signs of the rotated residual say in which half-space each coordinate lies, not how far; g turns
/// their sum into an estimate of the residual's inner product (QJL, arXiv:2406.03482; TurboQuant,
/// arXiv:2504.19874, section 3.2). All three read the same bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Gain {
    /// √(π/2)/√d: over random rotations the estimate's expectation is ⟨q, k⟩. (The paper's √(π/2)/d
    /// is for a projection with N(0,1) entries; the transform here is orthonormal.)
    #[default]
    Unbiased,
    /// √(2/π)/√d: the least mean square error of a dense residual.
    MinimumError,
    /// √(π/2)/d: what cera 0.5.5 computes, to reproduce its outputs. It is √d too small, so that the
    /// estimate keeps most of the bias of the 2-bit codes.
    Cera,
}

impl Gain {
    /// Every gain.
    pub const ALL: [Self; 3] = [Self::Unbiased, Self::MinimumError, Self::Cera];

    /// g in f64.
    #[must_use]
    pub fn factor_f64(self, head_dim: HeadDim) -> f64 {
        let d = head_dim.get() as f64;
        match self {
            Self::Unbiased => (FRAC_PI_2 / d).sqrt(),
            Self::MinimumError => (FRAC_2_PI / d).sqrt(),
            Self::Cera => FRAC_PI_2.sqrt() / d,
        }
    }

    /// g rounded to f32, the value that kernels and twin multiply with.
    #[must_use]
    pub fn factor(self, head_dim: HeadDim) -> f32 {
        self.factor_f64(head_dim) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gains_stand_in_their_ratios() {
        for d in HeadDim::ALL {
            let root = (d.get() as f64).sqrt();
            let unbiased = Gain::Unbiased.factor_f64(d);
            approx::assert_relative_eq!(
                unbiased,
                Gain::Cera.factor_f64(d) * root,
                max_relative = 1e-14
            );
            approx::assert_relative_eq!(
                Gain::MinimumError.factor_f64(d),
                unbiased * FRAC_2_PI,
                max_relative = 1e-14
            );
        }
    }
}
