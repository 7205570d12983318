// Shared by every kernel: specialisation constants, exact conversions, and the pieces of the
// Walsh-Hadamard transform.
//
// A vector of HEAD_DIM elements is worked on by HEAD_DIM / 16 lanes, 16 elements each, in one of two
// layouts:
//   blocked     element 16 * lane + k
//   transposed  element 16 * (k / STRIDE) + STRIDE * lane + k % STRIDE,  STRIDE = 256 / HEAD_DIM
// In the blocked layout a lane holds all partners of the butterflies of half-width 1..8, in the
// transposed one those of half-width 16..HEAD_DIM / 2. One exchange through workgroup memory lies
// between. Helpers hold no barrier: barriers stand in the entry points, in uniform control flow.

override HEAD_DIM: u32;
override INV_SQRT_HEAD_DIM: f32;
// The quantiser (see src/codebook.rs): it is symmetric, with its middle boundary at 0.
override BOUNDARY: f32;
override CENTROID_INNER: f32;
override CENTROID_OUTER: f32;

const LANES = 64u;
const LANE_ELEMENTS = 16u;
override VECTOR_LANES: u32 = HEAD_DIM / LANE_ELEMENTS;
override VECTORS: u32 = LANES / VECTOR_LANES;
override STRIDE: u32 = LANE_ELEMENTS / VECTOR_LANES;
override CODE_WORDS: u32 = HEAD_DIM / 16u;
override SIGN_WORDS: u32 = HEAD_DIM / 32u;

// A lane's 16 elements: element 4 * column + row.
alias Elements = mat4x4<f32>;

var<workgroup> exchange: array<f32, 1024>;

fn transposed_index(lane: u32, k: u32) -> u32 {
    return (k / STRIDE) * LANE_ELEMENTS + lane * STRIDE + k % STRIDE;
}

fn stage_1(v: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
}

fn stage_2(v: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(v.xy + v.zw, v.xy - v.zw);
}

// Butterflies (a, b) -> (a + b, a - b) among a lane's elements, of half-width `first`, 2 `first`, .. 8.
fn butterflies(x: Elements, first: u32) -> Elements {
    var v = x;
    if (first <= 1u) {
        v = Elements(stage_1(v[0]), stage_1(v[1]), stage_1(v[2]), stage_1(v[3]));
    }
    if (first <= 2u) {
        v = Elements(stage_2(v[0]), stage_2(v[1]), stage_2(v[2]), stage_2(v[3]));
    }
    if (first <= 4u) {
        v = Elements(v[0] + v[1], v[0] - v[1], v[2] + v[3], v[2] - v[3]);
    }
    if (first <= 8u) {
        v = Elements(v[0] + v[2], v[1] + v[3], v[0] - v[2], v[1] - v[3]);
    }
    return v;
}

fn store_blocked(base: u32, lane: u32, v: Elements) {
    for (var c = 0u; c < 4u; c++) {
        let at = base + lane * LANE_ELEMENTS + 4u * c;
        let column = v[c];
        exchange[at] = column.x;
        exchange[at + 1u] = column.y;
        exchange[at + 2u] = column.z;
        exchange[at + 3u] = column.w;
    }
}

fn load_blocked(base: u32, lane: u32) -> Elements {
    var v: Elements;
    for (var c = 0u; c < 4u; c++) {
        let at = base + lane * LANE_ELEMENTS + 4u * c;
        v[c] = vec4<f32>(exchange[at], exchange[at + 1u], exchange[at + 2u], exchange[at + 3u]);
    }
    return v;
}

fn store_transposed(base: u32, lane: u32, v: Elements) {
    for (var c = 0u; c < 4u; c++) {
        let column = v[c];
        exchange[base + transposed_index(lane, 4u * c)] = column.x;
        exchange[base + transposed_index(lane, 4u * c + 1u)] = column.y;
        exchange[base + transposed_index(lane, 4u * c + 2u)] = column.z;
        exchange[base + transposed_index(lane, 4u * c + 3u)] = column.w;
    }
}

