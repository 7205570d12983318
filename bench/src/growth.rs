//! How time and memory grow with the sequence, the rows, the heads and the layers, one of them at a time.

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;
use turboquant_wgpu::Gpu;

use crate::clock::{Clock, Source};
use crate::job::{Job, Kernel};
use crate::ours::Ours;
use crate::shape::Shape;
use crate::stats::Summary;
use crate::suite::{Scale, TIME_LIMIT};
use crate::workload::Record;
use crate::{Error, clock};

/// Slopes of neighbouring stretches that differ by more are a bend: noise of a few per cent over a doubling moves
/// a slope by a tenth at most.
const BEND: f64 = 0.35;
/// Growth by a factor of two is told from noise by its median over so many runs.
const LEAST_REPEATS: usize = 3;
/// No point is timed for longer, once it has been timed often enough.
const ENOUGH: Duration = Duration::from_secs(1);

/// What grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Timesteps in the cache.
    Sequence,
    /// Rows encoded, rotated or attended.
    Rows,
    /// KV heads, with four query heads for each.
    Heads,
    /// Layers, one after the other in one submission.
    Layers,
}

impl Axis {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sequence => "sequence",
            Self::Rows => "rows",
            Self::Heads => "heads",
            Self::Layers => "layers",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is grown, each along its axis.
pub const SERIES: [(Kernel, Axis); 9] = [
    (Kernel::Decode, Axis::Sequence),
    (Kernel::Prefill, Axis::Sequence),
    (Kernel::Encode, Axis::Rows),
    (Kernel::Rotate, Axis::Rows),
    (Kernel::Prefill, Axis::Rows),
    (Kernel::Encode, Axis::Heads),
    (Kernel::Decode, Axis::Heads),
    (Kernel::Encode, Axis::Layers),
    (Kernel::Decode, Axis::Layers),
];

/// One size of one series.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Point {
    /// How many timesteps, rows, heads or layers.
    pub x: u32,
    /// Which clock the times were read from.
    pub timing: Source,
    /// Times.
    #[serde(flatten)]
    pub time: Summary,
    /// Bytes of the cache's buffers.
    pub cache_bytes: u64,
    /// Bytes that the device's allocator gave out for it, inputs, scratch and outputs too, if it keeps account.
    pub allocated_bytes: Option<u64>,
}

/// A kernel along an axis.
#[derive(Clone, Debug, Serialize)]
pub struct Series {
    /// The kernel.
    pub kernel: Kernel,
    /// What grows.
    pub axis: Axis,
    /// What does not, in words.
    pub fixed: String,
    /// In order of x.
    pub points: Vec<Point>,
    /// Where the slope of the time changes.
    pub bends: Vec<Bend>,
    /// Why it ends before its last size, if it does.
    pub ended: Option<String>,
}

/// A change of slope on log axes: of the power of x that the time grows with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bend {
    /// Where.
    pub x: u32,
    /// The power before.
    pub before: f64,
    /// The power after.
    pub after: f64,
}

impl Series {
    /// `kernel by axis`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{} by {}", self.kernel.name(), self.axis)
    }
}

/// Where neighbouring stretches of a curve differ in slope on log axes. Points are (x, y), both above zero.
#[must_use]
pub fn bends(points: &[(u32, f64)]) -> Vec<Bend> {
    let slope =
        |a: (u32, f64), b: (u32, f64)| (b.1 / a.1).ln() / (f64::from(b.0) / f64::from(a.0)).ln();
    points
        .windows(3)
        .map(|w| Bend {
            x: w[1].0,
            before: slope(w[0], w[1]),
            after: slope(w[1], w[2]),
        })
        .filter(|bend| (bend.after - bend.before).abs() > BEND)
        .collect()
}

