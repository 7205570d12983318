//! `cross`: one snapshot on every adapter and on the CPU twin.

use turboquant_wgpu::blob::decode_kind;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::{self, KeyRecord, ValueRecord};
use turboquant_wgpu::{Error, Snapshot};

use crate::adapters::{self, Device};
use crate::arithmetic::Arithmetic;
use crate::case::Case;
use crate::fixture::{Fixture, new_cache};
use crate::oracles::attention::Depth;
use crate::properties::outputs::{Judge, Reference, by_head, judge, kernel_depth};
use crate::verdict::{Evidence, Failure, Outcome, Violation, within};

/// Why one adapter is not enough.
pub(super) const ALONE: &str = "a second usable adapter is needed, and there is none";

/// Encodes on the device, restores the snapshot on every other usable adapter, and attends there, here and on the
/// twin. Each is judged by its own bound over the same bytes, and any other's outputs are apart from the device's
/// by at most the sum of both bounds.
pub fn check(device: &Device, case: &Case) -> Outcome {
    let others: Vec<&Device> = adapters::usable()
        .filter(|other| !std::ptr::eq(*other, device))
        .collect();
    if others.is_empty() {
        return Err(Failure::NotChecked(ALONE.to_owned()));
    }
    let queries = case.queries()?;
    let mut encoder = device.encoder();
    let home = Fixture::encode(device, case, &mut encoder)?;
    let pending = home.cache.snapshot(&mut encoder, case.layer)?;
    let attended = home.attend(encoder, &queries)?;
    let snapshot = device.wait(pending)?;

    let bytes = Bytes::read(case, &snapshot, &queries)?;
    let mut evidence = Evidence::default();
    let base = bytes.references(Some(device))?;
    if bytes.judge(&mut evidence, &base, &attended.out, &device.label)? == 0 {
        let loose = "no row has a bound below the hull of the values".to_owned();
        return Err(Failure::NotChecked(loose));
    }
    for other in others {
        let out = elsewhere(other, case, &snapshot, &queries)?;
        let references = bytes.references(Some(other))?;
        bytes.judge(&mut evidence, &references, &out, &other.label)?;
        let (here, there) = ((&*base, &*attended.out), (&*references, &*out));
        apart(&mut evidence, here, there, &other.label)?;
    }
    let references = bytes.references(None)?;
    let out = twin::attention(
        &case.rotation()?,
        &decode_kind(Kind::Keys, &snapshot.keys).map_err(Error::from)?,
        &decode_kind(Kind::Values, &snapshot.values).map_err(Error::from)?,
        &queries,
        &case.attention_shape(),
    )?;
    bytes.judge(&mut evidence, &references, &out, "twin")?;
    let (here, there) = ((&*base, &*attended.out), (&*references, &*out));
    apart(&mut evidence, here, there, "twin")?;
    Ok(evidence)
}

/// Outputs over a snapshot restored on another device, whose own snapshot has to be the same.
fn elsewhere(
    device: &Device,
    case: &Case,
    snapshot: &Snapshot,
    queries: &[f32],
) -> Result<Vec<f32>, Failure> {
    let mut there = Fixture {
        device,
        case,
        cache: new_cache(device, case, case.rows)?,
        keys: Vec::new(),
        values: Vec::new(),
    };
    let mut encoder = device.encoder();
    let layer = case.layer;
    there
        .cache
        .restore(&mut encoder, layer, &snapshot.keys, &snapshot.values)?;
    let again = there.cache.snapshot(&mut encoder, layer)?;
    let attended = there.attend(encoder, queries)?;
    if device.wait(again)? != *snapshot {
        return Err(Failure::Violated(Violation {
            rule: "snapshot(restore(b)) = b",
            place: device.label.clone(),
            detail: "found other bytes than those restored".to_owned(),
        }));
    }
    Ok(attended.out)
}

/// What every implementation reads.
struct Bytes<'a> {
    case: &'a Case,
    keys: Vec<Vec<KeyRecord>>,
    values: Vec<Vec<ValueRecord>>,
    queries: &'a [f32],
}

impl<'a> Bytes<'a> {
    fn read(case: &'a Case, snapshot: &Snapshot, queries: &'a [f32]) -> Result<Self, Failure> {
        let head_dim = case.head_dim()?;
        let keys = decode_kind(Kind::Keys, &snapshot.keys).map_err(Error::from)?;
        let values = decode_kind(Kind::Values, &snapshot.values).map_err(Error::from)?;
        Ok(Self {
            case,
            keys: by_head(&KeyRecord::read_all(&keys, head_dim), case.n_kv_heads),
            values: by_head(&ValueRecord::read_all(&values, head_dim), case.n_kv_heads),
            queries,
        })
    }

    /// What outputs of a device, or of the twin, are judged by.
    fn references(&self, device: Option<&Device>) -> Result<Vec<Option<Reference>>, Failure> {
        let attended = Judge::new(
            device.map_or(Arithmetic::TWIN, |d| d.arithmetic),
            &self.case.rotation()?,
            &self.keys,
            &self.values,
            self.case.attention_shape(),
        );
        let queries = attended.rotate(self.queries);
        let d = self.case.head_dim as usize;
        Ok(match device {
            Some(device) => attended.references(queries, kernel_depth(device, self.case)?),
            None => attended.references(queries, |visible| Depth::twin(d, visible)),
        })
    }

    fn judge(
        &self,
        evidence: &mut Evidence,
        references: &[Option<Reference>],
        out: &[f32],
        label: &str,
    ) -> Result<usize, Violation> {
        let (rule, n_heads) = ("attention over a snapshot", self.case.n_heads);
        judge(rule, evidence, references, n_heads, out, label)
    }
}

/// Two implementations' outputs are apart by at most the sum of their bounds.
fn apart(
    evidence: &mut Evidence,
    (here, found): (&[Option<Reference>], &[f32]),
    (there, expected): (&[Option<Reference>], &[f32]),
    label: &str,
) -> Result<(), Violation> {
    let d = found.len() / here.len();
    for (index, pair) in here.iter().zip(there).enumerate() {
        let (Some(here), Some(there)) = pair else {
            continue;
        };
        for i in 0..d {
            let at = index * d + i;
            let bound = here.output.out.errors[i] + there.output.out.errors[i];
            let expected = f64::from(expected[at]);
            within("as elsewhere", evidence, found[at], expected, bound, || {
                format!("against {label}, vector {index}, element {i}")
            })?;
        }
    }
    Ok(())
}
