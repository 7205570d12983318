use std::path::{Path, PathBuf};

use super::*;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The files of a directory; none if it does not exist.
fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Vec::new();
    };
    let mut paths: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
        .into_iter()
        .map(|path| (path.clone(), std::fs::read(path).unwrap()))
        .collect()
}

/// Everything that fuzzing has ever found, and what it starts from.
#[test]
fn saved_inputs_are_replayed() {
    for target in TARGETS {
        for (path, bytes) in files(&root().join("regressions/fuzz").join(target.name)) {
            println!("{}", path.display());
            (target.run)(&bytes);
        }
        let seeds = files(&root().join("regressions/seeds").join(target.name));
        let accepted = seeds.iter().filter(|(path, bytes)| {
            println!("{}", path.display());
            (target.run)(bytes) == Fate::Accepted
        });
        assert!(accepted.count() > 0, "{}: no seed is accepted", target.name);
    }
}

#[test]
fn the_seeds_are_those_of_the_golden_blobs() {
    let seeds = seeds::from_golden(&root().join("testdata/golden")).unwrap();
    for seed in &seeds {
        let path = root().join("regressions/seeds").join(seed.path());
        let found = std::fs::read(&path);
        assert!(
            found.is_ok_and(|found| found == seed.bytes),
            "{} is not what `cargo xtask fuzz --seeds` makes",
            path.display()
        );
        assert!(seed.bytes.len() <= 4096, "{}", path.display());
    }
    for target in TARGETS {
        let made = seeds
            .iter()
            .filter(|seed| seed.target == target.name)
            .count();
        let dir = root().join("regressions/seeds").join(target.name);
        assert_eq!(files(&dir).len(), made, "{}", target.name);
    }
}

/// A short random walk through each target, as a fuzzer makes it: what follows a repair is
/// accepted often, and refused at times.
#[test]
fn mutated_seeds_get_in_and_are_refused() {
    for target in TARGETS {
        let seeds = files(&root().join("regressions/seeds").join(target.name));
        let mut choices = shape::Choices::new(1);
        let (mut accepted, mut refused) = (0, 0);
        for round in 0..2000_u32 {
            let seed = &seeds[choices.below(seeds.len() as u32) as usize].1;
            let mut buffer = vec![0; 4096];
            let mut size = seed.len().min(buffer.len());
            buffer[..size].copy_from_slice(&seed[..size]);
            for _ in 0..choices.below(4) {
                let at = choices.below(size.max(1) as u32) as usize;
                buffer[at] = choices.below(256) as u8;
            }
            if choices.below(4) == 0 {
                size = choices.below(size as u32 + 1) as usize;
            }
            let size = (target.shape)(&mut buffer, size, round);
            assert!(size <= buffer.len());
            match (target.run)(&buffer[..size]) {
                Fate::Accepted => accepted += 1,
                Fate::Refused => refused += 1,
            }
        }
        println!("{}: {accepted} accepted, {refused} refused", target.name);
        assert!(accepted > 100, "{}: {accepted} accepted", target.name);
        // A round trip makes a cache of any bytes.
        let never = target.name == "roundtrip";
        assert!(never || refused > 20, "{}: {refused} refused", target.name);
    }
}

/// No buffer is too small for a repair.
#[test]
fn repairs_stay_within_their_buffer() {
    for target in TARGETS {
        for len in 0..300 {
            for seed in 0..40 {
                let mut buffer: Vec<u8> = (0..len).map(|i| i as u8).collect();
                let size = (target.shape)(&mut buffer, len, seed);
                assert!(size <= len, "{}", target.name);
                (target.run)(&buffer[..size]);
            }
        }
    }
}

/// The glue in `fuzz/` names every target, and no other.
#[test]
fn every_target_has_its_glue() {
    let mut names: Vec<String> = files(&root().join("fuzz/fuzz_targets"))
        .iter()
        .map(|(path, _)| path.file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    names.sort();
    let mut expected = TARGETS.map(|target| target.name);
    expected.sort_unstable();
    assert_eq!(names, expected);
}
