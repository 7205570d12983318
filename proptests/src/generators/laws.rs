//! Cases for the laws: those of the encoders and of attention, with what a law needs.

use proptest::prelude::*;

use super::{attention_case, encode_case, fit};
use crate::case::Case;
use crate::inputs::{Data, Family};

/// Fewer rows, so that `heads` heads of them have at most this many elements. What attends them follows.
fn fewer(case: Case, heads: u32, elements: u32) -> Case {
    let rows = case.rows.min((elements / (heads * case.head_dim)).max(1));
    let q_rows = case.q_rows.min(rows);
    Case {
        capacity: case.capacity - (case.rows - rows),
        rows,
        q_rows,
        start_pos: case.start_pos.min(rows - q_rows),
        ..case
    }
}

/// For `law_encode_partition`: few rows, since each is a dispatch of its own.
pub fn encode_partition() -> BoxedStrategy<Case> {
    encode_case("law_encode_partition")
        .prop_map(|case| Case {
            rows: case.rows.min(70),
            ..case
        })
        .boxed()
}

/// For `law_encode_scaling`: exponents that most families allow, seldom 0.
pub fn encode_scaling() -> BoxedStrategy<Case> {
    let exponent = || prop_oneof![4 => -16_i32..=12, 1 => -64_i32..=64];
    let ordinary = || {
        super::data(
            Family::ALL
                .into_iter()
                .filter(|f| *f.exponents().end() > 0)
                .collect(),
        )
    };
    let data = || (ordinary(), exponent()).prop_map(|(data, exponent)| Data { exponent, ..data });
    (encode_case("law_encode_scaling"), data(), data())
        .prop_map(|(case, keys, values)| Case {
            keys: fit(keys, case.head_dim),
            values: fit(values, case.head_dim),
            ..case
        })
        .boxed()
}

/// For `law_encode_negation`.
pub fn encode_negation() -> BoxedStrategy<Case> {
    encode_case("law_encode_negation")
}

/// For `law_query_partition`: the sequence is cut the same for every partition.
pub fn query_partition() -> BoxedStrategy<Case> {
    attention_case("law_query_partition")
        .prop_map(|case| Case {
            kv_split: match case.kv_split {
                0 => case.rows,
                len => len,
            },
            ..case
        })
        .boxed()
}

/// For `law_kv_partition`: short sequences, since they are cut into single timesteps and five bounds are computed.
pub fn kv_partition() -> BoxedStrategy<Case> {
    attention_case("law_kv_partition")
        .prop_map(|case| {
            let heads = case.n_heads * case.q_rows;
            fewer(case, heads, 100_000)
        })
        .boxed()
}

/// For `law_causality`: room after the last row.
pub fn causality() -> BoxedStrategy<Case> {
    attention_case("law_causality")
        .prop_map(|case| Case {
            capacity: case.capacity + 1,
            ..case
        })
        .boxed()
}

/// For `law_gqa`: every head's keys are encoded.
pub fn gqa() -> BoxedStrategy<Case> {
    attention_case("law_gqa")
        .prop_map(|case| {
            let heads = case.n_heads;
            fewer(case, heads, 60_000)
        })
        .boxed()
}

/// For `law_equal_values`.
pub fn equal_values() -> BoxedStrategy<Case> {
    (attention_case("law_equal_values"), any::<u32>())
        .prop_map(|(case, seed)| Case {
            values: Data {
                exponent: case.values.exponent,
                ..Data::new(Family::EqualVectors, u64::from(seed))
            },
            ..case
        })
        .boxed()
}

/// For `law_permutation`.
pub fn permutation() -> BoxedStrategy<Case> {
    attention_case("law_permutation")
        .prop_map(|case| {
            let heads = case.n_heads * case.q_rows;
            fewer(case, heads, 200_000)
        })
        .boxed()
}

/// For `law_repeat`: small, since each is run four times.
pub fn repeat() -> BoxedStrategy<Case> {
    attention_case("law_repeat")
        .prop_map(|case| {
            let heads = case.n_heads * case.q_rows;
            fewer(case, heads, 100_000)
        })
        .boxed()
}

/// For `law_exact`: the families that are exact, in a range where f16 norms are normal.
pub fn exact() -> BoxedStrategy<Case> {
    let exponents = (-8_i32..=6, -8_i32..=8, -16_i32..=16);
    (attention_case("law_exact"), exponents, any::<u32>())
        .prop_map(|(case, (keys, values, queries), seed)| {
            let data = |family, exponent| Data {
                exponent,
                ..Data::new(family, u64::from(seed))
            };
            let heads = case.n_kv_heads;
            Case {
                keys: data(Family::SignedWalsh, keys),
                values: data(Family::OneHot, values),
                queries: data(Family::Exact, queries),
                ..fewer(case, heads, 20_000)
            }
        })
        .boxed()
}

/// For `law_snapshot_prefix`.
pub fn snapshot_prefix() -> BoxedStrategy<Case> {
    encode_case("law_snapshot_prefix")
}
