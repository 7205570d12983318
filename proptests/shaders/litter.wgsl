// Leaves a NaN pattern in all of the workgroup memory that a kernel may use, for the next dispatch to find.

@group(0) @binding(0) var<storage, read_write> sink: array<u32>;

const WORDS = 2048u;
const LANES = 64u;

var<workgroup> memory: array<u32, 2048>;

@compute @workgroup_size(64)
fn litter(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let own = workgroup.x * LANES + lane;
    for (var i = lane; i < WORDS; i += LANES) {
        memory[i] = 0x7fc1a5a5u + sink[own];
    }
    workgroupBarrier();
    // What is never read, a compiler need not write.
    sink[own] = memory[(own * 33u + sink[own]) % WORDS] & 1u;
}
