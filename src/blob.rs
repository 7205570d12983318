//! Snapshot blobs: the bytes in which one cache of one layer is carried between devices.
//!
//! Little-endian: the magic `TQK1` (keys) or `TQV1` (values), u32 `n_kv_heads`, u32 `head_dim`,
//! u32 `seq_len`, then the regions of [`Kind::blob_regions`] at the offsets of [`BlobLayout`]. No
//! padding, no trailer: the length is exact.
//!
//! # One rule for both kinds
//!
//! A blob is valid if, checked in this order,
//!
//! 1. it has the 16 bytes of a header;
//! 2. its magic is one of the two;
//! 3. `head_dim` is not 0 and its elements fill whole bytes in every region of the kind, which
//!    makes it a multiple of 8 for keys and of 4 for values;
//! 4. `n_kv_heads` is not 0, unless `seq_len` is;
//! 5. its length is the one that the header asks for, computed without wrapping;
//! 6. every norm is finite and not negative, −0 included: a norm has no sign bit.
//!
//! An empty cache is a header alone, whatever number of heads it names: how many a layer has is for
//! [`crate::gate`] to know. Codes and signs need no check, since every bit pattern is one.
//!
//! # Hostile bytes
//!
//! Decoding borrows. It allocates nothing, and its only loop runs over norms that the length has
//! proved to be there. [`BlobHeader::parse`] judges a file by its first 16 bytes and its length,
//! so that a wrong one is refused before it is read.

use core::ops::Range;

use half::f16;

use crate::layout::{BlobLayout, BlobRegion, DeviceRegion, Kind};

/// Why bytes are no blob, or why a blob cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlobError {
    /// Fewer bytes than a header has.
    #[error(
        "blob header: found {found} bytes, expected {}",
        BlobLayout::HEADER_BYTES
    )]
    HeaderLength {
        /// Bytes there are.
        found: u64,
    },
    /// The first four bytes are no blob's.
    #[error("blob header: magic is \"{}\", expected {expected}", .found.escape_ascii())]
    Magic {
        /// The bytes.
        found: [u8; 4],
        /// The magics that would have done.
        expected: &'static str,
    },
    /// A blob of the other kind: keys and values are swapped.
    #[error("blob header: the magic is that of {found}, expected {expected}")]
    WrongKind {
        /// What the magic says.
        found: Kind,
        /// What was asked for.
        expected: Kind,
    },
    /// `head_dim` is 0 or leaves part of a byte in some region.
    #[error(
        "blob header: head_dim is {found}, expected a multiple of {multiple_of} above 0 for {kind}"
    )]
    HeadDim {
        /// Kind of the blob.
        kind: Kind,
        /// The header's `head_dim`.
        found: u32,
        /// What it has to be a multiple of.
        multiple_of: u32,
    },
    /// Timesteps of no head.
    #[error("blob header: n_kv_heads is 0, expected at least 1 with seq_len {seq_len}")]
    NoHeads {
        /// The header's `seq_len`, not 0.
        seq_len: u32,
    },
    /// The header asks for more bytes than 64 bits can count.
    #[error(
        "blob header: {} heads × {} timesteps × head_dim {} pass 2^64 bytes",
        .0.n_kv_heads, .0.seq_len, .0.head_dim
    )]
    TooLarge(BlobHeader),
    /// The length is not the one that the header asks for.
    #[error(
        "blob: found {found} bytes, expected {expected} for n_kv_heads {}, head_dim {}, seq_len {}",
        .header.n_kv_heads, .header.head_dim, .header.seq_len
    )]
    Length {
        /// Bytes there are.
        found: u64,
        /// Bytes that the header asks for, its own 16 included.
        expected: u64,
        /// The header.
        header: BlobHeader,
    },
    /// A norm that is NaN, infinite or negative.
    #[error(
        "blob: {region:?} of head {head}, timestep {timestep}: bits {bits:#06x} ({}), \
         expected a finite f16 without a sign",
        f16::from_bits(*.bits)
    )]
    Norm {
        /// [`BlobRegion::Norms`] or [`BlobRegion::ResidualNorms`].
        region: BlobRegion,
        /// KV head of the record.
        head: u32,
        /// Timestep of the record.
        timestep: u32,
        /// The f16's bits.
        bits: u16,
    },
    /// The blob to be written does not fit in memory, or not in the address space.
    #[error("blob: cannot allocate its {bytes} bytes")]
    Allocation {
        /// Size of the blob.
        bytes: u64,
    },
    /// A head or a region to be written that the blob does not have.
    #[error("blob of {kind}: no head {head} in {region:?}: it has {n_kv_heads} heads")]
    NoSuchHead {
        /// Kind of the blob.
        kind: Kind,
        /// The region asked for.
        region: DeviceRegion,
        /// The head asked for.
        head: u32,
        /// Heads of the blob.
        n_kv_heads: u32,
    },
    /// Device bytes of a head that are not as many as the blob has timesteps for.
    #[error("blob: {region:?} of head {head}: found {found} device bytes, expected {expected}")]
    HeadLength {
        /// The region.
        region: DeviceRegion,
        /// KV head.
        head: u32,
        /// Bytes passed.
        found: usize,
        /// Bytes of `seq_len` records on the device.
        expected: usize,
    },
}

