//! The families of tensors: what each is for, and how a vector of it is made.

use half::f16;
use serde::{Deserialize, Serialize};
use turboquant_wgpu::codebook::Codebook;
use turboquant_wgpu::{HeadDim, Rotation, Signs};

use core::ops::RangeInclusive;

use super::InputError;
use super::draw::{Draw, NORMAL_LIMIT, exp2, set_norm};
use super::real::{self, Role};

/// One list gives the enum, its names in text, and [`Family::ALL`], so that none can be forgotten.
macro_rules! families {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// A kind of tensor. Each exists for a fault that the others would miss.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Family {
            $($(#[$doc])* #[serde(rename = $name)] $variant,)*
        }

        impl Family {
            /// Every family, in the order of declaration.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// The name that saved cases use.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

families! {
    /// Uniform in [−1, 1): the plain case, of bounded scores.
    Uniform = "uniform",
    /// Standard normal: rotated coordinates distributed as the quantiser assumes.
    Normal = "normal",
    /// Normal, but one channel in 32 is 20–100 times the rest, the same channels in every row of a
    /// head: what real keys look like, and what the rotation exists for.
    Outlier = "outlier",
    /// One element is not zero: all rotated coordinates have one magnitude, close to the outer
    /// boundary, and their signs spell out a row of the Hadamard matrix.
    OneHot = "one-hot",
    /// From 2 to d/8 elements are not zero: few terms, many equal sums.
    KSparse = "k-sparse",
    /// All elements equal: rotated, a vector shows the sign vector's own spectrum.
    Constant = "constant",
    /// A row of the Hadamard matrix: finds a transform in another order, such as sequency.
    Walsh = "walsh",
    /// A Walsh row times the polar signs: the rotation concentrates everything in one coordinate,
    /// and the others are sums that cancel exactly, that is on the middle boundary.
    SignedWalsh = "signed-walsh",
    /// All vectors of the tensor equal: equal scores, and an output that equals every value.
    EqualVectors = "equal-vectors",
    /// Every (row, head, element) differs, in magnitudes of 0.25 to 4: a wrong index reads a wrong
    /// number. Heads from 64 on repeat, and so do rows from 2^20/d on.
    Distinct = "distinct",
    /// ±1 alone: all sums are small integers, so layouts can be compared exactly; and many rotated
    /// coordinates are 0.
    PlusMinusOne = "plus-minus-one",
    /// In even rows the rotated coordinates are positive in elements 0–31 and negative in 32–63,
    /// and so on in turn, and in odd rows reversed; the sketch's coordinates have the same signs, or
    /// all the opposite ones. A ballot of 64 lanes that loses its upper half loses it here for
    /// certain.
    HalfSigns = "half-signs",
    /// 0, ±1, ±2, ±4: butterflies of any order, fused or not, have no rounding, so results are
    /// compared bit for bit up to the factor 1/√d, itself exact for d = 64 and 256.
    Exact = "exact",
    /// About half of the rotated coordinates lie 0, 1 or 2 ulps from a decision boundary: the codes
    /// that a rounding error of the transform decides.
    BoundaryHugging = "boundary-hugging",
    /// About half of the residual's rotated coordinates are 0 but for rounding: the sign bits that
    /// a rounding error decides. The codes stay clear of their boundaries.
    ResidualHugging = "residual-hugging",
    /// The norm is a few ulps from a midpoint between two f16s, normal or subnormal, from the
    /// largest f16, or from 65520, where rounding starts to overflow.
    NormMidpoint = "norm-midpoint",
    /// Norms of 1e-30, 1e-13, either side of the 1e-12 below which a vector counts as zero, 1e-9
    /// (zero in f16, codes not), 2^-20 and throughout the f16 subnormals.
    Tiny = "tiny",
    /// f32 subnormals and elements of 1e-23, whose squares are lost, alone or among normal ones.
    Subnormal = "subnormal",
    /// Elements up to the largest f32, 1e20 or 1e6: squares that overflow, norms that saturate.
    Huge = "huge",
    /// Each vector has its own exponent from the whole range of f32: one vector's scale applied to
    /// another shows.
    MixedRange = "mixed-range",
    /// NaNs of any payload and infinities in one to three lanes of every other vector or so;
    /// the rest is normal, to show that a poisoned row leaves its neighbours alone.
    NonFinite = "non-finite",
    /// All −0, or −0 among normal values.
    NegativeZero = "negative-zero",
    /// One spike of ±100·√d, in the same element throughout a tensor, above small noise: rotated,
    /// every coordinate is ±100, and two such tensors have dot products of terms of ±1e4 that sum
    /// to about 1, or in one of d pairs of seeds do not cancel.
    Cancel = "cancel",
    /// One row in 64, an early one, is 32 times the rest or more: as keys, its score dominates.
    Spike = "spike",
    /// All +0: every vector the zero record.
    AllZero = "all-zero",
    /// Keys of a real model. The three real families of one seed are one window of one layer.
    RealK = "real-k",
    /// Values of a real model.
    RealV = "real-v",
    /// Queries of a real model.
    RealQ = "real-q",
}

impl core::fmt::Display for Family {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.pad(self.name())
    }
}

/// The largest magnitude that [`length`] draws.
const MAX_LENGTH: f32 = 16.0;

impl Family {
    /// No NaN and no infinity.
    #[must_use]
    pub const fn is_finite(self) -> bool {
        !matches!(self, Self::NonFinite)
    }

    /// Data without structure that the rotation could line up with a boundary: only a few codes in
    /// a million may be free choices, so a bound that frees more is at fault.
    #[must_use]
    pub const fn is_ordinary(self) -> bool {
        matches!(
            self,
            Self::Uniform
                | Self::Normal
                | Self::Outlier
                | Self::EqualVectors
                | Self::Distinct
                | Self::Spike
                | Self::RealK
                | Self::RealV
                | Self::RealQ
        )
    }

    /// The only head dimension of the family, if it has but one.
    #[must_use]
    pub const fn needs_head_dim(self) -> Option<HeadDim> {
        match self {
            Self::RealK | Self::RealV | Self::RealQ => Some(HeadDim::D64),
            _ => None,
        }
    }

    /// A magnitude that no element exceeds, before the exponent; `None` where NaN or infinity
    /// occur.
    #[must_use]
    pub const fn max_abs(self) -> Option<f32> {
        let normal = NORMAL_LIMIT as f32;
        Some(match self {
            Self::AllZero => 0.0,
            Self::Uniform | Self::PlusMinusOne => 1.0,
            Self::OneHot | Self::Constant | Self::Walsh | Self::SignedWalsh => 1.5,
            Self::Distinct | Self::Exact => 4.0,
            Self::Normal
            | Self::KSparse
            | Self::EqualVectors
            | Self::Subnormal
            | Self::NegativeZero => normal,
            Self::HalfSigns | Self::BoundaryHugging | Self::ResidualHugging => MAX_LENGTH,
            Self::RealK | Self::RealV | Self::RealQ => 18.0,
            Self::Outlier => 100.0 * normal,
            Self::Cancel => 1601.0,
            Self::Spike => 1024.0 * normal,
            Self::NormMidpoint => 65536.0,
            Self::Tiny => 6.2e-5,
            Self::Huge | Self::MixedRange => f32::MAX,
            Self::NonFinite => return None,
        })
    }

    /// The exponents that scale every tensor of the family exactly. The families whose subject is
    /// the magnitude itself have none but 0.
    #[must_use]
    pub const fn exponents(self) -> RangeInclusive<i32> {
        match self {
            Self::NormMidpoint | Self::Tiny | Self::Subnormal | Self::Huge | Self::MixedRange => {
                0..=0
            }
            _ => -64..=64,
        }
    }
}

/// Fills `out`, of `head_dim` zeros, with the vector at (`row`, `head`).
pub(super) fn fill(
    family: Family,
    seed: u64,
    row: u64,
    head: u64,
    rotation: &Rotation,
    out: &mut [f32],
) -> Result<(), InputError> {
    let d = out.len();
    let mut draw = Draw::vector(seed, row, head);
    let rng = &mut draw;
    match family {
        Family::Uniform => each(out, |_| rng.uniform()),
        Family::Normal => each(out, |_| rng.normal()),
        Family::Outlier => {
            each(out, |_| rng.normal());
            let mut shared = Draw::head(seed, head);
            for i in shared.choose(d, d / 32) {
                out[i] *= (20.0 + 80.0 * shared.unit()) as f32;
            }
        }
        Family::OneHot => out[rng.below(d)] = (rng.sign() * rng.magnitude()) as f32,
        Family::KSparse => {
            let k = 2 + rng.below(d / 8 - 1);
            for i in rng.choose(d, k) {
                out[i] = rng.normal() as f32;
            }
        }
        Family::Constant => out.fill((rng.sign() * rng.magnitude()) as f32),
        Family::Walsh | Family::SignedWalsh => {
            let (w, amplitude) = (rng.below(d), rng.sign() * rng.magnitude());
            each(out, |i| {
                let negative = (w & i).count_ones() % 2 == 1;
                let flip = family == Family::SignedWalsh && !rotation.polar.is_positive(i);
                if negative == flip {
                    amplitude
                } else {
                    -amplitude
                }
            });
        }
        Family::EqualVectors => {
            let mut shared = Draw::tensor(seed);
            each(out, |_| shared.normal());
        }
        Family::Distinct => {
            let first = ((row << 6) + (head & 63)) * d as u64;
            for (i, x) in (first..).zip(out) {
                *x = distinct(seed, i);
            }
        }
        Family::PlusMinusOne => each(out, |_| rng.sign()),
        Family::HalfSigns => {
            let side = |i: usize| {
                if (i as u64 / 32 + row).is_multiple_of(2) {
                    1.0
                } else {
                    -1.0
                }
            };
            let z = (0..d).map(|i| side(i) * rng.magnitude()).collect();
            let y = with_residual(rng, rotation, z, |i, _| side(i));
            unrotate(rng, rotation, y, out);
        }
        Family::Exact => each(out, |_| rng.pick(&[-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0])),
        Family::BoundaryHugging => {
            let y = on_boundaries(rng, rotation.head_dim().codebook(), d);
            unrotate(rng, rotation, y, out);
        }
        Family::ResidualHugging => {
            let mut z: Vec<f64> = (0..d).map(|_| rng.normal()).collect();
            for i in rng.choose(d, d / 2) {
                z[i] = rng.pick(&[-2.0, -1.0, 0.0, 1.0, 2.0]) * exp2(-25);
            }
            let y = with_residual(rng, rotation, z, |_, rng| rng.sign());
            unrotate(rng, rotation, y, out);
        }
        Family::NormMidpoint => {
            let ulps = rng.below(9) as f64 - 4.0;
            directed(rng, |rng| f16_midpoint(rng) * (1.0 + ulps * exp2(-24)), out);
        }
        Family::Tiny => directed(rng, tiny_norm, out),
        Family::Subnormal => {
            let among_normal = rng.coin();
            each(out, |_| match rng.below(3) {
                0 if among_normal => rng.normal(),
                1 => 1e-23 * rng.sign() * rng.magnitude(),
                _ => rng.uniform() * f64::from(f32::MIN_POSITIVE),
            });
        }
        Family::Huge => {
            let scale = rng.pick(&[f64::from(f32::MAX), 1e20, 1e6]);
            each(out, |_| rng.uniform() * scale);
            out[rng.below(d)] = (rng.sign() * scale) as f32;
        }
        Family::MixedRange => {
            let scale = exp2(rng.below(127 + 149 + 1) as i32 - 149);
            each(out, |_| rng.uniform() * scale);
        }
        Family::NonFinite => {
            each(out, |_| rng.normal());
            let poisoned = if rng.coin() { 1 + rng.below(3) } else { 0 };
            for i in rng.choose(d, poisoned) {
                // Every exponent bit set: an infinity if the mantissa is 0, else a NaN, whose
                // quiet bit is one more of the random ones.
                let infinite = rng.coin();
                let bits = rng.bits() as u32 | 0x7F80_0000;
                out[i] = f32::from_bits(if infinite {
                    bits & 0xFF80_0000
                } else {
                    bits | 1
                });
            }
        }
        Family::NegativeZero => {
            let mixed = rng.coin();
            each(out, |_| {
                if mixed && rng.coin() {
                    rng.normal()
                } else {
                    -0.0
                }
            });
        }
        Family::Cancel => {
            let root = (d as f64).sqrt();
            each(out, |_| rng.normal() * exp2(-7) / root);
            out[Draw::tensor(seed).below(d)] = (rng.sign() * 100.0 * root) as f32;
        }
        Family::Spike => {
            let spike = row % 64 == Draw::tensor(seed).below(4) as u64;
            // Later spikes are larger, so that one dominates however many rows there are.
            let scale = if spike {
                32 * (1 + row / 64).min(32)
            } else {
                1
            } as f64;
            each(out, |_| rng.normal() * scale);
        }
        Family::AllZero => {}
        Family::RealK => real::fill(Role::K, seed, row, head, out)?,
        Family::RealV => real::fill(Role::V, seed, row, head, out)?,
        Family::RealQ => real::fill(Role::Q, seed, row, head, out)?,
    }
    Ok(())
}

fn each(out: &mut [f32], mut value: impl FnMut(usize) -> f64) {
    for (i, x) in out.iter_mut().enumerate() {
        *x = value(i) as f32;
    }
}

/// A random direction of the norm that `length` draws.
fn directed(rng: &mut Draw, length: impl Fn(&mut Draw) -> f64, out: &mut [f32]) {
    let (length, x) = (length(rng), rng.direction(out.len()));
    each(out, |i| x[i] * length);
}

/// The `index`-th of 2^26 values: three odd multiplications and shifts, each a bijection, scatter
/// the index over sign, four binades and 23 bits of mantissa.
fn distinct(seed: u64, index: u64) -> f32 {
    const MASK: u64 = (1 << 26) - 1;
    let mut x = (index ^ super::draw::mix(seed)) & MASK;
    for odd in [0x2C1B_3C6D, 0x297A_2D39, 0x1B56_C4E9] {
        x = (x * odd) & MASK;
        x ^= x >> 13;
    }
    let (sign, magnitude) = (x >> 25, x & (MASK >> 1));
    f32::from_bits((sign << 31 | (0.25_f32.to_bits() as u64 + magnitude)) as u32)
}

/// A vector length from 0.125 to 16: a power of two, which costs no rounding, or any.
fn length(rng: &mut Draw) -> f64 {
    if rng.coin() {
        exp2(rng.below(8) as i32 - 3)
    } else {
        f64::from(MAX_LENGTH) * rng.magnitude() / 2.0
    }
}

/// signs ⊙ H·x / √d in f64: the inverse rotation.
fn inverse_rht(signs: &Signs, x: &mut [f64]) {
    let mut half = 1;
    while half < x.len() {
        for block in x.chunks_exact_mut(2 * half) {
            let (low, high) = block.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let scale = 1.0 / (x.len() as f64).sqrt();
    for (i, v) in x.iter_mut().enumerate() {
        *v *= if signs.is_positive(i) { scale } else { -scale };
    }
}

/// The vector of random length whose normalised rotation is the unit vector `y`, but for its
/// rounding to f32, which moves `y` by about an ulp of a boundary.
fn unrotate(rng: &mut Draw, rotation: &Rotation, mut y: Vec<f64>, out: &mut [f32]) {
    inverse_rht(&rotation.polar, &mut y);
    let length = length(rng);
    each(out, |i| y[i] * length);
}

/// A unit vector with half of its coordinates within 2 ulps of decision boundaries. The outer
/// boundary is below 1/√d, so these leave room for the rest, which brings the norm to 1.
fn on_boundaries(rng: &mut Draw, book: &Codebook, d: usize) -> Vec<f64> {
    // The middle boundary is 0, whose own ulp is a subnormal; the outer ones' stands in.
    let ulp = f64::from(book.boundaries[2].next_up() - book.boundaries[2]);
    let mut y: Vec<f64> = (0..d).map(|_| rng.normal()).collect();
    let hugging = rng.choose(d, d / 2);
    for &i in &hugging {
        y[i] = 0.0;
    }
    let steps = [-2.0, -1.0, 0.0, 1.0, 2.0];
    let hugged: Vec<f64> = hugging
        .iter()
        .map(|_| f64::from(rng.pick(&book.boundaries)) + ulp * rng.pick(&steps))
        .collect();
    let taken: f64 = hugged.iter().map(|v| v * v).sum();
    set_norm(&mut y, (1.0 - taken).sqrt());
    for (&i, hugged) in hugging.iter().zip(hugged) {
        y[i] = hugged;
    }
    y
}

/// A unit vector whose quantisation residual, rotated by the sketch's signs, points along `z` or
/// −`z`; `side` gives the sign of each coordinate.
///
/// As many coordinates sit at outer centroids as the unit sphere holds; a multiple of the
/// residual's direction makes up the little that is missing from the norm. That multiple may carry
/// a coordinate out of its cell, more often the smaller d is, so the centroids are drawn again
/// until none leaves.
fn with_residual(
    rng: &mut Draw,
    rotation: &Rotation,
    mut z: Vec<f64>,
    side: impl Fn(usize, &mut Draw) -> f64,
) -> Vec<f64> {
    const TRIALS: usize = 64;
    set_norm(&mut z, 1.0);
    inverse_rht(&rotation.jl, &mut z);
    let residual = z;
    let (d, book) = (residual.len(), rotation.head_dim().codebook());
    let [.., inner, outer] = book.centroids.map(f64::from);
    let boundary = f64::from(book.boundaries[2]);
    let per_outer = outer * outer - inner * inner;
    let room = 1.0 - d as f64 * inner * inner;
    let outer_count = (room / per_outer) as usize;
    let missing = room - outer_count as f64 * per_outer;
    let mut y = Vec::new();
    for _ in 0..TRIALS {
        let mut centroids = vec![inner; d];
        for i in rng.choose(d, outer_count) {
            centroids[i] = outer;
        }
        for (i, c) in centroids.iter_mut().enumerate() {
            *c *= side(i, rng);
        }
        // ‖c + ε·r‖ = 1 for a unit r, solved for the ε that is nearer 0. Its sign has to be free: for
        // a `z` near a Walsh row, r is nearly one coordinate, and one of the two directions leads
        // out of that coordinate's cell whatever the centroids.
        let along: f64 = centroids.iter().zip(&residual).map(|(c, r)| c * r).sum();
        let epsilon = (along * along + missing).sqrt().copysign(along) - along;
        y.clear();
        y.extend(
            centroids
                .iter()
                .zip(&residual)
                .map(|(c, r)| c + epsilon * r),
        );
        let stays = |y: f64, c: f64| y * c > 0.0 && (y.abs() > boundary) == (c.abs() > boundary);
        if y.iter().zip(&centroids).all(|(&y, &c)| stays(y, c)) {
            break;
        }
    }
    y
}

/// A norm that is hard to round to f16.
fn f16_midpoint(rng: &mut Draw) -> f64 {
    const NORMALS: usize = 0x0400;
    const INFINITY: usize = 0x7C00;
    let lower = match rng.below(8) {
        0 => return f64::from(f16::MAX),
        1 => return 65520.0,
        2..4 => rng.below(NORMALS),
        _ => NORMALS + rng.below(INFINITY - 1 - NORMALS),
    };
    let [lower, upper] = [lower, lower + 1].map(|bits| f16::from_bits(bits as u16).to_f64());
    (lower + upper) / 2.0
}

fn tiny_norm(rng: &mut Draw) -> f64 {
    let ulps = (1 + rng.below(8)) as f64 * exp2(-24);
    let f16_subnormal = exp2(-25 + rng.below(11) as i32) * (1.0 + rng.unit());
    rng.pick(&[
        1e-30,
        1e-13,
        1e-12 * (1.0 - ulps),
        1e-12 * (1.0 + ulps),
        1e-9,
        exp2(-20),
        f16_subnormal,
    ])
}
