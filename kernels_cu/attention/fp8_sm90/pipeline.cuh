// Of fp8_sm90: a work item in the consumer warps, and all that a CTA does.
#pragma once
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
    __device__ __forceinline__ void write(const PartialResults<8>& partials) const {
        write_partial(p, w, r, out, partials);
    }
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
        logit_scale = has_e4m3_q(p) ? load_q_e4m3(p, turn, w, r) : load_q(p, turn, w, r);
        if (END == End::KEEP) small().logit_scale = logit_scale;  // all threads have the same
    } else {
        mbarrier_wait(shared_address(&small().q_full), turn & 1);
        logit_scale = small().logit_scale;
    }
    if (threadIdx.x < HEADS) small().ref[threadIdx.x] = REF_NONE;
    know_lines(p, w);
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
        const RowScales scales = multiply_qk(p, r, stage, stage - first, logit_scale, s);
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

__device__ __forceinline__ void run(const AttentionParams& p) {
    Small& sm = small();
    if (threadIdx.x % 32 == 0) {  // one lane of each warp: the lanes of a warp would take turns, 40 cycles each
        for (int stage = threadIdx.x / 32; stage < STAGES; stage += THREADS / 32) {
            constexpr int COPIES = COPIERS * (WARP_ARRIVALS + (COPY_SCALES ? 32 : 0));
            mbarrier_init(shared_address(&sm.full[stage]), COPIES);
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
    static_assert(Division::SCRATCH_BYTES <= P_BYTES, "the space of P, to which no bulk copies come");
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
        if constexpr (ONE_TURN) known = attended_of(only);
        if (END == End::KEEP && uniform(threadIdx.x / 32) == 0 && num_turns(p) > 0) fetch_first_q(p, threadIdx.x);
        if (threadIdx.x == 0) Division::join(p, sm.division);
        if (CONSUMERS_LOOK) find_first_ends(p, only);
        if (FOUND_EARLY) wait_for_earlier_kernels();
#pragma unroll 1
        for (int turn = 0; turn < num_turns(p); ++turn) stage = attend(p, turn, stage, consumer_role(), known);
    }
}
