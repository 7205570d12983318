//! proptest's seed files: it says nothing when one is missing, so that nobody would notice if failures were
//! no longer kept. A canary that always fails has to leave its seed behind, and the seed has to be replayed
//! when no new case is drawn.

use std::sync::atomic::{AtomicU64, Ordering};

use proptest::strategy::BoxedStrategy;
use tqcheck::adapters::{self, Device};
use tqcheck::case::Case;
use tqcheck::generators;
use tqcheck::properties::{Property, Stage};
use tqcheck::runner::{Plan, run_with_seeds};
use tqcheck::verdict::{Evidence, Failure, Outcome, Violation};

static CHECKED: AtomicU64 = AtomicU64::new(0);

fn canary(_: &Device, case: &Case) -> Outcome {
    CHECKED.fetch_add(1, Ordering::SeqCst);
    if case.rows < 5 {
        return Ok(Evidence::default());
    }
    Err(Failure::Violated(Violation {
        rule: "canary",
        place: String::new(),
        detail: String::new(),
    }))
}

fn plan(cases: u64, seed: u64) -> Plan {
    Plan {
        cases,
        seed,
        ..Plan::default()
    }
}

fn strategy() -> BoxedStrategy<Case> {
    generators::encode_keys::strategy()
}

#[test]
fn a_canary_is_kept_and_replayed_from_another_directory() {
    let property = Property {
        name: "canary",
        about: "never holds",
        strategy,
        check: canary,
        cost: 1,
        stages: &[Stage::Encode],
    };
    let Some(device) = adapters::all().iter().find_map(|a| a.device().ok()) else {
        panic!("no adapter answers: nothing was checked");
    };
    let dir = tempfile::tempdir().expect("a directory");
    let seeds = dir.path().join("below").join("canary.txt");
    let summary = run_with_seeds(&property, device, &plan(100, 7), &seeds, |_| {});
    let broken = summary.broken.expect("the canary fails");
    assert_eq!(broken.shrunk.rows, 5, "shrunk to the smallest that fails");
    assert!(seeds.is_file(), "proptest kept its seed");

    std::env::set_current_dir(dir.path()).expect("another working directory");
    CHECKED.store(0, Ordering::SeqCst);
    let replayed = run_with_seeds(&property, device, &plan(0, 8), &seeds, |_| {});
    assert!(replayed.broken.is_some(), "the seed was replayed");
    assert!(CHECKED.load(Ordering::SeqCst) > 0);
}
