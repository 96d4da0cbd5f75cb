// Copies the last tokens of each request out of a paged FP8 cache, of a format of models like V4, into bf16 rows.
//
//   grid         up to eight times as many CTAs as an SM holds; their warps share the tokens of all requests evenly
//   one warp     4 tokens at a time
//     find       lane l finds the request of token l % 4 by bisection, then its block by the block table
//     load       a row is 64 chunks of 8 values. Lane l loads chunk l, which is always quantized, and chunk 32 + l: in
//                V4_FP8 and V4_NVFP4 the last 8 lanes have the 64 RoPE values there
//                scales: V4_FP8: every lane loads the row's 8 bytes, and has 12 loads under way. Others: a lane loads
//                the scale of each of its chunks, and has 16 loads under way
//     store      16 bytes of bf16 a chunk; neighbouring lanes store neighbouring chunks
//
// Exact: bf16 values, and codes times their power-of-two or e4m3 scales, whose products have at most six bits. Rounded,
// once, to bf16: only products that over- or underflow it.
//
// A token whose block does not exist becomes a row of zeros. Nothing is written beyond a request's rows in dst.
// Shared memory: 8 bytes a thread. A CTA of 256 threads has 8 x 4 x 584 bytes (V4_FP8) under way.
#include "rows/block_table.cuh"
#include "rows/codes.cuh"
#include "rows/nvfp4.cuh"
#include "rows/reader.cuh"
#include "tile/request_tokens.cuh"
#include "tile/warp.cuh"

// The launcher declares the same fields.
struct GatherTailParams {
    BlockTable table;
    const uint8_t* cache;
    bf16* dst;                   // [num_requests, >= offset + dst_rows, D_QK], from row `offset` on
    const int32_t* seq_lens;     // [num_requests]
    const int32_t* gather_lens;  // [num_requests], or null: whole sequences
    int64_t block_stride;        // bytes
    int64_t dst_stride;          // items, from request to request
    int64_t row_stride;          // items
    int32_t dst_rows;            // rows of a request from `offset` on
    int32_t num_blocks;
    int32_t aligned;  // rows of dst start at multiples of 16 bytes
    int32_t unused;
};

constexpr int ROWS = 4, WARPS = ROWS_PER_BLOCK / ROWS, THREADS = 32 * WARPS;
constexpr int NOPE_CHUNKS = D_NOPE / CHUNK, TILE_CHUNKS = SCALE_TILE / CHUNK;
// A lane loads all scales of a row at once: those of the row's first half are one word, the others the next one.
constexpr bool ALL_SCALES = SCALES_APART && SCALE_STRIDE == 8 && TILE_CHUNKS * 4 == 32;
static_assert((SCALE_E8M0 || SCALE_E4M3) && !SCALES_IN_FOURS && D_QK == 2 * 32 * CHUNK && NOPE_CHUNKS > 32,
              "two chunks a lane, the first all NoPE");

__shared__ RequestTokens<THREADS> tokens;

// How many tokens at the end of a request's sequence are copied.
__device__ __forceinline__ int32_t gathered(const GatherTailParams& p, int request) {
    const int32_t seq_len = max(p.seq_lens[request], 0);
    return p.gather_lens == nullptr ? seq_len : max(0, min(p.gather_lens[request], seq_len));
}

struct Copy {
    Row from;  // none where the token's block does not exist
    bf16* to;  // null where there is no token
};

__device__ __forceinline__ Copy find_copy(const GatherTailParams& p, int first_request, int64_t item) {
    const auto at = tokens.find(item);
    const int request = first_request + at.request;
    Copy copy = {Row::none(), p.dst + request * p.dst_stride + at.token * p.row_stride};
    const int32_t position = max(p.seq_lens[request], 0) - gathered(p, request) + at.token;
    with_block_of(p.table, request, position, p.cache, p.block_stride, p.num_blocks,
                  [&](const uint8_t* block, int32_t offset) {
                      copy.from = Row::in_block(block, offset, p.table.block_size.value);
                  });
    return copy;
}

__device__ __forceinline__ Vec16 dequantize_chunk(const Codes& codes, uint32_t scale) {
    return dequantize_codes(codes, SCALE_E4M3 ? e4m3_to_float(scale) : ue8m0_to_float(scale & 0xffu));
}

__device__ __forceinline__ void copy_rows(const GatherTailParams& p, const Copy& mine) {
    const int lane = threadIdx.x % 32;
    const bool rope = 32 + lane >= NOPE_CHUNKS;
    Codes first[ROWS];
    Vec8 scales[ROWS];
    Vec16 second[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const uint8_t* data = shuffle_pointer(mine.from.data, r);
        const uint8_t* from = shuffle_pointer(mine.from.scales(), r);
        first[r] = {};
        scales[r] = {0, 0};
        second[r] = {0, 0, 0, 0};
        if (data == nullptr) continue;
        first[r] = load_codes(data, lane * CHUNK);
        if constexpr (ALL_SCALES) {
            scales[r] = *reinterpret_cast<const Vec8*>(from);
        } else {
            scales[r] = {from[lane / TILE_CHUNKS], from[(32 + lane) / TILE_CHUNKS]};
        }
        if (rope) {
            second[r] = *reinterpret_cast<const Vec16*>(data + ROPE_OFFSET + (32 + lane - NOPE_CHUNKS) * 16);
        } else {
            keep_codes(second[r], load_codes(data, (32 + lane) * CHUNK));
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        bf16* to = shuffle_pointer(mine.to, r);
        if (to == nullptr) continue;
        const int shift = ALL_SCALES ? 8 * (lane / TILE_CHUNKS) : 0;
        store_chunk(to + lane * CHUNK, dequantize_chunk(first[r], scales[r].x >> shift), p.aligned);
        const Vec16 end = rope ? second[r] : dequantize_chunk(kept_codes(second[r]), scales[r].y >> shift);
        store_chunk(to + (32 + lane) * CHUNK, end, p.aligned);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gather_tail(const __grid_constant__ GatherTailParams p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int request = 0; request < p.table.num_requests; request += THREADS) {
        const int mine = request + threadIdx.x;
        const int64_t total = tokens.sum_up(mine < p.table.num_requests ? min(gathered(p, mine), p.dst_rows) : 0);
        const int64_t stride = int64_t(gridDim.x) * WARPS * ROWS;
        for (int64_t first = (int64_t(blockIdx.x) * WARPS + warp) * ROWS; first < total; first += stride) {
            const int64_t item = first + lane % ROWS;
            copy_rows(p, item < total ? find_copy(p, request, item) : Copy{Row::none(), nullptr});
        }
        __syncthreads();  // all have read the sums
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
