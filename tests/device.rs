//! The cache on real adapters, through the public API alone.
//!
//! Every test runs once for each backend of the platform. A backend without an adapter fails its
//! tests where adapters are required — `TQCHECK_REQUIRE` lists the backend, or is not set and `CI` is
//! `true` — and says so on standard error otherwise.

use std::io::Write as _;
use std::num::NonZeroU32;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use pollster::block_on;
use rand_xoshiro::Xoshiro256StarStar;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use turboquant_wgpu::blob::{decode, decode_kind};
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::{self, AttentionShape};
use turboquant_wgpu::{
    Attend, Cache, CacheConfig, Counters, Error, Gain, Gpu, GpuOptions, HeadDim, KvSplit, Pending,
    Queries, RestoreRefusal, Rotation, Rows, Snapshot, VectorCounts,
};

/// No wait for a device is longer.
const LIMIT: Duration = Duration::from_secs(20);
const SEED: u64 = 0x5eed;
const KINDS: [Kind; 2] = [Kind::Keys, Kind::Values];
const STORAGE: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE
    .union(wgpu::BufferUsages::COPY_SRC)
    .union(wgpu::BufferUsages::COPY_DST);

// ---------------------------------------------------------------------------------------------
// The laboratory

/// One adapter and the device that most tests share.
struct Lab {
    adapter: wgpu::Adapter,
    gpu: Gpu,
}

fn is_required(backend: &str) -> bool {
    match std::env::var("TQCHECK_REQUIRE") {
        Ok(list) if !list.is_empty() => list.split(',').any(|name| name.trim() == backend),
        _ => std::env::var("CI").is_ok_and(|ci| ci == "true"),
    }
}

fn open(backend: wgpu::Backend) -> Result<Lab, String> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends: backend.into(),
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    let adapter = block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))
        .map_err(|e| e.to_string())?;
    let gpu = block_on(Gpu::open(&adapter, GpuOptions::default())).map_err(|e| e.to_string())?;
    eprintln!("{backend}: {}", adapter.get_info().name);
    Ok(Lab { adapter, gpu })
}

/// Runs a test on the shared device of a backend. One test at a time: some drivers serialise
/// everything behind one lock, and give up on it after a few seconds.
fn run(backend: wgpu::Backend, slot: &OnceLock<Mutex<Result<Lab, String>>>, test: fn(&Lab)) {
    let lab = slot
        .get_or_init(|| Mutex::new(open(backend)))
        .lock()
        // A test that failed leaves nothing behind that another one reads.
        .unwrap_or_else(PoisonError::into_inner);
    match &*lab {
        Ok(lab) => test(lab),
        Err(e) if is_required(backend.to_str()) => panic!("{backend} is required: {e}"),
        // Not eprintln!, which the test runner would keep to itself.
        Err(e) => writeln!(
            std::io::stderr(),
            "NOT TESTED: there is no {backend} adapter here: {e}"
        )
        .expect("standard error"),
    }
}

macro_rules! on_every_backend {
    ($($test:ident,)*) => {
        on_backend! { vulkan Vulkan (not(target_vendor = "apple")) $($test)* }
        on_backend! { gl Gl (target_os = "linux") $($test)* }
        on_backend! { metal Metal (target_vendor = "apple") $($test)* }
        on_backend! { dx12 Dx12 (windows) $($test)* }
    };
}

macro_rules! on_backend {
    ($module:ident $backend:ident ($cfg:meta) $($test:ident)*) => {
        #[cfg($cfg)]
        mod $module {
            static LAB: std::sync::OnceLock<std::sync::Mutex<Result<super::Lab, String>>> =
                std::sync::OnceLock::new();
            $(
                #[test]
                fn $test() {
                    super::run(wgpu::Backend::$backend, &LAB, super::$test);
                }
            )*
        }
    };
}

impl Lab {
    /// Another device of the same adapter, with changed limits.
    fn device(&self, change: impl FnOnce(&mut wgpu::Limits)) -> Gpu {
        let mut required_limits = self.adapter.limits();
        change(&mut required_limits);
        let descriptor = wgpu::DeviceDescriptor {
            // For the same kernels as on the shared device.
            required_features: self.gpu.device().features(),
            required_limits,
            ..Default::default()
        };
        let (device, queue) =
            block_on(self.adapter.request_device(&descriptor)).expect("another device");
        Gpu::new(device, queue, GpuOptions::default()).expect("limits the kernels can live with")
    }
}

/// Distinct values of about unit variance.
fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut rng = Xoshiro256StarStar::seed_from_u64(seed);
    let mut unit = || (rng.next_u64() >> 40) as f32 / (1_u32 << 24) as f32;
    (0..n)
        .map(|_| (unit() + unit() + unit() - 1.5) * 2.0)
        .collect()
}

fn buffer(gpu: &Gpu, bytes: &[u8], usage: wgpu::BufferUsages) -> wgpu::Buffer {
    let buffer = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: bytes.len() as u64,
        usage,
        mapped_at_creation: false,
    });
    if usage.contains(wgpu::BufferUsages::COPY_DST) {
        gpu.queue().write_buffer(&buffer, 0, bytes);
    }
    buffer
}

fn upload(gpu: &Gpu, data: &[f32]) -> wgpu::Buffer {
    buffer(gpu, bytemuck::cast_slice(data), STORAGE)
}

/// Records with `record` into an encoder and submits it.
fn submit<T>(gpu: &Gpu, record: impl FnOnce(&mut wgpu::CommandEncoder) -> T) -> T {
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let result = record(&mut encoder);
    gpu.queue().submit([encoder.finish()]);
    result
}

fn read(gpu: &Gpu, source: &wgpu::Buffer) -> Vec<u8> {
    let staging = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: source.size(),
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    submit(gpu, |encoder| {
        encoder.copy_buffer_to_buffer(source, 0, &staging, 0, source.size());
    });
    let (send, receive) = std::sync::mpsc::channel();
    staging.map_async(wgpu::MapMode::Read, .., move |result| {
        send.send(result).expect("the receiver waits");
    });
    gpu.poll_wait(LIMIT).expect("the device answers in time");
    receive
        .recv_timeout(LIMIT)
        .expect("a callback")
        .expect("mapped");
    staging.get_mapped_range(..).expect("mapped").to_vec()
}

fn read_floats(gpu: &Gpu, source: &wgpu::Buffer) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(&read(gpu, source))
}

fn bits(floats: &[f32]) -> Vec<u32> {
    floats.iter().map(|f| f.to_bits()).collect()
}

fn new_cache(gpu: &Gpu, head_dim: HeadDim, n_kv_heads: &[u32], capacity: u32) -> Cache {
    try_cache(gpu, head_dim, n_kv_heads, capacity).expect("a cache")
}

fn try_cache(
    gpu: &Gpu,
    head_dim: HeadDim,
    n_kv_heads: &[u32],
    capacity: u32,
) -> Result<Cache, Error> {
    block_on(Cache::new(
        gpu,
        CacheConfig {
            head_dim,
            n_kv_heads: n_kv_heads.to_vec(),
            capacity,
            seed: SEED,
        },
    ))
}

/// Elements of one row of keys in a layer.
fn row_len(cache: &Cache, layer: u32) -> usize {
    let shape = cache.shape(layer).expect("a layer");
    shape.head_dim.get() * shape.n_kv_heads as usize
}

fn encode(gpu: &Gpu, cache: &mut Cache, layer: u32, k: &[f32], v: &[f32], position: u32) {
    let rows = (k.len() / row_len(cache, layer)) as u32;
    let (k, v) = (upload(gpu, k), upload(gpu, v));
    submit(gpu, |encoder| {
        cache.encode(encoder, layer, (&k).into(), (&v).into(), rows, position)
    })
    .expect("encode");
}

fn snapshot(gpu: &Gpu, cache: &Cache, layer: u32) -> Snapshot {
    submit(gpu, |encoder| cache.snapshot(encoder, layer))
        .expect("snapshot")
        .wait(LIMIT)
        .expect("snapshot")
}

fn counters(gpu: &Gpu, cache: &Cache, layer: u32) -> Counters {
    submit(gpu, |encoder| cache.counters(encoder, layer))
        .expect("counters")
        .wait(LIMIT)
        .expect("counters")
}

fn raw(gpu: &Gpu, cache: &Cache, layer: u32) -> [Vec<u8>; 2] {
    KINDS.map(|kind| read(gpu, cache.buffer(layer, kind).expect("a layer")))
}

fn plain(head_dim: HeadDim, rows: u32, start_pos: u32) -> Attend {
    Attend {
        rows: 0..rows,
        start_pos,
        split: KvSplit::Automatic,
        scale: head_dim.inv_sqrt(),
        gain: Gain::default(),
    }
}

fn split(len: u32) -> KvSplit {
    KvSplit::Len(NonZeroU32::new(len).expect("not 0"))
}

