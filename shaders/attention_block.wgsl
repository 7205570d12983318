// Shared by the attention kernels that keep a block of query vectors in registers.

@group(0) @binding(0) var<uniform> params: AttentionParams;
@group(0) @binding(1) var<storage, read> keys: array<u32>;
@group(0) @binding(2) var<storage, read> values: array<u32>;
// [rows, n_heads, 2, HEAD_DIM / 4] of vec4.
@group(0) @binding(3) var<storage, read> queries: array<vec4<f32>>;
// Accumulators [rows, n_heads, n_splits, HEAD_DIM], then (maximum, sum) [rows, n_heads, n_splits, 2].
@group(0) @binding(4) var<storage, read_write> partials: array<f32>;

// Query vectors of a workgroup; a vec4 holds a score of each.
const BLOCK = 4u;
override GROUPS: u32 = LANES / CODE_WORDS;
// Timesteps between two barriers, 2 for each lane.
override TILE: u32 = 2u * GROUPS;

// What a workgroup does.
struct Task {
    kv_head: u32,
    block: u32,
    split: u32,
    // First record of the KV head.
    first_slot: u32,
    // Timesteps of the split that the block's last query sees.
    begin: u32,
    end: u32,
    // Timesteps that each query sees.
    visible: vec4<u32>,
}

// One query vector of a block.
struct BlockVector {
    // row * n_heads + head.
    index: u32,
    row: u32,
    present: bool,
}

fn group_heads() -> u32 {
    return params.n_heads / params.n_kv_heads;
}

fn block_vector(task: Task, v: u32) -> BlockVector {
    let heads = group_heads();
    let found = task.block * BLOCK + v;
    // The last block may be short: it repeats its last vector, and writes it once.
    let clamped = min(found, params.rows * heads - 1u);
    let row = clamped / heads;
    let head = task.kv_head * heads + clamped % heads;
    return BlockVector(row * params.n_heads + head, row, found == clamped);
}

fn block_task(workgroup: u32) -> Task {
    let n_blocks = (params.rows * group_heads() + BLOCK - 1u) / BLOCK;
    var task: Task;
    task.split = workgroup % params.n_splits;
    task.block = (workgroup / params.n_splits) % n_blocks;
    task.kv_head = workgroup / (params.n_splits * n_blocks);
    task.first_slot = task.kv_head * params.capacity;
    let first_visible = params.start_pos + params.row_base + 1u;
    task.visible = vec4<u32>(
        first_visible + block_vector(task, 0u).row,
        first_visible + block_vector(task, 1u).row,
        first_visible + block_vector(task, 2u).row,
        first_visible + block_vector(task, 3u).row,
    );
    task.begin = min(task.split * params.split_len, task.visible.w);
    task.end = task.begin + min(params.split_len, task.visible.w - task.begin);
    return task;
}

// Arrays of Elements are indexed by constants alone, so that they stay in registers.

// The dimensions of word `word` of the block's vectors, of the half of the rotated queries that begins
// `half` vec4s in.
fn load_queries(task: Task, word: u32, half: u32) -> array<Elements, 4> {
    let first = params.queries_start + half + 4u * word;
    return array<Elements, 4>(
        query_word(first + block_vector(task, 0u).index * (HEAD_DIM / 2u)),
        query_word(first + block_vector(task, 1u).index * (HEAD_DIM / 2u)),
        query_word(first + block_vector(task, 2u).index * (HEAD_DIM / 2u)),
        query_word(first + block_vector(task, 3u).index * (HEAD_DIM / 2u)),
    );
}

fn query_word(at: u32) -> Elements {
    return Elements(queries[at], queries[at + 1u], queries[at + 2u], queries[at + 3u]);
}

const SIGN_BIT = 0x80000000u;

// Centroids of the sixteen codes of a word.
fn word_centroids(word: u32) -> Elements {
    // Bit 2i: code i is one of the two inner ones.
    let inner = word ^ (word >> 1u);
    // The sign bit of a centroid is the complement of its code's upper bit.
    let negative = ~word;
    return Elements(
        byte_centroids(inner, negative << 24u),
        byte_centroids(inner >> 8u, negative << 16u),
        byte_centroids(inner >> 16u, negative << 8u),
        byte_centroids(inner >> 24u, negative),
    );
}

