//! The restore gate: whether a pair of blobs may enter a layer, and what to write where if so.
//!
//! Pure functions of the bytes and of the layer's shape. All of the judging is done before a
//! [`RestorePlan`] exists, so a refusal has written nothing, and a plan has nothing left to refuse.
//!
//! # Order of the refusals
//!
//! 1. the layer has no cache, or one that no device can hold;
//! 2. a side is missing (an empty slice), or both are;
//! 3. keys and values are swapped: each side has the other's magic;
//! 4. the keys, then the values, are malformed: see [`crate::blob`];
//! 5. the two disagree on `n_kv_heads`, `head_dim` or `seq_len`, in this order;
//! 6. `n_kv_heads`, then `head_dim`, is not the layer's;
//! 7. `seq_len` is over the capacity.
//!
//! A blob carries neither seed nor layer: one made under another rotation passes this gate and
//! reads as noise. Only a container around the blobs can tell.

use crate::blob::{Blob, BlobError, decode_kind};
use crate::layout::{BlobRegion, DeviceLayout, DeviceRegion, Kind};
use crate::{Error, LayerShape};

/// Why a pair of blobs may not enter a layer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreRefusal {
    /// The layer was declared without a cache.
    #[error("the layer has no cache")]
    NoCache,
    /// No device can hold such a layer: no heads, no capacity, or more words than a u32 counts.
    #[error("a layer of shape {shape:?} with capacity {capacity} cannot exist")]
    ImpossibleLayer {
        /// The layer's shape.
        shape: LayerShape,
        /// Timesteps that it should hold.
        capacity: u32,
    },
    /// One of the two is an empty slice.
    #[error("the {kind} are missing: expected both blobs or neither")]
    Missing {
        /// Which.
        kind: Kind,
    },
    /// Both are empty slices. An empty cache has two headers.
    #[error("both blobs are missing: expected a header each, even of an empty cache")]
    MissingBoth,
    /// Each blob has the magic of the other.
    #[error("keys and values are swapped")]
    Swapped,
    /// A blob is malformed, or one of the two is of the wrong kind.
    #[error("{kind}: {error}")]
    Malformed {
        /// The side it was passed as.
        kind: Kind,
        /// What is wrong with it.
        error: BlobError,
    },
    /// The two blobs are not of one cache.
    #[error("{field} is {keys} in the keys and {values} in the values")]
    Differ {
        /// Header field.
        field: &'static str,
        /// What the keys say.
        keys: u32,
        /// What the values say.
        values: u32,
    },
    /// The blobs are of a layer of another shape.
    #[error("{field} is {found}, the layer's is {expected}")]
    ForeignShape {
        /// Header field.
        field: &'static str,
        /// What both blobs say.
        found: u32,
        /// The layer's.
        expected: u32,
    },
    /// More timesteps than the layer can hold.
    #[error("seq_len is {seq_len}, the layer's capacity is {capacity}")]
    OverCapacity {
        /// What both blobs say.
        seq_len: u32,
        /// Timesteps that the layer can hold.
        capacity: u32,
    },
}

