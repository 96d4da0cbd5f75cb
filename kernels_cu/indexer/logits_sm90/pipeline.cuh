// What a math warpgroup of logits_sm90 does, and the kernel.
#pragma once
#include "indexer/logits_sm90/results.cuh"
#include "indexer/logits_sm90/scheduled.cuh"
#include "ptx/setmaxnreg.cuh"

// --- math -----------------------------------------------------------------------------------------------------

// x itself, but the result of a shuffle: so the compiler keeps it in a register instead of computing it anew wherever
// it is used. The loop over units has few instructions to spare beside its sums. With more than one pair of queries
// there are no registers to keep it in.
template <typename T>
__device__ __forceinline__ T kept_in_register(T x, int lane) {
    return PAIRS == 1 ? __shfl_sync(~0u, x, lane) : x;
}

__device__ __forceinline__ uint64_t kept_operand(uint64_t operand) {
    return PAIRS == 1 ? operand >> 32 << 32 | uint32_t(uniform(int(uint32_t(operand)))) : operand;
}

__device__ __forceinline__ uint32_t uniform_kept(uint32_t x) { return PAIRS == 1 ? uint32_t(uniform(int(x))) : x; }

constexpr int EMPTY_BEHIND_FULL = 8 * STAGES;  // bytes from a stage's barrier in `full` to the one in `empty`

__device__ __forceinline__ void compute(const LogitsParams& p, int warpgroup) {
    Small& sm = small();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = kept_in_register(lane % 4, lane);
    const int my_key = key_of_thread(threadIdx.x);
    const int own_queries = TOGETHER ? warpgroup * QUERIES : 0;
    const uint64_t first_stage = kept_operand(wgmma_operand(stage_rows(0), LINE_GROUP, 16));
    const uint32_t first_full = uniform_kept(shared_address(&sm.full[0]));
    const uint32_t scales = kept_in_register(shared_address(&sm.scales[0][my_key]), lane);
    RingPlace place = {TOGETHER ? 0 : warpgroup, 0};
    int ahead = place.stage;  // units of the tile before this warpgroup's next one
    for (int turn = 0;; ++turn) {
        const int buffer = turn % BUFFERS;
        mbarrier_wait(shared_address(&sm.tile_full[buffer]), turn / BUFFERS % 2);
        const Header& h = sm.header[buffer];
        const int units = uniform(h.units);
        if (units == 0) return;
        Weights w;
        w.load(shared_address(&sm.weights[buffer][own_queries * HEADS]), lane);
        Results results(p, h, own_queries, my_key, t, ahead);
        const uint64_t queries =
            kept_operand(wgmma_operand(buffer_rows(buffer) + own_queries * HEADS * QUERY_BYTES, LINE_GROUP, 16));
        fence_proxy_async();

        float logits[PAIRS] = {};  // of this warpgroup's unit before, not stored yet
#pragma unroll 1
        while (ahead < units) {
            const uint32_t full = first_full + 8 * place.stage;
            mbarrier_wait(full, place.round);
            float c[ROWS / 2], scale;
            bool exists;
            if constexpr (MXFP4) {
                WidenedKeys keys;
                keys.load(place.stage, warp, lane, t);
                scale = keys.scale;
                exists = sm.exists[place.stage][warp / 2] >> my_key % 32 & 1;
                __syncwarp();
                mbarrier_arrive_elected<EMPTY_BEHIND_FULL>(full);
                multiply(c, keys, queries);
                results.store(p, logits, ahead, t);
                wgmma_wait<0>();
            } else {
                if (!UNDERWAY) fence_proxy_async();
                multiply(c, wgmma_operand_number(first_stage, place.stage, STAGE_BYTES), queries);
                results.store(p, logits, ahead, t);
                wgmma_wait<0>();
                scale = __uint_as_float(load_shared_4(scales + place.stage * UNIT * 4));
                exists = !PAGED || sm.exists[place.stage][warp / 2] >> my_key % 32 & 1;
                __syncwarp();
                mbarrier_arrive_elected<EMPTY_BEHIND_FULL>(full);
            }
            Sums sums;
            sum_heads(c, w, sums);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const float sum = sum_of_lane(sums[i], t);
                logits[i] = exists ? sum * scale : -INF;
            }
            place.advance(UNIT_STEP);
            ahead += UNIT_STEP;
        }
        results.store(p, logits, ahead, t);
        ahead -= units;
        __syncwarp();
        mbarrier_arrive_elected<0>(shared_address(&sm.tile_empty[buffer]));
    }
}

// --- the kernel -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void run(const LogitsParams& p) {
    // Beside a CTA of three math warpgroups or more no CTA of the next launch has room. Those of a top-k would then
    // all start on the SMs that come free first. So the next launch may start when every CTA has copied its last keys.
    constexpr bool STARTS_NEXT_LATE = WARPGROUPS >= 3 && !TOGETHER;
    if constexpr (!STARTS_NEXT_LATE) let_next_kernel_start();
    if constexpr (!SCHEDULED) init_barriers();
    const int warpgroup = uniform(threadIdx.x / 128);
    Share share = {};
    Scheduled schedule = {};
    bool warp_finds_share = false;
    if constexpr (SCHEDULED) {
        if (warpgroup == WARPGROUPS || warpgroup == 0) schedule.read(p, threadIdx.x % 32);
        init_barriers();
    } else {
        warp_finds_share = UNDERWAY == 0 && num_tiles<TILE_QUERIES>(p) <= MAX_TILES_COUNTED_BY_WARP;
        if (warp_finds_share) __syncthreads();
        wait_for_earlier_kernels();
        if (!warp_finds_share) share = share_of_cta<THREADS, TILE_QUERIES, UNIT>(p);  // synchronizes the CTA
    }
    if (warpgroup < WARPGROUPS) {
        if constexpr (SCHEDULED) {
            __syncthreads();
            if (warpgroup == 0) fill_first_buffer(p, schedule);
        }
        if constexpr (MATH_COPIES_FIRST_QUERIES) copy_first_queries(p, share, warpgroup);
        if constexpr (MOVES_REGISTERS) increase_registers_to<MATH_REGISTERS>();
        compute(p, warpgroup);
        return;
    }
    if constexpr (MOVES_REGISTERS) decrease_registers_to<PRODUCER_REGISTERS>();
    if constexpr (SCHEDULED) {
        __syncthreads();
        produce_scheduled(p, schedule);  // which waits for earlier kernels; math warpgroups wait for what it copies
    } else {
        produce(p, share, warp_finds_share);
    }
    if constexpr (STARTS_NEXT_LATE) let_next_kernel_start();
    if constexpr (COMPACT) {
        clean_compact_rows<128>(p, threadIdx.x % 128);
    } else if (!SCHEDULED || __builtin_expect(p.clean, false)) {
        clean_rows<128, TILE_QUERIES, UNIT>(p, threadIdx.x % 128);
    }
}