/// Rotates `q` and attends the rows of `attend`; the output has room for every row of `q` and is NaN where
/// nothing was written.
fn attend(
    gpu: &Gpu,
    cache: &Cache,
    layer: u32,
    n_heads: u32,
    q: &[f32],
    attend: &Attend,
) -> Vec<f32> {
    let head_dim = cache.config().head_dim;
    let rows = (q.len() / (n_heads as usize * head_dim.get())) as u32;
    let mut queries = Queries::new(gpu, head_dim, n_heads, rows).expect("queries");
    let source = upload(gpu, q);
    let output = upload(gpu, &vec![f32::NAN; q.len()]);
    submit(gpu, |encoder| {
        cache.rotate(encoder, layer, (&source).into(), rows, &mut queries)?;
        cache.attend(encoder, layer, &mut queries, (&output).into(), attend)
    })
    .expect("attention");
    read_floats(gpu, &output)
}

/// What the CPU twin computes from the bytes that the device holds.
fn twin_attention(
    cache: &Cache,
    layer: u32,
    blobs: &Snapshot,
    n_heads: u32,
    q: &[f32],
    attend: &Attend,
) -> Vec<f32> {
    let keys = decode_kind(Kind::Keys, &blobs.keys).expect("keys decode");
    let values = decode_kind(Kind::Values, &blobs.values).expect("values decode");
    let shape = AttentionShape {
        rows: (q.len() / (n_heads as usize * cache.config().head_dim.get())) as u32,
        n_heads,
        start_pos: attend.start_pos,
        scale: attend.scale,
        gain: attend.gain,
    };
    twin::attention(
        cache.rotation(layer).expect("a layer"),
        &keys,
        &values,
        q,
        &shape,
    )
    .expect("the twin attends")
}

/// Coarse on purpose: a wrong index, sign or factor is off by about 1.
#[track_caller]
fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!(
            (a - b).abs() <= 1e-3,
            "{what}: element {i} is {a}, the twin's {b}"
        );
    }
}

/// A filled layer and its inputs.
fn filled(
    gpu: &Gpu,
    head_dim: HeadDim,
    n_kv_heads: u32,
    capacity: u32,
    rows: u32,
) -> (Cache, Vec<f32>, Vec<f32>) {
    let mut cache = new_cache(gpu, head_dim, &[n_kv_heads], capacity);
    let n = rows as usize * n_kv_heads as usize * head_dim.get();
    let (k, v) = (noise(1, n), noise(2, n));
    encode(gpu, &mut cache, 0, &k, &v, 0);
    (cache, k, v)
}

on_every_backend! {
    attention_is_the_twins_for_every_shape,
    layers_do_not_mix,
    partitions_of_the_queries_have_the_same_bits,
    causal_positions_are_absolute,
    snapshots_are_the_twins,
    restore_carries_a_cache_over,
    refused_blobs_change_no_bit,
    blobs_of_an_empty_cache_restore,
    passes_of_one_encoder_keep_their_parameters,
    encoders_may_be_submitted_in_another_order,
    refusals_record_nothing,
    constructors_refuse_by_name,
    foreign_buffers_are_an_error,
    a_refused_encoder_delivers_nothing,
    no_rows_are_no_work,
    truncation_forgets,
    counters_count_each_kind,
    offsets_need_only_be_whole_elements,
    unused_slots_are_never_read,
    workgroup_memory_need_not_be_zero,
    workgroups_spill_into_y,
    long_inputs_are_cut_into_bindings,
    a_snapshot_past_the_largest_buffer_is_refused,
    dropped_commands_resolve,
    pending_results_can_be_awaited,
    a_tiny_limit_is_a_timeout_or_the_result,
    threads_may_wait_for_one_device,
    a_destroyed_device_is_a_typed_error,
    a_loss_that_nobody_reports_is_a_typed_error,
}

// ---------------------------------------------------------------------------------------------
// What attention computes

fn attention_is_the_twins_for_every_shape(lab: &Lab) {
    let gpu = &lab.gpu;
    // One tile and a part of another.
    const SEQ: u32 = 70;
    const ROWS: u32 = 3;
    for head_dim in HeadDim::ALL {
        for (n_kv_heads, ratio) in [(2, 1), (1, 3), (2, 4), (1, 7), (1, 16)] {
            let (cache, ..) = filled(gpu, head_dim, n_kv_heads, SEQ + 3, SEQ);
            let blobs = snapshot(gpu, &cache, 0);
            let n_heads = n_kv_heads * ratio;
            let q = noise(3, (ROWS * n_heads) as usize * head_dim.get());
            let mut what = plain(head_dim, ROWS, SEQ - ROWS);
            what.gain = Gain::ALL[ratio as usize % 3];
            let expected = twin_attention(&cache, 0, &blobs, n_heads, &q, &what);
            for split in [KvSplit::Automatic, split(64), split(17), split(u32::MAX)] {
                what.split = split;
                let found = attend(gpu, &cache, 0, n_heads, &q, &what);
                let name = format!("d {head_dim}, {n_kv_heads} x {ratio} heads, {split:?}");
                assert_close(&found, &expected, &name);
            }
        }
    }
}

fn layers_do_not_mix(lab: &Lab) {
    let gpu = &lab.gpu;
    let d = HeadDim::D64;
    let heads = [1, 0, 3, 2];
    let mut cache = new_cache(gpu, d, &heads, 9);
    assert!(matches!(
        cache.len(1),
        Err(Error::LayerWithoutCache { layer: 1 })
    ));
    let with_cache = || (0..).zip(heads).filter(|&(_, n)| n > 0);
    for (layer, n) in with_cache() {
        let rows = 4 + layer as usize;
        let (k, v) = (
            noise(10 + u64::from(layer), rows * n as usize * d.get()),
            noise(20 + u64::from(layer), rows * n as usize * d.get()),
        );
        encode(gpu, &mut cache, layer, &k, &v, 0);
    }
    for (layer, n) in with_cache() {
        let len = cache.len(layer).expect("a layer");
        assert_eq!(len, 4 + layer);
        let blobs = snapshot(gpu, &cache, layer);
        let q = noise(3, 2 * 2 * n as usize * d.get());
        let what = plain(d, 2, len - 2);
        let found = attend(gpu, &cache, layer, 2 * n, &q, &what);
        let expected = twin_attention(&cache, layer, &blobs, 2 * n, &q, &what);
        assert_close(&found, &expected, &format!("layer {layer}"));
    }
    let bytes: u64 = with_cache()
        .flat_map(|(layer, _)| {
            KINDS.map(|kind| cache.layout(layer, kind).expect("a layer").bytes())
        })
        .sum();
    assert_eq!(cache.device_bytes(), bytes);
}

fn partitions_of_the_queries_have_the_same_bits(lab: &Lab) {
    let gpu = &lab.gpu;
    let d = HeadDim::D128;
    let (cache, ..) = filled(gpu, d, 2, 90, 80);
    let q = noise(3, 7 * 4 * d.get());
    let row = 4 * d.get();
    for split in [split(16), split(64)] {
        let mut what = Attend {
            split,
            ..plain(d, 7, 73)
        };
        let whole = attend(gpu, &cache, 0, 4, &q, &what);
        for cuts in [[0, 1, 7], [0, 4, 7], [0, 6, 7]] {
            for range in cuts.windows(2) {
                what.rows = range[0]..range[1];
                let part = attend(gpu, &cache, 0, 4, &q, &what);
                let inside = range[0] as usize * row..range[1] as usize * row;
                assert_eq!(bits(&part[inside.clone()]), bits(&whole[inside.clone()]));
                let outside = part[..inside.start].iter().chain(&part[inside.end..]);
                assert!(
                    outside.copied().all(f32::is_nan),
                    "rows outside were written"
                );
            }
        }
    }
}

fn causal_positions_are_absolute(lab: &Lab) {
    let gpu = &lab.gpu;
    let d = HeadDim::D32;
    let (cache, ..) = filled(gpu, d, 1, 140, 133);
    let blobs = snapshot(gpu, &cache, 0);
    // First row of all, around a tile's end, the last row that there is.
    for (start, rows) in [
        (0, 1),
        (0, 3),
        (62, 4),
        (63, 1),
        (64, 1),
        (126, 7),
        (132, 1),
    ] {
        let q = noise(u64::from(start), rows as usize * 3 * d.get());
        let what = plain(d, rows, start);
        let found = attend(gpu, &cache, 0, 3, &q, &what);
        let expected = twin_attention(&cache, 0, &blobs, 3, &q, &what);
        assert_close(&found, &expected, &format!("{rows} rows from {start}"));
    }
}

// ---------------------------------------------------------------------------------------------
// Snapshot and restore

