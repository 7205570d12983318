//! Strategies that draw cases, one module for each property, and the parts they share.
//!
//! A strategy draws a handful of plain numbers and maps them to a case, so that proptest shrinks them
//! one after the other: the shape first, then the splits, then the data. What no library call would
//! take is not drawn: values are folded into range, never rejected.

pub mod attention;
pub mod cross;
pub mod encode_keys;
pub mod encode_values;
pub mod end_to_end;
pub mod laws;
pub mod model;
pub mod rotate_queries;
pub mod snapshot;
pub mod statistics;

use proptest::prelude::*;
use turboquant_wgpu::{Gain, HeadDim};

use crate::case::Case;
use crate::inputs::{Data, Family};

/// KV heads and query heads per KV head.
const RATIOS: [u32; 9] = [1, 2, 3, 4, 7, 8, 9, 12, 16];
/// Sequence lengths around what kernels might tile by.
const EDGES: [u32; 13] = [15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257];
/// The most that an attention case may cost: (query row, head, timestep, element) products.
const ATTENTION_COST: u64 = 600_000;
/// The most elements that an encode case may hold.
const ENCODE_COST: u64 = 30_000;

/// The shape of a layer and of what is encoded.
#[derive(Clone, Debug)]
struct Shape {
    head_dim: usize,
    n_kv_heads: u32,
    ratio: usize,
    rows: u32,
    spare: u32,
    layer: u32,
    cache_seed: u32,
}

fn shape() -> impl Strategy<Value = Shape> {
    let rows = prop_oneof![
        4 => 1_u32..=8,
        4 => 1_u32..=80,
        2 => prop::sample::select(EDGES.to_vec()),
        1 => 200_u32..=600,
    ];
    (
        (0_usize..4, rows, 1_u32..=4, 0_usize..RATIOS.len()),
        (
            prop_oneof![Just(0_u32), Just(1), 0_u32..=70],
            prop_oneof![Just(0_u32), 1_u32..=40],
            any::<u32>(),
        ),
    )
        .prop_map(
            |((head_dim, rows, n_kv_heads, ratio), (spare, layer, cache_seed))| Shape {
                head_dim,
                n_kv_heads,
                ratio,
                rows,
                spare,
                layer,
                cache_seed,
            },
        )
}

/// Where to cut: 0 stands for "not at all".
fn split() -> impl Strategy<Value = u32> {
    prop_oneof![
        Just(0_u32),
        1_u32..=9,
        prop::sample::select(vec![17, 55, 63, 64, 65, 97, 128])
    ]
}

/// Data of one of the families; half of the draws are of the ordinary ones.
fn data(families: Vec<Family>) -> impl Strategy<Value = Data> {
    let ordinary: Vec<Family> = families
        .iter()
        .copied()
        .filter(|f| f.is_ordinary())
        .collect();
    let family = prop_oneof![
        prop::sample::select(ordinary),
        prop::sample::select(families)
    ];
    let exponent = prop_oneof![3 => Just(0_i32), 1 => -12_i32..=12];
    (family, exponent, any::<u32>()).prop_map(|(family, exponent, seed)| Data {
        exponent: exponent.clamp(*family.exponents().start(), *family.exponents().end()),
        ..Data::new(family, u64::from(seed))
    })
}

/// Every family: what keys and values may hold.
fn hostile() -> impl Strategy<Value = Data> {
    data(Family::ALL.to_vec())
}

/// Families whose sums stay in f32's range in a score: what queries may hold.
fn moderate() -> impl Strategy<Value = Data> {
    let families = Family::ALL
        .into_iter()
        .filter(|f| !matches!(f, Family::Huge | Family::MixedRange))
        .collect();
    data(families)
}

fn gain() -> impl Strategy<Value = Gain> {
    prop::sample::select(Gain::ALL.to_vec())
}

/// Multiples of 1/√d, as a rule the 1.
fn scale() -> impl Strategy<Value = f32> {
    prop_oneof![
        6 => Just(1.0_f32),
        1 => Just(0.0_f32),
        1 => Just(-1.0_f32),
        1 => 0.1_f32..20.0,
        1 => Just(1000.0_f32),
        1 => Just(-1000.0_f32),
    ]
}

/// Folds a family that asks for another head dimension into one that does not.
fn fit(data: Data, head_dim: u32) -> Data {
    match data.family.needs_head_dim() {
        Some(needed) if needed.get_u32() != head_dim => Data {
            family: Family::Normal,
            ..data
        },
        _ => data,
    }
}

