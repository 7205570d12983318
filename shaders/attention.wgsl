// Causal attention of up to BLOCK query vectors that share a KV head over one KV split, on compressed keys
// and values, with an online softmax. Writes partial results in the rotated domain; merge_attention
// finishes them. CPU twin: src/twin/attention.rs.
//
// One workgroup for each (KV head, block, split). A lane holds one word's worth of dimensions (16) of
// the block's queries in registers, and unpacks each word that it reads once for all of them. CODE_WORDS
// lanes together make a timestep; GROUPS of them walk the split side by side, each with a maximum, a sum and
// accumulators of its own until the end.

@compute @workgroup_size(64)
fn attention(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let task = block_task(workgroup.y * workgroups.x + workgroup.x);
    // Uniform over the workgroup, as every condition on a barrier here.
    if (task.kv_head >= params.n_kv_heads) {
        return;
    }
    let word = lane % CODE_WORDS;
    let group = lane / CODE_WORDS;
    let polar = load_queries(task, word, 0u);
    let jl = load_queries(task, word, HEAD_DIM / 4u);
    var state: State;
    for (var tile = task.begin; tile < task.end; tile += TILE) {
        for (var i = group; i < TILE; i += GROUPS) {
            if (tile + i < task.end) {
                let key = load_key_word(task.first_slot + tile + i, word);
                word_scores[i * CODE_WORDS + word] = word_score(polar, jl, key);
            }
        }
        workgroupBarrier();

        for (var i = lane; i < TILE; i += LANES) {
            if (tile + i < task.end) {
                var sum = word_scores[i * CODE_WORDS];
                for (var w = 1u; w < CODE_WORDS; w++) {
                    sum += word_scores[i * CODE_WORDS + w];
                }
                scores[i] = sum;
            }
        }
        workgroupBarrier();

        // The next tile's word_scores are not read here, and its scores are written past a barrier.
        for (var i = group; i < TILE; i += GROUPS) {
            let timestep = tile + i;
            if (timestep < task.end) {
                let live = vec4<u32>(timestep) < task.visible;
                let value = load_value_word(task.first_slot + timestep, word);
                state = absorb(state, live, scores[i], value);
            }
        }
    }
    finish(task, state, lane);
}
