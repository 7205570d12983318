//! Writes the fuzzers' seed corpora: `fuzz_seeds GOLDEN_DIR SEEDS_DIR`.

use std::path::PathBuf;

use anyhow::Context as _;

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args_os().skip(1).map(PathBuf::from);
    let (golden, out) = (args.next(), args.next());
    let (golden, out) = golden
        .zip(out)
        .context("usage: fuzz_seeds GOLDEN_DIR SEEDS_DIR")?;
    for seed in tqcheck::fuzzing::seeds::from_golden(&golden)? {
        let path = out.join(seed.path());
        std::fs::create_dir_all(path.parent().unwrap_or(&out))?;
        std::fs::write(&path, &seed.bytes)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
