//! What random vectors must average to: distortion, bias, slope and variance of the score's estimate.
//!
//! Bit-for-bit agreement of two programs that share a mistake proves nothing. A factor √d missing from the gain
//! in kernel, twin and oracle alike leaves every comparison intact, and the mean of the estimate wrong by
//! far. Here nothing is taken from the implementation but its results.
//!
//! # What is measured
//! Keys k, values v and queries u are independent random unit vectors. Then k's rotated vector is uniform on
//! the sphere under any rotation, so the vectors of a sample are independent and identically distributed,
//! with the moments of [`expected`]:
//!
//! | statistic | per vector | what it judges |
//! |---|---|---|
//! | distortion | ‖x − x̂‖², x̂ the codes alone | the codes, of keys and of values |
//! | slope | ⟨k, k̂⟩ | bias: the regression of scores on ⟨q, k⟩ |
//! | error | d·(⟨u, k⟩ − score)² | the variance of the estimate |
//! | response | (score of q ∥ r, less the codes' part)/ρ | the gain alone |
//!
//! k̂ is the vector whose inner product with q is the score. Averaged over all q, slope and error are ⟨k, k̂⟩ and
//! ‖k − k̂‖², which vary little from key to key: from the device's records they are computed so. For a
//! query along the residual, q = RHT⁻¹(r/ρ; polar), the score is the codes' part and ρ·g·Σ|z_i|, z =
//! RHT(r/ρ; jl): their response is g·‖z‖₁, about g·√(2d/π), known to a part in a hundred for one key. It
//! is 1 for the unbiased gain, 2/π for the least error, 1/√d for cera's.
//!
//! # The attention kernel's own scores
//! Slope, error and response are measured on scores that come out of attention. Two timesteps are visible. The
//! first key is zero and so is the first value; the second value is v. The output is σ(scale·score)·v̂, so
//! that score = logit(⟨out, v̂⟩/‖v̂‖²)/scale.
//!
//! # Thresholds
//! A mean of N = [`VECTORS`] samples may be off by [`DEVIATIONS`] standard errors, of the tabulated standard
//! deviation: a fault that widens the sample does not widen its own tolerance. The normal tail beyond 7 is
//! 2.6e-12. The most skewed of the samples is the square of a normal deviate, of skewness γ = 2.8; Cramér's
//! correction to the tail, e^(γt³/(6√N)), is 36 for N = 2048, so that the statistics of a case together
//! raise a false alarm less often than once in 10^9 cases. The response is known to ±0.8 % for d = 32 and
//! ±0.3 % for d = 256: a gain that is wrong by 5 %, let alone by √2 or √d, is certain to be seen.
//!
//! # The sign streams
//! Uniform keys cannot tell `jl` from `polar`, since they are uniform after any rotation. But the rotated
//! queries give both streams away: H·q_rot has the signs of `polar` against q, H·q_jl those of `jl` against
//! q_rot. Both, their product, and their products with the neighbouring layer's sum to less than 7√n over n
//! signs, with a chance of 2·e^(−49/2) = 4.6e-11 of the contrary (Hoeffding).

use turboquant_wgpu::twin::{KeyRecord, ValueRecord};
use turboquant_wgpu::{Gain, HeadDim, Rotation};

use crate::arithmetic::{hadamard, l2};
use crate::oracles::dequantise;
use crate::verdict::{Evidence, Violation};

/// Vectors of one sample.
pub const VECTORS: usize = LAYERS * HEADS;
/// Layers, each with a rotation of its own, that a sample is spread over.
pub const LAYERS: usize = 8;
/// Keys of one layer, each with a KV head of its own.
pub const HEADS: usize = 256;
/// Standard errors that a mean may be off by.
pub const DEVIATIONS: f64 = 7.0;
/// Factor of the scores in attention: large enough that they stand out of 1/2 ± rounding.
pub const SCALE: f32 = 2.0;
/// Relative error of the tabulated means, and what f16 norms and f32 scores add: 5·10^-4 at most.
const TABLE_ERROR: f64 = 5e-4;

