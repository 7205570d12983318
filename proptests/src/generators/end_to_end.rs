//! Cases for the property `end_to_end`.

use proptest::strategy::BoxedStrategy;

use crate::case::Case;

/// Draws cases.
#[must_use]
pub fn strategy() -> BoxedStrategy<Case> {
    super::attention_case("end_to_end")
}
