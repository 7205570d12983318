//! What decoding and judging allocate: nothing, whatever the bytes claim.

use allocation_counter::measure;
use turboquant_wgpu::blob::{BlobWriter, decode};
use turboquant_wgpu::gate::plan;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::{BlobHeader, HeadDim, LayerShape};

fn header(kind: Kind, n_kv_heads: u32, seq_len: u32) -> BlobHeader {
    BlobHeader {
        kind,
        n_kv_heads,
        head_dim: 64,
        seq_len,
    }
}

#[test]
fn decoding_allocates_nothing() {
    let good = BlobWriter::new(header(Kind::Keys, 2, 100))
        .unwrap()
        .finish()
        .unwrap();
    let absurd = [
        (u32::MAX, 0),
        (0, u32::MAX),
        (u32::MAX, u32::MAX),
        (0x7FFF_FFFF, 0),
    ];
    let absurd = absurd.map(|(n, s)| header(Kind::Keys, n, s).to_bytes().to_vec());
    for bytes in absurd.iter().chain([&good]) {
        for len in [bytes.len(), 15, 3, 0] {
            let counted = measure(|| {
                let _ = std::hint::black_box(decode(&bytes[..len]));
            });
            assert_eq!(counted.count_total, 0, "{bytes:?}");
        }
    }
}

#[test]
fn the_gate_allocates_nothing() {
    let blob = |kind| {
        BlobWriter::new(header(kind, 2, 100))
            .unwrap()
            .finish()
            .unwrap()
    };
    let (keys, values) = (blob(Kind::Keys), blob(Kind::Values));
    let shape = LayerShape {
        head_dim: HeadDim::D64,
        n_kv_heads: 2,
    };
    for (capacity, accepted) in [(100, true), (99, false)] {
        let counted = measure(|| {
            let plan = plan(shape, capacity, &keys, &values);
            assert_eq!(plan.is_ok(), accepted);
            for kind in [Kind::Keys, Kind::Values] {
                let writes = plan.iter().flat_map(|plan| plan.writes(kind));
                assert_eq!(writes.map(|w| w.len).sum::<u64>() > 0, accepted);
            }
        });
        assert_eq!(counted.count_total, 0);
    }
}