// Four centroids: `inner` from its lowest byte, `negative` from its highest.
fn byte_centroids(inner: u32, negative: u32) -> vec4<f32> {
    let is_inner = (vec4<u32>(inner) & vec4<u32>(1u, 4u, 16u, 64u)) != vec4<u32>(0u);
    let magnitude = select(vec4<f32>(CENTROID_OUTER), vec4<f32>(CENTROID_INNER), is_inner);
    let sign = (vec4<u32>(negative) << vec4<u32>(6u, 4u, 2u, 0u)) & vec4<u32>(SIGN_BIT);
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(magnitude) | sign);
}

const ONE_BITS = 0x3f800000u;

// +1 for each set bit of the lower half of a word, else -1.
fn half_word_signs(half_word: u32) -> Elements {
    let negative = ~half_word;
    return Elements(
        nibble_signs(negative << 28u),
        nibble_signs(negative << 24u),
        nibble_signs(negative << 20u),
        nibble_signs(negative << 16u),
    );
}

fn nibble_signs(negative: u32) -> vec4<f32> {
    let sign = (vec4<u32>(negative) << vec4<u32>(3u, 2u, 1u, 0u)) & vec4<u32>(SIGN_BIT);
    return bitcast<vec4<f32>>(sign | vec4<u32>(ONE_BITS));
}

fn product(a: Elements, b: Elements) -> f32 {
    let sum = a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
    return (sum.x + sum.y) + (sum.z + sum.w);
}

// One word of a record, with what goes with it.
struct KeyWord {
    codes: u32,
    // In the lower half.
    signs: u32,
    norms: u32,
}

struct ValueWord {
    codes: u32,
    norm: u32,
}

fn load_key_word(slot: u32, word: u32) -> KeyWord {
    let signs = keys[params.key_signs_start + slot * SIGN_WORDS + word / 2u];
    return KeyWord(
        keys[slot * CODE_WORDS + word],
        signs >> (16u * (word % 2u)),
        keys[params.key_norms_start + slot],
    );
}

fn load_value_word(slot: u32, word: u32) -> ValueWord {
    return ValueWord(values[slot * CODE_WORDS + word], values[params.value_norms_start + slot]);
}

// One word's part of the scores of a record, before the factor scale.
fn word_score(polar: array<Elements, 4>, jl: array<Elements, 4>, key: KeyWord) -> vec4<f32> {
    let codes = word_centroids(key.codes);
    let signs = half_word_signs(key.signs);
    let norm = f16_to_norm(key.norms & 0xffffu);
    let residual = f16_to_norm(key.norms >> 16u) * params.gain;
    let polar_term = vec4<f32>(
        product(polar[0], codes),
        product(polar[1], codes),
        product(polar[2], codes),
        product(polar[3], codes),
    );
    let jl_term = vec4<f32>(
        product(jl[0], signs),
        product(jl[1], signs),
        product(jl[2], signs),
        product(jl[3], signs),
    );
    return norm * (polar_term + residual * jl_term);
}

// What a lane has seen: the largest score, the sum of weights, and the weighted values of its word.
struct State {
    maximum: vec4<f32>,
    sum: vec4<f32>,
    values: array<Elements, 4>,
}

fn weights(x: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(weight(x.x), weight(x.y), weight(x.z), weight(x.w));
}

