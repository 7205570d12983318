//! What a property says about a case: it holds, it is violated, or it was not checked.

/// What was compared, how much was free, and how close the results came to their bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evidence {
    /// Values compared.
    pub compared: u64,
    /// Discrete values (codes, signs, norms) judged, and those of them with more than one right
    /// answer.
    pub discrete: u64,
    /// Discrete values for which more than one answer is right.
    pub free: u64,
    /// Largest observed error as a share of its bound.
    pub largest: f64,
    /// Errors of floats beside the f32 twin's.
    pub drift: Drift,
}

/// Squared errors of a kernel and of the f32 twin against the same f64 reference, each as a share of
/// its bound.
///
/// A derived bound has to hold for every lawful device, so it is wide; a kernel that is a little wrong may
/// stay inside. The twin's own errors say how large honest f32 errors are on the same data: an RMS above
/// twice theirs is drift.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Drift {
    /// Σ (error / bound)² of the kernel.
    pub kernel: f64,
    /// Σ (error / bound)² of the twin.
    pub twin: f64,
    /// Values compared.
    pub n: u64,
}

impl Drift {
    /// Where both are this far below their bounds, on average, their ratio says nothing: the results are exact, or
    /// nearly so. The bounds are multiples of the unit roundoff, and so is this floor.
    pub const FLOOR: f64 = 1e-3;
    /// Ratio of RMS errors that counts as drift.
    pub const LIMIT: f64 = 2.0;
    /// Fewer values than this are chance.
    pub const LEAST: u64 = 2000;

    /// RMS error of the kernel over that of the twin, or the floor.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        let rms = |sum: f64| (sum / self.n.max(1) as f64).sqrt();
        rms(self.kernel) / rms(self.twin).max(Self::FLOOR)
    }

    /// True if the kernel's errors are larger than the twin's explain.
    #[must_use]
    pub fn is_breach(&self) -> bool {
        // Written so that a NaN is one.
        self.n >= Self::LEAST
            && !matches!(self.ratio().partial_cmp(&Self::LIMIT), Some(o) if o.is_le())
    }

    /// Bounds below this are made of what may be flushed to zero. A device that does flush is further off there
    /// than the twin, which does not, and is right all the same.
    pub const FLUSHED: f64 = 1e-33;

    /// Adds one value's errors. A twin that overflowed on the way, where the kernel did not, is no measure.
    pub fn note(&mut self, kernel: f64, twin: f64, bound: f64) {
        if bound > Self::FLUSHED && twin.is_finite() {
            self.kernel += (kernel / bound).powi(2);
            self.twin += (twin / bound).powi(2);
            self.n += 1;
        }
    }
}

impl Evidence {
    /// Adds what another comparison saw.
    pub fn absorb(&mut self, other: &Self) {
        self.compared += other.compared;
        self.discrete += other.discrete;
        self.free += other.free;
        self.largest = self.largest.max(other.largest);
        self.drift.kernel += other.drift.kernel;
        self.drift.twin += other.drift.twin;
        self.drift.n += other.drift.n;
    }

    /// Notes one comparison that used this share of its bound.
    pub fn note(&mut self, share: f64) {
        self.compared += 1;
        self.largest = self.largest.max(share);
    }
}

/// A result outside what is right, with the rule that says so.
#[derive(Clone, Debug, PartialEq)]
pub struct Violation {
    /// Name of the rule that was broken.
    pub rule: &'static str,
    /// Where: row, head, element.
    pub place: String,
    /// What was found and what was expected.
    pub detail: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}: {}", self.rule, self.place, self.detail)
    }
}

/// Why a check did not end with evidence.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// A violation.
    Violated(Violation),
    /// The case asks for something that no rule bounds, or that the adapter cannot hold.
    NotChecked(String),
}

impl From<Violation> for Failure {
    fn from(violation: Violation) -> Self {
        Self::Violated(violation)
    }
}

impl From<turboquant_wgpu::Error> for Failure {
    /// A case is built to be valid: an error of the library is a violation, but for a limit of the
    /// adapter, which is no fault of anyone's.
    fn from(error: turboquant_wgpu::Error) -> Self {
        match &error {
            turboquant_wgpu::Error::TooLarge { .. } => Self::NotChecked(error.to_string()),
            _ => Self::Violated(Violation {
                rule: "valid calls succeed",
                place: "library".to_owned(),
                detail: error.to_string(),
            }),
        }
    }
}

impl From<crate::inputs::InputError> for Failure {
    fn from(error: crate::inputs::InputError) -> Self {
        Self::NotChecked(format!("inputs: {error}"))
    }
}

/// What a property returns.
pub type Outcome = Result<Evidence, Failure>;

/// Compares one result with its reference and bound.
///
/// # Errors
/// The violation, if the result is not finite or further off than the bound.
pub fn within(
    rule: &'static str,
    evidence: &mut Evidence,
    found: f32,
    expected: f64,
    bound: f64,
    place: impl FnOnce() -> String,
) -> Result<(), Violation> {
    let error = (f64::from(found) - expected).abs();
    // Written so that a NaN fails.
    if found.is_finite() && error <= bound {
        evidence.note(if bound > 0.0 { error / bound } else { 0.0 });
        return Ok(());
    }
    Err(Violation {
        rule,
        place: place(),
        detail: format!(
            "found {found:e} (bits {:#010x}), expected {expected:e} ± {bound:.3e}, off by {error:.3e}",
            found.to_bits()
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_above_twice_the_twins_are_drift() {
        let drift = |kernel: f64, twin: f64, n: u64| {
            let mut drift = Drift::default();
            for _ in 0..n {
                drift.note(kernel, twin, 1.0);
            }
            drift
        };
        assert!(!drift(0.019, 0.01, 5000).is_breach());
        assert!(drift(0.021, 0.01, 5000).is_breach());
        assert!(!drift(0.021, 0.01, 100).is_breach(), "too few to tell");
        assert!(!drift(0.0019, 0.0, 5000).is_breach(), "below the floor");
        assert!(drift(0.0021, 0.0, 5000).is_breach());
        assert!(drift(f64::NAN, 0.01, 5000).is_breach());
        let mut flushed = Drift::default();
        flushed.note(1e-38, 0.0, 2e-38);
        flushed.note(1e-3, f64::NAN, 1.0);
        flushed.note(1e-3, f64::INFINITY, 1.0);
        assert_eq!(
            flushed.n, 0,
            "neither flushing to zero nor the twin's overflow is drift"
        );
    }

    #[test]
    fn a_result_that_is_no_number_is_a_violation() {
        for bad in [f32::NAN, f32::INFINITY, 2.0] {
            let mut evidence = Evidence::default();
            assert!(within("r", &mut evidence, bad, 1.0, 0.5, String::new).is_err());
            assert_eq!(evidence, Evidence::default());
        }
        let mut evidence = Evidence::default();
        within("r", &mut evidence, 1.25, 1.0, 0.5, String::new).expect("inside");
        assert_eq!(evidence.largest, 0.5);
        assert!(within("r", &mut evidence, 1.0, f64::NAN, 0.5, String::new).is_err());
        assert!(within("r", &mut evidence, 1.0, 1.0, f64::NAN, String::new).is_err());
    }
}
