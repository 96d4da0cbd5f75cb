// Sparse attention of V4_FP8 rows on Hopper, 32 or 64 heads of a query at a time, for lists of at most 256 rows: all
// rows of a query are in shared memory at once. There is no ring, and nobody but the warps that use a row fetches it.
//
//   S^T = K . Q^T, O^T = V^T . P^T as in fp8_sm90.cu, whose headers make S^T. Four warpgroups, each
//
//     ask     lengths, list entries and Q at once; then each warp copies the 16 rows whose S^T it makes
//     Q       to f16, in the order of S^T
//     S^T     64 rows: a tile of the warpgroup's own
//       ----  all meet: the largest logit of each head, over all rows; nobody reads Q any more
//     P^T     to where Q was
//       ----  all meet
//     O^T     128 of the 512 value columns, over all tiles
//       ----  all meet
//     results, through the place of Q and P
//
// A reference that all rows have is found before the first P^T: so there is none that rises, nothing is multiplied
// again, and P^T is at most 2^HEADROOM. Scales and their rounding are as in fp8_sm90.cu.
//
// Where tiles are: main lists from tile 0 on, extra lists from the tile behind the longest main list on. So an entry's
// place does not depend on lengths, which are loaded with it. Tiles without a valid entry are not multiplied.
//
// Shared memory, HEADS 64: Q, then four P of heads x 64 f16, 65,536; 256 rows x 592, 151,552; the rest 9,216.
// Registers: 128, four warps of a scheduler.
// What was tried, what bounds it: docs/kernels/fp8_short_sm90.md.
//
// Parts, under fp8_short_sm90/:
//
//   plan       constants and shared memory
//   rows       list entries, and the rows that they name
//   queries    Q
//   scores     S^T and P^T
//   values     O^T
//   results    denominators, and O^T as results
#include "attention/fp8_short_sm90/queries.cuh"
#include "attention/fp8_short_sm90/results.cuh"

// grid: tiles of heads x CTAs, which take queries in turn.
extern "C" __global__ void __launch_bounds__(CTA_THREADS, 1)
    fp8_short_sm90(const __grid_constant__ AttentionParams p) {
    const Role who = Role::of(threadIdx.x, uniform(threadIdx.x / WARPGROUP), uniform(threadIdx.x / 32 % 4));
    // Nothing that is derived from the lane stays in registers.
    const auto role = [&] { return rare_role(who); };
    const uint32_t full = shared_address(&rest().full[4 * who.warpgroup + who.warp]);
    if (who.lane == 0) {
        mbarrier_init(full, WARP_ARRIVALS + 32);
        mbarrier_init_fence();
    }
    __syncwarp();  // no other warp uses it
    const bool has_tile = place_of_tile(p, who.warpgroup).exists;
    Item item = {query_by_branch(p, blockIdx.y), int(blockIdx.x) * HEADS};
    wait_for_earlier_kernels();
    let_next_kernel_start();
    Entry entry = load_entry(p, item.query, role());
#pragma unroll 1
    for (int turn = 0;; ++turn) {
        float logit_scale;
        {
            QColumns q;
            q.load(p, item, role());
            if (turn == 0) {
                copy_rows(p, entry, role());
                load_sinks(p, item.first_head);
            }
            logit_scale = q.store(p, role());
        }
        const uint32_t tiles = tiles_with_rows();
        if (has_tile) mbarrier_wait(full, turn & 1);
        if (tiles >> who.warpgroup & 1) {
            attend_tile(p, role(), logit_scale);
        } else {
            skip_tile(role());
        }
        finish_heads(p, item);
        const int next = blockIdx.y + (turn + 1) * gridDim.y;
        const Item done = item;
        if (next < p.num_queries) {
            item.query = query_by_branch(p, next);
            entry = load_entry(p, item.query, role());
        }
        Values2 out;
        multiply_pv(role(), tiles, out);
        release_reads();
        meet();
        if (next < p.num_queries) {
            fence_proxy_async();  // between reads of rows and bulk copies to the same place
            copy_rows(p, entry, role());
        }
        stage_results(role(), out);
        meet();
        write_results(p, done, role());
        if (next >= p.num_queries) break;
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = CTA_THREADS;
extern "C" __device__ int kernel_shared_bytes = CTA_BYTES;
