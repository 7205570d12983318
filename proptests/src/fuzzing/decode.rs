//! `decode_keys` and `decode_values`: the decoder keeps its promises on any bytes.

use turboquant_wgpu::blob::{Blob, decode, decode_kind};
use turboquant_wgpu::layout::{BlobRegion, Kind};
use turboquant_wgpu::{BlobError, BlobHeader};

use super::shape::{self, Choices};
use super::{Fate, says_something};

pub(super) fn keys(bytes: &[u8]) -> Fate {
    run(Kind::Keys, bytes)
}

pub(super) fn values(bytes: &[u8]) -> Fate {
    run(Kind::Values, bytes)
}

pub(super) fn shape_keys(buffer: &mut [u8], size: usize, seed: u32) -> usize {
    shape::blob(Kind::Keys, buffer, size, &mut Choices::new(seed))
}

pub(super) fn shape_values(buffer: &mut [u8], size: usize, seed: u32) -> usize {
    shape::blob(Kind::Values, buffer, size, &mut Choices::new(seed))
}

fn run(kind: Kind, bytes: &[u8]) -> Fate {
    let judged = BlobHeader::parse_kind(kind, bytes, bytes.len() as u64);
    match decode_kind(kind, bytes) {
        Ok(blob) => {
            assert_eq!(judged, Ok(blob.header()), "the header alone says the same");
            // Whether a kind is asked for changes nothing.
            assert!(decode(bytes).is_ok());
            assert_eq!(BlobHeader::parse(bytes, bytes.len() as u64), judged);
            read_to_the_end(&blob, bytes);
            Fate::Accepted
        }
        Err(error) => {
            let of_contents = matches!(error, BlobError::Norm { .. });
            assert_eq!(
                judged.is_ok(),
                of_contents,
                "only norms are not the header's"
            );
            assert!(says_something(&error));
            Fate::Refused
        }
    }
}

/// Everything a blob offers: it lies in the input, in order and without a gap, and is in range.
fn read_to_the_end(blob: &Blob<'_>, bytes: &[u8]) {
    let header = blob.header();
    assert_eq!(blob.as_bytes(), bytes);
    assert_eq!(header.to_bytes()[..], bytes[..16]);
    let mut rest = &bytes[16..];
    for &region in header.kind.blob_regions() {
        let found = blob.region(region).expect("the kind has it");
        let (front, back) = rest.split_at(found.len());
        assert!(core::ptr::eq(front, found), "{region:?} borrows its bytes");
        rest = back;
    }
    assert!(rest.is_empty());
    // An empty blob may name four billion heads, and has nothing to read in any of them.
    let heads = if header.seq_len == 0 {
        0
    } else {
        header.n_kv_heads
    };
    let is_key = header.kind == Kind::Keys;
    for (head, t) in (0..heads).flat_map(|head| (0..header.seq_len).map(move |t| (head, t))) {
        let rho = blob.residual_norm(head, t).map(half::f16::to_bits);
        assert!(
            blob.norm(head, t)
                .is_some_and(|norm| norm.to_bits() < 0x7C00)
        );
        assert!(rho.is_some() == is_key && rho.is_none_or(|bits| bits < 0x7C00));
    }
    if let (Some(head), Some(t)) = (heads.checked_sub(1), header.seq_len.checked_sub(1)) {
        let last = header.head_dim - 1;
        assert!(blob.code(head, t, last).is_some_and(|code| code < 4));
        assert_eq!(blob.sign(head, t, last).is_some(), is_key);
        assert_eq!(blob.code(head, t, header.head_dim), None);
        assert_eq!(blob.sign(head, t, header.head_dim), None);
        assert_eq!(blob.norm(head, header.seq_len), None);
    }
    assert_eq!(blob.record(BlobRegion::Codes, header.n_kv_heads, 0), None);
}
