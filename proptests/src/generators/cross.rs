//! Cases for the property `cross`.

use proptest::strategy::BoxedStrategy;

use crate::case::Case;

/// Draws cases.
pub fn strategy() -> BoxedStrategy<Case> {
    super::attention_case("cross")
}
