#![forbid(unsafe_code)]
#![warn(missing_docs)]
//! A whole compressed cache in one `.safetensors` file.
//!
//! A blob alone says neither under which seed it was made nor which layer it belongs to: in another
//! cache of the same shape it restores, and reads as noise. This container says both, and restores
//! all layers or none.
//!
//! # The file
//!
//! Tensors `layer.N.keys` and `layer.N.values`, of type U8 and one dimension, are the blobs of each
//! layer that has a cache. `__metadata__` holds, as safetensors wants it, strings alone:
//!
//! | key | value |
//! |---|---|
//! | `format_version` | `1` |
//! | `cache_seed` | decimal |
//! | `head_dim` | decimal |
//! | `n_kv_heads` | for each layer, 0 for one without a cache: decimals with commas between |
//! | `seq_len` | likewise |
//! | `producer` | the program that wrote it |
//! | `blake3.layer.N.keys`, `blake3.layer.N.values` | hash of the tensor, in lower-case hexadecimal |
//! | `blake3.metadata` | hash of all the other entries, as lines `key=value` in the keys' order |
//!
//! Equal caches give equal bytes.
//!
//! # Damage
//!
//! [`Container::decode`] takes hostile bytes like the decoder of blobs does: whatever is wrong is an
//! error that says which field, what was found and what was expected. [`Container::open`] judges a
//! file by its header and its length before the rest is read, so that the wrong file is refused
//! however large it is, and [`save`] never leaves half a file behind.
//!
//! The hashes tell damage from data. They are no proof of origin: who can write the file can write
//! them as well.

mod error;
mod file;
mod manifest;

use turboquant_wgpu::blob::decode_kind;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::{Cache, CacheConfig, Snapshot};

pub use error::ContainerError;
pub use file::{ContainerFile, save};
pub use manifest::{LayerInfo, Manifest};

use manifest::tensor_name;

/// A valid container: every tensor is there, has its hash, and decodes to a blob that the manifest
/// describes.
#[derive(Clone, Debug)]
pub struct Container<'a> {
    manifest: Manifest,
    layers: Vec<Option<[&'a [u8]; 2]>>,
}

impl<'a> Container<'a> {
    /// Reads a container from the bytes of a whole file. The blobs stay where they are.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, ContainerError> {
        let header = manifest::Header::read(&mut &*bytes, bytes.len() as u64)?;
        Self::with_data(&header, &bytes[header.data_start()..])
    }

    /// The container of a header and the bytes that follow it, whose number the header has agreed
    /// to.
    fn with_data(header: &manifest::Header, data: &'a [u8]) -> Result<Self, ContainerError> {
        let manifest = header.manifest().clone();
        let mut layers = Vec::new();
        for layer in manifest.layers() {
            let mut blobs = [&data[..0]; 2];
            for (slot, kind) in blobs.iter_mut().zip([Kind::Keys, Kind::Values]) {
                if layer.n_kv_heads == 0 {
                    continue;
                }
                let name = tensor_name(layer.layer, kind);
                let bytes = &data[header.tensor(&name)?];
                header.check_hash(&name, bytes)?;
                let blob = decode_kind(kind, bytes).map_err(|error| ContainerError::Blob {
                    name: name.clone(),
                    error,
                })?;
                layer.check(&name, manifest.head_dim, &blob.header())?;
                *slot = bytes;
            }
            layers.push((layer.n_kv_heads > 0).then_some(blobs));
        }
        Ok(Self { manifest, layers })
    }

    /// What the container says of itself.
    #[must_use]
    pub fn describe(&self) -> &Manifest {
        &self.manifest
    }

    /// The blob of one kind of a layer; `None` if there is no such layer, or it has no cache.
    #[must_use]
    pub fn blob(&self, layer: u32, kind: Kind) -> Option<&'a [u8]> {
        let blobs = self.layers.get(layer as usize)?.as_ref()?;
        Some(match kind {
            Kind::Keys => blobs[0],
            Kind::Values => blobs[1],
        })
    }

    /// Restores every layer of `cache`, or none: the container is checked against the cache's
    /// configuration ([`Manifest::check`]) before anything is recorded.
    ///
    /// # Errors
    /// What differs; a lost device, or one out of memory. The cache is then as it was.
    pub fn restore_into(
        &self,
        cache: &mut Cache,
        encoder: &mut wgpu::CommandEncoder,
    ) -> Result<(), ContainerError> {
        self.manifest.check(cache.config())?;
        let layers: Vec<(u32, &[u8], &[u8])> = (0..)
            .zip(&self.layers)
            .filter_map(|(layer, blobs)| blobs.map(|[keys, values]| (layer, keys, values)))
            .collect();
        Ok(cache.restore_layers(encoder, &layers)?)
    }
}

/// The bytes of a container of `layers`, a snapshot for each layer that has a cache.
///
/// # Errors
/// A snapshot that the layer would not restore, one too many or one missing.
pub fn encode(
    config: &CacheConfig,
    layers: &[Option<Snapshot>],
    producer: &str,
) -> Result<Vec<u8>, ContainerError> {
    let mut bytes = Vec::new();
    manifest::write(config, layers, producer, &mut bytes)?;
    Ok(bytes)
}
