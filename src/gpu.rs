//! The device: the engine's own, or one opened here; pipelines; buffers with checked sizes.

#[cfg(not(target_arch = "wasm32"))]
use core::time::Duration;
use std::collections::HashMap;
#[cfg(not(target_arch = "wasm32"))]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::shaders::{Kernel, KernelVariant, constants};
use crate::{Error, HeadDim};

/// The most lanes of a kernel's workgroup (`merge_attention`).
const WORKGROUP_LANES: u32 = 256;
/// Lanes of a workgroup that uses subgroups: it has to be made of full ones.
const SUBGROUP_LANES: u32 = 64;
/// The most workgroup memory a kernel uses: `merge_attention`, 4 KiB of exchange and 1 KiB of the lanes' values,
/// with some to spare.
const WORKGROUP_BYTES: u32 = 6 << 10;
/// The most storage buffers a kernel binds (`attention`).
const STORAGE_BUFFERS: u32 = 4;

/// The longest pause between two looks at a device, and the shortest one worth a sleep.
#[cfg(not(target_arch = "wasm32"))]
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_micros(20)];

/// How pipelines are built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuOptions {
    /// Have workgroup memory cleared before each workgroup, as WebGPU prescribes. The kernels do
    /// not rely on it, so it is off by default.
    pub zero_workgroup_memory: bool,
    /// The variant that every kernel has to be of; by default the fastest one that the device can run, for each
    /// head dimension.
    pub variant: Option<KernelVariant>,
    /// Opts in to attention by cooperative matrices, for passes of many query rows: what [`KernelVariant::matrix`]
    /// says of the device's adapter. It is an experimental feature of wgpu, for which the device has to have been
    /// requested (see [`Gpu::open_experimental`]). Operands are f16, so that results are less accurate: a query's
    /// elements and the weights are off by up to 2^-11 of themselves.
    pub matrix: Option<KernelVariant>,
}

/// A device and queue with this crate's pipelines. Cheap to clone.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

struct Inner {
    device: wgpu::Device,
    queue: wgpu::Queue,
    limits: wgpu::Limits,
    options: GpuOptions,
    pipelines: [OnceLock<Pipelines>; 4],
    compiled: Compiled,
    lost: Arc<OnceLock<String>>,
}

/// What has been compiled for a device, under whatever options, so that no pipeline is compiled twice.
type Compiled = Arc<Mutex<HashMap<PipelineKey, wgpu::ComputePipeline>>>;

/// All that a pipeline depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PipelineKey {
    kernel: Kernel,
    variant: KernelVariant,
    head_dim: HeadDim,
    zero_workgroup_memory: bool,
}

/// The pipelines of one head dimension.
pub(crate) struct Pipelines {
    pub encode_keys: wgpu::ComputePipeline,
    pub encode_values: wgpu::ComputePipeline,
    pub rotate_queries: wgpu::ComputePipeline,
    attention: AttentionPipeline,
    /// For passes of many query rows, where it is another.
    attention_of_many: Option<AttentionPipeline>,
    pub merge_attention: wgpu::ComputePipeline,
}

/// A pipeline of `attention`.
pub(crate) struct AttentionPipeline {
    pub pipeline: wgpu::ComputePipeline,
    /// Query vectors of one KV head that a workgroup takes.
    pub block: u64,
}

/// From so many query vectors of a KV head on, matrices are worth their unpacking.
const MANY_VECTORS: u64 = 32;

impl Pipelines {
    /// The pipeline for `vectors` query vectors of each KV head.
    pub(crate) fn attention(&self, vectors: u64) -> &AttentionPipeline {
        match &self.attention_of_many {
            Some(of_many) if vectors >= MANY_VECTORS => of_many,
            _ => &self.attention,
        }
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu")
            .field("adapter", &self.inner.device.adapter_info().name)
            .field("options", &self.inner.options)
            .finish_non_exhaustive()
    }
}

