//! Every property on every adapter, each a test of its own name; adapters that are absent are listed.
//!
//! `TQCHECK_REQUIRE=vulkan,gl` makes the absence of those backends a failure. `TQCHECK_CASES` sets the number of
//! cases of each property.

use std::path::Path;

use libtest_mimic::{Arguments, Failed, Trial};
use tqcheck::commands::{End, golden, trace};
use tqcheck::probes::Probe;
use tqcheck::properties::{self, Property};
use tqcheck::regressions::Judgement;
use tqcheck::{adapters, regressions, runner};

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
    // A saved case that no longer parses is a failure of its own, not a case that is skipped.
    let saved = regressions::load(&[]);
    let broken = saved.as_ref().err().map(|e| format!("{e:#}"));
    trials.push(Trial::test(
        "replay::saved_cases_parse",
        move || match broken {
            None => Ok(()),
            Some(error) => Err(error.into()),
        },
    ));
    let saved = saved.unwrap_or_default();
    for adapter in adapters::all() {
        let label = adapter.label();
        for (path, saved, property) in &saved {
            let property: &'static Property = property;
            let name = path.strip_prefix(regressions::dir()).unwrap_or(path);
            let name = format!("replay::{}::{label}", name.display());
            let case = saved.case.clone();
            trials.push(Trial::test(name, move || replay(property, &case, adapter)));
        }
        for property in properties::ALL {
            let name = format!("{}::{label}", property.name);
            let trial = Trial::test(name, move || check(property, adapter));
            // What this machine cannot check is listed, neither passed nor failed.
            trials.push(match property.unavailable() {
                None => trial,
                Some(_) => trial.with_kind("not checked").with_ignored_flag(true),
            });
        }
        trials.push(Trial::test(format!("probes::{label}"), move || {
            assumptions(adapter)
        }));
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

/// Fails for primitives outside their limits, of those that some property rests on.
fn assumptions(adapter: &adapters::Adapter) -> Result<(), Failed> {
    let probes = adapter.device()?.probes();
    let broken: Vec<String> = probes
        .broken()
        .filter(|probe| !probe.carries().is_empty())
        .map(Probe::describe)
        .collect();
    if broken.is_empty() && !probes.list.is_empty() {
        return Ok(());
    }
    Err(format!("the adapter's defects: {}", broken.join("\n")).into())
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
    let plan = runner::Plan {
        cases,
        seed: 1,
        ..runner::Plan::default()
    };
    let summary = runner::run(property, device, &plan, |_| {});
    let failure = match (&summary.broken, summary.failure()) {
        (Some(broken), Some(failure)) => {
            let saved = regressions::save(&regressions::dir(), device, 1, broken);
            let case = broken.shrunk.to_toml();
            Some(format!(
                "{failure}\n\nshrunk to:\n\n{case}\nsaved: {saved:?}"
            ))
        }
        (_, failure) => failure,
    };
    let expected = regressions::expected(&regressions::dir()).map_err(|e| format!("{e:#}"))?;
    let today = regressions::today();
    let failure = failure.as_deref();
    match regressions::judge(
        &expected,
        &device.label,
        &device.driver,
        property.name,
        failure,
        today,
    ) {
        Judgement::Pass | Judgement::ExpectedFailure(_) => Ok(()),
        Judgement::Fail(why) => Err(why.into()),
    }
}

/// Checks a saved case again.
fn replay(
    property: &Property,
    case: &tqcheck::case::Case,
    adapter: &adapters::Adapter,
) -> Result<(), Failed> {
    match runner::check_once(property, adapter.device()?, case) {
        Ok(_) => Ok(()),
        Err(failure) => Err(format!("{failure:?}").into()),
    }
}