/// Judges a pair of blobs for a layer of `shape` that holds `capacity` timesteps.
///
/// # Errors
/// The first of the [module](self)'s refusals that applies.
pub fn plan<'a>(
    shape: LayerShape,
    capacity: u32,
    keys: &'a [u8],
    values: &'a [u8],
) -> Result<RestorePlan<'a>, RestoreRefusal> {
    let layout = |kind| {
        DeviceLayout::new(kind, shape, capacity)
            .map_err(|_| RestoreRefusal::ImpossibleLayer { shape, capacity })
    };
    let (key_layout, value_layout) = (layout(Kind::Keys)?, layout(Kind::Values)?);

    match (keys.is_empty(), values.is_empty()) {
        (true, true) => return Err(RestoreRefusal::MissingBoth),
        (true, false) => return Err(RestoreRefusal::Missing { kind: Kind::Keys }),
        (false, true) => return Err(RestoreRefusal::Missing { kind: Kind::Values }),
        (false, false) => {}
    }
    if (Kind::of_blob(keys), Kind::of_blob(values)) == (Some(Kind::Values), Some(Kind::Keys)) {
        return Err(RestoreRefusal::Swapped);
    }
    let decode = |kind, bytes| {
        decode_kind(kind, bytes).map_err(|error| RestoreRefusal::Malformed { kind, error })
    };
    let (keys, values) = (decode(Kind::Keys, keys)?, decode(Kind::Values, values)?);

    let (k, v) = (keys.header(), values.header());
    for (field, keys, values) in [
        ("n_kv_heads", k.n_kv_heads, v.n_kv_heads),
        ("head_dim", k.head_dim, v.head_dim),
        ("seq_len", k.seq_len, v.seq_len),
    ] {
        if keys != values {
            return Err(RestoreRefusal::Differ {
                field,
                keys,
                values,
            });
        }
    }
    for (field, found, expected) in [
        ("n_kv_heads", k.n_kv_heads, shape.n_kv_heads),
        ("head_dim", k.head_dim, shape.head_dim.get_u32()),
    ] {
        if found != expected {
            return Err(RestoreRefusal::ForeignShape {
                field,
                found,
                expected,
            });
        }
    }
    if k.seq_len > capacity {
        return Err(RestoreRefusal::OverCapacity {
            seq_len: k.seq_len,
            capacity,
        });
    }
    Ok(RestorePlan {
        keys: (key_layout, keys),
        values: (value_layout, values),
    })
}

/// [`plan`] for a layer that may have been declared without a cache.
///
/// # Errors
/// [`RestoreRefusal::NoCache`] for `None`, before the blobs are looked at; else what [`plan`]
/// refuses.
pub fn plan_for<'a>(
    layer: Option<LayerShape>,
    capacity: u32,
    keys: &'a [u8],
    values: &'a [u8],
) -> Result<RestorePlan<'a>, RestoreRefusal> {
    plan(
        layer.ok_or(RestoreRefusal::NoCache)?,
        capacity,
        keys,
        values,
    )
}

/// A restore that nothing stands against. It borrows the blobs and allocates nothing.
#[derive(Clone, Copy, Debug)]
pub struct RestorePlan<'a> {
    keys: (DeviceLayout, Blob<'a>),
    values: (DeviceLayout, Blob<'a>),
}

impl<'a> RestorePlan<'a> {
    /// Timesteps of every head once the plan is carried out.
    #[must_use]
    pub const fn seq_len(&self) -> u32 {
        self.keys.1.header().seq_len
    }

    /// The blob of one kind.
    #[must_use]
    pub const fn blob(&self, kind: Kind) -> Blob<'a> {
        match kind {
            Kind::Keys => self.keys.1,
            Kind::Values => self.values.1,
        }
    }

    /// What to write to the layer's buffer of one kind: one write for each region and head,
    /// disjoint, covering the timesteps before [`RestorePlan::seq_len`] and nothing else. An
    /// empty cache has no writes, since wgpu refuses those of no bytes.
    pub fn writes(&self, kind: Kind) -> impl Iterator<Item = Write<'a>> + use<'a> {
        let (layout, blob) = match kind {
            Kind::Keys => self.keys,
            Kind::Values => self.values,
        };
        let seq_len = self.seq_len();
        let heads = if seq_len == 0 {
            0
        } else {
            layout.shape().n_kv_heads
        };
        kind.device_regions().iter().flat_map(move |&region| {
            // The blob's heads are the layer's, so every one of them has its source.
            (0..heads).filter_map(move |head| {
                let at = layout.head_bytes(region, head, seq_len);
                Some(Write {
                    offset: at.start,
                    len: at.end - at.start,
                    source: Source::of(&blob, region, head)?,
                })
            })
        })
    }
}

/// One write into a layer's device buffer.
#[derive(Clone, Copy, Debug)]
pub struct Write<'a> {
    /// First byte in the device buffer, a multiple of 4.
    pub offset: u64,
    /// Bytes to write: a multiple of 4, not 0.
    pub len: u64,
    source: Source<'a>,
}

