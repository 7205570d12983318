//! `rotate_queries`: both rotations, the second judged on the device's own first.

use turboquant_wgpu::rotation::rht;
use turboquant_wgpu::{Queries, twin};

use crate::adapters::Device;
use crate::case::Case;
use crate::fixture::{fill, new_cache, upload, vector};
use crate::oracles::rotate_queries::{self, Bounded};
use crate::readback;
use crate::verdict::{Evidence, Failure, Outcome, Violation, within};

/// A result past this may have overflowed on the way.
const LARGEST: f64 = 3e38;

/// Checks the rotation of queries.
pub fn check(device: &Device, case: &Case) -> Outcome {
    let head_dim = case.head_dim()?;
    let rotation = case.rotation()?;
    let queries = case.queries()?;
    let cache = new_cache(device, case, case.capacity)?;
    let source = upload(device, &queries);
    // Room for one row more, which must stay as it is.
    let mut scratch = Queries::new(&device.gpu, head_dim, case.n_heads, case.q_rows + 1)?;
    fill(device, scratch.buffer());
    let mut encoder = device.encoder();
    cache.rotate(
        &mut encoder,
        case.layer,
        (&source).into(),
        case.q_rows,
        &mut scratch,
    )?;
    let read = readback::record(&device.gpu, &mut encoder, &[scratch.buffer()]);
    let counters = cache.counters(&mut encoder, case.layer)?;
    device.submit(encoder);
    let words = read.wait(&device.gpu)?.remove(0);
    let counters = device.wait(counters)?;
    if let Some(error) = device.take_errors().into_iter().next() {
        return Err(turboquant_wgpu::Error::Rejected(error).into());
    }

    let d = head_dim.get();
    let n_vectors = (case.q_rows * case.n_heads) as usize;
    let mut evidence = Evidence::default();
    let mut non_finite = 0;
    let mut unbounded = 0;
    for index in 0..n_vectors {
        let q = vector(&queries, head_dim, index);
        non_finite += u32::from(q.iter().any(|v| !v.is_finite()));
        let floats: Vec<f32> = words[2 * index * d..2 * (index + 1) * d]
            .iter()
            .map(|&w| f32::from_bits(w))
            .collect();
        let (found_polar, found_jl) = floats.split_at(d);
        let polar = rotate_queries::polar(device.arithmetic, &rotation, q);
        if polar.values.iter().any(|v| v.abs() > LARGEST) {
            unbounded += 1;
            continue;
        }
        let mut compare =
            |rule, found: &[f32], reference: &Bounded, twin: &[f32]| -> Result<(), Violation> {
                let expected = reference.values.iter().zip(&reference.errors);
                for (i, (&found, (&expected, &bound))) in found.iter().zip(expected).enumerate() {
                    within(rule, &mut evidence, found, expected, bound, || {
                        format!("vector {index}, element {i}")
                    })?;
                    let error = |v: f32| f64::from(v) - expected;
                    evidence.drift.note(error(found), error(twin[i]), bound);
                }
                Ok(())
            };
        let (twins, _) = twin::rotate_queries(&rotation, q);
        compare("rotated query", found_polar, &polar, &twins.polar)?;
        let own = Bounded::exact(found_polar);
        let jl = rotate_queries::jl(device.arithmetic, &rotation, &own);
        if jl.values.iter().any(|v| v.abs() > LARGEST) {
            unbounded += 1;
            continue;
        }
        let mut again = found_polar.to_vec();
        rht(head_dim, &rotation.jl, &mut again);
        compare("twice rotated query", found_jl, &jl, &again)?;
    }
    let spare = &words[2 * n_vectors * d..];
    if let Some(i) = spare.iter().position(|&w| w != crate::fixture::PATTERN) {
        return Err(Failure::Violated(Violation {
            rule: "only its own slots are written",
            place: format!("rotated queries, {i} words past the end"),
            detail: format!("found {:#010x}", spare[i]),
        }));
    }
    if counters.non_finite_queries != non_finite {
        return Err(Failure::Violated(Violation {
            rule: "counters",
            place: "queries".to_owned(),
            detail: format!(
                "found {} non-finite, expected {non_finite}",
                counters.non_finite_queries
            ),
        }));
    }
    if unbounded == n_vectors {
        return Err(Failure::NotChecked(
            "every rotated query is past f32".to_owned(),
        ));
    }
    Ok(evidence)
}
