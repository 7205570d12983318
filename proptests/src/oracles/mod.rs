//! f64 references with running error bounds, one module for each kernel, of the kernel's name.
//!
//! Each says what a *correct* f32 implementation may produce: a value with a bound, or a set of
//! right codes, signs and norms. Each is given what the stage before it left on the device, so that
//! a free choice upstream neither excuses nor condemns what follows.

pub mod attention;
pub mod dequantise;
pub mod encode_keys;
pub mod encode_values;
pub mod gain;
pub mod norm;
pub mod rotate_queries;
pub mod unit;
