// Part of portable: a split in the score warps and in the output warps, and the kernel's main function.
#pragma once
#include "attention/portable/results.cuh"
#include "attention/portable/widen.cuh"
#include "ptx/mbarrier.cuh"

// --- score warps --------------------------------------------------------------------------------------------------

// Loads a split's Q, and scans this warp's first tiles.
__device__ __forceinline__ uint32_t load_q_and_scan(const AttentionParams& p, const WorkItem& w, QRegisters& q) {
    const int first = Role::here().warp * SCANNED_TILES;
    load_q(p, w, q);
    return scan_tiles(p, w, first);
}

// A split in a score warp. LOAD_NEXT_Q_EARLY: `q` and `valid`, the results of load_q_and_scan, are kept from a split
// to the next.
__device__ __forceinline__ void run_score_warp(const AttentionParams& p, QRegisters& q, uint32_t& valid) {
    if (OVERLAP_SPLITS && read_thread_index() == OUTPUT_THREADS && has_next(p)) find_split(p, small().turn + 1);
    if (!LOAD_NEXT_Q_EARLY || small().turn == 0) valid = load_q_and_scan(p, small().work, q);
    Softmax softmax;
    softmax.store_sums();
    const int tiles = find_tiles(p, valid);
    named_barrier_arrive(TILES_KNOWN, THREADS);
    if (tiles < 0) return;  // the split is restarted
    int stage = small().stage, phase = small().phase;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        const int buffer = tile % 2;
        mbarrier_wait(shared_address(&small().tile_full[stage]), phase);
        Scores s;
        multiply_qk(stage, q, s);
        if (PV_AFTER_NEXT_QK) named_barrier_arrive(S_DONE + buffer, THREADS);
        if (PART_BUFFERS == 1) named_barrier_sync(GROUP_SYNC + Role::here().group(), SCORE_THREADS / GROUPS);
        store_part(s, buffer);
        named_barrier_sync(P_EMPTY + buffer, THREADS);
        Probabilities probabilities;
        add_parts(s, buffer, probabilities.s);
        probabilities.mask(p, tile);
        softmax.load_sums();
        probabilities.exponentiate(softmax);
        probabilities.write(buffer, softmax);
        named_barrier_arrive(P_FULL + buffer, THREADS);
        softmax.store_sums();
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    softmax.load_sums();
    finish_heads(p, softmax);
    named_barrier_arrive(FACTORS_KNOWN, THREADS);
    if (LOAD_NEXT_Q_EARLY && has_next(p)) valid = load_q_and_scan(p, small().next, q);
}

// --- output warps -------------------------------------------------------------------------------------------------

// Starts to copy the first of a split's `tiles` tiles, which are looked up. The first one goes to stage `stage`.
// QUANTIZED: earlier copies that nobody needs may still be in flight, so they are waited for.
__device__ __forceinline__ void start_copies(const AttentionParams& p, int tiles, int stage) {
    if constexpr (QUANTIZED) {
        cp_async_wait<0>();
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < RAW_STAGES; ++i) {
            if (i < tiles) copy_rows(p, i, i);
            cp_async_commit();
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < min(tiles, STAGES - 1); ++i) copy_tile(p, i, (stage + i) % STAGES);
    }
}