/// Records of a pair of blobs that differ.
fn differing_records(a: &[u8], b: &[u8]) -> usize {
    let (a, b) = (decode(a).expect("a blob"), decode(b).expect("a blob"));
    assert_eq!(a.header(), b.header());
    let header = a.header();
    (0..header.n_kv_heads)
        .flat_map(|head| (0..header.seq_len).map(move |t| (head, t)))
        .filter(|&(head, t)| {
            header
                .kind
                .blob_regions()
                .iter()
                .any(|&region| a.record(region, head, t) != b.record(region, head, t))
        })
        .count()
}

fn snapshots_are_the_twins(lab: &Lab) {
    let gpu = &lab.gpu;
    for head_dim in HeadDim::ALL {
        let (cache, k, v) = filled(gpu, head_dim, 3, 50, 37);
        let found = snapshot(gpu, &cache, 0);
        let rotation = Rotation::new(head_dim, SEED, 0);
        let (expected, ..) = twin::snapshot(&rotation, 3, &k, &v).expect("the twin encodes");
        // A coordinate within a rounding error of a boundary may go either way, and takes its
        // record's signs with it; so may a norm half way between two f16s.
        for (found, expected) in [
            (&found.keys, &expected.keys),
            (&found.values, &expected.values),
        ] {
            let differing = differing_records(found, expected);
            assert!(
                differing <= 2,
                "d {head_dim}: {differing} of 111 records differ"
            );
        }
    }
}

fn restore_carries_a_cache_over(lab: &Lab) {
    let gpu = &lab.gpu;
    for head_dim in HeadDim::ALL {
        let (cache, ..) = filled(gpu, head_dim, 2, 12, 11);
        let blobs = snapshot(gpu, &cache, 0);
        let mut other = new_cache(gpu, head_dim, &[2], 31);
        let len = submit(gpu, |encoder| {
            other.restore(encoder, 0, &blobs.keys, &blobs.values)
        });
        assert_eq!((len, other.len(0)), (Ok(11), Ok(11)));
        assert_eq!(snapshot(gpu, &other, 0), blobs);

        let q = noise(3, 2 * head_dim.get());
        let what = plain(head_dim, 1, 10);
        assert_eq!(
            bits(&attend(gpu, &cache, 0, 2, &q, &what)),
            bits(&attend(gpu, &other, 0, 2, &q, &what)),
            "the stride of a head makes no difference"
        );
    }
}

fn refused_blobs_change_no_bit(lab: &Lab) {
    let gpu = &lab.gpu;
    let d = HeadDim::D64;
    let (mut cache, ..) = filled(gpu, d, 2, 9, 7);
    let good = snapshot(gpu, &cache, 0);
    let (over, ..) = filled(gpu, d, 2, 10, 10);
    let over = snapshot(gpu, &over, 0);
    let (other_heads, ..) = filled(gpu, d, 1, 7, 7);
    let other_heads = snapshot(gpu, &other_heads, 0);
    let mut nan = good.keys.clone();
    let last = nan.len() - 2;
    nan[last..].copy_from_slice(&0x7e01_u16.to_le_bytes());

    let before = raw(gpu, &cache, 0);
    let (keys, values) = (&good.keys[..], &good.values[..]);
    for (what, keys, values) in [
        ("one byte short", keys, &values[..values.len() - 1]),
        ("a NaN norm at the very end", &nan, values),
        ("swapped", values, keys),
        ("keys missing", &[], values),
        ("both missing", &[], &[]),
        ("over capacity", &over.keys, &over.values),
        ("other heads", &other_heads.keys, &other_heads.values),
        ("lengths differ", keys, &over.values),
    ] {
        let refusal = submit(gpu, |encoder| cache.restore(encoder, 0, keys, values));
        assert!(
            matches!(refusal, Err(Error::RestoreRefused { layer: 0, .. })),
            "{what}: {refusal:?}"
        );
        assert_eq!(cache.len(0), Ok(7), "{what}");
        assert!(raw(gpu, &cache, 0) == before, "{what}: a bit changed");
    }

    let mut hollow = new_cache(gpu, d, &[0], 9);
    let refusal = submit(gpu, |encoder| hollow.restore(encoder, 0, keys, values));
    let reason = RestoreRefusal::NoCache;
    assert_eq!(refusal, Err(Error::RestoreRefused { layer: 0, reason }));
    let refusal = submit(gpu, |encoder| hollow.restore(encoder, 1, keys, values));
    assert_eq!(
        refusal,
        Err(Error::NoSuchLayer {
            found: 1,
            n_layers: 1
        })
    );
}

fn blobs_of_an_empty_cache_restore(lab: &Lab) {
    let gpu = &lab.gpu;
    let d = HeadDim::D32;
    let empty = snapshot(gpu, &new_cache(gpu, d, &[2], 4), 0);
    assert_eq!((empty.keys.len(), empty.values.len()), (16, 16));
    let (mut cache, ..) = filled(gpu, d, 2, 9, 7);
    let before = raw(gpu, &cache, 0);
    let len = submit(gpu, |encoder| {
        cache.restore(encoder, 0, &empty.keys, &empty.values)
    });
    assert_eq!(
        (len, cache.len(0), cache.is_empty(0)),
        (Ok(0), Ok(0), Ok(true))
    );
    assert!(raw(gpu, &cache, 0) == before, "there was nothing to write");
    assert_eq!(snapshot(gpu, &cache, 0), empty);
}

// ---------------------------------------------------------------------------------------------
// Recording and submitting

fn passes_of_one_encoder_keep_their_parameters(lab: &Lab) {
    let gpu = &lab.gpu;
    let d = HeadDim::D64;
    let n = 5 * 2 * d.get();
    let mut cache = new_cache(gpu, d, &[2, 2], 10);
    let inputs: Vec<_> = (0..8).map(|i| noise(40 + i, n)).collect();
    let sources: Vec<_> = inputs.iter().map(|data| upload(gpu, data)).collect();
    let q = [noise(50, 4 * d.get()), noise(51, 4 * d.get())];
    let q_buffers = q.each_ref().map(|data| upload(gpu, data));
    let mut queries = Queries::new(gpu, d, 4, 1).expect("queries");
    let what = [
        Attend {
            scale: 0.1,
            gain: Gain::Cera,
            ..plain(d, 1, 9)
        },
        Attend {
            scale: -0.3,
            split: split(3),
            ..plain(d, 1, 4)
        },
    ];
    let outputs = [0, 1].map(|_| upload(gpu, &vec![f32::NAN; 4 * d.get()]));

    submit(gpu, |encoder| {
        for (i, pair) in sources.chunks_exact(2).enumerate() {
            let (layer, position) = ((i % 2) as u32, 5 * (i / 2) as u32);
            let [keys, values] = [&pair[0], &pair[1]].map(Rows::from);
            cache.encode(encoder, layer, keys, values, 5, position)?;
        }
        // The same queries, used for one layer after the other.
        for i in 0..2_usize {
            let (layer, source) = (i as u32, (&q_buffers[i]).into());
            cache.rotate(encoder, layer, source, 1, &mut queries)?;
            let output = (&outputs[i]).into();
            cache.attend(encoder, layer, &mut queries, output, &what[i])?;
        }
        Ok::<_, Error>(())
    })
    .expect("all passes");

    for i in 0..2_usize {
        let layer = i as u32;
        let mut separate = new_cache(gpu, d, &[2, 2], 10);
        for (at, position) in [(2 * i, 0), (2 * i + 4, 5)] {
            encode(
                gpu,
                &mut separate,
                layer,
                &inputs[at],
                &inputs[at + 1],
                position,
            );
        }
        let blobs = snapshot(gpu, &cache, layer);
        assert_eq!(blobs, snapshot(gpu, &separate, layer));
        let expected = twin_attention(&cache, layer, &blobs, 4, &q[i], &what[i]);
        assert_close(
            &read_floats(gpu, &outputs[i]),
            &expected,
            &format!("pass {i}"),
        );
    }
}

fn encoders_may_be_submitted_in_another_order(lab: &Lab) {
    let gpu = &lab.gpu;
    let d = HeadDim::D128;
    let n = 4 * d.get();
    let inputs: Vec<_> = (0..6).map(|i| noise(60 + i, n)).collect();
    let sources: Vec<_> = inputs.iter().map(|data| upload(gpu, data)).collect();
    // (layer, position) of what each encoder encodes.
    let jobs = [(0, 0), (1, 0), (0, 4)];
    let mut cache = new_cache(gpu, d, &[1, 1], 8);
    let encoders: Vec<_> = jobs
        .iter()
        .zip(sources.chunks_exact(2))
        .map(|(&(layer, position), pair)| {
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            let [keys, values] = [&pair[0], &pair[1]].map(Rows::from);
            cache
                .encode(&mut encoder, layer, keys, values, 4, position)
                .expect("encode");
            encoder.finish()
        })
        .collect();
    for commands in encoders.into_iter().rev() {
        gpu.queue().submit([commands]);
    }

    let mut in_order = new_cache(gpu, d, &[1, 1], 8);
    for (&(layer, position), pair) in jobs.iter().zip(inputs.chunks_exact(2)) {
        encode(gpu, &mut in_order, layer, &pair[0], &pair[1], position);
    }
    for layer in 0..2 {
        assert_eq!(
            snapshot(gpu, &cache, layer),
            snapshot(gpu, &in_order, layer)
        );
    }
}

