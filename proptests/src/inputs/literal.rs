//! Tensors written out as bit patterns.

use serde::{Deserialize, Serialize};

use super::{Context, InputError};

/// A tensor as the bits of its elements, so that NaN payloads, −0 and subnormals survive the text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Literal {
    /// Rows of the tensor.
    pub rows: u32,
    /// Heads of each row.
    pub heads: u32,
    /// The f32 bit patterns, row-major; in text, lines of eight-digit hexadecimal words.
    #[serde(with = "hex")]
    pub bits: Vec<u32>,
}

impl Literal {
    /// The elements, if they are a tensor of the shape that `ctx` asks for.
    pub(super) fn values(&self, ctx: &Context) -> Result<Vec<f32>, InputError> {
        let (expected, found) = ([ctx.rows, ctx.heads], [self.rows, self.heads]);
        if expected != found {
            return Err(InputError::LiteralShape { expected, found });
        }
        // A product that saturates is longer than any vector.
        let expected = [ctx.rows as usize, ctx.heads as usize]
            .into_iter()
            .fold(ctx.head_dim().get(), usize::saturating_mul);
        let found = self.bits.len();
        if expected != found {
            return Err(InputError::LiteralLength { expected, found });
        }
        Ok(self.bits.iter().map(|&bits| f32::from_bits(bits)).collect())
    }
}

mod hex {
    use serde::de::{Deserialize, Deserializer, Error};
    use serde::ser::Serializer;

    /// Words in a line: a divisor of every head dimension, and short enough to read in a diff.
    const LINE: usize = 8;

    pub(super) fn serialize<S: Serializer>(bits: &[u32], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(bits.chunks(LINE).map(|line| {
            let words: Vec<String> = line.iter().map(|word| format!("{word:08x}")).collect();
            words.join(" ")
        }))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u32>, D::Error> {
        let word = |word: &str| {
            let all_hex = word.len() == 8 && word.bytes().all(|b| b.is_ascii_hexdigit());
            let bits = all_hex
                .then(|| u32::from_str_radix(word, 16).ok())
                .flatten();
            bits.ok_or_else(|| {
                D::Error::custom(format!("expected eight hex digits, found {word:?}"))
            })
        };
        let lines = Vec::<String>::deserialize(from)?;
        lines
            .iter()
            .flat_map(|line| line.split_whitespace())
            .map(word)
            .collect()
    }
}
