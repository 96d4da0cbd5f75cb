// Sparse attention of few heads over bf16 rows on Hopper, large batches and prefill: wgmma with the operands swapped.
//
// Heads are the N side of the products, 8, 16 or 32 of them, so nothing is padded to 64:
//
//   S^T = K . Q^T     64 rows x heads       A = the tile, K-major      36 x m64nHk16
//   O^T = V^T . P^T   512 columns x heads   A = the tile, MN-major     8 x 4 x m64nHk16
//
// Two warpgroups multiply, each with its own tile of 64 rows in shared memory and its own softmax; they take tiles in
// turn, or (QUERIES 2) each works on a query of its own:
//
//   rows to the tile    two more warpgroups, one for each, by cp.async, piece by piece (PIECES of two column blocks) as
//                       pieces come free
//   vote                a logit above the reference by 2^REF_SLACK? Only then the reference rises and O^T follows
//   P^T                 stmatrix.trans, over the RoPE part of the tile
//   O^T += V^T . P^T    pieces are let go one by one
//
//   full, empty         mbarriers [warpgroup][piece], both ways
//   multiplying         a lock: from Q . K to the end of P . V one warpgroup multiplies, while the other's rows come
//   named 1, 2          the 128 threads of a multiplying warpgroup; 3: both, when they share a query
//
// At the end the warpgroups of a query, 2 a block times the blocks of a cluster, lay their O^T into shared memory and every
// block merges a share of the columns through distributed shared memory. What a cluster does not hold is split over
// gridDim.y and merged by combine.cu.
//
// Shared memory: Q (QUERIES x heads x D_QK x 2) + 2 tiles of 64 x D_QK x 2 (and P where there is no RoPE part behind V) +
// statistics and barriers.
// Registers: 200 a multiplying thread and 56 a copying one (or 208 and 48), together 512 x 128.
// What was tried, what bounds it: docs/kernels/sparse_decode_sm90.md; turns: docs/kernels/sparse_prefill_sm90.md.
#include "attention/lists.cuh"
#include "attention/pieces.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma_swapped.cuh"
#include "tile/chunk.cuh"
#include "tile/finish.cuh"
#include "tile/heads.cuh"

constexpr int WARPGROUP = 128, THREADS = 4 * WARPGROUP;
constexpr int COPY_REGISTERS = HEADS == 32 && D_QK == 512 ? 48 : 56;  // with which neither side spills
constexpr int BLOCKS = D_QK / 64;      // column blocks of 64 values: 64 lines of 128 bytes, swizzled
constexpr int BLOCK_BYTES = TILE_ROWS * 128;
constexpr int V_BLOCKS = D_V / 64, PIECES = V_BLOCKS / 2;
constexpr int Q_BLOCK_BYTES = HEADS * 128, Q_BYTES = BLOCKS * Q_BLOCK_BYTES;
constexpr int P_BYTES = HEADS * 128;
constexpr int ROPE_BYTES = (BLOCKS - V_BLOCKS) * BLOCK_BYTES;
constexpr int TILE_BYTES = V_BLOCKS * BLOCK_BYTES + (P_BYTES > ROPE_BYTES ? P_BYTES : ROPE_BYTES);
constexpr int COLUMNS = HEADS / 4;     // heads a thread holds of S^T and O^T: 8 j + 2 t + k at 2 j + k
constexpr float REF_SLACK = 8.0f;
constexpr int MAX_SOURCES = 2 * MAX_CLUSTER;        // warpgroups that share a query: 2 x the largest cluster
constexpr int O_LINE = D_V + 4;        // floats a head takes in the merge: 4 more spread the heads over the banks

constexpr int Q_AT = 0, TILE_AT = QUERIES * Q_BYTES;
constexpr int SMALL_AT = TILE_AT + 2 * TILE_BYTES;
static_assert(PIECES == 4, "");

