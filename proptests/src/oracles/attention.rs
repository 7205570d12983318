//! Oracle of `attention` and `merge_attention`: f64 attention over compressed records.

use turboquant_wgpu::twin::{KeyRecord, ValueRecord};
use turboquant_wgpu::{Gain, KernelVariant, Rotation};

use super::rotate_queries::Bounded;
use crate::arithmetic::{
    Arithmetic, SMALLEST_NORMAL, ULP, inv_sqrt_error, inverse_rht, l2, spread,
};

/// Beyond this an f32 score may overflow on the way, and WGSL then allows any value.
const LARGEST_SCORE: f64 = 1e37;
/// Weights this far below the largest may be subnormal, flushed or cut to 0.
const FAR_BELOW: f64 = 80.0;

/// How the sums of a pass are nested: what their depth depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    /// Roundings that a term of a score's sum passes through, its product included.
    pub score: usize,
    /// Times that a weight may be rescaled, each by a factor from exp.
    pub rescales: usize,
    /// Roundings that a weighted value passes through in its accumulator.
    pub accumulate: usize,
    /// Roundings that a weight passes through in the denominator.
    pub denominator: usize,
    /// Matrices multiply: operands are f16.
    pub f16_operands: bool,
}

/// Errors that f16 operands bring in, besides those of f32 arithmetic (`shaders/attention_matrix.wgsl`).
#[derive(Clone, Copy, Debug, Default)]
struct Operands {
    /// Relative error of an element of a query and of a weight: u of f16, 2^-11 where f32 rounds to nearest.
    roundoff: f64,
    /// Relative error of a centroid: the pair of f16 numbers keeps the ratio to 2^-19.
    centroid: f64,
    /// Error of a query's element, of its largest element: below 2^-14 of 2^12 it may be flushed.
    query_floor: f64,
    /// Relative error of a weight by the reference that it is scaled to and back, in f32: two exps of at most 28.
    reference: f64,
    /// Error of a weight times its norm, of the largest: at the reference the largest is at least e^5/4, and below
    /// 2^-14 it may be flushed.
    weight_floor: f64,
}

impl Operands {
    fn new(arithmetic: Arithmetic, depth: Depth) -> Self {
        if !depth.f16_operands {
            return Self::default();
        }
        Self {
            roundoff: arithmetic.unit_roundoff * 8192.0,
            centroid: 2.0_f64.powi(-19),
            query_floor: 2.0_f64.powi(-26),
            reference: 128.0 * ULP,
            weight_floor: 2.0_f64.powi(-14) / (5.0_f64.exp() / 4.0),
        }
    }
}

impl Depth {
    /// A variant's, see [`Depth::kernel`] and [`Depth::matrix`].
    #[must_use]
    pub fn of_variant(
        variant: KernelVariant,
        head_dim: usize,
        visible: usize,
        split_len: usize,
    ) -> Self {
        match variant.matrix_side() {
            None => Self::kernel(head_dim, visible, split_len),
            Some(side) => Self::matrix(side as usize, head_dim, visible, split_len),
        }
    }

    /// The matrix variants': sums of products run through the matrices' accumulators, in any order, and each addition
    /// there may be off by four times the f32 roundoff, since hardware truncates.
    #[must_use]
    pub fn matrix(side: usize, head_dim: usize, visible: usize, split_len: usize) -> Self {
        let own = split_len.min(visible);
        let steps = own.div_ceil(2 * side);
        let splits = visible.div_ceil(split_len);
        Self {
            score: 4 * head_dim + 6,
            rescales: steps + 2,
            accumulate: 4 * own + steps + 4 + 2 * splits,
            denominator: own + steps + 3 + 2 * splits,
            f16_operands: true,
        }
    }

    /// The kernels': a lane sums sixteen dimensions in six roundings, then the words' sums are added. It walks
    /// every (64/(d/16))-th timestep and may rescale at each, then come as many groups, then the
    /// splits.
    #[must_use]
    pub fn kernel(head_dim: usize, visible: usize, split_len: usize) -> Self {
        let words = head_dim / 16;
        let groups = 64 / words;
        let steps = split_len.min(visible).div_ceil(groups);
        let splits = visible.div_ceil(split_len);
        Self {
            score: words + 10,
            rescales: steps + 2,
            accumulate: 2 * steps + 2 + groups + 1 + 2 * splits + 2,
            denominator: 2 * steps + groups + 1 + 2 * splits,
            f16_operands: false,
        }
    }

    /// The twin's: one sum after the other.
    #[must_use]
    pub fn twin(head_dim: usize, visible: usize) -> Self {
        Self {
            score: head_dim,
            rescales: 0,
            accumulate: visible + 2,
            denominator: visible,
            f16_operands: false,
        }
    }
}

