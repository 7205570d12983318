//! Draws cases, checks them, shrinks what fails, and counts what was seen.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io};

use proptest::sample::select;
use proptest::strategy::Strategy;
use proptest::test_runner::{
    Config, FileFailurePersistence, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner,
};

use turboquant_wgpu::KernelVariant;

use crate::adapters::Device;
use crate::case::Case;
use crate::inputs::Family;
use crate::properties::Property;
use crate::regressions;
use crate::verdict::{Evidence, Failure, Violation};

/// Shrinking ends after this many checks or this long, whichever comes first.
const SHRINK_CHECKS: u32 = 2000;
const SHRINK_TIME: Duration = Duration::from_secs(60);

/// What a run of one property on one adapter saw.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Cases that hold.
    pub held: u64,
    /// Cases not checked, by reason.
    pub not_checked: std::collections::BTreeMap<String, u64>,
    /// What was compared.
    pub evidence: Evidence,
    /// Time taken.
    pub elapsed: Duration,
    /// The first violation, if any; the run ends there.
    pub broken: Option<Broken>,
}

/// A violation, as found and as shrunk.
#[derive(Clone, Debug)]
pub struct Broken {
    /// Number of the case in the run.
    pub index: u64,
    /// The case that was drawn.
    pub drawn: Case,
    /// What it broke.
    pub drawn_violation: Violation,
    /// The smallest case found that still breaks something.
    pub shrunk: Case,
    /// What that breaks.
    pub violation: Violation,
    /// Checks that shrinking took.
    pub shrink_checks: u32,
}

impl Summary {
    /// Cases drawn.
    #[must_use]
    pub fn cases(&self) -> u64 {
        self.held + self.not_checked.values().sum::<u64>() + u64::from(self.broken.is_some())
    }

    /// What went wrong, if anything: a violation, drift, or that nothing was checked.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        let drift = &self.evidence.drift;
        if let Some(broken) = &self.broken {
            Some(broken.violation.to_string())
        } else if self.held == 0 {
            Some(format!("no case was checked: {:?}", self.not_checked))
        } else if drift.is_breach() {
            Some(format!(
                "drift: RMS error {:.2} times the f32 twin's over {} values",
                drift.ratio(),
                drift.n
            ))
        } else {
            None
        }
    }

    /// True if something was checked and nothing went wrong.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.failure().is_none()
    }

    /// Cases a second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.cases() as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Where cases are written before they are dispatched, so that a hang, a lost device or a killed process leaves
/// the case behind.
#[must_use]
pub fn in_flight_dir() -> PathBuf {
    match std::env::var_os("TQCHECK_STATE") {
        Some(dir) => PathBuf::from(dir),
        None => std::env::temp_dir().join("tqcheck"),
    }
}

/// The file that holds a case while it is checked; removed when the check has ended.
struct InFlight {
    path: PathBuf,
}

impl InFlight {
    fn new(property: &str, device: &str) -> io::Result<Self> {
        let dir = in_flight_dir();
        fs::create_dir_all(&dir)?;
        let device: String = device
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .collect();
        let name = format!("in-flight-{}-{property}-{device}.toml", std::process::id());
        Ok(Self {
            path: dir.join(name),
        })
    }

    fn write(&self, case: &Case) -> io::Result<()> {
        fs::write(&self.path, case.to_toml())
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // It may never have been written.
        let _ = fs::remove_file(&self.path);
    }
}

/// Checks one case: it is on disk before anything is dispatched.
///
/// # Errors
/// A violation, a case that is not checked, or a disk that does not take the case (a violation of the
/// harness's own promise).
fn check(
    property: &Property,
    device: &Device,
    case: &Case,
    in_flight: &InFlight,
) -> Result<Evidence, Failure> {
    in_flight.write(case).map_err(|e| {
        Failure::Violated(Violation {
            rule: "a case is on disk before its dispatch",
            place: in_flight.path().display().to_string(),
            detail: e.to_string(),
        })
    })?;
    let device = device.of_variant(case.variant, case.head_dim()?);
    (property.check)(device, case)
}