fn load_transposed(base: u32, lane: u32) -> Elements {
    var v: Elements;
    for (var c = 0u; c < 4u; c++) {
        v[c] = vec4<f32>(
            exchange[base + transposed_index(lane, 4u * c)],
            exchange[base + transposed_index(lane, 4u * c + 1u)],
            exchange[base + transposed_index(lane, 4u * c + 2u)],
            exchange[base + transposed_index(lane, 4u * c + 3u)],
        );
    }
    return v;
}

// Element indices of a lane's column `c`, in either layout.
fn blocked_elements(lane: u32, c: u32) -> vec4<u32> {
    return lane * LANE_ELEMENTS + 4u * c + vec4<u32>(0u, 1u, 2u, 3u);
}

fn transposed_elements(lane: u32, c: u32) -> vec4<u32> {
    return vec4<u32>(
        transposed_index(lane, 4u * c),
        transposed_index(lane, 4u * c + 1u),
        transposed_index(lane, 4u * c + 2u),
        transposed_index(lane, 4u * c + 3u),
    );
}

// Bit `i` of a sign vector of up to 256 elements; set for +1.
fn sign_bit(signs: array<vec4<u32>, 2>, i: u32) -> bool {
    let words = select(signs[0], signs[1], i >= 128u);
    return ((words[(i >> 5u) & 3u] >> (i & 31u)) & 1u) == 1u;
}

fn with_signs(signs: array<vec4<u32>, 2>, elements: vec4<u32>, v: vec4<f32>) -> vec4<f32> {
    let keep = vec4<bool>(
        sign_bit(signs, elements.x),
        sign_bit(signs, elements.y),
        sign_bit(signs, elements.z),
        sign_bit(signs, elements.w),
    );
    return select(-v, v, keep);
}

// 2^e for -126 <= e <= 127, exactly.
fn power_of_two(e: i32) -> f32 {
    return bitcast<f32>(u32(e + 127) << 23u);
}

const NON_FINITE_BITS = 0x7f800000u;
const SMALLEST_NORMAL_BITS = 0x00800000u;

// The exact power of two, as an exponent, that brings a vector whose largest magnitude has these bits into
// [1, 4): squares then neither overflow nor vanish. The inputs' bits are compared as integers,
// since a compiler may assume that no NaN and no infinity exists.
fn range_shift(largest_bits: u32) -> i32 {
    return clamp(127 - i32(largest_bits >> 23u), -126, 126);
}

// Centroids of four codes.
fn centroids(codes: vec4<u32>) -> vec4<f32> {
    let inner = ((codes ^ (codes >> vec4<u32>(1u))) & vec4<u32>(1u)) == vec4<u32>(1u);
    let magnitude = select(vec4<f32>(CENTROID_OUTER), vec4<f32>(CENTROID_INNER), inner);
    return select(-magnitude, magnitude, codes >= vec4<u32>(2u));
}

// Four codes from byte `byte` of a word of sixteen.
fn unpack_codes(word: u32, byte: u32) -> vec4<u32> {
    return (vec4<u32>(word >> (8u * byte)) >> vec4<u32>(0u, 2u, 4u, 6u)) & vec4<u32>(3u);
}

// Stored f16 norm (not negative, finite) to f32, exactly. On integers, since unpack2x16float may
// flush a subnormal f16.
fn f16_to_norm(bits: u32) -> f32 {
    let exponent = (bits >> 10u) & 31u;
    let mantissa = bits & 1023u;
    let normal = bitcast<f32>(((exponent + 112u) << 23u) | (mantissa << 13u));
    // 2^-24 is the unit of f16's subnormals; the product is exact.
    let subnormal = f32(mantissa) * power_of_two(-24);
    return select(normal, subnormal, exponent == 0u);
}