impl Kind {
    /// The first four bytes of a blob of this kind.
    #[must_use]
    pub const fn magic(self) -> [u8; 4] {
        match self {
            Self::Keys => *b"TQK1",
            Self::Values => *b"TQV1",
        }
    }

    /// The kind of blob that starts with `bytes`, if it is one.
    #[must_use]
    pub fn of_blob(bytes: &[u8]) -> Option<Self> {
        [Self::Keys, Self::Values]
            .into_iter()
            .find(|kind| bytes.starts_with(&kind.magic()))
    }
}

/// The header of a blob. Its fields may be anything; [`BlobHeader::layout`] says whether they
/// make sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobHeader {
    /// Keys or values, in place of the magic.
    pub kind: Kind,
    /// KV heads.
    pub n_kv_heads: u32,
    /// Elements of a vector.
    pub head_dim: u32,
    /// Timesteps of every head.
    pub seq_len: u32,
}

impl BlobHeader {
    /// Judges a blob by its first bytes and its length: rules 1 to 5 of the [module](self).
    ///
    /// `first` holds at least the first 16 bytes (more are not looked at) and `total_len` is the
    /// number of bytes of the whole blob, say the length of a file not read yet.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn parse(first: &[u8], total_len: u64) -> Result<Self, BlobError> {
        Self::parse_as(None, first, total_len).map(|(header, _)| header)
    }

    /// [`BlobHeader::parse`] for a blob that has to be of one kind.
    ///
    /// # Errors
    /// The first rule that is broken; [`BlobError::WrongKind`], in the place of rule 2, for the
    /// other kind's magic.
    pub fn parse_kind(kind: Kind, first: &[u8], total_len: u64) -> Result<Self, BlobError> {
        Self::parse_as(Some(kind), first, total_len).map(|(header, _)| header)
    }

    fn parse_as(
        expected: Option<Kind>,
        first: &[u8],
        total_len: u64,
    ) -> Result<(Self, BlobLayout), BlobError> {
        let present = total_len.min(first.len() as u64);
        let Some(header) = first
            .first_chunk::<16>()
            .filter(|_| present >= BlobLayout::HEADER_BYTES)
        else {
            return Err(BlobError::HeaderLength { found: present });
        };
        let field = |i: usize| {
            let at = 4 * i;
            [header[at], header[at + 1], header[at + 2], header[at + 3]]
        };
        let kind = Kind::of_blob(header).ok_or(BlobError::Magic {
            found: field(0),
            expected: match expected {
                Some(Kind::Keys) => "\"TQK1\"",
                Some(Kind::Values) => "\"TQV1\"",
                None => "\"TQK1\" or \"TQV1\"",
            },
        })?;
        if let Some(expected) = expected.filter(|&expected| expected != kind) {
            return Err(BlobError::WrongKind {
                found: kind,
                expected,
            });
        }
        let header = Self {
            kind,
            n_kv_heads: u32::from_le_bytes(field(1)),
            head_dim: u32::from_le_bytes(field(2)),
            seq_len: u32::from_le_bytes(field(3)),
        };
        let layout = header.layout()?;
        if layout.bytes() == total_len {
            Ok((header, layout))
        } else {
            Err(BlobError::Length {
                found: total_len,
                expected: layout.bytes(),
                header,
            })
        }
    }

    /// The header's 16 bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        let fields = [self.n_kv_heads, self.head_dim, self.seq_len].map(u32::to_le_bytes);
        let fields = [self.kind.magic(), fields[0], fields[1], fields[2]];
        bytes.copy_from_slice(fields.as_flattened());
        bytes
    }

    /// Where the regions of such a blob lie, and how long it is.
    ///
    /// # Errors
    /// [`BlobError::HeadDim`], [`BlobError::NoHeads`] or [`BlobError::TooLarge`]: rules 3 to 5 of
    /// the [module](self).
    pub fn layout(&self) -> Result<BlobLayout, BlobError> {
        let &Self {
            kind,
            n_kv_heads,
            head_dim,
            seq_len,
        } = self;
        if head_dim == 0 || kind.blob_record_bytes(head_dim).is_none() {
            return Err(BlobError::HeadDim {
                kind,
                found: head_dim,
                multiple_of: match kind {
                    Kind::Keys => 8,
                    Kind::Values => 4,
                },
            });
        }
        if n_kv_heads == 0 && seq_len > 0 {
            return Err(BlobError::NoHeads { seq_len });
        }
        BlobLayout::new(kind, n_kv_heads, head_dim, seq_len).ok_or(BlobError::TooLarge(*self))
    }
}

