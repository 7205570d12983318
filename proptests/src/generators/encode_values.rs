//! Cases for the property `encode_values`.

use proptest::strategy::BoxedStrategy;

use crate::case::Case;

/// Draws cases.
pub fn strategy() -> BoxedStrategy<Case> {
    super::encode_case("encode_values")
}
