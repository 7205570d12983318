//! The header: what is in a container, and what makes it agree with itself.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::ops::Range;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Serialize;
use turboquant_wgpu::gate;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::{BlobHeader, CacheConfig, LayerShape, RestoreRefusal, Snapshot};

use crate::ContainerError;

const VERSION: u32 = 1;
/// Bytes before the header: its length.
const PREFIX: u64 = 8;
/// The longest header that is read. One of a thousand layers takes a quarter of a megabyte.
const MOST_HEADER_BYTES: u64 = 16 << 20;

const FORMAT_VERSION: &str = "format_version";
const CACHE_SEED: &str = "cache_seed";
const HEAD_DIM: &str = "head_dim";
const N_KV_HEADS: &str = "n_kv_heads";
const SEQ_LEN: &str = "seq_len";
const PRODUCER: &str = "producer";
const METADATA: &str = "metadata";

/// What a container says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Seed of the cache's rotations.
    pub seed: u64,
    /// Elements of a vector.
    pub head_dim: u32,
    /// KV heads of each layer; 0 for a layer without a cache.
    pub n_kv_heads: Vec<u32>,
    /// Timesteps that each layer holds.
    pub seq_len: Vec<u32>,
    /// The program that wrote it.
    pub producer: String,
}

/// One layer of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerInfo {
    /// The layer.
    pub layer: u32,
    /// Its KV heads; 0 if it has no cache.
    pub n_kv_heads: u32,
    /// Timesteps that it holds.
    pub seq_len: u32,
}

impl LayerInfo {
    /// Checks that a blob's header is this layer's.
    pub(crate) fn check(
        &self,
        name: &str,
        head_dim: u32,
        header: &BlobHeader,
    ) -> Result<(), ContainerError> {
        for (field, found, expected) in [
            (N_KV_HEADS, header.n_kv_heads, self.n_kv_heads),
            (HEAD_DIM, header.head_dim, head_dim),
            (SEQ_LEN, header.seq_len, self.seq_len),
        ] {
            if found != expected {
                let field = format!("{name}: {field}");
                return Err(ContainerError::field(field, found, expected));
            }
        }
        Ok(())
    }
}

impl Manifest {
    /// The layers, those without a cache among them.
    pub fn layers(&self) -> impl Iterator<Item = LayerInfo> {
        (0..).zip(self.n_kv_heads.iter().zip(&self.seq_len)).map(
            |(layer, (&n_kv_heads, &seq_len))| LayerInfo {
                layer,
                n_kv_heads,
                seq_len,
            },
        )
    }

    /// Checks that a cache made with `config` could take every layer.
    ///
    /// # Errors
    /// What differs: the seed, the head dimension, the number of layers, a layer's heads, or its
    /// length if it is over the capacity.
    pub fn check(&self, config: &CacheConfig) -> Result<(), ContainerError> {
        let differ = |field: &str, found: u64, expected: u64| match found == expected {
            true => Ok(()),
            false => Err(ContainerError::field(field, found, expected)),
        };
        differ(CACHE_SEED, self.seed, config.seed)?;
        let head_dim = config.head_dim.get_u32();
        differ(HEAD_DIM, self.head_dim.into(), head_dim.into())?;
        let layers = [&self.n_kv_heads, &config.n_kv_heads].map(|heads| heads.len() as u64);
        differ("number of layers", layers[0], layers[1])?;
        for (layer, &expected) in self.layers().zip(&config.n_kv_heads) {
            let field = format!("layer {}: {N_KV_HEADS}", layer.layer);
            differ(&field, layer.n_kv_heads.into(), expected.into())?;
            if layer.seq_len > config.capacity {
                return Err(ContainerError::field(
                    format!("layer {}: {SEQ_LEN}", layer.layer),
                    layer.seq_len,
                    format!("at most the capacity {}", config.capacity),
                ));
            }
        }
        Ok(())
    }

