// The k largest logits of each row's range. The result is exact and ascends by position. Of equal logits, those at
// lower positions are chosen, so that there is one right answer.
//
// Words
//
//   range      the columns of a row that take part; a position counts from the range's first column
//   part       the share of a range that one CTA has: all of it, or with CLUSTERS the share of one CTA of a cluster
//   item       a logit that may be chosen
//   key        a radix key: an integer that is larger for larger logits (radix_key.cuh). 0 is no logit, 1 is NaN
//   threshold  the key of the k-th largest item, and how many items with this key are chosen: the ties
//
// Which way a row takes:
//
//   range of at most k columns               choose_all        all of them are results; no logit is read
//   part of at most TILE = THREADS * ITEMS   load_and_choose   registers hold the part
//   longer part, in STREAMED variants        choose_streamed   the part is read once, and large logits go into a pool
//
// Which variant a call gets, by the width of its rows (cupy_mla/cuda/topk.py; figures for float32):
//
//   more rows than SMs                       up to 16384 columns registers hold a row; up to 2^20 columns STREAMED and
//                                            ORDERED; more: STREAMED
//   no more rows than SMs                    up to 24576 columns registers hold a row; more: STREAMED
//   at most half as many rows as SMs,        CLUSTERS, as far as all clusters run at a time. A part of up to 16384
//   more than 12288 columns, from sm_90 on   columns registers hold; longer: STREAMED
//   width of at most k                       another kernel, short_rows.cu
//
//   load_and_choose (held_row.cuh)
//
//       row --> registers --> threshold --> chosen columns, in shared memory --> results
//
//   choose_streamed (long_row.cuh)
//
//       row --> sample --> cutoff                a few logits from all over the row tell a logit, the cutoff, that
//                            |                   somewhat more than k logits of the row are larger than
//       row -----------------+--> pool           all logits above the cutoff and their columns, in shared memory
//       pool --> registers --> threshold --> chosen columns --> results
//
//       The cutoff only has to be good, not right: any pool that holds at least k items, and has room for all of its
//       items, holds the k largest. Any other pool is thrown away, and the row is read again for each further step.
//
// How the threshold is found (threshold.cuh). The items' keys are looked at digit by digit, 11, 11 and 10 bits from
// the top: a histogram of the digit, over those items whose upper bits agree with the k-th largest so far, tells its
// next digit. With CLUSTERS the histograms of the CTAs are added up.
//
// How ties stay exact. Larger items and items equal to the threshold are counted apart, in the order of columns, over
// lanes, warps and CTAs. An equal item is chosen if fewer equal items than `ties` come before it.
//
// How results get their places. An item's place is the number of chosen items in lower columns. Registers hold a part
// in the order of its columns, so prefix sums tell it (held_row.cuh). A pool has no such order: there a bitmap of the
// columns is counted (marks.cuh) or, with ORDERED, sums over chunks of neighbouring columns (pool_order.cuh). Atomics
// count, but decide about no place, so results do not depend on timing.
//
// Constants of a variant: THREADS, ITEMS (logits in a thread's registers), PER_SM (CTAs an SM), STREAMED, CLUSTERS,
// BF16 (logits are bfloat16), ORDERED (for many long rows of at most 2^20 columns).
//
// Shared memory: 8 bytes an item of the pool, 8 KB a histogram (three with CLUSTERS), 4 bytes a thread for the block
// table or 4 a chunk, and a few words a warp. Chosen columns take the place of histograms; bitmap or ranks that of the
// pool.
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

// Of a range of `count` <= k columns all are chosen. Not inlined: its code would stand in front of that for longer
// rows. It takes the fields of the parameters by value: behind a reference each of them would be loaded from memory.
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
    if (threadIdx.x == 0) shared().num_pooled = 0;
#if ORDERED
    if (threadIdx.x == 0) shared().num_listed = 0;
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
        constexpr int ROUNDING = 8;  // a part is cut at vectors: it may have so many columns more than an equal share
        if (ceil_div(length, parts) + ROUNDING > TILE) {
            choose_streamed(p, row, of_row, range);
        } else {
            load_and_choose_out_of_line(p, row, of_row, range);
        }
    } else {
        load_and_choose(p, row, of_row, range);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = sizeof(Shared);
