//! The 2-bit scalar quantiser: head dimensions, decision boundaries and centroids.
//!
//! A coordinate of a uniformly random unit vector in R^d has density ∝ (1 − x²)^((d − 3)/2) on
//! [−1, 1]. The 4-level Lloyd–Max quantiser of that density (Max 1960; Lloyd 1982; used by
//! TurboQuant, arXiv:2504.19874, section 3.1) is symmetric about 0, so two centroids and one boundary
//! describe it. The tests prove every table a fixed point of Lloyd's two conditions — each
//! boundary the midpoint of its neighbours, each centroid the mean of its cell — from the density
//! alone.

use crate::Error;

/// Length of one key, value or query vector. The four lengths that the quantiser is tabulated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HeadDim {
    /// 32 elements.
    D32,
    /// 64 elements.
    D64,
    /// 128 elements.
    D128,
    /// 256 elements.
    D256,
}

impl HeadDim {
    /// Every supported head dimension, ascending.
    pub const ALL: [Self; 4] = [Self::D32, Self::D64, Self::D128, Self::D256];

    /// The number of elements in a vector.
    #[must_use]
    pub const fn get(self) -> usize {
        match self {
            Self::D32 => 32,
            Self::D64 => 64,
            Self::D128 => 128,
            Self::D256 => 256,
        }
    }

    /// [`HeadDim::get`] as a `u32`, the type the device and the blob headers use.
    #[must_use]
    pub const fn get_u32(self) -> u32 {
        self.get() as u32
    }

    /// log₂ of the head dimension: the number of butterfly stages of the rotation.
    #[must_use]
    pub const fn log2(self) -> u32 {
        self.get_u32().trailing_zeros()
    }

    /// 1/√d in f32, the factor that makes the Walsh–Hadamard transform orthonormal.
    #[must_use]
    pub fn inv_sqrt(self) -> f32 {
        1.0 / (self.get() as f32).sqrt()
    }

    /// The quantiser of this head dimension.
    #[must_use]
    pub const fn codebook(self) -> &'static Codebook {
        match self {
            Self::D32 => &CODEBOOK_32,
            Self::D64 => &CODEBOOK_64,
            Self::D128 => &CODEBOOK_128,
            Self::D256 => &CODEBOOK_256,
        }
    }
}

impl TryFrom<u32> for HeadDim {
    type Error = Error;

    fn try_from(value: u32) -> Result<Self, Error> {
        Self::ALL
            .into_iter()
            .find(|d| d.get_u32() == value)
            .ok_or(Error::UnsupportedHeadDim { found: value })
    }
}

impl core::fmt::Display for HeadDim {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.get().fmt(f)
    }
}

/// Boundaries and centroids of the 4-level quantiser of one head dimension.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Codebook {
    /// Decision boundaries, ascending. The middle one is exactly 0.
    pub boundaries: [f32; 3],
    /// Reconstruction points, ascending; `centroids[c]` is what code `c` stands for.
    pub centroids: [f32; 4],
}

impl Codebook {
    const fn symmetric(boundary: f32, inner: f32, outer: f32) -> Self {
        Self {
            boundaries: [-boundary, 0.0, boundary],
            centroids: [-outer, -inner, inner, outer],
        }
    }

    /// The code of a coordinate: the number of boundaries ≤ `x`, so that an `x` on a boundary
    /// takes the upper cell.
    #[must_use]
    pub fn code(&self, x: f32) -> u8 {
        self.boundaries.iter().filter(|&&b| x >= b).count() as u8
    }

    /// The largest distance between neighbouring centroids: what one free choice of a code can
    /// move a reconstructed coordinate by, relative to the vector's norm.
    #[must_use]
    pub fn largest_gap(&self) -> f32 {
        self.centroids
            .windows(2)
            .map(|w| w[1] - w[0])
            .fold(0.0, f32::max)
    }
}

