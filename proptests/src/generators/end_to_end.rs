//! Cases for the property `end_to_end`.

use proptest::strategy::BoxedStrategy;

use crate::case::Case;

/// Draws cases.
pub fn strategy() -> BoxedStrategy<Case> {
    super::attention_case("end_to_end")
}
