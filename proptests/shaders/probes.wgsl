// Probes of what the error bounds assume. Inputs travel as bits, four words an item, so that no load can change
// them. The expression under test is appended as `fn answer(words: vec4<u32>) -> u32`.

@group(0) @binding(0) var<storage, read> probe_words: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> probe_results: array<u32>;

@compute @workgroup_size(64)
fn probe(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < arrayLength(&probe_results)) {
        probe_results[id.x] = answer(probe_words[id.x]);
    }
}
