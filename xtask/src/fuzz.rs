//! `cargo xtask fuzz`: the targets of `fuzz/`, each for its share of the time.

use std::ffi::OsString;
use std::fs;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::runner::{Outcome, Runner, Step, StepError};
use crate::workspace::Workspace;

/// Sanitisers and libFuzzer want the host's triple spelt out.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";
/// Megabytes that an input may cost. The largest is some kilobytes long.
const RSS_LIMIT_MB: u32 = 1024;
/// Seconds that an input may take.
const TIMEOUT_S: u32 = 10;
/// Two things that cost a third of the speed and find nothing in code without `unsafe`: stack
/// frames kept after their function, and long stacks kept of allocations.
const ASAN_OPTIONS: &str =
    "detect_odr_violation=0:detect_stack_use_after_return=0:malloc_context_size=2";

/// A fuzz target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Target {
    name: &'static str,
    dictionary: &'static str,
    /// Most bytes of an input: several records, and no more, since they cost time.
    max_len: u32,
}

const fn target(name: &'static str, dictionary: &'static str, max_len: u32) -> Target {
    Target {
        name,
        dictionary,
        max_len,
    }
}

const TARGETS: [Target; 8] = [
    target("decode_keys", "blob", 512),
    target("decode_values", "blob", 512),
    target("restore_gate", "blob", 2048),
    target("roundtrip", "blob", 1024),
    target("decode_differential", "blob", 512),
    target("container", "container", 4096),
    target("encode_cpu", "f32", 2048),
    target("case_toml", "case", 2048),
];

/// Files of which the fuzzers have to see every line, or nearly.
const DECODER_AND_GATE: [&str; 3] = ["src/blob.rs", "src/gate.rs", "src/layout.rs"];

pub struct Options {
    pub target: Option<String>,
    pub minutes: NonZeroU64,
    pub install: bool,
}

/// Runs the targets; the exit code is 1 if anything was found.
pub fn run(runner: &mut Runner, workspace: &Workspace, options: &Options) -> anyhow::Result<u8> {
    let targets = chosen(options.target.as_deref())?;
    ensure_cargo_fuzz(runner, options.install)?;
    runner.require(&fuzz_step("build").args(["--target", TRIPLE, "--strip-dead-code"]))?;
    let seconds = (options.minutes.get() * 60 / targets.len() as u64).max(1);
    let mut table = Vec::new();
    let mut found = 0;
    for target in targets {
        let name = target.name;
        let fuzzer = Fuzzer::new(workspace.root(), target);
        fs::create_dir_all(&fuzzer.corpus)?;
        fs::create_dir_all(&fuzzer.artifacts)?;
        let (outcome, transcript) = runner.transcript(&fuzzer.run_step(seconds))?;
        if outcome == Outcome::Interrupted {
            return Err(StepError::new(&fuzzer.run_step(seconds), outcome).into());
        }
        if !outcome.is_success() {
            eprintln!("{transcript}");
            let artifact = artifact(&transcript)
                .with_context(|| format!("{name} ended with {outcome} and left no input"))?;
            let saved = fuzzer.save(runner, &artifact)?;
            eprintln!("xtask: {name}: an input is saved as {}", saved.display());
            found += 1;
        }
        table.push((name, outcome.is_success(), Stats::parse(&transcript)));
    }
    println!("{}", report(&table));
    Ok(u8::from(found > 0))
}

fn chosen(target: Option<&str>) -> anyhow::Result<Vec<Target>> {
    let chosen: Vec<_> = TARGETS
        .into_iter()
        .filter(|known| target.is_none_or(|target| target == known.name))
        .collect();
    if chosen.is_empty() {
        let names = TARGETS.map(|target| target.name).join(", ");
        bail!(
            "no fuzz target `{}`: there are {names}",
            target.unwrap_or_default()
        );
    }
    Ok(chosen)
}