/// A valid blob, borrowed. Positions that it does not have are `None`.
#[derive(Clone, Copy, Debug)]
pub struct Blob<'a> {
    header: BlobHeader,
    layout: BlobLayout,
    bytes: &'a [u8],
}

/// Decodes a blob of either kind.
///
/// # Errors
/// The first broken rule of the [module](self).
pub fn decode(bytes: &[u8]) -> Result<Blob<'_>, BlobError> {
    decode_as(None, bytes)
}

/// Decodes a blob that has to be of one kind.
///
/// # Errors
/// The first broken rule of the [module](self); [`BlobError::WrongKind`], in the place of rule 2,
/// for the other kind's magic.
pub fn decode_kind(kind: Kind, bytes: &[u8]) -> Result<Blob<'_>, BlobError> {
    decode_as(Some(kind), bytes)
}

fn decode_as(expected: Option<Kind>, bytes: &[u8]) -> Result<Blob<'_>, BlobError> {
    let (header, layout) = BlobHeader::parse_as(expected, bytes, bytes.len() as u64)?;
    check_norms(&header, &layout, bytes)?;
    Ok(Blob {
        header,
        layout,
        bytes,
    })
}

/// Rule 6, on bytes whose length is right.
fn check_norms(header: &BlobHeader, layout: &BlobLayout, bytes: &[u8]) -> Result<(), BlobError> {
    for region in [BlobRegion::Norms, BlobRegion::ResidualNorms] {
        let norms = layout.region(region).and_then(|at| bytes.get(index(at)?));
        let bad = norms
            .unwrap_or_default()
            .chunks_exact(2)
            .map(|half| u16::from_le_bytes([half[0], half[1]]))
            .zip(0u64..)
            // From here on up lie infinity, the NaNs, and everything with a sign bit.
            .find(|&(bits, _)| bits >= f16::INFINITY.to_bits());
        if let Some((bits, record)) = bad {
            // There is a record, so seq_len is not 0, and both results are below a header field.
            let seq_len = u64::from(header.seq_len);
            return Err(BlobError::Norm {
                region,
                head: (record / seq_len) as u32,
                timestep: (record % seq_len) as u32,
                bits,
            });
        }
    }
    Ok(())
}

/// A layout's range as slice indices; `None` if it does not fit the address space.
fn index(range: Range<u64>) -> Option<Range<usize>> {
    Some(usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?)
}

impl<'a> Blob<'a> {
    /// The header.
    #[must_use]
    pub const fn header(&self) -> BlobHeader {
        self.header
    }

    /// The whole blob, as it was decoded.
    #[must_use]
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    fn slice(&self, range: Range<u64>) -> Option<&'a [u8]> {
        self.bytes.get(index(range)?)
    }

    /// All records of a region, head after head.
    #[must_use]
    pub fn region(&self, region: BlobRegion) -> Option<&'a [u8]> {
        self.slice(self.layout.region(region)?)
    }

    /// All records of a head in a region.
    #[must_use]
    pub fn head(&self, region: BlobRegion, head: u32) -> Option<&'a [u8]> {
        self.slice(self.layout.head(region, head)?)
    }

    /// One record of a region.
    #[must_use]
    pub fn record(&self, region: BlobRegion, head: u32, timestep: u32) -> Option<&'a [u8]> {
        self.slice(self.layout.record(region, head, timestep)?)
    }

    /// `width` bits of element `i`, LSB first. A `head_dim` of whole bytes leaves no bits over, so
    /// an element past it is a byte past the record.
    fn bits(&self, region: BlobRegion, at: (u32, u32), i: u32, width: u32) -> Option<u8> {
        let per_byte = 8 / width;
        let byte = self
            .record(region, at.0, at.1)?
            .get((i / per_byte) as usize)?;
        Some(byte >> (width * (i % per_byte)) & ((1 << width) - 1))
    }

    /// The 2-bit code of element `i` of a vector: 0 to 3.
    #[must_use]
    pub fn code(&self, head: u32, timestep: u32, i: u32) -> Option<u8> {
        self.bits(BlobRegion::Codes, (head, timestep), i, 2)
    }

    /// The residual's sign bit of element `i` of a key, true for +1. Values have none.
    #[must_use]
    pub fn sign(&self, head: u32, timestep: u32, i: u32) -> Option<bool> {
        let bit = self.bits(BlobRegion::Signs, (head, timestep), i, 1)?;
        Some(bit == 1)
    }

    fn half(&self, region: BlobRegion, head: u32, timestep: u32) -> Option<f16> {
        let record = self.record(region, head, timestep)?;
        Some(f16::from_le_bytes(*record.first_chunk()?))
    }

    /// The norm of a vector: finite, not negative.
    #[must_use]
    pub fn norm(&self, head: u32, timestep: u32) -> Option<f16> {
        self.half(BlobRegion::Norms, head, timestep)
    }

    /// The norm of a key's residual: finite, not negative. Values have none.
    #[must_use]
    pub fn residual_norm(&self, head: u32, timestep: u32) -> Option<f16> {
        self.half(BlobRegion::ResidualNorms, head, timestep)
    }
}

