//! The one place that asks for experimental features of wgpu, as [`turboquant_wgpu::KernelVariant::Matrix16`] needs.
#![allow(unsafe_code)]

/// Leave to use experimental features.
pub(crate) fn features() -> wgpu::ExperimentalFeatures {
    // SAFETY: the function asks its caller to know that experimental features may have bugs that break memory
    // safety, and to report them. Finding such bugs is what this harness is run for; it asks for one experimental
    // feature, cooperative matrices, and its shaders read and write matrices inside their arrays alone: every
    // index is made of constants, a subgroup's number below SUBGROUPS and offsets below one tile.
    unsafe { wgpu::ExperimentalFeatures::enabled() }
}
