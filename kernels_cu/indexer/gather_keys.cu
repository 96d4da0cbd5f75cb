// Copies requests' tokens out of the indexer's paged key cache (layout INDEXER_FP8 or INDEXER_MXFP4) into consecutive
// keys and scales.
//
//   grid         up to eight times as many CTAs as the GPU runs at a time; their warps share the tokens of all
//                requests evenly
//   one warp     16 tokens at a time
//     find       lane l finds the request of token l % 16 by bisection, then its block by the block table
//     copy       8 lanes copy a token's key, 16 bytes each: every lane starts 4 loads, then 4 stores (MXFP4: 4 lanes
//                and 2 loads). Lane l < 16 copies the 4 bytes of scales of token l
//     WIDEN      MXFP4 becomes e5m2 under a float32 scale (rows/mxfp4.cuh says what is exact): 8 lanes a token load 8
//                bytes each and store 16
//
// ALIGNED: keys and cache allow 16-byte accesses. (They always allow 4-byte ones.) It is a constant of the variant:
// where the same load may be one wide load or four narrow ones, the compiler waits for it before it starts the next
// one.
//
// A token whose block does not exist becomes zeros. Nothing is written beyond `rows`. Shared memory: 8 bytes a thread.
#include "rows/block_table.cuh"
#include "rows/mxfp4.cuh"
#include "rows/place.cuh"
#include "tile/request_tokens.cuh"

// The launcher declares the same fields.
struct GatherKeysParams {
    BlockTable table;
    const uint8_t* cache;
    uint8_t* keys;               // [rows, OUT_BYTES]
    uint32_t* scales;            // [rows]: float32, or the bytes of four UE8M0
    const int32_t* cu_seq_lens;  // [num_requests + 1]
    int64_t block_stride;        // bytes
    int64_t keys_stride;
    int64_t rows;
    int32_t num_blocks;
    int32_t unused;
};

constexpr int TOKENS = 16, WARPS = TOKENS_PER_BLOCK / TOKENS, THREADS = 32 * WARPS;
constexpr int OUT_BYTES = WIDEN ? 128 : ROW_STRIDE;
constexpr int LANES = OUT_BYTES / 16;        // that share a token's key
constexpr int ROUNDS = TOKENS * LANES / 32;  // of loads of a lane

__shared__ RequestTokens<THREADS> tokens;

// How many of a request's tokens have a row in the results.
__device__ __forceinline__ int64_t rows_of_request(const GatherKeysParams& p, int request) {
    if (request >= p.table.num_requests) return 0;
    const int64_t begin = p.cu_seq_lens[request], end = p.cu_seq_lens[request + 1];
    return begin < 0 ? 0 : max(int64_t(0), min(end, p.rows) - begin);
}

struct Token {
    const uint8_t* from;   // its keys, null where its block does not exist
    const uint8_t* scale;  // its scale, or null
    int64_t row;           // -1 where there is no token
};

__device__ __forceinline__ Token find_token(const GatherKeysParams& p, int first_request, int64_t item) {
    const auto at = tokens.find(item);
    const int request = first_request + at.request;
    Token token = {nullptr, nullptr, p.cu_seq_lens[request] + int64_t(at.token)};
    const Position position = find_position(p.table, at.token);
    if (position.column >= 0) {
        const int32_t block = p.table.blocks[request * p.table.stride + position.column];
        if (uint32_t(block) < uint32_t(p.num_blocks)) {
            const uint8_t* start = p.cache + block * p.block_stride;
            const auto place = place_in_block(start, position.offset, p.table.block_size.value, ROW_STRIDE);
            token.from = place.data;
            token.scale = place.scales;
        }
    }
    return token;
}

// Loads 16 bytes of a key; WIDEN: 8 bytes, the others are zeros.
__device__ __forceinline__ Vec16 load_keys(const uint8_t* from) {
    if (ALIGNED && !WIDEN) return *reinterpret_cast<const Vec16*>(from);
    const auto* w = reinterpret_cast<const uint32_t*>(from);
    if (WIDEN) return {w[0], w[1], 0, 0};
    return {w[0], w[1], w[2], w[3]};
}

// Widens the codes of lane number `lane` of a token, whose four scales are `scales`.
__device__ __forceinline__ Vec16 widen(const Vec16& codes, uint32_t scales, int lane) {
    constexpr int LANES_OF_GROUP = MXFP4_GROUP / 16;
    const uint32_t scale = scales >> lane / LANES_OF_GROUP * 8 & 255;
    const Magnitudes of = magnitudes_of(largest_scale(scales) - scale);
    const Vec8 low = widen_e2m1_8(codes.x, of), high = widen_e2m1_8(codes.y, of);
    return {low.x, low.y, high.x, high.y};
}

__device__ __forceinline__ void store_keys(uint8_t* to, const Vec16& v) {
    if (ALIGNED) {
        *reinterpret_cast<Vec16*>(to) = v;
        return;
    }
    auto* w = reinterpret_cast<uint32_t*>(to);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
}

__device__ __forceinline__ void copy_tokens(const GatherKeysParams& p, const Token& mine) {
    const int lane = threadIdx.x % 32;
    Vec16 keys[ROUNDS];
    uint32_t scales = mine.scale != nullptr ? *reinterpret_cast<const uint32_t*>(mine.scale) : 0;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const auto from = reinterpret_cast<const uint8_t*>(
            __shfl_sync(~0u, reinterpret_cast<uint64_t>(mine.from), (i * 32 + lane) / LANES));
        keys[i] = {0, 0, 0, 0};
        if (from != nullptr) keys[i] = load_keys(from + lane % LANES * (ROW_STRIDE / LANES));
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int64_t row = __shfl_sync(~0u, mine.row, (i * 32 + lane) / LANES);
        if constexpr (WIDEN) keys[i] = widen(keys[i], __shfl_sync(~0u, scales, (i * 32 + lane) / LANES), lane % LANES);
        if (row >= 0) store_keys(p.keys + row * p.keys_stride + lane % LANES * 16, keys[i]);
    }
    if constexpr (WIDEN) {
        const float factor = factor_of_scales(largest_scale(scales));
        scales = mine.scale != nullptr ? __float_as_uint(factor) : 0;
    }
    if (lane < TOKENS && mine.row >= 0) p.scales[mine.row] = scales;
}

extern "C" __global__ void __launch_bounds__(THREADS) gather_keys(const __grid_constant__ GatherKeysParams p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int request = 0; request < p.table.num_requests; request += THREADS) {
        const int64_t total = tokens.sum_up(rows_of_request(p, request + threadIdx.x));
        const int64_t stride = int64_t(gridDim.x) * WARPS * TOKENS;
        for (int64_t first = (int64_t(blockIdx.x) * WARPS + warp) * TOKENS; first < total; first += stride) {
            const int64_t item = first + lane % TOKENS;
            copy_tokens(p, item < total ? find_token(p, request, item) : Token{nullptr, nullptr, -1});
        }
        __syncthreads();  // all have read the sums
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
