// Sparse attention of V4_FP8 rows on Hopper, 32 or 64 heads of a query at a time, for lists of at most 256 rows. All
// rows of a query are in shared memory at once: there is no ring and there are no producer warps. Each warp copies the
// rows that it multiplies.
//
// S^T = K . Q^T and O^T = V^T . P^T are computed as in fp8_sm90.cu; S^T with its headers. There are four warpgroups.
// Each of them does:
//
//     loads   lengths, list entries and Q are loaded at once; then each warp copies the 16 rows of its S^T
//     Q       becomes f16, in the order that S^T takes
//     S^T     of 64 rows: the warpgroup's tile
//       ----  CTA barrier: the largest logit of each head over all rows is known; Q is not needed any more
//     P^T     is stored in the space of Q
//       ----  CTA barrier
//     O^T     128 of the 512 value columns, over all tiles
//       ----  CTA barrier
//     output  through the space of Q and P
//
// The reference of a head is found from all rows before the first P^T. So it never rises and nothing is rescaled, and
// P^T is at most 2^HEADROOM. Scales and their rounding are as in fp8_sm90.cu.
//
// Main lists begin at tile 0. Extra lists begin at the tile behind the longest possible main list. So the place of an
// entry does not depend on lengths, and both are loaded at the same time. Tiles without a valid entry are not
// multiplied.
//
// Shared memory in bytes, HEADS 64: Q, later four P of heads x 64 f16, 65,536; 256 rows x 592, 151,552; barriers and
// small arrays 9,216.
//
// Parts, under fp8_short_sm90/:
//
//   plan       constants and shared memory
//   rows       list entries, and copies of the rows that they name
//   queries    Q
//   scores     S^T and P^T
//   values     O^T
//   results    denominators and output
#include "attention/fp8_short_sm90/queries.cuh"
#include "attention/fp8_short_sm90/results.cuh"

// grid: tiles of heads x CTAs, which take queries in turn.
extern "C" __global__ void __launch_bounds__(CTA_THREADS, 1)
    fp8_short_sm90(const __grid_constant__ AttentionParams p) {
    const Role who = Role::of(threadIdx.x, uniform(threadIdx.x / WARPGROUP), uniform(threadIdx.x / 32 % 4));
    // The role is computed anew for each step, so that nothing derived from the lane occupies registers.
    const auto role = [&] { return rare_role(who); };
    const uint32_t full = shared_address(&rest().full[4 * who.warpgroup + who.warp]);
    if (who.lane == 0) {
        mbarrier_init(full, WARP_ARRIVALS + 32);
        mbarrier_init_fence();
    }
    __syncwarp();  // the barrier is this warp's own
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
        Output2 out;
        multiply_pv(role(), tiles, out);
        release_reads();
        sync_cta();
        if (next < p.num_queries) {
            fence_proxy_async();  // orders reads of rows before bulk copies to the same place
            copy_rows(p, entry, role());
        }
        stage_results(role(), out);
        sync_cta();
        write_results(p, done, role());
        if (next >= p.num_queries) break;
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = CTA_THREADS;
extern "C" __device__ int kernel_shared_bytes = CTA_BYTES;
