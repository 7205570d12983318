//! Cases for the property `statistics`: nothing but a head dimension, a gain and a seed counts.

use proptest::prelude::*;
use turboquant_wgpu::HeadDim;

use crate::case::Case;
use crate::inputs::{Data, Family};

/// Draws cases. Seeds do not shrink: no sample is smaller than another.
pub fn strategy() -> BoxedStrategy<Case> {
    (0_usize..4, super::gain(), any::<u32>().no_shrink())
        .prop_map(|(head_dim, gain, cache_seed)| Case {
            property: "statistics".to_owned(),
            head_dim: HeadDim::ALL[head_dim].get_u32(),
            n_heads: 1,
            n_kv_heads: 1,
            capacity: 1,
            rows: 1,
            encode_split: 1,
            layer: 0,
            cache_seed,
            q_rows: 1,
            start_pos: 0,
            q_split: 1,
            kv_split: 0,
            scale: 1.0,
            gain,
            variant: None,
            keys: Data::new(Family::Normal, 0),
            values: Data::new(Family::Normal, 0),
            queries: Data::new(Family::Normal, 0),
            sequence: None,
        })
        .boxed()
}