// ---------------------------------------------------------------------------------------------
// Refusals

/// What a refused call is tried on.
struct Bench {
    gpu: Gpu,
    /// Layer 0 with 2 heads holds 5 of 8 timesteps, layer 1 has no cache, layer 2 has 4 heads.
    cache: Cache,
    /// 6 heads, room for 3 rows, 2 rows rotated for layer 0.
    queries: Queries,
    /// 8 rows of 4 heads.
    buffer: wgpu::Buffer,
    output: wgpu::Buffer,
    no_storage: wgpu::Buffer,
}

impl Bench {
    fn new(gpu: &Gpu) -> Self {
        let d = HeadDim::D64;
        let mut cache = new_cache(gpu, d, &[2, 0, 4], 8);
        let n = 5 * 2 * d.get();
        encode(gpu, &mut cache, 0, &noise(1, n), &noise(2, n), 0);
        let mut queries = Queries::new(gpu, d, 6, 3).expect("queries");
        let source = upload(gpu, &noise(3, 2 * 6 * d.get()));
        submit(gpu, |encoder| {
            cache.rotate(encoder, 0, (&source).into(), 2, &mut queries)
        })
        .expect("rotate");
        let data = noise(4, 8 * 4 * d.get());
        Self {
            gpu: gpu.clone(),
            cache,
            queries,
            buffer: upload(gpu, &data),
            output: upload(gpu, &data),
            no_storage: buffer(
                gpu,
                bytemuck::cast_slice(&data),
                wgpu::BufferUsages::COPY_DST,
            ),
        }
    }

    /// Everything on the device that a call could write to.
    fn state(&self) -> (Vec<Vec<u8>>, Vec<u32>, [Counters; 2]) {
        let gpu = &self.gpu;
        let buffers = [0, 2]
            .iter()
            .flat_map(|&layer| raw(gpu, &self.cache, layer))
            .chain([&self.buffer, &self.output, self.queries.buffer()].map(|b| read(gpu, b)))
            .collect();
        let lens = [0, 2].map(|layer| self.cache.len(layer).expect("a layer"));
        let counted = [0, 2].map(|layer| counters(gpu, &self.cache, layer));
        (buffers, lens.to_vec(), counted)
    }
}

type Call = fn(&mut Bench, &mut wgpu::CommandEncoder) -> Result<(), Error>;

/// Encodes from the bench's buffer into layer 0.
fn bench_encode(
    bench: &mut Bench,
    encoder: &mut wgpu::CommandEncoder,
    layer: u32,
    rows: u32,
    position: u32,
) -> Result<(), Error> {
    let source = Rows::from(&bench.buffer);
    bench
        .cache
        .encode(encoder, layer, source, source, rows, position)
}

fn bench_rotate(
    bench: &mut Bench,
    encoder: &mut wgpu::CommandEncoder,
    layer: u32,
    rows: u32,
) -> Result<(), Error> {
    let source = Rows::from(&bench.buffer);
    bench
        .cache
        .rotate(encoder, layer, source, rows, &mut bench.queries)
}

fn bench_attend(
    bench: &mut Bench,
    encoder: &mut wgpu::CommandEncoder,
    layer: u32,
    change: fn(&mut Attend),
) -> Result<(), Error> {
    let mut what = plain(HeadDim::D64, 2, 3);
    change(&mut what);
    let output = (&bench.output).into();
    bench
        .cache
        .attend(encoder, layer, &mut bench.queries, output, &what)
}

fn refusals_record_nothing(lab: &Lab) {
    let mut bench = Bench::new(&lab.gpu);
    let before = bench.state();
    let calls: &[(&str, &str, Call)] = &[
        (
            "encode: no such layer",
            "layer 3: the cache has 3 layers",
            |b, e| bench_encode(b, e, 3, 1, 0),
        ),
        (
            "encode: layer without a cache",
            "layer 1 has no cache",
            |b, e| bench_encode(b, e, 1, 1, 0),
        ),
        (
            "encode: past the capacity",
            "rows 5..9 do not lie within 0..8",
            |b, e| bench_encode(b, e, 0, 4, 5),
        ),
        (
            "encode: position past u32",
            "do not lie within 0..8",
            |b, e| bench_encode(b, e, 0, u32::MAX, u32::MAX),
        ),
        (
            "encode: a hole",
            "position 6 leaves a hole after the 5 rows",
            |b, e| bench_encode(b, e, 0, 1, 6),
        ),
        (
            "encode: no rows, but a hole",
            "position 6 leaves a hole",
            |b, e| bench_encode(b, e, 0, 0, 6),
        ),
        (
            "encode: buffer too small",
            "expected at least 8196 (offset 7172)",
            |b, e| {
                let keys = Rows::from(&b.buffer);
                let values = Rows {
                    buffer: &b.buffer,
                    offset: 8192 - 2 * 512 + 4,
                };
                b.cache.encode(e, 0, keys, values, 2, 0)
            },
        ),
        ("encode: offset past u64", "values buffer has", |b, e| {
            let keys = Rows::from(&b.buffer);
            let values = Rows {
                buffer: &b.buffer,
                offset: u64::MAX - 3,
            };
            b.cache.encode(e, 0, keys, values, 2, 0)
        }),
        (
            "encode: misaligned",
            "keys buffer: offset 6 is not a multiple of 4",
            |b, e| {
                let keys = Rows {
                    buffer: &b.buffer,
                    offset: 6,
                };
                b.cache.encode(e, 0, keys, (&b.buffer).into(), 2, 0)
            },
        ),
        ("encode: usage", "keys buffer has usages", |b, e| {
            b.cache
                .encode(e, 0, (&b.no_storage).into(), (&b.buffer).into(), 2, 0)
        }),
        (
            "encode: the cache as source",
            "keys and key cache buffers are the same",
            |b, e| {
                let own = b.cache.buffer(2, Kind::Keys)?.clone();
                b.cache
                    .encode(e, 0, (&own).into(), (&b.buffer).into(), 1, 0)
            },
        ),
        (
            "encode: the cache as source of values",
            "values and value cache",
            |b, e| {
                let own = b.cache.buffer(0, Kind::Values)?.clone();
                b.cache
                    .encode(e, 0, (&b.buffer).into(), (&own).into(), 1, 0)
            },
        ),
        ("rotate: no such layer", "layer 9", |b, e| {
            bench_rotate(b, e, 9, 1)
        }),
        (
            "rotate: layer without a cache",
            "layer 1 has no cache",
            |b, e| bench_rotate(b, e, 1, 1),
        ),
        (
            "rotate: heads",
            "n_heads 6 is not a multiple of the layer's n_kv_heads 4",
            |b, e| bench_rotate(b, e, 2, 1),
        ),
        (
            "rotate: too many rows",
            "rows 0..4 do not lie within 0..3",
            |b, e| bench_rotate(b, e, 0, 4),
        ),
        (
            "rotate: head_dim",
            "head_dim is 32, the layer's is 64",
            |b, e| {
                let mut queries = Queries::new(&b.gpu, HeadDim::D32, 6, 1)?;
                b.cache.rotate(e, 0, (&b.buffer).into(), 1, &mut queries)
            },
        ),
        (
            "rotate: its own result as source",
            "queries and rotated queries",
            |b, e| {
                let own = b.queries.buffer().clone();
                b.cache.rotate(e, 0, (&own).into(), 1, &mut b.queries)
            },
        ),
        (
            "rotate: too small",
            "queries buffer has 8192 bytes",
            |b, e| {
                let source = Rows {
                    buffer: &b.buffer,
                    offset: 8192,
                };
                b.cache.rotate(e, 0, source, 1, &mut b.queries)
            },
        ),
        ("rotate: usage", "queries buffer has usages", |b, e| {
            b.cache
                .rotate(e, 0, (&b.no_storage).into(), 1, &mut b.queries)
        }),
        ("attend: no such layer", "layer 3", |b, e| {
            bench_attend(b, e, 3, |_| {})
        }),
        (
            "attend: layer without a cache",
            "layer 1 has no cache",
            |b, e| bench_attend(b, e, 1, |_| {}),
        ),
        ("attend: heads", "n_kv_heads 4", |b, e| {
            bench_attend(b, e, 2, |_| {})
        }),
        (
            "attend: more rows than rotated",
            "rows 0..3 do not lie within 0..2",
            |b, e| bench_attend(b, e, 0, |a| a.rows = 0..3),
        ),
        ("attend: rows backwards", "rows 2..1 do not lie", |b, e| {
            bench_attend(b, e, 0, |a| (a.rows.start, a.rows.end) = (2, 1))
        }),
        (
            "attend: past the length",
            "rows 4..6 do not lie within 0..5",
            |b, e| bench_attend(b, e, 0, |a| a.start_pos = 4),
        ),
        (
            "attend: start_pos past u32",
            "do not lie within 0..5",
            |b, e| bench_attend(b, e, 0, |a| a.start_pos = u32::MAX),
        ),
        ("attend: NaN scale", "scale is NaN", |b, e| {
            bench_attend(b, e, 0, |a| a.scale = f32::NAN)
        }),
        ("attend: infinite scale", "scale is inf", |b, e| {
            bench_attend(b, e, 0, |a| a.scale = f32::INFINITY)
        }),
        (
            "attend: onto the queries",
            "output and rotated queries",
            |b, e| {
                let own = b.queries.buffer().clone();
                let what = plain(HeadDim::D64, 1, 0);
                b.cache.attend(e, 0, &mut b.queries, (&own).into(), &what)
            },
        ),
        (
            "attend: onto another layer's cache",
            "output and key cache",
            |b, e| {
                let own = b.cache.buffer(2, Kind::Keys)?.clone();
                let what = plain(HeadDim::D64, 1, 0);
                b.cache.attend(e, 0, &mut b.queries, (&own).into(), &what)
            },
        ),
        (
            "attend: output too small",
            "output buffer has 8192 bytes",
            |b, e| {
                let output = Rows {
                    buffer: &b.output,
                    offset: 8192 - 2 * 1536 + 4,
                };
                let what = plain(HeadDim::D64, 2, 0);
                b.cache.attend(e, 0, &mut b.queries, output, &what)
            },
        ),
        (
            "attend: output usage",
            "output buffer has usages",
            |b, e| {
                let what = plain(HeadDim::D64, 1, 0);
                b.cache
                    .attend(e, 0, &mut b.queries, (&b.no_storage).into(), &what)
            },
        ),
        (
            "attend: output misaligned",
            "output buffer: offset 2",
            |b, e| {
                let output = Rows {
                    buffer: &b.output,
                    offset: 2,
                };
                let what = plain(HeadDim::D64, 1, 0);
                b.cache.attend(e, 0, &mut b.queries, output, &what)
            },
        ),
        (
            "attend: another seed",
            "were not rotated for layer 0",
            |b, e| {
                let mut other = new_cache(&b.gpu, HeadDim::D64, &[2, 2], 4);
                let source = Rows::from(&b.buffer);
                other.encode(e, 1, source, source, 1, 0)?;
                // Rotated for layer 0, used for layer 1.
                let mut queries = Queries::new(&b.gpu, HeadDim::D64, 6, 1)?;
                other.rotate(e, 1, source, 1, &mut queries)?;
                let what = plain(HeadDim::D64, 1, 0);
                b.cache
                    .attend(e, 0, &mut queries, (&b.output).into(), &what)
            },
        ),
        (
            "attend: never rotated",
            "rows 0..1 do not lie within 0..0",
            |b, e| {
                let mut queries = Queries::new(&b.gpu, HeadDim::D64, 6, 1)?;
                let what = plain(HeadDim::D64, 1, 0);
                b.cache
                    .attend(e, 0, &mut queries, (&b.output).into(), &what)
            },
        ),
        (
            "truncate: past the end",
            "rows 0..6 do not lie within 0..5",
            |b, _| b.cache.truncate(0, 6),
        ),
        (
            "truncate: layer without a cache",
            "layer 1 has no cache",
            |b, _| b.cache.truncate(1, 0),
        ),
        ("shift", "cannot be shifted by -1", |b, _| {
            b.cache.shift_positions(0, -1)
        }),
        ("snapshot: no such layer", "layer 3", |b, e| {
            b.cache.snapshot(e, 3).map(drop)
        }),
        ("counters: layer without a cache", "layer 1", |b, e| {
            b.cache.counters(e, 1).map(drop)
        }),
    ];
    for (name, message, call) in calls {
        let mut encoder = lab.gpu.device().create_command_encoder(&Default::default());
        let error = call(&mut bench, &mut encoder).expect_err(name).to_string();
        assert!(
            error.contains(message),
            "{name}: {error:?} does not say {message:?}"
        );
        // The encoder is sound, and changes nothing. An error of wgpu's would panic here.
        lab.gpu.queue().submit([encoder.finish()]);
        assert!(bench.state() == before, "{name}: something changed");
    }
    assert_eq!(bench.cache.shift_positions(0, 0), Ok(()));
}

