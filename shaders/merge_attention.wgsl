// Merges the partial results of the KV splits of each query row and head, normalises, and rotates
// back. CPU twin: src/twin/attention.rs, which needs no splits.
//
// One workgroup for each output vector: COLUMNS lanes, four dimensions each, for every SPLIT_LANES-th split.

@group(0) @binding(0) var<uniform> params: AttentionParams;
@group(0) @binding(1) var<storage, read> partials: array<f32>;
// [rows, n_heads, HEAD_DIM] f32.
@group(0) @binding(2) var<storage, read_write> destination: array<f32>;

const MERGE_LANES = 256u;
// MERGE_LANES = FOLD * FOLD: a reduction takes two steps.
const FOLD = 16u;
override COLUMNS: u32 = HEAD_DIM / 4u;
override SPLIT_LANES: u32 = MERGE_LANES / COLUMNS;
// Below every score.
const LOWEST = -3.4e38;

var<workgroup> lane_values: array<f32, 256>;
var<workgroup> folded: array<f32, 16>;

// Four dimensions of what is exchanged.
fn store_column(column: u32, value: vec4<f32>) {
    exchange[4u * column] = value.x;
    exchange[4u * column + 1u] = value.y;
    exchange[4u * column + 2u] = value.z;
    exchange[4u * column + 3u] = value.w;
}

fn load_column(column: u32) -> vec4<f32> {
    let at = 4u * column;
    return vec4<f32>(exchange[at], exchange[at + 1u], exchange[at + 2u], exchange[at + 3u]);
}

@compute @workgroup_size(256)
fn merge_attention(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let vector = workgroup.y * workgroups.x + workgroup.x;
    let n_vectors = params.rows * params.n_heads;
    // Uniform over the workgroup, as every condition on a barrier here.
    if (vector >= n_vectors) {
        return;
    }
    let first_part = vector * params.n_splits;
    let states = n_vectors * params.n_splits * HEAD_DIM + 2u * first_part;

    // A split that saw nothing has sum 0 and takes no part.
    var own_maximum = LOWEST;
    for (var s = lane; s < params.n_splits; s += MERGE_LANES) {
        if (partials[states + 2u * s + 1u] > 0.0) {
            own_maximum = max(own_maximum, partials[states + 2u * s]);
        }
    }
    lane_values[lane] = own_maximum;
    workgroupBarrier();
    if (lane < FOLD) {
        var found = LOWEST;
        for (var i = 0u; i < FOLD; i++) {
            found = max(found, lane_values[FOLD * lane + i]);
        }
        folded[lane] = found;
    }
    workgroupBarrier();
    var maximum = LOWEST;
    for (var i = 0u; i < FOLD; i++) {
        maximum = max(maximum, folded[i]);
    }

    let column = lane % COLUMNS;
    let split_lane = lane / COLUMNS;
    var own_sum = 0.0;
    var accumulator = vec4<f32>(0.0);
    for (var first = 0u; first < params.n_splits; first += MERGE_LANES) {
        let split = first + lane;
        var split_weight = 0.0;
        if (split < params.n_splits) {
            let split_sum = partials[states + 2u * split + 1u];
            if (split_sum > 0.0) {
                split_weight = weight(partials[states + 2u * split] - maximum);
                own_sum += split_weight * split_sum;
            }
        }
        lane_values[lane] = split_weight;
        workgroupBarrier();
        let n = min(MERGE_LANES, params.n_splits - first);
        for (var i = split_lane; i < n; i += SPLIT_LANES) {
            let at = (first_part + first + i) * HEAD_DIM + 4u * column;
            accumulator += lane_values[i] * vec4<f32>(
                partials[at],
                partials[at + 1u],
                partials[at + 2u],
                partials[at + 3u],
            );
        }
        workgroupBarrier();
    }

    lane_values[lane] = own_sum;
    store_column(lane, accumulator);
    workgroupBarrier();
    if (lane < FOLD) {
        var found = 0.0;
        for (var i = 0u; i < FOLD; i++) {
            found += lane_values[FOLD * lane + i];
        }
        folded[lane] = found;
    }
    workgroupBarrier();
    var total = vec4<f32>(0.0);
    if (lane < COLUMNS) {
        var sum = 0.0;
        for (var i = 0u; i < FOLD; i++) {
            sum += folded[i];
        }
        for (var s = 0u; s < SPLIT_LANES; s++) {
            total += load_column(s * COLUMNS + lane);
        }
        // Nothing visible gives zeros. Otherwise the sum is at least 1, of the largest score.
        total *= select(0.0, 1.0 / max(sum, 0.5), sum > 0.0);
    }
    workgroupBarrier();

    if (lane < COLUMNS) {
        store_column(lane, total);
    }
    workgroupBarrier();

    // Each lane overwrites just what it has read.
    if (lane < VECTOR_LANES) {
        store_blocked(0u, lane, butterflies(load_blocked(0u, lane), 1u));
    }
    workgroupBarrier();

    if (lane >= VECTOR_LANES) {
        return;
    }
    let rotated_back = butterflies(load_transposed(0u, lane), STRIDE) * INV_SQRT_HEAD_DIM;
    let first = params.destination_start + vector * HEAD_DIM;
    for (var c = 0u; c < 4u; c++) {
        let elements = transposed_elements(lane, c);
        let value = with_signs(params.polar, elements, rotated_back[c]);
        let at = first + elements;
        destination[at.x] = value.x;
        destination[at.y] = value.y;
        destination[at.z] = value.z;
        destination[at.w] = value.w;
    }
}
