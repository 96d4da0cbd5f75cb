// FP8 rows on their way from the cache to a tile of bf16 rows for wgmma, a warp and 16 rows of the tile at a time.
//
//   cache --prefetch--> L2 --cp.async--> ring of UNITS x 4 rows, as they lie in the cache --widened--> 16 lines of the tile
//
// The ring is the warp's own: it starts a copy as soon as it has read what was there, and waits for nobody else.
//
// The tile is made of column blocks of 64 values: 64 lines of 128 bytes, 16-byte chunk c of line r at c ^ (r & 7).
// Eight lanes read 128 bytes of a row: 16 values each, which are chunks 2 i and 2 i + 1 of one of two column blocks. Lanes
// of the second block write theirs in the other order, so that the eight lanes of an access write all banks.
#pragma once
#include "layout/reader.cuh"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/chunk.cuh"
#include "tile/row_tile.cuh"

struct StagedRows {
    static constexpr int UNIT_ROWS = 4, STRIDE = Rows::QUANTIZED ? Rows::STAGED_BYTES : 16;
    static constexpr int UNIT_BYTES = UNIT_ROWS * STRIDE, BYTES = UNITS * UNIT_BYTES;
    static constexpr bool SCALES_APART = Rows::FOLDED_SCALES == 0;  // V4_FP8: eight bytes behind the staged row
    static_assert(UNITS <= 4, "copies are at most a tile ahead");

    uint32_t ring, full;  // addresses: staged rows, and an mbarrier a unit
    int lane;

    // Start the copies of unit `number`: the rows that lanes 4 `quarter` .. + 3 know. Invalid ones become zeros.
    template <typename R>
    __device__ __forceinline__ void start(int number, int quarter, const R& row) const {
        const int at = number % UNITS, owner = 4 * quarter + lane / 8;
        const uint32_t to = ring + at * UNIT_BYTES + lane / 8 * STRIDE;
        copy_row<ROW_STRIDE / 16>(to + lane % 8 * 16, shuffle_pointer(row.data, owner), lane);
        if constexpr (R::QUANTIZED && R::FOLDED_SCALES == 0) {
            const uint8_t* scales = shuffle_pointer(row.scales, owner);
            if (lane % 8 == 0) cp_async_8(to + ROW_STRIDE, scales, scales != nullptr);
        }
        mbarrier_arrive_after_copies(full + 8 * at);
    }

    // Ask L2 for the rows that lanes 0 .. 15 know, which lanes 16 .. 31 know too.
    template <typename R>
    __device__ __forceinline__ void prefetch(const R& row) const {
        if (row.data == nullptr) return;
        const uint8_t* from = row.data + lane / 16 * 384;
        prefetch_l2(from);
        prefetch_l2(from + 128);
        prefetch_l2(row.data + (lane < 16 ? 256 : ROW_STRIDE - 1));
        if constexpr (R::QUANTIZED && R::FOLDED_SCALES == 0) {
            if (lane < 16) prefetch_l2(row.scales);
        }
    }

    __device__ __forceinline__ void wait(int number) const { mbarrier_wait(full + 8 * (number % UNITS), number / UNITS & 1); }

    // V32_FP8: the float32 scales of row `row` of a unit.
    __device__ __forceinline__ Vec16 scales(int number, int row) const {
        return load_shared_16(ring + number % UNITS * UNIT_BYTES + row * STRIDE + SCALE_OFFSET);
    }

    // A unit to the four lines from `first` of the tile; V32_FP8: without the scales. Exact.
    __device__ __forceinline__ void widen(int number, uint32_t tile, int first) const {
        const int piece = lane % 8, second = piece / 4, row = lane / 8, line = first + row;
        const uint32_t from = ring + number % UNITS * UNIT_BYTES + row * STRIDE, to = tile + line * 128;
        const int chunk = piece % 4 * 2 + second;
        const uint32_t one = to + second * 8192 + ((chunk ^ (line & 7)) << 4), other = one ^ 16;
        Vec8 scale_bytes = {0, 0};
        if (SCALES_APART) scale_bytes = load_shared_8(from + ROW_STRIDE);
#pragma unroll
        for (int pair = 0; pair < (D_NOPE + 127) / 128; ++pair) {
            if (2 * pair + second >= D_NOPE / 64) break;
            const Vec16 v = load_shared_16(from + 128 * pair + 16 * piece);
            const uint32_t bytes = pair < 2 ? scale_bytes.x : scale_bytes.y;
            const float scale = SCALES_APART ? ue8m0_to_float(bytes >> (pair % 2 * 16 + 8 * second) & 0xff) : 1.0f;
            store_shared(one + pair * 16384, second ? widen_8(v.z, v.w, scale) : widen_8(v.x, v.y, scale));
            store_shared(other + pair * 16384, second ? widen_8(v.x, v.y, scale) : widen_8(v.z, v.w, scale));
        }
        store_shared(to + D_NOPE / 64 * 8192 + ((piece ^ (line & 7)) << 4), load_shared_16(from + ROPE_OFFSET + 16 * piece));
    }

private:
    static __device__ __forceinline__ Vec16 widen_8(uint32_t first, uint32_t second, float scale) {
        float a[4], b[4];
        e4m3x4_to_float(first, a);
        e4m3x4_to_float(second, b);
        return {pack_bf16x2(a[0] * scale, a[1] * scale), pack_bf16x2(a[2] * scale, a[3] * scale),
                pack_bf16x2(b[0] * scale, b[1] * scale), pack_bf16x2(b[2] * scale, b[3] * scale)};
    }
};
