//! Region arithmetic, the one place where sizes and offsets are computed.
//!
//! A compressed cache is a set of *records*, one for each (KV head, timestep). The parts of all records
//! are kept apart in *regions*, head after head, timesteps contiguous within a head. Two layouts
//! exist: the packed one of a snapshot blob (stride of a head = its live length, norms as f16), and
//! the one on the device (stride = capacity, everything in 32-bit words).

use core::ops::Range;

use crate::{Error, HeadDim};

/// Which of the two caches of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Codes, residual signs, norms and residual norms (`TQK1`).
    Keys,
    /// Codes and norms (`TQV1`).
    Values,
}

impl Kind {
    /// The regions of a blob of this kind, in order.
    #[must_use]
    pub const fn blob_regions(self) -> &'static [BlobRegion] {
        match self {
            Self::Keys => &[
                BlobRegion::Codes,
                BlobRegion::Signs,
                BlobRegion::Norms,
                BlobRegion::ResidualNorms,
            ],
            Self::Values => &[BlobRegion::Codes, BlobRegion::Norms],
        }
    }

    /// The regions of a device buffer of this kind, in order.
    #[must_use]
    pub const fn device_regions(self) -> &'static [DeviceRegion] {
        match self {
            Self::Keys => &[
                DeviceRegion::Codes,
                DeviceRegion::Signs,
                DeviceRegion::Norms,
            ],
            Self::Values => &[DeviceRegion::Codes, DeviceRegion::Norms],
        }
    }

    /// Bytes that one record takes in a blob, or `None` if `head_dim` elements of some region do not
    /// fill whole bytes. That is the one rule for valid head dimensions in a blob: a multiple of 8
    /// for keys (their signs are eight to a byte), of 4 for values.
    #[must_use]
    pub fn blob_record_bytes(self, head_dim: u32) -> Option<u64> {
        let mut bytes = 0;
        for region in self.blob_regions() {
            bytes += region.record_bytes(head_dim)?;
        }
        Some(bytes)
    }
}

impl core::fmt::Display for Kind {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Keys => "keys",
            Self::Values => "values",
        })
    }
}

/// A region of a snapshot blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlobRegion {
    /// 2 bits an element, element i at bits 2(i mod 4) of byte i/4.
    Codes,
    /// 1 bit an element, element i at bit i mod 8 of byte i/8.
    Signs,
    /// One f16 for each record: the vector's norm.
    Norms,
    /// One f16 for each record: the norm of the key's residual.
    ResidualNorms,
}

impl BlobRegion {
    /// Bytes of one record in this region; `None` if the elements do not fill whole bytes.
    #[must_use]
    pub fn record_bytes(self, head_dim: u32) -> Option<u64> {
        let whole = |per_byte: u32| {
            head_dim
                .is_multiple_of(per_byte)
                .then_some(u64::from(head_dim / per_byte))
        };
        match self {
            Self::Codes => whole(4),
            Self::Signs => whole(8),
            Self::Norms | Self::ResidualNorms => Some(2),
        }
    }
}

/// A region of a device buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceRegion {
    /// 16 codes to a word, LSB first.
    Codes,
    /// 32 signs to a word, LSB first.
    Signs,
    /// One word for each record: the norm's f16 in the low half, for keys the residual norm's in the high half.
    Norms,
}

impl DeviceRegion {
    /// Words of one record in this region.
    #[must_use]
    pub const fn record_words(self, head_dim: HeadDim) -> u32 {
        match self {
            Self::Codes => head_dim.get_u32() / 16,
            Self::Signs => head_dim.get_u32() / 32,
            Self::Norms => 1,
        }
    }
}

/// Shape of one attention layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerShape {
    /// Elements of a key or value vector.
    pub head_dim: HeadDim,
    /// KV heads of this layer, at least 1.
    pub n_kv_heads: u32,
}

/// Layout of one device buffer: regions one after the other, each `n_kv_heads × capacity` records.
///
/// Every offset is in 32-bit words and fits a `u32`, since the shaders index with `u32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLayout {
    kind: Kind,
    shape: LayerShape,
    capacity: u32,
    words: u32,
}

impl DeviceLayout {
    /// Computes the layout with checked arithmetic.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the buffer would have more words than a `u32` can index;
    /// [`Error::ZeroSize`] if there are no heads or no capacity.
    pub fn new(kind: Kind, shape: LayerShape, capacity: u32) -> Result<Self, Error> {
        for (what, n) in [("n_kv_heads", shape.n_kv_heads), ("capacity", capacity)] {
            if n == 0 {
                return Err(Error::ZeroSize { what });
            }
        }
        let record_words: u32 = kind
            .device_regions()
            .iter()
            .map(|r| r.record_words(shape.head_dim))
            .sum();
        // Both factors are below 2^32, so their product fits; the third needs the check.
        let words = (u64::from(shape.n_kv_heads) * u64::from(capacity))
            .checked_mul(u64::from(record_words))
            .and_then(|words| u32::try_from(words).ok())
            .ok_or(Error::TooLarge {
                what: "words of a layer's cache buffer (n_kv_heads × capacity × words a record)",
                found: u128::from(shape.n_kv_heads)
                    * u128::from(capacity)
                    * u128::from(record_words),
                limit_name: "u32 index",
                limit: u64::from(u32::MAX),
            })?;
        Ok(Self {
            kind,
            shape,
            capacity,
            words,
        })
    }