/// A blob in the making. Records that are never filled stay zero records.
#[derive(Debug)]
pub struct BlobWriter {
    header: BlobHeader,
    layout: BlobLayout,
    bytes: Vec<u8>,
}

impl BlobWriter {
    /// Allocates a blob of zero records, once and at its exact size.
    ///
    /// # Errors
    /// What [`BlobHeader::layout`] refuses, and [`BlobError::Allocation`].
    pub fn new(header: BlobHeader) -> Result<Self, BlobError> {
        let layout = header.layout()?;
        let no_memory = BlobError::Allocation {
            bytes: layout.bytes(),
        };
        let mut bytes = Vec::new();
        match usize::try_from(layout.bytes()) {
            Ok(len) if bytes.try_reserve_exact(len).is_ok() => {
                bytes.extend_from_slice(&header.to_bytes());
                bytes.resize(len, 0);
            }
            _ => return Err(no_memory),
        }
        Ok(Self {
            header,
            layout,
            bytes,
        })
    }

    /// The header.
    #[must_use]
    pub const fn header(&self) -> BlobHeader {
        self.header
    }

    /// All records of a region, head after head.
    pub fn region_mut(&mut self, region: BlobRegion) -> Option<&mut [u8]> {
        self.bytes.get_mut(index(self.layout.region(region)?)?)
    }

    /// All records of a head in a region.
    pub fn head_mut(&mut self, region: BlobRegion, head: u32) -> Option<&mut [u8]> {
        self.bytes.get_mut(index(self.layout.head(region, head)?)?)
    }

    /// One record of a region; a norm is its f16's two little-endian bytes.
    pub fn record_mut(&mut self, region: BlobRegion, head: u32, t: u32) -> Option<&mut [u8]> {
        let at = self.layout.record(region, head, t)?;
        self.bytes.get_mut(index(at)?)
    }

    /// Fills a head from the bytes that the device holds for its `seq_len` timesteps (those at
    /// [`crate::layout::DeviceLayout::head_bytes`]): codes and signs as they are, a norm word's
    /// low half to the norms and, for keys, its high half to the residual norms.
    ///
    /// # Errors
    /// [`BlobError::NoSuchHead`], [`BlobError::HeadLength`]; nothing is written then.
    pub fn fill_head(
        &mut self,
        region: DeviceRegion,
        head: u32,
        device: &[u8],
    ) -> Result<(), BlobError> {
        let BlobHeader {
            kind, n_kv_heads, ..
        } = self.header;
        // A norm is a half of a word on the device; everything else has the same size here and
        // there.
        let (to, growth) = match region {
            DeviceRegion::Codes => (BlobRegion::Codes, 1),
            DeviceRegion::Signs => (BlobRegion::Signs, 1),
            DeviceRegion::Norms => (BlobRegion::Norms, 2),
        };
        let out = self.head_mut(to, head).ok_or(BlobError::NoSuchHead {
            kind,
            region,
            head,
            n_kv_heads,
        })?;
        if device.len() != out.len() * growth {
            return Err(BlobError::HeadLength {
                region,
                head,
                found: device.len(),
                expected: out.len() * growth,
            });
        }
        if region != DeviceRegion::Norms {
            out.copy_from_slice(device);
            return Ok(());
        }
        for (half, word) in out.chunks_exact_mut(2).zip(device.chunks_exact(4)) {
            half.copy_from_slice(&word[..2]);
        }
        if let Some(out) = self.head_mut(BlobRegion::ResidualNorms, head) {
            for (half, word) in out.chunks_exact_mut(2).zip(device.chunks_exact(4)) {
                half.copy_from_slice(&word[2..]);
            }
        }
        Ok(())
    }