/// Mean and standard deviation of one statistic over random vectors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moments {
    /// Mean.
    pub mean: f64,
    /// Standard deviation from vector to vector.
    pub deviation: f64,
}

/// The moments for one head dimension and gain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// ‖x − x̂‖² of the codes alone.
    pub distortion: Moments,
    /// ⟨k, k̂⟩.
    pub slope: Moments,
    /// ‖k − k̂‖².
    pub error: Moments,
    /// g·‖RHT(r/ρ; jl)‖₁.
    pub response: Moments,
}

const fn moments(mean: f64, deviation: f64) -> Moments {
    Moments { mean, deviation }
}

/// The moments of random vectors, from an independent f64 simulation of the definitions with a million vectors
/// and more for each head dimension: standard errors of the means are below 2·10^-5.
///
/// They are near what theory has for large d: distortion D = 0.1175, slope 1 and error D·(π/2 − 1) for the
/// unbiased gain, 1 − D·(1 − 2/π) and D·(1 − 2/π) for the least error.
#[must_use]
pub fn expected(head_dim: HeadDim, gain: Gain) -> Expected {
    let (distortion, [slope, error, response]) = match head_dim {
        HeadDim::D32 => (
            moments(0.111614, 0.02834),
            match gain {
                Gain::Unbiased => [
                    moments(1.006498, 0.0417),
                    moments(0.060978, 0.01722),
                    moments(1.010753, 0.04582),
                ],
                Gain::MinimumError => [
                    moments(0.963582, 0.03412),
                    moments(0.03882, 0.01096),
                    moments(0.643465, 0.02917),
                ],
                Gain::Cera => [
                    moments(0.909274, 0.05402),
                    moments(0.077149, 0.01937),
                    moments(0.178678, 0.0081),
                ],
            },
        ),
        HeadDim::D64 => (
            moments(0.114533, 0.02115),
            match gain {
                Gain::Unbiased => [
                    moments(1.003379, 0.02994),
                    moments(0.063881, 0.01337),
                    moments(1.006009, 0.03264),
                ],
                Gain::MinimumError => [
                    moments(0.960528, 0.02514),
                    moments(0.040668, 0.00851),
                    moments(0.640445, 0.02078),
                ],
                Gain::Cera => [
                    moments(0.900196, 0.04151),
                    moments(0.088524, 0.01628),
                    moments(0.125751, 0.00408),
                ],
            },
        ),
        HeadDim::D128 => (
            moments(0.115986, 0.01535),
            match gain {
                Gain::Unbiased => [
                    moments(1.00172, 0.02137),
                    moments(0.065428, 0.00996),
                    moments(1.003194, 0.02324),
                ],
                Gain::MinimumError => [
                    moments(0.958955, 0.01814),
                    moments(0.041653, 0.00634),
                    moments(0.638653, 0.01479),
                ],
                Gain::Cera => [
                    moments(0.894435, 0.03085),
                    moments(0.096837, 0.01279),
                    moments(0.088671, 0.00205),
                ],
            },
        ),
        HeadDim::D256 => (
            moments(0.11674, 0.011),
            match gain {
                Gain::Unbiased => [
                    moments(1.000838, 0.01521),
                    moments(0.06624, 0.00725),
                    moments(1.001648, 0.01653),
                ],
                Gain::MinimumError => [
                    moments(0.958117, 0.01297),
                    moments(0.04217, 0.00461),
                    moments(0.637669, 0.01053),
                ],
                Gain::Cera => [
                    moments(0.89062, 0.02256),
                    moments(0.10284, 0.00968),
                    moments(0.062603, 0.00103),
                ],
            },
        ),
    };
    Expected {
        distortion,
        slope,
        error,
        response,
    }
}

/// Random unit vectors and what an implementation made of them.
#[derive(Clone, Debug)]
pub struct Vectors {
    /// Key.
    pub k: Vec<f32>,
    /// Query.
    pub u: Vec<f32>,
    /// Value.
    pub v: Vec<f32>,
    /// The key's record.
    pub key: KeyRecord,
    /// The value's record.
    pub value: ValueRecord,
}

