//! The library's CPU twin, on one core: the plain program that the kernels are judged by.

use std::hint::black_box;

use turboquant_wgpu::twin::{self, KeyRecord, ValueRecord};
use turboquant_wgpu::{Gain, Gpu, Rotation};

use crate::job::{Job, Kernel};
use crate::ours::FILL_ROWS;
use crate::workload::Workload;
use crate::{Error, data};

/// Sets the job up. One set of inputs serves every turn: what the twin does with each byte hides where it comes from.
pub(crate) fn setup(_gpu: &Gpu, job: &Job, _turns: u32) -> Result<Workload, Error> {
    let job = *job;
    let shape = job.shape;
    let d = shape.head_dim.get();
    let rotation = Rotation::new(shape.head_dim, 7, 0);
    let q = data::normal(job.rows as usize * shape.n_heads as usize * d, 3);
    Ok(Workload::Host(match job.kernel {
        Kernel::Encode => {
            let floats = job.rows as usize * shape.n_kv_heads as usize * d;
            let [keys, values] = [1, 2].map(|seed| data::normal(floats, seed));
            Box::new(move |_| {
                for (key, value) in keys.chunks_exact(d).zip(values.chunks_exact(d)) {
                    black_box(twin::encode_keys(&rotation, key));
                    black_box(twin::encode_values(&rotation, value));
                }
                Ok(())
            })
        }
        Kernel::Rotate => Box::new(move |_| {
            for query in q.chunks_exact(d) {
                black_box(twin::rotate_queries(&rotation, query));
            }
            Ok(())
        }),
        Kernel::Decode | Kernel::Prefill => {
            let queries: Vec<_> = q
                .chunks_exact(d)
                .map(|q| twin::rotate_queries(&rotation, q).0)
                .collect();
            let heads: Vec<_> = (0..u64::from(shape.n_kv_heads))
                .map(|head| records(&rotation, shape.seq_len as usize, head))
                .collect();
            let n_heads = shape.n_heads as usize;
            let group = n_heads / heads.len();
            let scale = shape.head_dim.inv_sqrt();
            Box::new(move |_| {
                for (at, query) in queries.iter().enumerate() {
                    let visible = job.start_pos() as usize + at / n_heads + 1;
                    let (keys, values) = &heads[at % n_heads / group];
                    black_box(twin::attend(
                        &rotation,
                        query,
                        &keys[..visible],
                        &values[..visible],
                        scale,
                        Gain::Unbiased,
                    ));
                }
                Ok(())
            })
        }
    }))
}

/// Keys and values of one head, which repeat as those on the device do.
fn records(rotation: &Rotation, n: usize, seed: u64) -> (Vec<KeyRecord>, Vec<ValueRecord>) {
    let d = rotation.head_dim().get();
    let drawn = n.min(FILL_ROWS as usize);
    let [keys, values] = [2 * seed, 2 * seed + 1].map(|seed| data::normal(drawn * d, seed));
    let keys: Vec<KeyRecord> = keys
        .chunks_exact(d)
        .map(|x| twin::encode_keys(rotation, x).0)
        .collect();
    let values: Vec<ValueRecord> = values
        .chunks_exact(d)
        .map(|x| twin::encode_values(rotation, x).0)
        .collect();
    (
        keys.iter().cycle().take(n).cloned().collect(),
        values.iter().cycle().take(n).cloned().collect(),
    )
}