fn constructors_refuse_by_name(lab: &Lab) {
    let gpu = &lab.gpu;
    assert!(matches!(
        HeadDim::try_from(96),
        Err(Error::UnsupportedHeadDim { found: 96 })
    ));
    let refused = |heads: &[u32], capacity| {
        try_cache(gpu, HeadDim::D128, heads, capacity)
            .expect_err("too large")
            .to_string()
    };
    assert_eq!(refused(&[1], 0), "capacity is 0: expected at least 1");
    assert_eq!(refused(&[0], 0), "capacity is 0: expected at least 1");
    // 2^30 vectors of 13 words.
    assert!(refused(&[64], 1 << 24).contains("u32 index"));
    assert!(refused(&[u32::MAX], u32::MAX).contains("u32 index"));
    // The largest that a u32 can index: whatever the adapter, its limits or its memory end before.
    let limit = u64::from(u32::MAX) / 13;
    if limit * 52 > gpu.device().limits().max_storage_buffer_binding_size {
        let error = refused(&[1], limit as u32);
        assert!(error.contains("max_"), "{error}");
    }
    for (n_heads, rows, what) in [(0, 1, "n_heads"), (1, 0, "rows")] {
        assert_eq!(
            Queries::new(gpu, HeadDim::D32, n_heads, rows).map(drop),
            Err(Error::ZeroSize { what })
        );
    }
    let error = Queries::new(gpu, HeadDim::D256, u32::MAX, u32::MAX).map(drop);
    assert!(matches!(error, Err(Error::TooLarge { .. })), "{error:?}");

    // A model of convolutions alone needs no cache, and gets one that holds nothing.
    let hollow = new_cache(gpu, HeadDim::D128, &[0, 0], 5);
    assert_eq!(hollow.device_bytes(), 0);
    assert!(matches!(
        hollow.len(0),
        Err(Error::LayerWithoutCache { layer: 0 })
    ));

    // Lower limits are named as well.
    let small = lab.device(|limits| limits.max_storage_buffer_binding_size = 1 << 16);
    let error = try_cache(&small, HeadDim::D64, &[1, 2], 1 << 11).map(drop);
    assert!(
        matches!(
            error,
            Err(Error::TooLarge {
                found: 114_688,
                limit_name: "max_storage_buffer_binding_size",
                limit: 65_536,
                ..
            })
        ),
        "{error:?}"
    );
    let mut limits = lab.adapter.limits();
    limits.max_compute_invocations_per_workgroup = 32;
    limits.max_compute_workgroup_size_x = 32;
    let descriptor = wgpu::DeviceDescriptor {
        required_limits: limits,
        ..Default::default()
    };
    let (device, queue) =
        block_on(lab.adapter.request_device(&descriptor)).expect("another device");
    let error = Gpu::new(device, queue, GpuOptions::default()).expect_err("too few lanes");
    assert!(
        error
            .to_string()
            .contains("max_compute_invocations_per_workgroup is 32"),
        "{error}"
    );
}

fn foreign_buffers_are_an_error(lab: &Lab) {
    let mut bench = Bench::new(&lab.gpu);
    let before = bench.state();
    let other = lab.device(|_| {});
    let foreign = upload(&other, &noise(1, 8 * 4 * 64));
    let destroyed = upload(&lab.gpu, &noise(1, 8 * 4 * 64));
    destroyed.destroy();
    for bad in [&foreign, &destroyed] {
        submit(&lab.gpu, |encoder| {
            let b = &mut bench;
            let error = b
                .cache
                .encode(encoder, 0, bad.into(), (&b.buffer).into(), 1, 0);
            assert!(matches!(error, Err(Error::Rejected(_))), "{error:?}");
            let error = b
                .cache
                .encode(encoder, 0, (&b.buffer).into(), bad.into(), 1, 0);
            assert!(matches!(error, Err(Error::Rejected(_))), "{error:?}");
            let error = b.cache.rotate(encoder, 0, bad.into(), 1, &mut b.queries);
            assert!(matches!(error, Err(Error::Rejected(_))), "{error:?}");
            let what = plain(HeadDim::D64, 1, 0);
            let error = b
                .cache
                .attend(encoder, 0, &mut b.queries, bad.into(), &what);
            assert!(matches!(error, Err(Error::Rejected(_))), "{error:?}");
        });
    }
    let mut queries = Queries::new(&other, HeadDim::D64, 6, 1).expect("queries");
    submit(&lab.gpu, |encoder| {
        let source = (&bench.buffer).into();
        let error = bench.cache.rotate(encoder, 0, source, 1, &mut queries);
        assert_eq!(error, Err(Error::ForeignDevice { what: "queries" }));
        let what = plain(HeadDim::D64, 1, 0);
        let output = (&bench.output).into();
        let error = bench.cache.attend(encoder, 0, &mut queries, output, &what);
        assert_eq!(error, Err(Error::ForeignDevice { what: "queries" }));
    });
    assert!(bench.state() == before, "something changed");
}

