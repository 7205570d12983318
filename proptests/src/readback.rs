//! Reading buffers back, words at a time, with a time limit.

use std::sync::mpsc;
use std::time::Instant;

use turboquant_wgpu::{Error, Gpu};

use crate::adapters::WAIT_LIMIT;

/// Copies of buffers on their way to the host.
pub struct Readback {
    staging: wgpu::Buffer,
    words: Vec<usize>,
    mapped: mpsc::Receiver<Result<(), wgpu::BufferAsyncError>>,
}

/// Records copies of whole buffers (usage `COPY_SRC`), read once the encoder has been submitted.
pub fn record(
    gpu: &Gpu,
    encoder: &mut wgpu::CommandEncoder,
    buffers: &[&wgpu::Buffer],
) -> Readback {
    let bytes: u64 = buffers.iter().map(|b| b.size()).sum();
    let staging = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: Some("readback"),
        size: bytes,
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let mut at = 0;
    for buffer in buffers {
        encoder.copy_buffer_to_buffer(buffer, 0, &staging, at, buffer.size());
        at += buffer.size();
    }
    let (sender, mapped) = mpsc::channel();
    encoder.map_buffer_on_submit(&staging, wgpu::MapMode::Read, .., move |result| {
        // The receiver is gone only if nobody waits.
        let _ = sender.send(result);
    });
    Readback {
        staging,
        words: buffers.iter().map(|b| (b.size() / 4) as usize).collect(),
        mapped,
    }
}

impl Readback {
    /// The words of each buffer. Only a mapping that succeeded counts: a poll that returns early is
    /// repeated until the limit.
    ///
    /// # Errors
    /// A timeout or a lost device.
    pub fn wait(self, gpu: &Gpu) -> Result<Vec<Vec<u32>>, Error> {
        let start = Instant::now();
        loop {
            match self.mapped.try_recv() {
                Ok(Ok(())) => break,
                Ok(Err(e)) => return Err(Error::DeviceLost(e.to_string())),
                Err(mpsc::TryRecvError::Disconnected) => {
                    return Err(Error::DeviceLost("the commands were dropped".to_owned()));
                }
                Err(mpsc::TryRecvError::Empty) => {}
            }
            match gpu.poll_wait(WAIT_LIMIT) {
                Ok(()) | Err(Error::Timeout(_)) => {}
                Err(e) => return Err(e),
            }
            if start.elapsed() > WAIT_LIMIT {
                return Err(Error::Timeout(WAIT_LIMIT));
            }
        }
        let view = self
            .staging
            .get_mapped_range(..)
            .map_err(|e| Error::DeviceLost(e.to_string()))?;
        let mut rest: &[u8] = &view;
        let mut buffers = Vec::new();
        for words in self.words {
            let (bytes, after) = rest.split_at(4 * words);
            rest = after;
            buffers.push(bytemuck::pod_collect_to_vec(bytes));
        }
        Ok(buffers)
    }
}
