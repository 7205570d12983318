//! What a container takes, and everything that it refuses.

use std::collections::BTreeMap;

use rand_xoshiro::Xoshiro256StarStar;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use turboquant_container::{Container, ContainerError, encode};
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::{CacheConfig, HeadDim, Rotation, Snapshot, twin};

fn config() -> CacheConfig {
    CacheConfig {
        head_dim: HeadDim::D64,
        // Two-digit layer numbers, whose names sort otherwise; a layer without a cache.
        n_kv_heads: vec![2, 0, 1, 3, 1, 1, 1, 1, 1, 1, 2],
        capacity: 8,
        seed: u64::MAX - 6,
    }
}

/// A snapshot of `rows` rows for each layer, one of the layers empty.
fn snapshots(config: &CacheConfig, rows: usize) -> Vec<Option<Snapshot>> {
    let mut rng = Xoshiro256StarStar::seed_from_u64(rows as u64);
    let layers = (0..).zip(&config.n_kv_heads);
    let snapshot = |(layer, &heads): (u32, &u32)| {
        let rotation = Rotation::new(config.head_dim, config.seed, layer);
        let rows = if layer == 4 { 0 } else { rows };
        let mut tensor = || -> Vec<f32> {
            let elements = rows * heads as usize * config.head_dim.get();
            (0..elements)
                .map(|_| rng.next_u32() as f32 / 1e9 - 2.0)
                .collect()
        };
        let (keys, values) = (tensor(), tensor());
        (heads > 0).then(|| twin::snapshot(&rotation, heads, &keys, &values).unwrap().0)
    };
    layers.map(snapshot).collect()
}

fn good() -> Vec<u8> {
    encode(&config(), &snapshots(&config(), 5), "the tests").unwrap()
}

fn refusal(bytes: &[u8]) -> ContainerError {
    Container::decode(bytes).expect_err("refused")
}

/// A container taken apart, to be put together wrongly: the JSON of its header and its data.
struct Parts {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, &'static str, Vec<u8>)>,
}

impl Parts {
    fn new() -> Self {
        let bytes = good();
        let container = Container::decode(&bytes).unwrap();
        let tensors = container
            .describe()
            .layers()
            .flat_map(|l| [Kind::Keys, Kind::Values].map(|kind| (l.layer, kind)))
            .filter_map(|(layer, kind)| {
                let blob = container.blob(layer, kind)?;
                Some((format!("layer.{layer}.{kind}"), "U8", blob.to_vec()))
            })
            .collect();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().clone().unwrap().into_iter().collect();
        Self { metadata, tensors }
    }

    fn set(mut self, key: &str, value: &str) -> Self {
        self.metadata.insert(key.to_owned(), value.to_owned());
        self
    }

    fn without(mut self, key: &str) -> Self {
        self.metadata.remove(key).expect(key);
        self
    }

