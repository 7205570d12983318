//! Blobs to and from cera 0.5.5, where the format comes from: `cargo test -p tqcheck --features interop --test interop`.

use cera::turboquant::{
    CompressedKeyCache, CompressedValueCache, EncodeScratch, RotationState, TurboQuantConfig,
    compress_and_append_keys, compress_and_append_values, decode_compressed_keys,
    decode_compressed_values, encode_compressed_keys, encode_compressed_values,
};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use tqcheck::adapters;
use tqcheck::arithmetic::Arithmetic;
use tqcheck::case::Case;
use tqcheck::fixture::{Fixture, vector};
use tqcheck::generators;
use tqcheck::inputs::{Data, Family};
use tqcheck::oracles::{encode_keys, encode_values};
use tqcheck::verdict::Evidence;
use turboquant_wgpu::blob::decode_kind;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::{self, KeyRecord, ValueRecord};
use turboquant_wgpu::{LayerShape, Snapshot, gate};

/// Random cases.
fn cases(n: usize) -> impl Iterator<Item = Case> {
    let mut runner = TestRunner::deterministic();
    let strategy = generators::snapshot::strategy();
    let draw = move |_| strategy.new_tree(&mut runner).expect("nothing is rejected");
    (0..n).map(draw).map(|tree| tree.current())
}

/// Vectors whose norms and squares stay in range: past it cera's encoder gives the zero record or an infinity.
fn in_range(data: &Data) -> Data {
    let ordinary = data.family.is_ordinary();
    Data {
        family: if ordinary {
            data.family
        } else {
            Family::Normal
        },
        exponent: data.exponent.clamp(-6, 3),
        ..data.clone()
    }
}

/// cera's encoder, one row after the other.
fn ceras(case: &Case, keys: &[f32], values: &[f32]) -> Snapshot {
    let (n, d) = (case.n_kv_heads as usize, case.head_dim as usize);
    let rotation = RotationState::from_seed(u64::from(case.cache_seed) ^ u64::from(case.layer), d);
    let config = TurboQuantConfig::for_head_dim(d);
    let mut scratch = EncodeScratch::new(d);
    let mut k = CompressedKeyCache::new(n, d, case.rows as usize);
    let mut v = CompressedValueCache::new(n, d, case.rows as usize);
    for row in keys.chunks_exact(n * d) {
        compress_and_append_keys(row, n, d, &rotation, &config, &mut k, &mut scratch);
    }
    for row in values.chunks_exact(n * d) {
        compress_and_append_values(row, n, d, &rotation, &config, &mut v, &mut scratch);
    }
    Snapshot {
        keys: encode_compressed_keys(&k),
        values: encode_compressed_values(&v),
    }
}

/// cera reads our blobs and writes the same bytes; we take its blobs as they are.
fn exchange(case: &Case, ours: &Snapshot) {
    let (n, d) = (case.n_kv_heads as usize, case.head_dim as usize);
    let keys = decode_compressed_keys(&ours.keys).expect("cera takes our keys");
    let values = decode_compressed_values(&ours.values).expect("cera takes our values");
    assert_eq!((keys.n_kv_heads, keys.head_dim), (n, d));
    assert_eq!((values.n_kv_heads, values.head_dim), (n, d));
    assert_eq!(keys.seq_len(), case.rows as usize);
    assert_eq!(values.seq_len(), case.rows as usize);
    let theirs = Snapshot {
        keys: encode_compressed_keys(&keys),
        values: encode_compressed_values(&values),
    };
    assert_eq!(theirs, *ours, "{}", case.to_toml());
    let shape = LayerShape {
        n_kv_heads: case.n_kv_heads,
        head_dim: case.head_dim().expect("a case's is supported"),
    };
    let plan = gate::plan(shape, case.capacity, &theirs.keys, &theirs.values);
    assert_eq!(
        plan.expect("the gate takes cera's blobs").seq_len(),
        case.rows
    );
}

#[test]
fn the_twins_blobs_pass_through_cera() {
    for case in cases(150) {
        let (keys, values) = (case.keys().expect("keys"), case.values().expect("values"));
        let rotation = case.rotation().expect("rotation");
        let twins = twin::snapshot(&rotation, case.n_kv_heads, &keys, &values);
        exchange(&case, &twins.expect("it encodes").0);
    }
}

#[test]
fn the_devices_blobs_pass_through_cera() {
    let devices = adapters::select("all").expect("a usable adapter");
    for device in devices {
        for case in cases(30) {
            let mut encoder = device.encoder();
            let fixture = Fixture::encode(device, &case, &mut encoder).expect("it encodes");
            let pending = fixture.cache.snapshot(&mut encoder, case.layer);
            device.submit(encoder);
            let snapshot = device.wait(pending.expect("it is recorded"));
            exchange(&case, &snapshot.expect("it arrives"));
        }
    }
}

/// Both encoders write the same records, unless both are right: that is, at free codes.
#[test]
fn ceras_encoder_and_the_twin_agree() {
    let (mut equal, mut free) = (0, 0);
    for case in cases(150) {
        let case = Case {
            keys: in_range(&case.keys),
            values: in_range(&case.values),
            ..case
        };
        let (keys, values) = (case.keys().expect("keys"), case.values().expect("values"));
        let rotation = case.rotation().expect("rotation");
        let theirs = ceras(&case, &keys, &values);
        exchange(&case, &theirs);
        let twins = twin::snapshot(&rotation, case.n_kv_heads, &keys, &values);
        let ours = twins.expect("it encodes").0;
        if ours == theirs {
            equal += 1;
            continue;
        }
        let d = rotation.head_dim();
        let mut evidence = Evidence::default();
        for snapshot in [&ours, &theirs] {
            let k = decode_kind(Kind::Keys, &snapshot.keys).expect("keys");
            let v = decode_kind(Kind::Values, &snapshot.values).expect("values");
            let k = KeyRecord::read_all(&k, d);
            let v = ValueRecord::read_all(&v, d);
            for (index, (k, v)) in k.iter().zip(&v).enumerate() {
                // Blobs go head after head, tensors row after row.
                let (rows, heads) = (case.rows as usize, case.n_kv_heads as usize);
                let at = index % rows * heads + index / rows;
                let place = format!("vector {at}");
                let (arithmetic, e) = (Arithmetic::TWIN, &mut evidence);
                let x = vector(&keys, d, at);
                let judged = encode_keys::judge(arithmetic, &rotation, x, k, e, &place);
                judged.unwrap_or_else(|v| panic!("{v}\n{}", case.to_toml()));
                let x = vector(&values, d, at);
                let judged = encode_values::judge(arithmetic, &rotation, x, v, e, &place);
                judged.unwrap_or_else(|v| panic!("{v}\n{}", case.to_toml()));
            }
        }
        free += 1;
    }
    println!("{equal} cases equal, {free} differ at free choices");
    assert!(equal > 10 * free, "free choices are rare: {equal}, {free}");
}
