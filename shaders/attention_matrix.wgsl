// The matrix variant of shaders/attention.wgsl, for many query rows: products by cooperative matrices of f16
// operands and f32 sums, SIDE query vectors a subgroup.
//
// Each tile of TILE timesteps is unpacked once for the BLOCK query vectors of a workgroup. Scores leave the
// matrices through workgroup memory; norms, scale and softmax stay in f32. Three things keep f16 operands
// harmless:
//   centroids  their ratio is kept by a pair of f16 numbers, within 2^-19; the common factor comes later;
//   queries    each vector is scaled by a power of two, which its scores are divided by;
//   weights    the weight times the value's norm, of each vector relative to a reference of its own and times a
//              power of two, so that the largest is between 2^5 and 2^15. When it would pass that, the sums are
//              rescaled. Where one timestep has all the weight, its product is exact.

@group(0) @binding(0) var<uniform> params: AttentionParams;
@group(0) @binding(1) var<storage, read> keys: array<u32>;
@group(0) @binding(2) var<storage, read> values: array<u32>;
// [rows, n_heads, 2, HEAD_DIM / 4] of vec4.
@group(0) @binding(3) var<storage, read> queries: array<vec4<f32>>;
// Accumulators [rows, n_heads, n_splits, HEAD_DIM], then (maximum, sum) [rows, n_heads, n_splits, 2].
@group(0) @binding(4) var<storage, read_write> partials: array<f32>;

// Lanes of every subgroup.
override SUBGROUP_LANES: u32;
// f16 numbers in the centroids' ratio, and what brings them back.
override MATRIX_INNER: f32;
override MATRIX_OUTER: f32;
override MATRIX_UNIT: f32;

// Query vectors of a workgroup.
const MATRIX_BLOCK = 64u;
const SUBGROUPS = MATRIX_BLOCK / SIDE;
override MATRIX_LANES: u32 = SUBGROUPS * SUBGROUP_LANES;
// Timesteps at a time.
const TILE = 2u * SIDE;
// Matrices side by side that span a vector; the variant is for up to 8.
override CHUNKS: u32 = HEAD_DIM / SIDE;
// Lanes that share a query vector in the softmax, and how far apart they are.
override PARTS: u32 = SUBGROUP_LANES / SIDE;

// A row of a tile in vec4: two more than it has, so that eight rows lie in different banks.
override TILE_ROW: u32 = HEAD_DIM / 4u + 2u;
const WIDEST_ROW = 2u * SIDE + 2u;
override TILE_SIZE: u32 = TILE * TILE_ROW;
// The tile's key codes, signs and value codes, [TILE, TILE_ROW] each; at first, the block's queries.
var<workgroup> tiles: array<vec4<f16>, max(3u * TILE, MATRIX_BLOCK) * WIDEST_ROW>;
// Of each subgroup: [polar, jl] sums, [TILE, SIDE] each; later a few matrices on their way.
const SCRATCH = 2u * TILE * SIDE;
var<workgroup> scratch: array<f32, SUBGROUPS * SCRATCH>;
// Of each subgroup: weights times norms, [TILE, SIDE].
var<workgroup> weighted: array<f16, SUBGROUPS * TILE * SIDE>;

// What goes with a timestep.
struct Factors {
    key_norm: f32,
    residual: f32,
    value_norm: f32,
    // e^this exceeds value_norm.
    value_log: f32,
}
var<workgroup> factors: array<Factors, TILE>;
var<workgroup> rescale_wanted: atomic<u32>;

const LOWEST = -3.0e38;
const LN_2 = 0.69314718;
// Of ln(weight times norm times the power of two): where a new reference begins, at most, and where it ends.
// e^10 < 2^15.
const NEW_HEADROOM = 5.0;
const MOST_HEADROOM = 10.0;

fn group_heads() -> u32 {
    return params.n_heads / params.n_kv_heads;
}