impl Gpu {
    /// Uses the engine's own device and queue.
    ///
    /// The device's callbacks stay the engine's. Forward a loss with [`Gpu::note_device_lost`]: later
    /// calls then refuse at once with its reason. Without it they notice only where a buffer can
    /// no longer be mapped, since wgpu tells a loss to the callback alone.
    ///
    /// # Errors
    /// [`Error::AdapterUnusable`] if the device's limits are below what the kernels need; it names the limit.
    pub fn new(
        device: wgpu::Device,
        queue: wgpu::Queue,
        options: GpuOptions,
    ) -> Result<Self, Error> {
        let limits = device.limits();
        check_limits(&limits)?;
        Ok(Self {
            inner: Arc::new(Inner {
                device,
                queue,
                limits,
                options,
                pipelines: Default::default(),
                compiled: Compiled::default(),
                lost: Arc::new(OnceLock::new()),
            }),
        })
    }

    /// The same device and queue, with pipelines that are built as `options` say.
    ///
    /// Unlike a second [`Gpu::new`], it knows of the device's loss what this one does, and shares those pipelines
    /// that are the same for both.
    #[must_use]
    pub fn with_options(&self, options: GpuOptions) -> Self {
        Self {
            inner: Arc::new(Inner {
                device: self.inner.device.clone(),
                queue: self.inner.queue.clone(),
                limits: self.inner.limits.clone(),
                options,
                pipelines: Default::default(),
                compiled: self.inner.compiled.clone(),
                lost: self.inner.lost.clone(),
            }),
        }
    }

    /// Opens a device on `adapter`, with the adapter's full limits and those optional features that a
    /// [`KernelVariant`] makes use of.
    ///
    /// # Errors
    /// [`Error::AdapterUnusable`] if the adapter lacks compute shaders or a limit that the kernels need, or
    /// gives no device.
    pub async fn open(adapter: &wgpu::Adapter, options: GpuOptions) -> Result<Self, Error> {
        Self::open_experimental(adapter, options, wgpu::ExperimentalFeatures::disabled()).await
    }

