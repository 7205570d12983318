//! Files: whole or not at all, and judged before they are read.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use turboquant_container::{Container, ContainerError, encode, save};
use turboquant_wgpu::blob::BlobWriter;
use turboquant_wgpu::layout::{BlobRegion, Kind};
use turboquant_wgpu::{BlobHeader, CacheConfig, HeadDim, Snapshot};

fn config() -> CacheConfig {
    CacheConfig {
        head_dim: HeadDim::D128,
        n_kv_heads: vec![8, 0, 8],
        capacity: 1024,
        seed: 7,
    }
}

/// Layers whose codes are all `code`.
fn layers(code: u8) -> Vec<Option<Snapshot>> {
    let config = config();
    let blob = |kind, n_kv_heads| {
        let mut writer = BlobWriter::new(BlobHeader {
            kind,
            n_kv_heads,
            head_dim: config.head_dim.get_u32(),
            seq_len: config.capacity,
        })
        .unwrap();
        writer.region_mut(BlobRegion::Codes).unwrap().fill(code);
        writer.finish().unwrap()
    };
    let snapshot = |&heads: &u32| {
        (heads > 0).then(|| Snapshot {
            keys: blob(Kind::Keys, heads),
            values: blob(Kind::Values, heads),
        })
    };
    config.n_kv_heads.iter().map(snapshot).collect()
}

fn files_in(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap();
    names
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn a_file_is_what_encode_makes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache.safetensors");
    for code in [1, 2] {
        save(&path, &config(), &layers(code), "the tests").unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(
            bytes,
            encode(&config(), &layers(code), "the tests").unwrap()
        );
        let file = Container::open(&path).unwrap().check(&config()).unwrap();
        assert_eq!(file.describe().producer, "the tests");
        let mut data = vec![9; 3];
        let container = file.read(&mut data).unwrap();
        let found = container.blob(2, Kind::Values).unwrap();
        assert_eq!(found, layers(code)[2].as_ref().unwrap().values);
    }
    assert_eq!(files_in(dir.path()), ["cache.safetensors"]);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let ordinary = dir.path().join("ordinary");
        File::create(&ordinary).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&path), mode(&ordinary));
    }
}

#[test]
fn a_write_that_fails_leaves_the_old_file_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache.safetensors");
    save(&path, &config(), &layers(1), "old").unwrap();
    let old = fs::read(&path).unwrap();
    let mut bad = layers(2);
    bad[2].as_mut().unwrap().keys.pop();
    assert!(matches!(
        save(&path, &config(), &bad, "new"),
        Err(ContainerError::Layer { layer: 2, .. })
    ));
    assert_eq!(fs::read(&path).unwrap(), old);
    assert_eq!(files_in(dir.path()), ["cache.safetensors"]);

    let nowhere = dir.path().join("no-such-directory").join("cache");
    let refusal = save(&nowhere, &config(), &layers(1), "")
        .unwrap_err()
        .to_string();
    assert!(
        refusal.starts_with("cannot create a temporary file beside "),
        "{refusal}"
    );
    // A directory cannot be replaced by a file: the last step fails.
    let directory = dir.path().join("directory");
    fs::create_dir(&directory).unwrap();
    let refusal = save(&directory, &config(), &layers(1), "")
        .unwrap_err()
        .to_string();
    assert!(refusal.starts_with("cannot replace "), "{refusal}");
    assert_eq!(files_in(dir.path()).len(), 2);
}

