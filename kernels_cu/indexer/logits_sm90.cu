// The indexer's logits on Hopper: wgmma on bytes, sums over heads in float32. Keys stand in rows, or in a paged cache.
// Keys and queries are e4m3; with E5M2_KEYS, where keys were MXFP4, both are e5m2.
//
//   grid   as many CTAs as the GPU runs at a time, each with an equal share of the units of keys (work.cuh)
//   tile   TILE_QUERIES queries, and those units of their keys that fall into the CTA's share
//   unit   64 keys: a stage of the ring
//
//   producer warpgroup        a tile's queries, weights and header: all four warps copy them to one of two buffers
//                             keys and their scales: each warp copies every fourth unit to the ring
//                               |
//                               | cp.async, 128-byte swizzle
//                               v
//   WARPGROUPS of math   A B A B     A: keys x (queries x heads), a wgmma group of 4 steps of k, both operands in
//                          A B A B      shared memory; meanwhile the logits of the unit before are stored
//                        time ->     B: relu, and the sums over heads in float32
//
//   mbarrier             means              who arrives
//   full[stage]          a unit is there    one producer warp; with UNDERWAY 0 also 32 arrivals of its copies
//   empty[stage]         a unit is read     the 4 warps of the math warpgroup that read it; with TOGETHER those of all
//   tile_full[buffer]    a tile is there    the producer warp that wrote its header, and 128 arrivals of the copies
//   tile_empty[buffer]   a tile is done     all math warps
//
// How math warpgroups divide the work. TOGETHER (prefill): each has QUERIES queries of its own, and all of them work
// on every unit. Otherwise (decode) they have the same queries and take turns with the units. In both cases one
// warpgroup sums while others multiply.
//
// Sums over heads. In the accumulators lane 4 g + t has keys g and g + 8, and a quarter of each query's heads. The
// four lanes of a quad add up what they have, so that each ends with the logits of one key for every second query. The
// columns of two queries alternate, so that half of these exchanges need no choice between registers (QueryHead).
//
// MXFP4: the ring holds codes. Each math warpgroup widens the keys of its unit to e5m2 in registers, as A operands
// (rows/mxfp4.cuh). Lane t of a quad has one of a key's four scale groups: 32 neighbouring values,
// of which it gives 8 to each of the 4 steps of k. The order of k is free as long as both operands agree, so
// copy_queries stores the queries' words in this order. A stage is free for the next unit before its multiplication
// begins. Instructions bound these variants, most of all integer ones. So relu(x) is (x + |x|) / 2, an addition, with
// weights that are halved once a tile. Logits have the same bits as by max: x is a sum of 128 products of e5m2, which
// is NaN, if the query has a NaN, or less than 2^39, if it has no infinity. So x + |x| is exact and finite, NaN stays
// NaN, and an infinite weight times relu's 0 is NaN. Only weights below 2^-125 have no half: they count as 0.
//
// CANDIDATES: a query token sees blocks of 8 keys of its own, found in a list (work.cuh). A tile has one query.
//
// COMPACT: a row of results starts at the first key that its query sees, and has no room for keys that it does not
// see.
//
// SCHEDULED: a schedule (schedule.cuh) tells a CTA its share, and where the share's first keys stand. The producer
// reads it before the launch before has ended, and copies these keys as soon as that launch has. Without a schedule it
// would have to read lengths and the block table first. Calls by a schedule are short, and much of their time is what
// a CTA does once. So the producer has few instructions, and rare cases stand behind the others.
//
// Shared memory: two buffers of 128 bytes a query and head, STAGES stages of 64 keys of 128 bytes (MXFP4: 64), scales.
//
// Exact: bytes are multiplied as they are; e2m1 keys become e5m2, if their groups' scales are within a factor of 2^28.
// Rounded: wgmma's sums over a key's values, the sums over heads in float32, and the product with the key's scale.
// Truncated: of a key with scales further apart, values of small groups, by less than 2^-29 of its largest scale, which
// is less than 2^-30 of the largest value that writers put under that scale.
//
// Parts, under logits_sm90/:
//
//   plan                  constants, registers, shared memory, the ring and its barriers
//   queries, units        what producers copy: a tile's queries, weights and header; units of keys
//   producer, scheduled   the order in which they do: without a schedule, and by one
//   products, results     keys x queries and the sums over heads; how logits are stored
//   pipeline              what a math warpgroup does, and the kernel
#include "indexer/logits_sm90/pipeline.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    logits_sm90(const __grid_constant__ LogitsParams p) {
    run(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = LINE_GROUP + SMALL_AT + int(sizeof(Small));
