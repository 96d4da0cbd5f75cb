// Part of bf16_few_heads_sm90: a query's tiles in a consumer warpgroup, and the kernel's main function.
#pragma once
#include "attention/bf16_few_heads_sm90/producer.cuh"
#include "attention/bf16_few_heads_sm90/results.cuh"
#include "attention/bf16_few_heads_sm90/values.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"

// All tiles of a work item in a consumer warpgroup. `copied` counts the tiles that its producers have copied, over all
// its work items.
__device__ __forceinline__ void attend(const AttentionParams& p, Work w, const Role& r, int& copied, Softmax& state,
                                       float (&o)[V_BLOCKS][HEADS / 2]) {
    int32_t entries[2];
    auto load = [&](int tile) {
        entries[0] = load_entry(p, w, tile, r.row(0));
        entries[1] = load_entry(p, w, tile, r.row(1));
    };
    load(w.begin);
    const int32_t last_entry = load_last_entry(p, w);
    copy_q(p, w, r);
    // The reduction makes it uniform; else the compiler takes the loop below for divergent.
    w.end = __reduce_max_sync(~0u, find_end(p, w, WARPGROUP_SYNC + r.warpgroup, last_entry));
    wait_for_q(r);
#pragma unroll 1
    for (int tile = w.begin; tile < w.end; tile += w.step) {
        const bool valid[2] = {is_valid(p, w, tile, entries[0]), is_valid(p, w, tile, entries[1])};
        // One branch for both cases: after a second branch products began 350 cycles later.
        if (!uniform(any(WARPGROUP_SYNC + r.warpgroup, valid[0] || valid[1]))) {
            if (is_last(w, tile)) wait_for_tile(r, copied++ & 1);
            load(tile + w.step);
            continue;
        }
        float s[HEADS / 2];
        wait_for_stage(r, 1, copied & 1);
        acquire_tensor_cores(r);
        multiply_qk_by_stages(r, copied++ & 1, s);
        softmax_tile(p, r, valid, s, state, o);
        store_p(r, s);
        load(tile + w.step);  // after the barrier, which would wait for the loads
        multiply_pv(r, is_last(w, tile), o);
    }
    sync_warpgroup(r);  // before O^T is stored over the last tile
}

// --- the kernel -----------------------------------------------------------------------------------------------

// Calls `act` with the work of this CTA, `place`. QUERIES 2: with the work of this warpgroup, one query after the
// other.
template <typename Act>
__device__ __forceinline__ void for_each_work(const AttentionParams& p, const Place& place, int warpgroup, Act act) {
    if constexpr (QUERIES == 1) {
        act(find_work(p, place, warpgroup));
    } else {
        const int head_tiles = num_head_tiles(p);
        auto workers = [] { return int(2 * gridDim.x); };
        const int worker = blockIdx.x + warpgroup * gridDim.x;  // a CTA gets a second query only if each CTA has one
        for_each_item(
            [&] { return p.num_queries * head_tiles; }, worker, workers,
            [&](int item) { return find_head_tile(p, item, head_tiles); },
            [&](int index) { act(find_work(p, {index / head_tiles, index % head_tiles, 0, 1}, warpgroup)); });
    }
}

__device__ __forceinline__ void run(const AttentionParams& p) {
    Small& sm = small();
    if (threadIdx.x == 0) sm.multiplying = 0;
    if (threadIdx.x < 2 * STAGES) {
        mbarrier_init(shared_address(&sm.full[threadIdx.x]), WARPGROUP);
        mbarrier_init(shared_address(&sm.empty[threadIdx.x]), 4 * WARP_ARRIVALS);
        mbarrier_init_fence();
    }
    __syncthreads();
    Place place;
    int ctas = 1;
    if (QUERIES == 1) {
        ctas = cluster_size();
        const int item = blockIdx.x / ctas, head_tiles = num_head_tiles(p);
        place = {item / head_tiles, item % head_tiles, int(blockIdx.y * ctas + cluster_rank()), p.num_splits * ctas};
        wait_for_earlier_kernels();  // persistent CTAs gain nothing from overlapping launches
        let_next_kernel_start();
        if (has_results(p, place.query)) return;  // so does the whole cluster
    }
    if (threadIdx.x >= 2 * WARPGROUP) {
        decrease_registers_to<PRODUCER_REGISTERS>();
        const int warpgroup = threadIdx.x / WARPGROUP - 2, quarter = threadIdx.x / 32 % 4;
        uint32_t parity = 1;  // the first wait for each stage returns at once
        for_each_work(p, place, warpgroup, [&](const Work& w) { copy_tiles(p, w, warpgroup, quarter, parity); });
        if (ctas > 1) cluster_sync_with_one_fence(false);  // cluster barriers count every thread
    } else {
        increase_registers_to<256 - PRODUCER_REGISTERS>();
        const Role r = consumer_role();
        int copied = 0;
        for_each_work(p, place, r.warpgroup, [&](const Work& w) {
            Softmax state;
            state.clear();
            float o[V_BLOCKS][HEADS / 2];
#pragma unroll
            for (int v = 0; v < V_BLOCKS; ++v) {
#pragma unroll
                for (int i = 0; i < HEADS / 2; ++i) o[v][i] = 0.0f;
            }
            attend(p, w, r, copied, state, o);
            store_output(r, state, o);
            sync_writers(r);
            if (ctas > 1) return write_cluster_results(p, w, r, ctas);
            write_results(p, w, r);
            if (QUERIES == 2) {
                sync_warpgroup(r);
#pragma unroll
                for (int stage = 0; stage < STAGES; ++stage) release(r, stage);
            }
        });
    }
}
