//! `law_exact`: inputs for which operations are exact in any order, fused or not, compared bit for bit.
//!
//! What is exact, and why:
//! - **Rotated queries** of small integers times one power of two, d = 64 and 256. Sums of d integers up to 4
//!   are integers below 2^10, the second transform's below 2^18: no partial sum, in whatever order,
//!   is rounded. 1/√d is a power of two. For d = 32 and 128 the first transform rounds just once, in
//!   its product with the f32 1/√d, which is known where the adapter rounds to nearest.
//! - **Records** of a Walsh row times the polar signs times a power of two, any d. Scaled, every
//!   element is ±1, so the products with 1/‖x‖, whatever its error, are ±v for one f32 v. All partial sums of
//!   the transform are ±v times powers of two or cancel exactly: one coordinate is ±√d·v, far out in
//!   its cell, and the others are 0, which takes the upper cell. The oracle of the encoders must
//!   call those codes free, since they sit on a boundary; here they are not. Norm and residual norm are the
//!   roundings of ‖x‖ and ρ unless these lie within their errors of the middle of two f16s, and
//!   the signs follow from z wherever it is off zero by more than its error.
//! - **Attention** with zero queries over values of which one is ±2^k in one element and the others are
//!   zero. All scores are 0, all weights exactly 1, their sum the number of visible timesteps. The one value
//!   has codes of one magnitude, in the signs of a Walsh row: rotated back, all but one element cancel
//!   exactly, whatever the factor 1/sum is. The one that does not is n·√d·c/T for T visible timesteps, up to
//!   the accuracy of a division, and of one product with 1/√d: exact sums cannot make up for a
//!   reciprocal that WGSL allows 2.5 ULP.
//!
//! The centroids are no short fractions, so a sum of two of different magnitude is rounded: attention over
//! general values has no exact tier. Zeros are compared as numbers, for the sign of an exact
//! cancellation depends on the direction of rounding.

use half::f16;
use turboquant_wgpu::HeadDim;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::KeyRecord;

use super::{demand, records};
use crate::adapters::Device;
use crate::arithmetic::{Arithmetic, ULP, rht};
use crate::case::Case;
use crate::fixture::{Attended, Fixture, vector};
use crate::oracles::encode_keys::residual;
use crate::oracles::norm::is_free;
use crate::oracles::unit::{Classified, unit};
use crate::verdict::{Evidence, Failure, Outcome, Violation, within};

/// Checks the three parts on one layer.
pub fn check(device: &Device, case: &Case) -> Outcome {
    let queries = case.queries()?;
    let keys = powers_of_two(&case.keys()?, case.keys.exponent);
    let values = Pulse::values(case);
    let mut fixture = Fixture::with(device, case, keys, values)?;
    let mut encoder = device.encoder();
    fixture.encode_rows(&mut encoder, case.encode_split)?;
    let raw = fixture.read_raw(encoder)?;
    let rotated = fixture.attend(device.encoder(), &queries)?;
    let attended = fixture.attend(device.encoder(), &vec![0.0; queries.len()])?;
    let mut evidence = Evidence::default();
    rotations(device, case, &queries, &rotated, &mut evidence)?;
    let records = records(&fixture, &raw, Kind::Keys)?;
    for (head, records) in records.iter().enumerate() {
        for (t, found) in records.iter().enumerate() {
            let index = t * case.n_kv_heads as usize + head;
            let x = vector(&fixture.keys, case.head_dim()?, index);
            let place = format!("timestep {t}, head {head}");
            record(device.arithmetic, case, x, found, &mut evidence, &place)?;
        }
    }
    outputs(case, &attended, &mut evidence)?;
    Ok(evidence)
}

/// The signs of a tensor, with one magnitude.
fn powers_of_two(tensor: &[f32], exponent: i32) -> Vec<f32> {
    let magnitude = f64::from(exponent).exp2() as f32;
    tensor.iter().map(|v| magnitude.copysign(*v)).collect()
}

fn rotations(
    device: &Device,
    case: &Case,
    queries: &[f32],
    attended: &Attended,
    evidence: &mut Evidence,
) -> Result<(), Failure> {
    let rule = "exact rotation";
    let head_dim = case.head_dim()?;
    let d = head_dim.get();
    let rotation = case.rotation()?;
    let scale = f64::from(head_dim.inv_sqrt());
    // 1/√d is a power of two.
    let exact = head_dim.log2() % 2 == 0;
    let nearest = device.arithmetic.unit_roundoff <= Arithmetic::NEAREST.unit_roundoff;
    let root = (d as f64).sqrt();
    for (index, found) in attended.rotated.chunks_exact(2 * d).enumerate() {
        let q: Vec<f64> = vector(queries, head_dim, index)
            .iter()
            .map(|&v| f64::from(v))
            .collect();
        // Sums of integers times a power of two; f64 has them exactly, once the rounded √d is taken out.
        let sums = |x: &[f64], signs| -> Vec<f64> {
            let unit = f64::from(case.queries.exponent).exp2() / d as f64;
            rht(signs, x)
                .iter()
                .map(|v| (v * root / unit).round() * unit)
                .collect()
        };
        let polar: Vec<f64> = sums(&q, &rotation.polar)
            .iter()
            .map(|s| s * scale)
            .collect();
        let jl: Vec<f64> = sums(&polar, &rotation.jl)
            .iter()
            .map(|s| s * scale)
            .collect();
        let compared = match (exact, nearest) {
            (true, _) => [Some(&polar), Some(&jl)],
            (false, true) => [Some(&polar), None],
            (false, false) => [None, None],
        };
        for (found, expected) in found.chunks_exact(d).zip(compared) {
            let Some(expected) = expected else { continue };
            evidence.compared += d as u64;
            let differs = (0..d).find(|&i| found[i] != expected[i] as f32);
            demand(rule, differs.is_none(), || {
                let i = differs.unwrap_or_default();
                let place = format!("vector {index}, element {i}");
                (
                    place,
                    format!("{:e} instead of {:e}", found[i], expected[i]),
                )
            })?;
        }
    }
    Ok(())
}

