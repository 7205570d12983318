#![forbid(unsafe_code)]
//! The command `tqcheck`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tqcheck::commands::{End, adapters, bench, golden, inspect, replay, run, trace};

/// Proves the kernels of turboquant-wgpu right on the adapters of this machine.
///
/// Exit code: 0 everything holds, 1 a violation, 2 wrong usage or unreadable input, 3 no adapter that was
/// asked for, 130 stopped by Ctrl-C.
#[derive(Parser)]
#[command(
    version,
    after_help = "Example: tqcheck run --adapter vulkan --cases 500"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Adapters(adapters::Args),
    Run(run::Args),
    Bench(bench::Args),
    Replay(replay::Args),
    Golden(golden::Args),
    Trace(trace::Args),
    Inspect(inspect::Args),
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env()
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("off")),
        )
        .with_writer(std::io::stderr)
        .init();
    let end = match Cli::parse().command {
        Command::Adapters(args) => adapters::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Golden(args) => golden::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Inspect(args) => inspect::run(&args),
    };
    match end {
        Ok(end) => end.into(),
        Err(error) => {
            eprintln!("tqcheck: {error:#}");
            End::Usage.into()
        }
    }
}