    /// The finished blob, one that [`decode`] accepts.
    ///
    /// # Errors
    /// [`BlobError::Norm`]: a snapshot that could never be restored is found when it is taken.
    pub fn finish(self) -> Result<Vec<u8>, BlobError> {
        check_norms(&self.header, &self.layout, &self.bytes)?;
        Ok(self.bytes)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rand_xoshiro::Xoshiro256StarStar;
    use rand_xoshiro::rand_core::{Rng, SeedableRng};
    use std::path::PathBuf;

    pub(crate) fn rng(seed: u64) -> Xoshiro256StarStar {
        Xoshiro256StarStar::seed_from_u64(seed)
    }

    pub(crate) fn below(rng: &mut Xoshiro256StarStar, n: u32) -> u32 {
        rng.next_u32() % n
    }

    pub(crate) fn header_bytes(magic: &[u8; 4], n: u32, d: u32, s: u32) -> Vec<u8> {
        [*magic, n.to_le_bytes(), d.to_le_bytes(), s.to_le_bytes()].concat()
    }

    /// A valid blob of random records, built from the format's description alone.
    pub(crate) fn random_blob(kind: Kind, n: u32, d: u32, s: u32, seed: u64) -> Vec<u8> {
        let mut rng = rng(seed);
        let mut bytes = header_bytes(&kind.magic(), n, d, s);
        let (code_bytes, sign_bytes, norms) = match kind {
            Kind::Keys => (n * s * d / 4, n * s * d / 8, 2 * n * s),
            Kind::Values => (n * s * d / 4, 0, n * s),
        };
        bytes.extend((0..code_bytes + sign_bytes).map(|_| rng.next_u32() as u8));
        for _ in 0..norms {
            bytes.extend((below(&mut rng, 0x7C00) as u16).to_le_bytes());
        }
        bytes
    }

    pub(crate) fn golden() -> Vec<PathBuf> {
        let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/golden"));
        let mut dirs: Vec<_> = std::fs::read_dir(root)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_dir())
            .collect();
        dirs.sort();
        assert!(dirs.len() >= 11, "golden data is missing");
        dirs
    }

    const KINDS: [Kind; 2] = [Kind::Keys, Kind::Values];

    /// Decodes, reads every region, head and record, and writes them all again.
    fn rewrite(bytes: &[u8]) -> Vec<u8> {
        let blob = decode(bytes).unwrap();
        let header = blob.header();
        let mut writer = BlobWriter::new(header).unwrap();
        let mut by_record = BlobWriter::new(header).unwrap();
        for &region in header.kind.blob_regions() {
            let source = blob.region(region).unwrap();
            writer.region_mut(region).unwrap().copy_from_slice(source);
            for head in 0..header.n_kv_heads {
                for t in 0..header.seq_len {
                    let record = blob.record(region, head, t).unwrap();
                    by_record
                        .record_mut(region, head, t)
                        .unwrap()
                        .copy_from_slice(record);
                }
            }
        }
        let written = writer.finish().unwrap();
        assert_eq!(written, by_record.finish().unwrap());
        assert_eq!(written.capacity(), written.len(), "one exact allocation");
        written
    }

    #[test]
    fn golden_blobs_survive_decoding_and_encoding() {
        for dir in golden() {
            let case = std::fs::read_to_string(dir.join("case.toml")).unwrap();
            for (name, kind) in [("keys.tqk1", Kind::Keys), ("values.tqv1", Kind::Values)] {
                let bytes = std::fs::read(dir.join(name)).unwrap();
                let header = decode_kind(kind, &bytes).unwrap().header();
                for line in [
                    format!("\nn_kv_heads = {}\n", header.n_kv_heads),
                    format!("\nhead_dim = {}\n", header.head_dim),
                    format!("\nseq_len = {}\n", header.seq_len),
                ] {
                    assert!(
                        case.contains(&line),
                        "{dir:?}: {line:?} is not in case.toml"
                    );
                }
                assert_eq!(rewrite(&bytes), bytes, "{dir:?} {name}");
            }
        }
    }

