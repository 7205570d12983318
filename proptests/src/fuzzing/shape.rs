//! Repairs that make blobs of mutated bytes.

use turboquant_wgpu::BlobHeader;
use turboquant_wgpu::layout::{BlobRegion, Kind};

/// A generator for the few choices of one repair (an LCG's high bits).
pub(super) struct Choices(u64);

impl Choices {
    pub(super) fn new(seed: u32) -> Self {
        Self(u64::from(seed))
    }

    /// A number below `n`, which is not 0.
    pub(super) fn below(&mut self, n: u32) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32 % n
    }
}

/// Gives the first bytes of `buffer` the header of a small blob close to the one they have, with
/// the length and, mostly, the norms that such a blob needs. Returns the length; a quarter of the
/// inputs are left as they are, and so is what would not fit.
pub(super) fn blob(kind: Kind, buffer: &mut [u8], size: usize, choices: &mut Choices) -> usize {
    let size = size.min(buffer.len());
    if choices.below(4) == 0 || buffer.len() < 16 {
        return size;
    }
    let field = |i: usize| match buffer.get(4 * i..4 * i + 4) {
        Some(&[a, b, c, d]) if 4 * i + 4 <= size => u32::from_le_bytes([a, b, c, d]),
        _ => 0,
    };
    let head_dim = match field(2) {
        d @ 8..=256 if d % 8 == 0 => d,
        _ => 8 << choices.below(4),
    };
    let header = BlobHeader {
        kind,
        n_kv_heads: field(1) % 3 + 1,
        head_dim,
        seq_len: field(3) % 5,
    };
    exactly(header, buffer, size, choices).unwrap_or(size)
}

/// Makes the first bytes of `buffer` a blob with this header; `None`, with nothing changed, if it
/// does not fit.
pub(super) fn exactly(
    header: BlobHeader,
    buffer: &mut [u8],
    size: usize,
    choices: &mut Choices,
) -> Option<usize> {
    let layout = header.layout().ok()?;
    let len = usize::try_from(layout.bytes()).ok()?;
    let out = buffer.get_mut(..len)?;
    out[..16].copy_from_slice(&header.to_bytes());
    if size.max(16) < len {
        out[size.max(16)..].fill(0);
    }
    if choices.below(8) > 0 {
        for region in [BlobRegion::Norms, BlobRegion::ResidualNorms] {
            let Some(at) = layout.region(region) else {
                continue;
            };
            for norm in out[at.start as usize..at.end as usize].chunks_exact_mut(2) {
                // Sign and the exponent's top bit away: any finite norm below 2.
                norm[1] &= 0x3F;
            }
        }
    }
    Some(len)
}
