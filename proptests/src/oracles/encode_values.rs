//! Oracle of `encode_values`: which value records are right for a vector.

use turboquant_wgpu::twin::ValueRecord;
use turboquant_wgpu::{HeadDim, Rotation};

use super::norm;
use super::unit::{Classified, Unit, unit};
use crate::arithmetic::Arithmetic;
use crate::verdict::{Evidence, Violation};

/// What a record says became of its vector, for the counters: `None` where either is right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Zeroed for a NaN or an infinity.
    pub non_finite: bool,
    /// Zeroed for a norm below the threshold.
    pub vanishing: bool,
    /// Norm saturated.
    pub saturated: Option<bool>,
}

/// Judges one value record.
///
/// # Errors
/// The violation.
pub fn judge(
    arithmetic: Arithmetic,
    rotation: &Rotation,
    x: &[f32],
    found: &ValueRecord,
    evidence: &mut Evidence,
    place: &str,
) -> Result<Counted, Violation> {
    let zero = ValueRecord::zero(rotation.head_dim());
    match unit(arithmetic, rotation, x) {
        Classified::NonFinite => {
            expect_zero(*found == zero, "a vector with a NaN or an infinity", place)?;
            Ok(Counted {
                non_finite: true,
                saturated: Some(false),
                ..Counted::default()
            })
        }
        Classified::Vanishing => {
            expect_zero(*found == zero, "a vector of norm below 1e-12", place)?;
            Ok(Counted {
                vanishing: true,
                saturated: Some(false),
                ..Counted::default()
            })
        }
        Classified::NearVanishing(_) if *found == zero => Ok(Counted {
            vanishing: true,
            saturated: Some(false),
            ..Counted::default()
        }),
        Classified::NearVanishing(unit) | Classified::Unit(unit) => {
            judge_codes(
                rotation.head_dim(),
                &unit,
                |i| found.code(i),
                evidence,
                place,
            )?;
            let (n, e) = (unit.norm, unit.norm_error);
            norm::judge("norm", evidence, found.norm, n, e, || place.to_owned())?;
            Ok(Counted {
                saturated: unit.saturates(),
                ..Counted::default()
            })
        }
    }
}

/// The rule for zero records.
pub(super) fn expect_zero(is_zero: bool, what: &str, place: &str) -> Result<(), Violation> {
    if is_zero {
        return Ok(());
    }
    Err(Violation {
        rule: "zero record",
        place: place.to_owned(),
        detail: format!("found bits set, expected every code, sign and norm bit 0 for {what}"),
    })
}

/// Judges the codes of a rotated unit vector: code c is right for element i if and only if
/// [y_i − δ_i, y_i + δ_i] meets the cell of c.
pub(super) fn judge_codes(
    head_dim: HeadDim,
    unit: &Unit,
    code: impl Fn(usize) -> u8,
    evidence: &mut Evidence,
    place: &str,
) -> Result<(), Violation> {
    let book = head_dim.codebook();
    let boundaries = book.boundaries.map(f64::from);
    for (i, (&y, &error)) in unit.y.iter().zip(&unit.y_error).enumerate() {
        let found = usize::from(code(i));
        // Cell c is [boundaries[c − 1], boundaries[c]).
        let below = if found == 0 {
            f64::NEG_INFINITY
        } else {
            boundaries[found - 1]
        };
        let above = if found == 3 {
            f64::INFINITY
        } else {
            boundaries[found]
        };
        let distance = (below - y).max(y - above).max(0.0);
        let right = y + error >= below && y - error < above;
        if !right {
            return Err(Violation {
                rule: "code",
                place: format!("{place}, element {i}"),
                detail: format!(
                    "found code {found}, whose cell is [{below}, {above}), for the coordinate {y:e} ± {error:.3e}"
                ),
            });
        }
        let free = unit.code_is_free(book, i);
        evidence.discrete += 1;
        evidence.free += u64::from(free);
        evidence.note(distance / error);
    }
    Ok(())
}
