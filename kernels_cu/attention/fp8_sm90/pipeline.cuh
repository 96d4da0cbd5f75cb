// Part of fp8_sm90: a turn in the consumer warps, and the kernel's main function.
#pragma once
#include "attention/fp8_sm90/results.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"

// --- a turn ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ void release_q(const Role& r) {
    __syncwarp();
    mbarrier_arrive_for_warp(shared_address(&small().q_empty), r.lane);
}

// Waits for this warp's stage of a tile, and returns what follows the tile.
__device__ __forceinline__ uint32_t wait_for_tile(const Role& r, uint32_t stage) {
    const int place = place_of(stage + r.warp);
    mbarrier_wait(shared_address(&small().full[place]), phase_of(stage + r.warp));
    return small().marks[place] & FOLLOWS;
}

// Releases a tile without reading it. Each stage is waited for, since stages may arrive at different times.
__device__ __forceinline__ void skip_tile(const Role& r, uint32_t stage) {
#pragma unroll 1
    for (int k = 0; k < TILE_STAGES; ++k) {
        const int place = place_of(stage + k);
        mbarrier_wait(shared_address(&small().full[place]), phase_of(stage + k));
        __syncwarp();  // all lanes have seen the phase end before it may be followed by the next
        mbarrier_arrive_for_warp(shared_address(&small().empty[place]), r.lane);
    }
}

// The result of a turn, as a division takes it (`Results` in division.cuh).
struct Results {
    static constexpr int VALUES = 8;
    const AttentionParams& p;
    const TurnInfo& w;
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

// A turn in a consumer warpgroup. Tile after tile it multiplies S of its own next tile, then P.V of the other
// warpgroup's tile, then takes the softmax of its own, then multiplies P.V of its own. Returns the number of the stage
// after the split's last one.
__device__ __forceinline__ int attend(const AttentionParams& p, int turn, int stage, const Role& r,
                                      const TurnInfo& known) {
    const TurnInfo& w = ONE_TURN ? known : small().turn_infos[turn % 2];
    float logit_scale;
    if (Division::split_of(p, turn) == 0) {
        logit_scale = has_e4m3_q(p) ? load_q_e4m3(p, turn, w, r) : load_q(p, turn, w, r);
        if (END == End::KEEP) small().logit_scale = logit_scale;  // the same in all threads
    } else {
        mbarrier_wait(shared_address(&small().q_full), turn & 1);
        logit_scale = small().logit_scale;
    }
    if (threadIdx.x < HEADS) small().ref[threadIdx.x] = REF_NONE;
    prepare_masks(p, w);
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
    stage += TILE_STAGES * r.warpgroup;  // the first stage of this warpgroup's tile
    // `follows`: what follows this warpgroup's latest tile. `last`: what follows the latest tile of both.
    // `other_is_left`: P.V of the other warpgroup's last tile is still to be multiplied.
    uint32_t follows = ANYTHING, last;
    bool other_is_left = false;
#pragma unroll 1
    for (;; stage += 2 * TILE_STAGES) {
        if (stage != first) {  // the tile before is the other warpgroup's
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
    // Now `stage` is the stage after the split's last one.
    if (follows == ANYTHING) release_q(r);
    if (last == ENDED) skip_tile(r, stage - TILE_STAGES);
    if (other_is_left) multiply_other(stage - (last == ENDED ? 2 : 1) * TILE_STAGES);
    // In clusters, no register of the loop is spent on what follows from the lane.
    const Role rare = DIVISION == CLUSTERS ? rare_role(r) : r;
    Division::end_turn(p, small().division, turn, Results{p, w, rare, out});
    return stage;
}

// --- the kernel -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void run(const AttentionParams& p) {
    Small& sm = small();
    if (threadIdx.x % 32 == 0) {  // one lane of each warp: lanes of one warp would be serialised, 40 cycles each
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
    Work only;  // ONE_TURN: found while an earlier kernel runs, unless that kernel may write list lengths
    if constexpr (ONE_TURN) {
        if (!Division::HAS_WAITED && has_lengths(p)) wait_for_earlier_kernels();
        only = find_work(p, 0);
    }
    if (!FOUND_EARLY || has_lengths(p)) wait_for_earlier_kernels();
    static_assert(Division::SCRATCH_BYTES <= P_BYTES, "scratch is in the space of P, which bulk copies do not write");
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
        TurnInfo known;  // if ONE_TURN
        if constexpr (ONE_TURN) known = turn_info_of(only);
        if (END == End::KEEP && uniform(threadIdx.x / 32) == 0 && num_turns(p) > 0) fetch_first_q(p, threadIdx.x);
        if (threadIdx.x == 0) Division::join(p, sm.division);
        if (CONSUMERS_FIND_ENDS) find_first_ends(p, only);
        if (FOUND_EARLY) wait_for_earlier_kernels();
#pragma unroll 1
        for (int turn = 0; turn < num_turns(p); ++turn) stage = attend(p, turn, stage, consumer_role(), known);
    }
}