    /// Keys or values.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// The layer's shape.
    #[must_use]
    pub const fn shape(&self) -> LayerShape {
        self.shape
    }

    /// Records a head can hold: the stride of a head.
    #[must_use]
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Words of the whole buffer.
    #[must_use]
    pub const fn words(&self) -> u32 {
        self.words
    }

    /// Bytes of the whole buffer.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.words as u64 * 4
    }

    /// First word of a region. A region that this kind does not have starts at the buffer's end.
    #[must_use]
    pub fn region_start(&self, region: DeviceRegion) -> u32 {
        // No product here can wrap: the constructor has checked their sum.
        let records = self.shape.n_kv_heads * self.capacity;
        self.kind
            .device_regions()
            .iter()
            .take_while(|&&r| r != region)
            .map(|r| r.record_words(self.shape.head_dim) * records)
            .sum()
    }

    /// First word of the record of (`head`, `timestep`) in a region.
    ///
    /// `head < n_kv_heads` and `timestep < capacity` are the caller's to keep: a position outside names
    /// another record.
    #[must_use]
    pub fn slot(&self, region: DeviceRegion, head: u32, timestep: u32) -> u32 {
        // Wrapping, so that a position outside is wrong in every build and a panic in none.
        let record = head.wrapping_mul(self.capacity).wrapping_add(timestep);
        let words = record.wrapping_mul(region.record_words(self.shape.head_dim));
        self.region_start(region).wrapping_add(words)
    }

    /// Bytes of the buffer that hold the first `timesteps` records of a head in a region: what a
    /// snapshot reads and a restore writes. Offset and length are multiples of 4.
    ///
    /// `head < n_kv_heads` and `timesteps <= capacity` are the caller's to keep.
    #[must_use]
    pub fn head_bytes(&self, region: DeviceRegion, head: u32, timesteps: u32) -> Range<u64> {
        let start = u64::from(self.slot(region, head, 0)) * 4;
        let record_bytes = u64::from(region.record_words(self.shape.head_dim)) * 4;
        start..start + u64::from(timesteps) * record_bytes
    }
}

/// Layout of one snapshot blob: a header, then the regions, each `n_kv_heads × seq_len` records
/// without padding.
///
/// Any head dimension whose elements fill whole bytes has one, supported by the kernels or not. All
/// ranges are bytes from the blob's first byte; none of them passes [`BlobLayout::bytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobLayout {
    kind: Kind,
    n_kv_heads: u32,
    head_dim: u32,
    seq_len: u32,
    bytes: u64,
}

impl BlobLayout {
    /// Bytes of the header, and the offset of the first region.
    pub const HEADER_BYTES: u64 = 16;

    /// Computes the layout with checked arithmetic: `None` if `head_dim` has no
    /// [`Kind::blob_record_bytes`], or if the blob would have more bytes than a `u64` can count.
    #[must_use]
    pub fn new(kind: Kind, n_kv_heads: u32, head_dim: u32, seq_len: u32) -> Option<Self> {
        // Two factors below 2^32 have a product below 2^64; the third needs the check.
        let bytes = (u64::from(n_kv_heads) * u64::from(seq_len))
            .checked_mul(kind.blob_record_bytes(head_dim)?)?
            .checked_add(Self::HEADER_BYTES)?;
        Some(Self {
            kind,
            n_kv_heads,
            head_dim,
            seq_len,
            bytes,
        })
    }

    /// Bytes of the whole blob, the header included.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of a region; `None` if this kind does not have it.
    #[must_use]
    pub fn region(&self, region: BlobRegion) -> Option<Range<u64>> {
        let records = u64::from(self.n_kv_heads) * u64::from(self.seq_len);
        let mut start = Self::HEADER_BYTES;
        for &r in self.kind.blob_regions() {
            let end = start + records * r.record_bytes(self.head_dim)?;
            if r == region {
                return Some(start..end);
            }
            start = end;
        }
        None
    }

    /// Bytes of all records of a head in a region; `None` if there is no such region or head.
    #[must_use]
    pub fn head(&self, region: BlobRegion, head: u32) -> Option<Range<u64>> {
        if head >= self.n_kv_heads {
            return None;
        }
        let len = u64::from(self.seq_len) * region.record_bytes(self.head_dim)?;
        let start = self.region(region)?.start + u64::from(head) * len;
        Some(start..start + len)
    }

