#![forbid(unsafe_code)]
#![warn(missing_docs)]
//! How fast the kernels of `turboquant-wgpu` are on a device, beside the device's own copy speed and beside
//! other implementations, measured in the same run.
//!
//! A [`job::Job`] names what is measured, a [`workload::Workload`] records it, a [`clock::Clock`] times it, and
//! [`suite::Bench`] goes through a grid of [`shape::Shape`]s. Whoever calls prints the [`report::Report`].

#[cfg(feature = "cera")]
mod cera;
pub mod clock;
mod copy;
pub mod costs;
mod data;
mod error;
mod first_result;
mod flash;
pub mod growth;
pub mod job;
mod ours;
pub mod plot;
pub mod report;
pub mod shape;
pub mod stats;
pub mod suite;
mod twin;
pub mod workload;

pub use error::Error;
pub use first_result::first_result;
