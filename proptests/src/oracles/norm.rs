//! Which f16 norms are right for a real interval.

use half::f16;

use crate::verdict::{Evidence, Violation};

/// The real numbers that round to `h` (to nearest, ties to even, saturating at 65504), widened to a closed interval:
/// from the midpoint below to the midpoint above.
fn rounding_interval(h: f16) -> (f64, f64) {
    let bits = h.to_bits();
    let value = f64::from(h);
    let below = if bits == 0 {
        0.0
    } else {
        (f64::from(f16::from_bits(bits - 1)) + value) / 2.0
    };
    let above = if h == f16::MAX {
        f64::INFINITY
    } else {
        (value + f64::from(f16::from_bits(bits + 1))) / 2.0
    };
    (below, above)
}

/// True if norms other than `h` are right for some real in [n − e, n + e].
#[must_use]
pub fn is_free(h: f16, n: f64, e: f64) -> bool {
    let (low, high) = rounding_interval(h);
    n - e < low || high < n + e
}

/// Judges a stored norm: right if some real in [n − e, n + e] rounds to it.
///
/// # Errors
/// The violation. A norm that is NaN, infinite or negative is always one.
pub fn judge(
    rule: &'static str,
    evidence: &mut Evidence,
    found: f16,
    n: f64,
    e: f64,
    place: impl FnOnce() -> String,
) -> Result<(), Violation> {
    let valid = found.is_finite() && found.to_bits() >> 15 == 0;
    let (low, high) = rounding_interval(found);
    // The share of the bound that is needed to accept the norm.
    let distance = (low - n).max(n - high).max(0.0);
    if !valid || distance > e {
        return Err(Violation {
            rule,
            place: place(),
            detail: format!(
                "found f16 {found} (bits {:#06x}), expected the rounding of {n:e} ± {e:.3e}",
                found.to_bits()
            ),
        });
    }
    evidence.discrete += 1;
    evidence.free += u64::from(is_free(found, n, e));
    evidence.note(if e > 0.0 { distance / e } else { 0.0 });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(found: f16, n: f64, e: f64) -> Result<Evidence, Violation> {
        let mut evidence = Evidence::default();
        judge("r", &mut evidence, found, n, e, String::new).map(|()| evidence)
    }

    #[test]
    fn only_the_rounding_is_right_and_ties_are_free() {
        let one = f16::ONE;
        let next = f16::from_bits(one.to_bits() + 1);
        let middle = (f64::from(one) + f64::from(next)) / 2.0;
        assert_eq!(verdict(one, 1.0, 1e-7).expect("right").free, 0);
        assert!(verdict(next, 1.0, 1e-7).is_err());
        assert_eq!(verdict(one, middle, 1e-7).expect("free").free, 1);
        assert_eq!(verdict(next, middle, 1e-7).expect("free").free, 1);
        let share = verdict(next, middle - 4e-8, 1e-7).expect("free").largest;
        approx::assert_abs_diff_eq!(share, 0.4, epsilon = 1e-6);
    }

    #[test]
    fn saturation_and_invalid_norms() {
        assert!(verdict(f16::MAX, 1e30, 1.0).is_ok());
        assert!(verdict(f16::INFINITY, 1e30, 1.0).is_err());
        assert!(verdict(f16::NAN, 1.0, 1.0).is_err());
        assert!(verdict(f16::NEG_ZERO, 0.0, 1.0).is_err());
        assert!(
            verdict(f16::ZERO, 1e-9, 1e-12).is_ok(),
            "half of f16's smallest is 2.98e-8"
        );
        assert!(verdict(f16::ZERO, 4e-8, 1e-12).is_err());
    }
}
