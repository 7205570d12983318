//! How long an engine waits for its first output.

use std::time::Instant;

use turboquant_wgpu::{Attend, Cache, CacheConfig, Gain, Gpu, HeadDim, KvSplit, Queries};

use crate::{Error, clock, data};

/// Nanoseconds from before `open` until the first output of attention lies on the host: device, pipelines, one
/// row of 32 query heads over 8 KV heads at head_dim 128. Also the device that was opened.
///
/// A driver may keep compiled kernels on disk from an earlier run, and is then faster than a first time would be.
///
/// # Errors
/// What `open` returns; the library's errors.
pub fn first_result<E: From<Error>>(
    open: impl FnOnce() -> Result<Gpu, E>,
) -> Result<(f64, Gpu), E> {
    let start = Instant::now();
    let gpu = open()?;
    attend_once(&gpu)?;
    Ok((start.elapsed().as_secs_f64() * 1e9, gpu))
}

fn attend_once(gpu: &Gpu) -> Result<(), Error> {
    let head_dim = HeadDim::D128;
    let (n_heads, n_kv_heads) = (32, 8);
    let config = CacheConfig {
        head_dim,
        n_kv_heads: vec![n_kv_heads],
        capacity: 64,
        seed: 7,
    };
    let mut cache = pollster::block_on(Cache::new(gpu, config))?;
    let mut queries = Queries::new(gpu, head_dim, n_heads, 1)?;
    let floats = |heads: u32| u64::from(heads * head_dim.get_u32());
    let kv = data::source(gpu, floats(n_kv_heads), 1);
    let q = data::source(gpu, floats(n_heads), 2);
    let output = data::output(gpu, floats(n_heads));
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    cache.encode(&mut encoder, 0, (&kv).into(), (&kv).into(), 1, 0)?;
    cache.rotate(&mut encoder, 0, (&q).into(), 1, &mut queries)?;
    let attend = Attend {
        rows: 0..1,
        start_pos: 0,
        split: KvSplit::Automatic,
        scale: head_dim.inv_sqrt(),
        gain: Gain::Unbiased,
    };
    cache.attend(&mut encoder, 0, &mut queries, (&output).into(), &attend)?;
    clock::run(gpu, encoder)?;
    let found: Vec<f32> = clock::download(gpu, &output)?;
    // Over one timestep the output is the value, which is not zero.
    if found.iter().all(|x| *x == 0.0 || !x.is_finite()) {
        return Err(Error::Refused {
            what: "the first attention".to_owned(),
            message: "its output is nothing".to_owned(),
        });
    }
    Ok(())
}
