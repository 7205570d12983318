//! Seed corpora made of the golden blobs, cut to their first timesteps.

use std::io;
use std::path::{Path, PathBuf};

use turboquant_container::encode;
use turboquant_wgpu::blob::{BlobWriter, decode};
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::{BlobHeader, CacheConfig, HeadDim, Snapshot};

use super::restore_gate;

/// One file of a corpus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seed {
    /// The target that it is for.
    pub target: &'static str,
    /// Its file name.
    pub name: String,
    /// Its contents.
    pub bytes: Vec<u8>,
}

impl Seed {
    /// Where it lies below the directory of all seeds.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        Path::new(self.target).join(&self.name)
    }
}

/// Timesteps that are kept of a golden blob: enough for strides to matter.
const ROWS: u32 = 3;

/// Makes the seeds of every target from a directory of golden cases, in a fixed order.
///
/// # Errors
/// A file that cannot be read, or a blob that does not decode.
pub fn from_golden(golden: &Path) -> io::Result<Vec<Seed>> {
    let mut cases: Vec<PathBuf> = std::fs::read_dir(golden)?
        .map(|entry| entry.map(|e| e.path()))
        .collect::<Result<_, _>>()?;
    cases.retain(|path| path.join("keys.tqk1").is_file());
    cases.sort();
    let mut seeds = Vec::new();
    for case in cases {
        let name = case
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let keys = cut(&std::fs::read(case.join("keys.tqk1"))?)?;
        let values = cut(&std::fs::read(case.join("values.tqv1"))?)?;
        let elements = std::fs::read(case.join("k.f32"))?;
        let mut add = |target, bytes| {
            let name = name.clone();
            seeds.push(Seed {
                target,
                name,
                bytes,
            });
        };
        add(
            "decode_differential",
            if name_is_even(&name) {
                keys.clone()
            } else {
                values.clone()
            },
        );
        add("restore_gate", gate_input(&keys, &values)?);
        add("roundtrip", elements.iter().copied().take(512).collect());
        add("encode_cpu", encode_input(&keys, &elements)?);
        add("container", container_input(&keys, &values)?);
        add("decode_keys", keys);
        add("decode_values", values);
    }
    for (target, name, bytes) in HOSTILE {
        seeds.push(Seed {
            target,
            name: name.to_owned(),
            bytes: bytes.to_vec(),
        });
    }
    seeds.push(Seed {
        target: "container",
        name: "damaged".to_owned(),
        bytes: vec![1, 2, 1, 0, 7, 7, 7, 7, 7, 7, 7, 7, 2, 9, 9, 9, 9, 9, 9],
    });
    seeds.push(Seed {
        target: "case_toml",
        name: "attention".to_owned(),
        bytes: CASE.as_bytes().to_vec(),
    });
    Ok(seeds)
}

/// Blobs that have killed a decoder of this format, and neighbours.
const HOSTILE: [(&str, &str, &[u8]); 4] = [
    (
        "decode_keys",
        "absurd-heads",
        b"TQK1\xff\xff\xff\x7f\x40\0\0\0\0\0\0\0",
    ),
    (
        "decode_keys",
        "no-heads",
        b"TQK1\0\0\0\0\x40\0\0\0\x01\0\0\0",
    ),
    (
        "decode_values",
        "absurd-heads",
        b"TQV1\xff\xff\xff\xff\x40\0\0\0\0\0\0\0",
    ),
    (
        "decode_values",
        "head-dim-4",
        b"TQV1\x01\0\0\0\x04\0\0\0\x01\0\0\0\x1b\x00\x3c",
    ),
];

const CASE: &str = r#"property = "attention"
head_dim = 64
n_heads = 6
n_kv_heads = 2
capacity = 20
rows = 17
encode_split = 5
layer = 3
cache_seed = 7
q_rows = 2
start_pos = 15
q_split = 1
kv_split = 0
scale = 0.125
gain = "minimum-error"

[keys]
family = "normal"
seed = 1

[values]
family = "uniform"
seed = 2
exponent = -3

[queries]
family = "normal"
seed = 3

[queries.literal]
rows = 1
heads = 1
bits = ["3f800000"]
"#;

fn name_is_even(name: &str) -> bool {
    name.len().is_multiple_of(2)
}

/// The first [`ROWS`] timesteps of a blob.
fn cut(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let blob = decode(bytes).map_err(io::Error::other)?;
    let seq_len = blob.header().seq_len.min(ROWS);
    let header = BlobHeader {
        seq_len,
        ..blob.header()
    };
    let mut writer = BlobWriter::new(header).map_err(io::Error::other)?;
    let heads = if seq_len == 0 { 0 } else { header.n_kv_heads };
    for &region in header.kind.blob_regions() {
        for head in 0..heads {
            for t in 0..seq_len {
                let record = blob.record(region, head, t).unwrap_or_default();
                writer
                    .record_mut(region, head, t)
                    .unwrap_or_default()
                    .copy_from_slice(record);
            }
        }
    }
    writer.finish().map_err(io::Error::other)
}

/// A layer of the blobs' shape with one timestep to spare, and the blobs.
fn gate_input(keys: &[u8], values: &[u8]) -> io::Result<Vec<u8>> {
    let header =
        BlobHeader::parse_kind(Kind::Keys, keys, keys.len() as u64).map_err(io::Error::other)?;
    let key_bytes = u16::try_from(keys.len())
        .map_err(io::Error::other)?
        .to_le_bytes();
    let prelude: [u8; restore_gate::PRELUDE] = [
        head_dim_index(&header),
        header.n_kv_heads as u8,
        header.seq_len as u8 + 1,
        key_bytes[0],
        key_bytes[1],
    ];
    Ok([&prelude[..], keys, values].concat())
}

/// A file of two layers, the first without a cache.
fn container_input(keys: &[u8], values: &[u8]) -> io::Result<Vec<u8>> {
    let header =
        BlobHeader::parse_kind(Kind::Keys, keys, keys.len() as u64).map_err(io::Error::other)?;
    let config = CacheConfig {
        head_dim: HeadDim::try_from(header.head_dim).map_err(io::Error::other)?,
        n_kv_heads: vec![0, header.n_kv_heads],
        capacity: ROWS,
        seed: 3,
    };
    let snapshot = Snapshot {
        keys: keys.to_vec(),
        values: values.to_vec(),
    };
    let file = encode(&config, &[None, Some(snapshot)], "seed").map_err(io::Error::other)?;
    Ok([&[0][..], &file].concat())
}

/// The first two vectors of a tensor.
fn encode_input(keys: &[u8], tensor: &[u8]) -> io::Result<Vec<u8>> {
    let header =
        BlobHeader::parse_kind(Kind::Keys, keys, keys.len() as u64).map_err(io::Error::other)?;
    let two = (8 * header.head_dim as usize).min(tensor.len());
    Ok([&[head_dim_index(&header), 0][..], &[0; 8], &tensor[..two]].concat())
}

/// Index into `HeadDim::ALL`, which holds 32 to 256.
fn head_dim_index(header: &BlobHeader) -> u8 {
    (header.head_dim.trailing_zeros() as u8).wrapping_sub(5) % 4
}
