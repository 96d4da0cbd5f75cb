// Copies requests' tokens out of a paged FP8 cache, of a format of models like V3.2, into consecutive bf16 rows.
//
//   grid         up to eight times as many CTAs as an SM holds; their warps share the tokens of all requests evenly
//   one warp     4 tokens at a time
//     find       lane l finds the request of token l % 4 by bisection, then its block by the block table
//     load       V: of each row a lane loads twice 8 bytes of e4m3 (4 of e2m1) and their scales; neighbouring lanes
//                load neighbouring bytes. The 64 values behind V, if there are any, are bf16 or e4m3: a lane loads 8
//                of them from one of the 4 rows. V32_FP8: every lane has 17 loads under way
//     store      8 e4m3 become 16 bytes of bf16. A lane loads 8 bytes at a time, not 16, so that neighbouring lanes
//                store neighbouring 16 bytes
//
// Exact: codes, bf16 values, and codes times power-of-two or e4m3 scales. Times float32 scales (V32_FP8, V32_NOPE_FP8,
// PLAIN_FP8) they are rounded once, to bf16.
//
// A token whose block does not exist becomes a row of zeros. Nothing is written beyond dst.
// Shared memory: 8 bytes a thread. A CTA of 256 threads has 8 x 4 x 656 bytes under way.
#include "rows/block_table.cuh"
#include "rows/codes.cuh"
#include "rows/reader.cuh"
#include "rows/scales.cuh"
#include "tile/request_tokens.cuh"
#include "tile/warp.cuh"

// The launcher declares the same fields.
struct GatherParams {
    BlockTable table;
    const uint8_t* cache;
    bf16* dst;                // [dst_rows, D_QK]
    const int32_t* seq_lens;  // [num_requests]
    const int32_t* starts;    // [num_requests] first row of each request
    int64_t block_stride;     // bytes
    int64_t dst_stride;       // items
    int64_t dst_rows;
    int32_t num_blocks;
    int32_t aligned;    // rows of dst start at multiples of 16 bytes
    CallScale k_scale;  // PLAIN_FP8: the scale of all rows
};

constexpr int ROWS = 4, WARPS = ROWS_PER_BLOCK / ROWS, THREADS = 32 * WARPS;
constexpr int TURNS = D_V / (32 * CHUNK);  // a lane's loads of V of a row
// The end of a row: the values behind V, if there are any.
constexpr int END_CHUNKS = (D_QK - D_V) / CHUNK;
constexpr bool END_QUANTIZED = D_NOPE > D_V;             // the end is e4m3 under the call's scale
constexpr bool END_CODED = END_QUANTIZED || ROPE_CODED;  // the end is e4m3
static_assert(D_V % (32 * CHUNK) == 0 && (END_CHUNKS == 0 || END_CHUNKS * ROWS == 32),
              "every lane has as many values");
static_assert(D_NOPE == (END_QUANTIZED ? D_QK : D_V), "all of V is quantized");

__shared__ RequestTokens<THREADS> tokens;

// How many of a request's tokens have a row in dst.
__device__ __forceinline__ int64_t rows_of_request(const GatherParams& p, int request) {
    if (request >= p.table.num_requests) return 0;
    const int64_t start = p.starts[request];
    if (start < 0 || start >= p.dst_rows) return 0;
    return max(int64_t(0), min(int64_t(p.seq_lens[request]), p.dst_rows - start));
}

struct Copy {
    Row from;  // none where the token's block does not exist
    bf16* to;  // null where there is no token
};

__device__ __forceinline__ Copy find_copy(const GatherParams& p, int first_request, int64_t item) {
    const auto at = tokens.find(item);
    const int request = first_request + at.request;
    Copy copy = {Row::none(), p.dst + (p.starts[request] + int64_t(at.token)) * p.dst_stride};
    with_block_of(p.table, request, at.token, p.cache, p.block_stride, p.num_blocks,
                  [&](const uint8_t* block, int32_t offset) {
                      copy.from = Row::in_block(block, offset, p.table.block_size.value);
                  });
    return copy;
}

__device__ __forceinline__ void copy_rows(const GatherParams& p, const Copy& mine) {
    const int lane = threadIdx.x % 32;
    Codes nope[ROWS][TURNS];
    float scale[ROWS][TURNS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const uint8_t* from = shuffle_pointer(mine.from.data, r);
        const uint8_t* scales = SCALES_APART ? shuffle_pointer(mine.from.scales(), r) : from + SCALE_OFFSET;
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const int value = (i * 32 + lane) * CHUNK;
            nope[r][i] = {};
            scale[r][i] = 0.0f;
            if (from == nullptr) continue;
            nope[r][i] = load_codes(from, value);
            scale[r][i] = scale_of_value(p.k_scale, scales, value);
        }
    }
    const int end_row = lane / max(END_CHUNKS, 1) % ROWS, end_chunk = lane % max(END_CHUNKS, 1);
    const uint8_t* end_from = shuffle_pointer(mine.from.data, end_row);
    bf16* end_to = shuffle_pointer(mine.to, end_row);
    Vec16 end = {0, 0, 0, 0};
    if (END_CODED && end_from != nullptr) {
        const uint8_t* codes = end_from + (END_QUANTIZED ? D_V : ROPE_OFFSET) + end_chunk * CHUNK;
        end = dequantize_8(*reinterpret_cast<const Vec8*>(codes),
                           END_QUANTIZED ? scale_of_value(p.k_scale, nullptr, D_V) : 1.0f);
    } else if (END_CHUNKS > 0 && end_from != nullptr) {
        end = *reinterpret_cast<const Vec16*>(end_from + ROPE_OFFSET + 16 * end_chunk);
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        bf16* to = shuffle_pointer(mine.to, r);
        if (to == nullptr) continue;
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            const Vec16 values = dequantize_codes(nope[r][i], scale[r][i]);
            store_chunk(to + (i * 32 + lane) * CHUNK, values, p.aligned);
        }
    }
    if (END_CHUNKS > 0 && end_to != nullptr) store_chunk(end_to + D_V + end_chunk * CHUNK, end, p.aligned);
}

extern "C" __global__ void __launch_bounds__(THREADS) gather(const __grid_constant__ GatherParams p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int request = 0; request < p.table.num_requests; request += THREADS) {
        const int64_t total = tokens.sum_up(rows_of_request(p, request + threadIdx.x));
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
