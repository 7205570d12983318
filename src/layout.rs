//! Region arithmetic, the one place where sizes and offsets are computed.
//!
//! A compressed cache is a set of *records*, one for each (KV head, timestep). The parts of all records
//! are kept apart in *regions*, head after head, timesteps contiguous within a head. Two layouts
//! exist: the packed one of a snapshot blob (stride of a head = its live length, norms as f16), and
//! the one on the device (stride = capacity, everything in 32-bit words).

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
        self.region_start(region)
            + (head * self.capacity + timestep) * region.record_words(self.shape.head_dim)
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
