//! A run over a grid of shapes.

use std::time::{Duration, Instant};

use turboquant_wgpu::{Gpu, KernelVariant};

use crate::clock::Clock;
use crate::costs::Costs;
use crate::job::{Job, Kernel};
use crate::report::{BaselineRow, Copy, Measured, Row, Skipped};
use crate::shape::Shape;
use crate::stats::Summary;
use crate::workload::Setup;
use crate::{Error, copy, growth, ours};

/// A job is skipped if it is expected to take longer, warm-up and setting up counted.
pub const TIME_LIMIT: Duration = Duration::from_secs(30);
/// No job is timed for longer, once it has been timed often enough for a median.
const ENOUGH: Duration = Duration::from_secs(3);
const LEAST_REPEATS: usize = 3;
const WARM_UPS: u32 = 2;
/// What takes longer than this is timed once: what a first time costs beside is small then.
const SLOW_NS: f64 = 2e9;

/// The library's name among implementations.
pub const OURS: &str = "turboquant-wgpu";

/// How much a device is given to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// A GPU, with memory to spare.
    Gpu,
    /// A CPU that plays one.
    Cpu,
}

impl Scale {
    /// What suits an adapter.
    #[must_use]
    pub fn of(device_type: wgpu::DeviceType) -> Self {
        match device_type {
            wgpu::DeviceType::Cpu => Self::Cpu,
            _ => Self::Gpu,
        }
    }

    /// Bytes of the buffer that is copied to find the copy speed.
    pub(crate) fn copy_bytes(self) -> u64 {
        match self {
            Self::Gpu => 256 << 20,
            Self::Cpu => 32 << 20,
        }
    }

    /// The rows that a kernel is measured with.
    #[must_use]
    pub fn rows(self, kernel: Kernel) -> &'static [u32] {
        match (kernel, self) {
            (Kernel::Decode, _) => &[1],
            (Kernel::Encode, Self::Gpu) => &[512, 8192],
            (Kernel::Encode | Kernel::Rotate, _) | (Kernel::Prefill, Self::Gpu) => &[512],
            (Kernel::Prefill, Self::Cpu) => &[64],
        }
    }

    /// Sets of inputs to use in turn: so many that together they exceed the last cache before memory (50 MB
    /// on the largest GPUs of today), with room for what lies beside them.
    fn turns(self, job: &Job, bytes: u64) -> u32 {
        let (exceed, most) = match (self, job.kernel) {
            // What it does with each byte hides where that comes from; its scratch is large.
            (Self::Gpu, Kernel::Prefill) => (128 << 20, 4),
            (Self::Gpu, _) => (128 << 20, 256),
            (Self::Cpu, _) => (32 << 20, 2),
        };
        u64::div_ceil(exceed, bytes.max(1)).clamp(2, most) as u32
    }
}

/// Another implementation that the library's is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Baseline {
    /// Flash decoding over an uncompressed cache in f16, by a kernel of ours.
    FlashF16,
    /// The kernels of cera 0.5.5.
    Cera,
    /// The library's CPU twin, on one core.
    Twin,
}

impl Baseline {
    /// Every one that this program could have.
    pub const ALL: [Self; 3] = [Self::FlashF16, Self::Cera, Self::Twin];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FlashF16 => "flash_f16",
            Self::Cera => "cera",
            Self::Twin => "twin",
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|b| b.name() == name)
    }

    /// True if its cache is filled by its own encoding, which takes time.
    const fn encodes(self) -> bool {
        matches!(self, Self::Cera)
    }

    /// How it is set up; `None` if it is not built in.
    #[must_use]
    pub fn setup(self) -> Option<Setup> {
        match self {
            Self::FlashF16 => Some(crate::flash::setup),
            Self::Twin => Some(crate::twin::setup),
            #[cfg(feature = "cera")]
            Self::Cera => Some(crate::cera::setup),
            #[cfg(not(feature = "cera"))]
            Self::Cera => None,
        }
    }
}

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Over these shapes.
    pub shapes: Vec<Shape>,
    /// These kernels.
    pub kernels: Vec<Kernel>,
    /// Beside these.
    pub baselines: Vec<Baseline>,
    /// Each so often, unless it takes too long.
    pub repeats: usize,
    /// On such a device.
    pub scale: Scale,
    /// All together in no more than this; what would take longer is left out.
    pub budget: Option<Duration>,
}

