//! Cases for the property `statistics`: nothing but a head dimension, a gain and a seed counts.

use proptest::prelude::*;

use crate::case::Case;

/// Draws cases.
pub fn strategy() -> BoxedStrategy<Case> {
    (super::encode_case("statistics"), super::gain())
        .prop_map(|(case, gain)| Case {
            n_heads: 1,
            n_kv_heads: 1,
            rows: 1,
            capacity: 1,
            encode_split: 1,
            layer: 0,
            gain,
            ..case
        })
        .boxed()
}
