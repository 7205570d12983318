use std::path::PathBuf;

use turboquant_wgpu::{BlobError, Error, RestoreRefusal};

/// Why a container cannot be read, written or restored. Nothing has been changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContainerError {
    /// The bytes end within the header, or its length is absurd.
    #[error("container header: {what} is {found} bytes, expected {expected}")]
    HeaderLength {
        /// What was measured.
        what: &'static str,
        /// Its size.
        found: u64,
        /// The size or the limit.
        expected: String,
    },
    /// The header is not one of a safetensors file.
    #[error("container header: not safetensors: {0}")]
    Header(String),
    /// The file is longer or shorter than its header says.
    #[error("container: found {found} bytes, expected {expected}")]
    Length {
        /// Bytes there are.
        found: u64,
        /// Bytes that the header asks for, itself included.
        expected: u64,
    },
    /// A field of the metadata, of a tensor's description or of a blob's header has the wrong value.
    #[error("container: {field} is {found}, expected {expected}")]
    Field {
        /// Name of the field.
        field: String,
        /// Its value.
        found: String,
        /// What it has to be.
        expected: String,
    },
    /// A field of the metadata is not there.
    #[error("container: {field} is missing from the metadata")]
    MissingField {
        /// Name of the field.
        field: String,
    },
    /// A layer with a cache lacks a tensor.
    #[error("container: tensor {name} is missing")]
    MissingTensor {
        /// Name of the tensor.
        name: String,
    },
    /// A tensor, or a field of the metadata, that no layer has.
    #[error("container: {name} belongs to no layer that has a cache")]
    Extra {
        /// Its name.
        name: String,
    },
    /// Something is not what it was when its hash was taken.
    #[error("container: the hash of {name} is {found}, expected {expected}")]
    Hash {
        /// A tensor, or `metadata`.
        name: String,
        /// Hash of what is there.
        found: String,
        /// Hash according to the metadata.
        expected: String,
    },
    /// A tensor is no blob of its kind.
    #[error("container: {name}: {error}")]
    Blob {
        /// Name of the tensor.
        name: String,
        /// What is wrong with it.
        error: BlobError,
    },
    /// A snapshot to be written would not restore.
    #[error("container: layer {layer}: {reason}")]
    Layer {
        /// The layer.
        layer: u32,
        /// Why.
        reason: RestoreRefusal,
    },
    /// The file is larger than this machine's memory.
    #[error("container: cannot allocate its {bytes} bytes")]
    Allocation {
        /// Bytes to be read.
        bytes: u64,
    },
    /// The file system refused something.
    #[error("cannot {action} {}: {error}", .path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why not.
        error: std::io::Error,
    },
    /// A reader or a writer failed.
    #[error("container: {0}")]
    Io(#[from] std::io::Error),
    /// The cache refused.
    #[error(transparent)]
    Cache(#[from] Error),
}

impl ContainerError {
    pub(crate) fn field(
        field: impl Into<String>,
        found: impl ToString,
        expected: impl ToString,
    ) -> Self {
        Self::Field {
            field: field.into(),
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }
}
