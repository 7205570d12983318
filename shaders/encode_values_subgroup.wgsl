// The subgroup variant of shaders/encode_values.wgsl: no workgroup memory and no barrier.
//
// One workgroup takes VECTORS vectors, VECTOR_LANES lanes each.

@compute @workgroup_size(64)
fn encode_values(
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
    for (var c = 0u; c < 4u; c++) {
        code_bytes |= pack_codes(quantise(unit.y[c]), c);
    }
    let code_word = gather_bytes(code_bytes, lane);

    if (found != vector) {
        return;
    }
    let row = vector / params.n_kv_heads;
    let head = vector % params.n_kv_heads;
    let slot = head * params.capacity + params.position + row;
    cache[slot * CODE_WORDS + word_of_lane(lane)] = select(code_word, 0u, unit.zero);
    if (lane == 0u) {
        cache[params.norms_start + slot] = select(norm_to_f16(unit.norm), 0u, unit.zero);
        count(unit.norm, unit.finite);
    }
}
