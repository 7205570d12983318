//! What is measured: one kernel, over one shape, for so many rows.

use serde::Serialize;
use turboquant_wgpu::LayerShape;
use turboquant_wgpu::layout::{DeviceLayout, Kind};

use crate::Error;
use crate::shape::Shape;

/// A step of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kernel {
    /// Keys and values into the cache.
    Encode,
    /// Queries by both rotations.
    Rotate,
    /// Attention of one row of rotated queries, the last.
    Decode,
    /// Attention of the last rows of the sequence, rotated before.
    Prefill,
}

impl Kernel {
    /// Every one.
    pub const ALL: [Self; 4] = [Self::Encode, Self::Rotate, Self::Decode, Self::Prefill];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Encode => "encode",
            Self::Rotate => "rotate",
            Self::Decode => "decode",
            Self::Prefill => "prefill",
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|k| k.name() == name)
    }

    /// True if it reads the cache.
    #[must_use]
    pub const fn attends(self) -> bool {
        matches!(self, Self::Decode | Self::Prefill)
    }
}

/// A kernel over a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Job {
    /// What is done.
    pub kernel: Kernel,
    /// To what.
    pub shape: Shape,
    /// Rows of keys and values, or of queries.
    pub rows: u32,
}

impl Job {
    /// Position of the first row: attention is of the last rows of the sequence.
    #[must_use]
    pub fn start_pos(&self) -> u32 {
        self.shape.seq_len.saturating_sub(self.rows)
    }

    /// Timesteps that the cache has to have room for.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        if self.kernel.attends() {
            self.shape.seq_len
        } else {
            self.rows
        }
    }

    /// Bytes that have to be read from memory at least: the f32 source of `encode` and `rotate`, the records of
    /// all KV heads, once, for attention.
    ///
    /// # Errors
    /// The cache is too large for the library.
    pub fn bytes(&self) -> Result<u64, Error> {
        let Shape {
            n_heads,
            n_kv_heads,
            head_dim,
            seq_len,
        } = self.shape;
        let row = 4 * u64::from(self.rows) * u64::from(head_dim.get_u32());
        Ok(match self.kernel {
            Kernel::Encode => 2 * row * u64::from(n_kv_heads),
            Kernel::Rotate => row * u64::from(n_heads),
            Kernel::Decode | Kernel::Prefill => {
                let shape = LayerShape {
                    head_dim,
                    n_kv_heads,
                };
                [Kind::Keys, Kind::Values]
                    .into_iter()
                    .map(|kind| DeviceLayout::new(kind, shape, seq_len).map(|l| l.bytes()))
                    .sum::<Result<u64, _>>()?
            }
        })
    }

    /// Bytes that the same attention reads of a cache in f16.
    #[must_use]
    pub fn bytes_f16(&self) -> u64 {
        let Shape {
            n_kv_heads,
            head_dim,
            seq_len,
            ..
        } = self.shape;
        4 * u64::from(n_kv_heads) * u64::from(head_dim.get_u32()) * u64::from(seq_len)
    }

    /// Elements touched, the measure by which times are extrapolated. Causality halves the work of the rows
    /// themselves, which is neglected.
    #[must_use]
    pub fn work(&self) -> f64 {
        let vectors = match self.kernel {
            Kernel::Encode => self.shape.n_kv_heads,
            _ => self.shape.n_heads,
        };
        let seen = if self.kernel.attends() {
            self.shape.seq_len
        } else {
            1
        };
        f64::from(self.rows)
            * f64::from(vectors)
            * f64::from(self.shape.head_dim.get_u32())
            * f64::from(seen)
    }

    /// The same kernel with so little to do that it takes a moment anywhere: what a first estimate is made from.
    #[must_use]
    pub fn small(&self) -> Self {
        let (rows, seq_len) = match self.kernel {
            Kernel::Encode | Kernel::Rotate => (self.rows.min(16), self.shape.seq_len),
            Kernel::Decode | Kernel::Prefill => (1, self.shape.seq_len.min(256)),
        };
        Self {
            shape: Shape {
                seq_len,
                ..self.shape
            },
            rows,
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(kernel: Kernel, name: &str, rows: u32) -> Job {
        Job {
            kernel,
            shape: name.parse().expect("a shape"),
            rows,
        }
    }

    /// 88 bytes a key and value at head_dim 128, 48 at 64, 168 at 256, for each KV head and timestep.
    #[test]
    fn attention_reads_every_record_once() {
        for (name, bytes) in [
            ("32x8-d128-s1024", 88 * 8 * 1024),
            ("32x32-d64-s4096", 48 * 32 * 4096),
            ("9x3-d256-s131072", 168 * 3 * 131_072),
        ] {
            for (kernel, rows) in [(Kernel::Decode, 1), (Kernel::Prefill, 512)] {
                let found = job(kernel, name, rows).bytes().expect("it fits");
                assert_eq!(found, bytes, "{name}");
            }
        }
        assert_eq!(
            job(Kernel::Decode, "32x8-d128-s1024", 1).bytes_f16(),
            512 * 8 * 1024
        );
    }

    #[test]
    fn encode_reads_keys_and_values_and_rotate_the_queries() {
        let name = "32x8-d128-s1024";
        let encode = job(Kernel::Encode, name, 512).bytes().expect("it fits");
        assert_eq!(encode, 2 * 512 * 8 * 128 * 4);
        let rotate = job(Kernel::Rotate, name, 512).bytes().expect("it fits");
        assert_eq!(rotate, 512 * 32 * 128 * 4);
    }

    #[test]
    fn the_last_rows_attend() {
        assert_eq!(job(Kernel::Decode, "32x8-d128-s1024", 1).start_pos(), 1023);
        assert_eq!(
            job(Kernel::Prefill, "32x8-d128-s1024", 512).start_pos(),
            512
        );
    }

    #[test]
    fn a_small_job_is_smaller_and_of_its_kind() {
        for kernel in Kernel::ALL {
            let whole = job(kernel, "32x8-d128-s131072", 512);
            let small = whole.small();
            assert!(small.work() < whole.work() / 30.0);
            assert_eq!(
                (small.kernel, small.shape.heads()),
                (kernel, whole.shape.heads())
            );
        }
    }
}