    /// Every element of a small blob that is written out bit by bit here.
    #[test]
    fn elements_lie_where_the_format_says() {
        let mut bytes = header_bytes(b"TQK1", 2, 8, 1);
        bytes.extend([0b11_10_01_00, 0b00_00_00_01, 0, 0b10_00_00_00]); // codes
        bytes.extend([0b0000_0101, 0b1000_0000]); // signs
        bytes.extend([0x00, 0x3C, 0xFF, 0x7B]); // norms 1 and 65504
        bytes.extend([0x01, 0x00, 0x00, 0x38]); // residual norms 2^-24 and 0.5
        let blob = decode(&bytes).unwrap();
        let codes = |head| (0..8).map(|i| blob.code(head, 0, i).unwrap()).collect();
        let signs = |head| (0..8).map(|i| blob.sign(head, 0, i).unwrap()).collect();
        let (codes, signs): ([Vec<u8>; 2], [Vec<bool>; 2]) = ([0, 1].map(codes), [0, 1].map(signs));
        assert_eq!(codes, [[0, 1, 2, 3, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 2]]);
        assert_eq!(signs[0], [0, 1, 2, 3, 4, 5, 6, 7].map(|i| i == 0 || i == 2));
        assert_eq!(signs[1], [0, 1, 2, 3, 4, 5, 6, 7].map(|i| i == 7));
        assert_eq!(blob.norm(0, 0), Some(f16::ONE));
        assert_eq!(blob.norm(1, 0), Some(f16::MAX));
        assert_eq!(blob.residual_norm(0, 0), Some(f16::from_bits(1)));
        assert_eq!(blob.residual_norm(1, 0), Some(f16::from_f32(0.5)));
        // Nothing outside, and no next record behind the last element of one.
        assert_eq!(blob.code(0, 0, 8), None);
        assert_eq!(blob.sign(0, 0, u32::MAX), None);
        assert_eq!(blob.norm(2, 0), None);
        assert_eq!(blob.norm(0, 1), None);
        assert_eq!(blob.record(BlobRegion::Codes, u32::MAX, u32::MAX), None);
        let values = random_blob(Kind::Values, 1, 8, 1, 0);
        let values = decode(&values).unwrap();
        assert_eq!(values.sign(0, 0, 0), None);
        assert_eq!(values.residual_norm(0, 0), None);
        assert_eq!(values.region(BlobRegion::Signs), None);
    }

    #[test]
    fn a_header_of_fewer_than_16_bytes_is_refused() {
        for kind in KINDS {
            let bytes = random_blob(kind, 1, 64, 0, 0);
            for found in 0..16 {
                assert_eq!(
                    decode(&bytes[..found]).unwrap_err(),
                    BlobError::HeaderLength {
                        found: found as u64
                    }
                );
                // Nor does a length that the first bytes do not bear out, or the other way round.
                for judged in [
                    BlobHeader::parse(&bytes[..found], 16),
                    BlobHeader::parse(&bytes, found as u64),
                ] {
                    let found = found as u64;
                    assert_eq!(judged, Err(BlobError::HeaderLength { found }));
                }
            }
        }
    }

    #[test]
    fn other_magics_are_refused() {
        for magic in [
            b"TQK2",
            b"TQV2",
            b"TQK0",
            b"tqk1",
            b"tqv1",
            b"1KQT",
            b"1VQT",
            b"QTK1",
            b"\0\0\0\0",
            b"GGUF",
            b"TQS1",
            b"\xffQK1",
        ] {
            for expected in [None, Some(Kind::Keys), Some(Kind::Values)] {
                let error = decode_as(expected, &header_bytes(magic, 1, 64, 0)).unwrap_err();
                assert!(
                    matches!(error, BlobError::Magic { found, .. } if found == *magic),
                    "{error}"
                );
            }
        }
        assert_eq!(
            decode_kind(Kind::Keys, &header_bytes(b"\xffQK2", 1, 64, 0))
                .unwrap_err()
                .to_string(),
            r#"blob header: magic is "\xffQK2", expected "TQK1""#
        );
    }

    #[test]
    fn the_other_kinds_magic_is_an_error_of_its_own() {
        for (found, expected) in [(Kind::Keys, Kind::Values), (Kind::Values, Kind::Keys)] {
            let bytes = random_blob(found, 2, 64, 3, 1);
            assert_eq!(
                decode_kind(expected, &bytes).unwrap_err(),
                BlobError::WrongKind { found, expected }
            );
            assert_eq!(decode(&bytes).unwrap().header().kind, found);
        }
    }

    #[test]
    fn a_big_endian_header_is_refused() {
        for kind in KINDS {
            for d in [32, 64, 128, 256] {
                let mut bytes = random_blob(kind, 2, d, 5, 2);
                bytes[4..16].chunks_exact_mut(4).for_each(<[u8]>::reverse);
                assert!(decode(&bytes).is_err());
            }
        }
    }

    #[test]
    fn head_dims_follow_the_one_rule() {
        for (d, keys, values) in [
            (0, false, false),
            (4, false, true),
            (6, false, false),
            (8, true, true),
            (12, false, true),
            (20, false, true),
            (96, true, true),
            (129, false, false),
            (512, true, true),
        ] {
            for (kind, valid) in [(Kind::Keys, keys), (Kind::Values, values)] {
                let bytes = random_blob(kind, 1, d, 3, 3);
                let error = decode(&bytes).err();
                assert_eq!(error.is_none(), valid, "{kind} of {d}");
                assert!(
                    error.is_none_or(
                        |e| matches!(e, BlobError::HeadDim { found, .. } if found == d)
                    )
                );
            }
        }
    }

