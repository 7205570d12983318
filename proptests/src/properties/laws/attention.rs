//! Laws of attention.

use turboquant_wgpu::layout::{DeviceRegion, Kind};

use super::{attended, demand, permutation, reordered, same_floats, same_words, something};
use crate::adapters::Device;
use crate::case::Case;
use crate::fixture::{Attended, Fixture, PATTERN, upload_words};
use crate::inputs::{Data, Family};
use crate::oracles::dequantise;
use crate::properties::attention::Records;
use crate::properties::outputs::{self, Judge, Reference};
use crate::verdict::{Evidence, Failure, Outcome, within};

/// Query rows may be attended in any partition: with the sequence cut alike, outputs agree bit for bit, and
/// rows that were not asked for are not written.
///
/// The automatic cut depends on the number of rows in a call, so cases name their own.
pub fn query_partition(device: &Device, case: &Case) -> Outcome {
    let rule = "query rows are independent of each other";
    let queries = case.queries()?;
    let mut whole = case.clone();
    whole.q_split = case.q_rows;
    let (fixture, all) = attended(device, &whole, &queries)?;
    let mut evidence = Evidence::default();
    for split in [1, case.q_split] {
        let mut parts = case.clone();
        parts.q_split = split;
        let found = fixture.attend_as(&parts, device.encoder(), &queries)?;
        let what = format!("{split} rows a call");
        same_floats(rule, &what, &mut evidence, &found.out, &all.out)?;
        same_floats(rule, &what, &mut evidence, &found.rotated, &all.rotated)?;
    }
    // One range alone.
    let first = case.cache_seed % case.q_rows;
    let end = case.q_rows.min(first.saturating_add(case.q_split));
    let range = first..end;
    let found = fixture.attend_parts(case, device.encoder(), &queries, &[range])?;
    let row = (case.n_heads * case.head_dim) as usize;
    let (from, to) = (first as usize * row, end as usize * row);
    let what = format!("rows {first}..{end} alone");
    let own = &found.out[from..to];
    same_floats(rule, &what, &mut evidence, own, &all.out[from..to])?;
    let others = found.out[..from].iter().chain(&found.out[to..]);
    let written = others.filter(|v| v.to_bits() != PATTERN).count();
    demand("only its own rows are written", written == 0, || {
        (what, format!("{written} elements of other rows"))
    })?;
    Ok(evidence)
}

/// What every output is judged by, in order; `None` where a score may overflow.
fn references(
    device: &Device,
    judge: &Judge,
    case: &Case,
    attended: &Attended,
) -> Result<Vec<Option<Reference>>, Failure> {
    let own = outputs::own(&attended.rotated, case.head_dim()?);
    Ok(judge.references(own, outputs::kernel_depth(device, case)?))
}

/// Demands that two runs agree within the sum of their bounds.
fn agree(
    rule: &'static str,
    case: &Case,
    evidence: &mut Evidence,
    [found, expected]: [&[f32]; 2],
    [bounds, others]: [&[Option<Reference>]; 2],
) -> Result<(), Failure> {
    let d = case.head_dim as usize;
    let outputs = found.chunks_exact(d).zip(expected.chunks_exact(d));
    for (index, ((found, expected), bounds)) in outputs.zip(bounds.iter().zip(others)).enumerate() {
        let (Some(one), Some(two)) = bounds else {
            continue;
        };
        let (one, two) = (&one.output, &two.output);
        if one.loose || two.loose {
            continue;
        }
        for i in 0..d {
            let bound = one.out.errors[i] + two.out.errors[i];
            within(
                rule,
                evidence,
                found[i],
                f64::from(expected[i]),
                bound,
                || {
                    let (row, head) = (index as u32 / case.n_heads, index as u32 % case.n_heads);
                    format!("query row {row}, head {head}, element {i}")
                },
            )?;
        }
    }
    Ok(())
}

const UNDETERMINED: &str = "every row's scores are too large for a bound";

