// Products of a token's heads with the rows of its list or range, for kernels that need nothing of them but the
// scores.
//
//   CTA      8 warps; HEADS heads of a token at a time are in shared memory
//   a warp   takes 32 entries of each ROUND. It loads rows from memory to registers as A operands, 64 bytes of a row
//            at a time, with the next 64 bytes in flight
//
// A lane loads the same 16 bytes of a row (A) and of a head (B), so the order of k does not matter.
#pragma once
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"
#include "rows/chunk.cuh"
#include "tile/swizzle.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int ENTRIES = 32, ROUND = WARPS * ENTRIES, M_TILES = ENTRIES / 16, N_TILES = HEADS / 8;
constexpr int QK_BYTES = 2 * D_QK, CHUNKS = D_QK / CHUNK, PIECES = D_QK / 32, Q_BYTES = HEADS * QK_BYTES;

// cupy_mla/cuda/training.py declares the same fields.
struct HeadScoresParams {
    const bf16* q;                                  // [tokens, h_q, D_QK]
    const bf16* kv;                                 // [s_kv, D_QK]
    const int32_t* indices;                         // [tokens, topk] rows; null: entry j is row j
    const int32_t* starts;                          // [tokens] the first entry; null: 0
    const int32_t* ends;                            // [tokens] the entry after the last one; null: topk
    int64_t q_token, q_head, kv_row, index_stride;  // items
    int32_t h_q, topk, s_kv;
    float scale_log2;  // sm_scale * log2(e)
    int32_t aligned;   // rows of q and kv start at multiples of 16 bytes
};

extern __shared__ __align__(128) uint8_t shared[];

// The entries of the CTA's token.
struct Entries {
    int start, end;

    static __device__ __forceinline__ Entries of_cta(const HeadScoresParams& p) {
        const int token = blockIdx.x, end = p.ends == nullptr ? p.topk : min(p.ends[token], p.topk);
        return {p.starts == nullptr ? 0 : max(p.starts[token], 0), end};
    }
    // The row that an entry names, or a negative number.
    __device__ __forceinline__ int row(const HeadScoresParams& p, int entry) const {
        if (entry < start || entry >= end) return -1;
        const int row = p.indices == nullptr ? entry : p.indices[blockIdx.x * p.index_stride + entry];
        return row < p.s_kv ? row : -1;
    }
};

// Copies heads from `first` on to shared memory; heads that do not exist are zeros.
__device__ __forceinline__ void bring_heads(const HeadScoresParams& p, int first) {
    const bf16* from = p.q + blockIdx.x * p.q_token;
    for (int item = threadIdx.x; item < HEADS * CHUNKS; item += THREADS) {
        const int line = item / CHUNKS, chunk = item % CHUNKS, head = first + line;
        const Vec16 values = head < p.h_q ? load_chunk(from + head * p.q_head + CHUNK * chunk, p.aligned) : Vec16{};
        store_shared_16(shared_address(shared) + line * QK_BYTES + swizzle_pairs(line, chunk), values);
    }
}

// A lane's rows: entries g + 8 x of the warp's 32. Row numbers take fewer registers than addresses.
using Rows = int[4];

// Finds a lane's rows, where the warp's entries begin with `first`. Returns whether the warp has any row.
__device__ __forceinline__ bool find_rows(const HeadScoresParams& p, const Entries& entries, int first, Rows& rows) {
    bool some = false;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        rows[x] = entries.row(p, first + 8 * x + threadIdx.x % 32 / 4);
        some |= rows[x] >= 0;
    }
    return __ballot_sync(~0u, some) != 0;
}

// s[m][j][2 i + k]: entry 16 m + 8 i + g, head 8 j + 2 t + k.
using Scores = float[M_TILES][N_TILES][4];

__device__ __forceinline__ void multiply(const HeadScoresParams& p, const Rows& rows, Scores& s) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int j = 0; j < N_TILES; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][j][i] = 0.0f;
    Vec16 next[4];
    const auto load = [&](int piece) {
#pragma unroll
        for (int x = 0; x < 4; ++x)
            next[x] =
                rows[x] < 0 ? Vec16{} : load_chunk(p.kv + rows[x] * p.kv_row + (32 * piece + CHUNK * t), p.aligned);
    };
    load(0);
#pragma unroll 1
    for (int piece = 0; piece < PIECES; ++piece) {
        Vec16 a[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) a[x] = next[x];
        if (piece + 1 < PIECES) load(piece + 1);
        const uint32_t heads = shared_address(shared) + g * QK_BYTES + swizzle_pairs(g, 4 * piece + t);
#pragma unroll
        for (int j = 0; j < N_TILES; ++j) {
            const Vec16 b = load_shared_16(heads + 8 * j * QK_BYTES);  // of head 8 j + g
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                const Vec16 &low = a[2 * m], &high = a[2 * m + 1];
                mma_m16n8k16(s[m][j], {low.x, high.x, low.y, high.y}, b.x, b.y);
                mma_m16n8k16(s[m][j], {low.z, high.z, low.w, high.w}, b.z, b.w);
            }
        }
    }
}
