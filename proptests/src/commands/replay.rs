//! `tqcheck replay`.

use std::path::PathBuf;

use anyhow::Result;

use super::{End, table};
use crate::verdict::Failure;
use crate::{adapters, regressions, runner};

/// Checks saved cases again, on every adapter
///
/// PATH is a saved case or a directory of such; without one, every case under regressions/ is replayed.
/// A file that is no saved case, or names no property, is an error.
#[derive(clap::Args)]
#[command(after_help = "Example: tqcheck replay regressions/attention")]
pub struct Args {
    /// Saved cases, or directories of such
    #[arg(value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Adapters whose backend, name or driver contains this text, or `all`
    #[arg(long, default_value = "all", value_name = "TEXT")]
    pub adapter: String,
}

/// Runs the command.
///
/// # Errors
/// A file that is no saved case.
pub fn run(args: &Args) -> Result<End> {
    let cases = regressions::load(&args.paths)?;
    let devices = match adapters::select(&args.adapter) {
        Ok(devices) => devices,
        Err(why) => {
            eprintln!("tqcheck: {why}");
            return Ok(End::NoAdapter);
        }
    };
    let mut report = table(["case", "adapter", "verdict"]);
    let mut end = End::Holds;
    for (path, saved, property) in &cases {
        for device in &devices {
            let verdict = match runner::check_once(property, device, &saved.case) {
                Ok(_) => "holds".to_owned(),
                Err(Failure::NotChecked(reason)) => format!("not checked: {reason}"),
                Err(Failure::Violated(violation)) => {
                    end = End::Violation;
                    format!("VIOLATED: {violation}")
                }
            };
            let name = path.strip_prefix(regressions::dir()).unwrap_or(path);
            report.add_row([name.display().to_string(), device.label.clone(), verdict]);
        }
    }
    println!("{report}");
    println!("{} saved cases on {} adapters", cases.len(), devices.len());
    Ok(end)
}
