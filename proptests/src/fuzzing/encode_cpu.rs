//! `encode_cpu`: any f32 bits through the CPU twin.
//!
//! The input is one byte each for the head dimension and the layer, eight for the seed, and the
//! vectors' bits; the last vector is filled up with zeros.

use turboquant_wgpu::blob::decode_kind;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::{self, Outcome, encode_keys, encode_values};
use turboquant_wgpu::{HeadDim, Rotation};

use super::Fate;

/// More would only repeat what a few show.
const MOST_VECTORS: usize = 4;

pub(super) fn run(bytes: &[u8]) -> Fate {
    let Some((&[head_dim, layer, ref seed @ ..], bits)) = bytes.split_first_chunk::<10>() else {
        return Fate::Refused;
    };
    let head_dim = HeadDim::ALL[usize::from(head_dim % 4)];
    let rotation = Rotation::new(head_dim, u64::from_le_bytes(*seed), u32::from(layer));
    let mut tensor: Vec<f32> = bits
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .take(MOST_VECTORS * head_dim.get())
        .collect();
    tensor.resize(tensor.len().next_multiple_of(head_dim.get()), 0.0);

    for x in tensor.chunks_exact(head_dim.get()) {
        let (key, key_outcome) = encode_keys(&rotation, x);
        let (value, value_outcome) = encode_values(&rotation, x);
        assert_eq!(key_outcome, value_outcome, "both look at the norm alone");
        assert_eq!(key.norm.to_bits(), value.norm.to_bits());
        assert_eq!(key.codes, value.codes);
        let rho = key.residual_norm;
        assert!(rho.is_finite() && rho.is_sign_positive(), "{rho}");
        check_norm(x, key.norm, key_outcome);
        let zero = twin::KeyRecord::zero(head_dim);
        let vanished = matches!(key_outcome, Outcome::NonFinite | Outcome::Vanishing);
        assert!(!vanished || key == zero);
        assert_eq!(
            encode_keys(&rotation, x),
            (key, key_outcome),
            "deterministic"
        );
        assert_eq!(
            encode_values(&rotation, x),
            (value, value_outcome),
            "deterministic"
        );
    }

    let (snapshot, keys, values) =
        twin::snapshot(&rotation, 1, &tensor, &tensor).expect("whole rows");
    assert_eq!(keys, values);
    for (kind, blob) in [
        (Kind::Keys, &snapshot.keys),
        (Kind::Values, &snapshot.values),
    ] {
        decode_kind(kind, blob).expect("a snapshot decodes");
    }
    Fate::Accepted
}

/// The norm against one in f64, where no square of an f32 overflows or vanishes.
fn check_norm(x: &[f32], stored: half::f16, outcome: Outcome) {
    let norm = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    assert_eq!(norm.is_finite(), outcome != Outcome::NonFinite);
    assert!(stored.is_finite() && stored.is_sign_positive(), "{stored}");
    // d products and sums in f32, each within 2^-24, half of it left by the root.
    let computed = f64::from(x.len() as u32 + 8) * 2f64.powi(-24);
    match outcome {
        Outcome::NonFinite => {}
        Outcome::Vanishing => assert!(norm <= 1e-12 * (1.0 + computed), "{norm}"),
        Outcome::Saturated => assert!(norm >= 65520.0 * (1.0 - computed), "{norm}"),
        // Half a unit in the last place of an f16, subnormal ones included.
        Outcome::Encoded => assert!(
            (stored.to_f64() - norm).abs()
                <= norm * (2f64.powi(-11) + 2.0 * computed) + 2f64.powi(-25),
            "{stored}, {norm}"
        ),
    }
}
