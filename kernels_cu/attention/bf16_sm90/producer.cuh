// Part of bf16_sm90: copies of rows and Q to shared memory, and the producer warpgroup's main loop.
#pragma once
#include "attention/bf16_sm90/tiles.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"

// Starts copies of column blocks BEGIN to END - 1, of this thread's rows FIRST to LAST - 1 (of four). They go to a
// tile or to Q at `place` in shared memory. Null rows become zeros.
template <typename K, int BEGIN, int END, int FIRST = 0, int LAST = 4>
__device__ __forceinline__ void copy_blocks(const Copier& c, int place, const uint8_t* const (&rows)[4]) {
#pragma unroll
    for (int i = FIRST; i < LAST; ++i) {
#pragma unroll
        for (int b = BEGIN; b < END; ++b) {
            const uint32_t to = c.at + place + b * BLOCK_BYTES + i * 2048;
            if constexpr (K::POLICY) {
                cp_async_16(to, rows[i] + b * 128, rows[i] != nullptr, c.policy);
            } else {
                cp_async_16(to, rows[i] + b * 128, rows[i] != nullptr);
            }
        }
    }
}

// Copies region REGION of tile TILE, each half once it is released: half of V's columns, and RoPE if it is there.
template <typename K, int TILE, int REGION>
__device__ __forceinline__ void copy_region(const typename K::Params& p, const Work& w, const Copier& c, int pair,
                                            const uint8_t* const (&rows)[4], typename K::Validity validity,
                                            Follows follows, uint32_t parity) {
    Small& sm = small<K>();
    mbarrier_wait(shared_address(&sm.empty[TILE][REGION][0]), parity);
    copy_blocks<K, 4 * REGION, 4 * REGION + 4, 0, 2>(c, TILE_AT + TILE * TILE_BYTES, rows);
    mbarrier_wait(shared_address(&sm.empty[TILE][REGION][1]), parity);
    copy_blocks<K, 4 * REGION, 4 * REGION + 4, 2, 4>(c, TILE_AT + TILE * TILE_BYTES, rows);
    if constexpr (has_rope(TILE, REGION)) copy_blocks<K, 8, 9>(c, TILE_AT + TILE * TILE_BYTES, rows);
    if constexpr (has_validity<K>(TILE, REGION)) {
        if (c.lane % 8 < K::VALIDITY_LANES) {
            K::store_validity(p, w, c, 2 * pair + TILE, TILE, rows, validity);
            if (K::SKIPS != Skips::NONE && c.row == 0) sm.follows[TILE] = follows;
            mbarrier_arrive(shared_address(&sm.full[TILE][REGION]));
        }
    }
    mbarrier_arrive_after_copies(shared_address(&sm.full[TILE][REGION]));
}

// The address of this thread's chunk of each of its rows; null where a row is not valid.
template <typename K>
__device__ __forceinline__ void find_rows(const typename K::Params& p, const Copier& c, const int32_t (&slots)[4],
                                          const uint8_t* (&rows)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        rows[i] = is_valid(p, slots[i]) ? K::row_of(p, slots[i]) + c.lane % 8 * 16 : nullptr;
    }
}

// The same for lines `first` .. of Q; null for padding heads. Whole warps of padding are not copied.
template <typename K>
__device__ __forceinline__ void find_q(const typename K::Params& p, const Work& w, const Copier& c, int first,
                                       const uint8_t* (&rows)[4]) {
#pragma unroll
    for (int i = 0; i < HEADS / 16; ++i) {
        const Line line = K::line_at(p, w, w.head_tile * HEADS + first + 16 * i + c.row);
        const bf16* q = p.q + line.query.b * p.q_b + line.query.s * p.q_s + line.head * p.q_h;
        rows[i] = line.head < p.h_q ? reinterpret_cast<const uint8_t*>(q) + c.lane % 8 * 16 : nullptr;
    }
}

