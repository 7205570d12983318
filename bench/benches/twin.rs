//! The CPU twin: encoding, rotating and attending, by bytes of its f32 inputs or of the records it reads.

use std::hint::black_box;

use divan::Bencher;
use divan::counter::BytesCount;
use turboquant_wgpu::twin::{self, KeyRecord, ValueRecord};
use turboquant_wgpu::{Gain, HeadDim, Rotation};

const VECTORS: usize = 256;
const DIMS: [HeadDim; 4] = [HeadDim::D32, HeadDim::D64, HeadDim::D128, HeadDim::D256];

/// Numbers without a pattern that a branch predictor could learn.
fn vectors(head_dim: HeadDim) -> Vec<f32> {
    let mut state = 1_u32;
    (0..VECTORS * head_dim.get())
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f64::from(state) as f32 / 2_147_483_648.0 - 1.0
        })
        .collect()
}

fn over_vectors<T>(
    bencher: Bencher<'_, '_>,
    head_dim: HeadDim,
    step: impl Fn(&Rotation, &[f32]) -> T,
) {
    let rotation = Rotation::new(head_dim, 7, 0);
    let x = vectors(head_dim);
    bencher.counter(BytesCount::of_slice(&x)).bench_local(|| {
        for vector in x.chunks_exact(head_dim.get()) {
            black_box(step(&rotation, black_box(vector)));
        }
    });
}

#[divan::bench(args = DIMS)]
fn encode_keys(bencher: Bencher<'_, '_>, head_dim: HeadDim) {
    over_vectors(bencher, head_dim, twin::encode_keys);
}

#[divan::bench(args = DIMS)]
fn encode_values(bencher: Bencher<'_, '_>, head_dim: HeadDim) {
    over_vectors(bencher, head_dim, twin::encode_values);
}

#[divan::bench(args = DIMS)]
fn rotate_queries(bencher: Bencher<'_, '_>, head_dim: HeadDim) {
    over_vectors(bencher, head_dim, twin::rotate_queries);
}

/// One query over the records of all vectors.
#[divan::bench(args = DIMS)]
fn attend(bencher: Bencher<'_, '_>, head_dim: HeadDim) {
    let rotation = Rotation::new(head_dim, 7, 0);
    let x = vectors(head_dim);
    let of = || x.chunks_exact(head_dim.get());
    let keys: Vec<KeyRecord> = of().map(|x| twin::encode_keys(&rotation, x).0).collect();
    let values: Vec<ValueRecord> = of().map(|x| twin::encode_values(&rotation, x).0).collect();
    let (query, _) = twin::rotate_queries(&rotation, &x[..head_dim.get()]);
    // Codes and signs of the key, codes of the value, three norms.
    let record = head_dim.get() * 5 / 8 + 6;
    bencher
        .counter(BytesCount::new(VECTORS * record))
        .bench_local(|| {
            let (keys, values) = (black_box(&keys), black_box(&values));
            let scale = head_dim.inv_sqrt();
            twin::attend(&rotation, &query, keys, values, scale, Gain::Unbiased)
        });
}

fn main() {
    divan::main();
}