    /// The entries of `__metadata__`, without the hashes.
    fn entries(&self) -> BTreeMap<String, String> {
        let list = |numbers: &[u32]| {
            let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
            numbers.join(",")
        };
        [
            (FORMAT_VERSION, VERSION.to_string()),
            (CACHE_SEED, self.seed.to_string()),
            (HEAD_DIM, self.head_dim.to_string()),
            (N_KV_HEADS, list(&self.n_kv_heads)),
            (SEQ_LEN, list(&self.seq_len)),
            (PRODUCER, self.producer.clone()),
        ]
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
    }

    /// Reads the entries that [`Manifest::entries`] makes.
    fn parse(entries: &BTreeMap<&str, &str>) -> Result<Self, ContainerError> {
        let text = |field: &str| {
            entries
                .get(field)
                .copied()
                .ok_or_else(|| ContainerError::MissingField {
                    field: field.to_owned(),
                })
        };
        let version = text(FORMAT_VERSION)?;
        if version != VERSION.to_string() {
            return Err(ContainerError::field(
                FORMAT_VERSION,
                quoted(version),
                VERSION,
            ));
        }
        let list = |field| match text(field)? {
            "" => Ok(Vec::new()),
            numbers => numbers.split(',').map(|n| number(field, n)).collect(),
        };
        let manifest = Self {
            seed: number(CACHE_SEED, text(CACHE_SEED)?)?,
            head_dim: number(HEAD_DIM, text(HEAD_DIM)?)?,
            n_kv_heads: list(N_KV_HEADS)?,
            seq_len: list(SEQ_LEN)?,
            producer: text(PRODUCER)?.to_owned(),
        };
        if manifest.seq_len.len() != manifest.n_kv_heads.len() {
            return Err(ContainerError::field(
                "number of lengths in seq_len",
                manifest.seq_len.len(),
                manifest.n_kv_heads.len(),
            ));
        }
        for layer in manifest.layers() {
            if layer.n_kv_heads == 0 && layer.seq_len > 0 {
                let field = format!("layer {}: {SEQ_LEN}", layer.layer);
                return Err(ContainerError::field(
                    field,
                    layer.seq_len,
                    "0 without a cache",
                ));
            }
        }
        Ok(manifest)
    }
}

/// A decimal number as this crate writes it: no sign, no leading zero.
fn number<T: std::str::FromStr + ToString>(field: &str, text: &str) -> Result<T, ContainerError> {
    match text.parse::<T>() {
        Ok(n) if n.to_string() == text => Ok(n),
        _ => Err(ContainerError::field(
            field,
            quoted(text),
            "a decimal number in range",
        )),
    }
}

/// A string of a file, escaped and cut, for an error.
fn quoted(text: &str) -> String {
    let mut short: String = text.chars().take(64).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}

pub(crate) fn tensor_name(layer: u32, kind: Kind) -> String {
    format!("layer.{layer}.{kind}")
}

fn hash_field(name: &str) -> String {
    format!("blake3.{name}")
}

fn hash_of_entries<'a>(entries: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut hasher = blake3::Hasher::new();
    for (key, value) in entries {
        for part in [key, "=", value, "\n"] {
            hasher.update(part.as_bytes());
        }
    }
    hasher.finalize().to_string()
}

/// A header that agrees with itself and with the length of its file.
#[derive(Debug)]
pub(crate) struct Header {
    /// Offset of the first tensor in the file.
    data_start: usize,
    metadata: Metadata,
    manifest: Manifest,
}