// Tells the consumers their next work item.
template <typename K>
__device__ __forceinline__ void announce(int work, int length) {
    if (threadIdx.x % 128 != 0) return;
    small<K>().work = work;
    small<K>().length = length;
    mbarrier_arrive(shared_address(&small<K>().q_full));
}

template <typename K>
__device__ __forceinline__ void run_producer(const typename K::Params& p) {
    const Copier c = Copier::here<K>(p, threadIdx.x / 32 - 8);
    Small& sm = small<K>();
    uint32_t parity = 3;  // bit 0: of tiles, bit 1: of Q; the first wait for each space returns at once
    const int head_tiles = num_head_tiles(p);
    K::template for_each<K>(p, head_tiles, [&](int index) {
        Work w = K::template find_work<K>(p, index, head_tiles);
        const uint8_t* rows[4];
        K::wait(p, w);
        int32_t even[4], odd[4];  // list entries of the next even and odd tile
        Tiles<K> tiles;
        const auto asked = tiles.load_first(p, w, c, even, odd);

        if constexpr (!K::CLUSTER) {
            // Q is copied like a tile whose rows are its lines.
            mbarrier_wait(shared_address(&sm.q_empty), parity >> 1);
            parity ^= 2;
            find_q<K>(p, w, c, 0, rows);
            copy_blocks<K, 0, BLOCKS, 0, HEADS / 16>(c, 0, rows);
            mbarrier_arrive_after_copies(shared_address(&sm.q_full));
        }

        bool last = !tiles.begin(p, w, c, asked, even, odd);
        announce<K>(index, w.length);
#pragma unroll 1
        for (int pair = 0; !last; ++pair) {
            // A pair without a valid entry is skipped. But the last pair is always copied: it tells the consumers that
            // the work item has ended.
            const bool any = tiles.any_valid(p, even, odd);
            last = !tiles.find_more(p, w);
            const Follows follows = !any ? ENDED : last ? LAST : MORE;
            const bool copied = any || last;
            find_rows<K>(p, c, even, rows);
            const typename K::Validity even_validity = K::load_validity(p, w, c, 2 * pair);
            if (copied) copy_region<K, 0, 0>(p, w, c, pair, rows, even_validity, follows, parity & 1);
            K::template load_slots<K>(p, w, c, tiles.take_tile(w), even);
            if (copied) copy_region<K, 0, 1>(p, w, c, pair, rows, even_validity, follows, parity & 1);
            find_rows<K>(p, c, odd, rows);
            const typename K::Validity odd_validity = K::load_validity(p, w, c, 2 * pair + 1);
            if (copied) copy_region<K, 1, 0>(p, w, c, pair, rows, odd_validity, follows, parity & 1);
            K::template load_slots<K>(p, w, c, tiles.take_tile(w), odd);
            if (copied) copy_region<K, 1, 1>(p, w, c, pair, rows, odd_validity, follows, parity & 1);
            if (copied) parity ^= 1;
        }
    });
    if constexpr (!K::CLUSTER) {
        mbarrier_wait(shared_address(&sm.q_empty), parity >> 1);
        announce<K>(-1, 0);
        mbarrier_arrive(shared_address(&sm.q_full));
    }
}

// In clusters the consumers copy Q: each warpgroup half of the lines, or the first one all 16.
template <typename K>
__device__ __forceinline__ void copy_q(const typename K::Params& p, int warpgroup, int warp) {
    constexpr int LINES_OF_16 = HEADS / 16, EACH = LINES_OF_16 > 1 ? LINES_OF_16 / 2 : 1;
    const Copier c = Copier::here<K>(p, warp);
    const int first = warpgroup * EACH;
    const uint8_t* rows[4];
    find_q<K>(p, K::work_of(p, blockIdx.x, num_head_tiles(p), 0), c, 16 * first, rows);
    wait_for_earlier_kernels();
    if (first < LINES_OF_16) copy_blocks<K, 0, BLOCKS, 0, EACH>(c, 2048 * first, rows);
    mbarrier_arrive_after_copies(shared_address(&small<K>().q_full));
}
