//! Laws of the encoders.

use half::f16;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::KeyRecord;

use super::{demand, encoded, permutation, records, reordered, same_raw, something};
use crate::adapters::Device;
use crate::arithmetic::l2;
use crate::case::Case;
use crate::fixture::vector;
use crate::oracles::encode_keys::residual;
use crate::oracles::norm::is_free;
use crate::oracles::unit::{Classified, Unit, VANISHING, unit};
use crate::verdict::{Evidence, Failure, Outcome};

/// Any partition of the rows into dispatches gives the same bytes, and a vector's record is the same wherever
/// it stands and whatever its neighbours are: all vectors, of all rows and heads, shuffled, give the
/// records shuffled.
pub fn partition(device: &Device, case: &Case) -> Outcome {
    let rule = "a record depends on its vector alone";
    let (keys, values) = (case.keys()?, case.values()?);
    let mut evidence = Evidence::default();
    let (fixture, whole) = encoded(device, case, keys.clone(), values.clone(), case.rows)?;
    for split in [1, case.encode_split] {
        let (_, parts) = encoded(device, case, keys.clone(), values.clone(), split)?;
        let what = format!("{split} rows a dispatch against all at once");
        same_raw(rule, &what, &mut evidence, &parts, &whole)?;
    }

    let (d, heads) = (case.head_dim as usize, case.n_kv_heads as usize);
    let order = permutation(case.rows as usize * heads, u64::from(case.cache_seed));
    let shuffled = |data: &[f32]| reordered(data, d, &order);
    let (other, moved) = encoded(
        device,
        case,
        shuffled(&keys),
        shuffled(&values),
        case.encode_split,
    )?;
    for kind in [Kind::Keys, Kind::Values] {
        let (before, after) = (
            records(&fixture, &whole, kind)?,
            records(&other, &moved, kind)?,
        );
        for (to, &from) in order.iter().enumerate() {
            let (found, expected) = (
                &after[to % heads][to / heads],
                &before[from % heads][from / heads],
            );
            evidence.compared += 1;
            demand(rule, found == expected, || {
                let place = format!("{kind}, vector {from} as vector {to}");
                (place, format!("{found:?} and {expected:?}"))
            })?;
        }
    }
    demand(rule, moved.counters == whole.counters, || {
        let detail = format!("{:?} and {:?}", moved.counters, whole.counters);
        ("shuffled, counters".to_owned(), detail)
    })?;
    Ok(evidence)
}

/// Scaling by 2^k moves the norm alone. The kernels scale every vector by a power of two to begin with, so
/// codes, signs and residual norm come from the same bits. The norm is the same f32 times 2^k, and
/// where f16 holds both as normal numbers below its largest, its rounding commutes with that.
///
/// The tensors without the case's exponent are compared with those that have it. Vectors that vanish
/// under either, or nearly so, take no part.
pub fn scaling(device: &Device, case: &Case) -> Outcome {
    let rule = "scaling by a power of two moves the norm alone";
    let mut plain = case.clone();
    (plain.keys.exponent, plain.values.exponent) = (0, 0);
    let split = case.encode_split;
    let (one, before) = encoded(device, &plain, plain.keys()?, plain.values()?, split)?;
    let (two, after) = encoded(device, case, case.keys()?, case.values()?, split)?;
    let head_dim = case.head_dim()?;
    let mut evidence = Evidence::default();
    for (kind, tensors, exponent) in [
        (Kind::Keys, [&one.keys, &two.keys], case.keys.exponent),
        (
            Kind::Values,
            [&one.values, &two.values],
            case.values.exponent,
        ),
    ] {
        let (before, after) = (records(&one, &before, kind)?, records(&two, &after, kind)?);
        for_each(case, |index, head, t| {
            let live = tensors.iter().all(|tensor| {
                let x: Vec<f64> = vector(tensor, head_dim, index)
                    .iter()
                    .map(|&v| f64::from(v))
                    .collect();
                // A NaN fails this too: nothing is said of it here.
                l2(&x) > VANISHING * 1.001
            });
            if !live {
                return Ok(());
            }
            let (a, b) = (&before[head][t], &after[head][t]);
            // The smallest normal may be a subnormal's rounding, the largest a saturated norm.
            let normal = |h: f16| h > f16::MIN_POSITIVE && h < f16::MAX;
            let norm_moves = !(normal(a.norm) && normal(b.norm))
                || f64::from(b.norm) == f64::from(a.norm) * f64::from(exponent).exp2();
            let rest = |r: &KeyRecord| KeyRecord {
                norm: f16::ZERO,
                ..r.clone()
            };
            evidence.compared += 1;
            demand(rule, rest(a) == rest(b) && norm_moves, || {
                let place = format!("{kind}, timestep {t}, head {head}, times 2^{exponent}");
                (place, format!("{b:?} against {a:?}"))
            })?;
            Ok(())
        })?;
    }
    something(evidence, "every vector vanishes or holds a NaN")
}

