//! The oracles against the CPU twin, and with faults planted: an oracle that accepts a wrong
//! record, or reference and result exchanged, would make every property worthless.

use tqcheck::arithmetic::Arithmetic;
use tqcheck::inputs::{Context, Data, Family, generate};
use tqcheck::oracles::attention::{Depth, Key, Pass, Value};
use tqcheck::oracles::{encode_keys, encode_values, rotate_queries};
use tqcheck::verdict::{Evidence, Violation, within};
use turboquant_wgpu::twin::{self, KeyRecord, ValueRecord};
use turboquant_wgpu::{Gain, HeadDim, Rotation};

/// Vectors of one family, for a rotation. The number of rows is the seed, so that the tensors of a test differ.
fn vectors(rotation: &Rotation, family: Family, rows: u32) -> Vec<Vec<f32>> {
    let context = Context {
        rotation,
        rows,
        heads: 1,
    };
    let data = generate(&Data::new(family, u64::from(rows)), &context).expect("the family fits");
    data.chunks_exact(rotation.head_dim().get())
        .map(<[f32]>::to_vec)
        .collect()
}

fn judge_key(rotation: &Rotation, x: &[f32], record: &KeyRecord) -> Result<Evidence, Violation> {
    let mut evidence = Evidence::default();
    encode_keys::judge(Arithmetic::TWIN, rotation, x, record, &mut evidence, "")?;
    Ok(evidence)
}

fn judge_value(
    rotation: &Rotation,
    x: &[f32],
    record: &ValueRecord,
) -> Result<Evidence, Violation> {
    let mut evidence = Evidence::default();
    encode_values::judge(Arithmetic::TWIN, rotation, x, record, &mut evidence, "")?;
    Ok(evidence)
}

#[test]
fn the_twins_records_are_right_for_every_family() {
    let mut seen = Evidence::default();
    for head_dim in HeadDim::ALL {
        let rotation = Rotation::new(head_dim, 9, 2);
        for family in Family::ALL {
            if family.needs_head_dim().is_some_and(|d| d != head_dim) {
                continue;
            }
            for x in vectors(&rotation, family, 12) {
                let (key, _) = twin::encode_keys(&rotation, &x);
                let evidence = judge_key(&rotation, &x, &key)
                    .unwrap_or_else(|v| panic!("{family}, d = {head_dim}: {v}"));
                seen.absorb(&evidence);
                let (value, _) = twin::encode_values(&rotation, &x);
                judge_value(&rotation, &x, &value)
                    .unwrap_or_else(|v| panic!("{family}, d = {head_dim}: {v}"));
            }
        }
    }
    assert!(
        seen.largest > 1e-2,
        "observed/bound {}: the bounds are loose",
        seen.largest
    );
}

/// One wrong bit anywhere in a record of ordinary data is noticed.
#[test]
fn every_flipped_bit_of_a_record_is_noticed() {
    for head_dim in HeadDim::ALL {
        let rotation = Rotation::new(head_dim, 4, 0);
        let x = &vectors(&rotation, Family::Normal, 1)[0];
        let (key, _) = twin::encode_keys(&rotation, x);
        judge_key(&rotation, x, &key).expect("the twin is right");
        let mut wrong = Vec::new();
        for i in 0..head_dim.get() {
            let mut record = key.clone();
            record.codes[i / 4] ^= 1 << (2 * (i % 4));
            wrong.push(record);
            let mut record = key.clone();
            record.signs[i / 8] ^= 1 << (i % 8);
            wrong.push(record);
        }
        for bit in 0..16 {
            let flip = |h: half::f16| half::f16::from_bits(h.to_bits() ^ 1 << bit);
            wrong.push(KeyRecord {
                norm: flip(key.norm),
                ..key.clone()
            });
            wrong.push(KeyRecord {
                residual_norm: flip(key.residual_norm),
                ..key.clone()
            });
        }
        wrong.push(KeyRecord::zero(head_dim));
        for record in wrong {
            assert!(
                judge_key(&rotation, x, &record).is_err(),
                "d = {head_dim}: {record:?}"
            );
        }
    }
}

/// A record of another vector, and a record judged under another rotation, are noticed.
#[test]
fn exchanged_inputs_are_noticed() {
    let rotation = Rotation::new(HeadDim::D64, 4, 0);
    let x = vectors(&rotation, Family::Normal, 2);
    let (record, _) = twin::encode_values(&rotation, &x[0]);
    assert!(judge_value(&rotation, &x[1], &record).is_err());
    let other = Rotation::new(HeadDim::D64, 4, 1);
    assert!(judge_value(&other, &x[0], &record).is_err());
    let mut streams = rotation;
    streams.jl = rotation.polar;
    let (key, _) = twin::encode_keys(&streams, &x[0]);
    assert!(
        judge_key(&rotation, &x[0], &key).is_err(),
        "one sign stream for both rotations"
    );
}