/// Checks a single case, outside of a run.
///
/// # Errors
/// As [`Property::check`].
pub fn check_once(property: &Property, device: &Device, case: &Case) -> Result<Evidence, Failure> {
    let in_flight = open(property, device)?;
    check(property, device, case, &in_flight)
}

fn open(property: &Property, device: &Device) -> Result<InFlight, Failure> {
    InFlight::new(property.name, &device.label).map_err(|e| {
        Failure::Violated(Violation {
            rule: "a case is on disk before its dispatch",
            place: in_flight_dir().display().to_string(),
            detail: e.to_string(),
        })
    })
}

/// Why a case is not begun.
const OVER: &str = "the run is over";

/// What a run draws.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Number of cases.
    pub cases: u64,
    /// Seed of the cases: the same seed draws the same cases on every adapter.
    pub seed: u64,
    /// Draw data of these families alone.
    pub families: Option<Vec<Family>>,
    /// Run this variant of the kernels alone; by default each that the device can run.
    pub variant: Option<KernelVariant>,
    /// Which part of the cases.
    pub shard: Shard,
    /// Begin no case after this, but for the first.
    pub deadline: Option<Instant>,
    /// Begin no case once this is set.
    pub stop: Option<&'static AtomicBool>,
}

impl Plan {
    fn is_stopped(&self) -> bool {
        self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed))
    }

    /// Whether the run ends, after so many cases.
    fn is_over(&self, cases: u64) -> bool {
        let late = self.deadline.is_some_and(|d| Instant::now() >= d);
        self.is_stopped() || (late && cases > 0)
    }
}

/// A part of a run, `index` of `of`, that draws cases of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Shard {
    /// From 1.
    pub index: u32,
    /// Number of parts.
    pub of: u32,
}

impl Default for Shard {
    fn default() -> Self {
        Self { index: 1, of: 1 }
    }
}

impl Shard {
    /// Its share of so many cases, rounded up.
    #[must_use]
    pub fn cases(self, all: u64) -> u64 {
        all.div_ceil(u64::from(self.of))
    }
}

impl std::str::FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/');
        let number = |text: &str| text.parse::<u32>().ok();
        match parts.and_then(|(index, of)| Some((number(index)?, number(of)?))) {
            Some((index, of)) if (1..=of).contains(&index) => Ok(Self { index, of }),
            _ => Err("expected I/N with I from 1 to N, as in 2/8".to_owned()),
        }
    }
}

/// Runs a plan's cases of a property on a device, fewer of a costly one ([`Property::cases`]); ends at the first
/// violation, which is shrunk.
///
/// Seeds under `regressions/proptest/` come first. `progress` is told after each case.
pub fn run(
    property: &Property,
    device: &Device,
    plan: &Plan,
    progress: impl Fn(&Summary),
) -> Summary {
    let seeds = regressions::dir()
        .join("proptest")
        .join(format!("{}.txt", property.name));
    run_with_seeds(property, device, plan, &seeds, progress)
}

/// What a run has seen so far; proptest's callback is a plain `Fn`.
struct Seen {
    summary: Summary,
    drawn: Option<(Case, Violation)>,
    violation: Option<Violation>,
    shrink_checks: u32,
}