    /// As [`Gpu::open`], with the experimental features that [`GpuOptions::matrix`] needs if the caller has
    /// them enabled.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub async fn open_experimental(
        adapter: &wgpu::Adapter,
        options: GpuOptions,
        experimental_features: wgpu::ExperimentalFeatures,
    ) -> Result<Self, Error> {
        let flags = adapter.get_downlevel_capabilities().flags;
        if !flags.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS) {
            return Err(Error::AdapterUnusable(
                "it has no compute shaders".to_owned(),
            ));
        }
        let limits = adapter.limits();
        check_limits(&limits)?;
        let mut wanted = KernelVariant::Subgroup.features();
        if let (Some(matrix), true) = (options.matrix, experimental_features.is_enabled()) {
            wanted |= matrix.features();
        }
        let (device, queue) = adapter
            .request_device(&wgpu::DeviceDescriptor {
                label: Some("turboquant"),
                required_features: adapter.features() & wanted,
                required_limits: limits,
                experimental_features,
                ..Default::default()
            })
            .await
            .map_err(|e| Error::AdapterUnusable(e.to_string()))?;
        let gpu = Self::new(device, queue, options)?;
        let lost = gpu.inner.lost.clone();
        gpu.inner
            .device
            .set_device_lost_callback(move |reason, message| {
                // The first reason is the one that tells; later ones are consequences.
                let _ = lost.set(format!("{reason:?}: {message}"));
            });
        Ok(gpu)
    }

    /// Opens the adapter that wgpu prefers among the given backends, with its device.
    ///
    /// # Errors
    /// [`Error::NoAdapter`] if none answers, else as [`Gpu::open`].
    pub async fn open_default(backends: wgpu::Backends) -> Result<Self, Error> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
            backends,
            ..wgpu::InstanceDescriptor::new_without_display_handle()
        });
        let adapter = instance
            .request_adapter(&wgpu::RequestAdapterOptions {
                power_preference: wgpu::PowerPreference::HighPerformance,
                ..Default::default()
            })
            .await
            .map_err(|e| Error::NoAdapter(e.to_string()))?;
        Self::open(&adapter, GpuOptions::default()).await
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &wgpu::Device {
        &self.inner.device
    }

    /// The queue.
    #[must_use]
    pub fn queue(&self) -> &wgpu::Queue {
        &self.inner.queue
    }

    /// The options the pipelines are built with.
    #[must_use]
    pub fn options(&self) -> GpuOptions {
        self.inner.options
    }

    /// Tells why the device was lost; for engines that keep the callback to themselves.
    pub fn note_device_lost(&self, reason: &str) {
        let _ = self.inner.lost.set(reason.to_owned());
    }

    /// The variant of the kernels of a head dimension: the forced one, or the fastest that the device can run.
    ///
    /// [`KernelVariant::Subgroup`] needs the feature `SUBGROUP`, and the lanes that share a vector, one for
    /// each 16 elements, to fit into the smallest subgroup; and no subgroup larger than a workgroup of 64. A matrix
    /// variant has to be opted in to ([`GpuOptions::matrix`]), needs its features, subgroups of one size, and room
    /// in a workgroup, and takes head dimensions of two to eight matrices. Without being forced it is no answer of
    /// this function: it then runs in passes of many query rows, beside the variant that this names.
    ///
    /// # Errors
    /// [`Error::AdapterUnusable`] if a variant was forced that the device cannot run.
    pub fn variant(&self, head_dim: HeadDim) -> Result<KernelVariant, Error> {
        let info = self.inner.device.adapter_info();
        match self.inner.options.variant {
            Some(forced) if !self.runs(forced, head_dim) => Err(Error::AdapterUnusable(format!(
                "variant {} at head_dim {head_dim}: found features {:?}, subgroups of {} to {} lanes, and {} opted \
                 in to; expected what Gpu::variant says of it",
                forced.name(),
                self.inner.device.features() & forced.features(),
                info.subgroup_min_size,
                info.subgroup_max_size,
                self.inner
                    .options
                    .matrix
                    .map_or("no matrices", KernelVariant::name),
            ))),
            Some(forced) => Ok(forced),
            None if self.runs(KernelVariant::Subgroup, head_dim) => Ok(KernelVariant::Subgroup),
            None => Ok(KernelVariant::Portable),
        }
    }

    /// True if the device can run the kernels of a variant at a head dimension.
    #[must_use]
    pub fn runs(&self, variant: KernelVariant, head_dim: HeadDim) -> bool {
        let device = &self.inner.device;
        let info = device.adapter_info();
        match variant {
            KernelVariant::Portable => true,
            KernelVariant::Subgroup => {
                device.features().contains(variant.features())
                    && info.subgroup_min_size >= head_dim.get_u32() / 16
                    && info.subgroup_max_size <= SUBGROUP_LANES
            }
            KernelVariant::Matrix8 | KernelVariant::Matrix16 => {
                let side = variant.matrix_side().unwrap_or(1);
                let lanes = variant.attention_lanes(info.subgroup_max_size);
                let limits = self.limits();
                self.inner.options.matrix == Some(variant)
                    && device.features().contains(variant.features())
                    && self.runs(KernelVariant::Subgroup, head_dim)
                    && info.subgroup_min_size == info.subgroup_max_size
                    && info.subgroup_max_size.is_multiple_of(side)
                    && (2..=8).contains(&(head_dim.get_u32() / side))
                    && lanes <= limits.max_compute_invocations_per_workgroup
                    && lanes <= limits.max_compute_workgroup_size_x
                    && KernelVariant::matrix_workgroup_bytes(side)
                        <= limits.max_compute_workgroup_storage_size
            }
        }
    }

    /// The variant of attention in a pass of `vectors` query vectors (rows times query heads) of each KV head.
    ///
    /// # Errors
    /// As [`Gpu::variant`].
    pub fn attention_variant(
        &self,
        head_dim: HeadDim,
        vectors: u64,
    ) -> Result<KernelVariant, Error> {
        let variant = self.variant(head_dim)?;
        let many = self.variant_for_many(head_dim);
        Ok(many.filter(|_| vectors >= MANY_VECTORS).unwrap_or(variant))
    }

    /// The variant for passes of many query vectors, where it is another than [`Gpu::variant`]'s.
    fn variant_for_many(&self, head_dim: HeadDim) -> Option<KernelVariant> {
        let options = self.inner.options;
        let many = options.matrix.filter(|_| options.variant.is_none());
        many.filter(|&many| self.runs(many, head_dim))
    }

    /// Compiles the pipelines of a head dimension, unless that has been done. [`crate::Cache::new`]
    /// does it too; an engine may do it earlier.
    ///
    /// # Errors
    /// [`Error::Rejected`] with the driver's message if one does not compile, [`Error::AdapterUnusable`] for a forced
    /// variant that the device cannot run, [`Error::DeviceLost`].
    pub async fn prepare(&self, head_dim: HeadDim) -> Result<(), Error> {
        self.check_lost()?;
        let slot = &self.inner.pipelines[head_dim as usize];
        if slot.get().is_none() {
            // Two callers may both compile; the first result is kept.
            let _ = slot.set(self.compile(head_dim).await?);
        }
        Ok(())
    }

    async fn compile(&self, head_dim: HeadDim) -> Result<Pipelines, Error> {
        let device = &self.inner.device;
        let variant = self.variant(head_dim)?;
        // Error scopes belong to a thread: they are popped before the first await.
        let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
        let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let mut compiled = Vec::new();
        let mut of_variant = |kernel: Kernel, variant| {
            let key = PipelineKey {
                kernel,
                variant: kernel.version(variant),
                head_dim,
                zero_workgroup_memory: self.inner.options.zero_workgroup_memory,
            };
            let known = self.compiled().get(&key).cloned();
            let pipeline = known.unwrap_or_else(|| self.pipeline(key));
            compiled.push((key, pipeline.clone()));
            pipeline
        };
        let mut attention = |variant: KernelVariant| AttentionPipeline {
            pipeline: of_variant(Kernel::Attention, variant),
            block: u64::from(variant.attention_block()),
        };
        let many = self.variant_for_many(head_dim);
        let (attention, attention_of_many) = (attention(variant), many.map(attention));
        let mut pipeline = |kernel| of_variant(kernel, variant);
        let pipelines = Pipelines {
            encode_keys: pipeline(Kernel::EncodeKeys),
            encode_values: pipeline(Kernel::EncodeValues),
            rotate_queries: pipeline(Kernel::RotateQueries),
            attention,
            attention_of_many,
            merge_attention: pipeline(Kernel::MergeAttention),
        };
        let errors = [memory.pop(), internal.pop(), validation.pop()];
        for error in errors {
            if let Some(error) = error.await {
                return Err(self.explain(Error::from_wgpu(error)));
            }
        }
        self.compiled().extend(compiled);
        Ok(pipelines)
    }

    fn compiled(&self) -> MutexGuard<'_, HashMap<PipelineKey, wgpu::ComputePipeline>> {
        // Each entry is whole, whatever became of the thread that put it there.
        let compiled = self.inner.compiled.lock();
        compiled.unwrap_or_else(PoisonError::into_inner)
    }

    fn pipeline(&self, key: PipelineKey) -> wgpu::ComputePipeline {
        let device = &self.inner.device;
        let name = key.kernel.name();
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(name),
            source: wgpu::ShaderSource::Wgsl(key.kernel.source(key.variant).into()),
        });
        device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(name),
            layout: None,
            module: &module,
            entry_point: Some(name),
            compilation_options: wgpu::PipelineCompilationOptions {
                constants: &constants(
                    key.kernel,
                    key.variant,
                    key.head_dim,
                    device.adapter_info().subgroup_max_size,
                ),
                zero_initialize_workgroup_memory: key.zero_workgroup_memory,
            },
            cache: None,
        })
    }

    /// The pipelines of a head dimension that has been prepared.
    pub(crate) fn pipelines(&self, head_dim: HeadDim) -> Result<&Pipelines, Error> {
        self.inner.pipelines[head_dim as usize]
            .get()
            .ok_or_else(|| Error::Rejected(format!("head_dim {head_dim} has not been prepared")))
    }

    pub(crate) fn limits(&self) -> &wgpu::Limits {
        &self.inner.limits
    }

    /// An error if the device is known to be lost.
    pub(crate) fn check_lost(&self) -> Result<(), Error> {
        match self.inner.lost.get() {
            Some(reason) => Err(Error::DeviceLost(reason.clone())),
            None => Ok(()),
        }
    }

    /// Puts the reason for a device loss, if known, in place of its consequence.
    pub(crate) fn explain(&self, error: Error) -> Error {
        self.check_lost().err().unwrap_or(error)
    }

    /// Runs callbacks that are due, and says whether the device has nothing left to do. Does not block.
    ///
    /// The crate looks and never lets wgpu wait. A wait of wgpu's that times out asks the device how far
    /// it is, then looks whether work is left; where another thread's submit or poll retires the last of
    /// it between the two, wgpu's own assertion fails ("If the queue is empty …") and takes the process
    /// with it. Its GL backend moreover holds the context all the while.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn poll_once(&self) -> Result<bool, Error> {
        self.check_lost()?;
        let polled = self.inner.device.poll(wgpu::PollType::Poll);
        self.check_lost()?;
        polled
            .map(|status| status.is_queue_empty())
            .map_err(|e| Error::Rejected(e.to_string()))
    }

    /// Pauses between two looks at the device, after waiting for `waited` of `limit`: a share of the time
    /// so far, so that what comes soon is seen at once and a long wait costs little.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn pause(waited: Duration, limit: Duration) {
        let [longest, shortest] = PAUSES;
        let pause = (waited / 32).min(longest).min(limit.saturating_sub(waited));
        if pause < shortest {
            std::thread::yield_now();
        } else {
            std::thread::sleep(pause);
        }
    }

    /// Blocks until everything submitted so far has run, at most about `limit`.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::DeviceLost`].
    ///
    /// # Panics
    /// wgpu itself panics in any poll if the driver reports the loss of the device just then. Once
    /// the loss is known no more polls are made.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn poll_wait(&self, limit: Duration) -> Result<(), Error> {
        self.check_lost()?;
        let start = std::time::Instant::now();
        // Another thread may submit all the time, so that the queue is never seen empty.
        let done = Arc::new(AtomicBool::new(false));
        let notify = done.clone();
        self.inner
            .queue
            .on_submitted_work_done(move || notify.store(true, Ordering::Release));
        loop {
            if self.poll_once()? || done.load(Ordering::Acquire) {
                return Ok(());
            }
            let waited = start.elapsed();
            if waited >= limit {
                return Err(Error::Timeout(limit));
            }
            Self::pause(waited, limit);
        }
    }

    /// Creates a buffer after checking its size against the device's limits.
    pub(crate) fn buffer(
        &self,
        what: &'static str,
        bytes: u64,
        usage: wgpu::BufferUsages,
    ) -> Result<wgpu::Buffer, Error> {
        self.check_buffer_size(what, bytes, usage)?;
        self.check_alive()?;
        self.create_buffer(what, bytes, usage, false)
    }

    /// Creates a buffer that holds what `fill` writes.
    pub(crate) fn buffer_filled(
        &self,
        what: &'static str,
        bytes: u64,
        usage: wgpu::BufferUsages,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Error>,
    ) -> Result<wgpu::Buffer, Error> {
        self.check_lost()?;
        self.check_buffer_size(what, bytes, usage)?;
        let host_bytes = usize::try_from(bytes)
            .map_err(|_| Error::OutOfMemory(format!("{what}: {bytes} bytes on the host")))?;
        let buffer = self.create_buffer(what, bytes, usage, true)?;
        {
            // Creation reported nothing, yet there is no memory behind it. wgpu keeps quiet
            // about one thing only: that the device is lost.
            let mut view = buffer.get_mapped_range_mut(..).map_err(|e| {
                self.explain(Error::DeviceLost(format!("{what} has no memory: {e}")))
            })?;
            // The view is write-only memory: fill a copy, then hand it over in one go.
            let mut contents = vec![0; host_bytes];
            fill(&mut contents)?;
            view.copy_from_slice(&contents);
        }
        self.guarded(|| buffer.unmap())?;
        Ok(buffer)
    }

    /// An error if the device is lost, even if nobody has said so: a lost device hands out buffers as
    /// ever, and a dead one among them would be held against the caller's submit. Only a buffer that
    /// should be mapped shows it.
    fn check_alive(&self) -> Result<(), Error> {
        self.buffer_filled("probe", 4, wgpu::BufferUsages::COPY_SRC, |_| Ok(()))
            .map(drop)
    }

    fn create_buffer(
        &self,
        what: &'static str,
        size: u64,
        usage: wgpu::BufferUsages,
        mapped_at_creation: bool,
    ) -> Result<wgpu::Buffer, Error> {
        self.guarded(|| {
            self.inner.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(what),
                size,
                usage,
                mapped_at_creation,
            })
        })
    }

    /// Checks a size against the device's limits, without allocating.
    pub(crate) fn check_buffer_size(
        &self,
        what: &'static str,
        bytes: u64,
        usage: wgpu::BufferUsages,
    ) -> Result<(), Error> {
        let limits = self.limits();
        check_limit(what, bytes, "max_buffer_size", limits.max_buffer_size)?;
        if usage.contains(wgpu::BufferUsages::STORAGE) {
            check_limit(
                what,
                bytes,
                "max_storage_buffer_binding_size",
                limits.max_storage_buffer_binding_size,
            )?;
        }
        Ok(())
    }

    /// Runs something that creates wgpu objects and returns what wgpu says against it.
    ///
    /// wgpu knows at once on every native backend. In a browser the answer would come
    /// after this call has returned, and a scope would only hide it from the device's own error
    /// handler: there is none then.
    #[cfg(target_arch = "wasm32")]
    pub(crate) fn guarded<T>(&self, create: impl FnOnce() -> T) -> Result<T, Error> {
        Ok(create())
    }

    /// Runs something that creates wgpu objects and returns what wgpu says against it.
    ///
    /// Error scopes belong to a thread, and this one opens and closes them without leaving it.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn guarded<T>(&self, create: impl FnOnce() -> T) -> Result<T, Error> {
        use std::task::{Context, Poll, Waker};

        let device = &self.inner.device;
        let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let created = create();
        for pop in [memory.pop(), validation.pop()] {
            let mut pop = std::pin::pin!(pop);
            let mut context = Context::from_waker(Waker::noop());
            if let Poll::Ready(Some(error)) = pop.as_mut().poll(&mut context) {
                return Err(self.explain(Error::from_wgpu(error)));
            }
        }
        Ok(created)
    }

    /// Workgroup counts (x, y) for `n` workgroups: what passes one dimension spills into the other.
    pub(crate) fn workgroups(&self, what: &'static str, n: u64) -> Result<(u32, u32), Error> {
        let most = u64::from(self.limits().max_compute_workgroups_per_dimension);
        let y = n.div_ceil(most);
        check_limit(
            what,
            n,
            "max_compute_workgroups_per_dimension²",
            most * most,
        )?;
        let x = n.div_ceil(y.max(1));
        // Both are at most `most`, a u32.
        Ok((x as u32, y as u32))
    }
}

