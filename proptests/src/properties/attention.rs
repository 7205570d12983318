//! `attention`: outputs, judged on the device's own cache and rotated queries.

use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::{KeyRecord, ValueRecord};

use crate::adapters::Device;
use crate::case::Case;
use crate::fixture::{Attended, Fixture, Raw, key_record, value_record};
use crate::oracles::rotate_queries::Bounded;
use crate::properties::outputs;
use crate::verdict::{Evidence, Failure, Outcome};

/// Checks attention.
pub fn check(device: &Device, case: &Case) -> Outcome {
    let queries = case.queries()?;
    let mut encoder = device.encoder();
    let fixture = Fixture::encode(device, case, &mut encoder)?;
    let attended = fixture.attend(encoder, &queries)?;
    let raw = fixture.read_raw(device.encoder())?;
    let own = outputs::own(&attended.rotated, case.head_dim()?);
    judge(&fixture, &raw, &attended, "attention", own)
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

impl Records {
    /// The attention oracle over these records.
    pub(super) fn judge(&self, fixture: &Fixture<'_>) -> Result<outputs::Judge, Failure> {
        Ok(outputs::Judge::new(
            fixture.device.arithmetic,
            &fixture.case.rotation()?,
            &self.keys,
            &self.values,
            fixture.case.attention_shape(),
        ))
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
    let judge = Records::read(fixture, raw)?.judge(fixture)?;
    let references = judge.references(rotated, outputs::kernel_depth(fixture.device, case)?);
    let mut evidence = Evidence::default();
    let (n_heads, out) = (case.n_heads, &attended.out);
    let tight = outputs::judge(rule, &mut evidence, &references, n_heads, out, "output")?;
    if references.iter().all(Option::is_none) {
        return Err(Failure::NotChecked(
            "every row has a score past f32".to_owned(),
        ));
    }
    if tight == 0 {
        return Err(Failure::NotChecked(
            "every row's scores are too large for a bound below the hull of the values".to_owned(),
        ));
    }
    Ok(evidence)
}
