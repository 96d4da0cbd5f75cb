// Copies requests' tokens out of the indexer's paged key cache (layout INDEXER_FP8) into consecutive keys and scales.
//
//   grid         as many CTAs as the GPU runs at a time; their warps share the tokens of all requests evenly
//   one warp     16 tokens at a time
//     find       lane l looks up token l % 16: request (bisection), block table, where from
//     copy       8 lanes a token, 16 bytes of keys each: 4 loads under way in every lane, then 4 stores
//                lane l < 16 copies the scale of token l
//
// ALIGNED: both sides allow 16-byte accesses. (They always allow 4-byte ones.) It is known at compile time: where a load
// may be one wide load or four narrow ones, the compiler waits for it before it starts the next one. A token whose block
// does not exist becomes zeros. Nothing is written beyond dst. Shared memory: 8 bytes a thread.
#include "rows/block_table.cuh"
#include "rows/place.cuh"
#include "tile/request_tokens.cuh"

// The launcher declares the same fields.
struct GatherKeysParams {
    BlockTable table;
    const uint8_t* cache;
    uint8_t* keys;               // [rows, 128]
    float* scales;               // [rows]
    const int32_t* cu_seq_lens;  // [num_requests + 1]
    int64_t block_stride;        // bytes
    int64_t keys_stride;
    int64_t rows;
    int32_t num_blocks;
    int32_t unused;
};

constexpr int TOKENS = 16, WARPS = TOKENS_PER_BLOCK / TOKENS, THREADS = 32 * WARPS;
constexpr int LANES = ROW_STRIDE / 16;       // that share a token's keys
constexpr int ROUNDS = TOKENS * LANES / 32;  // of loads

__shared__ RequestTokens<THREADS> tokens;

// How many of a request's tokens have a row in dst.
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

__device__ __forceinline__ Vec16 load_keys(const uint8_t* from) {
    if (ALIGNED) return *reinterpret_cast<const Vec16*>(from);
    const auto* w = reinterpret_cast<const uint32_t*>(from);
    return {w[0], w[1], w[2], w[3]};
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
    const float scale = mine.scale != nullptr ? *reinterpret_cast<const float*>(mine.scale) : 0.0f;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const auto from = reinterpret_cast<const uint8_t*>(
            __shfl_sync(~0u, reinterpret_cast<uint64_t>(mine.from), (i * 32 + lane) / LANES));
        keys[i] = {0, 0, 0, 0};
        if (from != nullptr) keys[i] = load_keys(from + lane % LANES * 16);
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const int64_t row = __shfl_sync(~0u, mine.row, (i * 32 + lane) / LANES);
        if (row >= 0) store_keys(p.keys + row * p.keys_stride + lane % LANES * 16, keys[i]);
    }
    if (lane < TOKENS && mine.row >= 0) p.scales[mine.row] = scale;
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
