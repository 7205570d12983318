//! Attention outputs of any implementation, judged over given records.

use turboquant_wgpu::Rotation;
use turboquant_wgpu::twin::{AttentionShape, KeyRecord, ValueRecord};

use crate::arithmetic::Arithmetic;
use crate::oracles::attention::{Depth, Dequantised, Output, Pass};
use crate::oracles::rotate_queries;
use crate::verdict::{Evidence, Violation, within};

/// What is attended.
pub(super) struct Attended<'a> {
    /// How operations round.
    pub arithmetic: Arithmetic,
    /// The layer's rotation.
    pub rotation: &'a Rotation,
    /// Key records, [KV head][timestep].
    pub keys: &'a [Vec<KeyRecord>],
    /// Value records, [KV head][timestep].
    pub values: &'a [Vec<ValueRecord>],
    /// Queries, [rows, n_heads, head_dim].
    pub queries: &'a [f32],
    /// What is computed.
    pub shape: AttentionShape,
}

impl Attended<'_> {
    /// Reference and bound of each (row, head), from the queries on; `None` where no bound exists.
    pub(super) fn references(&self, depth: impl Fn(usize) -> Depth) -> Vec<Option<Output>> {
        let Self {
            arithmetic,
            rotation,
            shape,
            ..
        } = *self;
        let values: Vec<Vec<Dequantised>> = self
            .values
            .iter()
            .map(|head| head.iter().map(|v| Dequantised::new(rotation, v)).collect())
            .collect();
        let group = shape.n_heads as usize / self.keys.len();
        let n_heads = shape.n_heads as usize;
        self.queries
            .chunks_exact(rotation.head_dim().get())
            .enumerate()
            .map(|(index, q)| {
                let visible = shape.start_pos as usize + index / n_heads + 1;
                let kv_head = index % n_heads / group;
                let polar = rotate_queries::polar(arithmetic, rotation, q);
                let jl = rotate_queries::jl(arithmetic, rotation, &polar);
                let pass = Pass {
                    arithmetic,
                    rotation,
                    depth: depth(visible),
                    scale: shape.scale,
                    gain: shape.gain,
                };
                let keys = &self.keys[kv_head][..visible];
                pass.attention(&polar, &jl, keys, &values[kv_head][..visible])
            })
            .collect()
    }
}

/// Judges outputs, [rows, n_heads, head_dim], by their references. Returns how many of them have a bound tighter than the
/// hull of the values.
pub(super) fn judge(
    rule: &'static str,
    evidence: &mut Evidence,
    references: &[Option<Output>],
    out: &[f32],
    place: &str,
) -> Result<usize, Violation> {
    let d = out.len() / references.len().max(1);
    let mut tight = 0;
    for (index, reference) in references.iter().enumerate() {
        let Some(reference) = reference else {
            continue;
        };
        tight += usize::from(!reference.loose);
        let found = &out[index * d..(index + 1) * d];
        let expected = reference.out.values.iter().zip(&reference.out.errors);
        for (i, (&found, (&expected, &bound))) in found.iter().zip(expected).enumerate() {
            within(rule, evidence, found, expected, bound, || {
                format!("{place}, vector {index}, element {i}")
            })?;
        }
    }
    Ok(tight)
}

/// Records of all heads, head after head, as [head][timestep].
pub(super) fn by_head<T: Clone>(records: &[T], n_kv_heads: u32) -> Vec<Vec<T>> {
    let heads = n_kv_heads as usize;
    let rows = records.len() / heads;
    (0..heads)
        .map(|h| records[h * rows..(h + 1) * rows].to_vec())
        .collect()
}