/// wgpu tells of a bad encoder when it is finished, and of its submission; an engine that only logs
/// both must not be handed a snapshot of zeros.
fn a_refused_encoder_delivers_nothing(lab: &Lab) {
    let (cache, ..) = filled(&lab.gpu, HeadDim::D32, 1, 4, 4);
    let other = lab.device(|_| {});
    let foreign = upload(&other, &[0.0; 4]);
    let own = upload(&lab.gpu, &[0.0; 4]);
    let (pending, mut encoder) = pending_snapshot(&lab.gpu, &cache);
    let counted = cache.counters(&mut encoder, 0).expect("counters");
    encoder.copy_buffer_to_buffer(&foreign, 0, &own, 0, 16);
    let scope = lab
        .gpu
        .device()
        .push_error_scope(wgpu::ErrorFilter::Validation);
    lab.gpu.queue().submit([encoder.finish()]);
    block_on(scope.pop()).expect("wgpu refuses it");
    assert_eq!(pending.wait(LIMIT), Err(Error::NotSubmitted));
    assert_eq!(block_on(counted), Err(Error::NotSubmitted));
}

fn no_rows_are_no_work(lab: &Lab) {
    let mut bench = Bench::new(&lab.gpu);
    let before = bench.state();
    submit(&lab.gpu, |encoder| {
        // At the end of the length and of the capacity, and with buffers that no row fits.
        bench_encode(&mut bench, encoder, 0, 0, 5)?;
        let end = Rows {
            buffer: &bench.buffer,
            offset: bench.buffer.size(),
        };
        bench.cache.encode(encoder, 0, end, end, 0, 0)?;
        bench_attend(&mut bench, encoder, 0, |a| a.rows = 1..1)?;
        bench_attend(&mut bench, encoder, 0, |a| {
            (a.rows, a.start_pos) = (0..0, u32::MAX)
        })?;
        bench_rotate(&mut bench, encoder, 0, 0)?;
        bench_attend(&mut bench, encoder, 0, |a| a.rows = 0..0)
    })
    .expect("nothing to do is no error");
    assert!(bench.state() == before, "something changed");
}

// ---------------------------------------------------------------------------------------------
// Lengths, counters, offsets

fn truncation_forgets(lab: &Lab) {
    let gpu = &lab.gpu;
    let d = HeadDim::D64;
    let row = 2 * d.get();
    let (mut cache, k, v) = filled(gpu, d, 2, 12, 10);
    cache.truncate(0, 4).expect("shorter");
    let (more_k, more_v) = (noise(5, 3 * row), noise(6, 3 * row));
    encode(gpu, &mut cache, 0, &more_k, &more_v, 4);
    assert_eq!(cache.len(0), Ok(7));

    let mut fresh = new_cache(gpu, d, &[2], 7);
    let k = [&k[..4 * row], &more_k].concat();
    let v = [&v[..4 * row], &more_v].concat();
    encode(gpu, &mut fresh, 0, &k, &v, 0);
    assert_eq!(snapshot(gpu, &cache, 0), snapshot(gpu, &fresh, 0));

    // Rows that are overwritten in the middle do not shorten the layer.
    encode(gpu, &mut cache, 0, &more_k[..row], &more_v[..row], 2);
    assert_eq!(cache.len(0), Ok(7));

    cache.truncate(0, 7).expect("as long as it is");
    cache.truncate(0, 0).expect("to nothing");
    assert_eq!(cache.len(0), Ok(0));
    assert_eq!(snapshot(gpu, &cache, 0).keys.len(), 16);
    let mut queries = Queries::new(gpu, d, 2, 1).expect("queries");
    let source = upload(gpu, &k[..row]);
    let output = upload(gpu, &k[..row]);
    let error = submit(gpu, |encoder| {
        cache.rotate(encoder, 0, (&source).into(), 1, &mut queries)?;
        cache.attend(encoder, 0, &mut queries, (&output).into(), &plain(d, 1, 0))
    });
    assert!(
        matches!(
            error,
            Err(Error::RowsOutOfRange {
                end: 1,
                limit: 0,
                ..
            })
        ),
        "{error:?}"
    );
}

fn counters_count_each_kind(lab: &Lab) {
    let gpu = &lab.gpu;
    for head_dim in HeadDim::ALL {
        let d = head_dim.get();
        let ordinary = noise(7, d);
        let with = |at: usize, x: f32| {
            let mut vector = ordinary.clone();
            vector[at] = x;
            vector
        };
        let scaled = |by: f32| ordinary.iter().map(|x| x * by).collect::<Vec<_>>();
        let rows = |vectors: &[Vec<f32>]| vectors.concat();
        let k = rows(&[
            with(0, f32::NAN),
            with(d - 1, f32::INFINITY),
            with(d / 2, f32::NEG_INFINITY),
            vec![0.0; d],
            scaled(1e-20),
            scaled(1e30),
            ordinary.clone(),
        ]);
        let v = rows(&[
            ordinary.clone(),
            with(1, f32::from_bits(0xffc0_0001)),
            vec![-0.0; d],
            vec![1e-40; d],
            scaled(1e-30),
            scaled(1e6),
            with(3, f32::MAX),
        ]);
        let mut cache = new_cache(gpu, head_dim, &[1], 7);
        assert_eq!(counters(gpu, &cache, 0), Counters::default());
        encode(gpu, &mut cache, 0, &k, &v, 0);
        let q = rows(&[
            ordinary.clone(),
            with(d - 1, f32::NAN),
            with(0, f32::INFINITY),
        ]);
        let found = attend(gpu, &cache, 0, 1, &q, &plain(head_dim, 3, 0));
        let blobs = snapshot(gpu, &cache, 0);
        let counted = counters(gpu, &cache, 0);
        assert_eq!(
            counted,
            Counters {
                keys: VectorCounts {
                    non_finite: 3,
                    vanishing: 2,
                    saturated: 1
                },
                values: VectorCounts {
                    non_finite: 1,
                    vanishing: 3,
                    saturated: 2
                },
                non_finite_queries: 2,
            },
            "d {head_dim}"
        );
        let rotation = Rotation::new(head_dim, SEED, 0);
        let (bytes, keys, values) = twin::snapshot(&rotation, 1, &k, &v).expect("the twin encodes");
        assert_eq!(
            (counted.keys, counted.values),
            (keys, values),
            "d {head_dim}"
        );
        assert!(
            differing_records(&blobs.keys, &bytes.keys) <= 1,
            "d {head_dim}"
        );
        assert!(
            differing_records(&blobs.values, &bytes.values) <= 1,
            "d {head_dim}"
        );
        assert!(found.iter().all(|x| x.is_finite()), "d {head_dim}");
    }
}

fn offsets_need_only_be_whole_elements(lab: &Lab) {
    let gpu = &lab.gpu;
    let d = HeadDim::D32;
    let (rows, n_heads) = (5_usize, 6);
    let n = rows * 2 * d.get();
    let (reference, k, v) = filled(gpu, d, 2, 8, rows as u32);
    let expected = snapshot(gpu, &reference, 0);
    let q = noise(3, 2 * n_heads * d.get());
    let what = plain(d, 2, 3);
    let attended = attend(gpu, &reference, 0, n_heads as u32, &q, &what);
    for offset in [4, 12, 252, 256, 260, 1020] {
        let gap = vec![f32::NAN; offset / 4];
        let padded = |data: &[f32]| upload(gpu, &[&gap[..], data, &gap[..]].concat());
        let rows_of = |buffer| Rows {
            buffer,
            offset: offset as u64,
        };
        let (k, v, q) = (padded(&k), padded(&v), padded(&q));
        let output = padded(&vec![0.0; attended.len()]);
        let mut cache = new_cache(gpu, d, &[2], 8);
        let mut queries = Queries::new(gpu, d, n_heads as u32, 2).expect("queries");
        submit(gpu, |encoder| {
            cache.encode(encoder, 0, rows_of(&k), rows_of(&v), rows as u32, 0)?;
            cache.rotate(encoder, 0, rows_of(&q), 2, &mut queries)?;
            cache.attend(encoder, 0, &mut queries, rows_of(&output), &what)
        })
        .expect("all passes");
        assert_eq!(snapshot(gpu, &cache, 0), expected, "offset {offset}");
        let found = read_floats(gpu, &output);
        let expected: Vec<f32> = [&gap[..], &attended, &gap[..]].concat();
        assert_eq!(bits(&found), bits(&expected), "offset {offset}");
    }
    assert_eq!(k.len(), n);
}

