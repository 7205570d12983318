//! Inputs of the probes, the same in every run.

use rand_xoshiro::Xoshiro256StarStar;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

/// A seeded source of floats.
pub struct Draw(Xoshiro256StarStar);

impl Draw {
    /// A source of its own for a probe's name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let seed = name.bytes().fold(0x7072_6f62_6500, |s: u64, b| {
            s.rotate_left(9) ^ u64::from(b)
        });
        Self(Xoshiro256StarStar::seed_from_u64(seed))
    }

    /// A float of either sign with an exponent of `low ..= high`, drawn evenly. One significand in eight is all
    /// zeros or all ones, where tables of reciprocals and roots are at their worst.
    pub fn float(&mut self, low: i32, high: i32) -> f32 {
        let bits = self.0.next_u64();
        let significand = match bits >> 32 & 15 {
            0 => 0,
            1 => 0x7f_ffff,
            _ => bits as u32 & 0x7f_ffff,
        };
        let exponent = 127 + low + ((bits >> 40) % (high - low + 1) as u64) as i32;
        f32::from_bits(bits as u32 & 1 << 31 | (exponent as u32) << 23 | significand)
    }

    /// As [`Self::float`], positive.
    pub fn positive(&mut self, low: i32, high: i32) -> f32 {
        self.float(low, high).abs()
    }

    /// A float of `low .. high`, drawn evenly.
    pub fn between(&mut self, low: f64, high: f64) -> f32 {
        let unit = (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        (low + (high - low) * unit) as f32
    }

    /// Any 32 bits.
    pub fn word(&mut self) -> u32 {
        (self.0.next_u64() >> 32) as u32
    }
}
