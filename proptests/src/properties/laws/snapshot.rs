//! `law_snapshot_prefix`: a cache continued from a prefix is the cache.

use turboquant_wgpu::Snapshot;

use super::demand;
use crate::adapters::Device;
use crate::case::Case;
use crate::fixture::{Fixture, new_cache};
use crate::verdict::{Evidence, Failure, Outcome};

/// A prefix restored and the rest encoded, a cache truncated to the prefix and continued, and disjoint encodes,
/// all give the snapshot of one encode of everything.
pub fn check(device: &Device, case: &Case) -> Outcome {
    let layer = case.layer;
    let row = (case.n_kv_heads * case.head_dim) as usize;
    let prefix = case.encode_split.min(case.rows);
    let head = prefix as usize * row;
    let mut evidence = Evidence::default();
    let mut same = |what: &'static str, found: &Snapshot, expected: &Snapshot| {
        evidence.compared += (expected.keys.len() + expected.values.len()) as u64;
        demand("snapshots are equal", found == expected, || {
            (what.to_owned(), "other bytes".to_owned())
        })
    };

    let mut whole = Fixture::empty(device, case)?;
    let mut encoder = device.encoder();
    whole.encode_rows(&mut encoder, case.rows)?;
    let all = take(&whole, encoder)?;

    let mut parts = Fixture::empty(device, case)?;
    let mut encoder = device.encoder();
    let (keys, values) = (&whole.keys, &whole.values);
    parts.encode_at(&mut encoder, &keys[..head], &values[..head], 0, prefix)?;
    let start = take(&parts, encoder)?;

    // Continued where it is, and in a cache of another capacity; then truncated and continued.
    let mut restored = Fixture {
        cache: new_cache(device, case, case.rows + 3)?,
        ..Fixture::empty(device, case)?
    };
    let mut encoder = device.encoder();
    restored
        .cache
        .restore(&mut encoder, layer, &start.keys, &start.values)?;
    device.submit(encoder);
    for (what, fixture) in [
        ("disjoint encodes", &mut parts),
        ("prefix restored", &mut restored),
    ] {
        for what in [what, "truncated and continued"] {
            let mut encoder = device.encoder();
            fixture.encode_at(&mut encoder, &keys[head..], &values[head..], prefix, 5)?;
            same(what, &take(fixture, encoder)?, &all)?;
            fixture.cache.truncate(layer, prefix)?;
            same("truncated", &take(fixture, device.encoder())?, &start)?;
        }
    }
    Ok(evidence)
}

fn take(fixture: &Fixture<'_>, mut encoder: wgpu::CommandEncoder) -> Result<Snapshot, Failure> {
    let pending = fixture.cache.snapshot(&mut encoder, fixture.case.layer)?;
    fixture.device.submit(encoder);
    let snapshot = fixture.device.wait(pending)?;
    fixture.settle()?;
    Ok(snapshot)
}
