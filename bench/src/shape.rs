//! The shapes that are measured, and their names.

use std::fmt;
use std::str::FromStr;

use turboquant_wgpu::HeadDim;

use crate::Error;

/// One layer of attention and the length of its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Query heads.
    pub n_heads: u32,
    /// KV heads.
    pub n_kv_heads: u32,
    /// Elements of a vector.
    pub head_dim: HeadDim,
    /// Timesteps in the cache.
    pub seq_len: u32,
}

/// Query heads and KV heads: grouped, one to one, and a number of heads that is no power of two.
const HEADS: [(u32, u32); 3] = [(32, 8), (32, 32), (9, 3)];
const HEAD_DIMS: [HeadDim; 3] = [HeadDim::D128, HeadDim::D64, HeadDim::D256];
/// Powers of two, 1,024 to 131,072.
const SEQ_LENS: std::ops::RangeInclusive<u32> = 10..=17;

/// Every shape of the grid. All heads come before the sequence grows, so that short runs tell what long ones will
/// cost, and a budget that ends has been spent on every kind of shape.
pub fn grid() -> impl Iterator<Item = Shape> {
    SEQ_LENS.flat_map(|log2| {
        HEADS.into_iter().flat_map(move |(n_heads, n_kv_heads)| {
            HEAD_DIMS.into_iter().map(move |head_dim| Shape {
                n_heads,
                n_kv_heads,
                head_dim,
                seq_len: 1 << log2,
            })
        })
    })
}

/// The shapes that `name` stands for: all of the grid that begin with it (`32x8`, `32x8-d128`), or the one shape it
/// names, in the grid or not.
///
/// # Errors
/// [`Error::Shape`] if it is neither.
pub fn select(name: &str) -> Result<Vec<Shape>, Error> {
    let named = |shape: &Shape| {
        let full = shape.to_string();
        full.strip_prefix(name)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    let of_grid: Vec<Shape> = grid().filter(named).collect();
    if of_grid.is_empty() {
        return Ok(vec![name.parse()?]);
    }
    Ok(of_grid)
}

impl Shape {
    /// The shape without its sequence: what encoding and rotating depend on.
    #[must_use]
    pub fn heads(&self) -> (u32, u32, HeadDim) {
        (self.n_heads, self.n_kv_heads, self.head_dim)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            n_heads,
            n_kv_heads,
            head_dim,
            seq_len,
        } = self;
        write!(f, "{n_heads}x{n_kv_heads}-d{head_dim}-s{seq_len}")
    }
}

impl FromStr for Shape {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let wrong = |problem: String| Error::Shape {
            found: name.to_owned(),
            problem,
        };
        let mut parts = name.split('-');
        let mut part = |prefix: &str, what: &str| {
            parts
                .next()
                .and_then(|p| p.strip_prefix(prefix))
                .ok_or_else(|| wrong(format!("it lacks {what}")))
        };
        let number = |text: &str, what: &str| match text.parse::<u32>() {
            Ok(n) if n > 0 => Ok(n),
            _ => Err(wrong(format!("{what} is \"{text}\""))),
        };
        let heads = part("", "heads")?;
        let (q, kv) = heads
            .split_once('x')
            .ok_or_else(|| wrong("it lacks KV heads".to_owned()))?;
        let (n_heads, n_kv_heads) = (number(q, "query heads")?, number(kv, "KV heads")?);
        let d = number(part("d", "a head_dim")?, "head_dim")?;
        let seq_len = number(part("s", "a sequence length")?, "the sequence length")?;
        if parts.next().is_some() {
            return Err(wrong("it has more than three parts".to_owned()));
        }
        if n_heads % n_kv_heads != 0 {
            return Err(wrong(format!(
                "{n_heads} query heads are no multiple of {n_kv_heads} KV heads"
            )));
        }
        let head_dim = HeadDim::try_from(d).map_err(|e| wrong(e.to_string()))?;
        Ok(Self {
            n_heads,
            n_kv_heads,
            head_dim,
            seq_len,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_back() {
        assert_eq!(grid().count(), 72);
        assert!(grid().is_sorted_by_key(|shape| shape.seq_len));
        for shape in grid() {
            let name = shape.to_string();
            assert_eq!(name.parse::<Shape>().expect("a name of the grid"), shape);
            assert_eq!(select(&name).expect("a name of the grid"), [shape]);
        }
    }

    #[test]
    fn a_prefix_selects_whole_parts() {
        assert_eq!(select("32x8").expect("heads").len(), 24);
        assert_eq!(select("32x8-d128").expect("heads and head_dim").len(), 8);
        // No shape is meant by half a number.
        assert!(select("32x8-d12").is_err());
        let own = select("4x2-d32-s100").expect("a shape outside the grid");
        assert_eq!((own.len(), own[0].seq_len), (1, 100));
    }

    #[test]
    fn what_is_no_shape_says_why() {
        for (name, why) in [
            ("", "KV heads"),
            ("32x8", "head_dim"),
            ("32x8-d128", "sequence"),
            ("32x8-d128-s0", "\"0\""),
            ("32x7-d128-s64", "multiple"),
            ("32x8-d100-s64", "100"),
            ("32x8-d128-s64-x", "three"),
        ] {
            let error = name.parse::<Shape>().expect_err(name).to_string();
            assert!(error.contains(why), "{name}: {error}");
        }
    }
}