fn record(
    arithmetic: Arithmetic,
    case: &Case,
    x: &[f32],
    found: &KeyRecord,
    evidence: &mut Evidence,
    place: &str,
) -> Result<(), Failure> {
    let rotation = case.rotation()?;
    let Classified::Unit(unit) = unit(arithmetic, &rotation, x) else {
        return Err(Failure::NotChecked("a vector vanishes".to_owned()));
    };
    let mut bad = None;
    for (i, &y) in unit.y.iter().enumerate() {
        let expected = match y {
            _ if y.abs() < 0.5 => 2,
            _ if y > 0.0 => 3,
            _ => 0,
        };
        if found.code(i) != expected {
            bad = Some(format!(
                "code {} of element {i}: expected {expected}",
                found.code(i)
            ));
        }
    }
    let residual = residual(arithmetic, &rotation, &unit, found);
    for (what, found, n, error) in [
        ("norm", found.norm, unit.norm, unit.norm_error),
        (
            "residual norm",
            found.residual_norm,
            residual.norm,
            residual.norm_error,
        ),
    ] {
        let expected = f16::from_f64(n);
        if found != expected && !is_free(expected, n, error) {
            bad = Some(format!("{what} {found}: expected {expected}"));
        }
    }
    for (i, (z, error)) in residual.z.iter().zip(&residual.z_error).enumerate() {
        if z.abs() > *error && found.sign(i) != (*z > 0.0) {
            bad = Some(format!("sign of element {i}: expected that of {z:e}"));
        }
    }
    evidence.compared += 2 * unit.y.len() as u64 + 2;
    match bad {
        None => Ok(()),
        Some(detail) => Err(Failure::Violated(Violation {
            rule: "exact record",
            place: place.to_owned(),
            detail,
        })),
    }
}

/// The one value of a KV head that is not zero.
struct Pulse {
    timestep: u32,
    element: usize,
    value: f32,
}

impl Pulse {
    fn of(case: &Case, head: u32) -> Self {
        let draw = u64::from(case.cache_seed) + 7919 * u64::from(head);
        let sign = if draw & 1 == 0 { 1.0 } else { -1.0 };
        Self {
            timestep: (draw % u64::from(case.rows)) as u32,
            element: (draw / 3 % u64::from(case.head_dim)) as usize,
            value: sign * f64::from(case.values.exponent).exp2() as f32,
        }
    }

    fn values(case: &Case) -> Vec<f32> {
        let (d, heads) = (case.head_dim as usize, case.n_kv_heads as usize);
        let mut values = vec![0.0; case.rows as usize * heads * d];
        for head in 0..case.n_kv_heads {
            let pulse = Self::of(case, head);
            let row = pulse.timestep as usize * heads + head as usize;
            values[row * d + pulse.element] = pulse.value;
        }
        values
    }
}

fn outputs(case: &Case, attended: &Attended, evidence: &mut Evidence) -> Result<(), Failure> {
    let head_dim: HeadDim = case.head_dim()?;
    let d = head_dim.get();
    let outer = f64::from(head_dim.codebook().centroids[3]);
    // One product of exact numbers with the f32 1/√d.
    let factor = d as f64 * outer * f64::from(head_dim.inv_sqrt());
    for (index, out) in attended.out.chunks_exact(d).enumerate() {
        let (row, head) = (index as u32 / case.n_heads, index as u32 % case.n_heads);
        let pulse = Pulse::of(case, head / (case.n_heads / case.n_kv_heads));
        let visible = case.start_pos + row + 1;
        let seen = pulse.timestep < visible;
        for (i, &found) in out.iter().enumerate() {
            let place = || format!("query row {row}, head {head}, element {i}");
            if seen && i == pulse.element {
                let expected = factor * f64::from(pulse.value) / f64::from(visible);
                let bound = expected.abs() * 4.0 * ULP;
                within(
                    "exact sums but for 1/T",
                    evidence,
                    found,
                    expected,
                    bound,
                    place,
                )?;
            } else {
                evidence.compared += 1;
                demand("exact zero", found == 0.0, || {
                    (place(), format!("{found:e}"))
                })?;
            }
        }
    }
    Ok(())
}
