//! Twin of `shaders/encode_values.wgsl`.

use half::f16;

use super::{Outcome, Scaled, pack_code, store_norm, unpack_code};
use crate::blob::Blob;
use crate::layout::BlobRegion;
use crate::rotation::rht;
use crate::{HeadDim, Rotation};

/// One compressed value vector.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueRecord {
    /// 2-bit codes, element i at bits 2(i mod 4) of byte i/4: head_dim / 4 bytes.
    pub codes: Vec<u8>,
    /// ‖x‖.
    pub norm: f16,
}

impl ValueRecord {
    /// The zero record: every bit 0.
    #[must_use]
    pub fn zero(head_dim: HeadDim) -> Self {
        Self {
            codes: vec![0; head_dim.get() / 4],
            norm: f16::ZERO,
        }
    }

    /// Code of element i.
    #[must_use]
    pub fn code(&self, i: usize) -> u8 {
        unpack_code(&self.codes, i)
    }

    /// Every record of a value blob, head after head.
    #[must_use]
    pub fn read_all(blob: &Blob<'_>, head_dim: HeadDim) -> Vec<Self> {
        let header = blob.header();
        // An empty blob may name any number of heads: none of them is visited.
        let heads = if header.seq_len == 0 {
            0
        } else {
            header.n_kv_heads
        };
        (0..heads)
            .flat_map(|head| (0..header.seq_len).map(move |t| (head, t)))
            .map(|(head, t)| Self {
                codes: blob
                    .record(BlobRegion::Codes, head, t)
                    .unwrap_or(&[])
                    .to_vec(),
                norm: blob.norm(head, t).unwrap_or_default(),
            })
            .inspect(|record| debug_assert_eq!(record.codes.len(), head_dim.get() / 4))
            .collect()
    }
}

/// Compresses one value vector of `head_dim` elements.
#[must_use]
pub fn encode_values(rotation: &Rotation, x: &[f32]) -> (ValueRecord, Outcome) {
    let head_dim = rotation.head_dim();
    let codebook = head_dim.codebook();
    let mut record = ValueRecord::zero(head_dim);

    let Some(scaled) = Scaled::new(x) else {
        return (record, Outcome::NonFinite);
    };
    let Some((mut y, norm)) = scaled.normalise() else {
        return (record, Outcome::Vanishing);
    };
    rht(head_dim, &rotation.polar, &mut y);
    for (i, &v) in y.iter().enumerate() {
        pack_code(&mut record.codes, i, codebook.code(v));
    }

    let outcome;
    (record.norm, outcome) = store_norm(norm);
    (record, outcome)
}
