//! Replays saved inputs: `fuzz_replay DIR...`, each directory with one for each fuzz target in it.

use std::path::PathBuf;

use anyhow::Context as _;
use tqcheck::fuzzing::{Fate, TARGETS};

fn main() -> anyhow::Result<()> {
    let dirs: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    for target in TARGETS {
        let (mut accepted, mut refused) = (0, 0);
        for dir in dirs.iter().map(|dir| dir.join(target.name)) {
            if !dir.is_dir() {
                continue;
            }
            for entry in std::fs::read_dir(&dir)? {
                let path = entry?.path();
                let bytes = std::fs::read(&path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                match (target.run)(&bytes) {
                    Fate::Accepted => accepted += 1,
                    Fate::Refused => refused += 1,
                }
            }
        }
        println!(
            "{:20} {accepted:>6} accepted {refused:>6} refused",
            target.name
        );
    }
    Ok(())
}