/// `cargo fuzz`, of the nightly toolchain: the cargo that runs us may be another.
fn fuzz_step(command: &str) -> Step {
    Step::new(format!("fuzz-{command}"), "cargo")
        .args(["+nightly", "fuzz", command])
        // Set by the cargo that runs us, and stronger than `+nightly`.
        .env_remove("RUSTUP_TOOLCHAIN")
        .env_remove("CARGO")
}

fn ensure_cargo_fuzz(runner: &mut Runner, install: bool) -> anyhow::Result<()> {
    let probe = Step::cargo("cargo-fuzz").args(["fuzz", "--version"]);
    if runner.capture(&probe)?.0.is_success() {
        return Ok(());
    }
    if !install {
        bail!("cargo-fuzz is missing, and --no-install forbids `cargo install cargo-fuzz`");
    }
    runner.require(&Step::cargo("install").args(["install", "cargo-fuzz", "--locked"]))
}

/// One target's binary and directories.
struct Fuzzer {
    target: Target,
    binary: PathBuf,
    corpus: PathBuf,
    seeds: PathBuf,
    artifacts: PathBuf,
    regressions: PathBuf,
    dictionary: PathBuf,
}

impl Fuzzer {
    fn new(root: &Path, target: Target) -> Self {
        let Target {
            name, dictionary, ..
        } = target;
        let fuzz = root.join("fuzz");
        Self {
            target,
            binary: fuzz.join("target").join(TRIPLE).join("release").join(name),
            corpus: fuzz.join("corpus").join(name),
            seeds: root.join("regressions/seeds").join(name),
            artifacts: fuzz.join("artifacts").join(name),
            regressions: root.join("regressions/fuzz").join(name),
            dictionary: fuzz.join("dictionaries").join(format!("{dictionary}.dict")),
        }
    }

    fn libfuzzer(&self, step: &str) -> Step {
        Step::new(format!("{step}-{}", self.target.name), &self.binary)
            .env("ASAN_OPTIONS", ASAN_OPTIONS)
            .arg(format!("-rss_limit_mb={RSS_LIMIT_MB}"))
            .arg(format!("-timeout={TIMEOUT_S}"))
    }

    fn run_step(&self, seconds: u64) -> Step {
        self.libfuzzer("run")
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-max_len={}", self.target.max_len))
            .arg("-print_final_stats=1")
            .arg(option("-dict=", &self.dictionary))
            .arg(option("-artifact_prefix=", &self.artifacts.join("")))
            .args([&self.corpus, &self.seeds])
    }

    /// Copies a finding to where the tests replay it, and makes it as small as it gets.
    fn save(&self, runner: &mut Runner, artifact: &Path) -> anyhow::Result<PathBuf> {
        fs::create_dir_all(&self.regressions)?;
        let saved = self
            .regressions
            .join(artifact.file_name().unwrap_or(self.target.name.as_ref()));
        fs::copy(artifact, &saved)
            .with_context(|| format!("cannot copy {}", artifact.display()))?;
        let smaller = self.artifacts.join("minimised");
        let step = self
            .libfuzzer("minimise")
            .args(["-minimize_crash=1", "-max_total_time=60"])
            .arg(option("-exact_artifact_path=", &smaller))
            .arg(&saved);
        // It fails where the input cannot get smaller, and what has been saved will do.
        runner.run(&step)?;
        if smaller.is_file() {
            fs::rename(&smaller, &saved)?;
        }
        Ok(saved)
    }
}

fn option(name: &str, path: &Path) -> OsString {
    let mut option = OsString::from(name);
    option.push(path);
    option
}

/// The input that libFuzzer says it has written.
fn artifact(transcript: &str) -> Option<PathBuf> {
    let (_, path) = transcript.rsplit_once("Test unit written to ")?;
    path.lines().next().map(PathBuf::from)
}

/// What libFuzzer says of a run.
#[derive(Debug, Default, PartialEq, Eq)]
struct Stats {
    executions: u64,
    per_second: u64,
    edges: u64,
    corpus: u64,
}

