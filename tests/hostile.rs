//! Everything that must be refused, and why, as a caller sees it.

use turboquant_wgpu::blob::{BlobWriter, decode, decode_kind};
use turboquant_wgpu::gate::plan_for;
use turboquant_wgpu::layout::{BlobRegion, Kind};
use turboquant_wgpu::{BlobHeader, HeadDim, LayerShape};

const KINDS: [Kind; 2] = [Kind::Keys, Kind::Values];

fn header(kind: Kind, n_kv_heads: u32, head_dim: u32, seq_len: u32) -> BlobHeader {
    BlobHeader {
        kind,
        n_kv_heads,
        head_dim,
        seq_len,
    }
}

fn blob(kind: Kind, n_kv_heads: u32, head_dim: u32, seq_len: u32) -> Vec<u8> {
    let writer = BlobWriter::new(header(kind, n_kv_heads, head_dim, seq_len));
    writer.unwrap().finish().unwrap()
}

fn pair(n_kv_heads: u32, head_dim: u32, seq_len: u32) -> [Vec<u8>; 2] {
    KINDS.map(|kind| blob(kind, n_kv_heads, head_dim, seq_len))
}

fn refusal(bytes: &[u8]) -> String {
    decode(bytes).expect_err("refused").to_string()
}

/// The gate's reason, for a layer of two heads of 64 with room for 7.
fn gate(keys: &[u8], values: &[u8]) -> String {
    let shape = LayerShape {
        head_dim: HeadDim::D64,
        n_kv_heads: 2,
    };
    let plan = plan_for(Some(shape), 7, keys, values);
    plan.map(|plan| plan.seq_len())
        .expect_err("refused")
        .to_string()
}

#[test]
fn headers_of_0_to_15_bytes() {
    for kind in KINDS {
        for len in 0..16 {
            let expected = format!("blob header: found {len} bytes, expected 16");
            assert_eq!(refusal(&blob(kind, 1, 64, 1)[..len]), expected);
        }
    }
}

