//! The adapters of this machine, each opened at most once in a process.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use turboquant_wgpu::{Error, Gpu, GpuOptions, Pending};

use crate::arithmetic::Arithmetic;
use crate::litter::Litter;
use crate::probes::{self, Probes};
use crate::self_test;

/// A GPU wait that lasts longer is a hang.
pub const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// An adapter as it was found.
pub struct Adapter {
    adapter: wgpu::Adapter,
    /// What wgpu says of it.
    pub info: wgpu::AdapterInfo,
    device: OnceLock<Result<Device, String>>,
}

/// An adapter's device, self-tested.
pub struct Device {
    /// The device under test.
    pub gpu: Gpu,
    /// Short name, `backend:adapter`.
    pub label: String,
    /// Its driver's name and version.
    pub driver: String,
    /// How its arithmetic rounds, as the probes established.
    pub arithmetic: Arithmetic,
    /// Errors that wgpu reported outside any call.
    pub errors: Arc<Mutex<Vec<String>>>,
    adapter: wgpu::Adapter,
    probes: OnceLock<Probes>,
    subgroup_gpu: OnceLock<Result<Gpu, String>>,
    zeroing: OnceLock<Result<Box<Device>, Error>>,
    litter: OnceLock<Litter>,
}

/// Every adapter of this machine, in wgpu's order. Enumerated once in a process.
pub fn all() -> &'static [Adapter] {
    // Never dropped: some drivers hang when a device goes away at exit.
    static ADAPTERS: OnceLock<Vec<Adapter>> = OnceLock::new();
    ADAPTERS.get_or_init(|| {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
            backends: wgpu::Backends::all(),
            ..wgpu::InstanceDescriptor::new_without_display_handle()
        });
        pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()))
            .into_iter()
            .map(|adapter| Adapter {
                info: adapter.get_info(),
                adapter,
                device: OnceLock::new(),
            })
            .collect()
    })
}

impl Adapter {
    /// Short name, `backend:adapter`.
    #[must_use]
    pub fn label(&self) -> String {
        format!("{}:{}", self.info.backend, self.info.name)
    }

    /// True if `text` occurs, in whatever case, in the backend, name or driver; `all` matches every adapter.
    #[must_use]
    pub fn matches(&self, text: &str) -> bool {
        let described = format!(
            "{} {} {} {}",
            self.label(),
            self.info.driver,
            self.info.driver_info,
            self.info.backend
        );
        text == "all" || described.to_lowercase().contains(&text.to_lowercase())
    }

    /// Its limits.
    #[must_use]
    pub fn limits(&self) -> wgpu::Limits {
        self.adapter.limits()
    }

    /// Its features.
    #[must_use]
    pub fn features(&self) -> wgpu::Features {
        self.adapter.features()
    }

    /// The device, opened and self-tested at the first call.
    ///
    /// # Errors
    /// Why the adapter is unusable: it lacks something, gives no device, or fails the self-test.
    pub fn device(&self) -> Result<&Device, String> {
        self.device
            .get_or_init(|| self.open())
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Another device of the adapter, with those of the `optional` features that it has. The library's own pipelines
    /// are not compiled yet, and nothing is tested: for measurements.
    ///
    /// # Errors
    /// Why the adapter gives none.
    pub fn open_with(&self, optional: wgpu::Features, options: GpuOptions) -> Result<Gpu, String> {
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("optional features"),
            required_features: self.adapter.features() & optional,
            required_limits: self.adapter.limits(),
            ..Default::default()
        };
        let (device, queue) = pollster::block_on(self.adapter.request_device(&descriptor))
            .map_err(|e| e.to_string())?;
        Gpu::new(device, queue, options).map_err(|e| e.to_string())
    }

    fn open(&self) -> Result<Device, String> {
        let gpu = pollster::block_on(Gpu::open(&self.adapter, GpuOptions::default()))
            .map_err(|e| e.to_string())?;
        let errors: Arc<Mutex<Vec<String>>> = Arc::default();
        let sink = errors.clone();
        gpu.device().on_uncaptured_error(Arc::new(move |error| {
            let mut errors = sink.lock().unwrap_or_else(PoisonError::into_inner);
            errors.push(error.to_string());
        }));
        self_test::run(&gpu)?;
        let arithmetic = probes::rounding(&gpu)?;
        Ok(Device {
            gpu,
            label: self.label(),
            driver: format!("{} {}", self.info.driver, self.info.driver_info),
            arithmetic,
            errors,
            adapter: self.adapter.clone(),
            probes: OnceLock::new(),
            subgroup_gpu: OnceLock::new(),
            zeroing: OnceLock::new(),
            litter: OnceLock::new(),
        })
    }
}

impl Device {
    /// All probes, run at the first call.
    pub fn probes(&self) -> &Probes {
        self.probes.get_or_init(|| Probes::run(self))
    }

