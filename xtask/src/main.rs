//! The project's chores, each one a command: `cargo xtask --help` lists them.
//!
//! What decides (which package is missing, which arguments a step gets, how a
//! driver manifest is rewritten) is kept in plain functions with tests; what
//! touches the machine goes through [`runner::Runner`], so that no child can
//! outlast its time limit.

#![forbid(unsafe_code)]

mod ci;
mod drivers;
mod fuzz;
mod runner;
mod swiftshader;
mod verify;
mod workspace;

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::runner::{Runner, StepError};
use crate::workspace::Workspace;

/// Where a chore failed for a reason of its own, no child's exit code applies.
/// It is none of `tqcheck`'s codes, so that `verify` cannot be misread: 1
/// always means that the harness itself saw a violation.
const OWN_FAILURE: u8 = 4;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "The project's chores",
    after_help = "Example:\n  cargo xtask verify        prove the cache right on this machine's adapters\n  cargo xtask test          run everything that CI runs"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the verification harness on every adapter of this machine
    ///
    /// Builds `tqcheck` in release and asks it whether a usable adapter
    /// answers. Where none does, installs Mesa's software Vulkan and GL with
    /// apt-get, so that this works on a fresh Debian or Ubuntu machine.
    #[command(
        after_help = "Example:\n  cargo xtask verify --cases 500 --swiftshader\n\nExit code: tqcheck's own (0 holds, 1 violated, 2 usage, 3 no adapter); 124 when a step outlasted its limit, 130 when interrupted; 4 when the run could not be prepared, or the code of the step that failed."
    )]
    Verify(VerifyArgs),

    /// Run everything that CI runs, in CI's order
    ///
    /// Formatting, lints, documentation and tests; stops at the first step that
    /// fails and closes with a table of steps and times.
    #[command(
        after_help = "Example:\n  cargo xtask test --no-install --step-limit-minutes 10\n\nExit code: that of the step that failed; 124 when a step outlasted its limit, 130 when interrupted, 4 for any other failure."
    )]
    Test(TestArgs),

    /// Fetch SwiftShader, a second software Vulkan driver
    ///
    /// Takes it from Debian's chromium-common package without installing that
    /// package, and prints the environment variable that selects the driver.
    #[command(after_help = "Example:\n  cargo xtask swiftshader --dir /tmp/swiftshader")]
    Swiftshader(SwiftshaderArgs),

    /// Fuzz the decoder, the gate, the container and the CPU twin
    ///
    /// Needs the nightly toolchain; installs cargo-fuzz if it is missing. What is found is made
    /// small and saved under regressions/fuzz, where `cargo test` replays it.
    #[command(
        after_help = "Example:\n  cargo xtask fuzz decode_keys --minutes 5\n\nExit code: 0 when nothing was found, 1 when something was."
    )]
    Fuzz(FuzzArgs),

    /// Run the tests of codec, blobs and gate under Miri
    ///
    /// Needs the nightly toolchain with the components miri and rust-src.
    #[command(after_help = "Example:\n  cargo xtask miri")]
    Miri(MiriArgs),
}

#[derive(Args)]
struct LimitArgs {
    /// Kill a step, with all its child processes, after this many minutes
    #[arg(long, value_name = "MINUTES", default_value = "40")]
    step_limit_minutes: NonZeroU64,
}

impl LimitArgs {
    fn limit(&self) -> Duration {
        Duration::from_secs(self.step_limit_minutes.get().saturating_mul(60))
    }
}

#[derive(Args)]
struct VerifyArgs {
    /// How many cases the harness runs of each property (its own default if left out)
    #[arg(long, value_name = "N")]
    cases: Option<NonZeroU64>,

    /// Never install anything; fail where something is missing
    #[arg(long)]
    no_install: bool,

    /// Run the harness once more, on SwiftShader alone
    #[arg(long)]
    swiftshader: bool,

    #[command(flatten)]
    limit: LimitArgs,
}

#[derive(Args)]
struct TestArgs {
    /// Never install anything; fail where something is missing
    #[arg(long)]
    no_install: bool,

    /// Backends without whose adapter the tests must fail, separated by commas
    #[arg(long, value_name = "BACKENDS", default_value = "vulkan,gl")]
    require: String,

    #[command(flatten)]
    limit: LimitArgs,
}

