// Shared by encode_keys and encode_values: parameters, bindings and the steps up to the codes.

struct EncodeParams {
    rows: u32,
    n_kv_heads: u32,
    // First timestep written.
    position: u32,
    // Records a head can hold: the stride of a head in each region.
    capacity: u32,
    // First element of the source.
    source_start: u32,
    // First words of the regions in the cache buffer; the codes start at 0.
    signs_start: u32,
    norms_start: u32,
    // First of this kind's counters.
    counters_start: u32,
    polar: array<vec4<u32>, 2>,
    jl: array<vec4<u32>, 2>,
}

@group(0) @binding(0) var<uniform> params: EncodeParams;
// [rows, n_kv_heads, HEAD_DIM] f32, read as bits since it may hold anything.
@group(0) @binding(1) var<storage, read> source: array<u32>;
@group(0) @binding(2) var<storage, read_write> cache: array<u32>;
// Vectors zeroed as non-finite, zeroed as vanishing, and norms saturated.
@group(0) @binding(3) var<storage, read_write> counters: array<atomic<u32>>;

const COUNT_NON_FINITE = 0u;
const COUNT_VANISHING = 1u;
const COUNT_SATURATED = 2u;

// Below this norm a vector (or a residual) counts as zero.
const VANISHING = 1e-12;
// The smallest f32 that would round to an f16 infinity.
const SATURATION_THRESHOLD = 65520.0;
const F16_MAX_BITS = 0x7bffu;

var<workgroup> lane_bits: array<u32, 64>;
var<workgroup> lane_sums: array<f32, 64>;

// A norm (finite, not negative) to f16 bits: to nearest, ties to even, saturating at 65504.
fn norm_to_f16(norm: f32) -> u32 {
    let bits = bitcast<u32>(norm);
    let exponent = bits >> 23u;
    // Normal f16s: rebias the exponent by 127 - 15 and round 13 bits away.
    let rebiased = bits - (112u << 23u);
    let normal = (rebiased + 0xfffu + ((rebiased >> 13u) & 1u)) >> 13u;
    // Subnormal f16s: the significand in units of 2^-24. A shift of 25 or more leaves nothing.
    let significand = (bits & 0x7fffffu) | 0x800000u;
    let shift = clamp(126u - min(exponent, 126u), 1u, 25u);
    let quotient = significand >> shift;
    let remainder = significand & ((1u << shift) - 1u);
    let half_way = 1u << (shift - 1u);
    let up = remainder > half_way || (remainder == half_way && (quotient & 1u) == 1u);
    let subnormal = quotient + select(0u, 1u, up);
    let rounded = select(subnormal, normal, exponent >= 113u);
    return select(rounded, F16_MAX_BITS, norm >= SATURATION_THRESHOLD);
}

fn source_element(vector: u32, element: u32) -> u32 {
    return source[params.source_start + vector * HEAD_DIM + element];
}

// The largest magnitude's bits among a lane's elements: integers order like magnitudes, and a NaN
// or an infinity is at least NON_FINITE_BITS.
fn largest_bits_of_lane(vector: u32, lane: u32) -> u32 {
    var largest = 0u;
    for (var k = 0u; k < LANE_ELEMENTS; k++) {
        largest = max(largest, source_element(vector, transposed_index(lane, k)) & 0x7fffffffu);
    }
    return largest;
}

fn load_scaled(vector: u32, lane: u32, shift: i32) -> Elements {
    let scale = power_of_two(shift);
    var v: Elements;
    for (var c = 0u; c < 4u; c++) {
        let at = transposed_elements(lane, c);
        v[c] = scale * vec4<f32>(
            bitcast<f32>(source_element(vector, at.x)),
            bitcast<f32>(source_element(vector, at.y)),
            bitcast<f32>(source_element(vector, at.z)),
            bitcast<f32>(source_element(vector, at.w)),
        );
    }
    return v;
}

fn sum_of_squares(v: Elements) -> f32 {
    return dot(v[0], v[0]) + dot(v[1], v[1]) + dot(v[2], v[2]) + dot(v[3], v[3]);
}

// Reductions over a vector's lanes: each lane reads all of them, which needs one barrier, not
// one for each level of a tree.
fn largest_bits_of_vector(first_lane: u32) -> u32 {
    var largest = 0u;
    for (var i = 0u; i < VECTOR_LANES; i++) {
        largest = max(largest, lane_bits[first_lane + i]);
    }
    return largest;
}

fn sum_of_vector(first_lane: u32) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < VECTOR_LANES; i++) {
        sum += lane_sums[first_lane + i];
    }
    return sum;
}

// The number of boundaries <= each coordinate.
fn quantise(y: vec4<f32>) -> vec4<u32> {
    let one = vec4<u32>(1u);
    let zero = vec4<u32>(0u);
    return select(zero, one, y >= vec4<f32>(-BOUNDARY))
        + select(zero, one, y >= vec4<f32>(0.0))
        + select(zero, one, y >= vec4<f32>(BOUNDARY));
}

fn pack_codes(codes: vec4<u32>, column: u32) -> u32 {
    let bits = codes << vec4<u32>(0u, 2u, 4u, 6u);
    return (bits.x | bits.y | bits.z | bits.w) << (8u * column);
}

// Norm of a vector: what is stored, and whether the vector becomes the zero record.
struct Norm {
    value: f32,
    zero: bool,
}

// `scaled_norm` is the norm of the vector times 2^shift, in [1, 64). The exponent is clamped so
// that no product overflows or is subnormal; past the clamp the norm saturates or vanishes anyway.
fn unscale_norm(scaled_norm: f32, shift: i32) -> f32 {
    return scaled_norm * power_of_two(clamp(-shift, -60, 40));
}

// Counts what happened to one vector.
fn count(norm: f32, finite: bool) {
    if (!finite) {
        atomicAdd(&counters[params.counters_start + COUNT_NON_FINITE], 1u);
    } else if (norm < VANISHING) {
        atomicAdd(&counters[params.counters_start + COUNT_VANISHING], 1u);
    } else if (norm >= SATURATION_THRESHOLD) {
        atomicAdd(&counters[params.counters_start + COUNT_SATURATED], 1u);
    }
}