// Takes one timestep in for the queries that are `live`. `unscaled` are its scores before the factor
// scale.
fn absorb(before: State, live: vec4<bool>, unscaled: vec4<f32>, value: ValueWord) -> State {
    var state = before;
    let score = params.scale * unscaled;
    let first = state.sum == vec4<f32>(0.0);
    let larger = live & (first | (score > state.maximum));
    if (any(larger)) {
        // A factor of 1 where nothing changes.
        let rescale = select(
            vec4<f32>(1.0),
            weights(min(state.maximum - score, vec4<f32>(0.0))),
            larger & !first,
        );
        state.maximum = select(state.maximum, score, larger);
        state.sum *= rescale;
        state.values[0] *= rescale.x;
        state.values[1] *= rescale.y;
        state.values[2] *= rescale.z;
        state.values[3] *= rescale.w;
    }
    let w = select(vec4<f32>(0.0), weights(score - state.maximum), live);
    state.sum += w;
    let weighted = w * f16_to_norm(value.norm & 0xffffu);
    let codes = word_centroids(value.codes);
    state.values[0] += weighted.x * codes;
    state.values[1] += weighted.y * codes;
    state.values[2] += weighted.z * codes;
    state.values[3] += weighted.w * codes;
    return state;
}

// The accumulators of vector `v`.
fn values_of(state: State, v: u32) -> Elements {
    var found = state.values[0];
    if (v == 1u) {
        found = state.values[1];
    } else if (v == 2u) {
        found = state.values[2];
    } else if (v == 3u) {
        found = state.values[3];
    }
    return found;
}

fn part(task: Task, vector: BlockVector) -> u32 {
    return vector.index * params.n_splits + task.split;
}

// Dimensions 4 `column` .. 4 `column` + 3 of a partial result.
fn store_partial(task: Task, vector: BlockVector, column: u32, value: vec4<f32>) {
    let at = part(task, vector) * HEAD_DIM + 4u * column;
    partials[at] = value.x;
    partials[at + 1u] = value.y;
    partials[at + 2u] = value.z;
    partials[at + 3u] = value.w;
}

fn store_state(task: Task, vector: BlockVector, maximum: f32, sum: f32) {
    let n_parts = params.rows * params.n_heads * params.n_splits;
    let at = n_parts * HEAD_DIM + 2u * part(task, vector);
    partials[at] = maximum;
    partials[at + 1u] = sum;
}

// Small, since WebGPU has workgroup memory cleared: some drivers compile that into a store for each word.
var<workgroup> word_scores: array<vec4<f32>, 128>;
var<workgroup> scores: array<vec4<f32>, 64>;

// Merges the groups of a workgroup and writes the block's partial results. It holds barriers: every
// lane calls it, once, at the end.
fn finish(task: Task, state: State, lane: u32) {
    let word = lane % CODE_WORDS;
    let group = lane / CODE_WORDS;
    let none = vec4<f32>(0.0);
    workgroupBarrier();
    if (word == 0u) {
        scores[group] = state.maximum;
        scores[GROUPS + group] = state.sum;
    }
    workgroupBarrier();

    // A group that saw nothing has sum 0 and takes no part.
    var maximum = none;
    var seen = vec4<bool>(false);
    for (var g = 0u; g < GROUPS; g++) {
        let live = scores[GROUPS + g] > none;
        let larger = select(scores[g], max(maximum, scores[g]), seen);
        maximum = select(maximum, larger, live);
        seen = seen | live;
    }
    var sum = none;
    for (var g = 0u; g < GROUPS; g++) {
        let live = scores[GROUPS + g] > none;
        sum += select(none, scores[GROUPS + g] * weights(scores[g] - maximum), live);
    }
    let rescale = select(none, weights(state.maximum - maximum), state.sum > none);
    for (var v = 0u; v < BLOCK; v++) {
        let rescaled = rescale[v] * values_of(state, v);
        let vector = block_vector(task, v);
        // Two of the four columns at a time.
        for (var half = 0u; half < 2u; half++) {
            word_scores[2u * lane] = rescaled[2u * half];
            word_scores[2u * lane + 1u] = rescaled[2u * half + 1u];
            workgroupBarrier();
            if (vector.present && lane < 2u * CODE_WORDS) {
                var total = none;
                for (var g = 0u; g < GROUPS; g++) {
                    total += word_scores[g * 2u * CODE_WORDS + lane];
                }
                store_partial(task, vector, 4u * (lane / 2u) + 2u * half + lane % 2u, total);
            }
            workgroupBarrier();
        }
        if (vector.present && lane == 0u) {
            store_state(task, vector, maximum[v], sum[v]);
        }
    }
}