    fn tensor(mut self, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> Self {
        let found = self.tensors.iter_mut().find(|t| t.0 == name).expect(name);
        change(&mut found.2);
        self
    }

    fn without_tensor(mut self, name: &str) -> Self {
        self.tensors.retain(|tensor| tensor.0 != name);
        self
    }

    /// The hashes made right again, so that they are not what is refused.
    fn rehash(mut self) -> Self {
        self.metadata.retain(|key, _| !key.starts_with("blake3."));
        for (name, _, bytes) in &self.tensors {
            let hash = blake3::hash(bytes).to_string();
            self.metadata.insert(format!("blake3.{name}"), hash);
        }
        self.rehash_metadata()
    }

    fn rehash_metadata(mut self) -> Self {
        self.metadata.remove("blake3.metadata");
        let lines: String = self
            .metadata
            .iter()
            .map(|(k, v)| format!("{k}={v}\n"))
            .collect();
        let hash = blake3::hash(lines.as_bytes()).to_string();
        self.set("blake3.metadata", &hash)
    }

    fn bytes(&self) -> Vec<u8> {
        let mut json = serde_json::Map::new();
        json.insert(
            "__metadata__".to_owned(),
            serde_json::to_value(&self.metadata).unwrap(),
        );
        let mut data = Vec::new();
        for (name, dtype, bytes) in &self.tensors {
            let start = data.len();
            data.extend_from_slice(bytes);
            let size = match *dtype {
                "U8" => 1,
                _ => 2,
            };
            json.insert(
                name.clone(),
                serde_json::json!({
                    "dtype": dtype,
                    "shape": [bytes.len() / size],
                    "data_offsets": [start, data.len()],
                }),
            );
        }
        let json = serde_json::to_vec(&json).unwrap();
        [&(json.len() as u64).to_le_bytes()[..], &json, &data].concat()
    }

    fn refusal(&self) -> String {
        refusal(&self.bytes()).to_string()
    }
}

#[test]
fn a_cache_survives() {
    let (config, layers) = (config(), snapshots(&config(), 5));
    let bytes = encode(&config, &layers, "a \"producer\"\n\u{1F980}").unwrap();
    assert_eq!(
        bytes,
        encode(&config, &layers, "a \"producer\"\n\u{1F980}").unwrap()
    );
    let container = Container::decode(&bytes).unwrap();
    let manifest = container.describe();
    assert_eq!(manifest.seed, config.seed);
    assert_eq!(manifest.head_dim, 64);
    assert_eq!(manifest.n_kv_heads, config.n_kv_heads);
    assert_eq!(manifest.seq_len, [5, 0, 5, 5, 0, 5, 5, 5, 5, 5, 5]);
    assert_eq!(manifest.producer, "a \"producer\"\n\u{1F980}");
    manifest.check(&config).unwrap();
    for (layer, snapshot) in (0..).zip(&layers) {
        let keys = snapshot.as_ref().map(|s| &s.keys[..]);
        let values = snapshot.as_ref().map(|s| &s.values[..]);
        assert_eq!(container.blob(layer, Kind::Keys), keys);
        assert_eq!(container.blob(layer, Kind::Values), values);
    }
    assert_eq!(container.blob(11, Kind::Keys), None);
    // The crate of the format reads it too.
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.len(), 20);
}

#[test]
fn a_cache_of_nothing_survives() {
    for n_kv_heads in [vec![], vec![0, 0]] {
        let config = CacheConfig {
            n_kv_heads,
            ..config()
        };
        let layers = vec![None; config.n_kv_heads.len()];
        let bytes = encode(&config, &layers, "").unwrap();
        let container = Container::decode(&bytes).unwrap();
        container.describe().check(&config).unwrap();
        assert_eq!(container.describe().n_kv_heads, config.n_kv_heads);
    }
}

/// Every bit of the header, and one at least in every tensor, of a small container.
#[test]
fn a_flipped_bit_is_refused_wherever_it_is() {
    let config = CacheConfig {
        head_dim: HeadDim::D32,
        n_kv_heads: vec![1, 0, 2],
        ..config()
    };
    let bytes = encode(&config, &snapshots(&config, 2), "the tests").unwrap();
    Container::decode(&bytes).unwrap();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << bit;
            let refused = Container::decode(&bytes);
            assert!(
                refused.is_err(),
                "bit {bit} of byte {at}: {:?}",
                bytes[at] as char
            );
        }
    }
}

/// In a large one, one bit in each tensor and in each entry of the metadata, with the reason.
#[test]
fn a_flipped_bit_is_named() {
    let parts = Parts::new();
    for (name, _, _) in &parts.tensors {
        let reason = Parts::new()
            .tensor(name, |bytes| *bytes.last_mut().unwrap() ^= 4)
            .refusal();
        assert!(
            reason.contains(&format!("the hash of {name} is ")),
            "{reason}"
        );
    }
    for (key, value) in &parts.metadata {
        let mut changed = value.clone().into_bytes();
        *changed.last_mut().unwrap() ^= 1;
        let changed = String::from_utf8(changed).unwrap();
        let reason = Parts::new().set(key, &changed).refusal();
        assert!(
            reason.contains("the hash of metadata is "),
            "{key}: {reason}"
        );
        let reason = Parts::new().without(key).refusal();
        let expected = match key == "blake3.metadata" {
            true => "blake3.metadata is missing from the metadata",
            false => "the hash of metadata is ",
        };
        assert!(reason.contains(expected), "{key}: {reason}");
    }
}

