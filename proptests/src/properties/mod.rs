//! What must hold, one module for each property. A property is one function from a device and a case to an
//! outcome, called alike by `cargo test`, `tqcheck run` and `tqcheck replay`.

pub mod attention;
pub mod cross;
pub mod encode;
pub mod end_to_end;
pub mod model;
mod outputs;
pub mod rotate_queries;
pub mod snapshot;

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
    },
    Property {
        name: "encode_values",
        about: "value records are right; nothing else is written; counters agree",
        strategy: generators::encode_values::strategy,
        check: encode::check_values,
    },
    Property {
        name: "rotate_queries",
        about: "both rotations of the queries are within their bounds",
        strategy: generators::rotate_queries::strategy,
        check: rotate_queries::check,
    },
    Property {
        name: "attention",
        about: "outputs are within their bounds, given the device's own cache and rotated queries",
        strategy: generators::attention::strategy,
        check: attention::check,
    },
    Property {
        name: "end_to_end",
        about: "dequantised vectors are the twin's but for free choices; outputs follow from the queries",
        strategy: generators::end_to_end::strategy,
        check: end_to_end::check,
    },
    Property {
        name: "snapshot",
        about: "blobs hold what the buffers hold, restore elsewhere, and a refused restore changes no bit",
        strategy: generators::snapshot::strategy,
        check: snapshot::check,
    },
    Property {
        name: "cross",
        about: "a snapshot reads the same on every other adapter and on the CPU twin",
        strategy: generators::cross::strategy,
        check: cross::check,
    },
    Property {
        name: "model",
        about: "sequences of operations agree with plain vectors; what has to be refused changes nothing",
        strategy: generators::model::strategy,
        check: model::check,
    },
];

/// The property of a name.
#[must_use]
pub fn by_name(name: &str) -> Option<&'static Property> {
    ALL.iter().find(|p| p.name == name)
}