// A split in an output warp. `entries`: list entries of the tiles that are looked up next. They are kept if the split
// is restarted, and with OVERLAP_SPLITS from a split to the next, whose copies start here.
__device__ __forceinline__ void run_output_warp(const AttentionParams& p, int32_t& entries) {
    const int expected = small().expected;
    int stage = small().stage;
    if (!OVERLAP_SPLITS || small().turn == 0 || small().restarted) {
        if (!small().restarted)
            entries = look_up_and_load(p, small().work, 0, load_entries(p, small().work, 0, false), false);
        start_copies(p, expected, stage);
    }
    if constexpr (QUANTIZED) {
#pragma unroll 1
        for (int i = 0; i < min(expected, WIDENED_BEFORE); ++i) widen_tile(p, i, expected, (stage + i) % STAGES);
    }
    named_barrier_sync(TILES_KNOWN, THREADS);  // the first rows and Q are on their way
    int tiles = small().tiles;
    if (HIDE_UNIFORM_LOOP) tiles += read_thread_index() / THREADS;  // 0, which ptxas does not know
    if (small().skips && !small().restarted) entries = look_up_marked(p, small().work);
    if (small().restarts) return;
    if (PV_AFTER_NEXT_QK && tiles > 0) named_barrier_sync(S_DONE, THREADS);
    if (tiles > 0) named_barrier_arrive(P_EMPTY, THREADS);
    if (tiles > 1) named_barrier_arrive(P_EMPTY + 1, THREADS);
    Output o;
    clear(o);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        const int buffer = tile % 2;
        if ((tile + COPIED_BEFORE) % LOOKUP_TILES == 0)
            entries = look_up_and_load(p, small().work, tile + COPIED_BEFORE, entries, small().skips);
        named_barrier_sync(P_FULL + buffer, THREADS);
        if (!QUANTIZED && tile + COPIED_BEFORE < tiles)
            copy_tile(p, tile + COPIED_BEFORE, stage == 0 ? STAGES - 1 : stage - 1);
        rescale_output(buffer, o);
        multiply_pv(stage, buffer, o, [&] {
            if (PV_AFTER_NEXT_QK && tile + 1 < tiles) named_barrier_sync(S_DONE + (tile + 1) % 2, THREADS);
        });
        if (tile + 2 < tiles) named_barrier_arrive(P_EMPTY + buffer, THREADS);
        if constexpr (QUANTIZED) {
            if (tile + WIDENED_BEFORE < tiles) {
                if (STAGES == 2) named_barrier_sync(OUTPUT_SYNC, OUTPUT_THREADS);
                widen_tile(p, tile + WIDENED_BEFORE, tiles, (stage + WIDENED_BEFORE) % STAGES);
            }
        }
        if (++stage == STAGES) stage = 0;
    }
    if constexpr (FOLDED) {
        if (tiles == 1) multiply_rounding_errors(small().stage, 0, o);
    }
    // Copies of the next split's first rows start before this split's results are written.
    if (OVERLAP_SPLITS && has_next(p)) entries = load_entries(p, small().next, 0, false);
    named_barrier_sync(FACTORS_KNOWN, THREADS);
    if (OVERLAP_SPLITS && has_next(p)) {
        const WorkItem& next = small().next;
        entries = look_up_and_load(p, next, 0, entries, false);
        start_copies(p, next.end - next.begin, small().next_stage);
    }
    finish_output(p, o);
}

// --- the kernel ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ void run(const AttentionParams& p) {
    Small& sm = small();
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int stage = 0; stage < STAGES; ++stage)
            mbarrier_init(shared_address(&sm.tile_full[stage]), (QUANTIZED ? WARP_ARRIVALS : 32) * OUTPUT_WARPS);
    }
    if (in_shares(p)) {
        find_share_early(p, blockIdx.x, sm.share);
        find_share(p, blockIdx.x, sm.share);
        __syncthreads();
    }
    // What all splits have in common is kept in shared memory, because registers are short.
    if (threadIdx.x == 0) {
        sm.turn = -1;
        if (SCALE_OF_CALL) sm.logit_scale = p.scale_log2 * load_call_scale(p.q_scale) * load_call_scale(p.k_scale);
        sm.next_stage = sm.next_phase = 0;
        sm.restarts = false;
        if (OVERLAP_SPLITS && num_turns(p) > 0) find_split(p, 0);
    }
    if (threadIdx.x < OUTPUT_THREADS) {
        int32_t entries;
        while (take_next_split<true>(p)) run_output_warp(p, entries);
    } else {
        QRegisters q;
        uint32_t valid;
        while (take_next_split<false>(p)) run_score_warp(p, q, valid);
    }
}
