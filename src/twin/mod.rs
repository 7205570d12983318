//! The scalar CPU twin: each kernel once more, in f32, as plain loops.
//!
//! It is what the format's origin computes, byte for byte, and what the kernels are compared
//! with. It is also the cache for a machine without an adapter: encode here, snapshot, and restore
//! on a device, or the other way round.
//!
//! Every function has a kernel of the same name in `shaders/`.

mod attention;
mod encode_keys;
mod encode_values;
mod rotate_queries;

pub use attention::{AttentionShape, attend, attention, score};
pub use encode_keys::{KeyRecord, encode_keys};
pub use encode_values::{ValueRecord, encode_values};
pub use rotate_queries::{RotatedQuery, rotate_queries};

use crate::blob::{Blob, BlobHeader, BlobWriter};
use crate::cache::{Snapshot, VectorCounts};
use crate::half_float::norm_to_f16;
use crate::layout::{BlobRegion, Kind};
use crate::{BlobError, Error, HeadDim, Rotation};

/// Below this norm a vector, or a key's residual, counts as zero. Compared in f32.
pub(crate) const VANISHING: f32 = 1e-12;

/// What became of one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Encoded as it was.
    Encoded,
    /// It holds a NaN or an infinity: the zero record.
    NonFinite,
    /// Its norm is below 1e-12: the zero record.
    Vanishing,
    /// Encoded, but its norm is past the largest f16 and was stored as 65504.
    Saturated,
}

/// 2^e for −126 ≤ e ≤ 127, exactly.
fn power_of_two(e: i32) -> f32 {
    f32::from_bits(((e + 127) as u32) << 23)
}

/// A finite vector scaled by an exact power of two into a range where squares neither overflow nor
/// vanish.
struct Scaled {
    /// x · 2^shift.
    elements: Vec<f32>,
    shift: i32,
}

impl Scaled {
    /// `None` if the vector holds a NaN or an infinity. Found from the bits, like in the shaders.
    fn new(x: &[f32]) -> Option<Self> {
        let largest = x.iter().map(|v| v.to_bits() & 0x7fff_ffff).max()?;
        if largest >= f32::INFINITY.to_bits() {
            return None;
        }
        let shift = (127 - (largest >> 23) as i32).clamp(-126, 126);
        let scale = power_of_two(shift);
        Some(Self {
            elements: x.iter().map(|v| v * scale).collect(),
            shift,
        })
    }

    /// x/‖x‖ and ‖x‖, or `None` if the norm vanishes. The scaling is exact, so that the result has
    /// the bits of the unscaled computation wherever that stays in range.
    fn normalise(mut self) -> Option<(Vec<f32>, f32)> {
        let square: f32 = self.elements.iter().map(|v| v * v).sum();
        let scaled_norm = square.sqrt();
        let norm = scaled_norm * power_of_two(-self.shift);
        if norm < VANISHING {
            return None;
        }
        let inverse = 1.0 / scaled_norm;
        self.elements.iter_mut().for_each(|v| *v *= inverse);
        Some((self.elements, norm))
    }
}

/// Checks that a slice holds `vectors` vectors of `head_dim` elements.
fn check_len(what: &'static str, slice: &[f32], expected: usize) -> Result<(), Error> {
    if slice.len() == expected {
        Ok(())
    } else {
        Err(Error::WrongLength {
            what,
            found: slice.len(),
            expected,
        })
    }
}

/// Packs 2-bit codes, element i at bits 2(i mod 4) of byte i/4.
fn pack_code(codes: &mut [u8], i: usize, code: u8) {
    codes[i / 4] |= code << (2 * (i % 4));
}

/// Code of element i.
fn unpack_code(codes: &[u8], i: usize) -> u8 {
    codes[i / 4] >> (2 * (i % 4)) & 3
}

/// The stored norm and what became of the vector.
fn store_norm(norm: f32) -> (half::f16, Outcome) {
    match norm_to_f16(norm) {
        (norm, true) => (norm, Outcome::Saturated),
        (norm, false) => (norm, Outcome::Encoded),
    }
}

impl VectorCounts {
    fn count(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Encoded => {}
            Outcome::NonFinite => self.non_finite += 1,
            Outcome::Vanishing => self.vanishing += 1,
            Outcome::Saturated => self.saturated += 1,
        }
    }
}

