// Known-answer tests of what every kernel stands on: barriers, workgroup memory and reductions.

@group(0) @binding(1) var<storage, read_write> results: array<u32>;

override LANES: u32;

var<workgroup> numbers: array<u32, 256>;

// results[0]: the sum of 1 ..= LANES by a tree of barriers; results[1]: of rotating every lane's
// number once around the workgroup, the sum of what lane 0 saw; results[2 ..]: what each lane read last.
@compute @workgroup_size(LANES)
fn reduce(@builtin(local_invocation_index) lane: u32) {
    numbers[lane] = lane + 1u;
    workgroupBarrier();
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        if (lane < half) {
            numbers[lane] += numbers[lane + half];
        }
        workgroupBarrier();
    }
    if (lane == 0u) {
        results[0] = numbers[0];
    }
    workgroupBarrier();

    numbers[lane] = lane + 1u;
    workgroupBarrier();
    var seen = 0u;
    for (var i = 0u; i < LANES; i++) {
        let next = numbers[(lane + 1u) % LANES];
        workgroupBarrier();
        numbers[lane] = next;
        workgroupBarrier();
        seen += numbers[lane];
    }
    if (lane == 0u) {
        results[1] = seen;
    }
    results[2u + lane] = numbers[lane];
}
