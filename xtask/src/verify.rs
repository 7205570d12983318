//! `cargo xtask verify`: the harness over every adapter, from nothing.

use std::num::NonZeroU64;

use crate::drivers::{self, Wanted};
use crate::runner::{self, Outcome, Runner, Step, StepError};
use crate::swiftshader;
use crate::workspace::Workspace;

pub struct Options {
    pub cases: Option<NonZeroU64>,
    pub install: bool,
    pub swiftshader: bool,
}

/// Returns the exit code to pass on.
pub fn run(runner: &mut Runner, workspace: &Workspace, options: &Options) -> anyhow::Result<u8> {
    let result = steps(runner, workspace, options);
    eprint!("\n{}", runner::table(runner.records(), &planned(options)));
    result
}

fn planned(options: &Options) -> Vec<&'static str> {
    let mut names = vec!["build", "adapters", "run"];
    if options.swiftshader {
        names.push("run-swiftshader");
    }
    names
}

fn steps(runner: &mut Runner, workspace: &Workspace, options: &Options) -> anyhow::Result<u8> {
    runner.require(&build_step())?;
    let wanted = Wanted {
        release: true,
        backends: None,
    };
    drivers::ensure(runner, &wanted, options.install)?;
    // Fetched before the long run, so that a failure to fetch it costs no time
    // and cannot hide that run's verdict.
    let icd = if options.swiftshader {
        let dir = workspace.swiftshader_dir();
        Some(match swiftshader::fetched(&dir) {
            Some(icd) => icd,
            None => swiftshader::fetch(runner, &dir, options.install)?,
        })
    } else {
        None
    };
    let code = harness(runner, &run_step("run", options.cases))?;
    let Some(icd) = icd else {
        return Ok(code);
    };
    // Even after a violation: whether a second driver shows it too is what one
    // wants to know next.
    let step = swiftshader::alone(run_step("run-swiftshader", options.cases), &icd);
    let second = harness(runner, &step)?;
    Ok(if code == 0 { second } else { code })
}

/// Runs the harness; its verdict is a result, that it hung is an error.
fn harness(runner: &mut Runner, step: &Step) -> anyhow::Result<u8> {
    let outcome = runner.run(step)?;
    match outcome {
        Outcome::Exited(_) => Ok(outcome.exit_code()),
        Outcome::TimedOut { .. } | Outcome::Interrupted => {
            Err(StepError::new(step, outcome).into())
        }
    }
}

fn build_step() -> Step {
    Step::cargo("build").args(["build", "--release", "--package", "tqcheck"])
}

fn run_step(name: &str, cases: Option<NonZeroU64>) -> Step {
    let step = drivers::tqcheck(name, true, ["run", "--adapter", "all"]);
    match cases {
        Some(cases) => step.arg("--cases").arg(cases.to_string()),
        None => step,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const RUN: &str =
        "cargo run --quiet --release --package tqcheck --bin tqcheck -- run --adapter all";

    #[test]
    fn hands_the_number_of_cases_on() {
        assert_eq!(run_step("run", None).command_line(), RUN);
        assert_eq!(
            run_step("run", NonZeroU64::new(500)).command_line(),
            format!("{RUN} --cases 500")
        );
    }

    #[test]
    fn the_second_run_sees_swiftshader_alone() {
        let step = swiftshader::alone(run_step("run", None), Path::new("/icd.json"));
        assert_eq!(
            step.command_line(),
            format!("VK_ICD_FILENAMES=/icd.json __EGL_VENDOR_LIBRARY_FILENAMES=/dev/null {RUN}")
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_verdict_is_passed_on_and_a_hang_is_an_error() {
        use std::sync::Arc;
        use std::time::Duration;
        let mut runner = Runner::new(
            Duration::from_millis(500),
            Arc::default(),
            std::env::temp_dir(),
        );
        let shell = |script| Step::new("run", "sh").args(["-c", script]);
        assert_eq!(harness(&mut runner, &shell("exit 1")).unwrap(), 1);
        let error = harness(&mut runner, &shell("sleep 300")).unwrap_err();
        let error = error.downcast_ref::<StepError>().unwrap();
        assert_eq!(error.exit_code(), 124);
    }
}
