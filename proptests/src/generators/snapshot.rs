//! Cases for the property `snapshot`.

use proptest::strategy::BoxedStrategy;

use crate::case::Case;

/// Draws cases.
pub fn strategy() -> BoxedStrategy<Case> {
    super::encode_case("snapshot")
}
