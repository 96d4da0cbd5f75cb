// Part of portable: how output warps widen quantized rows to bf16. Each warp widens the rows that it has copied, once.
//
//   UE8M0 scales, NVFP4   times the scale, which is exact
//   PLAIN_FP8             without scale, which is exact: the call's scale is a factor of logits and of the output
//   FOLDED                without scale: products with float32 scales would be rounded. The scales go to S and P
#pragma once
#include "attention/portable/rows.cuh"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "rows/nvfp4.cuh"
#include "rows/quantize.cuh"
#include "rows/scales.cuh"

constexpr int SCALES_OF_COPY = SCALES_APART ? ROW_STRIDE : SCALE_OFFSET;  // where scales begin in a raw row
constexpr int PARTS_OF_ROW = D_V / 256;  // parts of 256 columns of V; a lane widens 8 values of each

// Says that an output warp's rows of a stage are there.
__device__ __forceinline__ void announce_rows(int stage) {
    __syncwarp();
    mbarrier_arrive_for_warp(shared_address(&small().tile_full[stage]), Role::here().lane);
}

// --- e2m1 ---------------------------------------------------------------------------------------------------------

// Widens the first D_V columns of an output warp's rows. Their first NOPE columns are e2m1, the rest bf16 (V4_NVFP4).
// Scales begin at byte SCALES_AT of a raw row.
template <int NOPE, int SCALES_AT>
__device__ __forceinline__ void widen_fp4_rows(uint32_t from, int stage) {
    const Role r = Role::here();
    const int first = r.warp * WARP_ROWS;
    constexpr int CHUNKS = NOPE / 8, TILE_CHUNKS = 2, AT_ONCE = NOPE < D_V ? 1 : 2;
#pragma unroll
    for (int begin = 0; begin < WARP_ROWS; begin += AT_ONCE) {
        Vec16 values[AT_ONCE][PARTS_OF_ROW];
        uint32_t scales[AT_ONCE][PARTS_OF_ROW];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const uint32_t line = from + (begin + i) * Row::STAGED_BYTES;
#pragma unroll
            for (int part = 0; part < PARTS_OF_ROW; ++part) {
                const int chunk = 32 * part + r.lane;
                if (chunk < CHUNKS) {
                    values[i][part].x = load_shared_4(line + 4 * chunk);
                    scales[i][part] = load_shared_byte(line + SCALES_AT + place_of_scale(chunk / TILE_CHUNKS));
                } else {
                    values[i][part] = load_shared_16(line + int(ROPE_OFFSET) + 16 * (chunk - CHUNKS));
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
            for (int part = 0; part < PARTS_OF_ROW; ++part) {
                const int chunk = 32 * part + r.lane;
                if (chunk < CHUNKS)
                    values[i][part] = dequantize_nvfp4_8(values[i][part].x, e4m3_to_float(scales[i][part]));
                store_shared_16(chunk_address(stage_address(stage), first + begin + i, chunk), values[i][part]);
            }
        }
    }
}

// CODE_BITS 4: widens an output warp's rows, with the e4m3 columns behind V (V32_NVFP4), and says that they are there.
__device__ __forceinline__ void widen_own_fp4_rows(int raw_stage, int stage) {
    static_assert(
        CODE_BITS != 4 || (D_QK == D_V ? D_NOPE + D_ROPE == D_V : D_NOPE == D_V && ROPE_CODED && D_QK - D_V == 64),
        "");
    const Role r = Role::here();
    const uint32_t from = raw_rows(r.warp, raw_stage);
    widen_fp4_rows<D_NOPE, SCALES_OF_COPY>(from, stage);
    if (D_QK > D_V && r.lane / 8 < WARP_ROWS) {
        const uint32_t codes = from + r.lane / 8 * Row::STAGED_BYTES + int(ROPE_OFFSET) + r.lane % 8 * 8;
        store_shared_16(chunk_address(stage_address(stage), r.warp * WARP_ROWS + r.lane / 8, D_V / 8 + r.lane % 8),
                        dequantize_8(load_shared_8(codes), 1.0f));
    }
    announce_rows(stage);
}

// --- e4m3 ---------------------------------------------------------------------------------------------------------

// Rare. If a lane's scale is 0, sets its SCALE_COLUMNS bytes from `at` on to zeros: what stands under a scale of 0
// counts as 0, even NaN. All lanes of the warp call.
__device__ __forceinline__ void clear_under_zero(uint32_t at, bool zero) {
#pragma unroll 1
    for (int i = 0; zero && i < SCALE_COLUMNS; i += 16) store_shared_16(at + i, {0, 0, 0, 0});
    __syncwarp();
}

// CODE_BITS 8: widens an output warp's rows, and says that they are there.
__device__ __forceinline__ void widen_own_fp8_rows(int raw_stage, int stage) {
    const Role r = Role::here();
    Small& sm = small();
    const uint32_t from = raw_rows(r.warp, raw_stage);
    const int first = r.warp * WARP_ROWS;
    // A lane widens a chunk of 8 values of each part of V. Where these chunks do not fill the last part (V4_FP8), the
    // other lanes take the chunks of the bf16 columns.
    constexpr int CHUNKS = (D_NOPE < D_V ? D_NOPE : D_V) / 8, AT_ONCE = FOLDED ? 2 : 1;
    constexpr bool ROPE_WITH = D_NOPE < D_V;
    constexpr bool END = D_QK > D_V, END_CODED = D_NOPE > D_V;  // columns behind V, and whether they are e4m3
    static_assert(!ROPE_WITH || CHUNKS + D_ROPE / 8 == 32 * PARTS_OF_ROW, "");
    static_assert(!END || D_QK - D_V == 64, "a chunk a lane");
    // Loaded first: the columns behind V, a chunk a lane, and (FOLDED) scales.
    const int end_row = r.lane / 8 % WARP_ROWS, end_chunk = r.lane % 8;
    const int scale_row = r.lane / 4 % WARP_ROWS, number = r.lane % 4;
    Vec16 end;
    float scale;
    if (END_CODED) {
        end = dequantize_8(load_shared_8(from + end_row * Row::STAGED_BYTES + D_V + 8 * end_chunk), 1.0f);
    } else if (END) {
        end = load_shared_16(from + end_row * Row::STAGED_BYTES + int(ROPE_OFFSET) + 16 * end_chunk);
    }
    if (FOLDED) {
        const uint32_t line = from + scale_row * Row::STAGED_BYTES;
        scale = __uint_as_float(load_shared_4(line + int(SCALE_OFFSET) + 4 * number));
        const bool zero = is_zero(scale);
        if (__builtin_expect(__any_sync(~0u, zero), 0))
            clear_under_zero(line + SCALE_COLUMNS * number, zero && r.lane < 4 * WARP_ROWS);
    }
#pragma unroll
    for (int begin = 0; begin < WARP_ROWS; begin += AT_ONCE) {
        Vec8 codes[AT_ONCE][PARTS_OF_ROW], more[AT_ONCE];
        uint32_t scales[AT_ONCE][PARTS_OF_ROW];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const uint32_t line = from + (begin + i) * Row::STAGED_BYTES;
#pragma unroll
            for (int part = 0; part < PARTS_OF_ROW; ++part) {
                const int chunk = 32 * part + r.lane;
                const bool rope = ROPE_WITH && chunk >= CHUNKS;
                const uint32_t at = line + (rope ? int(ROPE_OFFSET) + 16 * (chunk - CHUNKS) : 8 * chunk);
                codes[i][part] = load_shared_8(at);
                if (ROPE_WITH && part == PARTS_OF_ROW - 1) more[i] = load_shared_8(at + (rope ? 8 : 0));
                if (NUM_SCALES > 0 && !FOLDED)
                    scales[i][part] = load_shared_byte(line + SCALES_OF_COPY + chunk / (SCALE_COLUMNS / 8));
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
            for (int part = 0; part < PARTS_OF_ROW; ++part) {
                const int chunk = 32 * part + r.lane;
                const Vec8 c = codes[i][part];
                Vec16 values = dequantize_8(c, FOLDED || SCALE_OF_CALL ? 1.0f : ue8m0_to_float(scales[i][part]));
                if (ROPE_WITH && chunk >= CHUNKS) values = {c.x, c.y, more[i].x, more[i].y};
                store_shared_16(chunk_address(stage_address(stage), first + begin + i, chunk), values);
            }
        }
    }
    if (END && r.lane / 8 < WARP_ROWS)
        store_shared_16(chunk_address(stage_address(stage), first + end_row, CHUNKS + end_chunk), end);
    if constexpr (FOLDED) {
        const float next = least_scale(scale, __shfl_down_sync(~0u, scale, 1));
        if (r.lane < 4 * WARP_ROWS) {
            sm.scale[stage][number][first + scale_row] = scale;
            if (SLICES == 2 && number % 2 == 0)
                sm.ratio[stage][number / 2][first + scale_row] = next > 0.0f ? __fdividef(scale, next) : 0.0f;
        }
    }
    __syncwarp();
    mbarrier_arrive_for_warp(shared_address(&sm.tile_full[stage]), r.lane);
}

// --- all ----------------------------------------------------------------------------------------------------------

// Widens an output warp's rows of tile `n` of the split into `stage`, and says that they are there.
__device__ __forceinline__ void widen_rows(int n, int raw_stage, int stage) {
#if EXTRA_ROWS
    const int warp = Role::here().warp;
    if (is_of_extra(warp, n)) {
        widen_fp4_rows<D_V, EXTRA_SCALES_OF_COPY>(raw_rows(warp, raw_stage), stage);
        announce_rows(stage);
        return;
    }
#endif
    if constexpr (CODE_BITS == 4) {
        widen_own_fp4_rows(raw_stage, stage);
    } else {
        widen_own_fp8_rows(raw_stage, stage);
    }
}

// Widens the rows of tile `n` of a split into `stage`, and starts copies of the rows RAW_STAGES tiles later.
__device__ __forceinline__ void widen_tile(const AttentionParams& p, int n, int tiles, int stage) {
    const int raw_stage = n % RAW_STAGES;
    cp_async_wait<RAW_STAGES - 1>();
    __syncwarp();
    widen_rows(n, raw_stage, stage);
    if (n + RAW_STAGES < tiles) copy_rows(p, n + RAW_STAGES, raw_stage);
    cp_async_commit();
}
