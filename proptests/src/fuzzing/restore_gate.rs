//! `restore_gate`: accepted plans write what they should and nothing else; nothing that should be
//! accepted is refused.
//!
//! The input is a layer and two blobs: one byte each for the head dimension (bit 7 set for a layer
//! without a cache), heads and capacity, the keys' length in two, the keys, the values.

use turboquant_wgpu::blob::BlobWriter;
use turboquant_wgpu::gate::{RestorePlan, plan_for};
use turboquant_wgpu::layout::{DeviceLayout, Kind, LayerShape};
use turboquant_wgpu::{BlobHeader, HeadDim};

use super::literal;
use super::shape::{self, Choices};
use super::{Fate, says_something};

/// Bytes before the keys.
pub(super) const PRELUDE: usize = 5;

/// The layer and the capacity that a prelude describes.
fn layer(prelude: &[u8; PRELUDE]) -> (Option<LayerShape>, u32) {
    let shape = LayerShape {
        head_dim: HeadDim::ALL[usize::from(prelude[0] % 4)],
        n_kv_heads: u32::from(prelude[1] % 4),
    };
    (
        (prelude[0] < 0x80).then_some(shape),
        u32::from(prelude[2] % 5),
    )
}

/// The prelude, and the two blobs.
fn split(bytes: &[u8]) -> Option<(&[u8; PRELUDE], &[u8], &[u8])> {
    let (prelude, blobs) = bytes.split_first_chunk::<PRELUDE>()?;
    let key_bytes = usize::from(u16::from_le_bytes([prelude[3], prelude[4]]));
    let (keys, values) = blobs.split_at_checked(key_bytes)?;
    Some((prelude, keys, values))
}

pub(super) fn run(bytes: &[u8]) -> Fate {
    let Some((prelude, keys, values)) = split(bytes) else {
        return Fate::Refused;
    };
    let (shape, capacity) = layer(prelude);
    let should = should_accept(shape, capacity, keys, values);
    match plan_for(shape, capacity, keys, values) {
        Ok(plan) => {
            assert!(should, "accepted {shape:?} of {capacity}");
            let shape = shape.expect("a layer without a cache takes nothing");
            for (kind, blob) in [(Kind::Keys, keys), (Kind::Values, values)] {
                let layout = DeviceLayout::new(kind, shape, capacity).expect("it exists");
                assert_eq!(plan.blob(kind).as_bytes(), blob);
                assert_eq!(layout.bytes(), 4 * u64::from(layout.words()));
                assert_eq!(layout.capacity(), capacity);
                carry_out(&plan, &layout, blob);
            }
            Fate::Accepted
        }
        Err(refusal) => {
            assert!(!should, "refused: {refusal}");
            assert!(says_something(&refusal));
            Fate::Refused
        }
    }
}

/// The gate's rule in the words of the format's description.
fn should_accept(shape: Option<LayerShape>, capacity: u32, keys: &[u8], values: &[u8]) -> bool {
    let (Some(shape), Ok(k), Ok(v)) = (
        shape,
        literal::decode(true, keys),
        literal::decode(false, values),
    ) else {
        return false;
    };
    capacity > 0
        && (k.n_kv_heads, k.head_dim, k.seq_len) == (v.n_kv_heads, v.head_dim, v.seq_len)
        && shape.n_kv_heads > 0
        && (k.n_kv_heads, k.head_dim) == (shape.n_kv_heads, shape.head_dim.get_u32())
        && k.seq_len <= capacity
}