/// A case that only encodes. A property of one kind of vectors draws the other as zeros: making and encoding them
/// would be half of its time.
fn encode_case(property: &'static str) -> BoxedStrategy<Case> {
    (shape(), split(), hostile(), hostile())
        .prop_map(move |(shape, encode_split, keys, values)| {
            let zeros = Data::new(Family::AllZero, 0);
            let (keys, values) = match property {
                "encode_keys" => (keys, zeros),
                "encode_values" => (zeros, values),
                _ => (keys, values),
            };
            let d = HeadDim::ALL[shape.head_dim].get_u32();
            let most = ENCODE_COST / u64::from(d * shape.n_kv_heads);
            let rows = shape.rows.min(most.max(1) as u32);
            Case {
                property: property.to_owned(),
                head_dim: d,
                n_heads: shape.n_kv_heads,
                n_kv_heads: shape.n_kv_heads,
                capacity: rows + shape.spare,
                rows,
                encode_split: if encode_split == 0 {
                    rows
                } else {
                    encode_split
                },
                layer: shape.layer,
                cache_seed: shape.cache_seed,
                q_rows: 0,
                start_pos: 0,
                q_split: 1,
                kv_split: 0,
                scale: 1.0,
                gain: Gain::Unbiased,
                variant: None,
                keys: fit(keys, d),
                values: fit(values, d),
                queries: Data::new(Family::AllZero, 0),
                sequence: None,
            }
        })
        .boxed()
}

/// A case that encodes and attends.
fn attention_case(property: &'static str) -> BoxedStrategy<Case> {
    let queries = (
        prop_oneof![3 => 1_u32..=4, 1 => 1_u32..=40],
        any::<prop::sample::Index>(),
    );
    let splits = (split(), split(), split());
    (
        shape(),
        queries,
        splits,
        (scale(), gain()),
        (hostile(), hostile(), moderate()),
    )
        .prop_map(
            move |(
                shape,
                (q_rows, start),
                (encode_split, q_split, kv_split),
                (scale, gain),
                data,
            )| {
                let head_dim = HeadDim::ALL[shape.head_dim];
                let d = head_dim.get_u32();
                let n_heads = shape.n_kv_heads * RATIOS[shape.ratio];
                let most_rows = ATTENTION_COST / u64::from(n_heads * d);
                let rows = shape.rows.min(most_rows.clamp(1, 4096) as u32);
                let most = ATTENTION_COST / (u64::from(n_heads * d) * u64::from(rows));
                let q_rows = q_rows.min(rows).min(most.max(1) as u32);
                // Index 0 shrinks to the last position, where all timesteps are seen.
                let start_pos = rows - q_rows - start.index((rows - q_rows + 1) as usize) as u32;
                let or_all = |split, all| if split == 0 { all } else { split };
                let (keys, values, queries) = data;
                Case {
                    property: property.to_owned(),
                    head_dim: d,
                    n_heads,
                    n_kv_heads: shape.n_kv_heads,
                    capacity: rows + shape.spare,
                    rows,
                    encode_split: or_all(encode_split, rows),
                    layer: shape.layer,
                    cache_seed: shape.cache_seed,
                    q_rows,
                    start_pos,
                    q_split: or_all(q_split, q_rows),
                    kv_split,
                    scale: scale * head_dim.inv_sqrt(),
                    gain,
                    variant: None,
                    keys: fit(keys, d),
                    values: fit(values, d),
                    queries: fit(queries, d),
                    sequence: None,
                }
            },
        )
        .boxed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::properties;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    /// Every strategy draws cases that can be run, and shrinking keeps them so.
    #[test]
    fn drawn_and_shrunk_cases_are_valid() {
        for property in properties::ALL {
            let mut runner = TestRunner::deterministic();
            let strategy = (property.strategy)();
            for i in 0..200 {
                let mut tree = strategy.new_tree(&mut runner).expect("nothing is rejected");
                let check = |case: Case| {
                    assert_eq!(case.property, property.name);
                    case.check()
                        .unwrap_or_else(|e| panic!("{e}\n{}", case.to_toml()));
                };
                check(tree.current());
                if i % 20 == 0 {
                    while tree.simplify() {
                        check(tree.current());
                    }
                    let case = tree.current();
                    assert_eq!((case.rows, case.n_kv_heads, case.head_dim), (1, 1, 32));
                }
            }
        }
    }
}