/// Sparse files of a size that no machine could read: the answer comes from the header and the
/// length.
#[test]
fn a_huge_file_is_judged_unread() {
    const HUGE: u64 = 1 << 40;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("huge");
    let open = |first: &[u8]| {
        let mut file = File::create(&path).unwrap();
        file.write_all(first).unwrap();
        file.set_len(HUGE).unwrap();
        Container::open(&path).expect_err("refused")
    };
    // A good container, padded.
    let good = encode(&config(), &layers(1), "").unwrap();
    match open(&good) {
        ContainerError::Length { found, expected } => {
            assert_eq!((found, expected), (HUGE, good.len() as u64));
        }
        other => panic!("{other}"),
    }
    // Other files: a blob, zeros, a header as long as the file.
    for first in [&b"TQK1"[..], b"TQK1\x02\0\0\0", &(HUGE - 8).to_le_bytes()] {
        let refusal = open(first);
        let judged = matches!(
            refusal,
            ContainerError::HeaderLength { .. } | ContainerError::Header(_)
        );
        assert!(judged, "{refusal}");
    }
    assert!(open(&[0; 8]).to_string().contains("not safetensors"));
    let refusal = Container::open(&dir.path().join("none")).unwrap_err();
    assert!(refusal.to_string().starts_with("cannot open "), "{refusal}");
}

/// A container of another cache is refused before its tensors are read: they are not even there.
#[test]
fn another_seed_is_refused_before_the_tensors_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache");
    let good = encode(&config(), &layers(1), "").unwrap();
    let header = 8 + u64::from_le_bytes(*good.first_chunk().unwrap()) as usize;
    let mut file = File::create(&path).unwrap();
    file.write_all(&good[..header]).unwrap();
    file.set_len(good.len() as u64).unwrap();
    let other = CacheConfig {
        seed: 8,
        ..config()
    };
    let refusal = Container::open(&path).unwrap().check(&other).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "container: cache_seed is 7, expected 8"
    );
    // In the right cache, the holes are found.
    let mut data = Vec::new();
    let file = Container::open(&path).unwrap().check(&config()).unwrap();
    assert!(matches!(
        file.read(&mut data),
        Err(ContainerError::Hash { .. })
    ));
}

#[cfg(unix)]
mod killed {
    use super::*;
    use std::process::{Command, Stdio};
    use std::thread::sleep;
    use std::time::{Duration, Instant};

    const PATH: &str = "TURBOQUANT_TEST_PATH";

    /// Not a test but the process to be killed: it writes one file after the other until then.
    #[test]
    #[ignore = "the child of `a_killed_writer_leaves_a_whole_file`"]
    fn writer() {
        let path = std::env::var_os(PATH).expect("run by its parent");
        let layers = [layers(1), layers(2)];
        for layers in layers.iter().cycle() {
            save(Path::new(&path), &config(), layers, "the tests").unwrap();
        }
    }

    #[test]
    fn a_killed_writer_leaves_a_whole_file() {
        const ROUNDS: u32 = 50;
        let whole = [1, 2].map(|code| encode(&config(), &layers(code), "the tests").unwrap());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cache.safetensors");
        fs::write(&path, &whole[0]).unwrap();
        let mut interrupted = 0;
        for round in 0..ROUNDS {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "killed::writer", "--ignored"])
                .env(PATH, &path)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            // From the child's first write on, a moment that differs from round to round.
            let start = Instant::now();
            while files_in(dir.path()).len() < 2 && start.elapsed() < Duration::from_secs(20) {
                assert!(child.try_wait().unwrap().is_none(), "the writer ended");
                sleep(Duration::from_millis(1));
            }
            sleep(Duration::from_micros(u64::from(round * 7919 % 40_000)));
            child.kill().unwrap();
            child.wait().unwrap();

            let found = fs::read(&path).unwrap();
            assert!(
                whole.contains(&found),
                "round {round}: neither the old nor the new file"
            );
            let left = files_in(dir.path())
                .into_iter()
                .filter(|n| n.ends_with(".tmp"));
            for name in left {
                interrupted += 1;
                fs::remove_file(dir.path().join(name)).unwrap();
            }
        }
        println!("{interrupted} of {ROUNDS} kills interrupted a write");
        assert!(
            interrupted > ROUNDS / 4,
            "only {interrupted} kills interrupted a write"
        );
    }
}
