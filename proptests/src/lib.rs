#![deny(unsafe_code)]
#![warn(missing_docs)]
//! `tqcheck` proves the kernels of `turboquant-wgpu` right on the adapter in front of you.
//!
//! A [`case::Case`] describes one check. [`generators`] draw cases, [`fixture`] brings one to a
//! device, [`oracles`] say what a correct implementation may have produced — an f64 reference
//! with a running error bound, or a set of right codes — and [`properties`] tie them together.
//! [`runner`] draws, checks, shrinks and counts.

pub mod adapters;
pub mod arithmetic;
pub mod case;
pub mod commands;
mod experimental;
pub mod fixture;
pub mod fuzzing;
pub mod generators;
pub mod inputs;
mod litter;
pub mod model;
pub mod oracles;
pub mod probes;
pub mod properties;
pub mod readback;
pub mod regressions;
pub mod run_report;
pub mod runner;
mod self_test;
pub mod sequence;
pub mod session;
pub mod statistics;
pub mod verdict;