// A warpgroup's softmax over its rows, a value a head; relative to `ref` like its O^T.
struct Statistics {
    float ref[HEADS], sum[HEADS], max[HEADS];
};
struct Small {
    uint64_t full[2 * PIECES], empty[2 * PIECES];  // [warpgroup][piece]
    float across[2][2][4][HEADS];  // between the warps of a warpgroup
    Statistics own[2];
    int multiplying;               // warps that have not done with their turn
};
constexpr int SHARED_BYTES = SMALL_AT + int(sizeof(Small));
static_assert(HEADS * O_LINE * 4 <= TILE_BYTES, "O^T is laid over the tile");
static_assert(MAX_SOURCES * int(sizeof(Statistics)) <= Q_BYTES, "gathered statistics are laid over Q");

extern __shared__ __align__(1024) uint8_t shared[];

// --- who and what ---------------------------------------------------------------------------------------------

// A thread's place: warpgroup, warp of it, and rows g, g + 8 and columns 2 t, 2 t + 1 of the warp's 16 rows.
struct Role {
    int group, warp, lane, g, t;

    static __device__ __forceinline__ Role here() {
        const int thread = threadIdx.x;
        return {__shfl_sync(~0u, thread / WARPGROUP, 0), thread / 32 % 4, thread % 32, thread % 32 / 4, thread % 4};
    }
    __device__ __forceinline__ int row(int i) const { return 16 * warp + g + 8 * i; }
    __device__ __forceinline__ uint32_t q() const { return shared_address(shared) + Q_AT + (QUERIES == 2 ? group * Q_BYTES : 0); }
    __device__ __forceinline__ uint32_t tile() const { return shared_address(shared) + TILE_AT + group * TILE_BYTES; }
    __device__ __forceinline__ void sync() const { named_barrier_sync(1 + group, WARPGROUP); }
    __device__ __forceinline__ int head(int c) const { return c / 2 * 8 + 2 * t + c % 2; }
};

__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(shared + SMALL_AT); }

// A query and 8 to 32 of its heads; tiles of the main list, then of the extra one, of which this warpgroup takes
// number begin, begin + step, ... below end.
struct Work {
    Query query;
    int first_head, main_length, extra_length, main_tiles, begin, end, step;

    __device__ __forceinline__ int tiles() const { return begin < end ? (end - begin + step - 1) / step : 0; }
};

__device__ __forceinline__ Work find_work(const AttentionParams& p, int index, int head_tiles, int group, int rank, int ranks) {
    Work w;
    w.query = query_of(p, index / head_tiles);
    w.first_head = index % head_tiles * HEADS;
    const int64_t tiles = find_lists(p, w);
    if (QUERIES == 2) {  // which nobody splits; to compute so for 0 of 1 spills
        w.begin = 0;
        w.end = tiles;
        w.step = 1;
    } else {
        w.begin = int(tiles * rank / ranks) + group;
        w.end = int(tiles * (rank + 1) / ranks);
        w.step = 2;
    }
    return w;
}

// --- copying --------------------------------------------------------------------------------------------------

// A copying warp brings the rows 16 `quarter` .. of its warpgroup's tiles. Lane l knows row l % 16 of them; eight
// lanes copy 128 bytes of a row.
__device__ __forceinline__ void copy_tiles(const AttentionParams& p, const Work& w, int group, int quarter, uint32_t& parity) {
    const int lane = threadIdx.x % 32, chunk = lane % 8, my_row = 16 * quarter + lane % 16;
    const uint32_t tile_at = shared_address(shared) + TILE_AT + group * TILE_BYTES;
    Small& sm = small();
    int32_t entry = load_entry(p, w, w.begin, my_row);
#pragma unroll 1
    for (int tile = w.begin; tile < w.end; tile += w.step) {
        const uint8_t* row = find_row(p, w, tile, entry).data;
        entry = load_entry(p, w, tile + w.step, my_row);
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            mbarrier_wait(shared_address(&sm.empty[group * PIECES + piece]), parity);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int line = 16 * quarter + 4 * i + lane / 8;
                const uint8_t* from = shuffle_pointer(row, 4 * i + lane / 8);
                const uint32_t to = tile_at + line * 128 + ((chunk ^ (line & 7)) << 4);
#pragma unroll
                for (int b = 2 * piece; b < (piece == PIECES - 1 ? BLOCKS : 2 * piece + 2); ++b)
                    cp_async_16(to + b * BLOCK_BYTES, from + b * 128 + chunk * 16, from != nullptr);
            }
            mbarrier_arrive_after_copies(shared_address(&sm.full[group * PIECES + piece]));
        }
        parity ^= 1;
    }
}

