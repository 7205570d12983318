//! Order statistics of a sample of times.

use serde::Serialize;

/// Times of one thing that was done `n` times, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// How often it was timed.
    pub n: usize,
    /// The middle time.
    pub median_ns: f64,
    /// The shortest.
    pub min_ns: f64,
    /// A quarter took no longer.
    pub q1_ns: f64,
    /// A quarter took no less.
    pub q3_ns: f64,
}

impl Summary {
    /// Of a sample; `None` if it is empty or holds something that is no time.
    #[must_use]
    pub fn new(mut ns: Vec<f64>) -> Option<Self> {
        if ns.is_empty() || ns.iter().any(|t| !t.is_finite() || *t < 0.0) {
            return None;
        }
        ns.sort_by(f64::total_cmp);
        Some(Self {
            n: ns.len(),
            median_ns: quantile(&ns, 0.5),
            min_ns: ns[0],
            q1_ns: quantile(&ns, 0.25),
            q3_ns: quantile(&ns, 0.75),
        })
    }
}

/// The quantile of a sorted sample that is not empty, interpolated between neighbours.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let below = sorted[at.floor() as usize];
    let above = sorted[at.ceil() as usize];
    below + (above - below) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_of_known_samples() {
        let of = |ns: &[f64]| Summary::new(ns.to_vec()).expect("a sample");
        let five = of(&[50.0, 10.0, 40.0, 20.0, 30.0]);
        assert_eq!((five.n, five.min_ns, five.median_ns), (5, 10.0, 30.0));
        assert_eq!((five.q1_ns, five.q3_ns), (20.0, 40.0));
        let even = of(&[1.0, 2.0, 3.0, 10.0]);
        assert_eq!((even.q1_ns, even.median_ns, even.q3_ns), (1.75, 2.5, 4.75));
        let one = of(&[7.0]);
        assert_eq!(
            (one.min_ns, one.q1_ns, one.median_ns, one.q3_ns),
            (7.0, 7.0, 7.0, 7.0)
        );
    }

    /// One slow run moves the median of a long sample to a neighbour at most.
    #[test]
    fn an_outlier_leaves_the_median_alone() {
        let mut ns: Vec<f64> = (1..=21).map(f64::from).collect();
        ns[20] = 1e12;
        assert_eq!(Summary::new(ns).expect("a sample").median_ns, 11.0);
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for bad in [vec![], vec![f64::NAN], vec![1.0, f64::INFINITY], vec![-1.0]] {
            assert_eq!(Summary::new(bad), None);
        }
    }
}
