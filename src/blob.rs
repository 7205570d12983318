//! Snapshot blobs.
/// Why bytes are no blob.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("blob")]
pub struct BlobError;