// Start copying Q: line = head, in column blocks like a tile's. Heads beyond the last are zeros.
__device__ __forceinline__ void copy_q(const AttentionParams& p, const Work& w, const Role& r) {
    constexpr int COPIERS = QUERIES == 2 ? WARPGROUP : 2 * WARPGROUP;
    const bf16* q = p.q + w.query.b * p.q_b + w.query.s * p.q_s;
    const uint32_t to = r.q();
#pragma unroll 4
    for (int piece = threadIdx.x % COPIERS; piece < HEADS * BLOCKS * 8; piece += COPIERS) {
        const int chunk = piece % 8, block = piece / 8 % BLOCKS, head = piece / 8 / BLOCKS;
        const bool here = w.first_head + head < p.h_q;
        cp_async_16(to + block * Q_BLOCK_BYTES + head * 128 + ((chunk ^ (head & 7)) << 4),
                    here ? q + (w.first_head + head) * p.q_h + 64 * block + 8 * chunk : nullptr, here);
    }
}

// All multiplying threads that share Q wait for it.
__device__ __forceinline__ void wait_for_q(const Role& r) {
    cp_async_wait_all();
    fence_proxy_async();
    if (QUERIES == 1) {
        named_barrier_sync(3, 2 * WARPGROUP);
    } else {
        r.sync();
    }
}

// --- products -------------------------------------------------------------------------------------------------

// acc = or += K . Q^T over column blocks BEGIN to END - 1.
template <int BEGIN, int END, bool FIRST>
__device__ __forceinline__ void start_qk(const Role& r, float (&acc)[HEADS / 2]) {
    const uint64_t tile = wgmma_operand(r.tile(), 1024, 16), q = wgmma_operand(r.q(), 1024, 16);
    wgmma_fence();
#pragma unroll
    for (int block = BEGIN; block < END; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint64_t a = wgmma_further(tile, block * BLOCK_BYTES + 32 * i);
            const uint64_t b = wgmma_further(q, block * Q_BLOCK_BYTES + 32 * i);
            if (FIRST && block == BEGIN && i == 0) {
                wgmma_few<false, true>(acc, a, b);
            } else {
                wgmma_few<false, false>(acc, a, b);
            }
        }
    }
    wgmma_commit();
}

__device__ __forceinline__ void wait_for_piece(const Role& r, int piece, uint32_t parity) {
    mbarrier_wait(shared_address(&small().full[r.group * PIECES + piece]), parity);
}

// What piece `N` of a tile adds to S^T, once it has come.
template <int N>
__device__ __forceinline__ void start_qk_piece(const Role& r, uint32_t parity, float (&s)[HEADS / 2]) {
    wait_for_piece(r, N, parity);
    fence_proxy_async();
    start_qk<2 * N, N == PIECES - 1 ? BLOCKS : 2 * N + 2, N == 0>(r, s);
}

// S^T of a tile whose pieces are still coming.
__device__ __forceinline__ void multiply_qk_by_pieces(const Role& r, uint32_t parity, float (&s)[HEADS / 2]) {
    start_qk_piece<0>(r, parity, s);
    start_qk_piece<1>(r, parity, s);
    start_qk_piece<2>(r, parity, s);
    start_qk_piece<3>(r, parity, s);
    wgmma_wait<0>();
}

// Start O^T += V^T . P^T for column blocks BEGIN to END - 1.
template <int BEGIN, int END>
__device__ __forceinline__ void start_pv(const Role& r, float (&o)[V_BLOCKS][HEADS / 2]) {
    const uint64_t tile = wgmma_operand(r.tile(), 1024, BLOCK_BYTES), p = wgmma_operand(r.tile() + V_BLOCKS * BLOCK_BYTES, 1024, 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int v = BEGIN; v < END; ++v)
            wgmma_few<true, false>(o[v], wgmma_further(tile, v * BLOCK_BYTES + 2048 * k), wgmma_further(p, 32 * k));
    }
    wgmma_commit();
}

