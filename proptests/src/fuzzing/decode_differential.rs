//! `decode_differential`: the decoder and the literal one say the same, refusals included.

use turboquant_wgpu::BlobError;
use turboquant_wgpu::blob::{Blob, decode_kind};
use turboquant_wgpu::layout::{BlobRegion, Kind};

use super::Fate;
use super::literal::{self, Contents, Fault};
use super::shape::{self, Choices};

pub(super) fn shape(buffer: &mut [u8], size: usize, seed: u32) -> usize {
    let mut choices = Choices::new(seed);
    let kind = [Kind::Keys, Kind::Values][choices.below(2) as usize];
    shape::blob(kind, buffer, size, &mut choices)
}

pub(super) fn run(bytes: &[u8]) -> Fate {
    let mut fate = Fate::Refused;
    for kind in [Kind::Keys, Kind::Values] {
        let fast = decode_kind(kind, bytes);
        let slow = literal::decode(kind == Kind::Keys, bytes);
        match (fast, slow) {
            (Ok(fast), Ok(slow)) => {
                assert_eq!(contents(&fast), slow);
                fate = Fate::Accepted;
            }
            (Err(fast), Err(slow)) => assert_eq!(fault(&fast, bytes), Some(slow), "{fast}"),
            (fast, slow) => panic!("one of two decoders accepts: {fast:?}, {slow:?}"),
        }
    }
    fate
}

fn contents(blob: &Blob<'_>) -> Contents {
    let header = blob.header();
    let heads = if header.seq_len == 0 {
        0
    } else {
        header.n_kv_heads
    };
    let records = || (0..heads).flat_map(|head| (0..header.seq_len).map(move |t| (head, t)));
    let elements = || records().flat_map(|at| (0..header.head_dim).map(move |i| (at, i)));
    let norms = |region| {
        let halves = blob.region(region).unwrap_or_default().chunks_exact(2);
        halves.map(|half| u16::from_le_bytes([half[0], half[1]]))
    };
    let found = Contents {
        n_kv_heads: header.n_kv_heads,
        head_dim: header.head_dim,
        seq_len: header.seq_len,
        codes: elements()
            .filter_map(|((h, t), i)| blob.code(h, t, i))
            .collect(),
        signs: elements()
            .filter_map(|((h, t), i)| blob.sign(h, t, i))
            .collect(),
        norms: norms(BlobRegion::Norms).collect(),
        residual_norms: norms(BlobRegion::ResidualNorms).collect(),
    };
    let by_record = records().filter_map(|(h, t)| blob.norm(h, t));
    assert!(
        by_record
            .map(half::f16::to_bits)
            .eq(found.norms.iter().copied())
    );
    let by_record = records().filter_map(|(h, t)| blob.residual_norm(h, t));
    assert!(
        by_record
            .map(half::f16::to_bits)
            .eq(found.residual_norms.iter().copied())
    );
    found
}

/// The literal decoder's word for a refusal of the library's; `None` if decoding cannot give it.
fn fault(error: &BlobError, bytes: &[u8]) -> Option<Fault> {
    Some(match *error {
        BlobError::HeaderLength { .. } => Fault::Header,
        BlobError::Magic { .. } | BlobError::WrongKind { .. } => Fault::Magic,
        BlobError::HeadDim { .. } => Fault::HeadDim,
        BlobError::NoHeads { .. } => Fault::NoHeads,
        BlobError::Length { .. } | BlobError::TooLarge(_) => Fault::Length,
        BlobError::Norm {
            region,
            head,
            timestep,
            ..
        } => Fault::Norm {
            residual: region == BlobRegion::ResidualNorms,
            record: {
                let seq_len = u32::from_le_bytes(*bytes.get(12..)?.first_chunk()?);
                head as usize * seq_len as usize + timestep as usize
            },
        },
        _ => return None,
    })
}