const CODEBOOK_32: Codebook = Codebook::symmetric(0.17156067, 0.07980193, 0.2633194);
const CODEBOOK_64: Codebook = Codebook::symmetric(0.12200586, 0.05651487, 0.18749686);
const CODEBOOK_128: Codebook = Codebook::symmetric(0.08651656, 0.039991595, 0.13304152);
const CODEBOOK_256: Codebook = Codebook::symmetric(0.061263192, 0.0282886, 0.09423778);

#[cfg(test)]
mod tests {
    use super::*;

    /// Unnormalised density of one coordinate of a random unit vector in R^d.
    fn density(d: f64, x: f64) -> f64 {
        (1.0 - x * x).max(0.0).powf((d - 3.0) / 2.0)
    }

    /// Composite Simpson rule; 20,000 panels make its error far smaller than an f32 ulp here.
    fn integrate(from: f64, to: f64, f: impl Fn(f64) -> f64) -> f64 {
        let n = 20_000;
        let h = (to - from) / f64::from(n);
        let inner: f64 = (1..n)
            .map(|i| f(from + h * f64::from(i)) * if i % 2 == 1 { 4.0 } else { 2.0 })
            .sum();
        (f(from) + inner + f(to)) * h / 3.0
    }

    /// Lloyd's conditions, in f64, from the density alone. The tables were rounded to f32 after an
    /// iteration that stops at a finite step, so a few f32 ulps are what may separate them from
    /// the exact fixed point.
    #[test]
    fn every_table_is_a_lloyd_fixed_point() {
        for head_dim in HeadDim::ALL {
            let d = head_dim.get() as f64;
            let book = head_dim.codebook();
            let edges = [
                -1.0,
                f64::from(book.boundaries[0]),
                f64::from(book.boundaries[1]),
                f64::from(book.boundaries[2]),
                1.0,
            ];
            for c in 0..4 {
                let (from, to) = (edges[c], edges[c + 1]);
                let mean = integrate(from, to, |x| x * density(d, x))
                    / integrate(from, to, |x| density(d, x));
                let table = f64::from(book.centroids[c]);
                approx::assert_relative_eq!(
                    table,
                    mean,
                    max_relative = 4.0 * f64::from(f32::EPSILON)
                );
            }
            for b in 0..3 {
                let midpoint =
                    (f64::from(book.centroids[b]) + f64::from(book.centroids[b + 1])) / 2.0;
                let table = f64::from(book.boundaries[b]);
                assert!(
                    (table - midpoint).abs() <= f64::from(f32::EPSILON) * table.abs(),
                    "d = {d}: boundary {b} is {table}, midpoint {midpoint}"
                );
            }
            assert_eq!(book.boundaries[1].to_bits(), 0, "the middle boundary is +0");
        }
    }

    /// A table that is off by a tenth of a percent must not pass for a fixed point: the test
    /// above can fail.
    #[test]
    fn a_disturbed_table_is_no_fixed_point() {
        let d = 64.0;
        let book = HeadDim::D64.codebook();
        let boundary = f64::from(book.boundaries[2]) * 1.001;
        let mean = integrate(boundary, 1.0, |x| x * density(d, x))
            / integrate(boundary, 1.0, |x| density(d, x));
        let relative = (mean / f64::from(book.centroids[3]) - 1.0).abs();
        assert!(relative > 100.0 * f64::from(f32::EPSILON));
    }

    #[test]
    fn a_coordinate_on_a_boundary_takes_the_upper_cell() {
        for head_dim in HeadDim::ALL {
            let book = head_dim.codebook();
            for (i, &b) in book.boundaries.iter().enumerate() {
                assert_eq!(usize::from(book.code(b)), i + 1);
                assert_eq!(usize::from(book.code(b.next_up())), i + 1);
                assert_eq!(usize::from(book.code(b.next_down())), i);
            }
            assert_eq!(
                book.code(-0.0),
                2,
                "negative zero equals the middle boundary"
            );
        }
    }

    #[test]
    fn unsupported_head_dims_are_refused_by_name() {
        for bad in [0, 8, 16, 31, 33, 48, 80, 96, 192, 512, u32::MAX] {
            let message = HeadDim::try_from(bad).unwrap_err().to_string();
            assert!(message.contains(&bad.to_string()), "{message}");
        }
    }
}
