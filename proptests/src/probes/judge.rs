//! Pure judgements of what a device computed. Nothing here touches a device, so that each can be given
//! fabricated results and must object to them.

use super::{Probe, Seen};
use crate::arithmetic::SMALLEST_NORMAL;

/// ULP(x) of WGSL: the gap between the two neighbouring floats around x.
#[must_use]
pub fn ulp(x: f64) -> f64 {
    let magnitude = x.abs().max(SMALLEST_NORMAL);
    f64::from_bits(magnitude.to_bits() & 0x7ff0_0000_0000_0000) / 8_388_608.0
}

/// The largest error of float results, in the unit that `reference` gives beside each exact value.
///
/// A subnormal result may be flushed, which the bounds allow for: there, any result up to the smallest normal
/// float is right. An exact value beyond f32 leaves the result open and is left out.
#[must_use]
pub fn accuracy(
    probe: Probe,
    inputs: &[[f32; 4]],
    reference: impl Fn([f64; 4]) -> (f64, f64),
    found: &[u32],
) -> Probe {
    let mut worst: Option<(f64, String)> = None;
    for (input, &bits) in inputs.iter().zip(found) {
        let (exact, unit) = reference(input.map(f64::from));
        let found = f64::from(f32::from_bits(bits));
        if exact.abs() > f64::from(f32::MAX) {
            continue;
        }
        let error = (found - exact).abs() / unit;
        let error = if exact.abs() < SMALLEST_NORMAL && found.abs() <= SMALLEST_NORMAL {
            0.0
        } else if error.is_nan() {
            f64::INFINITY
        } else {
            error
        };
        if worst.as_ref().is_none_or(|(largest, _)| error > *largest) {
            let [x, y, z, _] = input;
            let at = format!("({x:e}, {y:e}, {z:e}) gives {found:e}, exact {exact:e}");
            worst = Some((error, at));
        }
    }
    match worst {
        // A missing result is no evidence.
        Some((error, at)) if found.len() == inputs.len() => Probe {
            kept: probe.limit.is_none_or(|limit| error <= limit),
            seen: Seen::Number(error),
            note: if error > 0.0 { at } else { probe.note },
            ..probe
        },
        _ => probe.not_run("results are missing"),
    }
}

/// The number of results that `right` rejects; none may be.
#[must_use]
pub fn exact(probe: Probe, n: usize, found: &[u32], right: impl Fn(usize, u32) -> bool) -> Probe {
    if found.len() != n || n == 0 {
        return probe.not_run("results are missing");
    }
    let mut wrong = found
        .iter()
        .enumerate()
        .filter(|(i, bits)| !right(*i, **bits));
    let first = wrong.next();
    let count = first.iter().count() + wrong.count();
    Probe {
        unit: format!("wrong of {n}"),
        limit: Some(0.0),
        kept: count == 0,
        seen: Seen::Number(count as f64),
        note: match first {
            Some((i, bits)) => format!("first: result {i} is {bits:#010x}"),
            None => probe.note,
        },
        ..probe
    }
}

/// Which of several lawful behaviours explains all results: the first that does, or `mixed` if each result is explained
/// by one of them, but none explains all. A result that none explains is wrong. Zeros count as equal.
#[must_use]
pub fn choice<const N: usize>(
    probe: Probe,
    names: [&str; N],
    options: &[[u32; N]],
    found: &[u32],
) -> Probe {
    if options.len() != found.len() || found.is_empty() {
        return probe.not_run("results are missing");
    }
    let unsigned_zero = |bits: u32| if bits == 1 << 31 { 0 } else { bits };
    let mut explained = [0; N];
    let mut unexplained = None;
    for (i, (options, &found)) in options.iter().zip(found).enumerate() {
        let hits = options.map(|o| unsigned_zero(o) == unsigned_zero(found));
        for (n, hit) in explained.iter_mut().zip(hits) {
            *n += usize::from(hit);
        }
        if !hits.contains(&true) {
            unexplained.get_or_insert((i, options, found));
        }
    }
    let whole = explained.iter().position(|n| *n == found.len());
    let (seen, note) = match (unexplained, whole) {
        (Some((i, options, found)), _) => (
            "none of them".to_owned(),
            format!("result {i} is {found:#010x}, not one of {options:x?}"),
        ),
        (None, Some(option)) => (names[option].to_owned(), probe.note.clone()),
        (None, None) => {
            let shares: Vec<String> = names
                .iter()
                .zip(explained)
                .map(|(name, n)| format!("{name} {n}"))
                .collect();
            (
                "mixed".to_owned(),
                format!("of {}: {}", found.len(), shares.join(", ")),
            )
        }
    };
    Probe {
        kept: unexplained.is_none(),
        seen: Seen::Text(seen),
        note,
        ..probe
    }
}

/// The float nearest an exact value, the one next to it toward zero, and the one next to it away from zero.
#[must_use]
pub fn roundings(exact: f64) -> [u32; 3] {
    let nearest = exact as f32;
    let magnitude = nearest.abs();
    let (inner, outer) = match f64::from(magnitude).total_cmp(&exact.abs()) {
        std::cmp::Ordering::Equal => (magnitude, magnitude),
        std::cmp::Ordering::Less => (magnitude, magnitude.next_up()),
        std::cmp::Ordering::Greater => (magnitude.next_down(), magnitude),
    };
    [nearest, inner.copysign(nearest), outer.copysign(nearest)].map(f32::to_bits)
}

/// Names of [`roundings`].
pub const ROUNDINGS: [&str; 3] = ["to nearest", "toward zero", "away from zero"];

/// Words of each lane in [`subgroups`].
pub const SUBGROUP_WORDS: usize = 7;