impl Stats {
    fn parse(transcript: &str) -> Self {
        let number = |text: &str| {
            let digits: String = text
                .trim()
                .chars()
                .take_while(char::is_ascii_digit)
                .collect();
            digits.parse().unwrap_or(0)
        };
        let last = |key: &str| {
            transcript
                .rsplit_once(key)
                .map_or(0, |(_, rest)| number(rest))
        };
        Self {
            executions: last("stat::number_of_executed_units:"),
            per_second: last("stat::average_exec_per_sec:"),
            edges: last(" cov: "),
            corpus: last(" corp: "),
        }
    }
}

fn report(table: &[(&str, bool, Stats)]) -> String {
    let mut text = format!(
        "{:20} {:>13} {:>12} {:>6} {:>7}  result\n",
        "target", "executions", "executions/s", "edges", "corpus"
    );
    for (name, clean, stats) in table {
        text += &format!(
            "{name:20} {:>13} {:>12} {:>6} {:>7}  {}\n",
            stats.executions,
            stats.per_second,
            stats.edges,
            stats.corpus,
            if *clean { "nothing found" } else { "FOUND" }
        );
    }
    let total: u64 = table.iter().map(|(_, _, stats)| stats.executions).sum();
    text + &format!("{:20} {total:>13}", "total")
}

/// Writes the seeds anew from the golden blobs.
pub fn seeds(runner: &mut Runner) -> anyhow::Result<u8> {
    let step = Step::cargo("seeds")
        .args(["run", "--package", "tqcheck", "--example", "fuzz_seeds"])
        .args(["testdata/golden", "regressions/seeds"]);
    runner.require(&step)?;
    Ok(0)
}

/// Prints the line coverage that seeds, findings and corpora have of the decoder and the gate.
///
/// Only the workspace's own packages are instrumented, through the compiler's wrapper for them, so
/// that nothing else is compiled twice.
pub fn coverage(runner: &mut Runner, workspace: &Workspace) -> anyhow::Result<u8> {
    let root = workspace.root();
    let tools = llvm_tools(runner)?;
    let dir = root.join("target/coverage");
    fs::create_dir_all(&dir)?;
    let wrapper = dir.join("rustc");
    fs::write(&wrapper, "#!/bin/sh\nexec \"$@\" -Cinstrument-coverage\n")?;
    #[cfg(unix)]
    fs::set_permissions(
        &wrapper,
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )?;
    let raw = dir.join("fuzz.profraw");
    let step = Step::cargo("replay")
        .args(["run", "--package", "tqcheck", "--example", "fuzz_replay"])
        .args(["regressions/seeds", "regressions/fuzz", "fuzz/corpus"])
        .env("RUSTC_WORKSPACE_WRAPPER", &wrapper)
        .env("CARGO_TARGET_DIR", root.join("target"))
        // Build scripts and macros write profiles too: those of the last process stay.
        .env("LLVM_PROFILE_FILE", dir.join("%m-%p.profraw"));
    for entry in fs::read_dir(&dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "profraw") {
            fs::remove_file(path)?;
        }
    }
    runner.require(&step)?;
    let profiles: Vec<PathBuf> = fs::read_dir(&dir)?
        .map(|entry| entry.map(|e| e.path()))
        .filter(|path| {
            path.as_ref()
                .is_ok_and(|p| p.extension().is_some_and(|e| e == "profraw"))
        })
        .collect::<Result<_, _>>()?;
    let merge = Step::new("merge", tools.join("llvm-profdata"))
        .args(["merge", "-sparse", "-o"])
        .arg(raw.with_extension("profdata"))
        .args(profiles);
    runner.require(&merge)?;
    let export = Step::new("export", tools.join("llvm-cov"))
        .args(["export", "--format=lcov"])
        .arg(option("--instr-profile=", &raw.with_extension("profdata")))
        .arg(root.join("target/debug/examples/fuzz_replay"));
    let (outcome, lcov) = runner.capture(&export)?;
    if !outcome.is_success() {
        return Err(StepError::new(&export, outcome).into());
    }
    println!("{}", covered_lines(&lcov, &DECODER_AND_GATE));
    Ok(0)
}

