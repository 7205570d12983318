//! `attention`: outputs, judged on the device's own cache and rotated queries.

use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::{self, KeyRecord, RotatedQuery, ValueRecord};

use crate::adapters::Device;
use crate::case::Case;
use crate::fixture::{Attended, Fixture, Raw, key_record, value_record};
use crate::oracles::attention::{Depth, Dequantised, Pass};
use crate::oracles::rotate_queries::Bounded;
use crate::verdict::{Evidence, Failure, Outcome, within};

/// Checks attention.
pub fn check(device: &Device, case: &Case) -> Outcome {
    let queries = case.queries()?;
    let mut encoder = device.encoder();
    let fixture = Fixture::encode(device, case, &mut encoder)?;
    let attended = fixture.attend(encoder, &queries)?;
    let raw = fixture.read_raw(device.encoder())?;
    let d = case.head_dim as usize;
    judge(&fixture, &raw, &attended, "attention", |index| {
        let vector = &attended.rotated[2 * index * d..2 * (index + 1) * d];
        let (polar, jl) = vector.split_at(d);
        (Bounded::exact(polar), Bounded::exact(jl))
    })
}

/// The records of every KV head of a layer, as the device holds them.
pub(super) struct Records {
    pub keys: Vec<Vec<KeyRecord>>,
    pub values: Vec<Vec<ValueRecord>>,
}

impl Records {
    pub(super) fn read(fixture: &Fixture<'_>, raw: &Raw) -> Result<Self, Failure> {
        let (keys, values) = (fixture.layout(Kind::Keys)?, fixture.layout(Kind::Values)?);
        let case = fixture.case;
        let heads = 0..case.n_kv_heads;
        Ok(Self {
            keys: heads
                .clone()
                .map(|h| {
                    (0..case.rows)
                        .map(|t| key_record(&keys, &raw.keys, h, t))
                        .collect()
                })
                .collect(),
            values: heads
                .map(|h| {
                    (0..case.rows)
                        .map(|t| value_record(&values, &raw.values, h, t))
                        .collect()
                })
                .collect(),
        })
    }
}

/// Judges attention outputs, given the rotated queries of each (row, head).
pub(super) fn judge(
    fixture: &Fixture<'_>,
    raw: &Raw,
    attended: &Attended,
    rule: &'static str,
    rotated: impl Fn(usize) -> (Bounded, Bounded),
) -> Result<Evidence, Failure> {
    let case = fixture.case;
    let rotation = case.rotation()?;
    let d = case.head_dim as usize;
    let records = Records::read(fixture, raw)?;
    let dequantised: Vec<Vec<Dequantised>> = records
        .values
        .iter()
        .map(|head| {
            head.iter()
                .map(|v| Dequantised::new(&rotation, v))
                .collect()
        })
        .collect();
    let group = case.n_heads / case.n_kv_heads;
    let mut evidence = Evidence::default();
    let mut unbounded = 0;
    let mut loose = 0;
    for row in 0..case.q_rows {
        let visible = (case.start_pos + row + 1) as usize;
        // The automatic choice is at least 256 or the whole; deeper nesting than it has is allowed for.
        let split_len = if case.kv_split == 0 {
            visible
        } else {
            case.kv_split as usize
        };
        let pass = Pass {
            arithmetic: fixture.device.arithmetic,
            rotation: &rotation,
            depth: Depth::kernel(d, visible, split_len),
            scale: case.scale,
            gain: case.gain,
        };
        for head in 0..case.n_heads {
            let kv_head = (head / group) as usize;
            let index = (row * case.n_heads + head) as usize;
            let (polar, jl) = rotated(index);
            let Some(reference) = pass.attention(
                &polar,
                &jl,
                &records.keys[kv_head][..visible],
                &dequantised[kv_head][..visible],
            ) else {
                unbounded += 1;
                continue;
            };
            loose += u64::from(reference.loose);
            let found = &attended.out[index * d..(index + 1) * d];
            let mut seen = Evidence::default();
            let to_f32 = |b: &Bounded| b.values.iter().map(|&v| v as f32).collect();
            let query = RotatedQuery {
                polar: to_f32(&polar),
                jl: to_f32(&jl),
            };
            let (keys, values) = (&records.keys[kv_head], &records.values[kv_head]);
            let (keys, values) = (&keys[..visible], &values[..visible]);
            let twin = twin::attend(&rotation, &query, keys, values, case.scale, case.gain);
            let expected = reference.out.values.iter().zip(&reference.out.errors);
            for (i, (&found, (&expected, &bound))) in found.iter().zip(expected).enumerate() {
                within(rule, &mut seen, found, expected, bound, || {
                    format!("query row {row}, head {head}, element {i}")
                })?;
                if !reference.loose {
                    let error = |v: f32| f64::from(v) - expected;
                    seen.drift.note(error(found), error(twin[i]), bound);
                }
            }
            evidence.absorb(&seen);
        }
    }
    let all = u64::from(case.q_rows) * u64::from(case.n_heads);
    if unbounded == all {
        return Err(Failure::NotChecked(
            "every row has a score past f32".to_owned(),
        ));
    }
    if loose + unbounded == all {
        return Err(Failure::NotChecked(
            "every row's scores are too large for a bound below the hull of the values".to_owned(),
        ));
    }
    Ok(evidence)
}
