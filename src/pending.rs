//! Results that are still on their way from the device.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::{Error, Gpu};

/// How far a mapping has come.
enum State {
    /// Neither submitted nor done; whom to wake then.
    Waiting(Option<Waker>),
    Mapped,
    Failed(Error),
}

type Shared = Arc<Mutex<State>>;
/// Turns the bytes that came into the result.
type Decode<T> = Box<dyn FnOnce(&[u8]) -> Result<T, Error> + Send>;

fn lock(shared: &Shared) -> std::sync::MutexGuard<'_, State> {
    // The state is replaced whole, so that it is sound after a panic elsewhere.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The callback's end. Dropped uncalled — the encoder was never submitted, or was refused — it fails the
/// wait instead of leaving it for ever.
struct Notify {
    shared: Shared,
    settled: bool,
}

impl Notify {
    fn settle(&mut self, state: State) {
        self.settled = true;
        let old = std::mem::replace(&mut *lock(&self.shared), state);
        if let State::Waiting(Some(waker)) = old {
            waker.wake();
        }
    }
}

impl Drop for Notify {
    fn drop(&mut self) {
        if !self.settled {
            self.settle(State::Failed(Error::NotSubmitted));
        }
    }
}

/// A result that the device is to deliver once the encoder it was recorded into has been submitted.
///
/// Await it, or, outside async code, block on it with [`Pending::wait`]. Dropping it drops the result.
///
/// # Awaiting
///
/// The future never blocks. In a browser the event loop wakes it. On native targets somebody has to
/// poll the device for a result to arrive, and it may be that nobody else does: each poll of the future
/// polls the device once, gives the processor away, and asks to be polled again at once. Other tasks
/// of the executor get their turns in between, the one that submits the encoder among them; but while
/// the result is out the executor does not sleep, and a future whose encoder is kept and never submitted
/// keeps it busy for ever. Engines that poll the device on a thread of their own, or that prefer to
/// sleep, use [`Pending::wait`].
///
/// An encoder that is dropped instead of submitted resolves the future to [`Error::NotSubmitted`].
#[must_use = "the result has to be awaited"]
pub struct Pending<T> {
    gpu: Gpu,
    /// `None` when there is nothing to read.
    buffer: Option<wgpu::Buffer>,
    shared: Shared,
    decode: Option<Decode<T>>,
}

impl<T> Pending<T> {
    /// Asks for `buffer` to be mapped once `encoder` has been submitted and has run. Only then does the
    /// callback come, so that bytes are never read before they are written.
    pub(crate) fn record(
        gpu: &Gpu,
        encoder: &wgpu::CommandEncoder,
        buffer: Option<wgpu::Buffer>,
        decode: impl FnOnce(&[u8]) -> Result<T, Error> + Send + 'static,
    ) -> Self {
        let shared: Shared = Arc::new(Mutex::new(State::Waiting(None)));
        if let Some(buffer) = &buffer {
            let mut notify = Notify {
                shared: shared.clone(),
                settled: false,
            };
            encoder.map_buffer_on_submit(buffer, wgpu::MapMode::Read, .., move |result| {
                notify.settle(match result {
                    Ok(()) => State::Mapped,
                    Err(e) => State::Failed(Error::DeviceLost(format!("mapping failed: {e}"))),
                });
            });
        } else {
            *lock(&shared) = State::Mapped;
        }
        Self {
            gpu: gpu.clone(),
            buffer,
            shared,
            decode: Some(Box::new(decode)),
        }
    }

    /// Takes the result if it has come.
    fn take(&mut self, waker: Option<&Waker>) -> Option<Result<T, Error>> {
        match &mut *lock(&self.shared) {
            State::Waiting(slot) => {
                *slot = waker.cloned();
                return None;
            }
            State::Failed(error) => return Some(Err(self.gpu.explain(error.clone()))),
            State::Mapped => {}
        }
        let decode = self.decode.take()?;
        let Some(buffer) = &self.buffer else {
            return Some(decode(&[]));
        };
        let result = match buffer.get_mapped_range(..) {
            Ok(view) => decode(&view),
            // Nobody else holds this buffer to unmap it: only with the device is it gone.
            Err(e) => Err(self.gpu.explain(Error::DeviceLost(format!(
                "a mapped buffer cannot be read: {e}"
            )))),
        };
        // The result has been decoded: that the device was lost since is none of its business.
        let _ = self.gpu.guarded(|| buffer.unmap());
        Some(result)
    }

    /// The result, or `None` if it does not come within about `limit`.
    #[cfg(not(target_arch = "wasm32"))]
    fn take_within(&mut self, limit: core::time::Duration) -> Option<Result<T, Error>> {
        let start = std::time::Instant::now();
        loop {
            if let Some(result) = self.take(None) {
                return Some(result);
            }
            // Only the callback counts. All that was submitted may have run, yet another thread may be
            // about to call back, or about to submit.
            let polled = self.gpu.poll_once();
            let taken = self.take(None);
            if taken.is_some() {
                return taken;
            }
            if let Err(error) = polled {
                return Some(Err(error));
            }
            let waited = start.elapsed();
            if waited >= limit {
                return None;
            }
            Gpu::pause(waited, limit);
        }
    }

    /// Blocks until the result is there, at most about `limit`.
    ///
    /// For native callers outside async code. The encoder has to be submitted before, or by another
    /// thread meanwhile.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::DeviceLost`], [`Error::NotSubmitted`], or what decoding the result says.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn wait(mut self, limit: core::time::Duration) -> Result<T, Error> {
        self.take_within(limit)
            .unwrap_or(Err(Error::Timeout(limit)))
    }

    /// Blocks in slices for as long as `keep_waiting` says so: for callers with a clock of their own, who do
    /// not trust the driver's.
    ///
    /// # Errors
    /// [`Error::Timeout`] (with the slice) once `keep_waiting` says no, else as [`Pending::wait`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn wait_while(
        mut self,
        slice: core::time::Duration,
        mut keep_waiting: impl FnMut() -> bool,
    ) -> Result<T, Error> {
        loop {
            if let Some(result) = self.take_within(slice) {
                return result;
            }
            if !keep_waiting() {
                return Err(Error::Timeout(slice));
            }
        }
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(result) = self.take(Some(context.waker())) {
            return Poll::Ready(result);
        }
        // See the type's documentation for what a browser does and this cannot.
        #[cfg(not(target_arch = "wasm32"))]
        {
            let polled = self.gpu.poll_once();
            if let Some(result) = self.take(Some(context.waker())) {
                return Poll::Ready(result);
            }
            // A device that is lost will never answer.
            if let Err(error) = polled {
                return Poll::Ready(Err(error));
            }
            std::thread::yield_now();
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

impl<T> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").finish_non_exhaustive()
    }
}