// --- softmax --------------------------------------------------------------------------------------------------

// Of a thread's heads; `sum` and `max` cover its rows only. O^T and `sum` are relative to `ref`.
using Softmax = HeadsSoftmax<COLUMNS>;

// References rise to the tile's maxima; sums and O^T follow. All of the warpgroup comes here together.
__device__ __forceinline__ void raise_references(
    const Role& r, const float (&s)[HEADS / 2], Softmax& state, float (&o)[V_BLOCKS][HEADS / 2]) {
    float(&across)[4][HEADS] = small().across[r.group][0];
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const float top = rows_max(fmaxf(s[element(0, c)], s[element(1, c)]));
        if (r.g == 0) across[r.warp][r.head(c)] = top;
    }
    r.sync();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const int head = r.head(c);
        const float top = fmaxf(fmaxf(across[0][head], across[1][head]), fmaxf(across[2][head], across[3][head]));
        const float to = fmaxf(state.ref[c], top), f = factor(state.ref[c], to);
        state.ref[c] = to;
        state.sum[c] *= f;
#pragma unroll
        for (int v = 0; v < V_BLOCKS; ++v) {
            o[v][element(0, c)] *= f;
            o[v][element(1, c)] *= f;
        }
    }
}

// S^T to P^T before rounding.
__device__ __forceinline__ void softmax_tile(
    const AttentionParams& p, const Role& r, const bool (&valid)[2], float (&s)[HEADS / 2], Softmax& state,
    float (&o)[V_BLOCKS][HEADS / 2]) {
    bool high = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            float& x = s[element(i, c)];
            x = valid[i] ? x * p.scale_log2 : -INF;
            high |= x > state.ref[c] + REF_SLACK;
            state.max[c] = fmaxf(state.max[c], x);
        }
    }
    // The vote also says that all warps have done with the tile's RoPE part, over which P^T is laid.
    if (named_barrier_any(1 + r.group, WARPGROUP, high)) raise_references(r, s, state, o);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const float base = state.ref[c] == -INF ? 0.0f : state.ref[c];
        float &x = s[element(0, c)], &y = s[element(1, c)];
        x = exp2_approx(x - base);
        y = exp2_approx(y - base);
        state.sum[c] += x + y;
    }
}

// P^T to shared memory, rounded. Line = head, chunk = eight rows.
__device__ __forceinline__ void store_p(const Role& r, const float (&s)[HEADS / 2]) {
    const int line = r.lane % 8 + (HEADS > 8 ? r.lane / 16 * 8 : 0), chunk = 2 * r.warp + r.lane / 8 % 2;
    const uint32_t to = r.tile() + V_BLOCKS * BLOCK_BYTES + line * 128 + ((chunk ^ (line & 7)) << 4);
    auto rounded = [&](int j, int i) { return pack_bf16x2(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]); };
    if constexpr (HEADS == 8) {
        stmatrix_x2_trans(to, rounded(0, 0), rounded(0, 1));
    } else {
#pragma unroll
        for (int j = 0; j < HEADS / 8; j += 2)
            stmatrix_x4_trans(to + j * 1024, rounded(j, 0), rounded(j, 1), rounded(j + 1, 0), rounded(j + 1, 1));
    }
    fence_proxy_async();
    r.sync();
}

// --- a query's tiles ------------------------------------------------------------------------------------------

// Let go of a piece of the tile.
__device__ __forceinline__ void release(const Role& r, int piece) {
    mbarrier_arrive_for_warp(shared_address(&small().empty[r.group * PIECES + piece]), r.lane);
}

// One warpgroup's turn at the tensor cores, from a tile's Q . K to P . V. Without turns both come to wait for rows at the
// same time, and multiply at the same time.
__device__ __forceinline__ void begin_turn(const Role& r) {
    if (threadIdx.x % WARPGROUP == 0)
        while (atomicCAS(&small().multiplying, 0, WARPGROUP / 32) != 0) __nanosleep(20);
    r.sync();
}

