//! Windows of activations of a real model.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use safetensors::{Dtype, SafeTensors};

use super::InputError;
use super::draw::Draw;

/// Queries and keys (after `RoPE`) and values of SmolLM2-135M over 192 tokens of English text, the
/// tensors `layerNN.q`, `.k`, `.v` of shape [tokens, heads, 64].
static FILE: &[u8] = include_bytes!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../testdata/real/smollm2-135m-qkv.safetensors"
));

/// The layers that the file has.
const LAYERS: [&str; 4] = ["layer00", "layer09", "layer19", "layer29"];

/// Which of a layer's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Q,
    K,
    V,
}

struct Tensor {
    tokens: u64,
    heads: u64,
    /// Little-endian f32s; a slice of the file.
    bytes: &'static [u8],
}

/// Bytes of one vector of 64 f32s.
const VECTOR: usize = 64 * 4;

/// Fills `out` with one vector. The seed picks the layer and the token of row 0, alike for all
/// three roles, so that queries, keys and values of one seed belong together; rows past the last
/// token and heads past the last head start again at the first.
pub(super) fn fill(
    role: Role,
    seed: u64,
    row: u64,
    head: u64,
    out: &mut [f32],
) -> Result<(), InputError> {
    static TENSORS: OnceLock<Result<BTreeMap<String, Tensor>, String>> = OnceLock::new();
    let tensors = TENSORS
        .get_or_init(parse)
        .as_ref()
        .map_err(|e| InputError::Real(e.clone()))?;
    let mut draw = Draw::tensor(seed);
    let name = format!("{}.{}", draw.pick(&LAYERS), role.suffix());
    let tensor = tensors
        .get(&name)
        .ok_or_else(|| InputError::Real(format!("no tensor {name}")))?;
    let token = (draw.below(tensor.tokens as usize) as u64 + row) % tensor.tokens;
    let start = (token * tensor.heads + head % tensor.heads) as usize * VECTOR;
    let words = tensor.bytes[start..start + VECTOR].chunks_exact(4);
    for (x, word) in out.iter_mut().zip(words) {
        *x = f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
    }
    Ok(())
}

impl Role {
    const fn suffix(self) -> &'static str {
        match self {
            Self::Q => "q",
            Self::K => "k",
            Self::V => "v",
        }
    }
}

fn parse() -> Result<BTreeMap<String, Tensor>, String> {
    let file = SafeTensors::deserialize(FILE).map_err(|e| e.to_string())?;
    file.iter()
        .map(|(name, view)| match (view.dtype(), view.shape()) {
            (Dtype::F32, &[tokens, heads, 64]) if tokens * heads > 0 => {
                let tensor = Tensor {
                    tokens: tokens as u64,
                    heads: heads as u64,
                    bytes: view.data(),
                };
                Ok((name.to_owned(), tensor))
            }
            (dtype, shape) => Err(format!("{name} is {dtype:?} {shape:?}")),
        })
        .collect()
}
