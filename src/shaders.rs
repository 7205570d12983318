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
    /// Attention of many query rows by cooperative matrices of 8 × 8, f16 operands and f32 sums; the other kernels
    /// are the subgroup variant's. Experimental in wgpu, and so opt-in: see [`crate::GpuOptions::matrix`].
    Matrix8,
    /// The same by matrices of 16 × 16.
    Matrix16,
}

/// Query vectors of one KV head that a workgroup of `attention` takes in the variants without matrices (`BLOCK`).
const BLOCK: u32 = 4;
/// The same with matrices (`MATRIX_BLOCK`).
const MATRIX_BLOCK: u32 = 64;

impl KernelVariant {
    /// Every variant.
    pub const ALL: [Self; 4] = [
        Self::Portable,
        Self::Subgroup,
        Self::Matrix8,
        Self::Matrix16,
    ];

    /// Name of the variant.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Subgroup => "subgroup",
            Self::Matrix8 => "matrix8",
            Self::Matrix16 => "matrix16",
        }
    }

    /// Features that a device needs to run it. Without them another variant is chosen.
    #[must_use]
    pub const fn features(self) -> wgpu::Features {
        match self {
            Self::Portable => wgpu::Features::empty(),
            Self::Subgroup => wgpu::Features::SUBGROUP,
            Self::Matrix8 | Self::Matrix16 => wgpu::Features::SUBGROUP
                .union(wgpu::Features::SHADER_F16)
                .union(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX),
        }
    }

    /// Rows and columns of its matrices, if it uses any.
    #[must_use]
    pub const fn matrix_side(self) -> Option<u32> {
        match self {
            Self::Portable | Self::Subgroup => None,
            Self::Matrix8 => Some(8),
            Self::Matrix16 => Some(16),
        }
    }

    /// The matrix variant that an adapter offers, if it does: for [`crate::GpuOptions::matrix`].
    #[must_use]
    pub fn matrix(adapter: &wgpu::Adapter) -> Option<Self> {
        if !adapter.features().contains(Self::Matrix16.features()) {
            return None;
        }
        let offered = adapter.cooperative_matrix_properties();
        [Self::Matrix16, Self::Matrix8].into_iter().find(|variant| {
            offered.iter().any(|p| {
                let side = variant.matrix_side();
                [p.m_size, p.n_size, p.k_size]
                    .into_iter()
                    .all(|s| Some(s) == side)
                    && p.ab_type == wgpu::CooperativeScalarType::F16
                    && p.cr_type == wgpu::CooperativeScalarType::F32
            })
        })
    }

    /// Query vectors of one KV head that a workgroup of `attention` takes.
    pub(crate) const fn attention_block(self) -> u32 {
        match self.matrix_side() {
            None => BLOCK,
            Some(_) => MATRIX_BLOCK,
        }
    }

    /// Lanes of a workgroup of `attention`, on a device with subgroups of `subgroup` lanes.
    pub(crate) const fn attention_lanes(self, subgroup: u32) -> u32 {
        match self.matrix_side() {
            None => 64,
            Some(side) => MATRIX_BLOCK / side * subgroup,
        }
    }

    /// Bytes of workgroup memory of `attention` with matrices: tiles, scratch, weights and factors, with some to
    /// spare.
    pub(crate) const fn matrix_workgroup_bytes(side: u32) -> u32 {
        let tile = 2 * side;
        let rows = if 3 * tile > MATRIX_BLOCK {
            3 * tile
        } else {
            MATRIX_BLOCK
        };
        rows * (2 * side + 2) * 8
            + MATRIX_BLOCK / side * (2 * tile * side * 4 + tile * side * 2)
            + tile * 16
            + 64
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
    /// the portable one, or that of subgroups in place of matrices.
    #[must_use]
    pub const fn version(self, wanted: KernelVariant) -> KernelVariant {
        match self {
            Self::MergeAttention => KernelVariant::Portable,
            Self::Attention => wanted,
            Self::EncodeKeys | Self::EncodeValues | Self::RotateQueries => match wanted {
                KernelVariant::Portable => KernelVariant::Portable,
                _ => KernelVariant::Subgroup,
            },
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
                _ => files![
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
                _ => files![
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
                _ => files![
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
                KernelVariant::Matrix8 => files![
                    "matrix_8.wgsl",
                    "common.wgsl",
                    "attention_params.wgsl",
                    "attention_matrix.wgsl"
                ],
                KernelVariant::Matrix16 => files![
                    "matrix_16.wgsl",
                    "common.wgsl",
                    "attention_params.wgsl",
                    "attention_matrix.wgsl"
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

/// Values of the `override` constants of a kernel for one head dimension, on a device with subgroups of `subgroup`
/// lanes (which only the matrix variants ask for).
#[must_use]
pub fn constants(
    kernel: Kernel,
    variant: KernelVariant,
    head_dim: HeadDim,
    subgroup: u32,
) -> Vec<(&'static str, f64)> {
    let book = head_dim.codebook();
    let mut constants = vec![
        ("HEAD_DIM", f64::from(head_dim.get_u32())),
        ("INV_SQRT_HEAD_DIM", f64::from(head_dim.inv_sqrt())),
        ("BOUNDARY", f64::from(book.boundaries[2])),
        ("CENTROID_INNER", f64::from(book.centroids[2])),
        ("CENTROID_OUTER", f64::from(book.centroids[3])),
    ];
    if kernel == Kernel::Attention && variant.matrix_side().is_some() {
        let [inner, outer, unit] = matrix_centroids(head_dim);
        constants.extend([
            ("SUBGROUP_LANES", f64::from(subgroup)),
            ("MATRIX_INNER", inner),
            ("MATRIX_OUTER", outer),
            ("MATRIX_UNIT", unit),
        ]);
    }
    constants
}

/// Two numbers that f16 holds in the ratio of the centroids, as nearly as any of 11 bits are, and the
/// unit that makes them the centroids: [inner, outer, unit].
#[must_use]
pub fn matrix_centroids(head_dim: HeadDim) -> [f64; 3] {
    let book = head_dim.codebook();
    let (inner, outer) = (f64::from(book.centroids[2]), f64::from(book.centroids[3]));
    let mut best = [1.0, 1.0, f64::INFINITY];
    // Significands of the inner one; the outer one is rounded to f16.
    for significand in 1024..2048 {
        let first = f64::from(significand) / 1024.0;
        let second = f64::from(half::f16::from_f64(first * outer / inner));
        let error = (second / first * inner / outer - 1.0).abs();
        if error < best[2] {
            best = [first, second, error];
        }
    }
    let [first, second, _] = best;
    [first, second, inner / first]
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
                KernelVariant::Matrix8 | KernelVariant::Matrix16 => (
                    Capabilities::SUBGROUP
                        | Capabilities::SHADER_FLOAT16
                        | Capabilities::COOPERATIVE_MATRIX,
                    SubgroupOperationSet::all(),
                    ShaderStages::COMPUTE,
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
                for other in KernelVariant::ALL {
                    assert_eq!(
                        kernel.files(variant) == kernel.files(other),
                        kernel.version(variant) == kernel.version(other),
                        "{kernel:?} {variant:?} {other:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn f16_keeps_the_ratio_of_the_centroids() {
        for head_dim in HeadDim::ALL {
            let book = head_dim.codebook();
            let [inner, outer, unit] = matrix_centroids(head_dim);
            for (number, centroid) in [(inner, book.centroids[2]), (outer, book.centroids[3])] {
                assert_eq!(f64::from(half::f16::from_f64(number)), number);
                let error = (number * unit / f64::from(centroid) - 1.0).abs();
                assert!(error < 1.0 / f64::from(1 << 19), "{head_dim}: {error:e}");
            }
        }
    }
}