impl Plan {
    /// The jobs, in order. Encoding and rotating do not depend on the sequence, and are done once for shapes that
    /// differ in nothing else.
    #[must_use]
    pub fn jobs(&self) -> Vec<Job> {
        let mut jobs: Vec<Job> = Vec::new();
        for &shape in &self.shapes {
            for &kernel in &self.kernels {
                for &rows in self.scale.rows(kernel) {
                    let job = Job {
                        kernel,
                        shape,
                        rows: rows.min(match kernel {
                            Kernel::Prefill => shape.seq_len,
                            _ => rows,
                        }),
                    };
                    let same = |other: &Job| {
                        !kernel.attends()
                            && (other.kernel, other.rows) == (kernel, job.rows)
                            && other.shape.heads() == shape.heads()
                    };
                    if !jobs.iter().any(same) {
                        jobs.push(job);
                    }
                }
            }
        }
        jobs
    }
}

/// What a job is given to.
#[derive(Clone, Copy)]
struct Implementation {
    name: &'static str,
    setup: Setup,
    encodes: bool,
}

/// When a run has to end.
#[derive(Clone, Copy, Debug)]
struct Deadline {
    start: Instant,
    budget: Duration,
}

impl Deadline {
    /// Why something that takes so long is not begun any more, if so.
    fn left(self, expected: Duration) -> Result<(), String> {
        let left = self.budget.saturating_sub(self.start.elapsed());
        if left.is_zero() {
            return Err(format!(
                "the budget of {:.1} min is spent",
                self.budget.as_secs_f64() / 60.0
            ));
        }
        if expected > left {
            return Err(format!(
                "it would take about {:.0} s: {:.0} s are left of the budget",
                expected.as_secs_f64(),
                left.as_secs_f64()
            ));
        }
        Ok(())
    }
}

