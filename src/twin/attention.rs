//! Twin of `shaders/attention.wgsl` and `shaders/merge_attention.wgsl`.

use super::{KeyRecord, RotatedQuery, ValueRecord, check_len, rotate_queries};
use crate::blob::Blob;
use crate::rotation::inverse_rht;
use crate::{Error, Gain, HeadDim, Rotation, heads};

/// What an attention pass computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query rows.
    pub rows: u32,
    /// Query heads, a multiple of the KV heads.
    pub n_heads: u32,
    /// Absolute position of query row 0: row j sees timesteps ≤ start_pos + j.
    pub start_pos: u32,
    /// Factor of every score, 1/√head_dim as a rule.
    pub scale: f32,
    /// Factor of the residual term.
    pub gain: Gain,
}

/// Score of a rotated query against one key record:
/// `scale · n · (Σ q_rot_i · centroid[code_i] + ρ · g · Σ ±q_jl_i)`.
#[must_use]
pub fn score(
    head_dim: HeadDim,
    query: &RotatedQuery,
    key: &KeyRecord,
    scale: f32,
    gain: Gain,
) -> f32 {
    let centroids = head_dim.codebook().centroids;
    let mut polar = 0.0;
    let mut jl = 0.0;
    for i in 0..head_dim.get() {
        polar += query.polar[i] * centroids[usize::from(key.code(i))];
        jl += if key.sign(i) {
            query.jl[i]
        } else {
            -query.jl[i]
        };
    }
    let residual = key.residual_norm.to_f32() * gain.factor(head_dim) * jl;
    scale * (key.norm.to_f32() * (polar + residual))
}

/// Attention of one rotated query over records that it sees all of. Over none it is zero.
#[must_use]
pub fn attend(
    rotation: &Rotation,
    query: &RotatedQuery,
    keys: &[KeyRecord],
    values: &[ValueRecord],
    scale: f32,
    gain: Gain,
) -> Vec<f32> {
    let head_dim = rotation.head_dim();
    let centroids = head_dim.codebook().centroids;
    let scores: Vec<f32> = keys
        .iter()
        .map(|key| score(head_dim, query, key, scale, gain))
        .collect();
    let maximum = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut out = vec![0.0; head_dim.get()];
    let mut sum = 0.0;
    for (score, value) in scores.iter().zip(values) {
        let weight = (score - maximum).exp();
        sum += weight;
        let factor = weight * value.norm.to_f32();
        for (i, o) in out.iter_mut().enumerate() {
            *o += factor * centroids[usize::from(value.code(i))];
        }
    }
    if sum > 0.0 {
        out.iter_mut().for_each(|o| *o /= sum);
        inverse_rht(head_dim, &rotation.polar, &mut out);
    }
    out
}

/// Causal attention over a pair of blobs.
///
/// `q` and the result are [rows, n_heads, head_dim]. Row j sees the timesteps ≤ start_pos + j that the
/// blobs hold; where nothing is visible the output is zero.
///
/// # Errors
/// Blobs of different shapes or not of the rotation's head dimension, heads that do not divide, a `q` of
/// the wrong length, a scale that is not finite.
pub fn attention(
    rotation: &Rotation,
    keys: &Blob<'_>,
    values: &Blob<'_>,
    q: &[f32],
    shape: &AttentionShape,
) -> Result<Vec<f32>, Error> {
    let head_dim = rotation.head_dim();
    let d = head_dim.get();
    let seq_len = super::check_pair(head_dim, keys, values)?;
    let n_kv_heads = keys.header().n_kv_heads;
    let group = heads::query_heads_per_kv_head(shape.n_heads, n_kv_heads)?;
    check_len("q", q, shape.rows as usize * shape.n_heads as usize * d)?;
    if !shape.scale.is_finite() {
        return Err(Error::NotFinite {
            what: "scale",
            found: shape.scale,
        });
    }
    let key_records = KeyRecord::read_all(keys, head_dim);
    let value_records = ValueRecord::read_all(values, head_dim);

    let mut output = vec![0.0; q.len()];
    let vectors = q.chunks_exact(d).zip(output.chunks_exact_mut(d));
    for (index, (q, out)) in (0_u32..).zip(vectors) {
        let row = index / shape.n_heads;
        let kv_head = index % shape.n_heads / group;
        let end = u64::from(shape.start_pos) + u64::from(row) + 1;
        let visible = end.min(u64::from(seq_len)) as usize;
        let first = kv_head as usize * seq_len as usize;
        let keys = &key_records[first..first + visible];
        let values = &value_records[first..first + visible];

        let (query, _) = rotate_queries(rotation, q);
        out.copy_from_slice(&attend(
            rotation,
            &query,
            keys,
            values,
            shape.scale,
            shape.gain,
        ));
    }
    Ok(output)
}