/// Sizes of a series, powers of two.
fn sizes(kernel: Kernel, axis: Axis, scale: Scale) -> Vec<u32> {
    let (first, last) = match (axis, kernel, scale) {
        (Axis::Sequence, _, Scale::Gpu) => (8, 17),
        (Axis::Sequence, Kernel::Prefill, Scale::Cpu) => (6, 10),
        (Axis::Sequence, _, Scale::Cpu) => (6, 13),
        (Axis::Rows, Kernel::Prefill, Scale::Gpu) => (0, 10),
        (Axis::Rows, Kernel::Prefill, Scale::Cpu) => (0, 6),
        (Axis::Rows, _, Scale::Gpu) => (0, 15),
        (Axis::Rows, _, Scale::Cpu) => (0, 10),
        (Axis::Heads, ..) | (Axis::Layers, ..) => (0, 5),
    };
    (first..=last).map(|log2| 1 << log2).collect()
}

/// What is done at a size: the job, the layers that do it, and what stays as it is.
fn point(kernel: Kernel, axis: Axis, scale: Scale, x: u32) -> Result<(Job, u32, String), Error> {
    let cpu = scale == Scale::Cpu;
    let mut rows = match kernel {
        Kernel::Decode => 1,
        Kernel::Prefill if cpu => 4,
        Kernel::Prefill => 64,
        Kernel::Encode | Kernel::Rotate if cpu => 64,
        Kernel::Encode | Kernel::Rotate => 512,
    };
    let mut seq_len = if cpu { 512 } else { 4096 };
    let (mut kv_heads, mut layers) = (8, 1);
    match axis {
        Axis::Sequence => seq_len = x,
        Axis::Rows => rows = x,
        Axis::Heads => kv_heads = x,
        Axis::Layers => layers = x,
    }
    let parts = [
        (Axis::Sequence, format!("{seq_len} timesteps")),
        (Axis::Rows, format!("{rows} rows")),
        (Axis::Heads, format!("{}x{kv_heads} heads", 4 * kv_heads)),
        (Axis::Layers, format!("{layers} layer")),
    ];
    let fixed: Vec<String> = parts
        .into_iter()
        .filter(|(a, _)| *a != axis && (kernel.attends() || *a != Axis::Sequence))
        .map(|(_, text)| text)
        .collect();
    let shape: Shape = format!("{}x{kv_heads}-d128-s{seq_len}", 4 * kv_heads).parse()?;
    let job = Job {
        kernel,
        shape,
        rows,
    };
    Ok((job, layers, format!("{}, head_dim 128", fixed.join(", "))))
}

/// What a measurement of growth is given.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Each point so often, unless it takes too long.
    pub repeats: usize,
    /// On such a device.
    pub scale: Scale,
    /// All together in no more than this, shared evenly over what is left to do.
    pub budget: Option<Duration>,
}

/// Measures every series, and tells of each as it ends.
///
/// # Errors
/// The library fails.
pub fn measure(
    gpu: &Gpu,
    clock: &Clock,
    plan: Plan,
    mut tell: impl FnMut(&Series),
) -> Result<Vec<Series>, Error> {
    let start = Instant::now();
    let mut all = Vec::new();
    for (done, (kernel, axis)) in SERIES.into_iter().enumerate() {
        // What one series leaves of its share is the next ones'.
        let left = plan
            .budget
            .map(|budget| budget.saturating_sub(start.elapsed()) / (SERIES.len() - done) as u32);
        let series = measure_series(gpu, clock, plan, kernel, axis, left)?;
        tell(&series);
        all.push(series);
    }
    Ok(all)
}

fn measure_series(
    gpu: &Gpu,
    clock: &Clock,
    plan: Plan,
    kernel: Kernel,
    axis: Axis,
    budget: Option<Duration>,
) -> Result<Series, Error> {
    let start = Instant::now();
    let mut series = Series {
        kernel,
        axis,
        fixed: String::new(),
        points: Vec::new(),
        bends: Vec::new(),
        ended: None,
    };
    let mut last = Duration::ZERO;
    for x in sizes(kernel, axis, plan.scale) {
        let (job, layers, fixed) = point(kernel, axis, plan.scale, x)?;
        series.fixed = fixed;
        // What is twice as large takes four times as long at most, setting up counted.
        let expected = 4 * last;
        let limit = budget.map_or(TIME_LIMIT, |b| b.min(TIME_LIMIT + start.elapsed()));
        if expected + start.elapsed() > limit {
            series.ended = Some(format!(
                "{axis} {x} may take {:.0} s: {:.0} s are left for it",
                expected.as_secs_f64(),
                limit.saturating_sub(start.elapsed()).as_secs_f64()
            ));
            break;
        }
        let began = Instant::now();
        match measure_point(gpu, clock, plan.repeats, &job, layers, x) {
            Ok(point) => series.points.push(point),
            Err(Error::Library(turboquant_wgpu::Error::TooLarge { .. })) => {
                series.ended = Some(format!("{axis} {x} passes a limit of the adapter"));
                break;
            }
            Err(error) => return Err(error),
        }
        last = began.elapsed();
    }
    let curve: Vec<(u32, f64)> = series
        .points
        .iter()
        .map(|p| (p.x, p.time.median_ns))
        .collect();
    series.bends = bends(&curve);
    Ok(series)
}