/// Where a write's bytes come from.
#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    /// Codes or signs: the blob's bytes are the device's.
    Direct(&'a [u8]),
    /// A norm in each word's low half; for keys, a residual norm in its high half.
    Norms(&'a [u8], Option<&'a [u8]>),
}

impl<'a> Source<'a> {
    fn of(blob: &Blob<'a>, region: DeviceRegion, head: u32) -> Option<Self> {
        Some(match region {
            DeviceRegion::Codes => Self::Direct(blob.head(BlobRegion::Codes, head)?),
            DeviceRegion::Signs => Self::Direct(blob.head(BlobRegion::Signs, head)?),
            DeviceRegion::Norms => Self::Norms(
                blob.head(BlobRegion::Norms, head)?,
                blob.head(BlobRegion::ResidualNorms, head),
            ),
        })
    }
}

impl<'a> Write<'a> {
    /// The bytes to write where the blob holds them as they are, so that no copy is needed; `None`
    /// for norms, which [`Write::copy_into`] has to interleave.
    #[must_use]
    pub const fn direct(&self) -> Option<&'a [u8]> {
        match self.source {
            Source::Direct(bytes) => Some(bytes),
            Source::Norms(..) => None,
        }
    }

    /// Puts the bytes to write in `out`, all of it overwritten.
    ///
    /// # Errors
    /// [`Error::WrongLength`] if `out` does not have [`Write::len`] bytes; it is left alone then.
    pub fn copy_into(&self, out: &mut [u8]) -> Result<(), Error> {
        let expected = match self.source {
            Source::Direct(bytes) => bytes.len(),
            Source::Norms(norms, _) => norms.len() * 2,
        };
        if out.len() != expected {
            return Err(Error::WrongLength {
                what: "output of a restore's write",
                found: out.len(),
                expected,
            });
        }
        match self.source {
            Source::Direct(bytes) => out.copy_from_slice(bytes),
            Source::Norms(norms, residual_norms) => {
                for (word, norm) in out.chunks_exact_mut(4).zip(norms.chunks_exact(2)) {
                    word[..2].copy_from_slice(norm);
                    word[2..].fill(0);
                }
                let residual_norms = residual_norms.unwrap_or_default().chunks_exact(2);
                for (word, norm) in out.chunks_exact_mut(4).zip(residual_norms) {
                    word[2..].copy_from_slice(norm);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HeadDim;
    use crate::blob::tests::{below, golden, header_bytes, random_blob, rng};
    use crate::blob::{BlobWriter, decode};
    use rand_xoshiro::rand_core::Rng;

    const SHAPE: LayerShape = LayerShape {
        head_dim: HeadDim::D64,
        n_kv_heads: 2,
    };
    const CAPACITY: u32 = 7;
    const KINDS: [Kind; 2] = [Kind::Keys, Kind::Values];

    fn pair(n: u32, d: u32, s: u32) -> (Vec<u8>, Vec<u8>) {
        (
            random_blob(Kind::Keys, n, d, s, 1),
            random_blob(Kind::Values, n, d, s, 2),
        )
    }

    fn refusal(keys: &[u8], values: &[u8]) -> RestoreRefusal {
        plan(SHAPE, CAPACITY, keys, values).unwrap_err()
    }

    /// Carries out the writes of one kind on a buffer of noise, and checks that they are aligned,
    /// inside, disjoint, and cover exactly the live records.
    fn carry_out(plan: &RestorePlan<'_>, layout: &DeviceLayout, seed: u64) -> Vec<u8> {
        let mut rng = rng(seed);
        let mut device = vec![0; usize::try_from(layout.bytes()).unwrap()];
        device.fill_with(|| rng.next_u32() as u8);
        let before = device.clone();
        let mut writes_to = vec![0_u8; device.len()];
        for write in plan.writes(layout.kind()) {
            assert!(write.offset % 4 == 0 && write.len % 4 == 0 && write.len > 0);
            let at = write.offset as usize..(write.offset + write.len) as usize;
            write.copy_into(&mut device[at.clone()]).unwrap();
            if let Some(direct) = write.direct() {
                assert_eq!(direct, &device[at.clone()]);
            }
            writes_to[at].iter_mut().for_each(|n| *n += 1);
        }
        let mut live = vec![0; device.len()];
        for &region in layout.kind().device_regions() {
            let bytes = region.record_words(layout.shape().head_dim) as usize * 4;
            for head in 0..layout.shape().n_kv_heads {
                for t in 0..plan.seq_len() {
                    let at = layout.slot(region, head, t) as usize * 4;
                    live[at..at + bytes].fill(1);
                }
            }
        }
        assert_eq!(writes_to, live);
        for ((&now, &then), &live) in device.iter().zip(&before).zip(&live) {
            assert!(live == 1 || now == then, "a byte outside changed");
        }
        device
    }

    /// What a snapshot does: whole heads from the device's bytes.
    fn read_back(blob: Blob<'_>, layout: &DeviceLayout, device: &[u8]) -> Vec<u8> {
        let header = blob.header();
        let mut writer = BlobWriter::new(header).unwrap();
        for &region in header.kind.device_regions() {
            for head in 0..header.n_kv_heads {
                let at = layout.head_bytes(region, head, header.seq_len);
                let head_bytes = &device[at.start as usize..at.end as usize];
                writer.fill_head(region, head, head_bytes).unwrap();
            }
        }
        writer.finish().unwrap()
    }

    fn round_trip(shape: LayerShape, capacity: u32, keys: &[u8], values: &[u8], seed: u64) {
        let plan = plan(shape, capacity, keys, values).unwrap();
        for (kind, bytes) in [(Kind::Keys, keys), (Kind::Values, values)] {
            let blob = plan.blob(kind);
            assert_eq!(blob.as_bytes(), bytes);
            assert_eq!(blob.header().seq_len, plan.seq_len());
            let layout = DeviceLayout::new(kind, shape, capacity).unwrap();
            let device = carry_out(&plan, &layout, seed);
            assert_eq!(read_back(blob, &layout, &device), bytes);
            // The words, element by element.
            for head in 0..shape.n_kv_heads {
                for t in 0..plan.seq_len() {
                    let word = |region, i: u32| {
                        let at = 4 * (layout.slot(region, head, t) + i) as usize;
                        u32::from_le_bytes(device[at..at + 4].try_into().unwrap())
                    };
                    for i in 0..shape.head_dim.get_u32() {
                        let code = word(DeviceRegion::Codes, i / 16) >> (2 * (i % 16)) & 3;
                        assert_eq!(Some(code as u8), blob.code(head, t, i));
                        if kind == Kind::Keys {
                            let sign = word(DeviceRegion::Signs, i / 32) >> (i % 32) & 1;
                            assert_eq!(Some(sign == 1), blob.sign(head, t, i));
                        }
                    }
                    let bits = |norm: Option<half::f16>| norm.map_or(0, |n| u32::from(n.to_bits()));
                    assert_eq!(
                        word(DeviceRegion::Norms, 0),
                        bits(blob.norm(head, t)) | bits(blob.residual_norm(head, t)) << 16
                    );
                }
            }
        }
    }

    #[test]
    fn plans_write_the_live_records_and_nothing_else() {
        let mut rng = rng(3);
        for round in 0..150 {
            let shape = LayerShape {
                head_dim: HeadDim::ALL[round % 4],
                n_kv_heads: 1 + below(&mut rng, 3),
            };
            let capacity = 1 + below(&mut rng, 9);
            // The ends of the range more often than chance would have them.
            let seq_len = [0, 1, capacity, below(&mut rng, capacity + 1)][round / 4 % 4];
            let (n, d) = (shape.n_kv_heads, shape.head_dim.get_u32());
            let keys = random_blob(Kind::Keys, n, d, seq_len, rng.next_u64());
            let values = random_blob(Kind::Values, n, d, seq_len, rng.next_u64());
            round_trip(shape, capacity, &keys, &values, rng.next_u64());
        }
    }

    #[test]
    fn golden_pairs_round_trip() {
        for dir in golden() {
            let keys = std::fs::read(dir.join("keys.tqk1")).unwrap();
            let values = std::fs::read(dir.join("values.tqv1")).unwrap();
            let header = decode(&keys).unwrap().header();
            let shape = LayerShape {
                head_dim: header.head_dim.try_into().unwrap(),
                n_kv_heads: header.n_kv_heads,
            };
            round_trip(shape, header.seq_len + 3, &keys, &values, 4);
        }
    }

    #[test]
    fn an_empty_cache_restores_to_0_without_a_write() {
        let (keys, values) = pair(2, 64, 0);
        let plan = plan(SHAPE, CAPACITY, &keys, &values).unwrap();
        assert_eq!(plan.seq_len(), 0);
        assert!(KINDS.iter().all(|&kind| plan.writes(kind).next().is_none()));
    }

    #[test]
    fn a_write_wants_an_output_of_its_length() {
        let (keys, values) = pair(2, 64, 3);
        let plan = plan(SHAPE, CAPACITY, &keys, &values).unwrap();
        for write in KINDS.into_iter().flat_map(|kind| plan.writes(kind)) {
            for len in [0, write.len - 1, write.len + 1] {
                let mut out = vec![9; len as usize];
                assert!(matches!(
                    write.copy_into(&mut out),
                    Err(Error::WrongLength { found, expected, .. })
                        if found as u64 == len && expected as u64 == write.len
                ));
                assert!(out.iter().all(|&b| b == 9));
            }
        }
    }

    #[test]
    fn a_layer_without_a_cache_is_refused_first() {
        let (keys, values) = pair(2, 64, 3);
        for (keys, values) in [(&keys[..], &values[..]), (&[], &[]), (&values, &keys)] {
            assert_eq!(
                plan_for(None, CAPACITY, keys, values).unwrap_err(),
                RestoreRefusal::NoCache
            );
        }
        let plan = plan_for(Some(SHAPE), CAPACITY, &keys, &values).unwrap();
        assert_eq!(plan.seq_len(), 3);
    }

    #[test]
    fn a_layer_that_cannot_exist_is_refused() {
        let (keys, values) = pair(2, 64, 0);
        for (n_kv_heads, capacity) in [(0, 7), (2, 0), (u32::MAX, u32::MAX)] {
            let shape = LayerShape {
                n_kv_heads,
                ..SHAPE
            };
            assert_eq!(
                plan(shape, capacity, &keys, &values).unwrap_err(),
                RestoreRefusal::ImpossibleLayer { shape, capacity }
            );
        }
    }

    #[test]
    fn one_side_or_both_missing_is_refused() {
        let (keys, values) = pair(2, 64, 3);
        let missing = |kind| RestoreRefusal::Missing { kind };
        assert_eq!(refusal(&[], &values), missing(Kind::Keys));
        assert_eq!(refusal(&keys, &[]), missing(Kind::Values));
        assert_eq!(refusal(&[], &[]), RestoreRefusal::MissingBoth);
    }

    #[test]
    fn swapped_sides_are_refused_as_such() {
        for s in [0, 3] {
            let (keys, values) = pair(2, 64, s);
            assert_eq!(refusal(&values, &keys), RestoreRefusal::Swapped);
            // One blob twice is no swap: the side that has the wrong one is named.
            for (kind, blob) in [(Kind::Values, &keys), (Kind::Keys, &values)] {
                let expected = RestoreRefusal::Malformed {
                    kind,
                    error: crate::blob::decode_kind(kind, blob).unwrap_err(),
                };
                assert_eq!(refusal(blob, blob), expected);
            }
        }
    }

    /// Every prefix and one byte more, on either side, with the other side whole: the side is
    /// named.
    #[test]
    fn a_malformed_side_is_named() {
        let (keys, values) = pair(2, 64, 3);
        for (kind, whole) in [(Kind::Keys, &keys), (Kind::Values, &values)] {
            let longer = [&whole[..], &[0]].concat();
            let cuts = (1..whole.len()).map(|len| &whole[..len]);
            for bad in cuts.chain([&longer[..]]) {
                let refused = match kind {
                    Kind::Keys => refusal(bad, &values),
                    Kind::Values => refusal(&keys, bad),
                };
                let error = crate::blob::decode_kind(kind, bad).unwrap_err();
                assert_eq!(refused, RestoreRefusal::Malformed { kind, error });
            }
        }
        assert_eq!(
            refusal(&keys, &values[..values.len() - 1]).to_string(),
            "values: blob: found 123 bytes, expected 124 for n_kv_heads 2, head_dim 64, seq_len 3"
        );
    }

    #[test]
    fn norms_that_are_no_norms_are_refused() {
        let (keys, values) = pair(2, 64, 3);
        for bits in [0x7C00, 0x7E01, 0xFC00, 0x8001, 0x8000, 0xBC00_u16] {
            let with = |blob: &[u8]| {
                let mut blob = blob.to_vec();
                let at = blob.len() - 2;
                blob[at..].copy_from_slice(&bits.to_le_bytes());
                blob
            };
            for (kind, refused) in [
                (Kind::Keys, refusal(&with(&keys), &values)),
                (Kind::Values, refusal(&keys, &with(&values))),
            ] {
                let named = matches!(
                    refused,
                    RestoreRefusal::Malformed {
                        kind: k,
                        error: BlobError::Norm { head: 1, timestep: 2, bits: b, .. },
                    } if k == kind && b == bits
                );
                assert!(named, "{refused}");
            }
        }
    }

    #[test]
    fn sides_that_disagree_are_refused() {
        let blob = |kind, (n, d, s)| random_blob(kind, n, d, s, 5);
        for (k, v, field, keys, values) in [
            ((2, 64, 3), (3, 64, 3), "n_kv_heads", 2, 3),
            ((2, 64, 3), (2, 128, 3), "head_dim", 64, 128),
            ((2, 64, 0), (2, 4, 0), "head_dim", 64, 4),
            ((2, 64, 7), (2, 64, 6), "seq_len", 7, 6),
            ((2, 64, 0), (2, 64, 1), "seq_len", 0, 1),
        ] {
            assert_eq!(
                refusal(&blob(Kind::Keys, k), &blob(Kind::Values, v)),
                RestoreRefusal::Differ {
                    field,
                    keys,
                    values
                }
            );
        }
    }

    #[test]
    fn shapes_of_other_layers_are_refused() {
        for (n, d, s, field, found, expected) in [
            (1, 64, 3, "n_kv_heads", 1, 2),
            (4, 32, 3, "n_kv_heads", 4, 2),
            (0, 64, 0, "n_kv_heads", 0, 2),
            (0x7FFF_FFFF, 64, 0, "n_kv_heads", 0x7FFF_FFFF, 2),
            (u32::MAX, 64, 0, "n_kv_heads", u32::MAX, 2),
            (2, 128, 3, "head_dim", 128, 64),
            (2, 96, 3, "head_dim", 96, 64),
            (2, 512, 0, "head_dim", 512, 64),
        ] {
            let keys = match s {
                0 => header_bytes(b"TQK1", n, d, 0),
                s => random_blob(Kind::Keys, n, d, s, 6),
            };
            let values = match s {
                0 => header_bytes(b"TQV1", n, d, 0),
                s => random_blob(Kind::Values, n, d, s, 7),
            };
            assert_eq!(
                refusal(&keys, &values),
                RestoreRefusal::ForeignShape {
                    field,
                    found,
                    expected
                }
            );
        }
    }

    #[test]
    fn one_timestep_over_the_capacity_is_refused() {
        let (keys, values) = pair(2, 64, CAPACITY);
        assert!(plan(SHAPE, CAPACITY, &keys, &values).is_ok());
        let (keys, values) = pair(2, 64, CAPACITY + 1);
        assert_eq!(
            refusal(&keys, &values),
            RestoreRefusal::OverCapacity {
                seq_len: CAPACITY + 1,
                capacity: CAPACITY
            }
        );
    }
}
