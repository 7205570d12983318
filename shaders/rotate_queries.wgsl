// Rotates query vectors once by `polar` (to meet the codes) and once more by `jl` (to meet the residual
// signs). CPU twin: src/twin/rotate_queries.rs.
//
// One workgroup takes VECTORS vectors, VECTOR_LANES lanes each.

// [rows, n_heads, 2, HEAD_DIM] f32: the rotated query, then the twice rotated one.
@group(0) @binding(2) var<storage, read_write> rotated: array<f32>;

var<workgroup> lane_bits: array<u32, 64>;

@compute @workgroup_size(64)
fn rotate_queries(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let slot_in_workgroup = invocation / VECTOR_LANES;
    let lane = invocation % VECTOR_LANES;
    let first_lane = slot_in_workgroup * VECTOR_LANES;
    let base = slot_in_workgroup * HEAD_DIM;
    let vector = (workgroup.y * workgroups.x + workgroup.x) * VECTORS + slot_in_workgroup;
    let present = vector < params.n_vectors;

    var bits: array<vec4<u32>, 4>;
    var largest_of_lane = 0u;
    if (present) {
        for (var c = 0u; c < 4u; c++) {
            let at = transposed_elements(lane, c);
            bits[c] = vec4<u32>(
                source_element(vector, at.x),
                source_element(vector, at.y),
                source_element(vector, at.z),
                source_element(vector, at.w),
            );
            let magnitudes = bits[c] & vec4<u32>(0x7fffffffu);
            largest_of_lane = max(
                largest_of_lane,
                max(max(magnitudes.x, magnitudes.y), max(magnitudes.z, magnitudes.w)),
            );
        }
    }
    lane_bits[invocation] = largest_of_lane;
    workgroupBarrier();

    var largest = 0u;
    for (var i = 0u; i < VECTOR_LANES; i++) {
        largest = max(largest, lane_bits[first_lane + i]);
    }
    let finite = largest < NON_FINITE_BITS;
    let usable = present && finite && largest >= SMALLEST_NORMAL_BITS;
    // Scaled by an exact power of two, the sums of the transform cannot overflow before the factor
    // 1/sqrt(d) brings them back.
    let shift = range_shift(largest);
    let scale = power_of_two(shift);
    let unscale = power_of_two(-shift);

    var x: Elements;
    if (usable) {
        for (var c = 0u; c < 4u; c++) {
            x[c] = with_signs(
                params.polar,
                transposed_elements(lane, c),
                scale * bitcast<vec4<f32>>(bits[c]),
            );
        }
    }
    store_transposed(base, lane, butterflies(x, STRIDE));
    workgroupBarrier();

    let q_rot = butterflies(load_blocked(base, lane), 1u) * INV_SQRT_HEAD_DIM;
    let destination = params.rotated_start + vector * 2u * HEAD_DIM;
    if (present) {
        for (var c = 0u; c < 4u; c++) {
            let value = q_rot[c] * unscale;
            let at = destination + lane * LANE_ELEMENTS + 4u * c;
            rotated[at] = value.x;
            rotated[at + 1u] = value.y;
            rotated[at + 2u] = value.z;
            rotated[at + 3u] = value.w;
        }
    }

    var w: Elements;
    for (var c = 0u; c < 4u; c++) {
        w[c] = with_signs(params.jl, blocked_elements(lane, c), q_rot[c]);
    }
    store_blocked(base, lane, butterflies(w, 1u));
    workgroupBarrier();

    if (!present) {
        return;
    }
    let q_jl = butterflies(load_transposed(base, lane), STRIDE) * INV_SQRT_HEAD_DIM;
    for (var c = 0u; c < 4u; c++) {
        let value = q_jl[c] * unscale;
        let at = destination + HEAD_DIM + transposed_elements(lane, c);
        rotated[at.x] = value.x;
        rotated[at.y] = value.y;
        rotated[at.z] = value.z;
        rotated[at.w] = value.w;
    }
    if (lane == 0u && !finite) {
        atomicAdd(&counters[params.counter], 1u);
    }
}