#[test]
fn layers_are_neither_missing_nor_extra() {
    let missing = Parts::new().without_tensor("layer.2.values");
    assert_eq!(
        missing.refusal(),
        "container: tensor layer.2.values is missing"
    );
    assert_eq!(
        missing.rehash().refusal(),
        "container: tensor layer.2.values is missing"
    );

    let mut extra = Parts::new();
    extra
        .tensors
        .push(("layer.11.keys".to_owned(), "U8", extra.tensors[0].2.clone()));
    let reason = "container: layer.11.keys belongs to no layer that has a cache";
    assert_eq!(extra.refusal(), reason);
    let reason = "container: \"blake3.layer.11.keys\" belongs to no layer that has a cache";
    assert_eq!(
        extra.rehash().without_tensor("layer.11.keys").refusal(),
        reason
    );
    let mut of_none = Parts::new();
    of_none.tensors.push((
        "layer.1.keys".to_owned(),
        "U8",
        of_none.tensors[0].2.clone(),
    ));
    assert!(
        of_none
            .rehash()
            .refusal()
            .contains("layer.1.keys belongs to no layer")
    );

    let whole = Parts::new()
        .without_tensor("layer.10.keys")
        .without_tensor("layer.10.values");
    assert!(
        whole
            .rehash()
            .refusal()
            .contains("tensor layer.10.keys is missing")
    );
    let entry = Parts::new().set("comment", "x").rehash();
    assert!(entry.refusal().contains("\"comment\" belongs to no layer"));
    let unhashed = Parts::new()
        .without("blake3.layer.0.keys")
        .rehash_metadata();
    let reason = "container: blake3.layer.0.keys is missing from the metadata";
    assert_eq!(unhashed.refusal(), reason);
}

#[test]
fn metadata_of_another_meaning_is_refused() {
    for (key, value, reason) in [
        ("format_version", "2", "format_version is \"2\", expected 1"),
        (
            "format_version",
            "01",
            "format_version is \"01\", expected 1",
        ),
        (
            "cache_seed",
            "-1",
            "cache_seed is \"-1\", expected a decimal number in range",
        ),
        ("cache_seed", "18446744073709551616", "cache_seed is"),
        ("head_dim", "+64", "head_dim is \"+64\""),
        (
            "head_dim",
            "128",
            "layer.0.keys: head_dim is 64, expected 128",
        ),
        (
            "n_kv_heads",
            "2,0,1",
            "number of lengths in seq_len is 11, expected 3",
        ),
        ("n_kv_heads", "2,0,,3,1,1,1,1,1,1,2", "n_kv_heads is \"\""),
        (
            "n_kv_heads",
            "3,0,1,3,1,1,1,1,1,1,2",
            "layer.0.keys: n_kv_heads is 2, expected 3",
        ),
        (
            "seq_len",
            "5,1,5,5,0,5,5,5,5,5,5",
            "layer 1: seq_len is 1, expected 0",
        ),
        (
            "seq_len",
            "6,0,5,5,0,5,5,5,5,5,5",
            "layer.0.keys: seq_len is 5, expected 6",
        ),
        ("seq_len", "", "number of lengths in seq_len is 0"),
    ] {
        let refusal = Parts::new().set(key, value).rehash_metadata().refusal();
        assert!(refusal.contains(reason), "{key} = {value}: {refusal}");
    }
    for key in [
        "format_version",
        "cache_seed",
        "head_dim",
        "n_kv_heads",
        "seq_len",
        "producer",
    ] {
        let refusal = Parts::new().without(key).rehash_metadata().refusal();
        assert_eq!(
            refusal,
            format!("container: {key} is missing from the metadata")
        );
    }
}

#[test]
fn tensors_that_are_no_blobs_are_refused() {
    let swap = |bytes: &mut Vec<u8>| bytes[..4].copy_from_slice(b"TQV1");
    for (change, reason) in [
        (
            swap as fn(&mut Vec<u8>),
            "the magic is that of values, expected keys",
        ),
        (|bytes| bytes.truncate(bytes.len() - 1), "blob: found"),
        (|bytes| bytes.truncate(15), "blob header: found 15 bytes"),
        (
            |bytes| *bytes.last_mut().unwrap() = 0x80,
            "ResidualNorms of head 0, timestep 4",
        ),
    ] {
        let refusal = Parts::new()
            .tensor("layer.2.keys", change)
            .rehash()
            .refusal();
        let named = refusal.starts_with("container: layer.2.keys: ");
        assert!(named && refusal.contains(reason), "{refusal}");
    }
    let mut typed = Parts::new();
    typed.tensors[0].1 = "F16";
    assert_eq!(
        typed.refusal(),
        "container: layer.0.keys: dtype is F16, expected U8"
    );
}

