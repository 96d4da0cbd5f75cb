// Sparse attention of FP8 rows on Hopper, 32 or 64 heads of a query at a time: wgmma with KV rows from registers.
//
// Rows stay in shared memory as they lie in the cache; no tile of 16-bit rows is ever written. The consumer warps
// widen a row's bytes on their way into the A operand. In both products the M side is KV rows or value columns:
//
//   S^T = K . Q^T     64 rows x heads       a thread reads 16 bytes of its two rows; columns of Q are permuted to
//                                           match
//   O^T = V^T . P^T   512 columns x heads   ldmatrix.trans of byte pairs, which prmt puts in order
//
//   warpgroup 0 (consumer)          warpgroup 1 (consumer)          warpgroup 2 (producer)
//     S_2 = K_2 . Q^T                 softmax, P_1 published          rows by bulk copies into a ring of
//     O += V_1 . P_1   columns        O += V_1 . P_1   columns        STAGES x 16 rows, as stages are released
//     softmax, P_2     0 .. 255       S_3 = K_3 . Q^T  256 .. 511
//     O += V_2 . P_2                  O += V_2 . P_2
//     S_4 = ...                       softmax, P_3 ...
//
//   Warpgroup w computes S of every second tile of 64 rows. Both multiply every P with their half of the value
//   columns. So the softmax of one runs beside the products of the other.
//
// e4m3 is exact in f16. Scales: r of a row is a power of two at or above its largest scale. Value columns are widened
// to f16 as e4m3 * (scale / r), and r goes into the exponent of P^T = 2^(logit + log2 r - ref). P^T fits f16 too,
// because ref is a reference for that sum, which rises when a P^T passes MAX_P. The denominator adds P^T / r.
//   V32_FP8: S^T is exact: between chunks of 128 columns it is multiplied by scale_c / scale_c+1. RoPE in bfloat16.
//   V4_FP8:  all scales are powers of two: K is widened to e4m3 * (scale / r) too, which is exact. RoPE becomes f16
//            divided by r and goes back to where it lay in the ring; as a value column it needs no more.
// Q is f16 times a power of two that brings its largest value to 2^13 .. 2^14.
//
// Instructions issued beside wgmma take turns with it: float32 arithmetic takes issue slots from it, the others wait
// until it leaves some (uniform instructions cost nothing). So the time of large batches is the number of
// instructions.
//
// How work is divided over CTAs is the business of attention/division, which DIVISION chooses from: whole items, clusters,
// shares, segments or teams. A CTA asks it for its turns, each a split of a work item, and gives it the result of each.
// Where a division has equal splits, the tiles of V32 rows are dealt out to them in turn.
//
// Only tiles in which an entry is valid are copied and multiplied. Each producer warp looks at all entries of a tile
// before it copies its rows, and passes the tile over if none is valid. So nobody knows beforehand how many tiles a split
// has: a tile says whether more may follow (`Follows`), and if none did although more might have, a tile that holds
// nothing but the end of the split comes last. Where the lists end is found early, so that the next Q and its rows can
// be asked for: of the CTA's first splits by the consumers while they wait for Q, of later ones by the producer warps.
// V4_FP8, whose lists are shorter, and END KEEP: by the producer warps, after a few tiles without rows.
//
//   full[stage]          copies done          COPIERS warps: bulk copies, and one arrival for `marks`; V4_FP8: 32 more
//                                             after the copies of scales
//   empty[stage]         stage released       the 8 consumer warps
//   q_full               Q has come           bulk copies, and one arrival for `attended`
//   q_empty              Q released           the 8 consumer warps, after the last product with it
//   ends_known           first splits' ends   the 8 consumer warps
//   P_READY + w          named: P of warpgroup w's tile is published: its 128 threads arrive, the other 128 wait
//   WARPGROUP_SYNC + w   named: the 128 threads of consumer warpgroup w
//   CONSUMER_SYNC        named: all 256 consumer threads
//   PRODUCER_SYNC        named: the 128 producer threads, who find a split's end
//
// Shared memory, HEADS 64, V32_FP8: Q 73,728, and 1,024 for the gaps with which it comes; two P of heads x 64 f16,
// 16,384; 12 stages of 16 rows x 656, 125,952; the rest 6,928. V4_FP8: Q 65,536; rows of 592.
// Registers: 232 a consumer thread, 40 a producer thread, together the 384 x 168 of the launch.
// What was tried, what bounds it: docs/kernels/fp8_sm90.md.
#include "attention/fp8_sm90/results.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"

