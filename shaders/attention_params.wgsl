// Parameters of one attention pass, shared by attention and merge_attention.

struct AttentionParams {
    // Query rows of this dispatch, and the first of them. The bindings of queries and output begin
    // with it; its position is start_pos + row_base.
    rows: u32,
    row_base: u32,
    // Absolute position of query row 0: row j sees timesteps <= start_pos + j.
    start_pos: u32,
    n_heads: u32,
    n_kv_heads: u32,
    // Records a head can hold: the stride of a head in each region.
    capacity: u32,
    // Timesteps of one KV split, and the number of splits.
    split_len: u32,
    n_splits: u32,
    // First words of regions; the codes start at 0 in both buffers.
    key_signs_start: u32,
    key_norms_start: u32,
    value_norms_start: u32,
    // First vec4 of the rotated queries, first element of the output.
    queries_start: u32,
    destination_start: u32,
    scale: f32,
    // Factor of the residual term, see `Gain`.
    gain: f32,
    padding: u32,
    polar: array<vec4<u32>, 2>,
}

// e^x for x <= 0. At 0 it is 1 exactly, whatever the accuracy of exp; far below, where the
// accuracy table promises nothing useful, it is 0.
fn weight(x: f32) -> f32 {
    return select(select(exp(x), 1.0, x == 0.0), 0.0, x < -100.0);
}
