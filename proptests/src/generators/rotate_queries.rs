//! Cases for the property `rotate_queries`: hostile queries, and no more keys than positions.

use proptest::prelude::*;

use crate::case::Case;

/// Draws cases.
pub fn strategy() -> BoxedStrategy<Case> {
    (
        super::attention_case("rotate_queries"),
        super::hostile(),
        super::split(),
    )
        .prop_map(|(case, queries, rows)| {
            let most = 40_000 / (case.n_heads * case.head_dim);
            let q_rows = (case.q_rows + rows).clamp(1, most.max(1));
            Case {
                rows: q_rows,
                capacity: q_rows,
                encode_split: q_rows,
                q_rows,
                start_pos: 0,
                q_split: q_rows,
                queries: super::fit(queries, case.head_dim),
                ..case
            }
        })
        .boxed()
}