    /// A second device of the adapter with subgroup operations, which the device under test has no use for; `None` if
    /// the adapter lacks them. Like that one it is opened once in a process and never dropped.
    pub fn subgroup_gpu(&self) -> Option<Result<&Gpu, String>> {
        if !self.adapter.features().contains(wgpu::Features::SUBGROUP) {
            return None;
        }
        let open = || {
            let descriptor = wgpu::DeviceDescriptor {
                label: Some("subgroups"),
                required_features: wgpu::Features::SUBGROUP,
                required_limits: self.adapter.limits(),
                ..Default::default()
            };
            let (device, queue) = pollster::block_on(self.adapter.request_device(&descriptor))
                .map_err(|e| e.to_string())?;
            Gpu::new(device, queue, GpuOptions::default()).map_err(|e| e.to_string())
        };
        Some(
            self.subgroup_gpu
                .get_or_init(open)
                .as_ref()
                .map_err(Clone::clone),
        )
    }

    /// The smallest and largest subgroup size that the adapter reports.
    #[must_use]
    pub fn subgroup_sizes(&self) -> [u32; 2] {
        let info = self.adapter.get_info();
        [info.subgroup_min_size, info.subgroup_max_size]
    }

    /// Submits an encoder.
    pub fn submit(&self, encoder: wgpu::CommandEncoder) {
        self.gpu.queue().submit([encoder.finish()]);
    }

    /// A fresh encoder.
    #[must_use]
    pub fn encoder(&self) -> wgpu::CommandEncoder {
        self.gpu
            .device()
            .create_command_encoder(&wgpu::CommandEncoderDescriptor::default())
    }

    /// The same device and queue, with kernels that find their workgroup memory cleared.
    ///
    /// # Errors
    /// The library's.
    pub fn zeroing(&self) -> Result<&Self, Error> {
        let open = || {
            let options = GpuOptions {
                zero_workgroup_memory: true,
            };
            let (device, queue) = (self.gpu.device().clone(), self.gpu.queue().clone());
            Ok(Box::new(Self {
                gpu: Gpu::new(device, queue, options)?,
                label: format!("{}, workgroup memory cleared", self.label),
                driver: self.driver.clone(),
                adapter: self.adapter.clone(),
                probes: OnceLock::new(),
                subgroup_gpu: OnceLock::new(),
                arithmetic: self.arithmetic,
                errors: self.errors.clone(),
                zeroing: OnceLock::new(),
                litter: OnceLock::new(),
            }))
        };
        match self.zeroing.get_or_init(open) {
            Ok(device) => Ok(device),
            Err(error) => Err(error.clone()),
        }
    }

    /// Records a dispatch that leaves rubbish in workgroup memory.
    pub fn litter(&self, encoder: &mut wgpu::CommandEncoder) {
        self.litter
            .get_or_init(|| Litter::new(&self.gpu))
            .record(encoder);
    }

    /// Waits for a result, at most [`WAIT_LIMIT`] by this process's clock.
    ///
    /// # Errors
    /// The result's error, or [`Error::Timeout`].
    pub fn wait<T>(&self, pending: Pending<T>) -> Result<T, Error> {
        wait(pending)
    }

    /// Takes the errors that wgpu has reported since the last call.
    pub fn take_errors(&self) -> Vec<String> {
        std::mem::take(&mut *self.errors.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Waits for a result, at most [`WAIT_LIMIT`] by this process's clock.
///
/// # Errors
/// The result's error, or [`Error::Timeout`].
pub fn wait<T>(pending: Pending<T>) -> Result<T, Error> {
    let start = Instant::now();
    pending
        .wait_while(Duration::from_millis(500), || start.elapsed() < WAIT_LIMIT)
        .map_err(|e| match e {
            Error::Timeout(_) => Error::Timeout(WAIT_LIMIT),
            other => other,
        })
}

/// The devices of every usable adapter.
pub fn usable() -> impl Iterator<Item = &'static Device> {
    all().iter().filter_map(|adapter| adapter.device().ok())
}

/// The adapters that `text` names.
///
/// # Errors
/// None matches.
pub fn matching(text: &str) -> Result<Vec<&'static Adapter>, String> {
    let matching: Vec<&Adapter> = all().iter().filter(|a| a.matches(text)).collect();
    if matching.is_empty() {
        let known: Vec<String> = all().iter().map(Adapter::label).collect();
        return Err(format!(
            "no adapter matches \"{text}\"; there are: {}",
            if known.is_empty() {
                "none".to_owned()
            } else {
                known.join(", ")
            }
        ));
    }
    Ok(matching)
}

/// The adapters that `text` names, usable ones first opened here.
///
/// # Errors
/// None matches, or one that was asked for by name is unusable.
pub fn select(text: &str) -> Result<Vec<&'static Device>, String> {
    let mut devices = Vec::new();
    for adapter in matching(text)? {
        match adapter.device() {
            Ok(device) => devices.push(device),
            Err(why) if text == "all" => eprintln!("{}: unusable: {why}", adapter.label()),
            Err(why) => return Err(format!("{}: unusable: {why}", adapter.label())),
        }
    }
    if devices.is_empty() {
        return Err("no adapter is usable".to_owned());
    }
    Ok(devices)
}

/// Those of the named backends that have no usable adapter.
#[must_use]
pub fn missing(backends: &str) -> Vec<String> {
    backends
        .split(',')
        .map(str::trim)
        .filter(|b| !b.is_empty())
        .filter(|b| {
            !all()
                .iter()
                .any(|a| a.info.backend.to_str().eq_ignore_ascii_case(b) && a.device().is_ok())
        })
        .map(str::to_owned)
        .collect()
}
