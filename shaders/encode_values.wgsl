// Compresses value vectors: 2-bit codes of the rotated unit vector, and the norm.
// CPU twin: src/twin/encode_values.rs.
//
// One workgroup takes VECTORS vectors, VECTOR_LANES lanes each.

@compute @workgroup_size(64)
fn encode_values(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) invocation: u32,
) {
    let slot_in_workgroup = invocation / VECTOR_LANES;
    let lane = invocation % VECTOR_LANES;
    let first_lane = slot_in_workgroup * VECTOR_LANES;
    let base = slot_in_workgroup * HEAD_DIM;
    let vector = (workgroup.y * workgroups.x + workgroup.x) * VECTORS + slot_in_workgroup;
    let present = vector < params.rows * params.n_kv_heads;

    if (present) {
        lane_bits[invocation] = largest_bits_of_lane(vector, lane);
    } else {
        lane_bits[invocation] = 0u;
    }
    workgroupBarrier();

    let largest = largest_bits_of_vector(first_lane);
    let finite = largest < NON_FINITE_BITS;
    let usable = present && finite && largest >= SMALLEST_NORMAL_BITS;
    let shift = range_shift(largest);
    var x: Elements;
    if (usable) {
        x = load_scaled(vector, lane, shift);
    }
    lane_sums[invocation] = sum_of_squares(x);
    workgroupBarrier();

    let square = select(1.0, sum_of_vector(first_lane), usable);
    let inverse_norm = inverseSqrt(square);
    let norm = select(0.0, unscale_norm(square * inverse_norm, shift), usable);
    let zero = norm < VANISHING;

    for (var c = 0u; c < 4u; c++) {
        x[c] = with_signs(params.polar, transposed_elements(lane, c), x[c] * inverse_norm);
    }
    store_transposed(base, lane, butterflies(x, STRIDE));
    workgroupBarrier();

    let y = butterflies(load_blocked(base, lane), 1u) * INV_SQRT_HEAD_DIM;
    var code_word = 0u;
    for (var c = 0u; c < 4u; c++) {
        code_word |= pack_codes(quantise(y[c]), c);
    }

    if (!present) {
        return;
    }
    let row = vector / params.n_kv_heads;
    let head = vector % params.n_kv_heads;
    let slot = head * params.capacity + params.position + row;
    cache[slot * CODE_WORDS + lane] = select(code_word, 0u, zero);
    if (lane == 0u) {
        cache[params.norms_start + slot] = select(norm_to_f16(norm), 0u, zero);
        count(norm, finite);
    }
}
