// Merges the partial results of the KV splits of each query row and head, normalises, and rotates
// back. CPU twin: src/twin/attention.rs, which needs no splits.
//
// One workgroup takes VECTORS output vectors, VECTOR_LANES lanes each.

@group(0) @binding(0) var<uniform> params: AttentionParams;
@group(0) @binding(1) var<storage, read> partials: array<f32>;
// [rows, n_heads, HEAD_DIM] f32.
@group(0) @binding(2) var<storage, read_write> destination: array<f32>;

@compute @workgroup_size(64)
fn merge_attention(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let slot_in_workgroup = invocation / VECTOR_LANES;
    let lane = invocation % VECTOR_LANES;
    let base = slot_in_workgroup * HEAD_DIM;
    let vector = (workgroup.y * workgroups.x + workgroup.x) * VECTORS + slot_in_workgroup;
    let n_vectors = params.rows * params.n_heads;
    let n_parts = n_vectors * params.n_splits;
    let present = vector < n_vectors;

    var output: Elements;
    if (present) {
        let first_part = vector * params.n_splits;
        let states = n_parts * HEAD_DIM + 2u * first_part;
        // A split that saw nothing has sum 0 and takes no part.
        var maximum = 0.0;
        var any = false;
        for (var s = 0u; s < params.n_splits; s++) {
            if (partials[states + 2u * s + 1u] > 0.0) {
                let split_maximum = partials[states + 2u * s];
                maximum = select(split_maximum, max(maximum, split_maximum), any);
                any = true;
            }
        }
        var sum = 0.0;
        for (var s = 0u; s < params.n_splits; s++) {
            let split_sum = partials[states + 2u * s + 1u];
            if (split_sum > 0.0) {
                let w = weight(partials[states + 2u * s] - maximum);
                sum += w * split_sum;
                for (var c = 0u; c < 4u; c++) {
                    let at = (first_part + s) * HEAD_DIM + lane * LANE_ELEMENTS + 4u * c;
                    output[c] += w * vec4<f32>(
                        partials[at],
                        partials[at + 1u],
                        partials[at + 2u],
                        partials[at + 3u],
                    );
                }
            }
        }
        // Nothing visible gives zeros. Otherwise the sum is at least 1, of the largest score.
        output *= select(0.0, 1.0 / max(sum, 0.5), any);
    }
    store_blocked(base, lane, butterflies(output, 1u));
    workgroupBarrier();

    if (!present) {
        return;
    }
    let rotated_back = butterflies(load_transposed(base, lane), STRIDE) * INV_SQRT_HEAD_DIM;
    let first = params.destination_start + vector * HEAD_DIM;
    for (var c = 0u; c < 4u; c++) {
        let elements = transposed_elements(lane, c);
        let value = with_signs(params.polar, elements, rotated_back[c]);
        let at = first + elements;
        destination[at.x] = value.x;
        destination[at.y] = value.y;
        destination[at.z] = value.z;
        destination[at.w] = value.w;
    }
}