/// [`run`], with the file of proptest's seeds.
pub fn run_with_seeds(
    property: &Property,
    device: &Device,
    plan: &Plan,
    seeds: &Path,
    progress: impl Fn(&Summary),
) -> Summary {
    let start = Instant::now();
    let in_flight = match open(property, device) {
        Ok(in_flight) => in_flight,
        Err(failure) => {
            let mut summary = Summary::default();
            summary.not_checked.insert(format!("{failure:?}"), 1);
            return summary;
        }
    };
    let seen = RefCell::new(Seen {
        summary: Summary::default(),
        drawn: None,
        violation: None,
        shrink_checks: 0,
    });
    let families = plan.families.clone();
    let variants = match plan.variant {
        Some(variant) => vec![variant],
        None => device.variants(),
    };
    let strategy = ((property.strategy)(), select(variants)).prop_map(move |(case, variant)| {
        let case = match &families {
            Some(families) => case.with_families(families),
            None => case,
        };
        Case {
            variant: Some(variant),
            ..case
        }
    });
    let result = runner(property, plan, seeds).run(&strategy, |case| {
        {
            let seen = seen.borrow();
            let shrinking = seen.drawn.is_some();
            // A simpler case that is not checked any more is no failure: shrinking ends with what it has.
            if shrinking && plan.is_stopped() {
                return Ok(());
            }
            if !shrinking && plan.is_over(seen.summary.cases()) {
                return Err(TestCaseError::reject(OVER));
            }
        }
        let outcome = check(property, device, &case, &in_flight);
        let mut seen = seen.borrow_mut();
        let shrinking = seen.drawn.is_some();
        seen.shrink_checks += u32::from(shrinking);
        match outcome {
            Err(Failure::Violated(violation)) => {
                let message = violation.to_string();
                if !shrinking {
                    // Shrinking takes time: the case as drawn is told first.
                    tracing::warn!(property = property.name, case = %case.to_toml(), "{message}");
                    seen.drawn = Some((case, violation.clone()));
                }
                seen.violation = Some(violation);
                return Err(TestCaseError::fail(message));
            }
            _ if shrinking => {}
            Ok(evidence) => {
                seen.summary.held += 1;
                seen.summary.evidence.absorb(&evidence);
            }
            Err(Failure::NotChecked(reason)) => {
                *seen.summary.not_checked.entry(reason).or_default() += 1;
            }
        }
        if !shrinking {
            seen.summary.elapsed = start.elapsed();
            progress(&seen.summary);
        }
        Ok(())
    });
    let Seen {
        mut summary,
        drawn,
        violation,
        shrink_checks,
    } = seen.into_inner();
    match result {
        Ok(()) => {}
        Err(TestError::Fail(_, shrunk)) => {
            if let (Some((drawn, drawn_violation)), Some(violation)) = (drawn, violation) {
                summary.broken = Some(Broken {
                    index: summary.held + summary.not_checked.values().sum::<u64>(),
                    drawn,
                    drawn_violation,
                    shrunk,
                    violation,
                    shrink_checks,
                });
            }
        }
        Err(TestError::Abort(_)) if plan.is_over(summary.cases()) => {}
        Err(TestError::Abort(reason)) => {
            let reason = format!("proptest gave up: {reason}");
            *summary.not_checked.entry(reason).or_default() += 1;
        }
    }
    summary.elapsed = start.elapsed();
    summary
}

/// A runner of one property. Every field that matters is
/// set, since proptest lets environment variables override its defaults.
fn runner(property: &Property, plan: &Plan, seeds: &Path) -> TestRunner {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&plan.seed.to_le_bytes());
    for (i, b) in property.name.bytes().enumerate() {
        bytes[8 + i % 24] ^= b;
    }
    // The first part's are the seeds of a run that is not parted.
    for (byte, b) in bytes[28..]
        .iter_mut()
        .zip((plan.shard.index - 1).to_le_bytes())
    {
        *byte ^= b;
    }
    let config = Config {
        cases: u32::try_from(plan.shard.cases(property.cases(plan.cases))).unwrap_or(u32::MAX),
        // Rejecting a case is how a run is ended early; nothing else does it.
        max_global_rejects: 0,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(leak(seeds)))),
        max_shrink_iters: SHRINK_CHECKS,
        max_shrink_time: SHRINK_TIME.as_millis() as u32,
        verbose: 0,
        ..Config::default()
    };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

/// proptest wants a path that lives for ever. There is one for each property, so each is kept once.
fn leak(path: &Path) -> &'static str {
    static PATHS: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let text = path.to_string_lossy();
    let mut paths = PATHS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = paths.get(text.as_ref()) {
        return known;
    }
    let kept: &'static str = Box::leak(text.into_owned().into_boxed_str());
    paths.insert(kept);
    kept
}