fn measure_point(
    gpu: &Gpu,
    clock: &Clock,
    repeats: usize,
    job: &Job,
    layers: u32,
    x: u32,
) -> Result<Point, Error> {
    let allocated = || {
        let report = gpu.device().generate_allocator_report();
        report.map(|report| report.total_allocated_bytes)
    };
    let before = allocated();
    let mut ours = Ours::new(gpu, job, layers)?;
    let allocated_bytes = match (before, allocated()) {
        (Some(before), Some(after)) => Some(after.saturating_sub(before)),
        _ => None,
    };
    let mut once =
        || clock.time(|encoder| (0..layers).try_for_each(|layer| ours.record(encoder, layer)));
    once()?;
    let start = Instant::now();
    let mut ns = Vec::new();
    let mut timing = clock.source();
    while ns.len() < LEAST_REPEATS || (ns.len() < repeats && start.elapsed() < ENOUGH) {
        let sample = once()?;
        timing = sample.source();
        ns.push(sample.ns());
    }
    let time = Summary::new(ns).ok_or_else(|| Error::Stamps("a time is none".to_owned()))?;
    let point = Point {
        x,
        timing,
        time,
        cache_bytes: ours.cache_bytes(),
        allocated_bytes,
    };
    // Buffers are given back when the device next looks.
    drop(ours);
    clock::run(
        gpu,
        gpu.device().create_command_encoder(&Default::default()),
    )?;
    Ok(point)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bend_is_where_the_power_changes() {
        let xs = [1_u32, 2, 4, 8, 16, 32];
        let curve = |f: &dyn Fn(f64) -> f64| -> Vec<(u32, f64)> {
            xs.iter().map(|&x| (x, f(f64::from(x)))).collect()
        };
        for power in [0.0, 1.0, 2.0] {
            assert_eq!(bends(&curve(&|x| 7.0 * x.powf(power))), [], "{power}");
        }
        // Flat to 8, then linear.
        let [bend] = bends(&curve(&|x| x.max(8.0)))[..] else {
            panic!("one bend expected");
        };
        assert_eq!(bend.x, 8);
        assert!(bend.before.abs() < 1e-12 && (bend.after - 1.0).abs() < 1e-12);
        // Noise of 5 % is none.
        let noisy = curve(&|x| x * (1.0 + 0.05 * (x * 2.3).sin()));
        assert_eq!(bends(&noisy), []);
        assert_eq!(bends(&[(1, 1.0), (2, 9.0)]), []);
    }

    #[test]
    fn a_series_grows_in_its_axis_alone() {
        for (kernel, axis) in SERIES {
            for scale in [Scale::Cpu, Scale::Gpu] {
                let xs = sizes(kernel, axis, scale);
                assert!(xs.len() >= 5 && xs.is_sorted());
                let at = |x| point(kernel, axis, scale, x).expect("a shape");
                let (first, last) = (at(xs[0]), at(xs[xs.len() - 1]));
                assert_eq!(first.2, last.2, "what is fixed");
                assert!(!first.2.contains(&format!(" {axis}")), "{}", first.2);
                let values = |p: &(Job, u32, String)| {
                    [p.0.shape.seq_len, p.0.rows, p.0.shape.n_kv_heads, p.1]
                };
                let changed = values(&first)
                    .into_iter()
                    .zip(values(&last))
                    .filter(|(a, b)| a != b);
                assert_eq!(changed.count(), 1, "{} by {axis}", kernel.name());
            }
        }
    }
}
