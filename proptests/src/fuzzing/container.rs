//! `container`: any bytes as a container, and any damage to a good one.
//!
//! With an even first byte the rest is a file. With an odd one it describes a small cache and edits
//! of its file, which must be noticed.

use arbitrary::Unstructured;
use serde_json::Value;
use turboquant_container::{Container, encode};
use turboquant_wgpu::blob::BlobWriter;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::{BlobHeader, CacheConfig, HeadDim, Snapshot};

use super::shape::Choices;
use super::{Fate, says_something};

pub(super) fn run(bytes: &[u8]) -> Fate {
    match bytes.split_first() {
        None => Fate::Refused,
        Some((mode, file)) if mode % 2 == 0 => any(file),
        // Bytes that run out read as zeros, so no description is too short.
        Some((_, description)) => {
            damaged(&mut Unstructured::new(description)).unwrap_or(Fate::Refused)
        }
    }
}

/// What is accepted can be written again, and says the same.
fn any(file: &[u8]) -> Fate {
    let container = match Container::decode(file) {
        Ok(container) => container,
        Err(error) => {
            assert!(says_something(&error));
            return Fate::Refused;
        }
    };
    let manifest = container.describe();
    let Ok(head_dim) = HeadDim::try_from(manifest.head_dim) else {
        return Fate::Accepted;
    };
    let config = CacheConfig {
        head_dim,
        n_kv_heads: manifest.n_kv_heads.clone(),
        // The least that holds every layer.
        capacity: manifest.seq_len.iter().copied().max().unwrap_or(0).max(1),
        seed: manifest.seed,
    };
    manifest.check(&config).expect("made of the manifest");
    let layers: Vec<Option<Snapshot>> = (0..manifest.n_kv_heads.len() as u32)
        .map(|layer| {
            Some(Snapshot {
                keys: container.blob(layer, Kind::Keys)?.to_vec(),
                values: container.blob(layer, Kind::Values)?.to_vec(),
            })
        })
        .collect();
    // An empty layer may name more heads than any device holds.
    if let Ok(again) = encode(&config, &layers, &manifest.producer) {
        same(&Container::decode(&again).expect("encoded"), &container);
    }
    Fate::Accepted
}

fn same(a: &Container<'_>, b: &Container<'_>) {
    assert_eq!(a.describe(), b.describe());
    for layer in 0..a.describe().n_kv_heads.len() as u32 {
        for kind in [Kind::Keys, Kind::Values] {
            assert_eq!(a.blob(layer, kind), b.blob(layer, kind));
        }
    }
}

/// A cache that the bytes describe.
fn cache(u: &mut Unstructured<'_>) -> arbitrary::Result<(CacheConfig, Vec<Option<Snapshot>>)> {
    let n_layers = u.int_in_range(0..=3)?;
    let config = CacheConfig {
        head_dim: HeadDim::D32,
        n_kv_heads: (0..n_layers)
            .map(|_| u.int_in_range(0..=2))
            .collect::<Result<_, _>>()?,
        capacity: 3,
        seed: u.arbitrary()?,
    };
    let mut layers = Vec::new();
    for &n_kv_heads in &config.n_kv_heads {
        let seq_len = u.int_in_range(0..=3)?;
        let mut blob = |kind| {
            let mut writer = BlobWriter::new(BlobHeader {
                kind,
                n_kv_heads,
                head_dim: 32,
                seq_len,
            })
            .expect("a small blob");
            for &region in kind.blob_regions() {
                // Bytes below 0x7C are no infinite norms either.
                let byte = u.int_in_range(0..=0x7B).unwrap_or_default();
                writer
                    .region_mut(region)
                    .expect("the kind has it")
                    .fill(byte);
            }
            writer.finish().expect("its norms are finite")
        };
        layers.push((n_kv_heads > 0).then(|| Snapshot {
            keys: blob(Kind::Keys),
            values: blob(Kind::Values),
        }));
    }
    Ok((config, layers))
}

/// Edited bytes are refused, unless they say the same: white space may be of another kind.
fn damaged(u: &mut Unstructured<'_>) -> arbitrary::Result<Fate> {
    let (config, layers) = cache(u)?;
    let producer: String = u.arbitrary()?;
    let good = encode(&config, &layers, &producer).expect("a small cache");
    let original = Container::decode(&good).expect("encoded");
    original
        .describe()
        .check(&config)
        .expect("its own configuration");
    assert_eq!(original.describe().producer, producer);

    let mut bytes = good.clone();
    for _ in 0..u.int_in_range(0..=4)? {
        let at = u.int_in_range(0..=bytes.len().saturating_sub(1))?;
        match u.int_in_range(0..=5)? {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, u.arbitrary()?),
            _ => {
                let byte = u.arbitrary()?;
                bytes.get_mut(at).into_iter().for_each(|b| *b = byte);
            }
        }
    }
    match Container::decode(&bytes) {
        Ok(container) => {
            same(&container, &original);
            Ok(Fate::Accepted)
        }
        Err(error) => {
            assert!(bytes != good, "{error}");
            Ok(Fate::Refused)
        }
    }
}

/// Gives a file whose header still parses the length and the hashes that it needs.
pub(super) fn shape(buffer: &mut [u8], size: usize, seed: u32) -> usize {
    let size = size.min(buffer.len());
    if Choices::new(seed).below(4) == 0 || size == 0 || buffer[0] % 2 == 1 {
        return size;
    }
    let Some(file) = rehashed(&buffer[1..size]) else {
        return size;
    };
    match buffer.get_mut(1..=file.len()) {
        Some(out) => {
            out.copy_from_slice(&file);
            1 + file.len()
        }
        None => size,
    }
}

fn rehashed(file: &[u8]) -> Option<Vec<u8>> {
    // The JSON ends where it ends, whatever the length before it says.
    let mut values = serde_json::Deserializer::from_slice(file.get(8..)?).into_iter::<Value>();
    let mut header = values.next()?.ok()?;
    let stated = u64::from_le_bytes(*file.first_chunk()?);
    let data = usize::try_from(stated)
        .ok()
        .and_then(|n| file.get(8_usize.checked_add(n)?..));
    let data = data.unwrap_or(&file[8 + values.byte_offset()..]);
    let object = header.as_object_mut()?;
    let mut hashes = Vec::new();
    for (name, tensor) in object.iter() {
        let range = |i: usize| usize::try_from(tensor.get("data_offsets")?.get(i)?.as_u64()?).ok();
        if let Some(bytes) = range(0)
            .zip(range(1))
            .and_then(|(start, end)| data.get(start..end))
        {
            hashes.push((format!("blake3.{name}"), blake3::hash(bytes).to_string()));
        }
    }
    let metadata = object.get_mut("__metadata__")?.as_object_mut()?;
    metadata.remove("blake3.metadata");
    for (name, hash) in hashes {
        metadata.insert(name, hash.into());
    }
    let mut lines: Vec<(&String, &str)> = metadata
        .iter()
        .filter_map(|(key, value)| Some((key, value.as_str()?)))
        .collect();
    lines.sort();
    let lines: String = lines
        .iter()
        .map(|(key, value)| format!("{key}={value}\n"))
        .collect();
    metadata.insert(
        "blake3.metadata".to_owned(),
        blake3::hash(lines.as_bytes()).to_string().into(),
    );
    let json = serde_json::to_vec(&header).ok()?;
    Some([&(json.len() as u64).to_le_bytes()[..], &json, data].concat())
}
