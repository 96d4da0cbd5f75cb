// The k largest logits of each row's range, exact: of equal ones those with lower indices, ascending by position.
//
// A logit's *order* is an integer that is larger for larger logits: 0 outside the range, 1 for NaN, equal for both
// zeros. Everything is done with orders.
//
//   grid   x row; with CLUSTERS, a cluster a row, and each of its CTAs a part of the row
//   row    of at most k columns     all of them are chosen (short_row)
//          that registers hold      ITEMS a thread (held_row)
//          longer, STREAMED         a sample tells a logit that somewhat more than k of the row are larger than.
//                                   Those go into a pool in shared memory, and from there into registers (long_row)
//
//   items, sample, pool   what may be chosen, in registers
//   threshold             the order of the k-th largest by radix: a histogram of the upper 11 bits, then of 11 and
//                         of 10 more bits of the items that agree with it so far. A cluster's are added up
//   held_row, marks, pool_order
//                         what is chosen, in the order of columns: where registers hold the row, of a pool in any
//                         order, and of a pool by chunks (ORDERED)
//   results               positions, or slots by a block table
//
// The words are those of the parts, under topk/.
//
// No atomics decide about places, so results do not depend on timing. Of rows no longer than k all is chosen, whatever
// their logits are; where no row may be longer, `short_rows` runs instead. ORDERED: many long rows of at most
// 2^20 columns; of few items that agree in two digits there is a list, and each is compared with all. BF16: logits are
// bfloat16.
//
// Shared memory: 8 bytes an item of the pool, 8 KB a histogram (a cluster has three), 4 bytes a thread for blocks or 4
// a chunk, and a few words a warp. Bits or ranks take the pool's place, chosen columns or results that of histograms.
#include "indexer/topk/held_row.cuh"
#include "indexer/topk/long_row.cuh"
#include "indexer/topk/short_row.cuh"
#include "ptx/griddepcontrol.cuh"

template <typename Four>
__device__ __forceinline__ void store_all(const BlockTable& table, const int32_t* blocks, int32_t* to, int count,
                                          int k) {
#pragma unroll 1
    for (int at = threadIdx.x * 4; at < k; at += THREADS * 4) {
        Four four;
        four.load(table, blocks, at);
        four.store(table, to, count, k);
    }
}

// All of a row of at most k items are chosen. Not inline: its code would stand in front of the other rows'. What it takes
// of the parameters it takes by value: through a reference to these each would be loaded from memory.
__device__ __noinline__ void choose_all(BlockTable table, const int32_t* requests, int queries, int row, int32_t* to,
                                        int count, int k) {
    if (table.blocks == nullptr) {
        store_all<FourPositions>(table, nullptr, to, count, k);
    } else {
        store_all<FourSlots>(table, blocks_of_row(table, requests, queries, row), to, count, k);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) topk(const __grid_constant__ TopkParams p) {
    let_next_kernel_start();
    const int parts = num_parts(), part = this_part(), row = blockIdx.x / parts;
    for (Histogram& bins : shared().bins) clear(bins);
    if (threadIdx.x == 0) shared().pooled = 0;
#if ORDERED
    if (threadIdx.x == 0) shared().listed = 0;
#endif
    wait_for_earlier_kernels();
    const Range of_row = columns_of_row(p, row);
    const int length = of_row.end - of_row.begin;
    if (length <= p.k) {
        if (part == 0) choose_all(p.table, p.requests, p.queries, row, p.out + row * p.out_stride, length, p.k);
        return;
    }
    const Range range = part_of(of_row, part, parts);
    if constexpr (STREAMED) {
        if (ceil_div(length, parts) + 8 > TILE) {
            choose_streamed(p, row, of_row, range);
        } else {
            load_and_choose_aside(p, row, of_row, range);
        }
    } else {
        load_and_choose(p, row, of_row, range);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = sizeof(Shared);
