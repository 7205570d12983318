//! `snapshot`: blobs against buffers, restore into another cache, refused restores.

use turboquant_wgpu::blob::decode_kind;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::{KeyRecord, ValueRecord};
use turboquant_wgpu::{Error, Snapshot};

use crate::adapters::Device;
use crate::case::Case;
use crate::fixture::{Fixture, Raw, new_cache};
use crate::properties::attention::Records;
use crate::properties::encode::untouched;
use crate::verdict::{Evidence, Failure, Outcome, Violation};

/// Checks snapshot and restore.
pub fn check(device: &Device, case: &Case) -> Outcome {
    let head_dim = case.head_dim()?;
    let layer = case.layer;
    let mut encoder = device.encoder();
    let fixture = Fixture::encode(device, case, &mut encoder)?;
    let pending = fixture.cache.snapshot(&mut encoder, layer)?;
    let raw = fixture.read_raw(encoder)?;
    let snapshot = device.wait(pending)?;

    // The blobs hold the buffers' records.
    let records = Records::read(&fixture, &raw)?;
    let keys = decode_kind(Kind::Keys, &snapshot.keys).map_err(Error::from)?;
    let values = decode_kind(Kind::Values, &snapshot.values).map_err(Error::from)?;
    let mut evidence = Evidence::default();
    expect(
        "blob of the keys",
        KeyRecord::read_all(&keys, head_dim) == records.keys.concat(),
    )?;
    expect(
        "blob of the values",
        ValueRecord::read_all(&values, head_dim) == records.values.concat(),
    )?;

    // They restore into a cache of another capacity, and only there.
    let capacity = case.rows + case.capacity % 7;
    let mut other = Fixture {
        device,
        case,
        cache: new_cache(device, case, capacity.max(1))?,
        keys: Vec::new(),
        values: Vec::new(),
    };
    let mut encoder = device.encoder();
    let restored = other
        .cache
        .restore(&mut encoder, layer, &snapshot.keys, &snapshot.values)?;
    expect("restored length", restored == case.rows)?;
    let again = other.cache.snapshot(&mut encoder, layer)?;
    let restored_raw = other.read_raw(encoder)?;
    let again: Snapshot = device.wait(again)?;
    expect("snapshot of the restored", again == snapshot)?;
    let layouts = [other.layout(Kind::Keys)?, other.layout(Kind::Values)?];
    untouched(case, &layouts[0], &restored_raw.keys, case.rows)?;
    untouched(case, &layouts[1], &restored_raw.values, case.rows)?;

    // Whatever the gate refuses leaves every bit as it was.
    let mut short = snapshot.values.clone();
    short.pop();
    let mut encoder = device.encoder();
    for (what, keys, values) in [
        ("values one byte short", &snapshot.keys[..], &short[..]),
        ("swapped", &snapshot.values[..], &snapshot.keys[..]),
        ("one side missing", &snapshot.keys[..], &[][..]),
    ] {
        let refused = other.cache.restore(&mut encoder, layer, keys, values);
        if !matches!(refused, Err(Error::RestoreRefused { .. })) {
            return Err(Failure::Violated(Violation {
                rule: "the gate refuses",
                place: what.to_owned(),
                detail: format!("found {refused:?}"),
            }));
        }
        expect(
            "length after a refused restore",
            other.cache.len(layer)? == case.rows,
        )?;
    }
    // What a refusal recorded all the same would show now.
    let after = other.read_raw(encoder)?;
    expect("bits after refused restores", same(&after, &restored_raw))?;
    evidence.compared += (snapshot.keys.len() + snapshot.values.len()) as u64;
    Ok(evidence)
}

fn same(a: &Raw, b: &Raw) -> bool {
    a.keys == b.keys && a.values == b.values
}

fn expect(what: &'static str, holds: bool) -> Result<(), Violation> {
    if holds {
        return Ok(());
    }
    Err(Violation {
        rule: "bytes are equal",
        place: what.to_owned(),
        detail: "found other bytes than expected".to_owned(),
    })
}