/// However the sequence is cut, outputs agree within the sum of their bounds: in one part, in parts longer
/// than it, of one timestep each (more parts than tiles), as the case says, and as chosen automatically.
pub fn kv_partition(device: &Device, case: &Case) -> Outcome {
    let rule = "KV splits agree within the sum of their bounds";
    let queries = case.queries()?;
    let mut whole = case.clone();
    whole.kv_split = case.rows + 7;
    let (fixture, all) = attended(device, &whole, &queries)?;
    let raw = fixture.read_raw(device.encoder())?;
    let judge = Records::read(&fixture, &raw)?.judge(&fixture)?;
    let expected = references(device, &judge, &whole, &all)?;
    let mut evidence = Evidence::default();
    for kv_split in [1, case.kv_split, u32::MAX, 0] {
        let mut other = case.clone();
        other.kv_split = kv_split;
        let found = fixture.attend_as(&other, device.encoder(), &queries)?;
        let bounds = references(device, &judge, &other, &found)?;
        let outputs = [&found.out[..], &all.out[..]];
        agree(rule, case, &mut evidence, outputs, [&bounds, &expected])?;
    }
    something(evidence, UNDETERMINED)
}

/// What lies after a row's position changes nothing, bit for bit: hostile vectors encoded there, and
/// then words that are NaN norms, in every slot up to the capacity.
pub fn causality(device: &Device, case: &Case) -> Outcome {
    let rule = "timesteps after a row's position change nothing";
    let queries = case.queries()?;
    let (mut fixture, before) = attended(device, case, &queries)?;
    let pivot = case.cache_seed % case.q_rows;
    let live = case.start_pos + pivot + 1;
    let seen = ((pivot + 1) * case.n_heads * case.head_dim) as usize;
    let mut evidence = Evidence::default();

    let mut later = case.clone();
    later.rows = case.capacity - live;
    if later.rows > 0 {
        let seed = u64::from(case.cache_seed);
        later.keys = Data::new(Family::NonFinite, seed);
        later.values = Data::new(Family::Huge, seed);
        let mut encoder = device.encoder();
        let (keys, values) = (later.keys()?, later.values()?);
        fixture.encode_at(&mut encoder, &keys, &values, live, later.rows)?;
        let after = fixture.attend(encoder, &queries)?;
        let what = "after hostile vectors";
        same_floats(
            rule,
            what,
            &mut evidence,
            &after.out[..seen],
            &before.out[..seen],
        )?;
    }

    let mut encoder = device.encoder();
    for kind in [Kind::Keys, Kind::Values] {
        let layout = fixture.layout(kind)?;
        let buffer = fixture.cache.buffer(case.layer, kind)?;
        for &region in kind.device_regions() {
            let words = region.record_words(case.head_dim()?) * (case.capacity - live);
            if words == 0 {
                continue;
            }
            // As codes and signs the outermost, as norms a NaN.
            let rubbish = upload_words(device, &vec![u32::MAX; words as usize]);
            for head in 0..case.n_kv_heads {
                let at = 4 * u64::from(layout.slot(region, head, live));
                let bytes = 4 * u64::from(words);
                encoder.copy_buffer_to_buffer(&rubbish, 0, buffer, at, bytes);
            }
        }
    }
    let after = fixture.attend(encoder, &queries)?;
    let what = "after NaN norms";
    same_floats(
        rule,
        what,
        &mut evidence,
        &after.out[..seen],
        &before.out[..seen],
    )?;
    // The rubbish was there to be read, and attention wrote none of it.
    let raw = fixture.read_raw(device.encoder())?;
    let layout = fixture.layout(Kind::Keys)?;
    let norms = layout.slot(DeviceRegion::Norms, 0, 0) as usize;
    let unread = &raw.keys[norms + live as usize..norms + case.capacity as usize];
    let expected = vec![u32::MAX; unread.len()];
    same_words(
        "attention writes its outputs alone",
        "key norms",
        &mut evidence,
        unread,
        &expected,
    )?;
    Ok(evidence)
}

