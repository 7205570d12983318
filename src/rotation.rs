//! The randomised Hadamard transform and its sign vectors.
//!
//! RHT(x; s) = H(s ⊙ x) / √d with H the Walsh–Hadamard matrix in natural (Sylvester) order. It is
//! orthonormal, costs d·log₂ d additions, and spreads a vector's energy over all coordinates, so
//! that each is distributed nearly as the quantiser of [`crate::codebook`] assumes
//! (TurboQuant, arXiv:2504.19874, section 3; the transform in place of a dense random rotation is
//! the usual substitute, cf. Ailon & Chazelle 2009).

use rand_xoshiro::Xoshiro256StarStar;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

use crate::HeadDim;

/// A vector of signs ±1, one bit for each element: bit `i % 32` of word `i / 32`, set for +1.
///
/// Eight words hold the largest head dimension; the words past `head_dim` are 0. The same words are
/// what the parameter blocks carry to the shaders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signs {
    words: [u32; 8],
}

impl Signs {
    /// Draws `head_dim` signs from xoshiro256** whose state comes from SplitMix64 on `seed`: sign
    /// `i` is +1 if the low bit of the `i`-th output is 1.
    #[must_use]
    pub fn from_seed(head_dim: HeadDim, seed: u64) -> Self {
        let mut rng = Xoshiro256StarStar::seed_from_u64(seed);
        let mut words = [0; 8];
        for i in 0..head_dim.get() {
            words[i / 32] |= ((rng.next_u64() & 1) as u32) << (i % 32);
        }
        Self { words }
    }

    /// True where element `i` keeps its sign.
    #[must_use]
    pub fn is_positive(&self, i: usize) -> bool {
        self.words[i / 32] >> (i % 32) & 1 == 1
    }

    /// `x` with sign `i` applied.
    #[must_use]
    pub fn apply(&self, i: usize, x: f32) -> f32 {
        if self.is_positive(i) { x } else { -x }
    }

    /// The bit words, as the shaders read them.
    #[must_use]
    pub const fn words(&self) -> [u32; 8] {
        self.words
    }
}

/// The two rotations of one layer.
///
/// `polar` rotates keys, values and queries before quantisation; `jl` rotates the normalised key
/// residual (and the rotated query) for the 1-bit Johnson–Lindenstrauss sketch. The streams must be
/// independent, which is why the seeds differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    head_dim: HeadDim,
    /// Signs of the first rotation.
    pub polar: Signs,
    /// Signs of the residual's rotation.
    pub jl: Signs,
}

impl Rotation {
    /// The rotations of layer `layer` in a cache with seed `cache_seed`.
    #[must_use]
    pub fn new(head_dim: HeadDim, cache_seed: u64, layer: u32) -> Self {
        Self::from_rotation_seed(head_dim, cache_seed ^ u64::from(layer))
    }

    /// The rotations for `rotation_seed` = cache seed XOR layer.
    #[must_use]
    pub fn from_rotation_seed(head_dim: HeadDim, rotation_seed: u64) -> Self {
        let jl_seed = rotation_seed
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .wrapping_add(1);
        Self {
            head_dim,
            polar: Signs::from_seed(head_dim, rotation_seed),
            jl: Signs::from_seed(head_dim, jl_seed),
        }
    }

    /// The head dimension that the sign vectors were drawn for.
    #[must_use]
    pub const fn head_dim(&self) -> HeadDim {
        self.head_dim
    }
}

/// H·x in place, unnormalised: butterflies of half-width 1, 2, 4, … d/2, each (a, b) → (a+b, a−b).
///
/// `x.len()` is a power of two; every caller in this crate passes `head_dim` elements.
fn walsh_hadamard(x: &mut [f32]) {
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
}

/// RHT(x; signs) in place, in f32; the 1/√d is one multiplication after the last stage.
pub fn rht(head_dim: HeadDim, signs: &Signs, x: &mut [f32]) {
    debug_assert_eq!(x.len(), head_dim.get());
    for (i, v) in x.iter_mut().enumerate() {
        *v = signs.apply(i, *v);
    }
    walsh_hadamard(x);
    let scale = head_dim.inv_sqrt();
    x.iter_mut().for_each(|v| *v *= scale);
}

/// The inverse of [`rht`] in place: signs ⊙ (H·x / √d).
pub fn inverse_rht(head_dim: HeadDim, signs: &Signs, x: &mut [f32]) {
    debug_assert_eq!(x.len(), head_dim.get());
    walsh_hadamard(x);
    let scale = head_dim.inv_sqrt();
    for (i, v) in x.iter_mut().enumerate() {
        *v = signs.apply(i, *v * scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_transform_matches_the_hadamard_matrix() {
        for head_dim in HeadDim::ALL {
            let d = head_dim.get();
            for column in 0..d {
                let mut x = vec![0.0; d];
                x[column] = 1.0;
                walsh_hadamard(&mut x);
                for (row, &v) in x.iter().enumerate() {
                    let expected = if (row & column).count_ones() % 2 == 0 {
                        1.0
                    } else {
                        -1.0
                    };
                    assert_eq!(v, expected, "H[{row}][{column}] of order {d}");
                }
            }
        }
    }

    #[test]
    fn the_inverse_undoes_the_transform() {
        for head_dim in HeadDim::ALL {
            let signs = Signs::from_seed(head_dim, 7);
            let original: Vec<f32> = (0..head_dim.get())
                .map(|i| (i as f32 - 11.5) / 3.0)
                .collect();
            let mut x = original.clone();
            rht(head_dim, &signs, &mut x);
            inverse_rht(head_dim, &signs, &mut x);
            for (a, b) in x.iter().zip(&original) {
                approx::assert_relative_eq!(a, b, max_relative = 1e-4, epsilon = 1e-4);
            }
        }
    }

    #[test]
    fn the_two_streams_of_a_layer_differ_and_layers_differ() {
        let a = Rotation::new(HeadDim::D256, 1, 0);
        let b = Rotation::new(HeadDim::D256, 1, 1);
        assert_ne!(a.polar, a.jl);
        assert_ne!(a.polar, b.polar);
        assert_eq!(b, Rotation::from_rotation_seed(HeadDim::D256, 0));
    }
}
