//! A blob of 1 GB decoded, beside a copy of it.
//!
//! Decoding borrows: of a key blob it reads the norms alone, 4 of the 52 bytes of a key at
//! head_dim 128, and of a value blob 2 of 34. `bytes of the blob` counts the whole blob, `bytes
//! read` what is touched. What a restore does on the host is `copy_into`, which touches it all.

use std::hint::black_box;
use std::sync::LazyLock;

use divan::Bencher;
use divan::counter::BytesCount;
use turboquant_wgpu::blob::{BlobWriter, decode};
use turboquant_wgpu::gate::plan;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::{BlobHeader, HeadDim, LayerShape};

const HEADS: u32 = 8;
/// A key blob of 1.0 GB at 52 bytes a key.
const SEQ_LEN: u32 = 2_403_846;

fn blob(kind: Kind) -> Vec<u8> {
    let header = BlobHeader {
        kind,
        n_kv_heads: HEADS,
        head_dim: 128,
        seq_len: SEQ_LEN,
    };
    let mut writer = BlobWriter::new(header).expect("1 GB of memory");
    for &region in kind.blob_regions() {
        // Not zeros, lest every page be the same one. No norm of 0x3C3C is refused.
        writer
            .region_mut(region)
            .expect("the kind has it")
            .fill(0x3C);
    }
    writer.finish().expect("norms above 1")
}

static KEYS: LazyLock<Vec<u8>> = LazyLock::new(|| blob(Kind::Keys));
static VALUES: LazyLock<Vec<u8>> = LazyLock::new(|| blob(Kind::Values));

fn of(kind: Kind) -> &'static [u8] {
    match kind {
        Kind::Keys => &KEYS,
        Kind::Values => &VALUES,
    }
}

#[divan::bench]
fn memcpy(bencher: Bencher<'_, '_>) {
    let mut out = vec![1; KEYS.len()];
    bencher
        .counter(BytesCount::new(KEYS.len()))
        .bench_local(|| black_box(&mut out).copy_from_slice(black_box(&KEYS)));
}

#[divan::bench(args = [Kind::Keys, Kind::Values])]
fn decode_bytes_of_the_blob(bencher: Bencher<'_, '_>, kind: Kind) {
    let blob = of(kind);
    bencher
        .counter(BytesCount::new(blob.len()))
        .bench_local(|| decode(black_box(blob)).is_ok());
}

#[divan::bench(args = [Kind::Keys, Kind::Values])]
fn decode_bytes_read(bencher: Bencher<'_, '_>, kind: Kind) {
    let blob = of(kind);
    let halves = match kind {
        Kind::Keys => 2,
        Kind::Values => 1,
    };
    let norms = 2 * halves * HEADS as usize * SEQ_LEN as usize;
    bencher
        .counter(BytesCount::new(16 + norms))
        .bench_local(|| decode(black_box(blob)).is_ok());
}

/// Everything a restore does before the device has the bytes: judge both blobs, then fill staging
/// memory for the keys.
#[divan::bench]
fn restore_keys(bencher: Bencher<'_, '_>) {
    let shape = LayerShape {
        head_dim: HeadDim::D128,
        n_kv_heads: HEADS,
    };
    let mut out = vec![1; KEYS.len()];
    bencher
        .counter(BytesCount::new(KEYS.len()))
        .bench_local(|| {
            let plan = plan(shape, SEQ_LEN, black_box(&KEYS), &VALUES).expect("a pair");
            let mut rest = black_box(&mut out[..]);
            for write in plan.writes(Kind::Keys) {
                let (part, left) = rest.split_at_mut(write.len as usize);
                write.copy_into(part).expect("the write's own length");
                rest = left;
            }
        });
}

fn main() {
    LazyLock::force(&KEYS);
    LazyLock::force(&VALUES);
    divan::main();
}
