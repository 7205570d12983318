//! Tensors from a descriptor of a few words.
//!
//! A case says what its tensors hold by a [`Data`]: a family, a seed and an exponent. Element
//! (row, head, i) depends on these, on the layer's rotation and on (row, head, i), never on the
//! tensor's shape, so a case that shrinks to fewer rows or heads keeps the data of those that are
//! left. The draws use +, −, ×, ÷ and √ alone, which IEEE 754 fixes to the bit, so that a
//! descriptor means the same tensor on every host.
//!
//! A generator may change from one version to the next. What has to stay is saved by
//! [`Data::frozen`], as bit patterns.

mod draw;
mod families;
mod literal;
mod real;
#[cfg(test)]
mod tests;

use core::ops::RangeInclusive;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use turboquant_wgpu::{HeadDim, Rotation};

pub use families::Family;
pub use literal::Literal;

/// What a tensor holds; a table of a saved case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// The generator.
    pub family: Family,
    /// Selects one tensor of the family. Tensors of one family and seed are equal, so a case gives
    /// its keys, values and queries different seeds. TOML's integers are signed: a seed of 2^63 or
    /// more is saved as its two's complement.
    #[serde(with = "signed")]
    pub seed: u64,
    /// The exponent of a power of two that multiplies every element.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub exponent: i32,
    /// The elements themselves. If present no generator runs: `family` still tells the properties
    /// what to expect, `seed` only where the elements came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub literal: Option<Literal>,
}

/// The tensor that a [`Data`] is to fill, and the rotation that some families aim at.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The layer's rotation, which knows the head dimension.
    pub rotation: &'a Rotation,
    /// Timesteps, or query rows.
    pub rows: u32,
    /// Heads in each row.
    pub heads: u32,
}

/// Why a [`Data`] does not describe a tensor of the shape asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// The family exists for one head dimension.
    #[error("family {family} has head_dim {expected}, found {found}")]
    HeadDim {
        /// The family.
        family: Family,
        /// What it needs.
        expected: HeadDim,
        /// What the rotation has.
        found: HeadDim,
    },
    /// A literal tensor of another shape.
    #[error("the literal has {found:?} [rows, heads], expected {expected:?}")]
    LiteralShape {
        /// The shape asked for.
        expected: [u32; 2],
        /// The literal's.
        found: [u32; 2],
    },
    /// A literal with more or fewer elements than its shape has at this head dimension.
    #[error("the literal has {found} elements, expected {expected}")]
    LiteralLength {
        /// rows × heads × `head_dim`.
        expected: usize,
        /// The number of bit patterns.
        found: usize,
    },
    /// A tensor that this host cannot hold.
    #[error("{rows} rows of {heads} heads of {head_dim} elements do not fit in memory")]
    TooLarge {
        /// Rows asked for.
        rows: u32,
        /// Heads asked for.
        heads: u32,
        /// Elements of a vector.
        head_dim: HeadDim,
    },
    /// The power of two takes an element past the largest f32, or below the bits of the least one.
    #[error(
        "element {element}, bits {bits:#010x}, times 2^{exponent} is not an f32; family {family} \
         is sure to scale by exponents of {:?}", family.exponents()
    )]
    Scale {
        /// The family.
        family: Family,
        /// Index into the tensor.
        element: usize,
        /// The element before the multiplication.
        bits: u32,
        /// The exponent asked for.
        exponent: i32,
    },
    /// The embedded activations could not be read: a fault of this program's build.
    #[error("the embedded activations: {0}")]
    Real(String),
}

impl Context<'_> {
    /// The length of one vector.
    #[must_use]
    pub const fn head_dim(&self) -> HeadDim {
        self.rotation.head_dim()
    }

    /// A tensor of zeros of this shape; what cannot be allocated is an error, not an abort.
    fn zeros(&self) -> Result<Vec<f32>, InputError> {
        let too_large = InputError::TooLarge {
            rows: self.rows,
            heads: self.heads,
            head_dim: self.head_dim(),
        };
        let mut values = Vec::new();
        let len = (self.rows as usize)
            .checked_mul(self.heads as usize)
            .and_then(|n| n.checked_mul(self.head_dim().get()));
        match len.map(|len| (len, values.try_reserve_exact(len))) {
            Some((len, Ok(()))) => values.resize(len, 0.0),
            _ => return Err(too_large),
        }
        Ok(values)
    }
}

impl Data {
    /// The tensor of `family` that `seed` selects, unscaled.
    #[must_use]
    pub const fn new(family: Family, seed: u64) -> Self {
        Self {
            family,
            seed,
            exponent: 0,
            literal: None,
        }
    }

    /// The same tensor, spelt out: what [`generate`] gives for it no longer depends on a generator.
    pub fn frozen(&self, ctx: &Context) -> Result<Self, InputError> {
        let bits = generate(self, ctx)?.into_iter().map(f32::to_bits).collect();
        let literal = Literal {
            rows: ctx.rows,
            heads: ctx.heads,
            bits,
        };
        Ok(Self {
            literal: Some(literal),
            ..Self::new(self.family, self.seed)
        })
    }
}

/// Fills a [rows, heads, `head_dim`] tensor, row-major.
///
/// An exponent either scales every finite element exactly or is refused ([`InputError::Scale`]):
/// clamped or rounded, the tensor would no longer be the power-of-two multiple that a property
/// compares it with. NaN and infinity stay as they are, payload included.
pub fn generate(data: &Data, ctx: &Context) -> Result<Vec<f32>, InputError> {
    let mut values = match &data.literal {
        Some(literal) => literal.values(ctx)?,
        None => sample(data, ctx)?,
    };
    for (element, x) in values.iter_mut().enumerate() {
        *x = scale(*x, data.exponent).ok_or(InputError::Scale {
            family: data.family,
            element,
            bits: x.to_bits(),
            exponent: data.exponent,
        })?;
    }
    Ok(values)
}

fn sample(data: &Data, ctx: &Context) -> Result<Vec<f32>, InputError> {
    let found = ctx.head_dim();
    if let Some(expected) = data.family.needs_head_dim().filter(|&d| d != found) {
        return Err(InputError::HeadDim {
            family: data.family,
            expected,
            found,
        });
    }
    let mut values = ctx.zeros()?;
    values
        .par_chunks_exact_mut(found.get())
        .enumerate()
        .try_for_each(|(vector, out)| {
            // A tensor without heads has no vectors, so the divisor is not 0.
            let (row, head) = (
                vector as u64 / u64::from(ctx.heads),
                vector as u64 % u64::from(ctx.heads),
            );
            families::fill(data.family, data.seed, row, head, ctx.rotation, out)
        })?;
    Ok(values)
}

/// `x`·2^`exponent` if that is an f32.
fn scale(x: f32, exponent: i32) -> Option<f32> {
    /// From the least subnormal to the largest f32: what lies beyond scales no finite value but 0.
    const USEFUL: RangeInclusive<i32> = -277..=277;
    if exponent == 0 || x == 0.0 || !x.is_finite() {
        return Some(x);
    }
    let exact = f64::from(x) * draw::exp2(USEFUL.contains(&exponent).then_some(exponent)?);
    let scaled = exact as f32;
    (f64::from(scaled) == exact).then_some(scaled)
}

fn is_zero(exponent: &i32) -> bool {
    *exponent == 0
}

/// A `u64` as the `i64` of the same bits.
mod signed {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(seed: &u64, to: S) -> Result<S::Ok, S::Error> {
        seed.cast_signed().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        i64::deserialize(from).map(i64::cast_unsigned)
    }
}