impl Header {
    /// Reads the header from the start of a file of `total` bytes, and no byte more.
    pub(crate) fn read(from: &mut impl Read, total: u64) -> Result<Self, ContainerError> {
        let mut prefix = [0; PREFIX as usize];
        if total < PREFIX {
            return Err(ContainerError::HeaderLength {
                what: "the file",
                found: total,
                expected: format!("at least {PREFIX}"),
            });
        }
        from.read_exact(&mut prefix)?;
        let len = u64::from_le_bytes(prefix);
        let most = MOST_HEADER_BYTES.min(total - PREFIX);
        let data_start = match usize::try_from(PREFIX + len.min(most)) {
            Ok(start) if len <= most => start,
            _ => {
                return Err(ContainerError::HeaderLength {
                    what: "the header",
                    found: len,
                    expected: format!("at most {most}"),
                });
            }
        };
        let mut json = vec![0; data_start - prefix.len()];
        from.read_exact(&mut json)?;
        let metadata: Metadata = serde_json::from_slice(&json)
            .map_err(|error| ContainerError::Header(error.to_string()))?;
        // The largest offset is that of the last tensor, since they follow each other.
        let expected = (data_start as u64).saturating_add(metadata.data_len() as u64);
        if total != expected {
            return Err(ContainerError::Length {
                found: total,
                expected,
            });
        }
        let manifest = Self::judge(&metadata)?;
        Ok(Self {
            data_start,
            metadata,
            manifest,
        })
    }

    /// The manifest, once the metadata has its hash and every tensor and entry its layer.
    fn judge(metadata: &Metadata) -> Result<Manifest, ContainerError> {
        let mut entries: BTreeMap<&str, &str> = metadata
            .metadata()
            .iter()
            .flatten()
            .map(|(key, value)| (key.as_str(), value.as_str()))
            .collect();
        let field = hash_field(METADATA);
        let Some(expected) = entries.remove(field.as_str()) else {
            return Err(ContainerError::MissingField { field });
        };
        let found = hash_of_entries(entries.iter().map(|(&key, &value)| (key, value)));
        check_hash(METADATA, found, expected)?;
        let manifest = Manifest::parse(&entries)?;

        let tensors: Vec<String> = manifest
            .layers()
            .filter(|layer| layer.n_kv_heads > 0)
            .flat_map(|layer| [Kind::Keys, Kind::Values].map(|kind| tensor_name(layer.layer, kind)))
            .collect();
        let known = manifest.entries();
        for name in &tensors {
            let info = metadata
                .info(name)
                .ok_or_else(|| ContainerError::MissingTensor { name: name.clone() })?;
            if info.dtype != Dtype::U8 {
                return Err(ContainerError::field(
                    format!("{name}: dtype"),
                    info.dtype,
                    "U8",
                ));
            }
            if info.shape.len() != 1 {
                let field = format!("{name}: number of dimensions");
                return Err(ContainerError::field(field, info.shape.len(), 1));
            }
            if entries.remove(hash_field(name).as_str()).is_none() {
                return Err(ContainerError::MissingField {
                    field: hash_field(name),
                });
            }
        }
        // Every tensor of a layer is there, so if there are as many they are the same.
        let names = metadata.offset_keys();
        if names.len() > tensors.len() {
            let tensors: std::collections::HashSet<&String> = tensors.iter().collect();
            if let Some(name) = names.into_iter().find(|name| !tensors.contains(name)) {
                return Err(ContainerError::Extra { name });
            }
        }
        if let Some(name) = entries.keys().find(|&&key| !known.contains_key(key)) {
            return Err(ContainerError::Extra { name: quoted(name) });
        }
        Ok(manifest)
    }

    pub(crate) fn data_start(&self) -> usize {
        self.data_start
    }

    /// Bytes of all tensors.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.metadata.data_len() as u64
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Where a tensor lies in the data.
    pub(crate) fn tensor(&self, name: &str) -> Result<Range<usize>, ContainerError> {
        let info = self.metadata.info(name);
        let (start, end) = info
            .ok_or_else(|| ContainerError::MissingTensor {
                name: name.to_owned(),
            })?
            .data_offsets;
        Ok(start..end)
    }