/// Compresses a whole sequence: `keys` and `values` are [rows, n_kv_heads, head_dim].
///
/// Returns the pair of blobs, as a device's snapshot would, and what was counted for keys and values.
///
/// # Errors
/// [`Error::WrongLength`] if the slices are not whole rows of the same number, [`Error::ZeroSize`] for no heads,
/// [`Error::Blob`] if the blobs would be too large.
pub fn snapshot(
    rotation: &Rotation,
    n_kv_heads: u32,
    keys: &[f32],
    values: &[f32],
) -> Result<(Snapshot, VectorCounts, VectorCounts), Error> {
    let head_dim = rotation.head_dim();
    let d = head_dim.get();
    if n_kv_heads == 0 {
        return Err(Error::ZeroSize { what: "n_kv_heads" });
    }
    let row = n_kv_heads as usize * d;
    check_len("keys", keys, keys.len() / row * row)?;
    check_len("values", values, keys.len())?;
    let seq_len = u32::try_from(keys.len() / row).map_err(|_| Error::TooLarge {
        what: "rows",
        found: (keys.len() / row) as u128,
        limit_name: "u32",
        limit: u64::from(u32::MAX),
    })?;
    let writer = |kind| {
        BlobWriter::new(BlobHeader {
            kind,
            n_kv_heads,
            head_dim: head_dim.get_u32(),
            seq_len,
        })
    };
    let (mut key_blob, mut value_blob) = (writer(Kind::Keys)?, writer(Kind::Values)?);
    let (mut key_counts, mut value_counts) = (VectorCounts::default(), VectorCounts::default());
    let vectors = keys.chunks_exact(d).zip(values.chunks_exact(d));
    for (index, (k, v)) in (0_u64..).zip(vectors) {
        let t = (index / u64::from(n_kv_heads)) as u32;
        let head = (index % u64::from(n_kv_heads)) as u32;
        let (key, outcome) = encode_keys(rotation, k);
        key_counts.count(outcome);
        put(&mut key_blob, BlobRegion::Codes, head, t, &key.codes)?;
        put(&mut key_blob, BlobRegion::Signs, head, t, &key.signs)?;
        put(
            &mut key_blob,
            BlobRegion::Norms,
            head,
            t,
            &key.norm.to_le_bytes(),
        )?;
        let rho = key.residual_norm.to_le_bytes();
        put(&mut key_blob, BlobRegion::ResidualNorms, head, t, &rho)?;
        let (value, outcome) = encode_values(rotation, v);
        value_counts.count(outcome);
        put(&mut value_blob, BlobRegion::Codes, head, t, &value.codes)?;
        put(
            &mut value_blob,
            BlobRegion::Norms,
            head,
            t,
            &value.norm.to_le_bytes(),
        )?;
    }
    let snapshot = Snapshot {
        keys: key_blob.finish()?,
        values: value_blob.finish()?,
    };
    Ok((snapshot, key_counts, value_counts))
}

fn put(
    writer: &mut BlobWriter,
    region: BlobRegion,
    head: u32,
    timestep: u32,
    bytes: &[u8],
) -> Result<(), BlobError> {
    let header = writer.header();
    match writer.record_mut(region, head, timestep) {
        Some(record) => {
            record.copy_from_slice(bytes);
            Ok(())
        }
        None => Err(BlobError::TooLarge(header)),
    }
}

/// Checks that two blobs are a pair of this head dimension, and returns their length.
fn check_pair(head_dim: HeadDim, keys: &Blob<'_>, values: &Blob<'_>) -> Result<u32, Error> {
    let (k, v) = (keys.header(), values.header());
    if k.kind != Kind::Keys || v.kind != Kind::Values {
        return Err(Error::MismatchedBlobs { what: "kind" });
    }
    for (what, k, v) in [
        ("n_kv_heads", k.n_kv_heads, v.n_kv_heads),
        ("head_dim", k.head_dim, v.head_dim),
        ("seq_len", k.seq_len, v.seq_len),
        ("head_dim of the rotation", k.head_dim, head_dim.get_u32()),
    ] {
        if k != v {
            return Err(Error::MismatchedBlobs { what });
        }
    }
    Ok(k.seq_len)
}
