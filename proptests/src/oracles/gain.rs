//! The QJL gain, once more from its definition: an oracle that took the library's constant would agree with
//! whatever that became.

use std::f64::consts::PI;

use turboquant_wgpu::{Gain, HeadDim};

/// g for a head dimension: √(π/2)/√d for the unbiased estimate, √(2/π)/√d for the least error, √(π/2)/d as the
/// format's origin has it.
#[must_use]
pub fn gain(gain: Gain, head_dim: HeadDim) -> f64 {
    let d = head_dim.get() as f64;
    match gain {
        Gain::Unbiased => (PI / (2.0 * d)).sqrt(),
        Gain::MinimumError => (2.0 / (PI * d)).sqrt(),
        Gain::Cera => (PI / 2.0).sqrt() / d,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_agrees() {
        for head_dim in HeadDim::ALL {
            for g in Gain::ALL {
                let ours = gain(g, head_dim);
                approx::assert_relative_eq!(g.factor_f64(head_dim), ours, max_relative = 1e-15);
                assert_eq!(g.factor(head_dim), ours as f32);
            }
        }
    }
}
