//! What must hold, one module for each property. A property is one function from a device and a case to an
//! outcome, called alike by `cargo test`, `tqcheck run` and `tqcheck replay`.

pub mod attention;
pub mod cross;
pub mod encode;
pub mod end_to_end;
pub mod laws;
pub mod model;
mod outputs;
pub mod rotate_queries;
pub mod snapshot;
pub mod statistics;

use proptest::strategy::BoxedStrategy;

use crate::adapters::{self, Device};
use crate::case::Case;
use crate::generators;
use crate::verdict::Outcome;

/// A property with the strategy that draws its cases.
pub struct Property {
    /// Its name, which cases carry.
    pub name: &'static str,
    /// What it says, in a line.
    pub about: &'static str,
    /// Draws its cases.
    pub strategy: fn() -> BoxedStrategy<Case>,
    /// Checks a case.
    pub check: fn(&Device, &Case) -> Outcome,
    /// What a case costs, in cases of an ordinary property.
    pub cost: u64,
    /// Kernels that its verdict rests on.
    pub stages: &'static [Stage],
}

/// A stage of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// `encode_keys`, `encode_values`.
    Encode,
    /// `rotate_queries`.
    Rotate,
    /// `attention`, `merge_attention`.
    Attend,
}

impl Property {
    /// The number of cases to run where so many of an ordinary property are asked for: at least one, unless
    /// none is.
    #[must_use]
    pub fn cases(&self, asked: u64) -> u64 {
        asked.min((asked / self.cost).max(1))
    }
}

impl Property {
    /// Why this machine cannot check it, if so: no fault of the library's, but nothing was checked either.
    #[must_use]
    pub fn unavailable(&self) -> Option<&'static str> {
        let alone = self.name == "cross" && adapters::usable().nth(1).is_none();
        alone.then_some(cross::ALONE)
    }
}