/// Equal queries in a group give equal outputs, and grouped attention is multi-head attention with the heads
/// copied: both bit for bit.
pub fn gqa(device: &Device, case: &Case) -> Outcome {
    let (d, group) = (
        case.head_dim as usize,
        (case.n_heads / case.n_kv_heads) as usize,
    );
    let (heads, kv_heads) = (case.n_heads as usize, case.n_kv_heads as usize);
    // The first and the last head of a group ask the same.
    let own = case.queries()?;
    let twins: Vec<usize> = (0..case.q_rows as usize * heads)
        .map(|i| {
            if i % group == group - 1 {
                i + 1 - group
            } else {
                i
            }
        })
        .collect();
    let queries = reordered(&own, d, &twins);
    let (_, grouped) = attended(device, case, &queries)?;
    let mut evidence = Evidence::default();
    for (index, &twin) in twins.iter().enumerate().filter(|(i, twin)| i != *twin) {
        let [found, expected] = [index, twin].map(|i| &grouped.out[i * d..(i + 1) * d]);
        let what = format!("vector {index}");
        same_floats(
            "equal queries of a group",
            &what,
            &mut evidence,
            found,
            expected,
        )?;
    }

    let copies: Vec<usize> = (0..case.rows as usize * heads)
        .map(|i| i / heads * kv_heads + i % heads / group)
        .collect();
    let mut multi = case.clone();
    multi.n_kv_heads = case.n_heads;
    let (keys, values) = (
        reordered(&case.keys()?, d, &copies),
        reordered(&case.values()?, d, &copies),
    );
    let mut fixture = Fixture::with(device, &multi, keys, values)?;
    let mut encoder = device.encoder();
    fixture.encode_rows(&mut encoder, case.encode_split)?;
    let found = fixture.attend(encoder, &queries)?;
    let rule = "grouped is multi-head with copied heads";
    same_floats(rule, "outputs", &mut evidence, &found.out, &grouped.out)?;
    Ok(evidence)
}

/// Where all values are equal the output is that value, whatever the scores: the weights' errors cancel, and
/// only the roundings of the sums are left. Scores too large for any other bound are held to this one too.
pub fn equal_values(device: &Device, case: &Case) -> Outcome {
    let rule = "equal values give that value";
    let queries = case.queries()?;
    let (fixture, attended) = attended(device, case, &queries)?;
    let raw = fixture.read_raw(device.encoder())?;
    let records = Records::read(&fixture, &raw)?;
    let judge = records.judge(&fixture)?;
    let first = &records.values[0][0];
    let differs = records.values.iter().flatten().position(|v| v != first);
    demand(rule, differs.is_none(), || {
        (
            format!("value {differs:?}"),
            "encoded unlike the first".to_owned(),
        )
    })?;
    let value = dequantise::value(&case.rotation()?, first);
    let d = case.head_dim as usize;
    let mut evidence = Evidence::default();
    let bounds = references(device, &judge, case, &attended)?;
    for (index, (out, bounds)) in attended.out.chunks_exact(d).zip(&bounds).enumerate() {
        let Some(bounds) = bounds else { continue };
        for (i, (&found, &expected)) in out.iter().zip(&value).enumerate() {
            // The reference's own arithmetic, of sums of equal terms in f64.
            let reference = &bounds.output.out;
            let bound = reference.errors[i] + 1e-14 * reference.values[i].abs();
            within(rule, &mut evidence, found, expected, bound, || {
                format!("vector {index}, element {i}")
            })?;
        }
    }
    something(evidence, UNDETERMINED)
}

/// The order of the timesteps that every row sees does not matter but for rounding.
pub fn order(device: &Device, case: &Case) -> Outcome {
    let rule = "the order of visible timesteps changes nothing but rounding";
    let queries = case.queries()?;
    let (fixture, before) = attended(device, case, &queries)?;
    let raw = fixture.read_raw(device.encoder())?;
    let judge = Records::read(&fixture, &raw)?.judge(&fixture)?;
    let bounds = references(device, &judge, case, &before)?;

    let shared = case.start_pos as usize + 1;
    let mut order = permutation(shared, u64::from(case.cache_seed));
    order.extend(shared..case.rows as usize);
    let row = (case.n_kv_heads * case.head_dim) as usize;
    let moved = |data: &[f32]| reordered(data, row, &order);
    let mut other = Fixture::with(device, case, moved(&fixture.keys), moved(&fixture.values))?;
    let mut encoder = device.encoder();
    other.encode_rows(&mut encoder, case.encode_split)?;
    let after = other.attend(encoder, &queries)?;
    let raw = other.read_raw(device.encoder())?;
    let judge = Records::read(&other, &raw)?.judge(&other)?;
    let others = references(device, &judge, case, &after)?;
    let mut evidence = Evidence::default();
    let outputs = [&after.out[..], &before.out[..]];
    agree(rule, case, &mut evidence, outputs, [&others, &bounds])?;
    something(evidence, UNDETERMINED)
}