/// The directory of llvm-profdata and llvm-cov of the toolchain's own LLVM version.
fn llvm_tools(runner: &Runner) -> anyhow::Result<PathBuf> {
    let (_, libdir) =
        runner.capture(&Step::new("libdir", "rustc").args(["--print", "target-libdir"]))?;
    let tools = Path::new(libdir.trim()).with_file_name("bin");
    if tools.join("llvm-cov").is_file() {
        return Ok(tools);
    }
    bail!(
        "{} has no llvm-cov: expected the toolchain's component, `rustup component add llvm-tools`",
        tools.display()
    )
}

/// The share of lines seen of each file, and the lines that were not.
fn covered_lines(lcov: &str, files: &[&str]) -> String {
    let mut text = String::new();
    let (mut all, mut seen) = (0, 0);
    for file in files {
        let record = lcov.split("end_of_record").find(|record| {
            record
                .trim_start()
                .lines()
                .next()
                .is_some_and(|l| l.ends_with(file))
        });
        let lines: Vec<(u32, bool)> = record
            .unwrap_or_default()
            .lines()
            .filter_map(|line| line.strip_prefix("DA:")?.split_once(','))
            .filter_map(|(line, count)| Some((line.parse().ok()?, count != "0")))
            .collect();
        let unseen: Vec<String> = lines
            .iter()
            .filter(|(_, seen)| !seen)
            .map(|(line, _)| line.to_string())
            .collect();
        all += lines.len();
        seen += lines.len() - unseen.len();
        text += &format!(
            "{file:16} {:>5} of {:>5} lines{}{}\n",
            lines.len() - unseen.len(),
            lines.len(),
            if unseen.is_empty() { "" } else { "; not " },
            unseen.join(", ")
        );
    }
    text + &format!(
        "{:16} {:.1} %",
        "in all",
        100.0 * seen as f64 / all.max(1) as f64
    )
}

/// Runs the tests of codec, blobs and gate under Miri.
pub fn miri(runner: &mut Runner) -> anyhow::Result<u8> {
    let cargo = || {
        Step::new("miri", "cargo")
            .env_remove("RUSTUP_TOOLCHAIN")
            .env_remove("CARGO")
    };
    let probe = cargo().args(["+nightly", "miri", "--version"]);
    if !runner.capture(&probe)?.0.is_success() {
        bail!(
            "Miri is missing: expected the nightly toolchain with its components, \
             `rustup toolchain install nightly --component miri,rust-src`"
        );
    }
    let step = cargo()
        .args([
            "+nightly",
            "miri",
            "test",
            "--package",
            "turboquant-wgpu",
            "--lib",
        ])
        // The golden blobs are files.
        .env("MIRIFLAGS", "-Zmiri-disable-isolation")
        .args([
            "--",
            "blob::",
            "gate::",
            "layout::",
            "half_float::",
            "codebook::",
            "twin::",
            // It asks for 2^62 bytes in order to be refused; Miri stops there instead.
            "--skip",
            "a_writer_refuses_what_it_cannot_hold",
        ]);
    runner.require(&step)?;
    Ok(0)
}

