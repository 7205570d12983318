//! The restore gate.
/// Why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("gate")]
pub struct RestoreRefusal;
