//! Parameter blocks of the kernels: what the host writes and each shader reads as its uniform.
//!
//! The field order is the WGSL structs' in `shaders/`; a test compares size and every offset with
//! naga's reflection of the shader that is compiled.

use bytemuck::{Pod, Zeroable};

/// `EncodeParams` in `shaders/encode.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct EncodeParams {
    pub rows: u32,
    pub n_kv_heads: u32,
    pub position: u32,
    pub capacity: u32,
    pub source_start: u32,
    pub signs_start: u32,
    pub norms_start: u32,
    pub counters_start: u32,
    pub polar: [u32; 8],
    pub jl: [u32; 8],
}

/// `RotateParams` in `shaders/rotate_queries.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct RotateParams {
    pub n_vectors: u32,
    pub source_start: u32,
    pub rotated_start: u32,
    pub counter: u32,
    pub polar: [u32; 8],
    pub jl: [u32; 8],
}

/// `AttentionParams` in `shaders/attention_params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct AttentionParams {
    pub rows: u32,
    pub row_base: u32,
    pub start_pos: u32,
    pub n_heads: u32,
    pub n_kv_heads: u32,
    pub capacity: u32,
    pub split_len: u32,
    pub n_splits: u32,
    pub key_signs_start: u32,
    pub key_norms_start: u32,
    pub value_norms_start: u32,
    pub queries_start: u32,
    pub destination_start: u32,
    pub scale: f32,
    pub gain: f32,
    pub padding: u32,
    pub polar: [u32; 8],
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shaders::{Kernel, KernelVariant};

    /// (name, offset) of each member of the struct `name`, and the struct's size, as naga lays it out.
    fn reflect(kernel: Kernel, name: &str) -> (Vec<(String, u32)>, u32) {
        let module = naga::front::wgsl::parse_str(&kernel.source(KernelVariant::Portable))
            .expect("the shader parses");
        let (_, ty) = module
            .types
            .iter()
            .find(|(_, ty)| ty.name.as_deref() == Some(name))
            .expect("the shader declares the block");
        let naga::TypeInner::Struct { members, span } = &ty.inner else {
            panic!("{name} is no struct");
        };
        let members = members
            .iter()
            .map(|m| (m.name.clone().expect("members are named"), m.offset))
            .collect();
        (members, *span)
    }

    macro_rules! assert_block {
        ($kernel:expr, $block:ident { $($field:ident),* $(,)? }) => {{
            let host = vec![$((
                stringify!($field).to_owned(),
                core::mem::offset_of!($block, $field) as u32,
            )),*];
            let (device, span) = reflect($kernel, stringify!($block));
            assert_eq!(host, device, concat!(stringify!($block), " fields and offsets"));
            assert_eq!(size_of::<$block>() as u32, span, concat!(stringify!($block), " size"));
        }};
    }

    #[test]
    fn blocks_match_the_shaders() {
        for kernel in [Kernel::EncodeKeys, Kernel::EncodeValues] {
            assert_block!(
                kernel,
                EncodeParams {
                    rows,
                    n_kv_heads,
                    position,
                    capacity,
                    source_start,
                    signs_start,
                    norms_start,
                    counters_start,
                    polar,
                    jl,
                }
            );
        }
        assert_block!(
            Kernel::RotateQueries,
            RotateParams {
                n_vectors,
                source_start,
                rotated_start,
                counter,
                polar,
                jl,
            }
        );
        for kernel in [Kernel::Attention, Kernel::MergeAttention] {
            assert_block!(
                kernel,
                AttentionParams {
                    rows,
                    row_base,
                    start_pos,
                    n_heads,
                    n_kv_heads,
                    capacity,
                    split_len,
                    n_splits,
                    key_signs_start,
                    key_norms_start,
                    value_norms_start,
                    queries_start,
                    destination_start,
                    scale,
                    gain,
                    padding,
                    polar,
                }
            );
        }
    }
}
