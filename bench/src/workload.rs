//! What is timed.

use turboquant_wgpu::Gpu;

use crate::Error;
use crate::clock::{Clock, Sample};
use crate::job::Job;

/// A job that has been set up, and can be done again and again.
///
/// It holds several sets of inputs, and each `turn` uses the next, so that caches of the processor do
/// not hold what a first use would have to fetch from memory.
pub enum Workload {
    /// On the device.
    Device(Box<dyn Record>),
    /// On the host, by a function of the turn.
    Host(Box<dyn FnMut(u32) -> Result<(), Error>>),
}

/// Commands for a device.
pub trait Record {
    /// Records the job once, on the inputs of this turn.
    ///
    /// # Errors
    /// The library's.
    fn record(&mut self, encoder: &mut wgpu::CommandEncoder, turn: u32) -> Result<(), Error>;
}

impl Workload {
    /// Does the job once, alone, and times it.
    ///
    /// # Errors
    /// The job's; a hang, a lost device.
    pub fn time(&mut self, clock: &Clock, turn: u32) -> Result<Sample, Error> {
        match self {
            Self::Device(job) => clock.time(|encoder| job.record(encoder, turn)),
            Self::Host(job) => clock.time_host(|| job(turn)),
        }
    }
}

/// Sets a job up with so many sets of inputs.
pub type Setup = fn(&Gpu, &Job, u32) -> Result<Workload, Error>;