/// Runs the build steps of `.clusterfuzzlite/` outside their container.
pub fn clusterfuzzlite(runner: &mut Runner) -> anyhow::Result<u8> {
    let step = Step::cargo("clusterfuzzlite")
        .args(["test", "--package", "xtask", "--", "--ignored", "--exact"])
        .arg("fuzz::tests::the_cluster_build_makes_fuzzers_that_start");
    runner.require(&step)?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_libfuzzer_prints() {
        let transcript = "\
            #65536\tpulse  cov: 120 ft: 200 corp: 30/2Kb lim: 4096 exec/s: 32768 rss: 60Mb\n\
            #1000000\tDONE   cov: 154 ft: 412 corp: 71/9Kb lim: 4096 exec/s: 250000 rss: 70Mb\n\
            Done 1000000 runs in 4 second(s)\n\
            stat::number_of_executed_units: 1000000\n\
            stat::average_exec_per_sec:     250000\n\
            stat::new_units_added:          12\n";
        let stats = Stats {
            executions: 1_000_000,
            per_second: 250_000,
            edges: 154,
            corpus: 71,
        };
        assert_eq!(Stats::parse(transcript), stats);
        assert_eq!(artifact(transcript), None);
        assert_eq!(Stats::parse(""), Stats::default());
        let table = report(&[("decode_keys", true, stats)]);
        assert!(table.contains("decode_keys"), "{table}");
        assert!(table.ends_with("1000000"), "{table}");
    }

    #[test]
    fn finds_the_input_of_a_crash() {
        let transcript = "==1== ERROR: libFuzzer: deadly signal\n\
            artifact_prefix='fuzz/artifacts/x/'; Test unit written to fuzz/artifacts/x/crash-ab\n\
            Base64: AAAA\n";
        assert_eq!(
            artifact(transcript),
            Some("fuzz/artifacts/x/crash-ab".into())
        );
    }

    #[test]
    fn every_target_has_seeds_and_a_dictionary() {
        let workspace = Workspace::find().unwrap();
        for target in TARGETS {
            let fuzzer = Fuzzer::new(workspace.root(), target);
            let name = target.name;
            assert!(
                fuzzer.dictionary.is_file(),
                "{}",
                fuzzer.dictionary.display()
            );
            assert!(fuzzer.seeds.is_dir(), "{}", fuzzer.seeds.display());
            let glue = workspace
                .root()
                .join(format!("fuzz/fuzz_targets/{name}.rs"));
            assert!(glue.is_file(), "{}", glue.display());
        }
        assert_eq!(chosen(None).unwrap().len(), TARGETS.len());
        assert_eq!(chosen(Some("roundtrip")).unwrap(), [TARGETS[3]]);
        let error = chosen(Some("nonesuch")).unwrap_err().to_string();
        assert!(error.contains("decode_keys"), "{error}");
    }

    #[test]
    fn counts_lines_that_were_seen() {
        let lcov = "SF:/x/src/blob.rs\nDA:1,7\nDA:2,0\nDA:5,1\nend_of_record\n\
            SF:/x/src/gate.rs\nDA:3,1\nend_of_record\n";
        let text = covered_lines(lcov, &["src/blob.rs", "src/gate.rs"]);
        assert!(text.contains("2 of     3 lines; not 2\n"), "{text}");
        assert!(text.ends_with("75.0 %"), "{text}");
    }

    /// `.clusterfuzzlite/build.sh` outside its container, from a checkout to fuzzers that start.
    #[cfg(unix)]
    #[test]
    #[ignore = "compiles everything for the sanitiser; `cargo xtask fuzz --clusterfuzzlite` runs it"]
    fn the_cluster_build_makes_fuzzers_that_start() {
        use std::process::Command;
        let workspace = Workspace::find().unwrap();
        let out = tempfile::tempdir().unwrap();
        let status = Command::new("bash")
            .arg(workspace.root().join(".clusterfuzzlite/build.sh"))
            .env("OUT", out.path())
            .env("RUSTUP_TOOLCHAIN", "nightly")
            .env_remove("CARGO")
            .status()
            .unwrap();
        assert!(status.success(), "{status}");
        for Target { name, .. } in TARGETS {
            let start = Command::new(out.path().join(name))
                .arg("-runs=0")
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&start.stderr);
            assert!(start.status.success(), "{name}: {text}");
            for file in [format!("{name}.dict"), format!("{name}_seed_corpus.zip")] {
                assert!(out.path().join(&file).is_file(), "{file} is missing");
            }
        }
    }
}
