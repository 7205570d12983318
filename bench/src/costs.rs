//! What things have cost so far, to tell what will take too long before it is started.

use std::collections::HashMap;

use turboquant_wgpu::HeadDim;

use crate::job::{Job, Kernel};

type Key = (&'static str, Kernel, (u32, u32, HeadDim));

/// Nanoseconds an element of each implementation's kernels, by heads and head dimension.
#[derive(Debug, Default)]
pub struct Costs(HashMap<Key, f64>);

impl Costs {
    fn key(implementation: &'static str, job: &Job) -> Key {
        (implementation, job.kernel, job.shape.heads())
    }

    /// Notes that the job took so long. The last of a kind counts: it is the nearest to what comes next where jobs
    /// grow, and small ones are dear for their size, so that an estimate errs upwards.
    pub fn note(&mut self, implementation: &'static str, job: &Job, ns: f64) {
        self.0
            .insert(Self::key(implementation, job), ns / job.work());
    }

    /// What the job will take, if any of its kind has been noted.
    #[must_use]
    pub fn estimate_ns(&self, implementation: &'static str, job: &Job) -> Option<f64> {
        let rate = self.0.get(&Self::key(implementation, job))?;
        Some(rate * job.work())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_grow_with_rows_and_sequence() {
        let job = |rows, name: &str| Job {
            kernel: Kernel::Prefill,
            shape: name.parse().expect("a shape"),
            rows,
        };
        let mut costs = Costs::default();
        let small = job(1, "32x8-d128-s256");
        let whole = job(64, "32x8-d128-s1024");
        assert_eq!(costs.estimate_ns("x", &whole), None);
        costs.note("x", &small, 1e6);
        let found = costs.estimate_ns("x", &whole).expect("noted");
        assert!((found / (256.0 * 1e6) - 1.0).abs() < 1e-12, "{found}");
        assert_eq!(costs.estimate_ns("y", &whole), None);
        assert_eq!(costs.estimate_ns("x", &job(1, "9x3-d128-s256")), None);
    }
}