#[test]
fn cuts_are_refused_everywhere() {
    let mut bytes = good();
    let len = bytes.len();
    let cuts = (0..100)
        .map(|i| i * len / 100)
        .chain(0..40)
        .chain(len - 40..len);
    for cut in cuts {
        match refusal(&bytes[..cut]) {
            ContainerError::HeaderLength { .. } => {}
            ContainerError::Length { found, expected } => {
                assert_eq!((found, expected), (cut as u64, len as u64));
            }
            other => panic!("{cut}: {other}"),
        }
    }
    bytes.push(0);
    assert!(matches!(refusal(&bytes), ContainerError::Length { .. }));
}

#[test]
fn other_files_are_refused() {
    for (bytes, reason) in [
        (&b"TQK1"[..], "the file is 4 bytes, expected at least 8"),
        (
            b"TQK1\x02\0\0\0",
            "the header is 9416954196 bytes, expected at most 0",
        ),
        (b"\x02\0\0\0\0\0\0\0{}", "blake3.metadata is missing"),
        (b"\x02\0\0\0\0\0\0\0[]", "not safetensors"),
        (b"\x02\0\0\0\0\0\0\0{\xff", "not safetensors"),
        (
            b"\xff\xff\xff\xff\xff\xff\xff\xff{}",
            "the header is 18446744073709551615 bytes",
        ),
    ] {
        let refusal = refusal(bytes).to_string();
        assert!(refusal.contains(reason), "{refusal}");
    }
}

#[test]
fn another_cache_is_refused() {
    let bytes = good();
    let container = Container::decode(&bytes).unwrap();
    let refusal = |change: fn(&mut CacheConfig)| {
        let mut config = config();
        change(&mut config);
        container.describe().check(&config).unwrap_err().to_string()
    };
    for (change, reason) in [
        (
            (|c| c.seed = 3) as fn(&mut CacheConfig),
            "cache_seed is 18446744073709551609, expected 3",
        ),
        (
            |c| c.head_dim = HeadDim::D128,
            "head_dim is 64, expected 128",
        ),
        (
            |c| c.n_kv_heads.truncate(10),
            "number of layers is 11, expected 10",
        ),
        (
            |c| c.n_kv_heads.push(0),
            "number of layers is 11, expected 12",
        ),
        (
            |c| c.n_kv_heads[1] = 1,
            "layer 1: n_kv_heads is 0, expected 1",
        ),
        (
            |c| c.n_kv_heads[2] = 0,
            "layer 2: n_kv_heads is 1, expected 0",
        ),
        (
            |c| c.capacity = 4,
            "layer 0: seq_len is 5, expected at most the capacity 4",
        ),
    ] {
        assert_eq!(refusal(change), format!("container: {reason}"));
    }
}

/// What no layer would restore is not written.
#[test]
fn snapshots_that_would_not_restore_are_refused() {
    let config = config();
    let refusal = |change: fn(&mut Vec<Option<Snapshot>>)| {
        let mut layers = snapshots(&config, 5);
        change(&mut layers);
        encode(&config, &layers, "").unwrap_err().to_string()
    };
    for (change, reason) in [
        (
            (|l| _ = l.pop()) as fn(&mut Vec<Option<Snapshot>>),
            "container: number of layers is 10, expected 11",
        ),
        (
            |l| l[3] = None,
            "container: layer 3: both blobs are missing",
        ),
        (
            |l| l[1] = l[0].clone(),
            "container: layer 1: the layer has no cache",
        ),
        (
            |l| l.swap(0, 2),
            "container: layer 0: n_kv_heads is 1, the layer's is 2",
        ),
        (
            |l| _ = l[0].as_mut().unwrap().values.pop(),
            "container: layer 0: values: blob: found",
        ),
    ] {
        let refusal = refusal(change);
        assert!(refusal.starts_with(reason), "{refusal}");
    }
    let small = CacheConfig {
        capacity: 4,
        ..config.clone()
    };
    let refusal = encode(&small, &snapshots(&config, 5), "")
        .unwrap_err()
        .to_string();
    assert_eq!(
        refusal,
        "container: layer 0: seq_len is 5, the layer's capacity is 4"
    );
}
