// Part of bf16_sm90: a work item in a consumer warpgroup, and the kernel's main function.
#pragma once
#include "attention/bf16_sm90/producer.cuh"
#include "attention/bf16_sm90/results.cuh"
#include "attention/bf16_sm90/values.cuh"
#include "ptx/cluster.cuh"
#include "ptx/setmaxnreg.cuh"

// All pairs of tiles of a work item in warpgroup W.
template <typename K, int W>
__device__ __forceinline__ void multiply_pairs(const typename K::Params& p, const typename K::Reader& reader,
                                               int pairs, int warp, int lane,
                                               const uint32_t (&kept)[K::KEPT_Q_STEPS][4], uint32_t& parity,
                                               Softmax& state, float (&o)[128]) {
    Small& sm = small<K>();
    // An asm load: with an ordinary load, every wgmma operand took two R2UR in clusters and shares.
    auto what_follows = [&] { return load_shared_4(shared_address(&sm.follows[W])); };
    bool last = pairs == 0;
    for (int pair = 0; !last; ++pair) {
        if constexpr (K::SKIPS == Skips::VOTED) {
            mbarrier_wait(shared_address(&sm.full[W][0]), parity);
            const uint32_t follows = what_follows();
            if (follows == ENDED) break;
            last = follows == LAST;
        }
        float s[32];
        start_qk<K>(W, parity, kept, s);
        parity ^= 1;
        const typename K::Columns columns(reader, W, lane % 4);
        if constexpr (K::SKIPS == Skips::MARKED) last = what_follows() != MORE;
        if constexpr (K::SKIPS == Skips::NONE) last = pair + 1 == pairs;
        uint32_t mine[4][4];
        float my_ref[2], my_sum[2], other_ref[2];
        if constexpr (W == 0) {
            wgmma_wait<0>();
        } else {
            // P_0 is ready by now. Its product runs while this warpgroup computes P_1.
            wait_for_p<K>(0, warp, lane, other_ref);
            follow_reference(state, other_ref, o);
            start_pv(0, W, o);
            wgmma_wait<2>();
        }
        if (!K::CLUSTER && last) release(sm.q_empty, lane);
        const bool rises = softmax_tile<K>(p, columns, pair, pairs, s, state, my_ref, my_sum, mine);
        publish_p<K>(W, warp, lane, mine, my_ref);
        if constexpr (W == 1) {
            release_halves(sm.empty[0][1], lane);
        }
        if (rises) raise_reference(state, my_ref, o);
        state.sum[0] += my_sum[0];
        state.sum[1] += my_sum[1];
        start_pv(W, W, mine, o);
        release_halves(sm.empty[W][W], lane);
        if constexpr (W == 0) {
            wait_for_p<K>(1, warp, lane, other_ref);
            follow_reference(state, other_ref, o);
            start_pv(1, W, o);
            release_halves(sm.empty[1][0], lane);
        }
    }
}

// The main loop of both consumer warpgroups. Only multiply_pairs differs between them: all other instructions run once
// a work item and are fetched from memory, so they are shared.
template <typename K>
__device__ __forceinline__ void run_consumer(const typename K::Params& p, int warpgroup) {
    Small& sm = small<K>();
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const typename K::Reader reader = K::Reader::here(p, warp, lane);
    uint32_t parity = 0, turn = 0;
    if constexpr (K::CLUSTER) copy_q<K>(p, warpgroup, warp);
    if constexpr (K::ROLES_START_EARLY) wait_for_earlier_kernels();
#pragma unroll 1
    for (;; turn ^= 1) {
        Softmax state;
        float o[128];
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = 0.0f;
        mbarrier_wait(shared_address(&sm.q_full), turn);
        if (!K::CLUSTER && sm.work < 0) break;
        const Work w = K::work_of(p, sm.work, num_head_tiles(p), sm.length);
        uint32_t kept[K::KEPT_Q_STEPS][4];
        keep_q(warp, lane, kept);
        if (!K::CLUSTER && w.pairs == 0) release(sm.q_empty, lane);
        if (warpgroup == 0) {
            multiply_pairs<K, 0>(p, reader, w.pairs, warp, lane, kept, parity, state, o);
        } else {
            multiply_pairs<K, 1>(p, reader, w.pairs, warp, lane, kept, parity, state, o);
        }
        finish<K>(p, w, turn, state, o);
        if constexpr (K::CLUSTER) break;
    }
}

// --- the kernel -----------------------------------------------------------------------------------------------

template <typename K>
__device__ __forceinline__ void run(const typename K::Params& p) {
    Small& sm = small<K>();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int region = 0; region < 2; ++region) {
                const bool validity = has_validity<K>(tile, region);
                mbarrier_init(shared_address(&sm.full[tile][region]), 128 + (validity ? 16 * K::VALIDITY_LANES : 0));
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    mbarrier_init(shared_address(&sm.empty[tile][region][half]), 4 * WARP_ARRIVALS);
            }
        }
        mbarrier_init(shared_address(&sm.q_full), (K::CLUSTER ? CONSUMERS : WARPGROUP) + 1);
        mbarrier_init(shared_address(&sm.q_empty), 8 * WARP_ARRIVALS);
        mbarrier_init_fence();
    }
    K::init(p);
    __syncthreads();
    if constexpr (K::OVERLAPS && !K::CLUSTER) {
        if (!K::ROLES_START_EARLY || K::finds_work_in_memory(p)) {
            wait_for_earlier_kernels();
            K::start(p);
            let_next_kernel_start();
        }
    }
    const int warpgroup = uniform(threadIdx.x / WARPGROUP);
    if (warpgroup == 2) {
        decrease_registers_to<40>();
        run_producer<K>(p);
        if constexpr (K::CLUSTER) cluster_sync_with_one_fence(false);  // cluster barriers count every thread
    } else {
        increase_registers_to<232>();
        run_consumer<K>(p, warpgroup);
    }
}