/// Known answers of subgroup operations; each lane's words are its subgroup's size, its number in it,
/// the sums of ones, of numbers and of the numbers before it, the count of even numbers, and its neighbour's number.
#[must_use]
pub fn subgroups(probe: Probe, reported: [u32; 2], found: &[u32]) -> Probe {
    let lanes = found.len() / SUBGROUP_WORDS;
    let mut seen: Vec<u32> = found.chunks(SUBGROUP_WORDS).map(|w| w[0]).collect();
    seen.sort_unstable();
    seen.dedup();
    let probe = exact(probe, SUBGROUP_WORDS * lanes, found, |i, word| {
        let lane = &found[i / SUBGROUP_WORDS * SUBGROUP_WORDS..];
        let (size, id) = (lane[0], lane[1]);
        match i % SUBGROUP_WORDS {
            0 => reported[0] <= size && size <= reported[1] && size <= 128,
            1 => id < size,
            2 => word == size,
            3 => word == size * size.saturating_sub(1) / 2,
            4 => word == id * id.saturating_sub(1) / 2,
            5 => word == size.div_ceil(2),
            // A subgroup of one has no neighbour.
            _ => size < 2 || word == id ^ 1,
        }
    });
    Probe {
        note: format!(
            "sizes reported {} to {}, seen {seen:?}; {}",
            reported[0], reported[1], probe.note
        ),
        ..probe
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(limit: f64) -> Probe {
        Probe::new("planted", "", "ULP", Some(limit))
    }

    fn text(probe: &Probe) -> &str {
        match &probe.seen {
            Seen::Text(text) => text,
            Seen::Number(_) => panic!("a number"),
        }
    }

    fn inputs() -> Vec<[f32; 4]> {
        (1..200)
            .map(|i| [1.0 + i as f32 / 7.0, 1.0 + i as f32 / 211.0, 0.0, 0.0])
            .collect()
    }

    #[test]
    fn an_ulp_is_the_gap_around() {
        assert_eq!(ulp(1.0), f64::from(1f32.next_up()) - 1.0);
        assert_eq!(ulp(-1.999), ulp(1.0));
        assert_eq!(ulp(0.999), ulp(1.0) / 2.0);
        assert_eq!(ulp(0.0), f64::from(f32::from_bits(1)));
    }

    #[test]
    fn an_inverse_root_three_ulp_off_is_broken_and_one_off_is_not() {
        let reference = |[x, ..]: [f64; 4]| (1.0 / x.sqrt(), ulp(1.0 / x.sqrt()));
        let off_by = |ulps: u32| {
            let right = inputs().into_iter().map(|[x, ..]| {
                let root = (1.0 / f64::from(x).sqrt()) as f32;
                root.to_bits() + ulps
            });
            accuracy(
                probe(2.0),
                &inputs(),
                reference,
                &right.collect::<Vec<u32>>(),
            )
        };
        assert!(off_by(0).kept && off_by(1).kept);
        assert!(!off_by(3).kept);
        assert!(matches!(off_by(3).seen, Seen::Number(n) if (2.5..=3.5).contains(&n)));
    }

    #[test]
    fn nothing_computed_and_nan_are_broken() {
        let reference = |[x, ..]: [f64; 4]| (x, ulp(x));
        assert!(!accuracy(probe(1.0), &inputs(), reference, &[]).kept);
        let nan = vec![f32::NAN.to_bits(); inputs().len()];
        assert!(!accuracy(probe(1.0), &inputs(), reference, &nan).kept);
        assert!(!exact(probe(0.0), 4, &[0; 3], |_, _| true).kept);
        assert!(!choice(probe(0.0), ["a"], &[[1]], &[]).kept);
    }

    #[test]
    fn a_truncating_add_is_seen_and_a_wrong_one_is_broken() {
        let options: Vec<[u32; 3]> = inputs()
            .iter()
            .map(|[x, y, ..]| roundings(f64::from(*x) * f64::from(*y)))
            .collect();
        let column = |c: usize| options.iter().map(|o| o[c]).collect::<Vec<u32>>();
        for (c, name) in ROUNDINGS.iter().enumerate() {
            let judged = choice(probe(1.0), ROUNDINGS, &options, &column(c));
            assert!(judged.kept);
            assert_eq!(text(&judged), *name);
        }
        let mut mixed = column(1);
        mixed[..100].copy_from_slice(&column(2)[..100]);
        assert_eq!(
            text(&choice(probe(1.0), ROUNDINGS, &options, &mixed)),
            "mixed"
        );
        let mut wrong = column(0);
        wrong[50] += 2;
        assert!(!choice(probe(1.0), ROUNDINGS, &options, &wrong).kept);
    }

    #[test]
    fn fused_not_fused_and_mixed_are_told_apart() {
        let (names, options) = (["fused", "not fused"], [[5, 0], [7, 0], [9, 0]]);
        let judged = |found: [u32; 3]| choice(probe(0.0), names, &options, &found);
        assert_eq!(text(&judged([5, 7, 9])), "fused");
        assert_eq!(text(&judged([0, 1 << 31, 0])), "not fused");
        assert_eq!(text(&judged([5, 0, 9])), "mixed");
        assert!(!judged([5, 0, 8]).kept);
    }

    #[test]
    fn subgroups_that_add_wrong_are_broken() {
        let lane = |id: u32| [4, id, 4, 6, id * id.saturating_sub(1) / 2, 2, id ^ 1];
        let mut found: Vec<u32> = (0..8).flat_map(|i| lane(i % 4)).collect();
        assert!(subgroups(probe(0.0), [4, 8], &found).kept);
        assert!(!subgroups(probe(0.0), [8, 8], &found).kept);
        found[3 * SUBGROUP_WORDS + 3] = 5;
        assert!(!subgroups(probe(0.0), [4, 8], &found).kept);
    }
}
