//! The adapters of this machine, each opened at most once in a process.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use turboquant_wgpu::{Error, Gpu, GpuOptions, HeadDim, KernelVariant, Pending};

use crate::arithmetic::Arithmetic;
use crate::experimental;
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
    /// The matrix variant that the adapter offers.
    matrix: Option<KernelVariant>,
    /// Errors that wgpu reported outside any call.
    pub errors: Arc<Mutex<Vec<String>>>,
    adapter: wgpu::Adapter,
    probes: OnceLock<Probes>,
    zeroing: OnceLock<Box<Device>>,
    variants: [OnceLock<Box<Device>>; KernelVariant::ALL.len()],
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

    /// The matrix variant that it offers.
    #[must_use]
    pub fn matrix(&self) -> Option<KernelVariant> {
        KernelVariant::matrix(&self.adapter)
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

    /// Another device of the adapter, with those of the `optional` features that it has, and of those that kernel
    /// variants use. The library's own pipelines are not compiled yet, and nothing is tested: for measurements.
    ///
    /// # Errors
    /// Why the adapter gives none.
    pub fn open_with(&self, optional: wgpu::Features, options: GpuOptions) -> Result<Gpu, String> {
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("optional features"),
            required_features: self.adapter.features()
                & KernelVariant::ALL
                    .into_iter()
                    .fold(optional, |all, variant| all | variant.features()),
            required_limits: self.adapter.limits(),
            experimental_features: experimental::features(),
            ..Default::default()
        };
        let (device, queue) = pollster::block_on(self.adapter.request_device(&descriptor))
            .map_err(|e| e.to_string())?;
        Gpu::new(device, queue, options).map_err(|e| e.to_string())
    }

    fn open(&self) -> Result<Device, String> {
        let matrix = self.matrix();
        let options = GpuOptions {
            matrix,
            ..GpuOptions::default()
        };
        // Matrices are for the cases that ask for them.
        let gpu = pollster::block_on(Gpu::open_experimental(
            &self.adapter,
            options,
            experimental::features(),
        ))
        .map_err(|e| e.to_string())?
        .with_options(GpuOptions::default());
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
            matrix,
            errors,
            adapter: self.adapter.clone(),
            probes: OnceLock::new(),
            zeroing: OnceLock::new(),
            variants: Default::default(),
            litter: OnceLock::new(),
        })
    }
}

impl Device {
    /// All probes, run at the first call.
    pub fn probes(&self) -> &Probes {
        self.probes.get_or_init(|| Probes::run(self))
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
    pub fn zeroing(&self) -> &Self {
        let options = GpuOptions {
            zero_workgroup_memory: true,
            ..self.gpu.options()
        };
        self.with_options(
            &self.zeroing,
            options,
            format!("{}, workgroup memory cleared", self.label),
        )
    }

    /// The variants that the device can run at some head dimension.
    #[must_use]
    pub fn variants(&self) -> Vec<KernelVariant> {
        let runs = |&variant: &KernelVariant| {
            HeadDim::ALL
                .into_iter()
                .any(|head_dim| self.forcing(variant).1.runs(variant, head_dim))
        };
        KernelVariant::ALL.into_iter().filter(runs).collect()
    }

    /// The options that force a variant, and the device with them. Nothing is compiled yet.
    fn forcing(&self, variant: KernelVariant) -> (GpuOptions, Gpu) {
        let options = GpuOptions {
            variant: Some(variant),
            matrix: self.matrix,
            ..self.gpu.options()
        };
        (options, self.gpu.with_options(options))
    }

    /// The same device and queue, with the kernels of `variant`; those of the library's choice where it is `None`
    /// or the device cannot run it.
    pub fn of_variant(&self, variant: Option<KernelVariant>, head_dim: HeadDim) -> &Self {
        let Some(forced) = variant else {
            return self;
        };
        let (options, gpu) = self.forcing(forced);
        if gpu.runs(forced, head_dim) {
            // The label stays: the variant is part of the case.
            self.with_options(&self.variants[forced as usize], options, self.label.clone())
        } else {
            self
        }
    }

    /// The same device and queue with pipelines of their own, made once.
    fn with_options<'a>(
        &self,
        slot: &'a OnceLock<Box<Self>>,
        options: GpuOptions,
        label: String,
    ) -> &'a Self {
        slot.get_or_init(|| {
            Box::new(Self {
                gpu: self.gpu.with_options(options),
                label,
                driver: self.driver.clone(),
                adapter: self.adapter.clone(),
                probes: OnceLock::new(),
                arithmetic: self.arithmetic,
                matrix: self.matrix,
                errors: self.errors.clone(),
                zeroing: OnceLock::new(),
                variants: Default::default(),
                litter: OnceLock::new(),
            })
        })
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