/// Unit vectors of the directions of these.
#[must_use]
pub fn directions(head_dim: HeadDim, tensor: &[f32]) -> Vec<f32> {
    tensor
        .chunks_exact(head_dim.get())
        .flat_map(|x| {
            let norm = l2(&exact(x));
            x.iter().map(move |&v| (f64::from(v) / norm) as f32)
        })
        .collect()
}

impl Vectors {
    /// The key that the codes alone stand for.
    fn coarse(&self, rotation: &Rotation) -> Vec<f64> {
        let codes = ValueRecord {
            codes: self.key.codes.clone(),
            norm: self.key.norm,
        };
        dequantise::value(rotation, &codes)
    }

    /// The query along the residual that the codes left.
    #[must_use]
    pub fn residual_query(&self, rotation: &Rotation) -> Vec<f32> {
        let r = minus(&exact(&self.k), &self.coarse(rotation));
        directions(
            rotation.head_dim(),
            &r.iter().map(|&v| v as f32).collect::<Vec<_>>(),
        )
    }

    /// What the value reads as.
    #[must_use]
    pub fn dequantised_value(&self, rotation: &Rotation) -> Vec<f64> {
        dequantise::value(rotation, &self.value)
    }

    /// The statistics of one vector, given the scores of the queries k, u and [`Vectors::residual_query`].
    #[must_use]
    pub fn observe(&self, rotation: &Rotation, gain: Gain, scores: [f64; 3]) -> Observation {
        let d = rotation.head_dim().get() as f64;
        let square = |x: Vec<f64>| inner(&x, &x);
        let k = exact(&self.k);
        let coarse = self.coarse(rotation);
        let fine = dequantise::key(rotation, &self.key, gain);
        let value = minus(&exact(&self.v), &self.dequantised_value(rotation));
        let along = exact(&self.residual_query(rotation));
        let rho = f64::from(self.key.residual_norm);
        Observation {
            value_distortion: square(value),
            key_distortion: square(minus(&k, &coarse)),
            record_slope: inner(&k, &fine),
            record_error: square(minus(&k, &fine)),
            slope: scores[0],
            error: d * (inner(&exact(&self.u), &k) - scores[1]).powi(2),
            response: (scores[2] - inner(&along, &coarse)) / rho,
        }
    }
}

/// Statistics of one vector. The last three come from scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// ‖v − v̂‖².
    pub value_distortion: f64,
    /// ‖k − x̂‖² of the codes alone.
    pub key_distortion: f64,
    /// ⟨k, k̂⟩.
    pub record_slope: f64,
    /// ‖k − k̂‖².
    pub record_error: f64,
    /// Score of the key as a query.
    pub slope: f64,
    /// d·(⟨u, k⟩ − score of u)².
    pub error: f64,
    /// What the residual adds to the score along it, divided by ρ.
    pub response: f64,
}

