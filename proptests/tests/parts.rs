//! Runs that are parted, timed or stopped.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tqcheck::adapters::{self, Device};
use tqcheck::case::Case;
use tqcheck::generators;
use tqcheck::properties::{Property, Stage};
use tqcheck::runner::{Plan, Summary, run_with_seeds};
use tqcheck::verdict::{Evidence, Outcome};

static DRAWN: Mutex<Vec<String>> = Mutex::new(Vec::new());
static STOP: AtomicBool = AtomicBool::new(false);

fn note(_: &Device, case: &Case) -> Outcome {
    let mut drawn = DRAWN.lock().unwrap_or_else(PoisonError::into_inner);
    drawn.push(case.to_toml());
    // As a user's Ctrl-C in the third case of a run that has one.
    STOP.store(drawn.len() == 3, Ordering::Relaxed);
    Ok(Evidence::default())
}

fn run(plan: &Plan) -> (Summary, Vec<String>) {
    let property = Property {
        name: "noted",
        about: "holds",
        strategy: generators::encode_keys::strategy,
        check: note,
        cost: 1,
        stages: &[Stage::Encode],
    };
    let Some(device) = adapters::all().iter().find_map(|a| a.device().ok()) else {
        panic!("no adapter answers: nothing was checked");
    };
    let dir = tempfile::tempdir().expect("a directory");
    let seeds = dir.path().join("noted.txt");
    let summary = run_with_seeds(&property, device, plan, &seeds, |_| {});
    let mut drawn = DRAWN.lock().unwrap_or_else(PoisonError::into_inner);
    (summary, std::mem::take(&mut *drawn))
}

/// One test, since what was drawn is noted in one place.
#[test]
fn parts_are_disjoint_and_runs_end_when_told() {
    let plan = |shard: &str| Plan {
        cases: 120,
        shard: shard.parse().expect("a part"),
        ..Plan::default()
    };
    let (_, whole) = run(&plan("1/1"));
    assert_eq!(whole.len(), 120);
    assert_eq!(run(&plan("1/1")).1, whole, "the same seed draws the same");
    let mut seen = BTreeSet::new();
    for shard in ["1/4", "2/4", "3/4", "4/4"] {
        let (summary, drawn) = run(&plan(shard));
        assert_eq!(summary.held, 30, "a quarter each");
        for case in drawn {
            assert!(seen.insert(case), "drawn twice, again by {shard}");
        }
    }

    // Late from the start: the first case is checked all the same, so that something is.
    let late = Plan {
        cases: u64::MAX,
        deadline: Some(Instant::now()),
        ..Plan::default()
    };
    let (summary, drawn) = run(&late);
    assert_eq!((drawn.len(), summary.failure()), (1, None));
    let start = Instant::now();
    let timed = Plan {
        deadline: Some(start + Duration::from_millis(300)),
        ..late
    };
    let (summary, drawn) = run(&timed);
    assert!(drawn.len() > 1 && summary.holds());
    assert!((0.3..10.0).contains(&start.elapsed().as_secs_f64()));

    let stopped = Plan {
        cases: 120,
        stop: Some(&STOP),
        ..Plan::default()
    };
    STOP.store(false, Ordering::Relaxed);
    let (summary, drawn) = run(&stopped);
    assert_eq!((summary.held, drawn.len()), (3, 3));
    assert!(summary.holds() && summary.not_checked.is_empty());
}

#[test]
fn what_is_no_part_is_refused() {
    for bad in ["", "1", "0/4", "5/4", "1/0", "a/b", "-1/4", "1/4/2"] {
        let parsed = bad.parse::<tqcheck::runner::Shard>();
        assert!(parsed.is_err_and(|e| e.contains("I/N")), "{bad}");
    }
}