    /// An implementation that reserves or loops by `n_kv_heads` dies here, or does not come back.
    #[test]
    fn absurd_heads_of_no_timesteps_cost_nothing() {
        for kind in KINDS {
            for n in [0, 0x7FFF_FFFF, u32::MAX] {
                let bytes = header_bytes(&kind.magic(), n, 128, 0);
                let blob = decode(&bytes).unwrap();
                assert_eq!(blob.header().n_kv_heads, n);
                assert_eq!(blob.region(BlobRegion::Norms), Some(&[][..]));
                assert_eq!(blob.norm(0, 0), None);
                let written = BlobWriter::new(blob.header()).unwrap().finish();
                assert_eq!(written.unwrap(), bytes);
            }
        }
    }

    #[test]
    fn timesteps_of_no_head_are_refused() {
        for kind in KINDS {
            for seq_len in [1, 7, u32::MAX] {
                assert_eq!(
                    decode(&header_bytes(&kind.magic(), 0, 64, seq_len)).unwrap_err(),
                    BlobError::NoHeads { seq_len }
                );
            }
        }
    }

    /// 0, u32::MAX and neighbours in every field, alone and together, against lengths computed in
    /// 128 bits. Among them are products that wrap to a plausible length in 32 or 64 bits.
    #[test]
    fn lengths_do_not_wrap() {
        let values = [0, 1, 2, 8, 1 << 16, 1 << 31, u32::MAX - 7, u32::MAX];
        let mut too_large = 0;
        for kind in KINDS {
            for n in values {
                for d in values {
                    for s in values {
                        let per_byte = if kind == Kind::Keys { 8 } else { 4 };
                        let valid = d > 0 && d % per_byte == 0 && (n > 0 || s == 0);
                        let record = match kind {
                            Kind::Keys => 3 * (u128::from(d) / 8) + 4,
                            Kind::Values => u128::from(d) / 4 + 2,
                        };
                        let len = 16 + u128::from(n) * u128::from(s) * record;
                        let header = header_bytes(&kind.magic(), n, d, s);
                        let judge = |total: u64| BlobHeader::parse(&header, total);
                        let wrapped = [len as u64, u64::from(len as u32), 16, u64::MAX];
                        for total in wrapped {
                            let fits = valid && u128::from(total) == len;
                            assert_eq!(judge(total).is_ok(), fits, "{kind} {n} {d} {s}: {total}");
                        }
                        if valid && len > u128::from(u64::MAX) {
                            too_large += 1;
                            assert!(matches!(judge(len as u64), Err(BlobError::TooLarge(_))));
                        }
                    }
                }
            }
        }
        assert!(too_large > 0);
    }

    #[test]
    fn every_prefix_and_every_longer_blob_is_refused() {
        for kind in KINDS {
            let mut bytes = random_blob(kind, 2, 32, 3, 4);
            let whole = bytes.len() as u64;
            assert!(decode(&bytes).is_ok());
            for len in 0..bytes.len() {
                assert!(decode(&bytes[..len]).is_err(), "{kind}: {len} bytes");
            }
            bytes.push(0);
            assert!(matches!(
                decode(&bytes).unwrap_err(),
                BlobError::Length { found, expected, .. } if found == whole + 1 && expected == whole
            ));
        }
    }

    /// A file padded to 4 GiB is judged by its first 16 bytes, which are all that exists of it
    /// here.
    #[test]
    fn a_padded_file_is_judged_unread() {
        let header = header_bytes(b"TQV1", 2, 64, 100);
        assert!(matches!(
            BlobHeader::parse(&header, 1 << 32).unwrap_err(),
            BlobError::Length { found, expected: 3616, .. } if found == 1 << 32
        ));
        let parsed = BlobHeader::parse_kind(Kind::Values, &header, 3616).unwrap();
        assert_eq!(parsed.to_bytes()[..], header);
        assert!(BlobHeader::parse_kind(Kind::Keys, &header, 3616).is_err());
    }