/// What has just been found.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A job is begun by an implementation.
    Begun(&'static str, &'a Job),
    /// A row is complete.
    Row(&'a Row),
    /// Something was left out.
    Skipped(&'a Skipped),
}

/// A device, its clock, and what has been learnt of it.
pub struct Bench {
    gpu: Gpu,
    clock: Clock,
    scale: Scale,
    copy: Copy,
    costs: Costs,
}

impl Bench {
    /// Measures the copy speed, and with it whether the device's stamps can be trusted.
    ///
    /// # Errors
    /// A hang, a lost device.
    pub fn new(gpu: &Gpu, scale: Scale, repeats: usize) -> Result<Self, Error> {
        let mut clock = Clock::new(gpu);
        let copy = copy::measure(gpu, &mut clock, scale, repeats)?;
        Ok(Self {
            gpu: gpu.clone(),
            clock,
            scale,
            copy,
            costs: Costs::default(),
        })
    }

    /// The copy speed.
    #[must_use]
    pub fn copy(&self) -> Copy {
        self.copy
    }

    /// The clock.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Measures every job of the plan, and tells as it goes.
    ///
    /// # Errors
    /// The library fails: a baseline that does is skipped.
    pub fn run(
        &mut self,
        plan: &Plan,
        mut tell: impl FnMut(Event<'_>),
    ) -> Result<(Vec<Row>, Vec<Skipped>), Error> {
        let (mut rows, mut left_out) = (Vec::new(), Vec::new());
        let deadline = plan.budget.map(|budget| Deadline {
            start: Instant::now(),
            budget,
        });
        let ours = Implementation {
            name: OURS,
            setup: ours::setup,
            encodes: true,
        };
        for job in plan.jobs() {
            let mut skip = |implementation, reason, tell: &mut dyn FnMut(Event<'_>)| {
                let skipped = Skipped {
                    implementation,
                    kernel: job.kernel,
                    shape: job.shape.to_string(),
                    rows: job.rows,
                    reason,
                };
                tell(Event::Skipped(&skipped));
                left_out.push(skipped);
            };
            tell(Event::Begun(OURS, &job));
            let measured = match self.measure(&ours, &job, plan.repeats, deadline)? {
                Ok(measured) => measured,
                Err(reason) => {
                    skip(OURS, reason, &mut tell);
                    continue;
                }
            };
            let mut row = self.row(&job, measured)?;
            for baseline in &plan.baselines {
                let name = baseline.name();
                let Some(setup) = baseline.setup() else {
                    skip(name, "it is not built in".to_owned(), &mut tell);
                    continue;
                };
                tell(Event::Begun(name, &job));
                let implementation = Implementation {
                    name,
                    setup,
                    encodes: baseline.encodes(),
                };
                match self.measure(&implementation, &job, plan.repeats, deadline) {
                    Ok(Ok(measured)) => row.baselines.push(BaselineRow {
                        name,
                        measured,
                        ratio: measured.time.median_ns / row.measured.time.median_ns,
                    }),
                    Ok(Err(reason)) => skip(name, reason, &mut tell),
                    Err(error) => skip(name, error.to_string(), &mut tell),
                }
            }
            tell(Event::Row(&row));
            rows.push(row);
        }
        Ok((rows, left_out))
    }

    /// Measures how time and memory grow, and tells of each series as it ends.
    ///
    /// # Errors
    /// The library fails.
    pub fn growth(
        &self,
        repeats: usize,
        budget: Option<Duration>,
        tell: impl FnMut(&growth::Series),
    ) -> Result<Vec<growth::Series>, Error> {
        let plan = growth::Plan {
            repeats,
            scale: self.scale,
            budget,
        };
        growth::measure(&self.gpu, &self.clock, plan, tell)
    }

    /// The variant that runs a job.
    fn variant(&self, job: &Job) -> Result<KernelVariant, Error> {
        let shape = &job.shape;
        Ok(match job.kernel {
            Kernel::Decode | Kernel::Prefill => {
                let vectors = u64::from(job.rows) * u64::from(shape.n_heads / shape.n_kv_heads);
                self.gpu.attention_variant(shape.head_dim, vectors)?
            }
            Kernel::Encode | Kernel::Rotate => self.gpu.variant(shape.head_dim)?,
        })
    }

    fn row(&self, job: &Job, measured: Measured) -> Result<Row, Error> {
        let bytes = job.bytes()?;
        let floor_ns = bytes as f64 / self.copy.gb_per_s;
        let median = measured.time.median_ns;
        Ok(Row {
            kernel: job.kernel,
            variant: self.variant(job)?.name().to_owned(),
            shape: job.shape.to_string(),
            n_heads: job.shape.n_heads,
            n_kv_heads: job.shape.n_kv_heads,
            head_dim: job.shape.head_dim.get_u32(),
            seq_len: job.shape.seq_len,
            rows: job.rows,
            measured,
            bytes,
            gb_per_s: bytes as f64 / median,
            floor_ns,
            floor_ratio: median / floor_ns,
            baselines: Vec::new(),
        })
    }

    /// Times one implementation of a job, or says why it is not worth the wait.
    fn measure(
        &mut self,
        implementation: &Implementation,
        job: &Job,
        repeats: usize,
        deadline: Option<Deadline>,
    ) -> Result<Result<Measured, String>, Error> {
        let left = |expected: Duration| match deadline {
            Some(deadline) => deadline.left(expected),
            None => Ok(()),
        };
        if let Err(reason) = left(Duration::ZERO) {
            return Ok(Err(reason));
        }
        let Implementation {
            name,
            setup,
            encodes,
        } = *implementation;
        let turns = self.scale.turns(job, job.bytes()?);
        let once = self.expect_once(name, setup, job)?;
        let (warm_ups, least) = match once > SLOW_NS {
            true => (0, 1),
            false => (WARM_UPS, LEAST_REPEATS),
        };
        let runs = f64::from(warm_ups) + least as f64;
        let mut expected = runs * once;
        if job.kernel.attends() && encodes {
            let fill = Job {
                kernel: Kernel::Encode,
                rows: job.shape.seq_len,
                ..*job
            };
            expected += f64::from(turns) * self.expect_once(name, setup, &fill)?;
        }
        let expected = Duration::from_secs_f64(expected / 1e9);
        if expected > TIME_LIMIT {
            return Ok(Err(format!(
                "it would take about {:.0} s: more than {} s",
                expected.as_secs_f64(),
                TIME_LIMIT.as_secs()
            )));
        }
        if let Err(reason) = left(expected) {
            return Ok(Err(reason));
        }
        let mut workload = setup(&self.gpu, job, turns)?;
        let (mut ns, mut host_ns) = (Vec::new(), Vec::new());
        let mut timing = self.clock.source();
        for turn in 0..warm_ups {
            workload.time(&self.clock, turn)?;
        }
        let start = Instant::now();
        for turn in warm_ups.. {
            let sample = workload.time(&self.clock, turn)?;
            timing = sample.source();
            ns.push(sample.ns());
            host_ns.push(sample.host_ns);
            if ns.len() >= repeats || (ns.len() >= least && start.elapsed() > ENOUGH) {
                break;
            }
        }
        let summary =
            |ns| Summary::new(ns).ok_or_else(|| Error::Stamps("a time is none".to_owned()));
        let time = summary(ns)?;
        self.costs.note(name, job, time.median_ns);
        Ok(Ok(Measured {
            timing,
            time,
            host: summary(host_ns)?,
            turns,
        }))
    }

    /// What doing a job once will take: from what is known, or from trying a small one.
    fn expect_once(&mut self, name: &'static str, setup: Setup, job: &Job) -> Result<f64, Error> {
        if let Some(known) = self.costs.estimate_ns(name, job) {
            return Ok(known);
        }
        let small = job.small();
        let mut workload = setup(&self.gpu, &small, 1)?;
        // The first time pays for what is done lazily.
        workload.time(&self.clock, 0)?;
        let sample = workload.time(&self.clock, 0)?;
        self.costs.note(name, &small, sample.host_ns);
        Ok(self.costs.estimate_ns(name, job).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::select;

    #[test]
    fn encode_and_rotate_are_done_once_for_all_sequences() {
        let plan = Plan {
            shapes: select("32x8-d128").expect("in the grid"),
            kernels: Kernel::ALL.to_vec(),
            baselines: Vec::new(),
            repeats: 1,
            scale: Scale::Cpu,
            budget: None,
        };
        let jobs = plan.jobs();
        let count = |kernel| jobs.iter().filter(|j| j.kernel == kernel).count();
        assert_eq!(Kernel::ALL.map(count), [1, 1, 8, 8]);
        let gpu = Plan {
            scale: Scale::Gpu,
            ..plan
        };
        let rows: Vec<u32> = gpu.jobs().iter().map(|j| j.rows).collect();
        assert!(rows.contains(&8192) && rows.contains(&512) && rows.contains(&1));
    }

    #[test]
    fn nothing_is_begun_that_does_not_fit_the_budget() {
        let deadline = |seconds| Deadline {
            start: Instant::now(),
            budget: Duration::from_secs(seconds),
        };
        let left = |seconds| deadline(600).left(Duration::from_secs(seconds));
        assert_eq!(left(500), Ok(()));
        assert!(left(601).is_err_and(|why| why.contains("600 s are left")));
        let spent = deadline(0).left(Duration::ZERO);
        assert!(spent.is_err_and(|why| why.contains("spent")));
    }

    #[test]
    fn inputs_exceed_the_cache_of_a_gpu() {
        let job = Job {
            kernel: Kernel::Decode,
            shape: "32x8-d128-s1024".parse().expect("a shape"),
            rows: 1,
        };
        let bytes = job.bytes().expect("it fits");
        assert!(u64::from(Scale::Gpu.turns(&job, bytes)) * bytes >= 128 << 20);
        assert_eq!(Scale::Gpu.turns(&job, 1 << 40), 2);
        assert_eq!(Scale::Cpu.turns(&job, bytes), 2);
    }
}
