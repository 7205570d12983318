// Shared by the variants of rotate_queries: parameters and bindings.

struct RotateParams {
    // rows * n_heads.
    n_vectors: u32,
    // First elements of the source and of the rotated queries.
    source_start: u32,
    rotated_start: u32,
    // Index of the counter of queries zeroed as non-finite.
    counter: u32,
    polar: array<vec4<u32>, 2>,
    jl: array<vec4<u32>, 2>,
}

@group(0) @binding(0) var<uniform> params: RotateParams;
// [rows, n_heads, HEAD_DIM] f32, read as bits since it may hold anything.
@group(0) @binding(1) var<storage, read> source: array<u32>;
@group(0) @binding(3) var<storage, read_write> counters: array<atomic<u32>>;

fn source_element(vector: u32, element: u32) -> u32 {
    return source[params.source_start + vector * HEAD_DIM + element];
}
