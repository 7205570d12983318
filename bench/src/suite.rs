//! A run over a grid of shapes.

use std::time::{Duration, Instant};

use turboquant_wgpu::Gpu;

use crate::clock::Clock;
use crate::costs::Costs;
use crate::job::{Job, Kernel};
use crate::report::{BaselineRow, Copy, Measured, Row, Skipped};
use crate::shape::Shape;
use crate::stats::Summary;
use crate::workload::{Setup, Workload};
use crate::{Error, copy, ours};

/// A job is skipped if it is expected to take longer, warm-up and setting up counted.
const TIME_LIMIT: Duration = Duration::from_secs(20);
/// No job is timed for longer, once it has been timed often enough for a median.
const ENOUGH: Duration = Duration::from_secs(3);
const LEAST_REPEATS: usize = 3;
const WARM_UPS: u32 = 2;

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
    /// The kernels of cera 0.5.5.
    Cera,
}

impl Baseline {
    /// Every one that this program could have.
    pub const ALL: [Self; 1] = [Self::Cera];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cera => "cera",
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|b| b.name() == name)
    }

    /// How it is set up; `None` if it is not built in.
    #[must_use]
    pub fn setup(self) -> Option<Setup> {
        match self {
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
            let measured = match self.measure(OURS, ours::setup, &job, plan.repeats)? {
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
                match self.measure(name, setup, &job, plan.repeats) {
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

    fn row(&self, job: &Job, measured: Measured) -> Result<Row, Error> {
        let bytes = job.bytes()?;
        let floor_ns = bytes as f64 / self.copy.gb_per_s;
        let median = measured.time.median_ns;
        Ok(Row {
            kernel: job.kernel,
            variant: "portable".to_owned(),
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
        name: &'static str,
        setup: Setup,
        job: &Job,
        repeats: usize,
    ) -> Result<Result<Measured, String>, Error> {
        let turns = self.scale.turns(job, job.bytes()?);
        let expected = self.expect(name, setup, job, turns)?;
        if expected > TIME_LIMIT {
            return Ok(Err(format!(
                "it would take about {:.0} s: more than {} s",
                expected.as_secs_f64(),
                TIME_LIMIT.as_secs()
            )));
        }
        let mut workload = setup(&self.gpu, job, turns)?;
        let (mut ns, mut host_ns) = (Vec::new(), Vec::new());
        for turn in 0..WARM_UPS {
            self.time(workload.as_mut(), turn)?;
        }
        let start = Instant::now();
        for turn in WARM_UPS.. {
            let sample = self.time(workload.as_mut(), turn)?;
            ns.push(sample.ns());
            host_ns.push(sample.host_ns);
            if ns.len() >= repeats || (ns.len() >= LEAST_REPEATS && start.elapsed() > ENOUGH) {
                break;
            }
        }
        let summary =
            |ns| Summary::new(ns).ok_or_else(|| Error::Stamps("a time is none".to_owned()));
        let time = summary(ns)?;
        self.costs.note(name, job, time.median_ns);
        Ok(Ok(Measured {
            timing: self.clock.source(),
            time,
            host: summary(host_ns)?,
            turns,
        }))
    }

    fn time(&self, workload: &mut dyn Workload, turn: u32) -> Result<crate::clock::Sample, Error> {
        self.clock.time(|encoder| workload.record(encoder, turn))
    }

    /// What setting up and timing a job will take at least.
    fn expect(
        &mut self,
        name: &'static str,
        setup: Setup,
        job: &Job,
        turns: u32,
    ) -> Result<Duration, Error> {
        let runs = f64::from(WARM_UPS) + LEAST_REPEATS as f64;
        let mut ns = runs * self.expect_once(name, setup, job)?;
        if job.kernel.attends() {
            let fill = Job {
                kernel: Kernel::Encode,
                rows: job.shape.seq_len,
                ..*job
            };
            ns += f64::from(turns) * self.expect_once(name, setup, &fill)?;
        }
        Ok(Duration::from_secs_f64(ns / 1e9))
    }

    /// What doing a job once will take: from what is known, or from trying a small one.
    fn expect_once(&mut self, name: &'static str, setup: Setup, job: &Job) -> Result<f64, Error> {
        if let Some(known) = self.costs.estimate_ns(name, job) {
            return Ok(known);
        }
        let small = job.small();
        let mut workload = setup(&self.gpu, &small, 1)?;
        // The first time pays for what is done lazily.
        self.time(workload.as_mut(), 0)?;
        let sample = self.time(workload.as_mut(), 0)?;
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
        };
        let jobs = plan.jobs();
        let count = |kernel| jobs.iter().filter(|j| j.kernel == kernel).count();
        assert_eq!(Kernel::ALL.map(count), [1, 1, 4, 4]);
        let gpu = Plan {
            scale: Scale::Gpu,
            ..plan
        };
        let rows: Vec<u32> = gpu.jobs().iter().map(|j| j.rows).collect();
        assert!(rows.contains(&8192) && rows.contains(&512) && rows.contains(&1));
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