/// Attention output of one query row and head.
#[derive(Clone, Debug)]
pub struct Output {
    /// Reference and bound of each element.
    pub out: Bounded,
    /// The scores are so large that their rounding leaves the softmax undetermined: the bound is only
    /// the hull of the values.
    pub loose: bool,
}

/// What a pass computes, how, and with which arithmetic.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// How operations round.
    pub arithmetic: Arithmetic,
    /// The layer's rotation.
    pub rotation: &'a Rotation,
    /// How the sums are nested.
    pub depth: Depth,
    /// Factor of every score.
    pub scale: f32,
    /// Factor of the residual term.
    pub gain: Gain,
}

impl Pass<'_> {
    /// Reference and bound of a score.
    ///
    /// s = scale · n · (A + ρ·g·B) with A = Σ q_i·c_i and B = Σ ±j_i. Sums of d terms err by γ·Σ|terms|, and by what
    /// the query's own errors sum to; each product adds u. f16 operands are off by a share of each term, and by
    /// a floor of the query's largest element.
    fn score(&self, query: &Query<'_>, key: &Key) -> (f64, f64) {
        let Self {
            arithmetic, depth, ..
        } = *self;
        let head_dim = self.rotation.head_dim();
        // The f32 values that the kernel is given.
        let scale = f64::from(self.scale);
        let gain = f64::from(super::gain::gain(self.gain, head_dim) as f32);
        let u = arithmetic.unit_roundoff;
        let gamma = arithmetic.gamma(depth.score);
        let (mut a, mut a_abs) = (0.0, 0.0);
        for (q, c) in query.polar.values.iter().zip(&key.centroids) {
            a += q * c;
            a_abs += (q * c).abs();
        }
        let b: f64 = query
            .jl
            .values
            .iter()
            .zip(&key.signs)
            .map(|(q, s)| q * s)
            .sum();
        let d = head_dim.get() as f64;
        let tiny = SMALLEST_NORMAL * (d + 4.0);
        let a_carried = query.polar.carried(&key.centroids, key.centroids_l2);
        let operands = Operands::new(arithmetic, depth);
        let floor = operands.query_floor * query.largest;
        let a_error = (gamma + operands.roundoff + operands.centroid) * (a_abs + a_carried)
            + a_carried
            + floor * key.centroids_l1
            + tiny;
        let b_error = (gamma + operands.roundoff) * (query.jl_l1 + query.jl_carried)
            + query.jl_carried
            + floor * d
            + tiny;
        let factor = f64::from(key.record.residual_norm) * gain;
        let term_error = factor * b_error + 2.0 * u * factor * (b.abs() + b_error) + tiny;
        let inner = a + factor * b;
        let inner_error = a_error + term_error;
        let inner_error = inner_error + u * (inner.abs() + inner_error);
        let outer = scale * f64::from(key.record.norm);
        let s = outer * inner;
        let s_error = outer.abs() * inner_error + 2.02 * u * (s.abs() + outer.abs() * inner_error);
        (s, s_error + tiny * (1.0 + scale.abs()))
    }

    /// Attention of one query over the visible records, or `None` if a score may overflow f32.
    ///
    /// An error e_t in a score multiplies its weight by e^±e_t; the subtraction of the maximum, exp and the
    /// rescaling of earlier tiles multiply it by more. The maximum itself cancels: it is one of the
    /// computed scores and a common factor of all weights. With η_t the relative error of weight t,
    /// p the exact softmax, V_t the dequantised values and O = Σ p_t V_t, the quotient Σw̃V/Σw̃ is off by
    ///   |Σ p_t η_t (V_t − O)| / (1 − Σ p_t η_t),
    /// and never by more than the furthest value, since the weights are not negative. Both hold for
    /// each element of the output, since the inverse transform is linear; only the roundings of
    /// the sums, γ·Σ p|v| in the rotated domain, and of the transform spread over the elements. The
    /// denominator adds γ·|O|, the division 2.5 ULP.
    ///
    /// With f16 operands the numerator's weights are off on their own, so that nothing cancels: by ε·Σ p|V|, and by
    /// a floor for each timestep of the largest p·n.
    #[must_use]
    pub fn attention(
        &self,
        polar: &Bounded,
        jl: &Bounded,
        keys: &[Key],
        values: &[Value],
    ) -> Option<Output> {
        let Self {
            arithmetic,
            rotation,
            depth,
            ..
        } = *self;
        let head_dim = rotation.head_dim();
        let d = head_dim.get();
        if keys.is_empty() {
            let out = Bounded::exact(&vec![0.0; d]);
            return Some(Output { out, loose: false });
        }
        let u = arithmetic.unit_roundoff;
        let query = Query::new(polar, jl);
        let scores: Vec<(f64, f64)> = keys.iter().map(|key| self.score(&query, key)).collect();
        // Written so that a NaN, of inf − inf in a bound, counts as unbounded too.
        let bounded = |&(s, e): &(f64, f64)| s.abs() + e < LARGEST_SCORE;
        if !scores.iter().all(bounded) {
            return None;
        }
        let maximum = scores.iter().fold(f64::NEG_INFINITY, |m, s| m.max(s.0));
        let worst = scores.iter().fold(0.0_f64, |m, s| m.max(s.1));
        let mut weights: Vec<f64> = scores.iter().map(|(s, _)| (s - maximum).exp()).collect();
        let sum: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|w| *w /= sum);
        let etas: Vec<f64> = scores
            .iter()
            .map(|&(s, e)| {
                // Exponents of a weight and its rescalings sum to the distance from the final maximum.
                let distance = maximum - s + 2.0 * worst;
                let exp = (depth.rescales + 1) as f64 * 3.0 * ULP + 2.0 * distance * ULP;
                let rescale = depth.rescales as f64 * u;
                let relative = (e + u * distance + exp + rescale).exp_m1();
                if distance > FAR_BELOW {
                    relative.max(1.0)
                } else {
                    relative
                }
            })
            .collect();
        let slack: f64 = weights.iter().zip(&etas).map(|(w, e)| w * e).sum();
        // Written so that a NaN, of a weight that underflowed and an error that overflowed, is loose.
        let loose = !matches!(slack.partial_cmp(&0.5), Some(o) if o.is_lt());

        let mut out = vec![0.0; d];
        let mut magnitude = 0.0;
        for ((w, eta), value) in weights.iter().zip(&etas).zip(values) {
            magnitude += w * (1.0 + eta) * value.spread;
            for (o, v) in out.iter_mut().zip(&value.vector) {
                *o += w * v;
            }
        }
        let operands = Operands::new(arithmetic, depth);
        // Where the weights are undetermined, each may be all of it.
        let at_most = |w: f64, eta: f64| if loose { 1.0 } else { w * (1.0 + eta) };
        let relative = operands.roundoff + operands.reference;
        let largest_weighted = weights
            .iter()
            .zip(values)
            .fold(0.0_f64, |m, (w, v)| m.max(w * f64::from(v.record.norm)));
        let floor = operands.weight_floor * largest_weighted;
        let mut deviation = vec![0.0; d];
        let mut rounded_weights = vec![0.0; d];
        let mut largest_value = vec![0.0_f64; d];
        let mut hull = vec![0.0_f64; d];
        for ((&w, &eta), value) in weights.iter().zip(&etas).zip(values) {
            for i in 0..d {
                let off = (value.vector[i] - out[i]).abs();
                deviation[i] += w * eta * off;
                hull[i] = hull[i].max(off);
            }
            for (l, v) in largest_value.iter_mut().zip(&value.vector) {
                *l = l.max(v.abs());
            }
            if depth.f16_operands {
                let norm = f64::from(value.record.norm);
                let share = if norm > 0.0 { floor / norm } else { 0.0 }
                    + if loose {
                        0.0
                    } else {
                        at_most(w, eta) * relative
                    };
                for (r, v) in rounded_weights.iter_mut().zip(&value.vector) {
                    *r += share * v.abs();
                }
            }
        }
        // What the sums round is Σ p̃|v| with the weights as computed: never more than the largest |v|.
        let largest = values.iter().fold(0.0_f64, |m, v| m.max(v.spread));
        let size = if loose {
            largest
        } else {
            largest.min(magnitude / (1.0 - slack))
        };
        // The sums, the stages of the transform and its factor.
        let roundings = depth.accumulate + head_dim.log2() as usize + 1;
        let rounded = (arithmetic.gamma(roundings) + operands.centroid) * size;
        let quotient =
            arithmetic.gamma(depth.denominator + 1) + 3.5 * ULP + inv_sqrt_error(head_dim);
        // Weights cut to 0 or flushed are each below e^-79 of a sum that is at least 1.
        let cut = keys.len() as f64 * (1.0 - FAR_BELOW).exp();
        let flush = SMALLEST_NORMAL * (keys.len() + d) as f64 * (d as f64).sqrt();
        let errors: Vec<f64> = (0..d)
            .map(|i| {
                let by_weights = if loose {
                    hull[i]
                } else {
                    hull[i].min(deviation[i] / (1.0 - slack))
                };
                let by_operands = if loose {
                    rounded_weights[i] + relative * largest_value[i]
                } else {
                    rounded_weights[i] / (1.0 - slack)
                };
                by_weights
                    + rounded
                    + by_operands
                    + quotient * (out[i].abs() + by_weights)
                    + cut * hull[i]
                    + flush
            })
            .collect();
        let errors_l2 = l2(&errors);
        Some(Output {
            out: Bounded {
                values: out,
                errors,
                errors_l2,
            },
            loose,
        })
    }
}

