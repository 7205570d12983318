//! The WGSL kernels: sources, entry points and specialisation constants.

use crate::HeadDim;

/// A kernel of this crate. Its WGSL file, entry point, CPU twin and oracle carry the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Compresses key vectors.
    EncodeKeys,
    /// Compresses value vectors.
    EncodeValues,
    /// Rotates queries by both rotations.
    RotateQueries,
    /// Attention of query rows over KV splits, giving partial results.
    Attention,
    /// Merges the partial results of the splits and rotates back.
    MergeAttention,
}

/// How a kernel's lanes work together. Every variant computes the same, but for rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KernelVariant {
    /// Workgroup memory and barriers alone: runs on every adapter.
    Portable,
    /// Subgroup operations where they help (feature `SUBGROUP`).
    Subgroup,
}

impl KernelVariant {
    /// Every variant.
    pub const ALL: [Self; 2] = [Self::Portable, Self::Subgroup];

    /// Name of the variant.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Subgroup => "subgroup",
        }
    }

    /// Features that a device needs to run it. Without them another variant is chosen.
    #[must_use]
    pub const fn features(self) -> wgpu::Features {
        match self {
            Self::Portable => wgpu::Features::empty(),
            Self::Subgroup => wgpu::Features::SUBGROUP,
        }
    }

    /// The variant of this name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|v| v.name() == name)
    }
}

impl Kernel {
    /// Every kernel.
    pub const ALL: [Self; 5] = [
        Self::EncodeKeys,
        Self::EncodeValues,
        Self::RotateQueries,
        Self::Attention,
        Self::MergeAttention,
    ];

    /// Name of the kernel, of its WGSL file and of its entry point.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::EncodeKeys => "encode_keys",
            Self::EncodeValues => "encode_values",
            Self::RotateQueries => "rotate_queries",
            Self::Attention => "attention",
            Self::MergeAttention => "merge_attention",
        }
    }

    /// The variant that runs where `wanted` is asked for: a kernel without a version of its own for a variant has
    /// the portable one.
    #[must_use]
    pub const fn version(self, wanted: KernelVariant) -> KernelVariant {
        match self {
            Self::MergeAttention => KernelVariant::Portable,
            _ => wanted,
        }
    }

    /// The WGSL files that make up the kernel's module, in order, as (name, text); see [`Kernel::version`].
    #[must_use]
    pub const fn files(self, variant: KernelVariant) -> &'static [(&'static str, &'static str)] {
        macro_rules! files {
            ($($name:literal),*) => {
                &[$(($name, include_str!(concat!("../shaders/", $name)))),*]
            };
        }
        match self {
            Self::EncodeKeys => match variant {
                KernelVariant::Portable => {
                    files!["common.wgsl", "encode.wgsl", "encode_keys.wgsl"]
                }
                KernelVariant::Subgroup => files![
                    "common.wgsl",
                    "encode.wgsl",
                    "common_subgroup.wgsl",
                    "encode_subgroup.wgsl",
                    "encode_keys_subgroup.wgsl"
                ],
            },
            Self::EncodeValues => match variant {
                KernelVariant::Portable => {
                    files!["common.wgsl", "encode.wgsl", "encode_values.wgsl"]
                }
                KernelVariant::Subgroup => files![
                    "common.wgsl",
                    "encode.wgsl",
                    "common_subgroup.wgsl",
                    "encode_subgroup.wgsl",
                    "encode_values_subgroup.wgsl"
                ],
            },
            Self::RotateQueries => match variant {
                KernelVariant::Portable => {
                    files!["common.wgsl", "rotate_params.wgsl", "rotate_queries.wgsl"]
                }
                KernelVariant::Subgroup => files![
                    "common.wgsl",
                    "rotate_params.wgsl",
                    "common_subgroup.wgsl",
                    "rotate_queries_subgroup.wgsl"
                ],
            },
            Self::Attention => match variant {
                KernelVariant::Portable => files![
                    "common.wgsl",
                    "attention_params.wgsl",
                    "attention_block.wgsl",
                    "attention.wgsl"
                ],
                KernelVariant::Subgroup => files![
                    "common.wgsl",
                    "attention_params.wgsl",
                    "attention_block.wgsl",
                    "attention_subgroup.wgsl"
                ],
            },
            Self::MergeAttention => {
                files![
                    "common.wgsl",
                    "attention_params.wgsl",
                    "merge_attention.wgsl"
                ]
            }
        }
    }

    /// The whole WGSL module.
    #[must_use]
    pub fn source(self, variant: KernelVariant) -> String {
        self.files(variant).iter().map(|(_, text)| *text).collect()
    }
}

/// Values of the `override` constants for one head dimension.
#[must_use]
pub fn constants(head_dim: HeadDim) -> [(&'static str, f64); 5] {
    let book = head_dim.codebook();
    [
        ("HEAD_DIM", f64::from(head_dim.get_u32())),
        ("INV_SQRT_HEAD_DIM", f64::from(head_dim.inv_sqrt())),
        ("BOUNDARY", f64::from(book.boundaries[2])),
        ("CENTROID_INNER", f64::from(book.centroids[2])),
        ("CENTROID_OUTER", f64::from(book.centroids[3])),
    ]
}

#[cfg(test)]
mod tests {
    use naga::valid::{
        Capabilities, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator,
    };

    use super::*;

    #[test]
    fn every_kernel_is_valid_wgsl_with_one_entry_point_of_its_name() {
        for (kernel, variant) in Kernel::ALL
            .into_iter()
            .flat_map(|k| KernelVariant::ALL.map(|v| (k, v)))
        {
            let source = kernel.source(variant);
            let module = naga::front::wgsl::parse_str(&source)
                .unwrap_or_else(|e| panic!("{}: {}", kernel.name(), e.emit_to_string(&source)));
            let (capabilities, operations, stages) = match variant {
                KernelVariant::Portable => (
                    Capabilities::empty(),
                    SubgroupOperationSet::empty(),
                    ShaderStages::empty(),
                ),
                KernelVariant::Subgroup => (
                    Capabilities::SUBGROUP,
                    SubgroupOperationSet::all(),
                    ShaderStages::COMPUTE,
                ),
            };
            Validator::new(ValidationFlags::all(), capabilities)
                .subgroup_operations(operations)
                .subgroup_stages(stages)
                .validate(&module)
                .unwrap_or_else(|e| panic!("{}: {e:?}", kernel.name()));
            let names: Vec<_> = module
                .entry_points
                .iter()
                .map(|e| e.name.as_str())
                .collect();
            assert_eq!(names, [kernel.name()]);
        }
    }

    #[test]
    fn versions_are_told_apart_by_their_files() {
        for kernel in Kernel::ALL {
            for variant in KernelVariant::ALL {
                assert_eq!(
                    kernel.files(variant) == kernel.files(KernelVariant::Portable),
                    kernel.version(variant) == KernelVariant::Portable,
                    "{kernel:?} {variant:?}"
                );
            }
        }
    }
}