    pub(crate) fn check_hash(&self, name: &str, bytes: &[u8]) -> Result<(), ContainerError> {
        let entries = self.metadata.metadata().as_ref();
        let expected = entries.and_then(|entries| entries.get(&hash_field(name)));
        check_hash(
            name,
            blake3::hash(bytes).to_string(),
            expected.map_or("", String::as_str),
        )
    }
}

fn check_hash(name: &str, found: String, expected: &str) -> Result<(), ContainerError> {
    if found == expected {
        return Ok(());
    }
    Err(ContainerError::Hash {
        name: name.to_owned(),
        found,
        expected: quoted(expected),
    })
}

/// The header's JSON with its entries in order; safetensors alone would write them in the order of
/// a hash map's random seed.
#[derive(Serialize)]
struct Json<'a> {
    __metadata__: &'a BTreeMap<String, String>,
    #[serde(flatten)]
    tensors: &'a Metadata,
}

/// Writes a container; nothing before the whole cache has been judged.
pub(crate) fn write(
    config: &CacheConfig,
    layers: &[Option<Snapshot>],
    producer: &str,
    out: &mut impl Write,
) -> Result<(), ContainerError> {
    if layers.len() != config.n_kv_heads.len() {
        let field = "number of layers";
        return Err(ContainerError::field(
            field,
            layers.len(),
            config.n_kv_heads.len(),
        ));
    }
    let mut manifest = Manifest {
        seed: config.seed,
        head_dim: config.head_dim.get_u32(),
        n_kv_heads: config.n_kv_heads.clone(),
        seq_len: Vec::new(),
        producer: producer.to_owned(),
    };
    let mut tensors = Vec::new();
    let mut hashes = BTreeMap::new();
    let mut blobs = Vec::new();
    let mut end = 0;
    for (layer, (snapshot, &n_kv_heads)) in (0..).zip(layers.iter().zip(&config.n_kv_heads)) {
        let refused = |reason| ContainerError::Layer { layer, reason };
        let shape = (n_kv_heads > 0).then_some(LayerShape {
            head_dim: config.head_dim,
            n_kv_heads,
        });
        let Some(Snapshot { keys, values }) = snapshot else {
            if shape.is_some() {
                return Err(refused(RestoreRefusal::MissingBoth));
            }
            manifest.seq_len.push(0);
            continue;
        };
        let plan = gate::plan_for(shape, config.capacity, keys, values).map_err(refused)?;
        manifest.seq_len.push(plan.seq_len());
        for (kind, blob) in [(Kind::Keys, keys), (Kind::Values, values)] {
            let name = tensor_name(layer, kind);
            let start = end;
            end += blob.len();
            hashes.insert(hash_field(&name), blake3::hash(blob).to_string());
            let info = TensorInfo {
                dtype: Dtype::U8,
                shape: vec![blob.len()],
                data_offsets: (start, end),
            };
            tensors.push((name, info));
            blobs.push(blob);
        }
    }
    let mut entries = manifest.entries();
    entries.append(&mut hashes);
    let hash = hash_of_entries(entries.iter().map(|(key, value)| (&**key, &**value)));
    entries.insert(hash_field(METADATA), hash);

    let not_safetensors = |error: &dyn std::fmt::Display| ContainerError::Header(error.to_string());
    let tensors = Metadata::new(None, tensors).map_err(|error| not_safetensors(&error))?;
    let mut json = serde_json::to_vec(&Json {
        __metadata__: &entries,
        tensors: &tensors,
    })
    .map_err(|error| not_safetensors(&error))?;
    // Tensors start at multiples of 8 in the file, as safetensors' own writer has it.
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() as u64 > MOST_HEADER_BYTES {
        return Err(ContainerError::HeaderLength {
            what: "the header",
            found: json.len() as u64,
            expected: format!("at most {MOST_HEADER_BYTES}"),
        });
    }
    out.write_all(&(json.len() as u64).to_le_bytes())?;
    out.write_all(&json)?;
    for blob in blobs {
        out.write_all(blob)?;
    }
    Ok(())
}