__device__ __forceinline__ void end_turn(const Role& r) {
    if (r.lane == 0) atomicSub(&small().multiplying, 1);
}

// O^T += V^T . P^T, with the tile's pieces let go one by one, but not those of a query's last tile.
__device__ __forceinline__ void multiply_pv(const Role& r, bool last, float (&o)[V_BLOCKS][HEADS / 2]) {
    start_pv<0, 2>(r, o);
    start_pv<2, 4>(r, o);
    start_pv<4, 6>(r, o);
    start_pv<6, 8>(r, o);
    wgmma_wait<3>();
    if (!last) release(r, 0);
    wgmma_wait<2>();
    if (!last) release(r, 1);
    wgmma_wait<1>();
    end_turn(r);
    if (!last) release(r, 2);
    wgmma_wait<0>();
    if (!last) release(r, 3);
}

// `turns` counts the tiles of this warpgroup over all its pieces of work.
__device__ __forceinline__ void attend(
    const AttentionParams& p, const Work& w, const Role& r, int& turns, Softmax& state, float (&o)[V_BLOCKS][HEADS / 2]) {
    int32_t entries[2] = {load_entry(p, w, w.begin, r.row(0)), load_entry(p, w, w.begin, r.row(1))};
    copy_q(p, w, r);
    wait_for_q(r);
#pragma unroll 1
    for (int tile = w.begin; tile < w.end; tile += w.step, ++turns) {
        const bool valid[2] = {is_valid(p, w, tile, entries[0]), is_valid(p, w, tile, entries[1])};
        float s[HEADS / 2];
        wait_for_piece(r, 1, turns & 1);
        begin_turn(r);
        multiply_qk_by_pieces(r, turns & 1, s);
        softmax_tile(p, r, valid, s, state, o);
        store_p(r, s);
        entries[0] = load_entry(p, w, tile + w.step, r.row(0));  // behind the fence, which would wait for them
        entries[1] = load_entry(p, w, tile + w.step, r.row(1));
        multiply_pv(r, tile + w.step >= w.end, o);
    }
    r.sync();  // O^T goes where the last tile is
}

// --- results --------------------------------------------------------------------------------------------------

// O^T to shared memory, [head][column] float32 over the warpgroup's tile, and its statistics.
__device__ __forceinline__ void lay_down(const Role& r, const Softmax& state, const float (&o)[V_BLOCKS][HEADS / 2]) {
    Small& sm = small();
    float* to = reinterpret_cast<float*>(shared + TILE_AT + r.group * TILE_BYTES);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        const int head = r.head(c);
        const float sum = rows_sum(state.sum[c]), max = rows_max(state.max[c]);
        if (r.g == 0) {
            sm.across[r.group][0][r.warp][head] = sum;
            sm.across[r.group][1][r.warp][head] = max;
            if (r.warp == 0) sm.own[r.group].ref[head] = state.ref[c];
        }
#pragma unroll
        for (int v = 0; v < V_BLOCKS; ++v) {
#pragma unroll
            for (int i = 0; i < 2; ++i) to[head * O_LINE + 64 * v + r.row(i)] = o[v][element(i, c)];
        }
    }
    r.sync();
    const int head = threadIdx.x % WARPGROUP;
    if (head < HEADS) {
        const float(&sums)[4][HEADS] = sm.across[r.group][0], (&maxima)[4][HEADS] = sm.across[r.group][1];
        sm.own[r.group].sum[head] = (sums[0][head] + sums[1][head]) + (sums[2][head] + sums[3][head]);
        sm.own[r.group].max[head] = fmaxf(fmaxf(maxima[0][head], maxima[1][head]), fmaxf(maxima[2][head], maxima[3][head]));
    }
}

// Sync of the threads that merge together: a warpgroup, or the multiplying ones of a block.
__device__ __forceinline__ void sync_writers(const Role& r) {
    if (QUERIES == 2) {
        r.sync();
    } else {
        named_barrier_sync(3, 2 * WARPGROUP);
    }
}

