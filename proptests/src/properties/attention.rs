//! `attention`: outputs, judged on the device's own cache and rotated queries.

use turboquant_wgpu::Rotation;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::{self, KeyRecord, RotatedQuery, ValueRecord};

use crate::adapters::Device;
use crate::case::Case;
use crate::fixture::{Attended, Fixture, Raw, key_record, value_record};
use crate::oracles::attention::{Depth, Dequantised, Output, Pass};
use crate::oracles::rotate_queries::Bounded;
use crate::verdict::{Evidence, Failure, Outcome, within};

/// Checks attention.
pub fn check(device: &Device, case: &Case) -> Outcome {
    let queries = case.queries()?;
    let mut encoder = device.encoder();
    let fixture = Fixture::encode(device, case, &mut encoder)?;
    let attended = fixture.attend(encoder, &queries)?;
    let raw = fixture.read_raw(device.encoder())?;
    judge(&fixture, &raw, &attended, "attention", |index| {
        own_queries(case, &attended, index)
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

/// The attention oracle over what a device holds.
pub(super) struct Judge<'a> {
    fixture: &'a Fixture<'a>,
    rotation: Rotation,
    records: Records,
    dequantised: Vec<Vec<Dequantised>>,
}

impl<'a> Judge<'a> {
    pub(super) fn new(fixture: &'a Fixture<'_>, raw: &Raw) -> Result<Self, Failure> {
        let rotation = fixture.case.rotation()?;
        let records = Records::read(fixture, raw)?;
        let dequantise = |head: &Vec<ValueRecord>| {
            head.iter()
                .map(|v| Dequantised::new(&rotation, v))
                .collect()
        };
        Ok(Self {
            fixture,
            rotation,
            dequantised: records.values.iter().map(dequantise).collect(),
            records,
        })
    }

    /// The records that the outputs are judged on.
    pub(super) fn records(&self) -> &Records {
        &self.records
    }

    /// Reference and bound of one output, for splits of `kv_split` timesteps (0 for the automatic choice);
    /// `None` if a score may overflow.
    pub(super) fn reference(
        &self,
        row: u32,
        head: u32,
        kv_split: u32,
        (polar, jl): &(Bounded, Bounded),
    ) -> Option<Output> {
        let case = self.fixture.case;
        let visible = (case.start_pos + row + 1) as usize;
        // The automatic choice is at least 256 or the whole; deeper nesting than it has is allowed for.
        let split_len = match kv_split {
            0 => visible,
            len => len as usize,
        };
        let pass = Pass {
            arithmetic: self.fixture.device.arithmetic,
            rotation: &self.rotation,
            depth: Depth::kernel(case.head_dim as usize, visible, split_len),
            scale: case.scale,
            gain: case.gain,
        };
        let kv_head = (head / (case.n_heads / case.n_kv_heads)) as usize;
        pass.attention(
            polar,
            jl,
            &self.records.keys[kv_head][..visible],
            &self.dequantised[kv_head][..visible],
        )
    }

    /// The f32 twin's output for the same records and rotated queries.
    fn twin(&self, row: u32, head: u32, (polar, jl): &(Bounded, Bounded)) -> Vec<f32> {
        let case = self.fixture.case;
        let visible = (case.start_pos + row + 1) as usize;
        let kv_head = (head / (case.n_heads / case.n_kv_heads)) as usize;
        let to_f32 = |b: &Bounded| b.values.iter().map(|&v| v as f32).collect();
        let query = RotatedQuery {
            polar: to_f32(polar),
            jl: to_f32(jl),
        };
        twin::attend(
            &self.rotation,
            &query,
            &self.records.keys[kv_head][..visible],
            &self.records.values[kv_head][..visible],
            case.scale,
            case.gain,
        )
    }
}

/// The rotated queries that a device left for output `index`, taken as exact.
pub(super) fn own_queries(case: &Case, attended: &Attended, index: usize) -> (Bounded, Bounded) {
    let d = case.head_dim as usize;
    let (polar, jl) = attended.rotated[2 * index * d..2 * (index + 1) * d].split_at(d);
    (Bounded::exact(polar), Bounded::exact(jl))
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
    let d = case.head_dim as usize;
    let judge = Judge::new(fixture, raw)?;
    let mut evidence = Evidence::default();
    let mut unbounded = 0;
    let mut loose = 0;
    for row in 0..case.q_rows {
        for head in 0..case.n_heads {
            let index = (row * case.n_heads + head) as usize;
            let queries = rotated(index);
            let Some(reference) = judge.reference(row, head, case.kv_split, &queries) else {
                unbounded += 1;
                continue;
            };
            loose += u64::from(reference.loose);
            let found = &attended.out[index * d..(index + 1) * d];
            let mut seen = Evidence::default();
            let twin = judge.twin(row, head, &queries);
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
