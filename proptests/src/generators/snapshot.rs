//! Cases for the property `snapshot`.

use proptest::strategy::BoxedStrategy;

use crate::case::Case;

/// Draws cases.
#[must_use]
pub fn strategy() -> BoxedStrategy<Case> {
    super::encode_case("snapshot")
}