// Merge the warpgroups that share the query and write this block's share of the results. Warpgroup i is number i % 2 of
// block i / 2 of the cluster, or (QUERIES 2) this one alone.
__device__ __forceinline__ void write_results(const AttentionParams& p, const Work& w, const Role& r, int rank, int blocks) {
    constexpr int WRITERS = QUERIES == 2 ? WARPGROUP : 2 * WARPGROUP;
    const int sources = QUERIES == 2 ? 1 : 2 * blocks, thread = threadIdx.x % WRITERS;
    const uint32_t own = shared_address(&small().own[QUERIES == 2 ? r.group : 0]);
    const uint32_t o = shared_address(shared) + TILE_AT + (QUERIES == 2 ? r.group * TILE_BYTES : 0);
    auto* gathered = reinterpret_cast<Statistics*>(shared + Q_AT + (QUERIES == 2 ? r.group * Q_BYTES : 0));

    for (int i = thread; i < sources * 3 * HEADS; i += WRITERS) {
        const int source = i / (3 * HEADS), word = i % (3 * HEADS);
        const uint32_t from = cluster_address(own + source % 2 * sizeof(Statistics) + 4 * word, source / 2);
        reinterpret_cast<float*>(gathered + source)[word] = load_cluster_float(from);
    }
    sync_writers(r);
    // Four columns of a head are a unit; where there are more threads than units, several share one's sources.
    const int units = HEADS * D_V / 4, share = ceil_div(units, blocks);
    int sharers = 1;
    while (2 * sharers <= min(sources, 8) && 2 * sharers * share <= WRITERS) sharers *= 2;
    const int part = thread % sharers, first = rank * share, end = min(units, first + share);
#pragma unroll 1
    for (int unit = first + thread / sharers; unit < first + ceil_div(share, WRITERS / sharers) * (WRITERS / sharers); unit += WRITERS / sharers) {
        const int head = unit / (D_V / 4) % HEADS, column = unit % (D_V / 4) * 4, global_head = w.first_head + head;
        float ref = -INF, max = -INF, sum = 0.0f, v[4] = {};
        for (int i = 0; i < sources; ++i) {
            ref = fmaxf(ref, gathered[i].ref[head]);
            max = fmaxf(max, gathered[i].max[head]);
        }
#pragma unroll 1
        for (int i = part; i < sources; i += 4 * sharers) {
            float4 o4[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int source = min(i + k * sharers, sources - 1);
                o4[k] = load_cluster_float4(cluster_address(o + source % 2 * TILE_BYTES + (head * O_LINE + column) * 4, source / 2));
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int source = min(i + k * sharers, sources - 1);
                const float weight = i + k * sharers < sources ? factor(gathered[source].ref[head], ref) : 0.0f;
                sum += weight * gathered[source].sum[head];
                v[0] += weight * o4[k].x;
                v[1] += weight * o4[k].y;
                v[2] += weight * o4[k].z;
                v[3] += weight * o4[k].w;
            }
        }
        for (int step = 1; step < sharers; step *= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
#pragma unroll
            for (int k = 0; k < 4; ++k) v[k] += __shfl_xor_sync(~0u, v[k], step);
        }
        if (part != 0 || unit >= end || global_head >= p.h_q) continue;
        const HeadResult result = {max, sum == 0.0f ? -INF : ref + log2_approx(sum)};
        float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (p.num_splits == 1) {
            if (sum != 0.0f) scale *= sink_factor(p, global_head, result.lse);
            bf16* out = p.out + w.query.b * p.out_b + w.query.s * p.out_s + global_head * p.out_h + column;
            const Vec8 packed = {pack_bf16x2(v[0] * scale, v[1] * scale), pack_bf16x2(v[2] * scale, v[3] * scale)};
            if (p.flags & WIDE_OUT) {
                *reinterpret_cast<Vec8*>(out) = packed;
            } else {
                write_output(p, w.query, global_head, column, v[0] * scale, v[1] * scale);
                write_output(p, w.query, global_head, column + 2, v[2] * scale, v[3] * scale);
            }
            if (column == 0) write_statistics(p, w.query, global_head, result);
        } else {
            const int64_t at = (int64_t(blockIdx.y) * p.num_queries + w.query.index) * p.h_q + global_head;
            if (column == 0) {
                p.part_lse[at] = result.lse;
                if (p.part_max != nullptr) p.part_max[at] = result.max;
            }
            *reinterpret_cast<float4*>(p.part_out + at * D_V + column) =
                make_float4(v[0] * scale, v[1] * scale, v[2] * scale, v[3] * scale);
        }
    }
}