fn check_limits(limits: &wgpu::Limits) -> Result<(), Error> {
    let needs = [
        (
            "max_compute_invocations_per_workgroup",
            limits.max_compute_invocations_per_workgroup,
            WORKGROUP_LANES,
        ),
        (
            "max_compute_workgroup_size_x",
            limits.max_compute_workgroup_size_x,
            WORKGROUP_LANES,
        ),
        (
            "max_compute_workgroup_storage_size",
            limits.max_compute_workgroup_storage_size,
            WORKGROUP_BYTES,
        ),
        (
            "max_storage_buffers_per_shader_stage",
            limits.max_storage_buffers_per_shader_stage,
            STORAGE_BUFFERS,
        ),
        (
            "max_compute_workgroups_per_dimension",
            limits.max_compute_workgroups_per_dimension,
            1,
        ),
    ];
    for (name, found, needed) in needs {
        if found < needed {
            return Err(Error::AdapterUnusable(format!(
                "{name} is {found}: expected at least {needed}"
            )));
        }
    }
    Ok(())
}

pub(crate) fn check_limit(
    what: &'static str,
    found: u64,
    limit_name: &'static str,
    limit: u64,
) -> Result<(), Error> {
    if found <= limit {
        Ok(())
    } else {
        Err(Error::TooLarge {
            what,
            found: u128::from(found),
            limit_name,
            limit,
        })
    }
}
