//! Random draws that are the same to the bit on every host.

use rand_xoshiro::Xoshiro256StarStar;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

/// Where normal draws end; one in 10^15 lies further out and is drawn again, so that families can
/// state their range.
pub(super) const NORMAL_LIMIT: f64 = 8.0;

/// 2^`exponent`, exactly, for exponents of normal f64s.
pub(super) fn exp2(exponent: i32) -> f64 {
    debug_assert!((-1022..=1023).contains(&exponent));
    f64::from_bits(((1023 + i64::from(exponent)) as u64) << 52)
}

/// The finaliser of SplitMix64: a bijection in which every input bit moves every output bit.
pub(super) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// A stream of draws for one vector, for one head of every row, or for a whole tensor.
pub(super) struct Draw(Xoshiro256StarStar);

impl Draw {
    /// Stands for "every row" or "every head": out of the range of a real one.
    const ALL: u64 = u64::MAX;

    /// The stream of one vector.
    pub(super) fn vector(seed: u64, row: u64, head: u64) -> Self {
        let key = [row, head].into_iter().fold(mix(seed), |key, part| {
            mix(key.wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_mul(5) ^ part)
        });
        Self(Xoshiro256StarStar::seed_from_u64(key))
    }

    /// What the rows of a head share.
    pub(super) fn head(seed: u64, head: u64) -> Self {
        Self::vector(seed, Self::ALL, head)
    }

    /// What a tensor's vectors share.
    pub(super) fn tensor(seed: u64) -> Self {
        Self::head(seed, Self::ALL)
    }

    pub(super) fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Uniform in 0..n.
    pub(super) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// One of `choices`, which is not empty.
    pub(super) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// `k` different indices below `n`, in random order: a Fisher–Yates shuffle cut short.
    pub(super) fn choose(&mut self, n: usize, k: usize) -> Vec<usize> {
        let mut indices: Vec<usize> = (0..n).collect();
        for i in 0..k {
            let j = i + self.below(n - i);
            indices.swap(i, j);
        }
        indices.truncate(k);
        indices
    }

    /// Uniform in [0, 1), a multiple of 2^-53.
    pub(super) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * exp2(-53)
    }

    /// Uniform in [−1, 1), a multiple of 2^-23: exact as an f32, so that the end points are −1 and
    /// 1 − 2^-23.
    pub(super) fn uniform(&mut self) -> f64 {
        (self.bits() >> 40) as f64 * exp2(-23) - 1.0
    }

    pub(super) fn coin(&mut self) -> bool {
        self.bits() >> 63 == 1
    }

    pub(super) fn sign(&mut self) -> f64 {
        if self.coin() { 1.0 } else { -1.0 }
    }

    /// Uniform in [0.5, 1.5).
    pub(super) fn magnitude(&mut self) -> f64 {
        0.5 + self.unit()
    }

    /// True with probability e^−h, 0 ≤ h ≤ 1: a run of uniform draws that fall from h on has odd or
    /// even length as the terms of the series of e^−h have their signs (von Neumann 1951).
    fn exponential_coin(&mut self, h: f64) -> bool {
        let (mut bound, mut accept) = (h, true);
        loop {
            let next = self.unit();
            if next >= bound {
                return accept;
            }
            (bound, accept) = (next, !accept);
        }
    }

    /// A standard normal deviate without a logarithm, whose last bit would depend on the host:
    /// algorithm N of Karney, "Sampling exactly from the normal distribution", ACM TOMS 2016.
    pub(super) fn normal(&mut self) -> f64 {
        loop {
            let mut k = 0;
            while self.exponential_coin(0.5) {
                k += 1;
            }
            if !(0..k * (k - 1)).all(|_| self.exponential_coin(0.5)) {
                continue;
            }
            let (k, x) = (f64::from(k), self.unit());
            let h = x * (2.0 * k + x) / (2.0 * k + 2.0);
            if k + x < NORMAL_LIMIT && (0..=k as u32).all(|_| self.exponential_coin(h)) {
                return self.sign() * (k + x);
            }
        }
    }

    /// `d` normal deviates scaled to unit length: a uniformly random direction.
    pub(super) fn direction(&mut self, d: usize) -> Vec<f64> {
        let mut x: Vec<f64> = (0..d).map(|_| self.normal()).collect();
        set_norm(&mut x, 1.0);
        x
    }
}

pub(super) fn norm(x: &[f64]) -> f64 {
    x.iter().map(|v| v * v).sum::<f64>().sqrt()
}

/// Scales `x`, which is not all zero, to length `length`.
pub(super) fn set_norm(x: &mut [f64], length: f64) {
    let scale = length / norm(x);
    x.iter_mut().for_each(|v| *v *= scale);
}