// --- the kernel -----------------------------------------------------------------------------------------------

// This block's pieces of work, a query and a head tile each: its one, or (QUERIES 2) each warpgroup's, one after the other.
template <typename Do>
__device__ __forceinline__ void for_each_work(const AttentionParams& p, int group, int rank, int blocks, Do act) {
    const int head_tiles = ceil_div(p.h_q, HEADS);
    auto find = [&](int piece) { return find_tile(p, piece, head_tiles); };
    auto attend = [&](int index) {
        act(find_work(p, index, head_tiles, group, blockIdx.y * blocks + rank, p.num_splits * blocks));
    };
    if constexpr (QUERIES == 1) {
        const int index = find(blockIdx.x / blocks);
        if (index >= 0) attend(index);
    } else {
        for_each_piece(p.num_queries * head_tiles, 2 * blockIdx.x + group, [] { return int(2 * gridDim.x); }, find, attend);
    }
}

// grid: QUERIES 1: x = piece of work * blocks of the cluster + rank, y = split; QUERIES 2: x persistent blocks.
extern "C" __global__ void __launch_bounds__(THREADS, 1) bf16_few_heads_sm90(const __grid_constant__ AttentionParams p) {
    if (QUERIES == 1 && find_tile(p, blockIdx.x / cluster_size(), ceil_div(p.h_q, HEADS)) < 0) return;  // all of the cluster
    Small& sm = small();
    if (threadIdx.x == 0) sm.multiplying = 0;
    if (threadIdx.x < 2 * PIECES) {
        mbarrier_init(shared_address(&sm.full[threadIdx.x]), WARPGROUP);
        mbarrier_init(shared_address(&sm.empty[threadIdx.x]), 4 * WARP_ARRIVALS);
        mbarrier_init_fence();
    }
    __syncthreads();
    const int blocks = QUERIES == 2 ? 1 : cluster_size(), rank = QUERIES == 2 ? 0 : cluster_rank();
    if (threadIdx.x >= 2 * WARPGROUP) {
        give_registers<COPY_REGISTERS>();
        const int group = threadIdx.x / WARPGROUP - 2, quarter = threadIdx.x / 32 % 4;
        uint32_t parity = 1;  // the first wait for an empty piece is no wait
        for_each_work(p, group, rank, blocks, [&](const Work& w) { copy_tiles(p, w, group, quarter, parity); });
        if (QUERIES == 1) {  // barriers of the cluster count every thread
            cluster_sync();
            cluster_sync();
        }
    } else {
        take_registers<256 - COPY_REGISTERS>();
        const Role r = Role::here();
        int turns = 0;
        for_each_work(p, r.group, rank, blocks, [&](const Work& w) {
            Softmax state;
            state.clear();
            float o[V_BLOCKS][HEADS / 2];
#pragma unroll
            for (int v = 0; v < V_BLOCKS; ++v) {
#pragma unroll
                for (int i = 0; i < HEADS / 2; ++i) o[v][i] = 0.0f;
            }
            attend(p, w, r, turns, state, o);
            lay_down(r, state, o);
            if (QUERIES == 1) {
                cluster_sync();
                write_results(p, w, r, rank, blocks);
                cluster_sync();  // shared memory must stay until everybody has read it
            } else {
                r.sync();
                write_results(p, w, r, rank, blocks);
                r.sync();
                if (w.begin < w.end) {
#pragma unroll
                    for (int piece = 0; piece < PIECES; ++piece) release(r, piece);
                }
            }
        });
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
