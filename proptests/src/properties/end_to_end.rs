//! `end_to_end`: from the caller's vectors to the output, over all stages.

use turboquant_wgpu::twin;

use crate::adapters::Device;
use crate::arithmetic::{Arithmetic, l2};
use crate::case::Case;
use crate::fixture::{Fixture, vector};
use crate::oracles::unit::{Classified, unit};
use crate::oracles::{dequantise, rotate_queries};
use crate::properties::attention::{Records, judge};
use crate::verdict::{Failure, Outcome, Violation};

/// Checks a whole pass.
pub fn check(device: &Device, case: &Case) -> Outcome {
    let head_dim = case.head_dim()?;
    let rotation = case.rotation()?;
    let queries = case.queries()?;
    let mut encoder = device.encoder();
    let fixture = Fixture::encode(device, case, &mut encoder)?;
    let attended = fixture.attend(encoder, &queries)?;
    let raw = fixture.read_raw(device.encoder())?;

    let records = Records::read(&fixture, &raw)?;
    for t in 0..case.rows as usize {
        for head in 0..case.n_kv_heads as usize {
            let index = t * case.n_kv_heads as usize + head;
            let place = |kind: &str| format!("{kind}, timestep {t}, head {head}");

            let x = vector(&fixture.values, head_dim, index);
            let found = dequantise::value(&rotation, &records.values[head][t]);
            let expected = dequantise::value(&rotation, &twin::encode_values(&rotation, x).0);
            distance(
                device.arithmetic,
                &fixture,
                x,
                &found,
                &expected,
                place("values"),
            )?;

            // Codes and norm alone: the residual's signs may differ wherever a code does.
            let x = vector(&fixture.keys, head_dim, index);
            let value_of = |key: &twin::KeyRecord| twin::ValueRecord {
                codes: key.codes.clone(),
                norm: key.norm,
            };
            let found = dequantise::value(&rotation, &value_of(&records.keys[head][t]));
            let twins = twin::encode_keys(&rotation, x).0;
            let expected = dequantise::value(&rotation, &value_of(&twins));
            distance(
                device.arithmetic,
                &fixture,
                x,
                &found,
                &expected,
                place("keys"),
            )?;
        }
    }
    judge(
        &fixture,
        &raw,
        &attended,
        "attention from the queries",
        |index| {
            let q = vector(&queries, head_dim, index);
            let polar = rotate_queries::polar(device.arithmetic, &rotation, q);
            let jl = rotate_queries::jl(device.arithmetic, &rotation, &polar);
            (polar, jl)
        },
    )
}

/// The device's and the twin's dequantised vectors may be apart by the largest gap between centroids at each free
/// code, and by a step of f16 where the norm is free.
fn distance(
    arithmetic: Arithmetic,
    fixture: &Fixture<'_>,
    x: &[f32],
    found: &[f64],
    expected: &[f64],
    place: String,
) -> Result<(), Failure> {
    let head_dim = fixture.case.head_dim()?;
    let book = head_dim.codebook();
    let apart = l2(&found
        .iter()
        .zip(expected)
        .map(|(a, b)| a - b)
        .collect::<Vec<_>>());
    let size = l2(expected).max(l2(found));
    let rotation = fixture.case.rotation()?;
    // Device and twin may each be off by its own error: the twin's sums are deeper.
    let allowed = match [arithmetic, Arithmetic::TWIN].map(|a| unit(a, &rotation, x)) {
        [Classified::Unit(own), Classified::Unit(twin)] => {
            let errors = own.y_error.iter().zip(&twin.y_error).map(|(a, b)| a + b);
            let free = own
                .y
                .iter()
                .zip(errors)
                .filter(|(y, e)| {
                    book.boundaries
                        .iter()
                        .any(|&b| (*y - f64::from(b)).abs() <= *e)
                })
                .count();
            let norm = own.norm.min(65504.0);
            let norm_error = own.norm_error.max(twin.norm_error);
            // One step of f16: 2^-10 relative, or 2^-24 in the subnormals.
            let step = (norm / 1024.0).max(f64::from(half::f16::from_bits(1)));
            let low = half::f16::from_f64(norm - norm_error);
            let high = half::f16::from_f64(norm + norm_error);
            let unit_size = l2(&vec![f64::from(book.centroids[3]); head_dim.get()]);
            let by_norm = if low == high { 0.0 } else { step * unit_size };
            f64::from(book.largest_gap()) * norm * (free as f64).sqrt() * 1.001 + by_norm
        }
        // Near the threshold either may be the zero record.
        [Classified::NearVanishing(_), _] | [_, Classified::NearVanishing(_)] => size,
        _ => 0.0,
    };
    // The inverse transform in f64 has an error of its own.
    if apart <= allowed + 1e-12 * size {
        return Ok(());
    }
    Err(Failure::Violated(Violation {
        rule: "dequantised as the twin's, but for free choices",
        place,
        detail: format!("{apart:e} apart, at most {allowed:e} is explained"),
    }))
}
