//! The first step of both encoders: a vector's norm, and its rotated unit vector.

use turboquant_wgpu::{Codebook, Rotation};

use crate::arithmetic::{Arithmetic, SMALLEST_NORMAL, compose, inv_sqrt_error, l2, rht, spread};

/// Below this norm a vector counts as zero. The kernels compare in f32.
pub const VANISHING: f64 = 1e-12_f32 as f64;

/// From this norm on, f16 saturates: halfway between 65504 and 65536.
pub const SATURATION: f64 = 65520.0;

/// The rotated unit vector y = RHT(x/‖x‖; polar) with the errors that a correct f32
/// implementation may have made.
///
/// With s = x·2^k (exact), S = Σs² and v = 1/√S, the kernel has t_j = s_j·v and y = RHT(t). The
/// error of v is common to all elements: it moves y along itself, by ε_v·|y_i|. The product's
/// rounding and the log₂ d + 1 roundings of the transform (its stages and the factor 1/√d) are
/// independent: each element is off by at most γ_{log₂ d + 2}·Σ|t|/√d, and, since every
/// stage is orthogonal up to scale, the whole vector by at most γ_{log₂ d + 2}·‖t‖₂.
#[derive(Clone, Debug)]
pub struct Unit {
    /// ‖x‖₂.
    pub norm: f64,
    /// Absolute error of the norm.
    pub norm_error: f64,
    /// y.
    pub y: Vec<f64>,
    /// Bound on the error of each y_i.
    pub y_error: Vec<f64>,
    /// Relative error common to all of y.
    pub common: f64,
    /// Bound on the Euclidean norm of y's other errors.
    pub independent_l2: f64,
}

/// What becomes of a vector.
#[derive(Clone, Debug)]
pub enum Classified {
    /// It holds a NaN or an infinity: the zero record and nothing else.
    NonFinite,
    /// Its norm is certainly below the threshold: the zero record and nothing else.
    Vanishing,
    /// Its norm is so near the threshold that both the zero record and an encoding are right.
    NearVanishing(Unit),
    /// It has to be encoded.
    Unit(Unit),
}

/// Classifies a vector and rotates it.
#[must_use]
pub fn unit(arithmetic: Arithmetic, rotation: &Rotation, x: &[f32]) -> Classified {
    if x.iter().any(|v| !v.is_finite()) {
        return Classified::NonFinite;
    }
    let head_dim = rotation.head_dim();
    let d = head_dim.get() as f64;
    let exact: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    let norm = l2(&exact);
    // A subnormal element may be flushed: that moves the vector by up to √d·2^-126.
    let flushed = d.sqrt() * SMALLEST_NORMAL;
    let norm_error = arithmetic.norm(head_dim) * norm + flushed;
    if norm + norm_error < VANISHING {
        return Classified::Vanishing;
    }

    let t: Vec<f64> = exact.iter().map(|v| v / norm).collect();
    let y = rht(&rotation.polar, &t);
    let common = compose(&[arithmetic.inverse_norm(head_dim), inv_sqrt_error(head_dim)]);
    let independent = arithmetic.transform(head_dim, 2) * (1.0 + common);
    // Flushed inputs, and partial sums below the normal range, of vectors scaled to norm ≥ 1.
    let flush = flushed / norm + d * SMALLEST_NORMAL;
    let element = independent * spread(&t) + flush;
    let y_error = y.iter().map(|v| common * v.abs() + element).collect();
    let unit = Unit {
        norm,
        norm_error,
        y,
        y_error,
        common,
        independent_l2: independent + flush * d.sqrt(),
    };
    if norm - norm_error < VANISHING {
        Classified::NearVanishing(unit)
    } else {
        Classified::Unit(unit)
    }
}

impl Unit {
    /// True if more than one code is right for element i.
    #[must_use]
    pub fn code_is_free(&self, book: &Codebook, i: usize) -> bool {
        book.boundaries
            .iter()
            .any(|&b| (self.y[i] - f64::from(b)).abs() <= self.y_error[i])
    }

    /// Whether a correct implementation counts the norm as saturated: `None` if it may go either way.
    #[must_use]
    pub fn saturates(&self) -> Option<bool> {
        if self.norm - self.norm_error >= SATURATION {
            Some(true)
        } else if self.norm + self.norm_error < SATURATION {
            Some(false)
        } else {
            None
        }
    }
}
