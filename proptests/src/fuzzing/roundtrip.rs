//! `roundtrip`: an arbitrary cache becomes blobs, a device's words, and the same blobs again.

use arbitrary::{Arbitrary, Result, Unstructured};
use turboquant_wgpu::blob::{BlobWriter, decode_kind};
use turboquant_wgpu::gate::plan;
use turboquant_wgpu::layout::{BlobRegion, DeviceLayout, Kind, LayerShape};
use turboquant_wgpu::{BlobHeader, HeadDim};

use super::Fate;

/// One layer's cache, records in the order in which they were encoded.
struct ArbitraryCache {
    shape: LayerShape,
    seq_len: u32,
    spare: u32,
    records: Vec<u8>,
}

impl<'a> Arbitrary<'a> for ArbitraryCache {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        Ok(Self {
            shape: LayerShape {
                head_dim: *u.choose(&HeadDim::ALL)?,
                n_kv_heads: u.int_in_range(1..=4)?,
            },
            seq_len: u.int_in_range(0..=8)?,
            spare: u.int_in_range(0..=2)?,
            // What is missing reads as zeros, like a record that was never filled.
            records: u.bytes(u.len())?.to_vec(),
        })
    }
}

pub(super) fn run(bytes: &[u8]) -> Fate {
    let Ok(cache) = ArbitraryCache::arbitrary(&mut Unstructured::new(bytes)) else {
        return Fate::Refused;
    };
    let mut records = cache.records.iter().copied().chain(core::iter::repeat(0));
    let keys = blob(Kind::Keys, &cache, &mut records);
    let values = blob(Kind::Values, &cache, &mut records);

    let capacity = cache.seq_len.max(1) + cache.spare;
    let plan = plan(cache.shape, capacity, &keys, &values).expect("a pair of the layer's shape");
    for (kind, blob) in [(Kind::Keys, &keys), (Kind::Values, &values)] {
        let decoded = decode_kind(kind, blob).expect("what was written decodes");
        assert_eq!(decoded.as_bytes(), blob);
        let mut writer = BlobWriter::new(decoded.header()).expect("as large as the blob");
        for &region in kind.blob_regions() {
            let out = writer.region_mut(region).expect("the kind has it");
            out.copy_from_slice(decoded.region(region).expect("the kind has it"));
        }
        assert_eq!(writer.finish().as_ref(), Ok(blob));

        let layout = DeviceLayout::new(kind, cache.shape, capacity).expect("it exists");
        let mut device = vec![0xFF; layout.bytes() as usize];
        for write in plan.writes(kind) {
            let at = write.offset as usize..(write.offset + write.len) as usize;
            write.copy_into(&mut device[at]).expect("its own length");
        }
        let mut writer = BlobWriter::new(decoded.header()).expect("as large as the blob");
        for &region in kind.device_regions() {
            for head in 0..cache.shape.n_kv_heads {
                let at = layout.head_bytes(region, head, cache.seq_len);
                let words = &device[at.start as usize..at.end as usize];
                writer.fill_head(region, head, words).expect("a head");
            }
        }
        assert_eq!(writer.finish().as_ref(), Ok(blob));
    }
    Fate::Accepted
}

/// A blob whose records come from `bytes`, norms made finite by a bit of their exponent.
fn blob(kind: Kind, cache: &ArbitraryCache, bytes: &mut impl Iterator<Item = u8>) -> Vec<u8> {
    let mut writer = BlobWriter::new(BlobHeader {
        kind,
        n_kv_heads: cache.shape.n_kv_heads,
        head_dim: cache.shape.head_dim.get_u32(),
        seq_len: cache.seq_len,
    })
    .expect("a small blob");
    for t in 0..cache.seq_len {
        for head in 0..cache.shape.n_kv_heads {
            for &region in kind.blob_regions() {
                let record = writer.record_mut(region, head, t).expect("a record");
                record.fill_with(|| bytes.next().unwrap_or_default());
                if matches!(region, BlobRegion::Norms | BlobRegion::ResidualNorms) {
                    record[1] &= 0x7F;
                    if record[1] >= 0x7C {
                        record[1] &= 0x7B;
                    }
                }
            }
        }
    }
    writer.finish().expect("its norms are finite")
}
