//! The f64 oracles with their bounds, by bytes of the f32 inputs: what a case costs beside its dispatch.

use std::hint::black_box;

use divan::Bencher;
use divan::counter::BytesCount;
use tqcheck::arithmetic::Arithmetic;
use tqcheck::oracles::{encode_keys, encode_values, rotate_queries};
use tqcheck::verdict::Evidence;
use turboquant_wgpu::{HeadDim, Rotation, twin};

const VECTORS: usize = 64;
const DIMS: [HeadDim; 4] = [HeadDim::D32, HeadDim::D64, HeadDim::D128, HeadDim::D256];

/// Each vector with what `make` makes of it, judged by `judge`, which has to be content.
fn over_vectors<T>(
    bencher: Bencher<'_, '_>,
    head_dim: HeadDim,
    make: impl Fn(&Rotation, &[f32]) -> T,
    judge: impl Fn(&Rotation, &[f32], &T) -> bool,
) {
    let rotation = Rotation::new(head_dim, 7, 0);
    let mut state = 1_u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(state) as f32 / 2_147_483_648.0 - 1.0
    };
    let cases: Vec<(Vec<f32>, T)> = (0..VECTORS)
        .map(|_| {
            let x: Vec<f32> = (0..head_dim.get()).map(|_| random()).collect();
            let made = make(&rotation, &x);
            (x, made)
        })
        .collect();
    bencher
        .counter(BytesCount::new(4 * VECTORS * head_dim.get()))
        .bench_local(|| {
            for (x, made) in black_box(&cases) {
                assert!(judge(&rotation, x, made), "the twin is right");
            }
        });
}

#[divan::bench(args = DIMS)]
fn keys(bencher: Bencher<'_, '_>, head_dim: HeadDim) {
    let make = |rotation: &Rotation, x: &[f32]| twin::encode_keys(rotation, x).0;
    over_vectors(bencher, head_dim, make, |rotation, x, record| {
        let mut evidence = Evidence::default();
        encode_keys::judge(Arithmetic::NEAREST, rotation, x, record, &mut evidence, "").is_ok()
    });
}

#[divan::bench(args = DIMS)]
fn values(bencher: Bencher<'_, '_>, head_dim: HeadDim) {
    let make = |rotation: &Rotation, x: &[f32]| twin::encode_values(rotation, x).0;
    over_vectors(bencher, head_dim, make, |rotation, x, record| {
        let mut evidence = Evidence::default();
        encode_values::judge(Arithmetic::NEAREST, rotation, x, record, &mut evidence, "").is_ok()
    });
}

#[divan::bench(args = DIMS)]
fn rotations(bencher: Bencher<'_, '_>, head_dim: HeadDim) {
    over_vectors(
        bencher,
        head_dim,
        |_, _| (),
        |rotation, x, ()| {
            let polar = rotate_queries::polar(Arithmetic::NEAREST, rotation, x);
            let jl = rotate_queries::jl(Arithmetic::NEAREST, rotation, &polar);
            jl.values.len() == x.len()
        },
    );
}

fn main() {
    divan::main();
}