#[derive(Args)]
struct SwiftshaderArgs {
    /// Where to put the driver [default: target/swiftshader in the workspace]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Do not refresh apt's package lists
    #[arg(long)]
    no_install: bool,

    #[command(flatten)]
    limit: LimitArgs,
}

#[derive(Args)]
struct FuzzArgs {
    /// The target to fuzz (all of them if left out)
    target: Option<String>,

    /// How long to fuzz, all targets together
    #[arg(long, value_name = "MINUTES", default_value = "8")]
    minutes: NonZeroU64,

    /// Print which lines of decoder and gate the saved inputs reach, and fuzz nothing
    #[arg(long, group = "instead")]
    coverage: bool,

    /// Write the seed corpora anew from the golden blobs, and fuzz nothing
    #[arg(long, group = "instead")]
    seeds: bool,

    /// Run the build steps of .clusterfuzzlite outside their container, and fuzz nothing
    #[arg(long, group = "instead")]
    clusterfuzzlite: bool,

    /// Never install anything; fail where something is missing
    #[arg(long)]
    no_install: bool,

    #[command(flatten)]
    limit: LimitArgs,
}

#[derive(Args)]
struct MiriArgs {
    #[command(flatten)]
    limit: LimitArgs,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match &cli.command {
        Command::Verify(args) => with_runner(&args.limit, |runner, workspace| {
            let options = verify::Options {
                cases: args.cases,
                install: !args.no_install,
                swiftshader: args.swiftshader,
            };
            verify::run(runner, workspace, &options)
        }),
        Command::Test(args) => with_runner(&args.limit, |runner, _| {
            ci::run(runner, &args.require, !args.no_install)
        }),
        Command::Swiftshader(args) => with_runner(&args.limit, |runner, workspace| {
            let dir = match &args.dir {
                Some(dir) => dir.clone(),
                None => workspace.swiftshader_dir(),
            };
            let icd = swiftshader::fetch(runner, &dir, !args.no_install)?;
            println!("{}", swiftshader::environment_line(&icd));
            Ok(0)
        }),
        Command::Fuzz(args) => with_runner(&args.limit, |runner, workspace| {
            if args.coverage {
                return fuzz::coverage(runner, workspace);
            }
            if args.seeds {
                return fuzz::seeds(runner);
            }
            if args.clusterfuzzlite {
                return fuzz::clusterfuzzlite(runner);
            }
            let options = fuzz::Options {
                target: args.target.clone(),
                minutes: args.minutes,
                install: !args.no_install,
            };
            fuzz::run(runner, workspace, &options)
        }),
        Command::Miri(args) => with_runner(&args.limit, |runner, _| fuzz::miri(runner)),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("xtask: error: {error:#}");
            let code = error
                .downcast_ref::<StepError>()
                .map_or(OWN_FAILURE, StepError::exit_code);
            ExitCode::from(code)
        }
    }
}

fn with_runner(
    limit: &LimitArgs,
    command: impl FnOnce(&mut Runner, &Workspace) -> anyhow::Result<u8>,
) -> anyhow::Result<u8> {
    let workspace = Workspace::find()?;
    let interrupted = runner::watch_for_interrupts()?;
    // Bound to a name for the directory to outlive the children.
    let runtime_dir = workspace::RuntimeDir::unless_set(std::env::var_os("XDG_RUNTIME_DIR"))?;
    let mut runner = Runner::new(limit.limit(), interrupted, workspace.root());
    if let Some(path) = runtime_dir.path() {
        runner.set_env("XDG_RUNTIME_DIR", path);
    }
    command(&mut runner, &workspace)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_an_example() {
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string);
            assert!(
                help.is_some_and(|text| text.contains("Example:\n  cargo xtask ")),
                "`{}` has no example in its help",
                command.get_name()
            );
        }
    }

    #[test]
    fn the_step_limit_defaults_to_forty_minutes_and_refuses_zero() {
        let Command::Test(args) = Cli::parse_from(["xtask", "test"]).command else {
            panic!("`test` parsed as another command");
        };
        assert_eq!(args.limit.limit(), Duration::from_secs(40 * 60));
        assert_eq!(args.require, "vulkan,gl");
        assert!(Cli::try_parse_from(["xtask", "test", "--step-limit-minutes", "0"]).is_err());
    }
}
