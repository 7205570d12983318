//! Attention outputs of any implementation, judged over given records.

use turboquant_wgpu::Rotation;
use turboquant_wgpu::twin::{AttentionShape, KeyRecord, ValueRecord};

use crate::arithmetic::Arithmetic;
use crate::case::Case;
use crate::fixture::vector;
use crate::oracles::attention::{Depth, Dequantised, Output, Pass};
use crate::oracles::rotate_queries::{self, Bounded};
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
    /// What is computed.
    pub shape: AttentionShape,
}

impl Attended<'_> {
    /// Reference and bound of each (row, head), given its rotated query; `None` where no bound exists.
    pub(super) fn references(
        &self,
        rotated: impl Fn(usize) -> (Bounded, Bounded),
        depth: impl Fn(usize) -> Depth,
    ) -> Vec<Option<Output>> {
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
        let n_heads = shape.n_heads as usize;
        let group = n_heads / self.keys.len();
        (0..shape.rows as usize * n_heads)
            .map(|index| {
                let visible = shape.start_pos as usize + index / n_heads + 1;
                let kv_head = index % n_heads / group;
                let pass = Pass {
                    arithmetic,
                    rotation,
                    depth: depth(visible),
                    scale: shape.scale,
                    gain: shape.gain,
                };
                let (polar, jl) = rotated(index);
                let keys = &self.keys[kv_head][..visible];
                pass.attention(&polar, &jl, keys, &values[kv_head][..visible])
            })
            .collect()
    }

    /// Both rotations of the queries ([rows, n_heads, head_dim]), with the errors that they may have.
    pub(super) fn rotate(&self, queries: &[f32]) -> impl Fn(usize) -> (Bounded, Bounded) {
        let (arithmetic, rotation) = (self.arithmetic, self.rotation);
        move |index| {
            let q = vector(queries, rotation.head_dim(), index);
            let polar = rotate_queries::polar(arithmetic, rotation, q);
            let jl = rotate_queries::jl(arithmetic, rotation, &polar);
            (polar, jl)
        }
    }
}

/// The kernels' depth for a case's split. The automatic choice is at least 256 or the whole; deeper nesting than it
/// has is allowed for.
pub(super) fn kernel_depth(case: &Case) -> impl Fn(usize) -> Depth {
    let (d, split) = (case.head_dim as usize, case.kv_split as usize);
    move |visible| Depth::kernel(d, visible, if split == 0 { visible } else { split })
}

/// Judges outputs, [rows, n_heads, head_dim], by their references. Returns how many of them have a bound tighter than the
/// hull of the values.
pub(super) fn judge(
    rule: &'static str,
    evidence: &mut Evidence,
    references: &[Option<Output>],
    n_heads: u32,
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
                let (row, head) = (index / n_heads as usize, index % n_heads as usize);
                format!("{place}, query row {row}, head {head}, element {i}")
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
