// Probes of storage, workgroup memory, barriers and dispatch sizes.

@group(0) @binding(0) var<storage, read> words: array<u32>;
@group(0) @binding(1) var<storage, read_write> results: array<u32>;
// The same buffers as f32, for the entry point that copies them as such.
@group(0) @binding(0) var<storage, read> floats: array<f32>;
@group(0) @binding(1) var<storage, read_write> float_results: array<f32>;

@compute @workgroup_size(64)
fn copy_words(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < arrayLength(&results)) {
        results[id.x] = words[id.x];
    }
}

@compute @workgroup_size(64)
fn copy_floats(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < arrayLength(&float_results)) {
        float_results[id.x] = floats[id.x];
    }
}

override SHARED: u32 = 256u;
var<workgroup> shared_words: array<u32, SHARED>;

// Fills workgroup memory. What it holds is read across lanes, so that no compiler can leave the stores out.
@compute @workgroup_size(64)
fn leave_rubbish(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    for (var i = lane; i < SHARED; i += 64u) {
        shared_words[i] = words[0] ^ i;
    }
    workgroupBarrier();
    for (var i = lane; i < SHARED; i += 64u) {
        results[workgroup.x * SHARED + i] = shared_words[SHARED - 1u - i];
    }
}

// Reports workgroup memory as it is at the start.
@compute @workgroup_size(64)
fn look(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    for (var i = lane; i < SHARED; i += 64u) {
        results[workgroup.x * SHARED + i] = shared_words[i];
    }
}

var<workgroup> ring: array<u32, 64>;

// One step of a ring, barriers and all, inside a function.
fn pass_on(lane: u32) -> u32 {
    let next = ring[(lane + 1u) % 64u];
    workgroupBarrier();
    ring[lane] = next;
    workgroupBarrier();
    return next;
}

fn pass_on_twice(lane: u32) -> u32 {
    var seen = 0u;
    for (var i = 0u; i < 2u; i++) {
        seen += pass_on(lane);
    }
    return seen;
}

// results[lane]: after a full turn of the ring by barriers in nested functions and loops, the sum seen
// (that of all lanes, 2016) times 64 plus the lane's number, which has come home.
@compute @workgroup_size(64)
fn ring_in_functions(@builtin(local_invocation_index) lane: u32) {
    ring[lane] = lane;
    workgroupBarrier();
    var seen = 0u;
    for (var i = 0u; i < 32u; i++) {
        seen += pass_on_twice(lane);
    }
    results[lane] = seen * 64u + ring[lane];
}

// Workgroups that spill from x into y: each marks its own number.
@compute @workgroup_size(1)
fn spill(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
) {
    let i = workgroup.y * workgroups.x + workgroup.x;
    results[i] = i ^ words[0];
}