/// Judges a sample.
///
/// # Errors
/// The statistic that is off.
pub fn judge(
    head_dim: HeadDim,
    gain: Gain,
    sample: &[Observation],
    evidence: &mut Evidence,
) -> Result<(), Violation> {
    let expected = expected(head_dim, gain);
    let d = head_dim.get() as f64;
    let Moments { mean, deviation } = expected.error;
    // For a uniform u, E⟨u, e⟩² = ‖e‖²/d and E⟨u, e⟩⁴ = 3‖e‖⁴/(d(d + 2)).
    let fourth = 3.0 * d / (d + 2.0) * (mean.powi(2) + deviation.powi(2));
    let scattered = moments(mean, (fourth - mean.powi(2)).sqrt());
    type Statistic = fn(&Observation) -> f64;
    let statistics: [(&'static str, Statistic, Moments); 7] = [
        (
            "distortion of values",
            |o| o.value_distortion,
            expected.distortion,
        ),
        (
            "distortion of keys",
            |o| o.key_distortion,
            expected.distortion,
        ),
        ("slope of the records", |o| o.record_slope, expected.slope),
        ("error of the records", |o| o.record_error, expected.error),
        ("response of the scores", |o| o.response, expected.response),
        ("slope of the scores", |o| o.slope, expected.slope),
        ("error of the scores", |o| o.error, scattered),
    ];
    let n = sample.len() as f64;
    for (rule, of, Moments { mean, deviation }) in statistics {
        let found = sample.iter().map(of).sum::<f64>() / n;
        let tolerance = DEVIATIONS * deviation / n.sqrt() + TABLE_ERROR * mean;
        let off = (found - mean).abs();
        // An empty sample is a NaN too.
        if off.is_nan() || off > tolerance {
            return Err(Violation {
                rule,
                place: format!("d = {head_dim}, {gain:?}, {n} vectors"),
                detail: format!("mean {found:.6}, expected {mean:.6} ± {tolerance:.6}"),
            });
        }
        evidence.note(off / tolerance);
    }
    Ok(())
}

/// The sign streams of one layer, as rotated queries give them away.
#[derive(Clone, Debug)]
pub struct Streams {
    polar: Vec<f64>,
    jl: Vec<f64>,
}

impl Streams {
    /// No query seen yet.
    #[must_use]
    pub fn new(head_dim: HeadDim) -> Self {
        let zero = vec![0.0; head_dim.get()];
        Self {
            polar: zero.clone(),
            jl: zero,
        }
    }

    /// Takes a query and both of its rotations. Several of them outweigh the rounding of a small element.
    pub fn add(&mut self, q: &[f32], polar: &[f32], jl: &[f32]) {
        let unsigned = |sums: &mut [f64], from: &[f32], to: &[f32]| {
            let mut back = exact(to);
            hadamard(&mut back);
            let products = back.iter().zip(from).map(|(b, &f)| b * f64::from(f));
            sums.iter_mut().zip(products).for_each(|(s, p)| *s += p);
        };
        unsigned(&mut self.polar, q, polar);
        unsigned(&mut self.jl, polar, jl);
    }

    fn signs(&self) -> [Vec<f64>; 2] {
        [&self.polar, &self.jl].map(|sums| sums.iter().map(|s| s.signum()).collect())
    }
}

/// Judges the sign streams of several layers: balanced, and independent of each other.
///
/// # Errors
/// The sum that is too large.
pub fn judge_streams(layers: &[Streams], evidence: &mut Evidence) -> Result<(), Violation> {
    let signs: Vec<[Vec<f64>; 2]> = layers.iter().map(Streams::signs).collect();
    let next = |layer: usize| &signs[(layer + 1) % signs.len()];
    type Sum<'a> = &'a dyn Fn(usize) -> f64;
    let sums: [(&'static str, Sum<'_>); 5] = [
        ("polar is balanced", &|l| signs[l][0].iter().sum()),
        ("jl is balanced", &|l| signs[l][1].iter().sum()),
        ("polar and jl are independent", &|l| {
            inner(&signs[l][0], &signs[l][1])
        }),
        ("polar differs between layers", &|l| {
            inner(&signs[l][0], &next(l)[0])
        }),
        ("jl differs between layers", &|l| {
            inner(&signs[l][1], &next(l)[1])
        }),
    ];
    let n: usize = signs.iter().map(|[polar, _]| polar.len()).sum();
    let tolerance = DEVIATIONS * (n as f64).sqrt();
    for (rule, of) in sums {
        let sum: f64 = (0..signs.len()).map(of).sum();
        if sum.is_nan() || sum.abs() > tolerance {
            return Err(Violation {
                rule,
                place: format!("{} layers, {n} signs", signs.len()),
                detail: format!("they sum to {sum}: ±{tolerance:.0} at most"),
            });
        }
        evidence.note(sum.abs() / tolerance);
    }
    Ok(())
}

fn exact(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| f64::from(v)).collect()
}

fn inner(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn minus(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}
