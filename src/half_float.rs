//! f32 → f16 rounding for stored norms, the host's one place for it.
//!
//! The shaders carry the same rule on integers (`norm_to_f16` in `shaders/common.wgsl`), because
//! WGSL's `pack2x16float` may round either way and is any value past ±65504.

use half::f16;

/// The largest finite f16.
pub const F16_MAX: f32 = 65504.0;

/// The smallest f32 that would round to an f16 infinity: halfway between 65504 and 65536, a tie
/// that goes to the even side.
pub const SATURATION_THRESHOLD: f32 = 65520.0;

/// Rounds a norm to f16, to nearest and ties to even, saturating at 65504.
///
/// `norm` is finite or +∞ and not negative; the second value says whether it saturated.
#[must_use]
pub fn norm_to_f16(norm: f32) -> (f16, bool) {
    if norm >= SATURATION_THRESHOLD {
        (f16::MAX, true)
    } else {
        (f16::from_f32(norm), false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threshold_is_where_rounding_would_overflow() {
        assert!(f16::from_f32(SATURATION_THRESHOLD).is_infinite());
        assert_eq!(f16::from_f32(SATURATION_THRESHOLD.next_down()), f16::MAX);
        assert_eq!(norm_to_f16(f32::MAX), (f16::MAX, true));
        assert_eq!(norm_to_f16(F16_MAX), (f16::MAX, false));
        assert_eq!(norm_to_f16(f32::INFINITY), (f16::MAX, true));
    }
}
