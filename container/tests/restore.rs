//! Containers into caches on a device: all layers or none.

use std::time::Duration;

use turboquant_container::{Container, encode};
use turboquant_wgpu::{Cache, CacheConfig, Gpu, HeadDim, Rotation, Snapshot, twin};

const LIMIT: Duration = Duration::from_secs(60);

/// The first adapter there is. Without one these tests show nothing, which is a failure where an
/// adapter is required.
fn gpu() -> Option<Gpu> {
    match pollster::block_on(Gpu::open_default(wgpu::Backends::all())) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            let required = std::env::var_os("TQCHECK_REQUIRE").is_some();
            assert!(!required, "an adapter is required: {error}");
            eprintln!("not checked: {error}");
            None
        }
    }
}

fn config(seed: u64) -> CacheConfig {
    CacheConfig {
        head_dim: HeadDim::D32,
        n_kv_heads: vec![2, 0, 1, 1],
        capacity: 6,
        seed,
    }
}

fn snapshots(config: &CacheConfig, rows: usize) -> Vec<Option<Snapshot>> {
    let snapshot = |(layer, &heads): (u32, &u32)| {
        let rotation = Rotation::new(config.head_dim, config.seed, layer);
        let elements = rows * heads as usize * config.head_dim.get();
        let keys: Vec<f32> = (0..elements)
            .map(|i| ((i * 37 + 11) % 101) as f32 - 50.0)
            .collect();
        let values: Vec<f32> = keys.iter().map(|x| 3.0 - x).collect();
        (heads > 0).then(|| twin::snapshot(&rotation, heads, &keys, &values).unwrap().0)
    };
    (0..).zip(&config.n_kv_heads).map(snapshot).collect()
}

/// What every layer of the cache holds.
fn held(gpu: &Gpu, cache: &Cache) -> Vec<Option<Snapshot>> {
    let snapshot = |layer: u32| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let pending = cache.snapshot(&mut encoder, layer).ok()?;
        gpu.queue().submit([encoder.finish()]);
        Some(pending.wait(LIMIT).unwrap())
    };
    (0..cache.config().n_kv_heads.len() as u32)
        .map(snapshot)
        .collect()
}

#[test]
fn a_container_restores_every_layer() {
    let Some(gpu) = gpu() else { return };
    let config = config(7);
    let layers = snapshots(&config, 5);
    let bytes = encode(&config, &layers, "the tests").unwrap();
    let mut cache = pollster::block_on(Cache::new(&gpu, config)).unwrap();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let container = Container::decode(&bytes).unwrap();
    container.restore_into(&mut cache, &mut encoder).unwrap();
    gpu.queue().submit([encoder.finish()]);
    assert_eq!(held(&gpu, &cache), layers);
}

#[test]
fn a_refusal_leaves_every_layer_as_it_was() {
    let Some(gpu) = gpu() else { return };
    let before = snapshots(&config(7), 3);
    let mut cache = pollster::block_on(Cache::new(&gpu, config(7))).unwrap();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let bytes = encode(&config(7), &before, "").unwrap();
    Container::decode(&bytes)
        .unwrap()
        .restore_into(&mut cache, &mut encoder)
        .unwrap();
    gpu.queue().submit([encoder.finish()]);

    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    // Two seeds of one shape: the container is what can tell.
    let bytes = encode(&config(8), &snapshots(&config(8), 5), "").unwrap();
    let container = Container::decode(&bytes).unwrap();
    let refusal = container
        .restore_into(&mut cache, &mut encoder)
        .unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "container: cache_seed is 8, expected 7"
    );

    // The last layer is bad, so the first is not restored either.
    let layers = snapshots(&config(7), 5);
    let [first, last] = [0, 3].map(|layer| layers[layer].as_ref().unwrap());
    let cut = &last.values[..last.values.len() - 1];
    let both: [(u32, &[u8], &[u8]); 2] = [(0, &first.keys, &first.values), (3, &last.keys, cut)];
    let refusal = cache
        .restore_layers(&mut encoder, &both)
        .unwrap_err()
        .to_string();
    assert!(
        refusal.starts_with("layer 3: restore refused: values: blob: found"),
        "{refusal}"
    );
    let no_cache: [(u32, &[u8], &[u8]); 2] = [
        (0, &first.keys, &first.values),
        (1, &last.keys, &last.values),
    ];
    let refusal = cache
        .restore_layers(&mut encoder, &no_cache)
        .unwrap_err()
        .to_string();
    assert_eq!(refusal, "layer 1: restore refused: the layer has no cache");

    gpu.queue().submit([encoder.finish()]);
    assert_eq!(held(&gpu, &cache), before);
    assert_eq!(cache.len(0), Ok(3));
}
