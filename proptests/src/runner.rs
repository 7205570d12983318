//! Draws cases, checks them, shrinks what fails, and counts what was seen.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::adapters::Device;
use crate::case::Case;
use crate::properties::Property;
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

    /// True if something was checked and nothing is violated.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.broken.is_none() && self.held > 0
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

/// Runs `cases` cases of a property on a device, fewer of a costly one ([`Property::cases`]); ends at the first
/// violation, which is shrunk.
///
/// `progress` is told after each case.
pub fn run(
    property: &Property,
    device: &Device,
    cases: u64,
    seed: u64,
    mut progress: impl FnMut(&Summary),
) -> Summary {
    let start = Instant::now();
    let mut summary = Summary::default();
    let in_flight = match open(property, device) {
        Ok(in_flight) => in_flight,
        Err(failure) => {
            summary.not_checked.insert(format!("{failure:?}"), 1);
            return summary;
        }
    };
    let strategy = (property.strategy)();
    let mut runner = TestRunner::new_with_rng(Config::default(), rng(property.name, seed));
    for index in 0..property.cases(cases) {
        let mut tree = match strategy.new_tree(&mut runner) {
            Ok(tree) => tree,
            Err(reason) => {
                *summary
                    .not_checked
                    .entry(format!("nothing drawn: {reason}"))
                    .or_default() += 1;
                continue;
            }
        };
        let case = tree.current();
        match check(property, device, &case, &in_flight) {
            Ok(evidence) => {
                summary.held += 1;
                summary.evidence.absorb(&evidence);
            }
            Err(Failure::NotChecked(reason)) => {
                *summary.not_checked.entry(reason).or_default() += 1;
            }
            Err(Failure::Violated(violation)) => {
                tracing::warn!(property = property.name, case = %case.to_toml(), "{violation}");
                summary.broken = Some(shrink(
                    property,
                    device,
                    tree.as_mut(),
                    index,
                    case,
                    violation,
                    &in_flight,
                ));
            }
        }
        summary.elapsed = start.elapsed();
        progress(&summary);
        if summary.broken.is_some() {
            break;
        }
    }
    summary
}

/// Makes a violating case smaller for as long as it violates something.
fn shrink(
    property: &Property,
    device: &Device,
    tree: &mut dyn ValueTree<Value = Case>,
    index: u64,
    drawn: Case,
    drawn_violation: Violation,
    in_flight: &InFlight,
) -> Broken {
    let start = Instant::now();
    let (mut shrunk, mut violation) = (drawn.clone(), drawn_violation.clone());
    let mut shrink_checks = 0;
    let mut moved = tree.simplify();
    while moved && shrink_checks < SHRINK_CHECKS && start.elapsed() < SHRINK_TIME {
        let case = tree.current();
        shrink_checks += 1;
        moved = match check(property, device, &case, in_flight) {
            Err(Failure::Violated(found)) => {
                (shrunk, violation) = (case, found);
                tree.simplify()
            }
            _ => tree.complicate(),
        };
    }
    Broken {
        index,
        drawn,
        drawn_violation,
        shrunk,
        violation,
        shrink_checks,
    }
}

/// A generator for one property: the same seed draws the same cases on every adapter.
fn rng(property: &str, seed: u64) -> TestRng {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    for (i, b) in property.bytes().enumerate() {
        bytes[8 + i % 24] ^= b;
    }
    TestRng::from_seed(RngAlgorithm::ChaCha, &bytes)
}