/// Zero records are demanded where they are due, and only there.
#[test]
fn zero_records_are_demanded() {
    let rotation = Rotation::new(HeadDim::D32, 0, 0);
    let zero = ValueRecord::zero(HeadDim::D32);
    let mut x = vec![1.0_f32; 32];
    let (encoded, _) = twin::encode_values(&rotation, &x);
    assert!(judge_value(&rotation, &x, &zero).is_err());
    x[5] = f32::NAN;
    assert!(judge_value(&rotation, &x, &zero).is_ok());
    assert!(judge_value(&rotation, &x, &encoded).is_err());
    let near = |norm: f32| vec![norm / 32.0_f32.sqrt(); 32];
    for (x, both) in [
        (near(0.9e-12), false),
        (near(1e-12), true),
        (near(1.1e-12), false),
    ] {
        let (encoded, outcome) = twin::encode_values(&rotation, &x);
        assert!(judge_value(&rotation, &x, &encoded).is_ok(), "{outcome:?}");
        if both {
            assert!(judge_value(&rotation, &x, &zero).is_ok());
        }
    }
}

/// Scores and outputs of the twin are inside the attention bound, and small faults are not.
#[test]
fn attention_bounds_are_tight_enough_to_see_small_faults() {
    for head_dim in HeadDim::ALL {
        let d = head_dim.get();
        let rotation = Rotation::new(head_dim, 8, 1);
        let keys: Vec<_> = vectors(&rotation, Family::Normal, 40)
            .iter()
            .map(|x| twin::encode_keys(&rotation, x).0)
            .collect();
        let values: Vec<_> = vectors(&rotation, Family::Uniform, 40)
            .iter()
            .map(|x| twin::encode_values(&rotation, x).0)
            .collect();
        let q = &vectors(&rotation, Family::Normal, 1)[0];
        let pass = Pass {
            arithmetic: Arithmetic::TWIN,
            rotation: &rotation,
            depth: Depth::twin(d, 40),
            scale: head_dim.inv_sqrt(),
            gain: Gain::Unbiased,
        };
        let polar = rotate_queries::polar(pass.arithmetic, &rotation, q);
        let jl = rotate_queries::jl(pass.arithmetic, &rotation, &polar);
        let unpacked: Vec<_> = keys.iter().map(|k| Key::new(&rotation, k)).collect();
        let dequantised: Vec<_> = values.iter().map(|v| Value::new(&rotation, v)).collect();
        let reference = pass
            .attention(&polar, &jl, &unpacked, &dequantised)
            .expect("ordinary scores are bounded");
        assert!(!reference.loose);
        // f32 attention of the twin's own scores, in f64 afterwards: an honest result.
        let (query, _) = twin::rotate_queries(&rotation, q);
        let honest = |gain: Gain, scale: f32, n: usize| -> Vec<f32> {
            let scores: Vec<f64> = keys[..n]
                .iter()
                .map(|k| f64::from(twin::score(head_dim, &query, k, scale, gain)))
                .collect();
            let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - maximum).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut out = vec![0.0; d];
            for (w, v) in weights.iter().zip(&values) {
                let x = tqcheck::oracles::dequantise::value(&rotation, v);
                out.iter_mut().zip(x).for_each(|(o, x)| *o += w / sum * x);
            }
            out.iter().map(|&v| v as f32).collect()
        };
        let accepted = |out: &[f32]| {
            let mut evidence = Evidence::default();
            let bounds = reference.out.values.iter().zip(&reference.out.errors);
            out.iter()
                .zip(bounds)
                .all(|(&f, (&e, &b))| within("r", &mut evidence, f, e, b, String::new).is_ok())
        };
        let scale = head_dim.inv_sqrt();
        assert!(
            accepted(&honest(Gain::Unbiased, scale, 40)),
            "d = {head_dim}"
        );
        assert!(
            !accepted(&honest(Gain::Unbiased, scale * 1.001, 40)),
            "scale off by 0.1 %"
        );
        assert!(
            !accepted(&honest(Gain::MinimumError, scale, 40)),
            "another gain"
        );
        assert!(
            !accepted(&honest(Gain::Unbiased, scale, 39)),
            "a timestep missing"
        );
        let mut off = honest(Gain::Unbiased, scale, 40);
        off.swap(0, 1);
        assert!(!accepted(&off), "elements exchanged");
    }
}