/// Every property.
pub static ALL: &[Property] = &[
    Property {
        name: "encode_keys",
        about: "key records are right; nothing else is written; counters agree",
        strategy: generators::encode_keys::strategy,
        check: encode::check_keys,
        cost: 1,
        stages: &[Stage::Encode],
    },
    Property {
        name: "encode_values",
        about: "value records are right; nothing else is written; counters agree",
        strategy: generators::encode_values::strategy,
        check: encode::check_values,
        cost: 1,
        stages: &[Stage::Encode],
    },
    Property {
        name: "rotate_queries",
        about: "both rotations of the queries are within their bounds",
        strategy: generators::rotate_queries::strategy,
        check: rotate_queries::check,
        cost: 1,
        stages: &[Stage::Rotate],
    },
    Property {
        name: "attention",
        about: "outputs are within their bounds, given the device's own cache and rotated queries",
        strategy: generators::attention::strategy,
        check: attention::check,
        cost: 1,
        stages: &[Stage::Encode, Stage::Rotate, Stage::Attend],
    },
    Property {
        name: "end_to_end",
        about: "dequantised vectors are the twin's but for free choices; outputs follow from the queries",
        strategy: generators::end_to_end::strategy,
        check: end_to_end::check,
        cost: 1,
        stages: &[Stage::Encode, Stage::Rotate, Stage::Attend],
    },
    Property {
        name: "snapshot",
        about: "blobs hold what the buffers hold, restore elsewhere, and a refused restore changes no bit",
        strategy: generators::snapshot::strategy,
        check: snapshot::check,
        cost: 1,
        stages: &[Stage::Encode],
    },
    Property {
        name: "law_encode_partition",
        about: "any partition of the rows gives the same bytes; a record depends on its vector alone",
        strategy: generators::laws::encode_partition,
        check: laws::encode::partition,
        cost: 2,
        stages: &[Stage::Encode],
    },
    Property {
        name: "law_encode_scaling",
        about: "scaling by a power of two moves the norm alone",
        strategy: generators::laws::encode_scaling,
        check: laws::encode::scaling,
        cost: 1,
        stages: &[Stage::Encode],
    },
    Property {
        name: "law_encode_negation",
        about: "negation mirrors codes and flips signs, except at free choices",
        strategy: generators::laws::encode_negation,
        check: laws::encode::negation,
        cost: 1,
        stages: &[Stage::Encode],
    },
    Property {
        name: "law_query_partition",
        about: "query rows agree bit for bit, however they are partitioned",
        strategy: generators::laws::query_partition,
        check: laws::attention::query_partition,
        cost: 4,
        stages: &[Stage::Encode, Stage::Rotate, Stage::Attend],
    },
    Property {
        name: "law_kv_partition",
        about: "KV splits of any length agree within the sum of their bounds",
        strategy: generators::laws::kv_partition,
        check: laws::attention::kv_partition,
        cost: 4,
        stages: &[Stage::Encode, Stage::Rotate, Stage::Attend],
    },
    Property {
        name: "law_causality",
        about: "what lies after a row's position changes nothing, bit for bit",
        strategy: generators::laws::causality,
        check: laws::attention::causality,
        cost: 4,
        stages: &[Stage::Encode, Stage::Rotate, Stage::Attend],
    },
    Property {
        name: "law_gqa",
        about: "equal queries of a group agree, and grouped is multi-head with copied heads, bit for bit",
        strategy: generators::laws::gqa,
        check: laws::attention::gqa,
        cost: 4,
        stages: &[Stage::Encode, Stage::Rotate, Stage::Attend],
    },
    Property {
        name: "law_equal_values",
        about: "equal values give that value, whatever the scores",
        strategy: generators::laws::equal_values,
        check: laws::attention::equal_values,
        cost: 4,
        stages: &[Stage::Encode, Stage::Rotate, Stage::Attend],
    },
    Property {
        name: "law_permutation",
        about: "the order of visible timesteps changes nothing but rounding",
        strategy: generators::laws::permutation,
        check: laws::attention::order,
        cost: 4,
        stages: &[Stage::Encode, Stage::Rotate, Stage::Attend],
    },
    Property {
        name: "law_repeat",
        about: "the same dispatches give the same bits, workgroup memory dirty or cleared",
        strategy: generators::laws::repeat,
        check: laws::repeat::check,
        cost: 8,
        stages: &[Stage::Encode, Stage::Rotate, Stage::Attend],
    },
    Property {
        name: "law_exact",
        about: "where every operation is exact, results are compared bit for bit",
        strategy: generators::laws::exact,
        check: laws::exact::check,
        cost: 4,
        stages: &[Stage::Encode, Stage::Rotate, Stage::Attend],
    },
    Property {
        name: "law_snapshot_prefix",
        about: "prefix restored + rest encoded, and disjoint encodes, give the snapshot of the whole",
        strategy: generators::laws::snapshot_prefix,
        check: laws::snapshot::check,
        cost: 2,
        stages: &[Stage::Encode],
    },
    Property {
        name: "statistics",
        about: "distortion, slope, error and gain of the estimate are those of random vectors; sign streams are independent",
        strategy: generators::statistics::strategy,
        check: statistics::check,
        cost: 12,
        stages: &[Stage::Encode, Stage::Rotate, Stage::Attend],
    },
    Property {
        name: "cross",
        about: "a snapshot reads the same on every other adapter and on the CPU twin",
        strategy: generators::cross::strategy,
        check: cross::check,
        cost: 4,
        stages: &[Stage::Encode, Stage::Rotate, Stage::Attend],
    },
    Property {
        name: "model",
        about: "sequences of operations agree with plain vectors; what has to be refused changes nothing",
        strategy: generators::model::strategy,
        check: model::check,
        cost: 4,
        stages: &[Stage::Encode, Stage::Rotate, Stage::Attend],
    },
];

/// The property of a name.
#[must_use]
pub fn by_name(name: &str) -> Option<&'static Property> {
    ALL.iter().find(|p| p.name == name)
}
