//! Cases for the property `attention`.

use proptest::strategy::BoxedStrategy;

use crate::case::Case;

/// Draws cases.
pub fn strategy() -> BoxedStrategy<Case> {
    super::attention_case("attention")
}
