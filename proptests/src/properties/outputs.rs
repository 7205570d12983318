//! Attention outputs of any implementation, judged over given records.

use turboquant_wgpu::twin::{self, AttentionShape, KeyRecord, RotatedQuery, ValueRecord};
use turboquant_wgpu::{HeadDim, Rotation};

use crate::adapters::Device;
use crate::arithmetic::Arithmetic;
use crate::case::Case;
use crate::fixture::vector;
use crate::oracles::attention::{Depth, Key, Output, Pass, Value};
use crate::oracles::rotate_queries::{self, Bounded};
use crate::verdict::{Evidence, Failure, Violation, within};

/// Outputs of a tensor that the f32 twin computes as well, to compare its errors.
const TWINS: usize = 6;

/// The attention oracle over the records of a layer.
pub(super) struct Judge {
    arithmetic: Arithmetic,
    rotation: Rotation,
    /// [KV head][timestep].
    keys: Vec<Vec<Key>>,
    /// [KV head][timestep].
    values: Vec<Vec<Value>>,
    shape: AttentionShape,
}

/// What one output, of a (row, head), is judged by.
pub(super) struct Reference {
    /// Reference and bound.
    pub output: Output,
    /// The f32 twin's output, for a sample; with f16 operands, what those give in otherwise exact arithmetic.
    pub twin: Option<Vec<f32>>,
}

impl Judge {
    /// Prepares the records, [KV head][timestep], for a pass.
    pub(super) fn new(
        arithmetic: Arithmetic,
        rotation: &Rotation,
        keys: &[Vec<KeyRecord>],
        values: &[Vec<ValueRecord>],
        shape: AttentionShape,
    ) -> Self {
        let unpack = |head: &Vec<KeyRecord>| head.iter().map(|k| Key::new(rotation, k)).collect();
        let dequantise =
            |head: &Vec<ValueRecord>| head.iter().map(|v| Value::new(rotation, v)).collect();
        Self {
            arithmetic,
            rotation: *rotation,
            keys: keys.iter().map(unpack).collect(),
            values: values.iter().map(dequantise).collect(),
            shape,
        }
    }

    /// What each (row, head) is judged by, given its rotated query; `None` where no bound exists.
    pub(super) fn references(
        &self,
        rotated: impl Fn(usize) -> (Bounded, Bounded),
        depth: impl Fn(usize) -> Depth,
    ) -> Vec<Option<Reference>> {
        let n_heads = self.shape.n_heads as usize;
        let group = n_heads / self.keys.len();
        let n = self.shape.rows as usize * n_heads;
        let stride = n.div_ceil(TWINS);
        (0..n)
            .map(|index| {
                let visible = self.shape.start_pos as usize + index / n_heads + 1;
                let kv_head = index % n_heads / group;
                let keys = &self.keys[kv_head][..visible];
                let values = &self.values[kv_head][..visible];
                let pass = Pass {
                    arithmetic: self.arithmetic,
                    rotation: &self.rotation,
                    depth: depth(visible),
                    scale: self.shape.scale,
                    gain: self.shape.gain,
                };
                let (polar, jl) = rotated(index);
                let output = pass.attention(&polar, &jl, keys, values)?;
                let twin = (index % stride == 0 && !output.loose).then(|| {
                    if pass.depth.f16_operands {
                        pass.with_f16_operands(&polar, &jl, keys, values)
                    } else {
                        self.twin(&polar, &jl, keys, values)
                    }
                });
                Some(Reference { output, twin })
            })
            .collect()
    }

    fn twin(&self, polar: &Bounded, jl: &Bounded, keys: &[Key], values: &[Value]) -> Vec<f32> {
        let to_f32 = |b: &Bounded| b.values.iter().map(|&v| v as f32).collect();
        let query = RotatedQuery {
            polar: to_f32(polar),
            jl: to_f32(jl),
        };
        let keys: Vec<KeyRecord> = keys.iter().map(|k| k.record.clone()).collect();
        let values: Vec<ValueRecord> = values.iter().map(|v| v.record.clone()).collect();
        let (scale, gain) = (self.shape.scale, self.shape.gain);
        twin::attend(&self.rotation, &query, &keys, &values, scale, gain)
    }

    /// Both rotations of the queries ([rows, n_heads, head_dim]), with the errors that they may have.
    pub(super) fn rotate(&self, queries: &[f32]) -> impl Fn(usize) -> (Bounded, Bounded) {
        let (arithmetic, rotation) = (self.arithmetic, self.rotation);
        move |index| {
            let q = vector(queries, rotation.head_dim(), index);
            let polar = rotate_queries::polar(arithmetic, &rotation, q);
            let jl = rotate_queries::jl(arithmetic, &rotation, &polar);
            (polar, jl)
        }
    }
}

/// The rotated queries that a device left ([rows, n_heads, 2, head_dim]), taken as exact.
pub(super) fn own(rotated: &[f32], head_dim: HeadDim) -> impl Fn(usize) -> (Bounded, Bounded) {
    move |index| {
        let polar = vector(rotated, head_dim, 2 * index);
        let jl = vector(rotated, head_dim, 2 * index + 1);
        (Bounded::exact(polar), Bounded::exact(jl))
    }
}

/// The kernels' depth for a split (0 for the automatic choice, which is at least 256 or the whole: deeper
/// nesting than it has is allowed for).
///
/// # Errors
/// The case's head dimension, or a variant that the device cannot run.
pub(super) fn kernel_depth(
    device: &Device,
    case: &Case,
) -> Result<impl Fn(usize) -> Depth + use<>, Failure> {
    let (d, split) = (case.head_dim as usize, case.kv_split as usize);
    let variant = device.gpu.variant(case.head_dim()?)?;
    Ok(move |visible| {
        Depth::of_variant(
            variant,
            d,
            visible,
            if split == 0 { visible } else { split },
        )
    })
}

/// Judges outputs, [rows, n_heads, head_dim], by their references. Returns how many of them have a bound tighter than the
/// hull of the values.
pub(super) fn judge(
    rule: &'static str,
    evidence: &mut Evidence,
    references: &[Option<Reference>],
    n_heads: u32,
    out: &[f32],
    place: &str,
) -> Result<usize, Violation> {
    let d = out.len() / references.len().max(1);
    let mut tight = 0;
    for (index, reference) in references.iter().enumerate() {
        let Some(Reference { output, twin }) = reference else {
            continue;
        };
        tight += usize::from(!output.loose);
        let found = &out[index * d..(index + 1) * d];
        let expected = output.out.values.iter().zip(&output.out.errors);
        for (i, (&found, (&expected, &bound))) in found.iter().zip(expected).enumerate() {
            within(rule, evidence, found, expected, bound, || {
                let (row, head) = (index / n_heads as usize, index % n_heads as usize);
                format!("{place}, query row {row}, head {head}, element {i}")
            })?;
            if let Some(twin) = twin {
                let error = |v: f32| f64::from(v) - expected;
                evidence.drift.note(error(found), error(twin[i]), bound);
            }
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
