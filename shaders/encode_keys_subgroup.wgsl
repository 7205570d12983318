// The subgroup variant of shaders/encode_keys.wgsl: no workgroup memory and no barrier.
//
// One workgroup takes VECTORS vectors, VECTOR_LANES lanes each.

@compute @workgroup_size(64)
fn encode_keys(
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
    let vector = min(found, params.rows * params.n_kv_heads - 1u);
    let unit = rotated_unit(vector, lane);

    var code_bytes = 0u;
    var residual: Elements;
    for (var c = 0u; c < 4u; c++) {
        let codes = quantise(unit.y[c]);
        code_bytes |= pack_codes(codes, c);
        residual[c] = unit.y[c] - centroids(codes);
    }
    let code_word = gather_bytes(code_bytes, lane);

    let residual_square = sum_over_vector(sum_of_squares(residual));
    let residual_vanishes = residual_square < VANISHING * VANISHING;
    let inverse_residual_norm = inverseSqrt(select(residual_square, 1.0, residual_vanishes));
    let residual_norm = residual_square * inverse_residual_norm;

    // z = RHT(residual / residual_norm; jl). The factor 1/sqrt(d) is left out: only the signs of z matter.
    for (var c = 0u; c < 4u; c++) {
        residual[c] = with_sign_nibble(
            jl_nibble(group_of_four(lane, c)),
            residual[c] * inverse_residual_norm,
        );
    }
    let z = transform(residual, lane);
    var sign_bytes = 0u;
    for (var c = 0u; c < 4u; c++) {
        let bits = select(vec4<u32>(0u), vec4<u32>(1u, 2u, 4u, 8u), z[c] >= vec4<f32>(0.0));
        sign_bytes |= (bits.x | bits.y | bits.z | bits.w) << (8u * c);
    }
    // Four nibbles of signs, of the elements whose codes the lane has.
    let nibbles = gather_bytes(sign_bytes, lane);
    let half = (nibbles | (nibbles >> 4u)) & 0x00ff00ffu;
    let half_word = (half | (half >> 8u)) & 0xffffu;
    // The lane that has the other half of the sign word.
    let other_half = subgroupShuffleXor(half_word, select(1u, 4u, VECTOR_LANES >= 8u));

    if (found != vector) {
        return;
    }
    let row = vector / params.n_kv_heads;
    let head = vector % params.n_kv_heads;
    let slot = head * params.capacity + params.position + row;
    let word = word_of_lane(lane);
    cache[slot * CODE_WORDS + word] = select(code_word, 0u, unit.zero);
    if (word % 2u == 0u) {
        cache[params.signs_start + slot * SIGN_WORDS + word / 2u] =
            select(half_word | (other_half << 16u), 0u, unit.zero || residual_vanishes);
    }
    if (lane == 0u) {
        let norms = norm_to_f16(unit.norm) | (norm_to_f16(residual_norm) << 16u);
        cache[params.norms_start + slot] = select(norms, 0u, unit.zero);
        count(unit.norm, unit.finite);
    }
}