/// Carries out the writes of one kind on a buffer of 0xA5: they are aligned, inside, disjoint, and
/// cover exactly the live records, and a snapshot of the result is the blob.
///
/// Ranges are compared and not bytes: a loop over bytes would be most of an execution.
fn carry_out(plan: &RestorePlan<'_>, layout: &DeviceLayout, blob: &[u8]) {
    const UNTOUCHED: u8 = 0xA5;
    let (shape, seq_len) = (layout.shape(), plan.seq_len());
    let mut device = vec![UNTOUCHED; layout.bytes() as usize];
    let mut written = Vec::new();
    for write in plan.writes(layout.kind()) {
        assert!(write.offset % 4 == 0 && write.len % 4 == 0 && write.len > 0);
        let at = write.offset as usize..(write.offset + write.len) as usize;
        let out = &mut device[at.clone()];
        write.copy_into(out).expect("the length is the write's own");
        assert!(write.direct().is_none_or(|bytes| bytes == out));
        assert!(write.copy_into(&mut out[1..]).is_err());
        written.push(at);
    }
    written.sort_by_key(|at| at.start);

    // Records of a head follow each other, and so do a region's heads and the regions.
    let mut live = Vec::new();
    for &region in layout.kind().device_regions() {
        let len = 4 * region.record_words(shape.head_dim) as usize;
        let slot = |head, t| 4 * layout.slot(region, head, t) as usize;
        for head in 0..shape.n_kv_heads {
            if let Some(last) = seq_len.checked_sub(1) {
                let at = slot(head, 0)..slot(head, last) + len;
                assert_eq!(at.len(), len * seq_len as usize);
                live.push(at);
            }
        }
    }
    assert!(live.windows(2).all(|pair| pair[0].end <= pair[1].start));
    assert_eq!(written, live);
    let mut outside = device.clone();
    for at in live {
        outside[at].fill(UNTOUCHED);
    }
    assert!(
        outside == vec![UNTOUCHED; outside.len()],
        "a byte outside changed"
    );

    let mut writer = BlobWriter::new(BlobHeader {
        kind: layout.kind(),
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim.get_u32(),
        seq_len,
    })
    .expect("as large as the blob");
    for &region in layout.kind().device_regions() {
        for head in 0..shape.n_kv_heads {
            let at = layout.head_bytes(region, head, seq_len);
            let device = &device[at.start as usize..at.end as usize];
            writer.fill_head(region, head, device).expect("a head");
            assert!(
                writer.fill_head(region, head, &[0]).is_err(),
                "a byte is no head"
            );
        }
    }
    assert_eq!(writer.header().to_bytes()[..], blob[..16]);
    let beyond = writer.fill_head(layout.kind().device_regions()[0], shape.n_kv_heads, &[]);
    assert!(beyond.is_err(), "a head that the blob does not have");
    assert_eq!(writer.finish().as_deref(), Ok(blob));
}

/// Mostly a pair of blobs of the layer's shape, with one header field of one of them off at times.
pub(super) fn shape(buffer: &mut [u8], size: usize, seed: u32) -> usize {
    let mut choices = Choices::new(seed);
    let size = size.min(buffer.len());
    let Some((prelude, blobs)) = buffer.split_first_chunk_mut::<PRELUDE>() else {
        return size;
    };
    if size < PRELUDE || choices.below(4) == 0 {
        return size;
    }
    let (Some(shape), capacity) = layer(prelude) else {
        return size;
    };
    let seq_len = choices.below(capacity + 1);
    let off_by_one = choices.below(16);
    let header = |kind| {
        let off = |which: u32| u32::from(off_by_one == which + u32::from(kind == Kind::Values));
        BlobHeader {
            kind,
            n_kv_heads: shape.n_kv_heads + off(0),
            head_dim: shape.head_dim.get_u32() + 8 * off(2),
            seq_len: seq_len + off(4),
        }
    };
    let Some(keys) = shape::exactly(header(Kind::Keys), blobs, size - PRELUDE, &mut choices) else {
        return size;
    };
    let Ok(key_bytes) = u16::try_from(keys) else {
        return size;
    };
    let rest = &mut blobs[keys..];
    let left = (size - PRELUDE).saturating_sub(keys);
    let values = shape::exactly(header(Kind::Values), rest, left, &mut choices).unwrap_or(left);
    prelude[3..].copy_from_slice(&key_bytes.to_le_bytes());
    PRELUDE + keys + values
}