#[test]
fn magics() {
    for (magic, found) in [
        (b"TQK2", "TQK2"),
        (b"tqk1", "tqk1"),
        (b"tqv1", "tqv1"),
        (b"1KQT", "1KQT"),
        (b"QTK1", "QTK1"),
        (b"\0\0\0\0", r"\x00\x00\x00\x00"),
    ] {
        let mut bytes = blob(Kind::Keys, 1, 64, 1);
        bytes[..4].copy_from_slice(magic);
        let expected = format!(r#"blob header: magic is "{found}", expected "TQK1" or "TQV1""#);
        assert_eq!(refusal(&bytes), expected);
    }
    let [keys, values] = pair(2, 64, 3);
    assert_eq!(gate(&values, &keys), "keys and values are swapped");
    let reason = "blob header: the magic is that of keys, expected values";
    assert_eq!(
        decode_kind(Kind::Values, &keys).unwrap_err().to_string(),
        reason
    );
    assert_eq!(gate(&keys, &keys), format!("values: {reason}"));
}

/// The header that kills another decoder of this format is an empty blob here, and no layer's.
#[test]
fn absurd_heads_of_an_empty_blob() {
    for n in [0x7FFF_FFFF, u32::MAX] {
        let [keys, values] = pair(n, 64, 0);
        assert_eq!(keys.len(), 16);
        assert_eq!(decode(&keys).unwrap().header().n_kv_heads, n);
        let expected = format!("n_kv_heads is {n}, the layer's is 2");
        assert_eq!(gate(&keys, &values), expected);
    }
}

/// Each dimension 0 and `u32::MAX`, alone and together with the others.
#[test]
fn dimensions_at_their_limits() {
    for kind in KINDS {
        for n in [0, 2, u32::MAX] {
            for d in [0, 64, u32::MAX] {
                for s in [0, 3, u32::MAX] {
                    let found = decode(&header(kind, n, d, s).to_bytes()).map(|_| ());
                    let reason = found.map_err(|error| error.to_string());
                    let expected = match (n, d, s) {
                        (_, 0 | u32::MAX, _) => "head_dim is",
                        (_, _, 0) => {
                            assert_eq!(reason, Ok(()));
                            continue;
                        }
                        (0, ..) => "n_kv_heads is 0, expected at least 1 with seq_len",
                        (u32::MAX, _, u32::MAX) => "pass 2^64 bytes",
                        _ => "blob: found 16 bytes, expected",
                    };
                    let reason = reason.expect_err("refused");
                    assert!(reason.contains(expected), "{n} {d} {s}: {reason}");
                }
            }
        }
    }
}

/// Dimensions whose length wraps to that of a header alone, in 32 or in 64 bits: what a decoder
/// without checks would accept, computed next to what is true.
#[test]
fn products_that_wrap() {
    // (n_kv_heads, head_dim, seq_len); a value takes d/4 + 2 bytes, a key 3d/8 + 4.
    let wraps_in_u32 = [
        (Kind::Values, 1 << 16, 8, 1 << 16),
        (Kind::Values, 1 << 31, 24, 1 << 2),
        (Kind::Keys, 1 << 16, 64, 1 << 16),
        (Kind::Keys, 1 << 30, 32, 1 << 30),
    ];
    let wraps_in_u64 = [
        (Kind::Values, 1 << 31, 4 * ((1 << 30) - 2), 1 << 31),
        (Kind::Values, 1 << 31, 1 << 31, 1 << 31),
        (Kind::Keys, 1 << 31, 1 << 31, 1 << 31),
        (Kind::Keys, u32::MAX, u32::MAX - 7, u32::MAX),
    ];
    for (kind, n, d, s) in wraps_in_u32.into_iter().chain(wraps_in_u64) {
        let (per_record, true_record) = match kind {
            Kind::Keys => (d / 4 + d / 8 + 4, u128::from(d) / 4 + u128::from(d) / 8 + 4),
            Kind::Values => (d / 4 + 2, u128::from(d) / 4 + 2),
        };
        let in_u32 = n.wrapping_mul(s).wrapping_mul(per_record).wrapping_add(16);
        let in_u64 = (u64::from(n) * u64::from(s))
            .wrapping_mul(u64::from(per_record))
            .wrapping_add(16);
        let truth = u128::from(n) * u128::from(s) * true_record + 16;
        assert!(
            u128::from(in_u32) != truth,
            "{kind} {n} {d} {s} does not wrap in u32"
        );
        let first = header(kind, n, d, s).to_bytes();
        for wrong in [u64::from(in_u32), in_u64, 16] {
            let judged = BlobHeader::parse(&first, wrong);
            if u128::from(wrong) == truth {
                assert!(judged.is_ok());
                continue;
            }
            let reason = judged.expect_err("refused").to_string();
            let expected = match u64::try_from(truth) {
                Ok(truth) => format!("blob: found {wrong} bytes, expected {truth} for"),
                Err(_) => format!("{n} heads × {s} timesteps × head_dim {d} pass 2^64 bytes"),
            };
            assert!(reason.contains(&expected), "{reason}");
        }
        // Where 32 bits are all there are, the layout does not fit the address space either way.
        assert!(u32::try_from(truth).is_err());
    }
    for (kind, n, d, s) in wraps_in_u32 {
        let in_u32 = n.wrapping_mul(s).wrapping_mul(match kind {
            Kind::Keys => d / 8 * 3 + 4,
            Kind::Values => d / 4 + 2,
        });
        assert_eq!(
            in_u32, 0,
            "{kind} {n} {d} {s}: a header alone would pass in 32 bits"
        );
    }
}

#[test]
fn a_byte_too_few_or_too_many() {
    for kind in KINDS {
        let mut bytes = blob(kind, 2, 64, 3);
        let len = bytes.len();
        let expected = |found| {
            format!(
                "blob: found {found} bytes, expected {len} for n_kv_heads 2, head_dim 64, seq_len 3"
            )
        };
        assert_eq!(refusal(&bytes[..len - 1]), expected(len - 1));
        bytes.push(0);
        assert_eq!(refusal(&bytes), expected(len + 1));
    }
}

/// 4, 12 and 20 leave part of a byte in a key's signs; 96 and 512 are blobs, but no layer's.
#[test]
fn head_dims_of_no_layer() {
    for d in [4, 12, 20, 96, 512] {
        let bytes = header(Kind::Keys, 2, d, 0).to_bytes();
        let foreign = format!("head_dim is {d}, the layer's is 64");
        if d % 8 == 0 {
            assert!(decode(&bytes).is_ok());
            let [keys, values] = pair(2, d, 3);
            assert_eq!(gate(&keys, &values), foreign);
        } else {
            let expected =
                format!("blob header: head_dim is {d}, expected a multiple of 8 above 0 for keys");
            assert_eq!(refusal(&bytes), expected);
            let values = blob(Kind::Values, 2, d, 3);
            assert!(decode(&values).is_ok());
            let reason = gate(&blob(Kind::Keys, 2, 64, 3), &values);
            assert_eq!(
                reason,
                format!("head_dim is 64 in the keys and {d} in the values")
            );
        }
    }
}

#[test]
fn pairs_that_are_none() {
    let [keys, values] = pair(2, 64, 3);
    let of = |kind, n, d, s| blob(kind, n, d, s);
    for (keys, values, reason) in [
        (
            &keys[..],
            &of(Kind::Values, 2, 128, 3)[..],
            "head_dim is 64 in the keys and 128 in the values",
        ),
        (
            &keys,
            &of(Kind::Values, 2, 64, 4),
            "seq_len is 3 in the keys and 4 in the values",
        ),
        (
            &keys,
            &of(Kind::Values, 3, 64, 3),
            "n_kv_heads is 2 in the keys and 3 in the values",
        ),
        (
            &of(Kind::Keys, 2, 64, 8),
            &of(Kind::Values, 2, 64, 8),
            "seq_len is 8, the layer's capacity is 7",
        ),
        (
            &[],
            &[],
            "both blobs are missing: expected a header each, even of an empty cache",
        ),
        (
            &[],
            &values,
            "the keys are missing: expected both blobs or neither",
        ),
        (
            &keys,
            &[],
            "the values are missing: expected both blobs or neither",
        ),
    ] {
        assert_eq!(gate(keys, values), reason);
    }
    let refused = plan_for(None, 7, &keys, &values).unwrap_err();
    assert_eq!(refused.to_string(), "the layer has no cache");
}

#[test]
fn timesteps_of_no_head() {
    for kind in KINDS {
        let reason = refusal(&header(kind, 0, 64, 5).to_bytes());
        let expected = "blob header: n_kv_heads is 0, expected at least 1 with seq_len 5";
        assert_eq!(reason, expected);
    }
}

/// NaN, infinities, −1 and −0, first and last of each region of norms.
#[test]
fn norms_that_are_none() {
    for kind in KINDS {
        for region in [BlobRegion::Norms, BlobRegion::ResidualNorms] {
            if (kind, region) == (Kind::Values, BlobRegion::ResidualNorms) {
                continue;
            }
            for (head, t) in [(0, 0), (1, 4)] {
                for (bits, shown) in [
                    (0x7E01_u16, "NaN"),
                    (0x7C00, "inf"),
                    (0xFC00, "-inf"),
                    (0xBC00, "-1"),
                    (0x8000, "-0"),
                ] {
                    let mut writer = BlobWriter::new(header(kind, 2, 64, 5)).unwrap();
                    let record = writer.record_mut(region, head, t).unwrap();
                    record.copy_from_slice(&bits.to_le_bytes());
                    let written = writer.finish().unwrap_err().to_string();
                    // The writer refuses it as well, so the bytes are damaged by hand.
                    let mut bytes = blob(kind, 2, 64, 5);
                    let at = bytes.len()
                        - match (kind, region, head) {
                            (Kind::Keys, BlobRegion::Norms, 0) => 40,
                            (Kind::Keys, BlobRegion::Norms, _) => 22,
                            (_, _, 0) => 20,
                            (_, _, _) => 2,
                        };
                    bytes[at..at + 2].copy_from_slice(&bits.to_le_bytes());
                    let expected = format!(
                        "blob: {region:?} of head {head}, timestep {t}: bits {bits:#06x} ({shown}), \
                         expected a finite f16 without a sign"
                    );
                    assert_eq!(refusal(&bytes), expected);
                    assert_eq!(written, expected);
                }
            }
        }
    }
}