impl Pass<'_> {
    /// What honest f16 operands give, and otherwise exact arithmetic: the measure of a matrix variant's errors,
    /// as the twin is of the others'.
    #[must_use]
    pub fn with_f16_operands(
        &self,
        polar: &Bounded,
        jl: &Bounded,
        keys: &[Key],
        values: &[Value],
    ) -> Vec<f32> {
        let rounded = |query: &Bounded| {
            Bounded::exact(
                &query
                    .values
                    .iter()
                    .map(|&v| to_eleven_bits(v) as f32)
                    .collect::<Vec<f32>>(),
            )
        };
        let (polar, jl) = (rounded(polar), rounded(jl));
        let query = Query::new(&polar, &jl);
        let scores: Vec<f64> = keys.iter().map(|key| self.score(&query, key).0).collect();
        let maximum = scores.iter().fold(f64::NEG_INFINITY, |m, &s| m.max(s));
        let mut out = vec![0.0; self.rotation.head_dim().get()];
        let mut sum = 0.0;
        for (score, value) in scores.iter().zip(values) {
            let weight = (score - maximum).exp();
            sum += weight;
            let norm = f64::from(value.record.norm);
            if norm > 0.0 {
                let weight = to_eleven_bits(weight * norm) / norm;
                for (o, v) in out.iter_mut().zip(&value.vector) {
                    *o += weight * v;
                }
            }
        }
        out.iter().map(|o| (o / sum) as f32).collect()
    }
}

