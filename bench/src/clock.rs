//! Two clocks for the same commands: the device's time stamps, and the host's view of submitting and waiting.

use std::fmt;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::Serialize;
use turboquant_wgpu::Gpu;

use crate::Error;

/// Features that time stamps between the passes of an encoder need.
pub const STAMP_FEATURES: wgpu::Features =
    wgpu::Features::TIMESTAMP_QUERY.union(wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS);
/// A submission that takes longer is a hang.
const WAIT_LIMIT: Duration = Duration::from_secs(120);
/// Stamps that see less than this share of what the host sees of a long copy do not time the device: they were
/// taken when the commands were handed over, not when they ran.
const LEAST_SHARE: f64 = 0.2;

/// Which clock a time was read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Time stamps that the device wrote before and after the commands.
    DeviceTimestamps,
    /// The host's clock, from before the submission until the wait returned.
    HostClock,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DeviceTimestamps => "device",
            Self::HostClock => "host",
        })
    }
}

/// One timed submission, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// By the device's stamps, if it has them.
    pub device_ns: Option<f64>,
    /// By the host's clock.
    pub host_ns: f64,
}

impl Sample {
    /// Which clock is the better one.
    #[must_use]
    pub fn source(&self) -> Source {
        match self.device_ns {
            Some(_) => Source::DeviceTimestamps,
            None => Source::HostClock,
        }
    }

    /// By the better clock.
    #[must_use]
    pub fn ns(&self) -> f64 {
        self.device_ns.unwrap_or(self.host_ns)
    }
}

struct Stamps {
    set: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    period_ns: f64,
}

/// Times commands on a device.
pub struct Clock {
    gpu: Gpu,
    stamps: Option<Stamps>,
    distrust: Option<String>,
}

impl Clock {
    /// The device's stamps if it was opened with [`STAMP_FEATURES`], and the host's clock beside them.
    #[must_use]
    pub fn new(gpu: &Gpu) -> Self {
        let device = gpu.device();
        let stamps = device.features().contains(STAMP_FEATURES).then(|| Stamps {
            set: device.create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("time stamps"),
                ty: wgpu::QueryType::Timestamp,
                count: 2,
            }),
            resolved: device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("time stamps"),
                size: 2 * u64::from(wgpu::QUERY_SIZE),
                usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            }),
            period_ns: f64::from(gpu.queue().get_timestamp_period()),
        });
        let distrust = match stamps {
            Some(_) => None,
            None => Some("the device has no time stamps between passes".to_owned()),
        };
        Self {
            gpu: gpu.clone(),
            stamps,
            distrust,
        }
    }

    /// Where times come from.
    #[must_use]
    pub fn source(&self) -> Source {
        match self.stamps {
            Some(_) => Source::DeviceTimestamps,
            None => Source::HostClock,
        }
    }

    /// Why they come from the host, if they do.
    #[must_use]
    pub fn distrust(&self) -> Option<&str> {
        self.distrust.as_deref()
    }

    /// Drops the stamps if they do not cover `sample`, a submission that is far longer than handing it over.
    pub(crate) fn judge(&mut self, sample: Sample) {
        if let Some(device_ns) = sample.device_ns
            && device_ns < LEAST_SHARE * sample.host_ns
        {
            self.distrust = Some(format!(
                "the device's stamps saw {device_ns:.0} ns of a copy that took {:.0} ns",
                sample.host_ns
            ));
            self.stamps = None;
        }
    }

    /// Runs what `record` records, alone on the device, and times it.
    ///
    /// # Errors
    /// What `record` returns; a hang, a lost device.
    pub fn time(
        &self,
        record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<(), Error>,
    ) -> Result<Sample, Error> {
        let device = self.gpu.device();
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        if let Some(stamps) = &self.stamps {
            encoder.write_timestamp(&stamps.set, 0);
        }
        record(&mut encoder)?;
        if let Some(stamps) = &self.stamps {
            encoder.write_timestamp(&stamps.set, 1);
        }
        let commands = encoder.finish();
        self.gpu.poll_wait(WAIT_LIMIT)?;
        let start = Instant::now();
        self.gpu.queue().submit([commands]);
        self.gpu.poll_wait(WAIT_LIMIT)?;
        let host_ns = start.elapsed().as_secs_f64() * 1e9;
        let device_ns = match &self.stamps {
            Some(stamps) => Some(self.elapsed(stamps)?),
            None => None,
        };
        Ok(Sample { device_ns, host_ns })
    }

    /// Runs what the host does alone while the device rests, and times it.
    ///
    /// # Errors
    /// What `work` returns; a hang, a lost device.
    pub fn time_host(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<Sample, Error> {
        self.gpu.poll_wait(WAIT_LIMIT)?;
        let start = Instant::now();
        work()?;
        Ok(Sample {
            device_ns: None,
            host_ns: start.elapsed().as_secs_f64() * 1e9,
        })
    }

    /// Nanoseconds between the two stamps.
    fn elapsed(&self, stamps: &Stamps) -> Result<f64, Error> {
        let (device, queue) = (self.gpu.device(), self.gpu.queue());
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.resolve_query_set(&stamps.set, 0..2, &stamps.resolved, 0);
        queue.submit([encoder.finish()]);
        let words: Vec<u64> = download(&self.gpu, &stamps.resolved)?;
        let [start, end] = words[..] else {
            return Err(Error::Stamps(format!("{} words: expected 2", words.len())));
        };
        let ticks = end.checked_sub(start).ok_or_else(|| {
            Error::Stamps(format!("the end, {end}, lies before the start, {start}"))
        })?;
        Ok(ticks as f64 * stamps.period_ns)
    }
}

/// What a buffer (usage `COPY_SRC`) holds.
///
/// # Errors
/// It cannot be mapped; a hang, a lost device.
pub(crate) fn download<T: bytemuck::Pod>(
    gpu: &Gpu,
    buffer: &wgpu::Buffer,
) -> Result<Vec<T>, Error> {
    let (sender, receiver) = mpsc::channel();
    wgpu::util::DownloadBuffer::read_buffer(
        gpu.device(),
        gpu.queue(),
        &buffer.slice(..),
        move |result| {
            // The receiver is gone only if the wait below has failed.
            let _ = sender.send(result);
        },
    );
    gpu.poll_wait(WAIT_LIMIT)?;
    match receiver.try_recv() {
        Ok(Ok(bytes)) => Ok(bytemuck::pod_collect_to_vec(&bytes)),
        Ok(Err(error)) => Err(Error::Stamps(error.to_string())),
        Err(error) => Err(Error::Stamps(format!("no answer: {error}"))),
    }
}

/// Submits an encoder and waits until it has run.
///
/// # Errors
/// A hang, a lost device.
pub(crate) fn run(gpu: &Gpu, encoder: wgpu::CommandEncoder) -> Result<(), Error> {
    gpu.queue().submit([encoder.finish()]);
    Ok(gpu.poll_wait(WAIT_LIMIT)?)
}