    /// Bytes of one record in a region; `None` if there is no such region, head or timestep.
    #[must_use]
    pub fn record(&self, region: BlobRegion, head: u32, timestep: u32) -> Option<Range<u64>> {
        if timestep >= self.seq_len {
            return None;
        }
        let len = region.record_bytes(self.head_dim)?;
        let start = self.head(region, head)?.start + u64::from(timestep) * len;
        Some(start..start + len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The figures of the documentation: at d = 128 a key takes 52 bytes in a blob and 52 on the
    /// device, a value 34 in a blob and 36 on the device.
    #[test]
    fn bytes_a_vector_at_128() {
        assert_eq!(Kind::Keys.blob_record_bytes(128), Some(52));
        assert_eq!(Kind::Values.blob_record_bytes(128), Some(34));
        let shape = LayerShape {
            head_dim: HeadDim::D128,
            n_kv_heads: 1,
        };
        let bytes = |kind| DeviceLayout::new(kind, shape, 1).unwrap().bytes();
        assert_eq!(bytes(Kind::Keys), 52);
        assert_eq!(bytes(Kind::Values), 36);
    }

    #[test]
    fn head_dims_that_leave_part_of_a_byte_are_refused() {
        assert_eq!(Kind::Keys.blob_record_bytes(12), None);
        assert_eq!(Kind::Values.blob_record_bytes(12), Some(5));
        assert_eq!(Kind::Values.blob_record_bytes(6), None);
    }

    /// Slots are disjoint, in order, and fill the buffer exactly.
    #[test]
    fn slots_tile_the_buffer() {
        for kind in [Kind::Keys, Kind::Values] {
            for head_dim in HeadDim::ALL {
                let shape = LayerShape {
                    head_dim,
                    n_kv_heads: 3,
                };
                let layout = DeviceLayout::new(kind, shape, 5).unwrap();
                let mut next = 0;
                for &region in kind.device_regions() {
                    assert_eq!(layout.region_start(region), next);
                    for head in 0..3 {
                        for t in 0..5 {
                            assert_eq!(layout.slot(region, head, t), next);
                            next += region.record_words(head_dim);
                        }
                    }
                }
                assert_eq!(next, layout.words());
            }
        }
    }

    /// Records of a blob are disjoint, in order, and fill it exactly; nothing lies outside.
    #[test]
    fn records_tile_the_blob() {
        for (kind, head_dim) in [(Kind::Keys, 24), (Kind::Values, 12), (Kind::Values, 64)] {
            let layout = BlobLayout::new(kind, 3, head_dim, 5).unwrap();
            let mut next = BlobLayout::HEADER_BYTES;
            for &region in kind.blob_regions() {
                assert_eq!(layout.region(region).unwrap().start, next);
                for head in 0..3 {
                    assert_eq!(layout.head(region, head).unwrap().start, next);
                    for t in 0..5 {
                        let record = layout.record(region, head, t).unwrap();
                        assert_eq!(record.start, next);
                        next = record.end;
                    }
                    assert_eq!(layout.head(region, head).unwrap().end, next);
                }
                assert_eq!(layout.region(region).unwrap().end, next);
                assert_eq!(layout.head(region, 3), None);
                assert_eq!(layout.record(region, 0, 5), None);
            }
            assert_eq!(next, layout.bytes());
        }
        let values = BlobLayout::new(Kind::Values, 3, 64, 5).unwrap();
        assert_eq!(values.region(BlobRegion::Signs), None);
    }

    /// Products past u32 are computed, products past u64 are none; no length means no bytes,
    /// however many heads are claimed.
    #[test]
    fn blob_sizes_do_not_wrap() {
        let bytes = |n, d, s| BlobLayout::new(Kind::Values, n, d, s).map(|l| l.bytes());
        assert_eq!(bytes(1 << 16, 128, 1 << 16), Some((34 << 32) + 16));
        assert_eq!(bytes(u32::MAX, 1 << 31, u32::MAX), None);
        assert_eq!(bytes(u32::MAX, 1 << 31, 0), Some(16));
    }

    /// The table of the crate's documentation.
    #[test]
    fn a_vector_takes_the_documented_bytes() {
        for (head_dim, key, value) in [
            (HeadDim::D32, 16, 12),
            (HeadDim::D64, 28, 20),
            (HeadDim::D128, 52, 36),
            (HeadDim::D256, 100, 68),
        ] {
            let shape = LayerShape {
                head_dim,
                n_kv_heads: 1,
            };
            let bytes = |kind| DeviceLayout::new(kind, shape, 1).unwrap().bytes();
            assert_eq!((bytes(Kind::Keys), bytes(Kind::Values)), (key, value));
        }
    }

    /// 64 heads × 2^24 positions at d = 128 is 13 words a key: past u32, refused before anything
    /// else happens.
    #[test]
    fn sizes_past_u32_are_refused() {
        let shape = LayerShape {
            head_dim: HeadDim::D128,
            n_kv_heads: 64,
        };
        assert!(matches!(
            DeviceLayout::new(Kind::Keys, shape, 1 << 24),
            Err(Error::TooLarge { found, .. }) if found == 64 * 13 * (1 << 24)
        ));
        let shape = LayerShape {
            n_kv_heads: u32::MAX,
            ..shape
        };
        assert!(DeviceLayout::new(Kind::Values, shape, u32::MAX).is_err());
        assert!(DeviceLayout::new(Kind::Keys, shape, 0).is_err());
    }
}
