// Shared by the subgroup variants of encode_keys and encode_values.

// A vector on its way to a record.
struct Unit {
    // Rotated, of norm 1; zeros if `zero`.
    y: Elements,
    norm: f32,
    // The record is the zero record.
    zero: bool,
    finite: bool,
}

// The first steps of both encoders: the norm, and y = RHT(x / norm; polar).
fn rotated_unit(vector: u32, lane: u32) -> Unit {
    let bits = load_bits(vector, lane);
    let largest = largest_over_vector(largest_bits(bits));
    var unit: Unit;
    unit.finite = largest < NON_FINITE_BITS;
    let usable = unit.finite && largest >= SMALLEST_NORMAL_BITS;
    let shift = range_shift(largest);
    var x: Elements;
    if (usable) {
        x = scaled(bits, shift);
    }
    let sum = sum_over_vector(sum_of_squares(x));
    let square = select(1.0, sum, usable);
    let inverse_norm = inverseSqrt(square);
    unit.norm = select(0.0, unscale_norm(square * inverse_norm, shift), usable);
    unit.zero = unit.norm < VANISHING;
    for (var c = 0u; c < 4u; c++) {
        x[c] = with_sign_nibble(polar_nibble(group_of_four(lane, c)), x[c] * inverse_norm);
    }
    unit.y = transform(x, lane) * INV_SQRT_HEAD_DIM;
    return unit;
}

// Which code word of the record the lane writes, and which half of a sign word it has.
fn word_of_lane(lane: u32) -> u32 {
    return select((VECTOR_LANES / 4u) * (lane % 4u) + lane / 4u, lane, VECTOR_LANES < 4u);
}

// A lane comes with one byte for each of its columns, lowest first, and leaves with the four bytes of the
// groups 4 * word .. 4 * word + 3, word = word_of_lane(lane): a transposition among four lanes, or two.
fn gather_bytes(of_columns: u32, lane: u32) -> u32 {
    let wide = select(2u, 1u, VECTOR_LANES < 4u);
    // Two columns are kept, the other two change places with those of the lane `wide` away.
    let upper = (lane & wide) != 0u;
    let two_kept = select(of_columns & 0xffffu, of_columns >> 16u, upper);
    let two_got = subgroupShuffleXor(select(of_columns >> 16u, of_columns & 0xffffu, upper), wide);
    // In the order of lanes.
    let pairs = select(two_kept | (two_got << 16u), two_got | (two_kept << 16u), upper);
    let first = pairs & 0x00ff00ffu;
    let second = (pairs >> 8u) & 0x00ff00ffu;
    if (VECTOR_LANES < 4u) {
        // Two columns of two lanes, column after column.
        return ((first | (first >> 8u)) & 0xffffu)
            | (((second << 16u) | (second << 8u)) & 0xffff0000u);
    }
    // One column is kept.
    let odd = (lane & 1u) != 0u;
    let kept = select(first, second, odd);
    let got = subgroupShuffleXor(select(second, first, odd), 1u);
    return select(kept | (got << 8u), got | (kept << 8u), odd);
}
