// The subgroup variant of shaders/rotate_queries.wgsl: no workgroup memory and no barrier.
//
// One workgroup takes VECTORS vectors, VECTOR_LANES lanes each.

// [rows, n_heads, 2, HEAD_DIM / 4] of vec4: the rotated query, then the twice rotated one.
@group(0) @binding(2) var<storage, read_write> rotated: array<vec4<f32>>;

@compute @workgroup_size(64)
fn rotate_queries(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) subgroup_lanes: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
) {
    let invocation = subgroup_order(subgroup, subgroup_lanes, subgroup_lane);
    let lane = invocation % VECTOR_LANES;
    let found = (workgroup.y * workgroups.x + workgroup.x) * VECTORS + invocation / VECTOR_LANES;
    // Lanes past the end repeat the last vector, so that every lane takes part in each shuffle.
    let vector = min(found, params.n_vectors - 1u);

    let bits = load_bits(vector, lane);
    let largest = largest_over_vector(largest_bits(bits));
    let finite = largest < NON_FINITE_BITS;
    // Scaled by an exact power of two, the sums of the transform cannot overflow before the factor
    // 1/sqrt(d) brings them back.
    let shift = range_shift(largest);
    let unscale = power_of_two(-shift);

    var x: Elements;
    if (finite && largest >= SMALLEST_NORMAL_BITS) {
        x = scaled(bits, shift);
    }
    for (var c = 0u; c < 4u; c++) {
        x[c] = with_sign_nibble(polar_nibble(group_of_four(lane, c)), x[c]);
    }
    let q_rot = transform(x, lane) * INV_SQRT_HEAD_DIM;

    var w: Elements;
    for (var c = 0u; c < 4u; c++) {
        w[c] = with_sign_nibble(jl_nibble(group_of_four(lane, c)), q_rot[c]);
    }
    let q_jl = transform(w, lane) * INV_SQRT_HEAD_DIM;

    if (found != vector) {
        return;
    }
    let destination = params.rotated_start / 4u + vector * (HEAD_DIM / 2u);
    for (var c = 0u; c < 4u; c++) {
        let at = destination + group_of_four(lane, c);
        rotated[at] = q_rot[c] * unscale;
        rotated[at + HEAD_DIM / 4u] = q_jl[c] * unscale;
    }
    if (lane == 0u && !finite) {
        atomicAdd(&counters[params.counter], 1u);
    }
}