// To the eleven significant bits of f16, to nearest; the conversion itself may go to either neighbour, and a
// bias in the weights would not average out.
fn to_eleven_bits(v: vec4<f32>) -> vec4<f32> {
    return bitcast<vec4<f32>>((bitcast<vec4<u32>>(v) + vec4<u32>(0x1000u)) & vec4<u32>(0xffffe000u));
}

fn quad_of_codes(byte: u32) -> vec4<f16> {
    let codes = (vec4<u32>(byte) >> vec4<u32>(0u, 2u, 4u, 6u)) & vec4<u32>(3u);
    let inner = ((codes ^ (codes >> vec4<u32>(1u))) & vec4<u32>(1u)) == vec4<u32>(1u);
    let outer = vec4<f16>(f16(MATRIX_OUTER));
    let magnitude = select(outer, vec4<f16>(f16(MATRIX_INNER)), inner);
    return select(-magnitude, magnitude, codes >= vec4<u32>(2u));
}

fn quad_of_signs(nibble: u32) -> vec4<f16> {
    let positive = (vec4<u32>(nibble) & vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>(0u);
    return select(vec4<f16>(-1.0h), vec4<f16>(1.0h), positive);
}

// Unpacks timesteps `slot` .. of a KV head; past `last_slot` they repeat it.
fn load_tile(slot: u32, last_slot: u32, lane: u32) {
    for (var i = lane; i < TILE * (HEAD_DIM / 4u); i += MATRIX_LANES) {
        let t = i / (HEAD_DIM / 4u);
        let quad = i % (HEAD_DIM / 4u);
        let from_slot = min(slot + t, last_slot);
        let at = t * TILE_ROW + quad;
        let word = from_slot * CODE_WORDS + quad / 4u;
        let signs = keys[params.key_signs_start + from_slot * SIGN_WORDS + quad / 8u];
        tiles[at] = quad_of_codes(keys[word] >> (8u * (quad % 4u)));
        tiles[TILE_SIZE + at] = quad_of_signs(signs >> (4u * (quad % 8u)));
        tiles[2u * TILE_SIZE + at] = quad_of_codes(values[word] >> (8u * (quad % 4u)));
    }
    for (var t = lane; t < TILE; t += MATRIX_LANES) {
        let from_slot = min(slot + t, last_slot);
        let norms = keys[params.key_norms_start + from_slot];
        let value_norm = f16_to_norm(values[params.value_norms_start + from_slot] & 0xffffu);
        // value_norm < 2^(exponent + 1).
        let exponent = i32(bitcast<u32>(value_norm) >> 23u) - 127;
        factors[t] = Factors(
            f16_to_norm(norms & 0xffffu) * MATRIX_UNIT,
            f16_to_norm(norms >> 16u) * (params.gain / MATRIX_UNIT),
            value_norm,
            LN_2 * f32(exponent + 1),
        );
    }
}

fn load_left(first: u32, c: u32) -> Left {
    return coopLoadT<Left>(&tiles[first + min(c, CHUNKS - 1u) * (SIDE / 4u)], TILE_ROW);
}

// A subgroup's queries, one matrix for every SIDE dimensions.
fn load_lefts(first: u32) -> array<Left, 8> {
    return array<Left, 8>(
        load_left(first, 0u),
        load_left(first, 1u),
        load_left(first, 2u),
        load_left(first, 3u),
        load_left(first, 4u),
        load_left(first, 5u),
        load_left(first, 6u),
        load_left(first, 7u),
    );
}

fn load_keys(first: u32, c: u32) -> Right {
    // A key is a column.
    return coopLoad<Right>(&tiles[first + c * (SIDE / 4u)], TILE_ROW);
}

// Products of the queries with SIDE keys of a tile, [query, key].
fn multiply(left: array<Left, 8>, first: u32) -> Sums {
    var sums: Sums;
    sums = coopMultiplyAdd(left[0], load_keys(first, 0u), sums);
    sums = coopMultiplyAdd(left[1], load_keys(first, 1u), sums);
    if (CHUNKS > 2u) {
        sums = coopMultiplyAdd(left[2], load_keys(first, 2u), sums);
        sums = coopMultiplyAdd(left[3], load_keys(first, 3u), sums);
    }
    if (CHUNKS > 4u) {
        sums = coopMultiplyAdd(left[4], load_keys(first, 4u), sums);
        sums = coopMultiplyAdd(left[5], load_keys(first, 5u), sums);
        sums = coopMultiplyAdd(left[6], load_keys(first, 6u), sums);
        sums = coopMultiplyAdd(left[7], load_keys(first, 7u), sums);
    }
    return sums;
}

// Adds SIDE timesteps' weighted values, of chunk `c`.
fn add_values(sums: Sums, left: Left, first: u32, c: u32) -> Sums {
    return coopMultiplyAdd(left, coopLoadT<Right>(&tiles[first + c * (SIDE / 4u)], TILE_ROW), sums);
}

// Puts four matrices into a subgroup's scratch, [4, row, column].
fn store_four(at: u32, a: Sums, b: Sums, c: Sums, d: Sums) {
    coopStoreT(a, &scratch[at], SIDE);
    coopStoreT(b, &scratch[at + SIDE * SIDE], SIDE);
    coopStoreT(c, &scratch[at + 2u * SIDE * SIDE], SIDE);
    coopStoreT(d, &scratch[at + 3u * SIDE * SIDE], SIDE);
}

// Multiplies row `row` of the four matrices, whose lanes have its factor.
fn scale_four(at: u32, row: u32, part: u32, factor: f32) {
    for (var i = part; i < 4u * SIDE; i += PARTS) {
        scratch[at + (i / SIDE) * (SIDE * SIDE) + row * SIDE + i % SIDE] *= factor;
    }
}

fn load_scaled_sums(at: u32, i: u32) -> Sums {
    return coopLoadT<Sums>(&scratch[at + i * (SIDE * SIDE)], SIDE);
}

@compute @workgroup_size(MATRIX_LANES)
fn attention(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
) {
    let task = workgroup.y * workgroups.x + workgroup.x;
    let heads = group_heads();
    let n_blocks = (params.rows * heads + MATRIX_BLOCK - 1u) / MATRIX_BLOCK;
    let split = task % params.n_splits;
    let block = (task / params.n_splits) % n_blocks;
    let kv_head = task / (params.n_splits * n_blocks);
    if (kv_head >= params.n_kv_heads) {
        return;
    }
    let lane = subgroup * SUBGROUP_LANES + subgroup_lane;
    // Of the subgroup's matrices.
    let row = subgroup_lane % SIDE;
    let part = subgroup_lane / SIDE;

    // The lane's query vector. The last block may be short: it repeats its last vector, and writes it once.
    let found = block * MATRIX_BLOCK + subgroup * SIDE + row;
    let most = params.rows * heads - 1u;
    let clamped = min(found, most);
    let query_row = clamped / heads;
    let vector = query_row * params.n_heads + kv_head * heads + clamped % heads;
    let first_visible = params.start_pos + params.row_base + 1u;
    let visible = first_visible + query_row;
    // Timesteps of the split that the block's last query sees.
    let last_row = min(block * MATRIX_BLOCK + MATRIX_BLOCK - 1u, most) / heads;
    let begin = min(split * params.split_len, first_visible + last_row);
    let end = begin + min(params.split_len, first_visible + last_row - begin);
    let own_end = min(visible, end);

    // The queries as matrices, each vector scaled by a power of two that brings its largest element into
    // [2^12, 2^13).
    let source = params.queries_start + vector * (HEAD_DIM / 2u);
    var largest = 0u;
    for (var i = part; i < HEAD_DIM / 2u; i += PARTS) {
        let bits = bitcast<vec4<u32>>(queries[source + i]) & vec4<u32>(0x7fffffffu);
        largest = max(largest, max(max(bits.x, bits.y), max(bits.z, bits.w)));
    }
    for (var distance = SIDE; distance < SUBGROUP_LANES; distance *= 2u) {
        largest = max(largest, subgroupShuffleXor(largest, distance));
    }
    let shift = clamp(139 - i32(largest >> 23u), -126, 126);
    let query_scale = power_of_two(shift);
    let score_scale = power_of_two(-shift);
    let own_row = (subgroup * SIDE + row) * TILE_ROW;
    let first_row = subgroup * SIDE * TILE_ROW;
    for (var i = part; i < HEAD_DIM / 4u; i += PARTS) {
        tiles[own_row + i] = vec4<f16>(to_eleven_bits(query_scale * queries[source + i]));
    }
    workgroupBarrier();
    let polar = load_lefts(first_row);
    workgroupBarrier();
    for (var i = part; i < HEAD_DIM / 4u; i += PARTS) {
        tiles[own_row + i] = vec4<f16>(to_eleven_bits(
            query_scale * queries[source + HEAD_DIM / 4u + i],
        ));
    }
    workgroupBarrier();
    let jl = load_lefts(first_row);

    let at = subgroup * SCRATCH;
    let weights_at = subgroup * TILE * SIDE;
    var maximum = LOWEST;
    // Of the lane's timesteps alone.
    var sum = 0.0;
    // Largest score + ln(norm) so far. The sums hold weights relative to the score `reference`, times
    // 2^exponent.
    var highest = LOWEST;
    var reference = LOWEST;
    var exponent = 0;
    var o0: Sums;
    var o1: Sums;
    var o2: Sums;
    var o3: Sums;
    var o4: Sums;
    var o5: Sums;
    var o6: Sums;
    var o7: Sums;
    let first_slot = kv_head * params.capacity;
    for (var step = begin; step < end; step += TILE) {
        // Nobody needs the last tile or the flag any more.
        workgroupBarrier();
        load_tile(first_slot + step, first_slot + end - 1u, lane);
        if (lane == 0u) {
            atomicStore(&rescale_wanted, 0u);
        }
        workgroupBarrier();

        for (var k = 0u; k < 2u; k++) {
            let first_key = k * SIDE * TILE_ROW;
            let scores_at = at + k * SIDE * SIDE;
            // [key, query].
            coopStore(multiply(polar, first_key), &scratch[scores_at], SIDE);
            coopStore(multiply(jl, TILE_SIZE + first_key), &scratch[scores_at + TILE * SIDE], SIDE);
        }
        workgroupBarrier();

        // Scores take the place of the polar sums.
        var tile_maximum = LOWEST;
        var tile_highest = LOWEST;
        for (var t = part; t < TILE; t += PARTS) {
            let score_at = at + t * SIDE + row;
            let f = factors[t];
            let inner = score_scale * scratch[score_at]
                + f.residual * (score_scale * scratch[score_at + TILE * SIDE]);
            let score = params.scale * (f.key_norm * inner);
            scratch[score_at] = score;
            if (step + t < own_end) {
                tile_maximum = max(tile_maximum, score);
                if (f.value_norm > 0.0) {
                    tile_highest = max(tile_highest, score + f.value_log);
                }
            }
        }
        for (var distance = SIDE; distance < SUBGROUP_LANES; distance *= 2u) {
            tile_maximum = max(tile_maximum, subgroupShuffleXor(tile_maximum, distance));
            tile_highest = max(tile_highest, subgroupShuffleXor(tile_highest, distance));
        }
        let larger = max(maximum, tile_maximum);
        sum *= weight(maximum - larger);
        maximum = larger;
        highest = max(highest, tile_highest);
        let overflows = highest - reference + LN_2 * f32(exponent) > MOST_HEADROOM;
        var rescale = 1.0;
        if (overflows) {
            let next = i32(floor((NEW_HEADROOM + maximum - highest) / LN_2));
            rescale = weight(reference - maximum) * power_of_two(next - exponent);
            reference = maximum;
            exponent = next;
            atomicStore(&rescale_wanted, 1u);
        }
        // From weights relative to the maximum to those that the sums hold.
        let distance = maximum - reference;
        let to_reference = select(exp(distance), 1.0, distance == 0.0) * power_of_two(exponent);
        for (var t = part; t < TILE; t += PARTS) {
            let score_at = at + t * SIDE + row;
            let live = step + t < own_end;
            let w = select(0.0, weight(min(scratch[score_at] - maximum, 0.0)), live);
            sum += w;
            let norm = factors[t].value_norm;
            let of_value = select(0.0, w * (to_reference * norm), w * norm > 0.0);
            weighted[weights_at + t * SIDE + row] = f16(to_eleven_bits(vec4<f32>(of_value)).x);
        }
        if (workgroupUniformLoad(&rescale_wanted) != 0u) {
            store_four(at, o0, o1, o2, o3);
            workgroupBarrier();
            scale_four(at, row, part, rescale);
            workgroupBarrier();
            o0 = load_scaled_sums(at, 0u);
            o1 = load_scaled_sums(at, 1u);
            o2 = load_scaled_sums(at, 2u);
            o3 = load_scaled_sums(at, 3u);
            if (CHUNKS > 4u) {
                workgroupBarrier();
                store_four(at, o4, o5, o6, o7);
                workgroupBarrier();
                scale_four(at, row, part, rescale);
                workgroupBarrier();
                o4 = load_scaled_sums(at, 0u);
                o5 = load_scaled_sums(at, 1u);
                o6 = load_scaled_sums(at, 2u);
                o7 = load_scaled_sums(at, 3u);
            }
        }

        for (var k = 0u; k < 2u; k++) {
            // A query is a row.
            let left = coopLoad<Left>(&weighted[weights_at + k * SIDE * SIDE], SIDE);
            let first = 2u * TILE_SIZE + k * SIDE * TILE_ROW;
            o0 = add_values(o0, left, first, 0u);
            o1 = add_values(o1, left, first, 1u);
            if (CHUNKS > 2u) {
                o2 = add_values(o2, left, first, 2u);
                o3 = add_values(o3, left, first, 3u);
            }
            if (CHUNKS > 4u) {
                o4 = add_values(o4, left, first, 4u);
                o5 = add_values(o5, left, first, 5u);
                o6 = add_values(o6, left, first, 6u);
                o7 = add_values(o7, left, first, 7u);
            }
        }
    }

    for (var distance = SIDE; distance < SUBGROUP_LANES; distance *= 2u) {
        sum += subgroupShuffleXor(sum, distance);
    }
    // Back to weights relative to the maximum. Without a visible timestep, or where every value is zero, the sums
    // are zero.
    let empty = reference == LOWEST;
    let factor = select(MATRIX_UNIT * weight(reference - maximum) * power_of_two(-exponent), 0.0, empty);
    let partial = vector * params.n_splits + split;
    workgroupBarrier();
    for (var half = 0u; half < 2u; half++) {
        if (half == 0u) {
            store_four(at, o0, o1, o2, o3);
        } else {
            store_four(at, o4, o5, o6, o7);
        }
        workgroupBarrier();
        // Lanes along dimensions.
        for (var i = 0u; i < 4u * SIDE; i += PARTS) {
            // Row of the matrices; `i / SIDE` is the matrix.
            let matrix = i / SIDE;
            let of_row = i % SIDE + part;
            let chunk = 4u * half + matrix;
            let value = scratch[at + matrix * (SIDE * SIDE) + of_row * SIDE + row]
                * subgroupShuffle(factor, of_row);
            let of_partial = subgroupShuffle(partial, of_row);
            let present = subgroupShuffle(select(0u, 1u, found == clamped), of_row);
            if (chunk < CHUNKS && present != 0u) {
                partials[of_partial * HEAD_DIM + chunk * SIDE + row] = value;
            }
        }
        workgroupBarrier();
    }
    if (found == clamped && part == 0u) {
        let n_parts = params.rows * params.n_heads * params.n_splits;
        partials[n_parts * HEAD_DIM + 2u * partial] = select(maximum, 0.0, sum == 0.0);
        partials[n_parts * HEAD_DIM + 2u * partial + 1u] = sum;
    }
}