// --- a work item ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void release_q(const Role& r) {
    __syncwarp();
    mbarrier_arrive_for_warp(shared_address(&small().q_empty), r.lane);
}

// Waits for a tile's rows, those of this warp's stage, and returns what follows the tile.
__device__ __forceinline__ uint32_t wait_for_tile(const Role& r, uint32_t stage) {
    const int place = place_of(stage + r.warp);
    mbarrier_wait(shared_address(&small().full[place]), phase_of(stage + r.warp));
    return small().marks[place] & FOLLOWS;
}

// Releases a tile that nothing is read of. Its stages may have come at different times.
__device__ __forceinline__ void pass_tile(const Role& r, uint32_t stage) {
#pragma unroll 1
    for (int k = 0; k < TILE_STAGES; ++k) {
        const int place = place_of(stage + k);
        mbarrier_wait(shared_address(&small().full[place]), phase_of(stage + k));
        __syncwarp();  // no lane is still to see that phase
        mbarrier_arrive_for_warp(shared_address(&small().empty[place]), r.lane);
    }
}

// What a division does with O^T (division.cuh).
struct Results {
    static constexpr int VALUES = 8;
    const AttentionParams& p;
    const Attended& w;
    const Role& r;
    Output& out;

    __device__ __forceinline__ bool begins_item() const { return w.begins_item; }
    __device__ __forceinline__ bool ends_item() const { return w.ends_item; }
    __device__ __forceinline__ bool is_first_warp() const { return r.warpgroup == 0 && r.warp == 0; }
    __device__ __forceinline__ int lane() const { return r.lane; }
    __device__ __forceinline__ void sync() const { sync_consumers(); }
    __device__ __forceinline__ void write(const PartialResults<8>& partials) const { write_partial(r, out, partials); }
    __device__ __forceinline__ void merge(const ClusterResults<8>& partials) const {
        merge_partials(p, w.query, w.first_head, partials);
    }
    __device__ __forceinline__ void keep(int split) const { merge_segments(p, w, r, split, out); }
    __device__ __forceinline__ void finish() const {
        finish_results(p, w, r, out);
        store();
    }
    __device__ __forceinline__ void store() const { store_results(p, w, r, out); }
};

// Tile after tile: this warpgroup's next S, then the product with the other's tile, then the softmax of its own.
// Returns the stage behind the split.
__device__ __forceinline__ int attend(const AttentionParams& p, int turn, int stage, const Role& r,
                                      const Attended& known) {
    const Attended& w = ONE_TURN ? known : small().attended[turn % 2];
    float logit_scale;
    if (Division::split_of(p, turn) == 0) {
        logit_scale = load_q(p, turn, w, r);
        if (END == End::KEEP) small().logit_scale = logit_scale;  // all threads have the same
    } else {
        mbarrier_wait(shared_address(&small().q_full), turn & 1);
        logit_scale = small().logit_scale;
    }
    if (threadIdx.x < HEADS) small().ref[threadIdx.x] = REF_NONE;
    fence_proxy_async();
    sync_consumers();

    Output out;
    clear(out);
    const int other = 1 - r.warpgroup;
    auto multiply_other = [&](uint32_t stage) {
        named_barrier_sync(P_READY + other, CONSUMERS);
        multiply_pv(r, stage, other, small().raised[other], out, [] {});
    };
    const int first = stage;
    stage += TILE_STAGES * r.warpgroup;  // the first of this warpgroup's tile
    // What follows this warpgroup's last tile, and the last one of both; whether the other's last one is still to be
    // multiplied.
    uint32_t follows = ANYTHING, last;
    bool other_is_left = false;
#pragma unroll 1
    for (;; stage += 2 * TILE_STAGES) {
        if (stage != first) {  // a tile of the other stands before it
            last = wait_for_tile(r, stage - TILE_STAGES);
            if (last & NONE) {  // or ENDED
                other_is_left = last == NONE;
                break;
            }
        }
        last = wait_for_tile(r, stage);
        if (last == ENDED) {
            other_is_left = stage != first;
            stage += TILE_STAGES;
            break;
        }
        follows = last;
        float s[HEADS / 2], sums[OWN_HEADS];
        const RowScales scales = multiply_qk(r, stage, logit_scale, s);
        if (follows != ANYTHING) release_q(r);
        if (stage != first) multiply_other(stage - TILE_STAGES);
        const bool raised = softmax_tile(r, scales, s, sums, stage == first);
        multiply_pv(r, stage, r.warpgroup, raised, out, [&] {
            add_lanes(r, sums);
#pragma unroll
            for (int c = 0; c < SUMS; ++c) out.sum[c] += sums[c];
        });
        if (follows == NONE) {
            stage += TILE_STAGES;
            break;
        }
    }
    // Now `stage` is behind the split.
    if (follows == ANYTHING) release_q(r);
    if (last == ENDED) pass_tile(r, stage - TILE_STAGES);
    if (other_is_left) multiply_other(stage - (last == ENDED ? 2 : 1) * TILE_STAGES);
    // Of clusters, what is derived from the lane has no registers in the loop.
    const Role rare = DIVISION == CLUSTERS ? rare_role(r) : r;
    Division::end_turn(p, small().division, turn, Results{p, w, rare, out});
    return stage;
}