    #[test]
    fn norms_that_are_no_norms_are_refused_with_their_place() {
        let bad = [
            0x7C00, 0x7E01, 0x7C01, 0xFC00, 0x8001, 0x8000, 0xBC00, 0xFFFF,
        ];
        let (n, d, s) = (3, 32, 5);
        for kind in KINDS {
            let good = random_blob(kind, n, d, s, 5);
            let layout = decode(&good).unwrap().layout;
            for region in [BlobRegion::Norms, BlobRegion::ResidualNorms] {
                for (head, timestep) in (0..n).flat_map(|h| (0..s).map(move |t| (h, t))) {
                    let Some(at) = layout.record(region, head, timestep) else {
                        assert_eq!((kind, region), (Kind::Values, BlobRegion::ResidualNorms));
                        continue;
                    };
                    let at = index(at).unwrap();
                    for bits in bad {
                        let mut bytes = good.clone();
                        bytes[at.clone()].copy_from_slice(&u16::to_le_bytes(bits));
                        let expected = BlobError::Norm {
                            region,
                            head,
                            timestep,
                            bits,
                        };
                        assert_eq!(decode(&bytes).unwrap_err(), expected);
                        let mut writer = BlobWriter::new(decode(&good).unwrap().header()).unwrap();
                        writer
                            .record_mut(region, head, timestep)
                            .unwrap()
                            .copy_from_slice(&u16::to_le_bytes(bits));
                        assert_eq!(writer.finish().unwrap_err(), expected);
                    }
                    for bits in [0x0000, 0x0001, 0x03FF, 0x0400, 0x7BFF_u16] {
                        let mut bytes = good.clone();
                        bytes[at.clone()].copy_from_slice(&bits.to_le_bytes());
                        assert!(decode(&bytes).is_ok(), "{bits:#06x}");
                    }
                }
            }
        }
        assert_eq!(
            BlobError::Norm {
                region: BlobRegion::Norms,
                head: 1,
                timestep: 3,
                bits: 0xBC00
            }
            .to_string(),
            "blob: Norms of head 1, timestep 3: bits 0xbc00 (-1), expected a finite f16 without a sign"
        );
    }

    /// Damaged blobs and plain noise: whatever is accepted can be read to the end, and written
    /// again to the same bytes.
    #[test]
    fn no_bytes_panic() {
        let mut rng = rng(6);
        let (mut accepted, mut refused) = (0, 0);
        for round in 0..20_000 {
            let kind = KINDS[round % 2];
            let (n, s) = (below(&mut rng, 3), below(&mut rng, 4));
            let mut bytes = random_blob(kind, n, 8, s, round as u64);
            for _ in 0..below(&mut rng, 4) {
                let at = below(&mut rng, bytes.len() as u32) as usize;
                bytes[at] = [0, 0xFF, 0x80, rng.next_u32() as u8][below(&mut rng, 4) as usize];
            }
            if below(&mut rng, 4) == 0 {
                bytes.truncate(below(&mut rng, bytes.len() as u32 + 1) as usize);
            }
            match decode(&bytes) {
                // Nothing bounds the heads of an empty blob, and it has nothing to read.
                Ok(blob) if blob.header().seq_len == 0 => accepted += 1,
                Ok(_) => {
                    accepted += 1;
                    assert_eq!(rewrite(&bytes), bytes);
                }
                Err(error) => {
                    refused += 1;
                    assert!(!error.to_string().is_empty());
                }
            }
        }
        assert!(accepted > 1000 && refused > 1000, "{accepted} {refused}");
    }

    #[test]
    fn a_writer_refuses_what_it_cannot_hold() {
        let header = BlobHeader {
            kind: Kind::Values,
            n_kv_heads: 2,
            head_dim: 32,
            seq_len: 3,
        };
        let refusal = |header| BlobWriter::new(header).unwrap_err();
        let odd = BlobHeader {
            head_dim: 33,
            ..header
        };
        assert!(matches!(refusal(odd), BlobError::HeadDim { .. }));
        let none = BlobHeader {
            n_kv_heads: 0,
            ..header
        };
        assert!(matches!(refusal(none), BlobError::NoHeads { .. }));
        // 2^62 and a few bytes: a u64 counts them, no machine has them.
        let vast = BlobHeader {
            n_kv_heads: 1 << 31,
            head_dim: 4,
            seq_len: 1 << 30,
            ..header
        };
        assert!(matches!(refusal(vast), BlobError::Allocation { bytes } if bytes > 1 << 62));

        let mut writer = BlobWriter::new(header).unwrap();
        assert!(matches!(
            writer.fill_head(DeviceRegion::Codes, 2, &[0; 24]),
            Err(BlobError::NoSuchHead { head: 2, .. })
        ));
        assert!(matches!(
            writer.fill_head(DeviceRegion::Signs, 0, &[0; 12]),
            Err(BlobError::NoSuchHead { .. })
        ));
        for (region, expected) in [(DeviceRegion::Codes, 24), (DeviceRegion::Norms, 12)] {
            for found in [0, expected - 1, expected + 1] {
                assert_eq!(
                    writer.fill_head(region, 1, &vec![1; found]).unwrap_err(),
                    BlobError::HeadLength {
                        region,
                        head: 1,
                        found,
                        expected
                    }
                );
            }
        }
        let untouched = writer.finish().unwrap();
        assert!(untouched[16..].iter().all(|&b| b == 0));
    }
}
