//! The device's own copy speed: what a kernel that only moves bytes would reach.

use turboquant_wgpu::Gpu;

use crate::clock::Clock;
use crate::report::Copy;
use crate::stats::Summary;
use crate::suite::Scale;
use crate::{Error, data};

/// Copies one buffer to another and counts what is read and what is written.
///
/// # Errors
/// A hang, a lost device.
pub(crate) fn measure(
    gpu: &Gpu,
    clock: &mut Clock,
    scale: Scale,
    repeats: usize,
) -> Result<Copy, Error> {
    let bytes = scale.copy_bytes();
    let (from, to) = (
        data::source(gpu, bytes / 4, 1),
        data::source(gpu, bytes / 4, 2),
    );
    let once = |clock: &Clock| {
        clock.time(|encoder| {
            encoder.copy_buffer_to_buffer(&from, 0, &to, 0, bytes);
            Ok(())
        })
    };
    // The first touches memory for the first time; the second tells whether stamps time anything.
    once(clock)?;
    let sample = once(clock)?;
    clock.judge(sample);
    let ns = (0..repeats.max(3))
        .map(|_| once(clock).map(|s| s.ns()))
        .collect::<Result<Vec<f64>, Error>>()?;
    let time = Summary::new(ns).ok_or_else(|| Error::Stamps("a time is none".to_owned()))?;
    Ok(Copy {
        bytes: 2 * bytes,
        gb_per_s: 2.0 * bytes as f64 / time.median_ns,
        timing: clock.source(),
        time,
    })
}
