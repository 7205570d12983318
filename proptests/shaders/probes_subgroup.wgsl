// Known answers of subgroup operations: 7 words a lane, see `judge::subgroups`.

@group(0) @binding(0) var<storage, read> words: array<u32>;
@group(0) @binding(1) var<storage, read_write> results: array<u32>;

@compute @workgroup_size(64)
fn subgroups(
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) id: u32,
) {
    let ones = subgroupAdd(words[0]);
    let ids = subgroupAdd(id);
    let before = subgroupExclusiveAdd(id);
    let votes = countOneBits(subgroupBallot((id & 1u) == 0u));
    let neighbour = subgroupShuffleXor(id, 1u);
    let at = 7u * lane;
    results[at] = size;
    results[at + 1u] = id;
    results[at + 2u] = ones;
    results[at + 3u] = ids;
    results[at + 4u] = before;
    results[at + 5u] = votes.x + votes.y + votes.z + votes.w;
    results[at + 6u] = neighbour;
}