fn unused_slots_are_never_read(lab: &Lab) {
    let gpu = &lab.gpu;
    for head_dim in HeadDim::ALL {
        let (clean, k, v) = filled(gpu, head_dim, 2, 140, 67);
        let mut dirty = new_cache(gpu, head_dim, &[2], 140);
        for kind in KINDS {
            let buffer = dirty.buffer(0, kind).expect("a layer");
            gpu.queue()
                .write_buffer(buffer, 0, &vec![0xff; buffer.size() as usize]);
        }
        encode(gpu, &mut dirty, 0, &k, &v, 0);
        assert_eq!(snapshot(gpu, &dirty, 0), snapshot(gpu, &clean, 0));
        let q = noise(3, 3 * 2 * head_dim.get());
        for (start_pos, split) in [
            (0, split(64)),
            (64, split(64)),
            (64, split(10)),
            (61, split(200)),
        ] {
            let what = Attend {
                split,
                ..plain(head_dim, 3, start_pos)
            };
            assert_eq!(
                bits(&attend(gpu, &dirty, 0, 2, &q, &what)),
                bits(&attend(gpu, &clean, 0, 2, &q, &what)),
                "d {head_dim}, {what:?}"
            );
        }
        // Nothing past the rows was written either.
        let layouts = KINDS.map(|kind| dirty.layout(0, kind).expect("a layer"));
        for (layout, bytes) in layouts.iter().zip(raw(gpu, &dirty, 0)) {
            for &region in layout.kind().device_regions() {
                for head in 0..2 {
                    let live = layout.head_bytes(region, head, 67).end as usize;
                    let all = layout.head_bytes(region, head, 140).end as usize;
                    assert!(bytes[live..all].iter().all(|&b| b == 0xff), "d {head_dim}");
                }
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Options and limits

/// Blobs and output of one fixed computation.
fn fixed_computation(gpu: &Gpu, head_dim: HeadDim) -> (Snapshot, Vec<u32>) {
    let (cache, ..) = filled(gpu, head_dim, 2, 60, 53);
    let q = noise(3, 3 * 4 * head_dim.get());
    let what = Attend {
        split: split(20),
        ..plain(head_dim, 3, 50)
    };
    let output = attend(gpu, &cache, 0, 4, &q, &what);
    (snapshot(gpu, &cache, 0), bits(&output))
}

fn workgroup_memory_need_not_be_zero(lab: &Lab) {
    let (device, queue) = (lab.gpu.device().clone(), lab.gpu.queue().clone());
    let zeroing = GpuOptions {
        zero_workgroup_memory: true,
        ..GpuOptions::default()
    };
    let zeroing = Gpu::new(device, queue, zeroing).expect("the same device");
    for head_dim in HeadDim::ALL {
        assert!(
            fixed_computation(&lab.gpu, head_dim) == fixed_computation(&zeroing, head_dim),
            "d {head_dim}"
        );
    }
    // It is the device that has to be the same, not the handle.
    let (cache, q, _) = filled(&zeroing, HeadDim::D32, 1, 1, 1);
    let mut queries = Queries::new(&lab.gpu, HeadDim::D32, 1, 1).expect("queries");
    let source = upload(&lab.gpu, &q);
    let result = submit(&lab.gpu, |encoder| {
        cache.rotate(encoder, 0, (&source).into(), 1, &mut queries)
    });
    assert_eq!(result, Ok(()));
}

/// What 65,535 workgroups in a dimension are to a large input, 8 are to a small one.
fn workgroups_spill_into_y(lab: &Lab) {
    let narrow = lab.device(|limits| limits.max_compute_workgroups_per_dimension = 8);
    for head_dim in [HeadDim::D32, HeadDim::D256] {
        // 106 vectors, 36 parts of attention, 12 output vectors.
        assert!(
            fixed_computation(&lab.gpu, head_dim) == fixed_computation(&narrow, head_dim),
            "d {head_dim}"
        );
    }
    // 36 query vectors are 9 workgroups of rotation, and as many of merging.
    let d = HeadDim::D256;
    let outputs = [&lab.gpu, &narrow].map(|gpu| {
        let (cache, ..) = filled(gpu, d, 2, 60, 53);
        let what = Attend {
            split: split(60),
            ..plain(d, 9, 44)
        };
        bits(&attend(
            gpu,
            &cache,
            0,
            4,
            &noise(3, 9 * 4 * d.get()),
            &what,
        ))
    });
    assert!(outputs[0] == outputs[1]);
    // 63, 64 and 65 workgroups of 4 vectors: the last one that fits, and the first that does not.
    for rows in [252, 253, 256] {
        let (found, ..) = filled(&narrow, d, 1, 260, rows);
        let (expected, ..) = filled(&lab.gpu, d, 1, 260, rows);
        assert!(
            snapshot(&narrow, &found, 0) == snapshot(&lab.gpu, &expected, 0),
            "{rows} rows"
        );
    }
    let mut cache = new_cache(&narrow, d, &[1], 260);
    let source = upload(&narrow, &noise(1, 257 * 256));
    let error = submit(&narrow, |encoder| {
        cache.encode(encoder, 0, (&source).into(), (&source).into(), 257, 0)
    });
    assert!(
        matches!(
            error,
            Err(Error::TooLarge {
                found: 65,
                limit: 64,
                ..
            })
        ),
        "{error:?}"
    );
    assert_eq!(cache.len(0), Ok(0));
}

fn long_inputs_are_cut_into_bindings(lab: &Lab) {
    let small = lab.device(|limits| limits.max_storage_buffer_binding_size = 1 << 16);
    let d = HeadDim::D64;
    // 200 rows of 512 bytes do not fit a binding, nor do 3 rows' partial results at 4 heads × 200
    // splits × 264 bytes; 32 rows of rotated queries fit just so that an alignment does not.
    let results = [&lab.gpu, &small].map(|gpu| {
        let (mut cache, ..) = filled(gpu, d, 2, 256, 200);
        let q = noise(3, 32 * 4 * d.get());
        let what = Attend {
            split: split(4),
            ..plain(d, 32, 168)
        };
        let output = attend(gpu, &cache, 0, 4, &q, &what);
        let blobs = snapshot(gpu, &cache, 0);
        // Once more from an odd offset.
        let (k, v) = (noise(8, 1 + 190 * 128), noise(9, 1 + 190 * 128));
        let (k, v) = (upload(gpu, &k), upload(gpu, &v));
        submit(gpu, |encoder| {
            let [k, v] = [&k, &v].map(|buffer| Rows { buffer, offset: 4 });
            cache.encode(encoder, 0, k, v, 190, 66)
        })
        .expect("encode");
        (blobs, bits(&output), snapshot(gpu, &cache, 0))
    });
    assert!(results[0] == results[1]);

    // What cannot be cut is refused.
    let (cache, ..) = filled(&small, d, 2, 256, 200);
    let mut queries = Queries::new(&small, d, 4, 1).expect("queries");
    let source = upload(&small, &noise(3, 4 * d.get()));
    let error = submit(&small, |encoder| {
        cache.rotate(encoder, 0, (&source).into(), 1, &mut queries)?;
        let what = Attend {
            split: split(1),
            ..plain(d, 1, 199)
        };
        let output = upload(&small, &vec![0.0; 4 * d.get()]);
        cache.attend(encoder, 0, &mut queries, (&output).into(), &what)
    });
    assert!(
        matches!(
            error,
            Err(Error::TooLarge {
                found: 211_200,
                limit: 65_536,
                ..
            })
        ),
        "{error:?}"
    );
}

fn a_snapshot_past_the_largest_buffer_is_refused(lab: &Lab) {
    let small = lab.device(|limits| {
        limits.max_buffer_size = 1 << 16;
        limits.max_storage_buffer_binding_size = 1 << 16;
    });
    // 28 bytes a key and 20 a value: each fits, both do not.
    let mut cache = new_cache(&small, HeadDim::D64, &[1], 2000);
    for position in (0..2000).step_by(200) {
        let rows = noise(u64::from(position), 200 * 64);
        encode(&small, &mut cache, 0, &rows, &rows, position);
    }
    let error = submit(&small, |encoder| cache.snapshot(encoder, 0).map(drop));
    assert!(
        matches!(
            error,
            Err(Error::TooLarge {
                found: 96_004,
                limit_name: "max_buffer_size",
                ..
            })
        ),
        "{error:?}"
    );
    cache.truncate(0, 1300).expect("shorter");
    assert_eq!(snapshot(&small, &cache, 0).values.len(), 16 + 1300 * 18);
}

// ---------------------------------------------------------------------------------------------
// Waiting and loss

fn pending_snapshot(gpu: &Gpu, cache: &Cache) -> (Pending<Snapshot>, wgpu::CommandEncoder) {
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let pending = cache.snapshot(&mut encoder, 0).expect("snapshot");
    (pending, encoder)
}

fn dropped_commands_resolve(lab: &Lab) {
    let gpu = &lab.gpu;
    let (cache, ..) = filled(gpu, HeadDim::D32, 1, 4, 4);
    let (pending, encoder) = pending_snapshot(gpu, &cache);
    drop(encoder);
    assert_eq!(pending.wait(LIMIT), Err(Error::NotSubmitted));
    let (pending, encoder) = pending_snapshot(gpu, &cache);
    drop(encoder.finish());
    assert_eq!(block_on(pending), Err(Error::NotSubmitted));

    // Kept, but not submitted: the wait ends, and neither at once nor late.
    let (pending, encoder) = pending_snapshot(gpu, &cache);
    let limit = Duration::from_millis(30);
    let start = std::time::Instant::now();
    assert_eq!(pending.wait(limit), Err(Error::Timeout(limit)));
    assert!(start.elapsed() >= limit && start.elapsed() < LIMIT);
    drop(encoder);

    // A result that nobody wants.
    let (pending, encoder) = pending_snapshot(gpu, &cache);
    drop(pending);
    gpu.queue().submit([encoder.finish()]);
    gpu.poll_wait(LIMIT).expect("the device answers");
}

fn pending_results_can_be_awaited(lab: &Lab) {
    let gpu = &lab.gpu;
    let (cache, ..) = filled(gpu, HeadDim::D32, 1, 4, 4);
    let expected = snapshot(gpu, &cache, 0);
    let (pending, encoder) = pending_snapshot(gpu, &cache);
    gpu.queue().submit([encoder.finish()]);
    assert_eq!(block_on(pending).as_ref(), Ok(&expected));

    // Awaited before it is submitted, by another thread.
    let (pending, encoder) = pending_snapshot(gpu, &cache);
    let found = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            gpu.queue().submit([encoder.finish()]);
        });
        block_on(pending)
    });
    assert_eq!(found.as_ref(), Ok(&expected));

    let (pending, encoder) = pending_snapshot(gpu, &cache);
    gpu.queue().submit([encoder.finish()]);
    let mut slices = 2000;
    let found = pending.wait_while(Duration::from_millis(10), || {
        slices -= 1;
        slices > 0
    });
    assert_eq!(found.as_ref(), Ok(&expected));

    // An engine's executor may move these between threads.
    fn assert_send<T: Send>(_: &T) {}
    assert_send(&gpu.prepare(HeadDim::D32));
    assert_send(&Cache::new(gpu, cache.config().clone()));
    assert_send(&submit(gpu, |encoder| cache.snapshot(encoder, 0)));
}