// --- the kernel -----------------------------------------------------------------------------------------------

// grid: x CTAs among which the work items are divided; in clusters x a cluster an item.
extern "C" __global__ void __launch_bounds__(THREADS, 1) fp8_sm90(const __grid_constant__ AttentionParams p) {
    Small& sm = small();
    if (threadIdx.x % 32 == 0) {  // one lane of each warp: the lanes of a warp would take turns, 40 cycles each
        for (int stage = threadIdx.x / 32; stage < STAGES; stage += THREADS / 32) {
            mbarrier_init(shared_address(&sm.full[stage]), COPIERS * (WARP_ARRIVALS + (SCALES_APART ? 32 : 0)));
            mbarrier_init(shared_address(&sm.empty[stage]), 8 * WARP_ARRIVALS);
        }
        if (threadIdx.x == 0) {
            mbarrier_init(shared_address(&sm.q_full), 2);
            mbarrier_init(shared_address(&sm.q_empty), 8 * WARP_ARRIVALS);
            mbarrier_init(shared_address(&sm.ends_known), 8 * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    const int cta = blockIdx.x;
    Division::begin(p, sm.division, cta);
    __syncthreads();
    if (Division::is_idle(sm.division)) return;
    Work only;  // if ONE_TURN: found while an earlier kernel runs, unless that may write lengths
    if constexpr (ONE_TURN) {
        if (!Division::HAS_WAITED && has_lengths(p)) wait_for_earlier_kernels();
        only = find_work(p, 0);
    }
    if (!FOUND_EARLY || has_lengths(p)) wait_for_earlier_kernels();
    static_assert(Division::SCRATCH_BYTES <= 2 * LINES_BYTES, "the space of P, to which no bulk copies come");
    Division::finish(p, sm.division, cta, reinterpret_cast<uint16_t*>(shared + P_AT));
    if (!FOUND_EARLY) let_next_kernel_start();
    int stage = 0;
    if (threadIdx.x >= CONSUMERS) {
        decrease_registers_to<40>();
#pragma unroll 1
        for (int turn = 0; turn < num_turns(p); ++turn) {
            Work w = ONE_TURN ? only : find_work(p, turn);
            w.turn = turn;
            w.stage = stage;
            stage = copy_rows(p, w, uniform(threadIdx.x / 32 % 4), threadIdx.x % 32);
        }
        Division::leave();
    } else {
        increase_registers_to<232>();
        Attended known;  // if ONE_TURN
        if constexpr (ONE_TURN) known = {only.query, only.first_head, only.begin == 0, true};
        if (END == End::KEEP && uniform(threadIdx.x / 32) == 0 && num_turns(p) > 0) fetch_first_q(p, threadIdx.x);
        if (threadIdx.x == 0) Division::join(p, sm.division);
        if (CONSUMERS_LOOK) find_first_ends(p, only);
        if (FOUND_EARLY) wait_for_earlier_kernels();
#pragma unroll 1
        for (int turn = 0; turn < num_turns(p); ++turn) stage = attend(p, turn, stage, consumer_role(), known);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