/// Rounds to the eleven significant bits of a normal f16, of whatever exponent.
fn to_eleven_bits(v: f64) -> f64 {
    let bits = v.to_bits() + (1 << 41);
    f64::from_bits(bits & !((1 << 42) - 1))
}

/// A query with what its sums have in common for all keys.
struct Query<'a> {
    polar: &'a Bounded,
    jl: &'a Bounded,
    jl_l1: f64,
    jl_carried: f64,
    /// Largest magnitude of either rotation's elements.
    largest: f64,
}

impl<'a> Query<'a> {
    fn new(polar: &'a Bounded, jl: &'a Bounded) -> Self {
        let ones = vec![1.0; jl.values.len()];
        Self {
            polar,
            jl,
            jl_l1: jl.values.iter().map(|v| v.abs()).sum(),
            jl_carried: jl.carried(&ones, l2(&ones)),
            largest: polar
                .values
                .iter()
                .chain(&jl.values)
                .fold(0.0, |m, v| m.max(v.abs())),
        }
    }
}

/// A key record, unpacked once for the queries that see it.
#[derive(Clone, Debug)]
pub struct Key {
    /// The record.
    pub record: KeyRecord,
    /// centroid(code) of each element.
    centroids: Vec<f64>,
    centroids_l1: f64,
    centroids_l2: f64,
    /// ±1 of each element.
    signs: Vec<f64>,
}

impl Key {
    /// Unpacks a record.
    #[must_use]
    pub fn new(rotation: &Rotation, record: &KeyRecord) -> Self {
        let head_dim = rotation.head_dim();
        let book = head_dim.codebook().centroids.map(f64::from);
        let elements = 0..head_dim.get();
        let centroids: Vec<f64> = elements
            .clone()
            .map(|i| book[usize::from(record.code(i))])
            .collect();
        Self {
            record: record.clone(),
            centroids_l1: centroids.iter().map(|c| c.abs()).sum(),
            centroids_l2: l2(&centroids),
            centroids,
            signs: elements
                .map(|i| if record.sign(i) { 1.0 } else { -1.0 })
                .collect(),
        }
    }
}

/// A value record, dequantised once for the queries that see it.
#[derive(Clone, Debug)]
pub struct Value {
    /// The record.
    pub record: ValueRecord,
    /// n · RHT⁻¹(centroid(code); polar).
    vector: Vec<f64>,
    /// n · Σ|centroid(code_i)|/√d: what roundings in the rotated domain can sum to in one element.
    spread: f64,
}

impl Value {
    /// Dequantises a record.
    #[must_use]
    pub fn new(rotation: &Rotation, record: &ValueRecord) -> Self {
        let head_dim = rotation.head_dim();
        let centroids = head_dim.codebook().centroids.map(f64::from);
        let norm = f64::from(record.norm);
        let rotated: Vec<f64> = (0..head_dim.get())
            .map(|i| norm * centroids[usize::from(record.code(i))])
            .collect();
        Self {
            record: record.clone(),
            spread: spread(&rotated),
            vector: inverse_rht(&rotation.polar, &rotated),
        }
    }
}
