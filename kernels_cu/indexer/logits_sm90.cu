// The indexer's logits on Hopper: wgmma on e4m3, sums over heads in float32; keys in rows, or in a paged cache.
//
//   grid   as many CTAs as the GPU runs at a time, each with an equal share of the units of keys (work.cuh)
//   tile   TILE_QUERIES queries and those units of their keys that fall into the CTA's share
//   unit   64 keys: a stage of the ring
//
//   producer warpgroup        queries, weights and what the tile is, by all four warps: to one of two buffers (those of
//                             a CTA's first tile are copied by math warpgroups, which have nothing else to do yet)
//                             keys and scales, each warp every fourth unit: to the ring
//                               |
//                               | cp.async, 128-byte swizzle
//                               v
//   WARPGROUPS of math   A B A B     A: keys x (queries x heads), one wgmma group of 4 steps, both operands in shared
//                          A B A B      memory; behind it, the logits of the unit before are stored
//                        time ->     B: relu, and the sums over heads in float32
//
//   full[stage]          a unit is there    one producer warp; UNDERWAY 0: and 32 arrivals after its copies
//   empty[stage]         a unit is read     the 4 warps of the math warpgroup that had it; TOGETHER: of all of them
//   tile_full[buffer]    a tile is there    the producer warp that wrote its header, and 128 arrivals after copies
//   tile_empty[buffer]   a tile is done     all math warps
//
// While one math warpgroup sums, others multiply. TOGETHER (prefill): each has QUERIES queries of its own, and all
// work on every unit. Otherwise they have the same queries and take turns with the units.
//
// A lane has a quarter of the heads of each query, for keys g and g + 8; what the lanes of a quad have is added up so
// that each ends with the logits of one key, for every second query. The columns of two queries stand in an order that
// makes half of these exchanges simple (QueryHead).
//
// MXFP4: the ring holds codes. Each math warpgroup widens the keys of its unit to e4m3 (rows/mxfp4.cuh says what is
// exact), in registers: as A operands. A lane has a quarter of a key's 128 values, those of one group, which stand
// side by side: of each it gives an eighth to every step of k. The order of k is free as long as both operands agree:
// copy_queries stores the queries' words in it. Codes are free for the next unit before the multiplication begins.
//
// CANDIDATES: a query token sees blocks of 8 keys of its own (work.cuh), found in a list. A tile has one query.
//
// COMPACT rows of results start at the first key that their query sees; what it does not see has no place in them.
//
// SCHEDULED: a schedule (schedule.cuh) tells a CTA its share and where the share's first keys stand. The producer has
// read it, and copies these keys, as soon as the launch before has ended. Without one it has to read lengths and block
// table first. A call by a schedule is short, and much of its time is what a CTA does once: so its producer has few
// instructions, and what is rare stands behind the rest.
//
// Shared memory: two buffers of 128 bytes a query and head, STAGES stages of 64 keys of 128 bytes (MXFP4: 64), scales.
//
// What is exact: e4m3 is multiplied as it is; e2m1 keys become e4m3 (rows/mxfp4.cuh says when exactly). What is
// rounded: sums, by wgmma over a key's values, in float32 over heads; the product with the key's scale.
//
// Parts, under logits_sm90/:
//
//   plan                  constants, registers, shared memory, the ring and its barriers
//   queries, units        what producers bring: a tile's queries, weights and header; keys
//   producer, scheduled   in which order, without a schedule and by one
//   products, results     keys x queries and the sums over heads; logits
//   pipeline              what a math warpgroup does, and all that a CTA does
#include "indexer/logits_sm90/pipeline.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    logits_sm90(const __grid_constant__ LogitsParams p) {
    run(p);
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = LINE_GROUP + SMALL_AT + int(sizeof(Small));
