//! What is timed.

use turboquant_wgpu::Gpu;

use crate::Error;
use crate::job::Job;

/// A job that has been set up on a device, and can be recorded again and again.
///
/// It holds several sets of inputs, and each `turn` uses the next, so that caches of the processor do
/// not hold what a first use would have to fetch from memory.
pub trait Workload {
    /// Records the job once, on the inputs of this turn.
    ///
    /// # Errors
    /// The library's.
    fn record(&mut self, encoder: &mut wgpu::CommandEncoder, turn: u32) -> Result<(), Error>;
}

/// Sets a job up with so many sets of inputs.
pub type Setup = fn(&Gpu, &Job, u32) -> Result<Box<dyn Workload>, Error>;