fn a_tiny_limit_is_a_timeout_or_the_result(lab: &Lab) {
    let gpu = &lab.gpu;
    let (cache, ..) = filled(gpu, HeadDim::D256, 4, 64, 64);
    for limit in [Duration::ZERO, Duration::from_nanos(1)] {
        let pending = submit(gpu, |encoder| cache.snapshot(encoder, 0)).expect("snapshot");
        match pending.wait(limit) {
            Ok(blobs) => assert_eq!(blobs.keys[..4], *b"TQK1"),
            Err(error) => assert_eq!(error, Error::Timeout(limit)),
        }
        match gpu.poll_wait(limit) {
            Ok(()) => {}
            Err(error) => assert_eq!(error, Error::Timeout(limit)),
        }
    }
    gpu.poll_wait(LIMIT)
        .expect("the device is as good as before");
}

/// Limits about as long as the work, on two threads: a wait that times out must not run into the other
/// one's poll or submit, which retires the work in between. wgpu's own wait panics there.
fn threads_may_wait_for_one_device(lab: &Lab) {
    /// wgpu's own wait seldom gets through half of them.
    const ROUNDS: u32 = 1000;
    // A device of its own: one on which wgpu has panicked is good for nothing.
    let gpu = &lab.device(|_| {});
    let (cache, ..) = filled(gpu, HeadDim::D32, 1, 4, 4);
    let expected = &snapshot(gpu, &cache, 0);
    let cache = &cache;
    let end = &(std::time::Instant::now() + LIMIT);
    let rounds = move || {
        for round in 0..ROUNDS {
            let pending = submit(gpu, |encoder| cache.snapshot(encoder, 0)).expect("snapshot");
            let limit = Duration::from_micros(50);
            while let Err(error) = gpu.poll_wait(limit) {
                assert_eq!(error, Error::Timeout(limit));
                assert!(std::time::Instant::now() < *end, "round {round}");
            }
            let found = pending.wait_while(Duration::from_millis(1), || {
                std::time::Instant::now() < *end
            });
            assert_eq!(found.as_ref(), Ok(expected), "round {round}");
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(rounds);
        scope.spawn(rounds);
    });
    gpu.poll_wait(LIMIT).expect("the device is as good as ever");
}

/// Everything that a caller can do with a cache, each with the error it gives.
fn everything(bench: &mut Bench, blobs: &Snapshot) -> Vec<(&'static str, Option<Error>)> {
    let gpu = &bench.gpu.clone();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let e = &mut encoder;
    let mut results = vec![
        ("encode", bench_encode(bench, e, 0, 1, 5).err()),
        ("rotate", bench_rotate(bench, e, 0, 1).err()),
        ("attend", bench_attend(bench, e, 0, |a| a.rows = 0..1).err()),
        (
            "restore",
            bench.cache.restore(e, 0, &blobs.keys, &blobs.values).err(),
        ),
    ];
    let snapshot = bench.cache.snapshot(e, 0);
    let counters = bench.cache.counters(e, 0);
    gpu.queue().submit([encoder.finish()]);
    results.push((
        "snapshot",
        snapshot.and_then(|pending| pending.wait(LIMIT)).err(),
    ));
    results.push(("counters", counters.and_then(block_on).err()));
    results
}

fn a_destroyed_device_is_a_typed_error(lab: &Lab) {
    let gpu = block_on(Gpu::open(&lab.adapter, GpuOptions::default())).expect("another device");
    let mut bench = Bench::new(&gpu);
    let blobs = snapshot(&gpu, &bench.cache, 0);
    let (submitted, encoder) = pending_snapshot(&gpu, &bench.cache);
    gpu.queue().submit([encoder.finish()]);
    let (late, encoder) = pending_snapshot(&gpu, &bench.cache);
    gpu.device().destroy();
    gpu.queue().submit([encoder.finish()]);

    // Work that was under way may still arrive, or not; nothing that came later does.
    match submitted.wait(LIMIT) {
        Ok(found) => assert_eq!(found, blobs),
        Err(error) => assert!(matches!(error, Error::DeviceLost(_)), "{error:?}"),
    }
    let error = late.wait(LIMIT).expect_err("the device is gone");
    assert!(matches!(error, Error::DeviceLost(_)), "{error:?}");

    for _ in 0..2 {
        for (name, error) in everything(&mut bench, &blobs) {
            assert!(
                matches!(error, Some(Error::DeviceLost(_))),
                "{name}: {error:?}"
            );
        }
    }
    let error = try_cache(&gpu, HeadDim::D32, &[1], 1).map(drop);
    assert!(matches!(error, Err(Error::DeviceLost(_))), "{error:?}");
    let error = Queries::new(&gpu, HeadDim::D32, 1, 1).map(drop);
    assert!(matches!(error, Err(Error::DeviceLost(_))), "{error:?}");
    assert!(matches!(gpu.poll_wait(LIMIT), Err(Error::DeviceLost(_))));
    assert_eq!(
        bench.cache.len(0),
        Ok(5),
        "refused calls leave the length alone"
    );
}

fn a_loss_that_nobody_reports_is_a_typed_error(lab: &Lab) {
    let gpu = lab.device(|_| {});
    let mut bench = Bench::new(&gpu);
    let blobs = snapshot(&gpu, &bench.cache, 0);
    gpu.device().destroy();
    for _ in 0..2 {
        for (name, error) in everything(&mut bench, &blobs) {
            assert!(
                matches!(error, Some(Error::DeviceLost(_))),
                "{name}: {error:?}"
            );
        }
    }
    gpu.note_device_lost("the engine says so");
    gpu.note_device_lost("a consequence");
    for (name, error) in everything(&mut bench, &blobs) {
        assert_eq!(
            error,
            Some(Error::DeviceLost("the engine says so".to_owned())),
            "{name}"
        );
    }
}
