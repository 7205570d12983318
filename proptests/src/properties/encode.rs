//! `encode_keys` and `encode_values`: what the encoders write, and where.

use turboquant_wgpu::VectorCounts;
use turboquant_wgpu::layout::{DeviceLayout, DeviceRegion, Kind};

use crate::adapters::Device;
use crate::case::Case;
use crate::fixture::{Fixture, PATTERN, key_record, value_record, vector};
use crate::oracles::encode_values::Counted;
use crate::oracles::{encode_keys, encode_values};
use crate::verdict::{Evidence, Failure, Outcome, Violation};

/// Checks the key encoder.
pub fn check_keys(device: &Device, case: &Case) -> Outcome {
    check(device, case, Kind::Keys)
}

/// Checks the value encoder.
pub fn check_values(device: &Device, case: &Case) -> Outcome {
    check(device, case, Kind::Values)
}

fn check(device: &Device, case: &Case, kind: Kind) -> Outcome {
    let mut encoder = device.encoder();
    let fixture = Fixture::encode(device, case, &mut encoder)?;
    let raw = fixture.read_raw(encoder)?;
    let (words, counts) = match kind {
        Kind::Keys => (&raw.keys, raw.counters.keys),
        Kind::Values => (&raw.values, raw.counters.values),
    };
    let layout = fixture.layout(kind)?;
    let evidence = judge_records(device, &fixture, kind, &layout, words, counts)?;
    untouched(case, &layout, words, case.rows)?;
    Ok(evidence)
}

fn judge_records(
    device: &Device,
    fixture: &Fixture<'_>,
    kind: Kind,
    layout: &DeviceLayout,
    words: &[u32],
    counts: VectorCounts,
) -> Result<Evidence, Failure> {
    let case = fixture.case;
    let head_dim = case.head_dim()?;
    let rotation = case.rotation()?;
    let mut evidence = Evidence::default();
    let mut tally = Tally::default();
    for t in 0..case.rows {
        for head in 0..case.n_kv_heads {
            let index = (t * case.n_kv_heads + head) as usize;
            let place = format!("{kind}, timestep {t}, head {head}");
            let arithmetic = device.arithmetic;
            let counted = match kind {
                Kind::Keys => {
                    let record = key_record(layout, words, head, t);
                    let x = vector(&fixture.keys, head_dim, index);
                    encode_keys::judge(arithmetic, &rotation, x, &record, &mut evidence, &place)?
                }
                Kind::Values => {
                    let norm_word = words[layout.slot(DeviceRegion::Norms, head, t) as usize];
                    if norm_word >> 16 != 0 {
                        return Err(Failure::Violated(Violation {
                            rule: "value norm word",
                            place,
                            detail: format!("found {norm_word:#010x}, expected a high half of 0"),
                        }));
                    }
                    let record = value_record(layout, words, head, t);
                    let x = vector(&fixture.values, head_dim, index);
                    encode_values::judge(arithmetic, &rotation, x, &record, &mut evidence, &place)?
                }
            };
            tally.add(counted);
        }
    }
    tally.judge(kind, counts)?;
    Ok(evidence)
}

/// What the counters may say.
#[derive(Default)]
struct Tally {
    non_finite: u32,
    vanishing: u32,
    saturated: u32,
    maybe_saturated: u32,
}

impl Tally {
    fn add(&mut self, counted: Counted) {
        self.non_finite += u32::from(counted.non_finite);
        self.vanishing += u32::from(counted.vanishing);
        match counted.saturated {
            Some(saturated) => self.saturated += u32::from(saturated),
            None => self.maybe_saturated += 1,
        }
    }

    fn judge(&self, kind: Kind, found: VectorCounts) -> Result<(), Violation> {
        let saturated = self.saturated..=self.saturated + self.maybe_saturated;
        let right = found.non_finite == self.non_finite
            && found.vanishing == self.vanishing
            && saturated.contains(&found.saturated);
        if right {
            return Ok(());
        }
        Err(Violation {
            rule: "counters",
            place: kind.to_string(),
            detail: format!(
                "found {found:?}, expected non_finite {}, vanishing {}, saturated {saturated:?}",
                self.non_finite, self.vanishing
            ),
        })
    }
}

/// Every word outside the live records still holds the pattern.
pub(super) fn untouched(
    case: &Case,
    layout: &DeviceLayout,
    words: &[u32],
    live: u32,
) -> Result<(), Violation> {
    let mut at = 0;
    for &region in layout.kind().device_regions() {
        for head in 0..case.n_kv_heads {
            let written = layout.slot(region, head, 0) as usize;
            let end = written + (live * region.record_words(layout.shape().head_dim)) as usize;
            unwritten(layout.kind(), words, at..written)?;
            at = end;
        }
    }
    unwritten(layout.kind(), words, at..words.len())
}

fn unwritten(kind: Kind, words: &[u32], range: std::ops::Range<usize>) -> Result<(), Violation> {
    match range.clone().find(|&i| words[i] != PATTERN) {
        None => Ok(()),
        Some(i) => Err(Violation {
            rule: "only its own slots are written",
            place: format!("{kind} buffer, word {i}"),
            detail: format!(
                "found {:#010x}, expected the pattern {PATTERN:#010x}",
                words[i]
            ),
        }),
    }
}
