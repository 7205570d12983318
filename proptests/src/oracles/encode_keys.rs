//! Oracle of `encode_keys`: which key records are right for a vector.

use turboquant_wgpu::Rotation;
use turboquant_wgpu::twin::KeyRecord;

use super::encode_values::{Counted, expect_zero, judge_codes};
use super::norm;
use super::unit::{Classified, Unit, VANISHING, unit};
use crate::arithmetic::{Arithmetic, l2, rht, spread};
use crate::verdict::{Evidence, Violation};

/// Judges one key record. Signs and residual norm are judged on the codes found, not on the reference's.
///
/// # Errors
/// The violation.
pub fn judge(
    arithmetic: Arithmetic,
    rotation: &Rotation,
    x: &[f32],
    found: &KeyRecord,
    evidence: &mut Evidence,
    place: &str,
) -> Result<Counted, Violation> {
    let zero = KeyRecord::zero(rotation.head_dim());
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
            judge_residual(arithmetic, rotation, &unit, found, evidence, place)?;
            Ok(Counted {
                saturated: unit.saturates(),
                ..Counted::default()
            })
        }
    }
}

/// What a correct implementation may have made of the residual.
#[derive(Clone, Debug)]
pub struct Residual {
    /// ρ = ‖r‖.
    pub norm: f64,
    /// Bound on the error of ρ.
    pub norm_error: f64,
    /// z = RHT(r; jl), whose signs are stored.
    pub z: Vec<f64>,
    /// Bound on the error of each z_i.
    pub z_error: Vec<f64>,
}

/// The residual of a rotated unit vector from the centroids of the codes that were chosen.
///
/// r = y − centroid(found codes). The errors of y pass into it, and the subtraction adds u·|r_i|:
/// as a vector, r is off by at most ε_common·‖y‖ + ‖independent errors‖ + u·‖r‖. The norm ρ is off by
/// that, and by its own summation.
///
/// The sign of z = RHT(r/ρ; jl) is that of RHT(r; jl), since a common positive factor changes no
/// sign. Rows of the orthonormal transform have norm 1, so that independent errors of r move an
/// element by at most their Euclidean norm; the common error moves it by ε·|RHT(y; jl)_i|.
#[must_use]
pub fn residual(
    arithmetic: Arithmetic,
    rotation: &Rotation,
    unit: &Unit,
    found: &KeyRecord,
) -> Residual {
    let head_dim = rotation.head_dim();
    let u = arithmetic.unit_roundoff;
    let centroids = head_dim.codebook().centroids.map(f64::from);
    let r: Vec<f64> = unit
        .y
        .iter()
        .enumerate()
        .map(|(i, y)| y - centroids[usize::from(found.code(i))])
        .collect();
    let norm = l2(&r);
    let r_independent = unit.independent_l2 + u * (norm + unit.common + unit.independent_l2);
    let r_error = unit.common * l2(&unit.y) + r_independent;
    let along = rht(&rotation.jl, &unit.y);
    // Product with 1/ρ, the stages, and the factor 1/√d if it is applied.
    let own = arithmetic.transform(head_dim, 2) * (spread(&r) + r_error);
    Residual {
        norm,
        norm_error: r_error + arithmetic.norm(head_dim) * (norm + r_error),
        z: rht(&rotation.jl, &r),
        z_error: along
            .iter()
            .map(|along| unit.common * along.abs() + r_independent + own)
            .collect(),
    }
}

/// Judges the residual norm and the signs.
fn judge_residual(
    arithmetic: Arithmetic,
    rotation: &Rotation,
    unit: &Unit,
    found: &KeyRecord,
    evidence: &mut Evidence,
    place: &str,
) -> Result<(), Violation> {
    let residual = residual(arithmetic, rotation, unit, found);
    let (rho, rho_error) = (residual.norm, residual.norm_error);
    norm::judge(
        "residual norm",
        evidence,
        found.residual_norm,
        rho,
        rho_error,
        || place.to_owned(),
    )?;

    if rho - rho_error < VANISHING {
        let all_clear = found.signs.iter().all(|&b| b == 0);
        if rho + rho_error < VANISHING {
            expect_zero(all_clear, "a residual of norm below 1e-12", place)?;
            return Ok(());
        }
        if all_clear {
            return Ok(());
        }
    }
    for (i, (&z, &error)) in residual.z.iter().zip(&residual.z_error).enumerate() {
        let positive = found.sign(i);
        let distance = if positive { -z } else { z }.max(0.0);
        let right = if positive {
            z + error >= 0.0
        } else {
            z - error < 0.0
        };
        if !right {
            return Err(Violation {
                rule: "residual sign",
                place: format!("{place}, element {i}"),
                detail: format!(
                    "found {}, expected the sign of {z:e} ± {error:.3e} (residual norm {rho:e})",
                    if positive { "+" } else { "−" }
                ),
            });
        }
        evidence.discrete += 1;
        evidence.free += u64::from(z.abs() <= error);
        evidence.note(distance / error);
    }
    Ok(())
}
