//! Bodies of the fuzz targets.
//!
//! Each target is a function of bytes in a module of its own: it panics if what the bytes do
//! breaks a promise, and says otherwise whether they were accepted. The package in `fuzz/` is glue
//! around these functions, so that a finding is replayed by `cargo test` on a stable compiler, as
//! are the seeds in `regressions/seeds` and everything saved in `regressions/fuzz`.
//!
//! Bytes alone seldom get past a length that has to agree with a header, a checksum, or a
//! vocabulary. A target's `shape` function repairs mutated bytes that far, most of the time.

mod case_toml;
mod container;
mod decode;
mod decode_differential;
mod encode_cpu;
mod literal;
mod restore_gate;
mod roundtrip;
pub mod seeds;
mod shape;
#[cfg(test)]
mod tests;

/// What became of an input. A fuzzer whose inputs are all refused has tested the refusals alone,
/// which is why they are counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was what the target reads, and everything promised of that holds.
    Accepted,
    /// It was not, and a reason was given.
    Refused,
}

/// A fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name of the target, its directories and its dictionary.
    pub name: &'static str,
    /// Runs one input.
    ///
    /// # Panics
    /// A promise is broken.
    pub run: fn(&[u8]) -> Fate,
    /// Repairs the input in the first `size` bytes of a buffer, within the buffer, and returns its
    /// new size. `seed` chooses what is repaired.
    pub shape: fn(&mut [u8], usize, u32) -> usize,
}

/// `decode_keys`: the decoder on what should be a key blob.
pub const DECODE_KEYS: Target = Target {
    name: "decode_keys",
    run: decode::keys,
    shape: decode::shape_keys,
};
/// `decode_values`: the decoder on what should be a value blob.
pub const DECODE_VALUES: Target = Target {
    name: "decode_values",
    run: decode::values,
    shape: decode::shape_values,
};
/// `restore_gate`: a layer's shape and a pair of blobs through the gate.
pub const RESTORE_GATE: Target = Target {
    name: "restore_gate",
    run: restore_gate::run,
    shape: restore_gate::shape,
};
/// `roundtrip`: an arbitrary cache to blobs, to a device's words, and back.
pub const ROUNDTRIP: Target = Target {
    name: "roundtrip",
    run: roundtrip::run,
    shape: unshaped,
};
/// `decode_differential`: the decoder against a literal one.
pub const DECODE_DIFFERENTIAL: Target = Target {
    name: "decode_differential",
    run: decode_differential::run,
    shape: decode_differential::shape,
};
/// `container`: any bytes as a container, and any damage to a good one.
pub const CONTAINER: Target = Target {
    name: "container",
    run: container::run,
    shape: container::shape,
};
/// `encode_cpu`: any f32 bits through the CPU twin.
pub const ENCODE_CPU: Target = Target {
    name: "encode_cpu",
    run: encode_cpu::run,
    shape: unshaped,
};
/// `case_toml`: the parser of saved cases.
pub const CASE_TOML: Target = Target {
    name: "case_toml",
    run: case_toml::run,
    shape: unshaped,
};

/// Every target.
pub const TARGETS: [Target; 8] = [
    DECODE_KEYS,
    DECODE_VALUES,
    RESTORE_GATE,
    ROUNDTRIP,
    DECODE_DIFFERENTIAL,
    CONTAINER,
    ENCODE_CPU,
    CASE_TOML,
];

/// Whether an error has words for itself. Formats it without allocating, which would cost more
/// than all the rest of an execution under a sanitiser.
fn says_something(error: &dyn core::fmt::Display) -> bool {
    struct Count(usize);
    impl core::fmt::Write for Count {
        fn write_str(&mut self, text: &str) -> core::fmt::Result {
            self.0 += text.len();
            Ok(())
        }
    }
    let mut count = Count(0);
    core::fmt::write(&mut count, format_args!("{error}")).is_ok() && count.0 > 0
}

/// For targets that make something of any bytes.
fn unshaped(_: &mut [u8], size: usize, _: u32) -> usize {
    size
}
