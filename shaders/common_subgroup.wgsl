// Shared by the subgroup variants of the encoders and of rotate_queries: loading, and the transform by
// shuffles. Stands after the file that declares `params` and `source_element`.
//
// A vector's VECTOR_LANES lanes lie in one subgroup. A lane holds four columns of four elements, in the layout
//   strided     element 4 * (VECTOR_LANES * c + lane) + r
// of column c, row r: lanes read and write memory side by side. It holds all partners of the butterflies of
// half-width 1, 2, 4 * VECTOR_LANES and 8 * VECTOR_LANES; those between are found in other lanes.

// Index of a lane's column `c` among the vector's groups of four elements.
fn group_of_four(lane: u32, c: u32) -> u32 {
    return VECTOR_LANES * c + lane;
}

// The Walsh-Hadamard transform of a vector, without its factor.
fn transform(x: Elements, lane: u32) -> Elements {
    var v = butterflies(x, 1u);
    for (var distance = 1u; distance < VECTOR_LANES; distance *= 2u) {
        // (a, b) -> (a + b, a - b): the product with 1 or -1 is exact.
        let sign = select(1.0, -1.0, (lane & distance) != 0u);
        let partner = Elements(
            subgroupShuffleXor(v[0], distance),
            subgroupShuffleXor(v[1], distance),
            subgroupShuffleXor(v[2], distance),
            subgroupShuffleXor(v[3], distance),
        );
        v = v * sign + partner;
    }
    return v;
}

// Every lane of a vector gets the same bits: at each step both partners add the same two numbers.
fn sum_over_vector(of_lane: f32) -> f32 {
    var sum = of_lane;
    for (var distance = 1u; distance < VECTOR_LANES; distance *= 2u) {
        sum += subgroupShuffleXor(sum, distance);
    }
    return sum;
}

fn largest_over_vector(of_lane: u32) -> u32 {
    var largest = of_lane;
    for (var distance = 1u; distance < VECTOR_LANES; distance *= 2u) {
        largest = max(largest, subgroupShuffleXor(largest, distance));
    }
    return largest;
}

// Keeps the elements whose bits among the lowest four of `keep` are set, and negates the others.
fn with_sign_nibble(keep: u32, v: vec4<f32>) -> vec4<f32> {
    let negate = (vec4<u32>(~keep) << vec4<u32>(31u, 30u, 29u, 28u)) & vec4<u32>(0x80000000u);
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(v) ^ negate);
}

// Bits of the lane's elements, columns in strided layout.
fn load_bits(vector: u32, lane: u32) -> array<vec4<u32>, 4> {
    return array<vec4<u32>, 4>(
        load_bits_of_column(vector, lane, 0u),
        load_bits_of_column(vector, lane, 1u),
        load_bits_of_column(vector, lane, 2u),
        load_bits_of_column(vector, lane, 3u),
    );
}

fn load_bits_of_column(vector: u32, lane: u32, c: u32) -> vec4<u32> {
    let first = 4u * group_of_four(lane, c);
    return vec4<u32>(
        source_element(vector, first),
        source_element(vector, first + 1u),
        source_element(vector, first + 2u),
        source_element(vector, first + 3u),
    );
}

// Signs of a group of four elements, in the lowest bits.
fn polar_nibble(group: u32) -> u32 {
    return params.polar[group >> 5u][(group >> 3u) & 3u] >> (4u * (group & 7u));
}

fn jl_nibble(group: u32) -> u32 {
    return params.jl[group >> 5u][(group >> 3u) & 3u] >> (4u * (group & 7u));
}

// The largest magnitude's bits among a lane's elements: integers order like magnitudes, and a NaN
// or an infinity is at least NON_FINITE_BITS.
fn largest_bits(bits: array<vec4<u32>, 4>) -> u32 {
    return max(
        max(magnitude_bits(bits[0]), magnitude_bits(bits[1])),
        max(magnitude_bits(bits[2]), magnitude_bits(bits[3])),
    );
}

fn magnitude_bits(v: vec4<u32>) -> u32 {
    let magnitudes = v & vec4<u32>(0x7fffffffu);
    return max(max(magnitudes.x, magnitudes.y), max(magnitudes.z, magnitudes.w));
}

fn scaled(bits: array<vec4<u32>, 4>, shift: i32) -> Elements {
    let scale = power_of_two(shift);
    return Elements(
        scale * bitcast<vec4<f32>>(bits[0]),
        scale * bitcast<vec4<f32>>(bits[1]),
        scale * bitcast<vec4<f32>>(bits[2]),
        scale * bitcast<vec4<f32>>(bits[3]),
    );
}

// The dispatch's lanes in order. Not local_invocation_index: how that maps to subgroups is the
// implementation's choice.
fn subgroup_order(subgroup: u32, subgroup_lanes: u32, subgroup_lane: u32) -> u32 {
    return subgroup * subgroup_lanes + subgroup_lane;
}
