// Causal attention over keys and values in f16, uncompressed: what the library is measured against. No feature is
// needed, since two halves in a u32 are unpacked by a builtin.
//
// One workgroup for each (row, KV head, chunk of at most HEADS query heads of its group, split): all of those heads
// use one read of the keys and values. Its lanes form STREAMS streams of ROW_LANES lanes, which read one vector
// together, 16 bytes a lane. Each stream keeps an online softmax of its own; the streams are merged at the end,
// the splits by merge_splits.

override HEAD_DIM: u32;
const LANES = 128u;
// Query heads of a workgroup, and timesteps that a stream scores between two barriers.
const HEADS = 4u;
const STEPS = 4u;
override ROW_LANES: u32 = HEAD_DIM / 8u;
override STREAMS: u32 = LANES / ROW_LANES;
// A maximum of nothing: infinities are not reliable in WGSL.
const LOWEST = -3.0e38;

struct Params {
    n_heads: u32,
    n_kv_heads: u32,
    timesteps: u32,
    rows: u32,
    start_pos: u32,
    n_splits: u32,
    // Timesteps of a split.
    split: u32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
// Both [n_kv_heads, timesteps, HEAD_DIM] of f16, eight in an element.
@group(0) @binding(1) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> values: array<vec4<u32>>;
// [rows, n_heads, HEAD_DIM] of f32, four in an element.
@group(0) @binding(3) var<storage, read> queries: array<vec4<f32>>;
// Accumulators [rows, n_heads, n_splits, HEAD_DIM], then (maximum, sum) [rows, n_heads, n_splits, 2].
@group(0) @binding(4) var<storage, read_write> partials: array<f32>;

// Products of each lane: LANES for each step and head. At the end, sums of each stream.
var<workgroup> dots: array<f32, 2048>;
// STREAMS * STEPS * HEADS: most at HEAD_DIM 32.
var<workgroup> scores: array<f32, 512>;
// (maximum, sum) of each stream and head.
var<workgroup> states: array<vec2<f32>, 128>;

fn halves(word: vec2<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(word.x), unpack2x16float(word.y));
}