/// Negation turns codes into their mirror and flips signs, and leaves both norms.
///
/// IEEE rounding to nearest is symmetric, but the cells are not: a coordinate on a boundary takes the upper
/// cell on either side, and a z of 0 the positive sign. And WGSL lets a result go to either
/// neighbour, which is not symmetric. So what the oracle calls free may stay: a code whose coordinate is
/// within its error of a boundary, a sign likewise, a residual norm near the middle of two f16s. Where a free
/// code did stay, the residuals are different vectors and are not compared.
pub fn negation(device: &Device, case: &Case) -> Outcome {
    let head_dim = case.head_dim()?;
    let rotation = case.rotation()?;
    let negated = |x: Vec<f32>| x.into_iter().map(|v| -v).collect::<Vec<f32>>();
    let (keys, values) = (case.keys()?, case.values()?);
    let split = case.encode_split;
    let (one, before) = encoded(device, case, keys.clone(), values.clone(), split)?;
    let (two, after) = encoded(device, case, negated(keys), negated(values), split)?;
    let mut evidence = Evidence::default();
    for (kind, tensor) in [(Kind::Keys, &one.keys), (Kind::Values, &one.values)] {
        let (before, after) = (records(&one, &before, kind)?, records(&two, &after, kind)?);
        for_each(case, |index, head, t| {
            let x = vector(tensor, head_dim, index);
            let (a, b) = (&before[head][t], &after[head][t]);
            let place = |what: &str| {
                let place = format!("{kind}, timestep {t}, head {head}, {what}");
                move |detail: String| (place, detail)
            };
            match unit(device.arithmetic, &rotation, x) {
                Classified::Unit(unit) => {
                    let mirrored = mirrored_codes(&unit, a, b, &mut evidence, place("codes"))?;
                    if mirrored && kind == Kind::Keys {
                        let residual = residual(device.arithmetic, &rotation, &unit, a);
                        flipped_signs(&residual, a, b, &mut evidence, place("residual"))?;
                    }
                }
                // The sums of squares are the same to the bit: both vanish, or neither.
                _ => demand("negation of a zero record", a.norm == b.norm, || {
                    place("norm")(format!("{a:?} and {b:?}"))
                })?,
            }
            Ok(())
        })?;
    }
    demand(
        "negation changes no counter",
        before.counters == after.counters,
        || {
            let detail = format!("{:?} and {:?}", before.counters, after.counters);
            ("counters".to_owned(), detail)
        },
    )?;
    something(evidence, "every vector vanishes or holds a NaN")
}

/// True if every code is mirrored, the free ones too.
fn mirrored_codes(
    unit: &Unit,
    a: &KeyRecord,
    b: &KeyRecord,
    evidence: &mut Evidence,
    place: impl FnOnce(String) -> (String, String),
) -> Result<bool, Failure> {
    let rule = "negation mirrors the codes and leaves the norm";
    let d = unit.y.len();
    let book = turboquant_wgpu::HeadDim::try_from(d as u32)?.codebook();
    let kept: Vec<usize> = (0..d).filter(|&i| b.code(i) != 3 - a.code(i)).collect();
    let unexplained = kept.iter().find(|&&i| !unit.code_is_free(book, i));
    evidence.compared += d as u64;
    evidence.discrete += d as u64;
    evidence.free += kept.len() as u64;
    demand(rule, unexplained.is_none() && a.norm == b.norm, || {
        place(format!("element {unexplained:?} of {a:?} and {b:?}"))
    })?;
    Ok(kept.is_empty())
}

fn flipped_signs(
    residual: &crate::oracles::encode_keys::Residual,
    a: &KeyRecord,
    b: &KeyRecord,
    evidence: &mut Evidence,
    place: impl FnOnce(String) -> (String, String),
) -> Result<(), Failure> {
    let rule = "negation flips the signs and leaves the residual norm";
    let (rho, error) = (residual.norm, residual.norm_error);
    let norm_holds = a.residual_norm == b.residual_norm || is_free(a.residual_norm, rho, error);
    // Signs of a residual that counts as zero are all clear on either side.
    let vanishing = rho - error < VANISHING;
    let kept: Vec<usize> = (0..residual.z.len())
        .filter(|&i| a.sign(i) == b.sign(i))
        .collect();
    let unexplained = kept
        .iter()
        .find(|&&i| !vanishing && residual.z[i].abs() > residual.z_error[i]);
    evidence.compared += residual.z.len() as u64;
    evidence.discrete += residual.z.len() as u64;
    evidence.free += kept.len() as u64;
    demand(rule, norm_holds && unexplained.is_none(), || {
        place(format!("element {unexplained:?} of {a:?} and {b:?}"))
    })?;
    Ok(())
}

/// Every vector of a layer: its index in the tensors, its head, its timestep.
fn for_each(
    case: &Case,
    mut check: impl FnMut(usize, usize, usize) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let heads = case.n_kv_heads as usize;
    (0..case.rows as usize * heads).try_for_each(|i| check(i, i % heads, i / heads))
}
