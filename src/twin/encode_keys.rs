//! Twin of `shaders/encode_keys.wgsl`.

use half::f16;

use super::{Outcome, Scaled, VANISHING, pack_code, store_norm, unpack_code};
use crate::blob::Blob;
use crate::half_float::norm_to_f16;
use crate::layout::BlobRegion;
use crate::rotation::rht;
use crate::{HeadDim, Rotation};

/// One compressed key vector.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyRecord {
    /// 2-bit codes, element i at bits 2(i mod 4) of byte i/4: head_dim / 4 bytes.
    pub codes: Vec<u8>,
    /// Residual signs, element i at bit i mod 8 of byte i/8: head_dim / 8 bytes.
    pub signs: Vec<u8>,
    /// ‖x‖.
    pub norm: f16,
    /// ‖r‖, of the residual of the unit vector.
    pub residual_norm: f16,
}

impl KeyRecord {
    /// The zero record: every bit 0.
    #[must_use]
    pub fn zero(head_dim: HeadDim) -> Self {
        Self {
            codes: vec![0; head_dim.get() / 4],
            signs: vec![0; head_dim.get() / 8],
            norm: f16::ZERO,
            residual_norm: f16::ZERO,
        }
    }

    /// Code of element i.
    #[must_use]
    pub fn code(&self, i: usize) -> u8 {
        unpack_code(&self.codes, i)
    }

    /// Sign bit of element i, set for +1.
    #[must_use]
    pub fn sign(&self, i: usize) -> bool {
        self.signs[i / 8] >> (i % 8) & 1 == 1
    }

    /// Every record of a key blob, head after head. A blob of other regions reads as zero records.
    #[must_use]
    pub fn read_all(blob: &Blob<'_>, head_dim: HeadDim) -> Vec<Self> {
        let header = blob.header();
        let bytes = |region, head, t| blob.record(region, head, t).unwrap_or(&[]).to_vec();
        // An empty blob may name any number of heads: none of them is visited.
        let heads = if header.seq_len == 0 {
            0
        } else {
            header.n_kv_heads
        };
        (0..heads)
            .flat_map(|head| (0..header.seq_len).map(move |t| (head, t)))
            .map(|(head, t)| Self {
                codes: bytes(BlobRegion::Codes, head, t),
                signs: bytes(BlobRegion::Signs, head, t),
                norm: blob.norm(head, t).unwrap_or_default(),
                residual_norm: blob.residual_norm(head, t).unwrap_or_default(),
            })
            .inspect(|record| debug_assert_eq!(record.codes.len(), head_dim.get() / 4))
            .collect()
    }
}

/// Compresses one key vector of `head_dim` elements.
#[must_use]
pub fn encode_keys(rotation: &Rotation, x: &[f32]) -> (KeyRecord, Outcome) {
    let head_dim = rotation.head_dim();
    let codebook = head_dim.codebook();
    let mut record = KeyRecord::zero(head_dim);

    let Some(scaled) = Scaled::new(x) else {
        return (record, Outcome::NonFinite);
    };
    let Some((mut y, norm)) = scaled.normalise() else {
        return (record, Outcome::Vanishing);
    };
    rht(head_dim, &rotation.polar, &mut y);

    let mut residual = y;
    for (i, v) in residual.iter_mut().enumerate() {
        let code = codebook.code(*v);
        pack_code(&mut record.codes, i, code);
        *v -= codebook.centroids[usize::from(code)];
    }
    let residual_norm = residual.iter().map(|r| r * r).sum::<f32>().sqrt();
    if residual_norm >= VANISHING {
        let inverse = 1.0 / residual_norm;
        residual.iter_mut().for_each(|r| *r *= inverse);
        rht(head_dim, &rotation.jl, &mut residual);
        for (i, &z) in residual.iter().enumerate() {
            record.signs[i / 8] |= u8::from(z >= 0.0) << (i % 8);
        }
    }

    let outcome;
    (record.norm, outcome) = store_norm(norm);
    (record.residual_norm, _) = norm_to_f16(residual_norm);
    (record, outcome)
}
