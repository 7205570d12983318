// Compresses key vectors: 2-bit codes of the rotated unit vector, signs of the rotated residual,
// and both norms. CPU twin: src/twin/encode_keys.rs.
//
// One workgroup takes VECTORS vectors, VECTOR_LANES lanes each.

@compute @workgroup_size(64)
fn encode_keys(
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

    // y = RHT(x / norm; polar): wide butterflies, exchange, narrow butterflies.
    for (var c = 0u; c < 4u; c++) {
        x[c] = with_signs(params.polar, transposed_elements(lane, c), x[c] * inverse_norm);
    }
    store_transposed(base, lane, butterflies(x, STRIDE));
    workgroupBarrier();

    let y = butterflies(load_blocked(base, lane), 1u) * INV_SQRT_HEAD_DIM;
    var code_word = 0u;
    var residual: Elements;
    for (var c = 0u; c < 4u; c++) {
        let codes = quantise(y[c]);
        code_word |= pack_codes(codes, c);
        residual[c] = y[c] - centroids(codes);
    }
    lane_sums[invocation] = sum_of_squares(residual);
    workgroupBarrier();

    let residual_square = sum_of_vector(first_lane);
    let residual_vanishes = residual_square < VANISHING * VANISHING;
    let inverse_residual_norm = inverseSqrt(select(residual_square, 1.0, residual_vanishes));
    let residual_norm = residual_square * inverse_residual_norm;

    // z = RHT(residual / residual_norm; jl), the other way round: narrow butterflies first.
    for (var c = 0u; c < 4u; c++) {
        residual[c] = with_signs(
            params.jl,
            blocked_elements(lane, c),
            residual[c] * inverse_residual_norm,
        );
    }
    store_blocked(base, lane, butterflies(residual, 1u));
    workgroupBarrier();

    // The factor 1/sqrt(d) is left out: only the signs of z matter.
    let z = butterflies(load_transposed(base, lane), STRIDE);
    // Each lane overwrites just what it has read.
    store_transposed(base, lane, z);
    workgroupBarrier();

    if (!present) {
        return;
    }
    let row = vector / params.n_kv_heads;
    let head = vector % params.n_kv_heads;
    let slot = head * params.capacity + params.position + row;
    cache[slot * CODE_WORDS + lane] = select(code_word, 0u, zero);
    if (lane < SIGN_WORDS) {
        var sign_word = 0u;
        for (var i = 0u; i < 32u; i++) {
            sign_word |= select(0u, 1u << i, exchange[base + lane * 32u + i] >= 0.0);
        }
        cache[params.signs_start + slot * SIGN_WORDS + lane] =
            select(sign_word, 0u, zero || residual_vanishes);
    }
    if (lane == 0u) {
        let norms = norm_to_f16(norm) | (norm_to_f16(residual_norm) << 16u);
        cache[params.norms_start + slot] = select(norms, 0u, zero);
        count(norm, finite);
    }
}