@compute @workgroup_size(128)
fn flash_decode_f16(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let group = params.n_heads / params.n_kv_heads;
    let chunks = (group + HEADS - 1u) / HEADS;
    var part = workgroup.y * workgroups.x + workgroup.x;
    // Uniform over the workgroup, as every condition on a barrier here.
    if (part >= params.rows * params.n_kv_heads * chunks * params.n_splits) {
        return;
    }
    let split = part % params.n_splits;
    part /= params.n_splits;
    let first_of_group = part % chunks * HEADS;
    part /= chunks;
    let kv_head = part % params.n_kv_heads;
    let row = part / params.n_kv_heads;
    let n_heads = min(HEADS, group - first_of_group);
    let first_head = kv_head * group + first_of_group;

    let stream = lane / ROW_LANES;
    let row_lane = lane % ROW_LANES;
    var q: array<vec4<f32>, 8>;
    var accumulators: array<vec4<f32>, 8>;
    var maxima: array<f32, 4>;
    var sums: array<f32, 4>;
    for (var h = 0u; h < HEADS; h++) {
        maxima[h] = LOWEST;
        if (h < n_heads) {
            let at = ((row * params.n_heads + first_head + h) * ROW_LANES + row_lane) * 2u;
            q[2u * h] = queries[at] * params.scale;
            q[2u * h + 1u] = queries[at + 1u] * params.scale;
        }
    }

    let first = split * params.split;
    let visible = min(params.start_pos + row + 1u, params.timesteps);
    let end = min(first + params.split, visible);
    for (var base = first; base < end; base += STREAMS * STEPS) {
        for (var s = 0u; s < STEPS; s++) {
            let t = base + s * STREAMS + stream;
            var key = vec4<u32>();
            if (t < end) {
                key = keys[(kv_head * params.timesteps + t) * ROW_LANES + row_lane];
            }
            let low = halves(key.xy);
            let high = halves(key.zw);
            for (var h = 0u; h < HEADS; h++) {
                let at = (((s * STREAMS) + stream) * HEADS + h) * ROW_LANES + row_lane;
                dots[at] = dot(q[2u * h], low) + dot(q[2u * h + 1u], high);
            }
        }
        workgroupBarrier();
        for (var p = lane; p < STREAMS * STEPS * HEADS; p += LANES) {
            var sum = 0.0;
            for (var i = 0u; i < ROW_LANES; i++) {
                // Each lane begins elsewhere, lest all meet in one bank.
                sum += dots[p * ROW_LANES + (i + lane) % ROW_LANES];
            }
            scores[p] = sum;
        }
        workgroupBarrier();
        for (var h = 0u; h < HEADS; h++) {
            var maximum = maxima[h];
            for (var s = 0u; s < STEPS; s++) {
                if (base + s * STREAMS + stream < end) {
                    maximum = max(maximum, scores[(s * STREAMS + stream) * HEADS + h]);
                }
            }
            // Of two equal maxima of nothing too: the factor is 1, of sums that are 0.
            let factor = exp(maxima[h] - maximum);
            maxima[h] = maximum;
            sums[h] *= factor;
            accumulators[2u * h] *= factor;
            accumulators[2u * h + 1u] *= factor;
        }
        for (var s = 0u; s < STEPS; s++) {
            let t = base + s * STREAMS + stream;
            if (t < end) {
                let value = values[(kv_head * params.timesteps + t) * ROW_LANES + row_lane];
                let low = halves(value.xy);
                let high = halves(value.zw);
                for (var h = 0u; h < HEADS; h++) {
                    let weight = exp(scores[(s * STREAMS + stream) * HEADS + h] - maxima[h]);
                    sums[h] += weight;
                    accumulators[2u * h] += weight * low;
                    accumulators[2u * h + 1u] += weight * high;
                }
            }
        }
    }

    for (var h = 0u; h < HEADS; h++) {
        if (row_lane == 0u) {
            states[stream * HEADS + h] = vec2<f32>(maxima[h], sums[h]);
        }
    }
    for (var h = 0u; h < n_heads; h++) {
        workgroupBarrier();
        var maximum = LOWEST;
        for (var s = 0u; s < STREAMS; s++) {
            maximum = max(maximum, states[s * HEADS + h].x);
        }
        let factor = exp(maxima[h] - maximum);
        let low = accumulators[2u * h] * factor;
        let high = accumulators[2u * h + 1u] * factor;
        for (var i = 0u; i < 4u; i++) {
            dots[stream * HEAD_DIM + row_lane * 8u + i] = low[i];
            dots[stream * HEAD_DIM + row_lane * 8u + 4u + i] = high[i];
        }
        workgroupBarrier();
        let part_of_head = (row * params.n_heads + first_head + h) * params.n_splits + split;
        for (var i = lane; i < HEAD_DIM; i += LANES) {
            var sum = 0.0;
            for (var s = 0u; s < STREAMS; s++) {
                sum += dots[s * HEAD_DIM + i];
            }
            partials[part_of_head * HEAD_DIM + i] = sum;
        }
        if (lane == 0u) {
            var sum = 0.0;
            for (var s = 0u; s < STREAMS; s++) {
                let state = states[s * HEADS + h];
                sum += state.y * exp(state.x - maximum);
            }
            let at = params.rows * params.n_heads * params.n_splits * HEAD_DIM + 2u * part_of_head;
            partials[at] = maximum;
            partials[at + 1u] = sum;
        }
    }
}

// [rows, n_heads, HEAD_DIM] of f32.
@group(0) @binding(5) var<storage, read_write> destination: array<f32>;

// One workgroup for each row and head.
@compute @workgroup_size(64)
fn merge_splits(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let vector = workgroup.y * workgroups.x + workgroup.x;
    let n_vectors = params.rows * params.n_heads;
    if (vector >= n_vectors) {
        return;
    }
    let first = vector * params.n_splits;
    let first_state = n_vectors * params.n_splits * HEAD_DIM + 2u * first;
    var maximum = LOWEST;
    for (var s = 0u; s < params.n_splits; s++) {
        maximum = max(maximum, partials[first_state + 2u * s]);
    }
    for (var i = lane; i < HEAD_DIM; i += 64u) {
        var output = 0.0;
        var sum = 0.0;
        for (var s = 0u; s < params.n_splits; s++) {
            let factor = exp(partials[first_state + 2u * s] - maximum);
            output += factor * partials[(first + s) * HEAD_DIM + i];
            sum += factor * partials[first_state + 2u * s + 1u];
        }
        // Every row sees its own timestep: the sum is at least 1.
        destination[vector * HEAD_DIM + i] = output / sum;
    }
}
