//! The inputs' own statistics: a family that is not what its name says makes every property that
//! uses it say less than it seems to.

use std::collections::HashSet;

use half::f16;
use turboquant_wgpu::{HeadDim, Rotation, Signs};

use super::*;

const SEED: u64 = 0xD1CE_D1CE_D1CE_D1CE;

fn rotation(head_dim: HeadDim) -> Rotation {
    Rotation::new(head_dim, 42, 3)
}

fn tensor(family: Family, seed: u64, rotation: &Rotation, rows: u32, heads: u32) -> Vec<f32> {
    let ctx = Context {
        rotation,
        rows,
        heads,
    };
    generate(&Data::new(family, seed), &ctx).unwrap()
}

/// Every family with every head dimension it exists for.
fn everything() -> impl Iterator<Item = (Family, Rotation)> {
    Family::ALL.into_iter().flat_map(|family| {
        let fits = move |d: &HeadDim| family.needs_head_dim().is_none_or(|needed| needed == *d);
        let dims = HeadDim::ALL.into_iter().filter(fits);
        dims.map(move |d| (family, rotation(d)))
    })
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// RHT in f64 by the definition of H, which shares nothing with the butterflies.
fn rht(signs: &Signs, x: &[f64]) -> Vec<f64> {
    let d = x.len();
    let entry = |w: usize, i: usize| {
        let negative = (w & i).count_ones() % 2 == 1;
        if negative == signs.is_positive(i) {
            -x[i]
        } else {
            x[i]
        }
    };
    let sum = |w| (0..d).map(|i| entry(w, i)).sum::<f64>();
    (0..d).map(|w| sum(w) / (d as f64).sqrt()).collect()
}

fn unit(x: &[f64]) -> Vec<f64> {
    let norm = draw::norm(x);
    x.iter().map(|v| v / norm).collect()
}

/// The normalised rotations of a tensor's vectors, and the normalised residuals' rotations.
fn rotated(family: Family, rotation: &Rotation, rows: u32) -> Vec<(Vec<f64>, Vec<f64>)> {
    let book = rotation.head_dim().codebook();
    tensor(family, SEED, rotation, rows, 2)
        .chunks(rotation.head_dim().get())
        .map(|x| {
            let x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
            let y = rht(&rotation.polar, &unit(&x));
            let code = |y: f64| {
                book.boundaries
                    .iter()
                    .filter(|&&b| y >= f64::from(b))
                    .count()
            };
            let residual: Vec<f64> = y
                .iter()
                .map(|&y| y - f64::from(book.centroids[code(y)]))
                .collect();
            let z = rht(&rotation.jl, &unit(&residual));
            (y, z)
        })
        .collect()
}

fn all_y(vectors: &[(Vec<f64>, Vec<f64>)]) -> Vec<f64> {
    vectors.iter().flat_map(|(y, _)| y.clone()).collect()
}

fn share<T>(items: &[T], condition: impl FnMut(&&T) -> bool) -> f64 {
    items.iter().filter(condition).count() as f64 / items.len() as f64
}

/// What a family's 512 × 3 vectors of 64 must look like: the root mean square, the share of
/// positive elements, and the largest magnitude, each as a range. The root mean squares follow from
/// the families' definitions, bar those of the real activations; the ranges allow for some five
/// standard errors.
fn expected(family: Family) -> ([f64; 2], [f64; 2], [f64; 2]) {
    let half = [0.49, 0.51];
    let max = f64::from(f32::MAX);
    match family {
        Family::Uniform => ([0.572, 0.582], half, [0.9999, 1.0]),
        Family::Normal => ([0.99, 1.01], half, [3.5, 8.0]),
        // √((62 + 2·4133)/64) = 11.4 on average, over the six factors of one seed.
        Family::Outlier => ([5.0, 18.0], half, [80.0, 450.0]),
        // √(E m²/64) with E m² = 13/12.
        Family::OneHot => ([0.125, 0.135], [0.006, 0.009], [1.49, 1.5]),
        Family::KSparse => ([0.26, 0.30], [0.034, 0.044], [3.0, 8.0]),
        Family::Constant => ([1.01, 1.07], [0.42, 0.58], [1.49, 1.5]),
        Family::Walsh | Family::SignedWalsh => ([1.01, 1.07], [0.48, 0.52], [1.49, 1.5]),
        // Only 64 different elements.
        Family::EqualVectors => ([0.6, 1.4], [0.2, 0.8], [1.5, 8.0]),
        // √((1/16 + 1/4 + 1 + 4)/4 · 7/3).
        Family::Distinct => ([1.74, 1.78], half, [3.99, 4.0]),
        Family::PlusMinusOne => ([1.0, 1.0], half, [1.0, 1.0]),
        // √(56/64): E length² = 42.7 or 69.3, length a power of two 0.125–16 or uniform in 4–12.
        Family::HalfSigns | Family::BoundaryHugging | Family::ResidualHugging => {
            ([0.865, 1.005], [0.48, 0.52], [4.0, 16.0])
        }
        // √(42/7), and three of seven values.
        Family::Exact => ([2.43, 2.47], [0.42, 0.438], [4.0, 4.0]),
        Family::NormMidpoint => ([2000.0, 6500.0], half, [20_000.0, 65_536.0]),
        Family::Tiny => ([5e-7, 3e-6], half, [5e-6, 6.2e-5]),
        Family::Subnormal => ([0.35, 0.45], half, [3.0, 8.0]),
        Family::Huge => ([0.25 * max, 0.45 * max], half, [max, max]),
        Family::MixedRange => ([1e-4 * max, max], half, [0.05 * max, max]),
        Family::NonFinite => ([0.99, 1.01], half, [3.5, 8.0]),
        // Half of the elements of half of the vectors are normal, and half of those positive.
        Family::NegativeZero => ([0.47, 0.53], [0.11, 0.14], [3.5, 8.0]),
        Family::Cancel => ([100.0, 100.01], half, [800.0, 801.0]),
        // Eight rows in 512, at 32, 64, … 256.
        Family::Spike => ([18.0, 22.0], half, [400.0, 2048.0]),
        Family::AllZero => ([0.0, 0.0], [0.0, 0.0], [0.0, 0.0]),
        Family::RealK => ([1.2, 2.5], [0.3, 0.7], [5.0, 18.0]),
        Family::RealQ => ([0.5, 2.5], [0.3, 0.7], [5.0, 18.0]),
        Family::RealV => ([0.02, 1.6], [0.45, 0.55], [0.3, 10.0]),
    }
}

#[test]
fn every_family_has_the_statistics_of_its_definition() {
    let rotation = rotation(HeadDim::D64);
    let mut breaches = Vec::new();
    for family in Family::ALL {
        let all = tensor(family, SEED, &rotation, 512, 3);
        let finite = all.iter().filter(|x| x.is_finite());
        let x: Vec<f64> = finite.map(|&x| f64::from(x)).collect();
        let n = x.len() as f64;
        let rms = (x.iter().map(|v| v * v).sum::<f64>() / n).sqrt();
        let mean = x.iter().sum::<f64>() / n;
        let positive = share(&x, |&&v| v > 0.0);
        let [low, high] = [f64::min, f64::max].map(|pick| x.iter().copied().fold(0.0, pick));
        let peak = high.max(-low);
        let even = !matches!(family, Family::EqualVectors | Family::RealK | Family::RealQ);
        let mean_limit = if even { 0.1 } else { 0.5 } * rms;
        let (rms_range, positive_range, peak_range) = expected(family);
        for (what, value, [from, to]) in [
            ("root mean square", rms, rms_range),
            ("positive share", positive, positive_range),
            ("largest magnitude", peak, peak_range),
            ("mean", mean, [-mean_limit, mean_limit]),
            // Half of a range that was meant to be symmetric has one end near 0.
            ("nearer end", high.min(-low), [0.2 * peak, peak]),
        ] {
            if !(from..=to).contains(&value) {
                breaches.push(format!("{family}: {what} {value:e}, not {from:e}..={to:e}"));
            }
        }
    }
    assert!(breaches.is_empty(), "{breaches:#?}");
}

#[test]
fn uniform_and_normal_draws_reach_both_ends() {
    let rotation = rotation(HeadDim::D256);
    let x = tensor(Family::Uniform, SEED, &rotation, 512, 1);
    assert!(x.iter().all(|v| (-1.0..1.0).contains(v)));
    for tenth in 0..10 {
        let from = -1.0 + 0.2 * f64::from(tenth);
        let inside = share(&x, |&&v| (from..from + 0.2).contains(&f64::from(v)));
        assert!((inside - 0.1).abs() < 0.005, "{inside} from {from}");
    }
    let x = tensor(Family::Normal, SEED, &rotation, 512, 1);
    for (sigma, inside) in [(1.0, 0.682_69), (2.0, 0.954_50), (3.0, 0.997_30)] {
        assert!(
            (share(&x, |v| v.abs() < sigma) - inside).abs() < 0.006,
            "{sigma} sigma"
        );
    }
    let fourth = x.iter().map(|&v| f64::from(v).powi(4)).sum::<f64>() / x.len() as f64;
    assert!((fourth - 3.0).abs() < 0.2, "fourth moment {fourth}");
}

#[test]
fn a_family_stays_in_the_range_that_it_states() {
    for (family, rotation) in everything() {
        let x = tensor(family, SEED, &rotation, 96, 3);
        assert_eq!(
            family.is_finite(),
            x.iter().all(|v| v.is_finite()),
            "{family}"
        );
        if let Some(max) = family.max_abs() {
            assert!(x.iter().all(|v| v.abs() <= max), "{family} beyond {max}");
        }
    }
}

#[test]
fn elements_depend_on_their_position_alone() {
    for (family, rotation) in everything() {
        let d = rotation.head_dim().get();
        let full = bits(&tensor(family, SEED, &rotation, 9, 4));
        assert_eq!(
            full,
            bits(&tensor(family, SEED, &rotation, 9, 4)),
            "{family}"
        );
        let rows = bits(&tensor(family, SEED, &rotation, 5, 4));
        assert_eq!(full[..rows.len()], rows, "{family}: fewer rows");
        let heads = bits(&tensor(family, SEED, &rotation, 9, 2));
        for (full, part) in full.chunks(4 * d).zip(heads.chunks(2 * d)) {
            assert_eq!(full[..part.len()], *part, "{family}: fewer heads");
        }
        assert!(tensor(family, SEED, &rotation, 0, 4).is_empty());
        assert!(tensor(family, SEED, &rotation, 4, 0).is_empty());
        let other = bits(&tensor(family, SEED + 1, &rotation, 9, 4));
        assert_eq!(
            full == other,
            family == Family::AllZero,
            "{family}: another seed"
        );
        let vectors: HashSet<&[u32]> = full.chunks(d).collect();
        let alike = matches!(family, Family::EqualVectors | Family::AllZero);
        assert!(
            if alike {
                vectors.len() == 1
            } else {
                vectors.len() > 12
            },
            "{family}"
        );
    }
}

#[test]
fn distinct_elements_are_distinct() {
    for head_dim in HeadDim::ALL {
        let rows = (1 << 20) / head_dim.get_u32() / 16;
        let x = tensor(Family::Distinct, SEED, &rotation(head_dim), rows, 8);
        assert_eq!(bits(&x).into_iter().collect::<HashSet<_>>().len(), x.len());
    }
}

#[test]
fn boundary_hugging_coordinates_lie_on_boundaries() {
    for head_dim in HeadDim::ALL {
        let mut near = [0; 3];
        let rotation = rotation(head_dim);
        for (y, _) in rotated(Family::BoundaryHugging, &rotation, 64) {
            for (count, b) in near.iter_mut().zip(head_dim.codebook().boundaries) {
                *count += y
                    .iter()
                    .filter(|&&y| (y - f64::from(b)).abs() < 6e-8)
                    .count();
            }
        }
        let total = 128 * head_dim.get();
        assert!(
            near.iter().sum::<usize>() * 100 > total * 45,
            "{near:?} of {total}"
        );
        assert!(
            near.iter().all(|n| n * 100 > total * 10),
            "{near:?} of {total}"
        );
        // An ordinary family has next to none, so the test can fail.
        let ordinary = all_y(&rotated(Family::Normal, &rotation, 64));
        let b = f64::from(head_dim.codebook().boundaries[2]);
        assert!(share(&ordinary, |y| (y.abs() - b).abs() < 4e-6) < 0.001);
    }
}

#[test]
fn residual_hugging_sketches_lie_on_zero_and_codes_do_not() {
    for head_dim in HeadDim::ALL {
        let all = rotated(Family::ResidualHugging, &rotation(head_dim), 64);
        let z: Vec<f64> = all.iter().flat_map(|(_, z)| z.clone()).collect();
        assert!(share(&z, |z| z.abs() < 1e-6) > 0.45, "d = {head_dim}");
        let b = f64::from(head_dim.codebook().boundaries[2]);
        let y = all_y(&all);
        assert!(share(&y, |y| y.abs() < 4e-6 || (y.abs() - b).abs() < 4e-6) < 0.002);
    }
}

#[test]
fn half_signs_alternate_by_32_elements_and_by_row() {
    // Whether the construction succeeds hangs on the rotation, so one rotation proves little.
    for (head_dim, seed) in HeadDim::ALL
        .into_iter()
        .flat_map(|d| (0..12).map(move |s| (d, s)))
    {
        let rotation = Rotation::from_rotation_seed(head_dim, seed);
        for (vector, (y, z)) in rotated(Family::HalfSigns, &rotation, 8).iter().enumerate() {
            let side = |i: usize| {
                if (i / 32 + vector / 2).is_multiple_of(2) {
                    1.0
                } else {
                    -1.0
                }
            };
            let flip = z[0].signum() * side(0);
            for (i, (y, z)) in y.iter().zip(z).enumerate() {
                let clear = y * side(i) > 1e-5 && z * side(i) * flip > 1e-3;
                assert!(
                    clear,
                    "d = {head_dim}, rotation {seed}, vector {vector}: {y}, {z} at {i}"
                );
            }
        }
    }
}

#[test]
fn a_signed_walsh_row_rotates_into_one_coordinate() {
    for head_dim in HeadDim::ALL {
        for (y, _) in rotated(Family::SignedWalsh, &rotation(head_dim), 64) {
            assert_eq!(y.iter().filter(|y| y.abs() > 1e-12).count(), 1);
            assert!(y.iter().any(|y| (y.abs() - 1.0).abs() < 1e-12));
        }
    }
}

#[test]
fn exact_families_rotate_without_rounding() {
    for head_dim in [HeadDim::D64, HeadDim::D256] {
        for family in [Family::Exact, Family::PlusMinusOne] {
            let rotation = rotation(head_dim);
            for x in tensor(family, SEED, &rotation, 16, 2).chunks_mut(head_dim.get()) {
                let exact = rht(
                    &rotation.polar,
                    &x.iter().map(|&v| f64::from(v)).collect::<Vec<_>>(),
                );
                turboquant_wgpu::rotation::rht(head_dim, &rotation.polar, x);
                assert!(x.iter().zip(exact).all(|(&x, exact)| f64::from(x) == exact));
            }
        }
    }
}

fn norms(family: Family, rotation: &Rotation) -> Vec<f64> {
    let x: Vec<f64> = tensor(family, SEED, rotation, 256, 4)
        .into_iter()
        .map(f64::from)
        .collect();
    x.chunks(rotation.head_dim().get())
        .map(draw::norm)
        .collect()
}

#[test]
fn norm_midpoints_are_midpoints() {
    let (mut normal, mut subnormal, mut edges) = (0, 0, [0; 2]);
    for norm in norms(Family::NormMidpoint, &rotation(HeadDim::D128)) {
        let near = |target: f64| (norm / target - 1.0).abs() < 1e-6;
        let edge = [65504.0, 65520.0].map(near);
        if edge != [false, false] {
            edges[usize::from(edge[1])] += 1;
            continue;
        }
        let nearest = f16::from_f64(norm).to_bits();
        let midpoint = |lower: u16| {
            let [a, b] = [lower, lower + 1].map(|bits| f16::from_bits(bits).to_f64());
            (a + b) / 2.0
        };
        assert!(
            near(midpoint(nearest)) || near(midpoint(nearest.saturating_sub(1))),
            "{norm}"
        );
        *if norm < f64::from(f16::MIN_POSITIVE) {
            &mut subnormal
        } else {
            &mut normal
        } += 1;
    }
    assert!(normal > 400 && subnormal > 200 && edges.iter().all(|&n| n > 80));
}

#[test]
fn extreme_families_reach_their_extremes() {
    let rotation = rotation(HeadDim::D64);
    let tiny = norms(Family::Tiny, &rotation);
    let f16_subnormal = 2f64.powi(-25)..2f64.powi(-14);
    for range in [
        9e-31..1.1e-30,
        9e-14..1.1e-13,
        0.999e-12..1e-12,
        1e-12..1.001e-12,
        f16_subnormal,
    ] {
        assert!(share(&tiny, |n| range.contains(n)) > 0.1, "{range:?}");
    }
    let x = tensor(Family::Subnormal, SEED, &rotation, 64, 2);
    assert!(share(&x, |v| v.is_subnormal()) > 0.3 && share(&x, |v| v.abs() > 1e-3) > 0.1);
    assert!(x.chunks(64).any(|v| v.iter().all(|v| v.abs() < 2e-23)));
    let x = tensor(Family::NonFinite, SEED, &rotation, 64, 2);
    let poisoned = |v: &[f32]| v.iter().filter(|v| !v.is_finite()).count();
    assert!(x.chunks(64).all(|v| poisoned(v) <= 3) && x.chunks(64).any(|v| poisoned(v) == 0));
    for what in [f32::INFINITY, f32::NEG_INFINITY] {
        assert!(x.contains(&what));
    }
    let nans: HashSet<u32> = x
        .iter()
        .filter(|v| v.is_nan())
        .map(|v| v.to_bits())
        .collect();
    assert!(nans.len() > 20, "payloads differ: {nans:x?}");
    let exponents = norms(Family::MixedRange, &rotation);
    assert!(exponents.iter().any(|&n| n < 1e-40) && exponents.iter().any(|&n| n > 1e36));
}

#[test]
fn cancelling_dot_products_cancel() {
    let rotation = rotation(HeadDim::D128);
    let [a, b] = [1, 2].map(|seed| tensor(Family::Cancel, seed, &rotation, 8, 1));
    let rotate = |x: &[f32]| {
        rht(
            &rotation.polar,
            &x.iter().map(|&v| v.into()).collect::<Vec<_>>(),
        )
    };
    for (a, b) in a.chunks(128).zip(b.chunks(128)) {
        let terms: Vec<f64> = rotate(a)
            .iter()
            .zip(rotate(b))
            .map(|(a, b)| a * b)
            .collect();
        assert!(terms.iter().all(|t| (t.abs() / 1e4 - 1.0).abs() < 0.01));
        assert!(terms.iter().sum::<f64>().abs() < 10.0);
    }
}

#[test]
fn exponents_scale_exactly_or_are_refused() {
    for (family, rotation) in everything() {
        let ctx = Context {
            rotation: &rotation,
            rows: 4,
            heads: 2,
        };
        let plain = tensor(family, SEED, &rotation, 4, 2);
        for exponent in [*family.exponents().start(), *family.exponents().end()] {
            let data = Data {
                exponent,
                ..Data::new(family, SEED)
            };
            for (scaled, &x) in generate(&data, &ctx).unwrap().iter().zip(&plain) {
                if x.is_finite() {
                    assert_eq!(f64::from(*scaled), f64::from(x) * 2f64.powi(exponent));
                } else {
                    assert_eq!(scaled.to_bits(), x.to_bits());
                }
            }
        }
        for exponent in [i32::MIN, -278, -160, 140, 278, i32::MAX] {
            let data = Data {
                exponent,
                ..Data::new(family, SEED)
            };
            let refused = matches!(generate(&data, &ctx), Err(InputError::Scale { .. }));
            // What is tiny or huge enough may still be moved to the other end.
            assert!(refused || plain.iter().all(|x| *x == 0.0) || family.exponents() == (0..=0));
        }
    }
}

#[test]
fn descriptors_survive_toml() {
    let rotation = rotation(HeadDim::D32);
    let ctx = Context {
        rotation: &rotation,
        rows: 2,
        heads: 2,
    };
    for family in Family::ALL {
        let data = Data {
            exponent: -3,
            ..Data::new(family, u64::MAX - 1)
        };
        let text = toml::to_string(&data).unwrap();
        assert_eq!(toml::from_str::<Data>(&text).unwrap(), data, "{text}");
        assert!(
            text.contains(&format!("family = \"{family}\"\nseed = -2\n")),
            "{text}"
        );
    }
    assert_eq!(
        toml::to_string(&Data::new(Family::OneHot, 7)).unwrap(),
        "family = \"one-hot\"\nseed = 7\n"
    );
    let data = Data {
        exponent: 2,
        ..Data::new(Family::NonFinite, SEED)
    };
    let frozen = data.frozen(&ctx).unwrap();
    let text = toml::to_string_pretty(&frozen).unwrap();
    assert!(text.lines().all(|line| line.len() < 100), "{text}");
    let read: Data = toml::from_str(&text).unwrap();
    assert_eq!(read, frozen);
    assert_eq!(
        bits(&generate(&read, &ctx).unwrap()),
        bits(&generate(&data, &ctx).unwrap())
    );
}

#[test]
fn malformed_descriptors_are_refused() {
    let literal = "family = \"uniform\"\nseed = 1\n[literal]\nrows = 1\nheads = 1\n";
    for (text, complaint) in [
        (
            "family = \"uniform\"\nseed = 1\nsede = 2".to_owned(),
            "sede",
        ),
        ("family = \"unifrom\"\nseed = 1".to_owned(), "unifrom"),
        ("family = \"uniform\"".to_owned(), "seed"),
        (format!("{literal}bits = []\ncolumns = 3"), "columns"),
        (
            format!("{literal}bits = [\"3f800000 3f80000\"]"),
            "\"3f80000\"",
        ),
        (format!("{literal}bits = [\"+3f80000\"]"), "+3f80000"),
    ] {
        let message = toml::from_str::<Data>(&text).unwrap_err().to_string();
        assert!(message.contains(complaint), "{message}");
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_with_both_sides() {
    let rotation = rotation(HeadDim::D32);
    let ctx = |rows, heads| Context {
        rotation: &rotation,
        rows,
        heads,
    };
    let mut data = Data::new(Family::Uniform, 1).frozen(&ctx(3, 2)).unwrap();
    assert_eq!(
        generate(&data, &ctx(2, 3)),
        Err(InputError::LiteralShape {
            expected: [2, 3],
            found: [3, 2]
        })
    );
    data.literal.as_mut().unwrap().bits.pop();
    assert_eq!(
        generate(&data, &ctx(3, 2)),
        Err(InputError::LiteralLength {
            expected: 192,
            found: 191
        })
    );
    let error = generate(&Data::new(Family::RealK, 1), &ctx(1, 1))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("real-k has head_dim 64, found 32"),
        "{error}"
    );
    let too_large = generate(&Data::new(Family::AllZero, 1), &ctx(u32::MAX, u32::MAX));
    assert!(matches!(too_large, Err(InputError::TooLarge { .. })));
}
