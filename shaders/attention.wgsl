// Causal attention of one query row and head over one KV split, on compressed keys and values, with an
// online softmax. Writes a partial result in the rotated domain; merge_attention finishes it.
// CPU twin: src/twin/attention.rs.
//
// One workgroup for each (row, head, split). It walks its timesteps in tiles of 64: a lane scores
// one timestep, then gathers one word (16 dimensions) of the values of every (64 / CODE_WORDS)-th.

@group(0) @binding(0) var<uniform> params: AttentionParams;
@group(0) @binding(1) var<storage, read> keys: array<u32>;
@group(0) @binding(2) var<storage, read> values: array<u32>;
// [rows, n_heads, 2, HEAD_DIM / 4] of vec4.
@group(0) @binding(3) var<storage, read> queries: array<vec4<f32>>;
// Accumulators [rows, n_heads, n_splits, HEAD_DIM], then (maximum, sum) [rows, n_heads, n_splits, 2].
@group(0) @binding(4) var<storage, read_write> partials: array<f32>;

const TILE = 64u;
override GROUPS: u32 = LANES / CODE_WORDS;

// Rotated query, then the twice rotated one.
var<workgroup> query: array<vec4<f32>, 128>;
var<workgroup> tile_scores: array<f32, 64>;
// softmax weight times value norm.
var<workgroup> tile_weights: array<f32, 64>;

fn score(slot: u32) -> f32 {
    var polar_sum = vec4<f32>(0.0);
    for (var w = 0u; w < CODE_WORDS; w++) {
        let word = keys[slot * CODE_WORDS + w];
        for (var b = 0u; b < 4u; b++) {
            polar_sum += query[4u * w + b] * centroids(unpack_codes(word, b));
        }
    }
    var jl_sum = vec4<f32>(0.0);
    for (var w = 0u; w < SIGN_WORDS; w++) {
        let word = keys[params.key_signs_start + slot * SIGN_WORDS + w];
        for (var b = 0u; b < 8u; b++) {
            let bits = (vec4<u32>(word >> (4u * b)) >> vec4<u32>(0u, 1u, 2u, 3u)) & vec4<u32>(1u);
            let q = query[HEAD_DIM / 4u + 8u * w + b];
            jl_sum += select(-q, q, bits == vec4<u32>(1u));
        }
    }
    let norms = keys[params.key_norms_start + slot];
    let norm = f16_to_norm(norms & 0xffffu);
    let residual_norm = f16_to_norm(norms >> 16u);
    let polar_term = (polar_sum.x + polar_sum.y) + (polar_sum.z + polar_sum.w);
    let jl_term = (jl_sum.x + jl_sum.y) + (jl_sum.z + jl_sum.w);
    return params.scale * (norm * (polar_term + residual_norm * params.gain * jl_term));
}

@compute @workgroup_size(64)
fn attention(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let part = workgroup.y * workgroups.x + workgroup.x;
    let n_parts = params.rows * params.n_heads * params.n_splits;
    // Uniform over the workgroup, as every condition on a barrier here.
    if (part >= n_parts) {
        return;
    }
    let split = part % params.n_splits;
    let head = (part / params.n_splits) % params.n_heads;
    let row = part / (params.n_splits * params.n_heads);
    let kv_head = head / (params.n_heads / params.n_kv_heads);
    let first_slot = kv_head * params.capacity;
    let visible = params.start_pos + params.row_base + row + 1u;
    let begin = min(split * params.split_len, visible);
    let end = begin + min(params.split_len, visible - begin);

    for (var i = lane; i < HEAD_DIM / 2u; i += LANES) {
        let vector = row * params.n_heads + head;
        query[i] = queries[params.queries_start + vector * (HEAD_DIM / 2u) + i];
    }
    workgroupBarrier();

    // This lane's part of the value sum: word `word` of the timesteps `group`, `group` + GROUPS, ..
    let word = lane % CODE_WORDS;
    let group = lane / CODE_WORDS;
    var accumulator: Elements;
    var maximum = 0.0;
    var sum = 0.0;
    for (var tile = begin; tile < end; tile += TILE) {
        let timestep = tile + lane;
        let live = timestep < end;
        // Lanes past the end repeat the tile's first timestep, so that the maximum needs no mask.
        let scored = select(tile, timestep, live);
        let own_score = score(first_slot + scored);
        tile_scores[lane] = own_score;
        workgroupBarrier();

        var tile_maximum = tile_scores[0];
        for (var i = 1u; i < TILE; i++) {
            tile_maximum = max(tile_maximum, tile_scores[i]);
        }
        let old_maximum = select(maximum, tile_maximum, tile == begin);
        maximum = max(old_maximum, tile_maximum);
        let rescale = weight(old_maximum - maximum);
        let own_weight = select(0.0, weight(own_score - maximum), live);
        sum = sum * rescale + own_weight;
        let value_norm = f16_to_norm(values[params.value_norms_start + first_slot + scored] & 0xffffu);
        tile_weights[lane] = own_weight * value_norm;
        workgroupBarrier();

        accumulator *= rescale;
        let tile_len = min(TILE, end - tile);
        for (var i = group; i < tile_len; i += GROUPS) {
            let codes = values[(first_slot + tile + i) * CODE_WORDS + word];
            let w = tile_weights[i];
            for (var c = 0u; c < 4u; c++) {
                accumulator[c] += w * centroids(unpack_codes(codes, c));
            }
        }
    }

    // No lane can still be reading tile_scores: every tile ends with reads of tile_weights only.
    store_blocked(0u, lane, accumulator);
    tile_scores[lane] = sum;
    workgroupBarrier();

    for (var i = lane; i < HEAD_DIM; i += LANES) {
        var total = 0.0;
        for (var g = 0u; g < GROUPS; g++) {
            total += exchange[g * HEAD_DIM + i];
        }
        partials[part * HEAD_DIM + i] = total;
    }
    if (lane == 0u) {
        var total = 0.0;
        for (var i = 0u; i < LANES; i++) {
            total += tile_scores[i];
        }
        partials[n_parts * HEAD_DIM + 2u * part] = maximum;
        partials[n_parts * HEAD_DIM + 2u * part + 1u] = total;
    }
}
