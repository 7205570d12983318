//! Laws that need no reference: what must stay the same when something that cannot matter is changed.
//!
//! A law compares two runs of the device with each other, bit for bit unless it says otherwise, so it holds
//! whatever the oracles believe. Buffers are full of the pattern before every run, and what a kernel has
//! no business to write still holds it afterwards.

pub mod attention;
pub mod encode;
pub mod exact;
pub mod repeat;
pub mod snapshot;

use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::KeyRecord;

use crate::adapters::Device;
use crate::case::Case;
use crate::fixture::{Attended, Fixture, Raw};
use crate::properties::attention::Records;
use crate::properties::encode::untouched;
use crate::verdict::{Evidence, Failure, Violation};

/// Encodes tensors in the place of the case's own, `split` rows at a time, and reads the layer.
fn encoded<'a>(
    device: &'a Device,
    case: &'a Case,
    keys: Vec<f32>,
    values: Vec<f32>,
    split: u32,
) -> Result<(Fixture<'a>, Raw), Failure> {
    let mut fixture = Fixture::with(device, case, keys, values)?;
    let mut encoder = device.encoder();
    fixture.encode_rows(&mut encoder, split)?;
    let raw = fixture.read_raw(encoder)?;
    untouched(case, &fixture.layout(Kind::Keys)?, &raw.keys, case.rows)?;
    untouched(case, &fixture.layout(Kind::Values)?, &raw.values, case.rows)?;
    Ok((fixture, raw))
}

/// Encodes the case's own rows and attends `queries`.
fn attended<'a>(
    device: &'a Device,
    case: &'a Case,
    queries: &[f32],
) -> Result<(Fixture<'a>, Attended), Failure> {
    let mut encoder = device.encoder();
    let fixture = Fixture::encode(device, case, &mut encoder)?;
    let attended = fixture.attend(encoder, queries)?;
    Ok((fixture, attended))
}

/// Demands that two runs left the same words.
fn same_words(
    rule: &'static str,
    what: &str,
    evidence: &mut Evidence,
    found: &[u32],
    expected: &[u32],
) -> Result<(), Violation> {
    evidence.compared += expected.len() as u64;
    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
    let place = match differs {
        None if found.len() == expected.len() => return Ok(()),
        None => {
            return violated(rule, what.to_owned(), "lengths differ".to_owned());
        }
        Some(i) => i,
    };
    violated(
        rule,
        format!("{what}, word {place}"),
        format!("{:#010x} and {:#010x}", found[place], expected[place]),
    )
}

/// Demands that two runs left the same floats, by their bits.
fn same_floats(
    rule: &'static str,
    what: &str,
    evidence: &mut Evidence,
    found: &[f32],
    expected: &[f32],
) -> Result<(), Violation> {
    let (found, expected) = (bytemuck::cast_slice(found), bytemuck::cast_slice(expected));
    same_words(rule, what, evidence, found, expected)
}

/// Demands that two runs left the same layer and counted the same.
fn same_raw(
    rule: &'static str,
    what: &str,
    evidence: &mut Evidence,
    found: &Raw,
    expected: &Raw,
) -> Result<(), Violation> {
    same_words(
        rule,
        &format!("{what}, keys"),
        evidence,
        &found.keys,
        &expected.keys,
    )?;
    same_words(
        rule,
        &format!("{what}, values"),
        evidence,
        &found.values,
        &expected.values,
    )?;
    demand(rule, found.counters == expected.counters, || {
        let detail = format!("{:?} and {:?}", found.counters, expected.counters);
        (format!("{what}, counters"), detail)
    })
}

/// A violation unless `holds`.
fn demand(
    rule: &'static str,
    holds: bool,
    describe: impl FnOnce() -> (String, String),
) -> Result<(), Violation> {
    if holds {
        return Ok(());
    }
    let (place, detail) = describe();
    violated(rule, place, detail)
}

fn violated(rule: &'static str, place: String, detail: String) -> Result<(), Violation> {
    Err(Violation {
        rule,
        place,
        detail,
    })
}

/// The records of a kind, [heads][rows]; a value's as a key's without signs and residual.
fn records(fixture: &Fixture<'_>, raw: &Raw, kind: Kind) -> Result<Vec<Vec<KeyRecord>>, Failure> {
    let records = Records::read(fixture, raw)?;
    Ok(match kind {
        Kind::Keys => records.keys,
        Kind::Values => {
            let plain = |record: turboquant_wgpu::twin::ValueRecord| KeyRecord {
                codes: record.codes,
                signs: Vec::new(),
                norm: record.norm,
                residual_norm: half::f16::ZERO,
            };
            records
                .values
                .into_iter()
                .map(|head| head.into_iter().map(plain).collect())
                .collect()
        }
    })
}

/// What became of too few comparisons to call it a check.
fn something(evidence: Evidence, otherwise: &str) -> Result<Evidence, Failure> {
    if evidence.compared == 0 {
        return Err(Failure::NotChecked(otherwise.to_owned()));
    }
    Ok(evidence)
}

/// A permutation of 0..n that `seed` selects.
fn permutation(n: usize, seed: u64) -> Vec<usize> {
    use rand_xoshiro::rand_core::{Rng, SeedableRng};
    let mut rng = rand_xoshiro::Xoshiro256StarStar::seed_from_u64(seed);
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        let j = (u128::from(rng.next_u64()) * (i as u128 + 1)) >> 64;
        order.swap(i, j as usize);
    }
    order
}

/// Vectors of `len` elements in another order: vector i of the result is vector `order[i]`.
fn reordered(data: &[f32], len: usize, order: &[usize]) -> Vec<f32> {
    order
        .iter()
        .flat_map(|&i| &data[i * len..(i + 1) * len])
        .copied()
        .collect()
}
