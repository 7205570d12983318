//! Every property on every adapter, each a test of its own name; adapters that are absent are listed.
//!
//! `TQCHECK_REQUIRE=vulkan,gl` makes the absence of those backends a failure. `TQCHECK_CASES` sets the number of
//! cases of each property.

use std::path::Path;

use libtest_mimic::{Arguments, Failed, Trial};
use tqcheck::commands::{End, golden, trace};
use tqcheck::properties::{self, Property};
use tqcheck::{adapters, runner};

/// Backends that an adapter is looked for on.
const BACKENDS: [&str; 4] = ["vulkan", "gl", "metal", "dx12"];

fn main() {
    let arguments = Arguments::from_args();
    libtest_mimic::run(&arguments, trials()).exit();
}

fn trials() -> Vec<Trial> {
    let required = std::env::var("TQCHECK_REQUIRE").unwrap_or_default();
    let required: Vec<String> = required
        .split(',')
        .map(|b| b.trim().to_lowercase())
        .filter(|b| !b.is_empty())
        .collect();
    let mut trials = Vec::new();
    for adapter in adapters::all() {
        let label = adapter.label();
        for property in properties::ALL {
            let name = format!("{}::{label}", property.name);
            let trial = Trial::test(name, move || check(property, adapter));
            // What this machine cannot check is listed, neither passed nor failed.
            trials.push(match property.unavailable() {
                None => trial,
                Some(_) => trial.with_kind("not checked").with_ignored_flag(true),
            });
        }
        trials.push(Trial::test(format!("golden::{label}"), move || {
            usable(adapter)?;
            let args = golden::Args {
                dirs: vec![testdata("golden")],
                adapter: adapter.label(),
            };
            ended(golden::run(&args))
        }));
        trials.push(Trial::test(format!("trace::{label}"), move || {
            usable(adapter)?;
            let args = trace::Args {
                file: testdata("real/smollm2-135m-qkv.safetensors"),
                adapter: adapter.label(),
                seed: 1,
            };
            ended(trace::run(&args))
        }));
    }
    let known = BACKENDS.iter().map(|b| (*b).to_owned());
    let mut backends: Vec<String> = known.chain(required.iter().cloned()).collect();
    backends.sort();
    backends.dedup();
    for backend in backends {
        let there = adapters::all()
            .iter()
            .any(|a| a.info.backend.to_str().eq_ignore_ascii_case(&backend));
        let needed = required.contains(&backend);
        if needed || !there {
            let name = backend.clone();
            let trial = Trial::test(format!("adapter::{backend}"), move || {
                let missing = adapters::missing(&name);
                if missing.is_empty() {
                    return Ok(());
                }
                Err(format!("{name}: no usable adapter, though it was asked for").into())
            });
            // Not asked for and not there: listed as absent, neither passed nor failed.
            trials.push(
                trial
                    .with_kind(if there { "" } else { "absent" })
                    .with_ignored_flag(!needed),
            );
        }
    }
    if adapters::all().is_empty() {
        trials.push(Trial::test("adapter::any", || {
            Err("no adapter answers: nothing was checked".into())
        }));
    }
    trials
}

fn testdata(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../testdata")
        .join(path)
}

fn usable(adapter: &adapters::Adapter) -> Result<(), Failed> {
    adapter.device().map(|_| ()).map_err(Failed::from)
}

fn ended(end: anyhow::Result<End>) -> Result<(), Failed> {
    match end {
        Ok(End::Holds) => Ok(()),
        Ok(end) => Err(format!("{end:?}").into()),
        Err(error) => Err(format!("{error:#}").into()),
    }
}

fn check(property: &Property, adapter: &adapters::Adapter) -> Result<(), Failed> {
    let device = adapter.device()?;
    let cases = match std::env::var("TQCHECK_CASES") {
        Ok(text) => text
            .parse()
            .map_err(|e| format!("TQCHECK_CASES={text}: {e}"))?,
        Err(_) => 48,
    };
    let summary = runner::run(property, device, cases, 1, |_| {});
    if let Some(broken) = &summary.broken {
        return Err(format!(
            "{}\n\nshrunk to:\n\n{}",
            broken.violation,
            broken.shrunk.to_toml()
        )
        .into());
    }
    if !summary.holds() {
        return Err(format!("no case was checked: {:?}", summary.not_checked).into());
    }
    Ok(())
}
