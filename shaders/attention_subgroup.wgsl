// The subgroup variant of shaders/attention.wgsl: the lanes of a timestep add their words' scores by
// shuffles, so that no barrier stands in the loop.
//
// CODE_WORDS lanes, a power of two, have to lie in one subgroup, and subgroups have to be full.

@compute @workgroup_size(64)
fn attention(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) subgroup_lanes: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
) {
    let task = block_task(workgroup.y * workgroups.x + workgroup.x);
    if (task.kv_head >= params.n_kv_heads) {
        return;
    }
    // Not local_invocation_index: how that maps to subgroups is the implementation's choice.
    let lane = subgroup * subgroup_lanes + subgroup_lane;
    let word = lane % CODE_WORDS;
    let group = lane / CODE_WORDS;
    let polar = load_queries(task, word, 0u);
    let jl = load_queries(task, word, HEAD_DIM / 4u);
    var state: State;
    if (task.begin < task.end) {
        // Lanes past the end repeat the last timestep, so that every lane takes part in each shuffle.
        let last = task.end - 1u;
        let first = task.first_slot + min(task.begin + group, last);
        var next_key = load_key_word(first, word);
        var next_value = load_value_word(first, word);
        for (var step = task.begin; step < task.end; step += GROUPS) {
            let timestep = step + group;
            let key = next_key;
            let value = next_value;
            // Loaded one step ahead of its use.
            let ahead = task.first_slot + min(timestep + GROUPS, last);
            next_key = load_key_word(ahead, word);
            next_value = load_value_word(ahead, word);

            var score = word_score(polar, jl, key);
            for (var distance = 1u; distance < CODE_WORDS; distance *= 2u) {
                score += subgroupShuffleXor(score, distance);
            }
            let live = vec4<u32>(timestep) < min(task.visible, vec4<u32>(task.end));
            state = absorb(state, live, score, value);
        }
    }
    finish(task, state, lane);
}
