// Sparse attention of few heads over bf16 rows on Hopper, large batches and prefill: wgmma with the heads as its N
// side.
//
// Heads are the N side of the products, 8, 16 or 32 of them, so nothing is padded to 64:
//
//   S^T = K . Q^T     64 rows x heads       A = the tile, K-major      36 x m64nHk16
//   O^T = V^T . P^T   512 columns x heads   A = the tile, MN-major     8 x 4 x m64nHk16
//
// Warpgroups 0 and 1 are consumers, each with its own tile of 64 rows in shared memory and its own softmax. QUERIES 1:
// they take the tiles of a query in turn. QUERIES 2: each works on a query of its own. Warpgroups 2 and 3 are
// producers, one for each.
//
//   producer
//     vote              has the tile a valid entry? If not, on to the next one
//     copies            rows to the tile by cp.async, stage by stage, as stages are released. A stage is two column
//                       blocks of all 64 rows; the last stage has the RoPE columns as well
//   consumer
//     vote              has the tile a valid entry? If not, on to the next one
//     S^T               as the stages come in
//     vote              a logit above the reference by 2^REF_SLACK? Only then the reference rises, and O^T follows
//     P^T               stmatrix.trans, over the RoPE columns of the tile
//     O^T += V^T . P^T  stages are released one by one
//
//   full[w][stage]        copies done         the 128 producer threads of warpgroup w's tile
//   empty[w][stage]       stage released      the 4 warps of consumer warpgroup w
//   multiplying           a lock in shared memory: from Q . K to the end of P . V one warpgroup multiplies, while the
//                         other waits for rows
//   WARPGROUP_SYNC + w    named: the 128 threads of consumer warpgroup w
//   CONSUMER_SYNC         named: both, if they share a query
//   PRODUCER_VOTE + w     named: the 128 producer threads of warpgroup w's tile
//
// Tiles without a valid entry are neither copied nor multiplied. The 128 consumer threads of a tile hold its entries,
// and so do its 128 producer threads: both vote, find the same, and need not tell each other. Before the first tile both
// look for the last one with a valid entry, over which O^T is stored: its stages are not released. If no tile has a
// valid entry, the first is the last: it is copied, as zeros, so that its space is the consumers', but not multiplied.
//
// At the end each warpgroup stores its O^T in the space of its tile. A CTA merges those of its query from there; in a
// cluster every CTA merges a share of the columns through distributed shared memory. Splits that do not fit a cluster
// lie along gridDim.y and are merged by combine.cu.
//
// Shared memory: Q QUERIES x heads x D_QK x 2; 2 tiles of 64 x D_QK x 2 (and P where V has no RoPE columns behind it);
// statistics and mbarriers.
// Registers: 200 a consumer thread, 56 a producer thread (or 208 and 48), together 512 x 128.
// What was tried, what bounds it, taking turns: docs/kernels/bf16_few_heads_sm90.md.
#include "attention/division/results.cuh"
#include "attention/division/whole.cuh"
#include "attention/role.cuh"
#include "ptx/cache_policy.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/limits.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "tile/heads.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/warp.cuh"

constexpr int THREADS = 4 * WARPGROUP;
// With which neither side spills.
constexpr int PRODUCER_REGISTERS = QUERIES == 1 && HEADS == 32 && D_QK == 512 ? 48 : 56;
constexpr int BLOCKS = D_QK / 64;  // column blocks
constexpr int BLOCK_BYTES = TILE_ROWS * LINE_BYTES;
constexpr int V_BLOCKS = D_V / 64, STAGES = V_BLOCKS / 2;
constexpr int Q_BLOCK_BYTES = HEADS * LINE_BYTES, Q_BYTES = BLOCKS * Q_BLOCK_BYTES;
constexpr int P_BYTES = HEADS * LINE_BYTES;
constexpr int ROPE_BYTES = (BLOCKS - V_BLOCKS) * BLOCK_BYTES;
constexpr int TILE_BYTES = V_BLOCKS * BLOCK_BYTES + (P_BYTES > ROPE_BYTES ? P_BYTES : ROPE_BYTES);
constexpr int OWN_HEADS = HEADS / 4;  // of S^T and O^T in a thread (tile/heads.cuh)
constexpr float REF_SLACK = 8.0f;
constexpr int SHARERS = QUERIES == 2 ? 1 : 2;  // warpgroups of a CTA that share a query
constexpr int MAX_SOURCES = 2 * MAX_CLUSTER;   // the same of a cluster
constexpr int O_LINE = D_V + 4;                // floats of a head in the merge: 4 more spread the heads over the banks
static_assert(STAGES == 4, "");

// Named barriers; WARPGROUP_SYNC, PRODUCER_VOTE: + warpgroup.
enum NamedBarrier { WARPGROUP_SYNC = 1, CONSUMER_SYNC = 3, PRODUCER_VOTE = 4 };

// Shared memory: Q of each query, the tile of each consumer warpgroup, and the rest.
constexpr int Q_AT = 0, TILE_AT = QUERIES * Q_BYTES, SMALL_AT = TILE_AT + 2 * TILE_BYTES;

// A warpgroup's softmax over its rows, a value for each head, relative to `ref` like its O^T.
struct Statistics {
    float ref[HEADS], sum[HEADS], max[HEADS];
};
struct Small {
    uint64_t full[2 * STAGES], empty[2 * STAGES];  // [warpgroup][stage]
    float across[2][2][4][HEADS];                  // between the warps of a warpgroup
    Statistics own[2];
    int multiplying;  // warps that have not finished their turn
};
constexpr int SHARED_BYTES = SMALL_AT + int(sizeof(Small));
static_assert(HEADS * O_LINE * 4 <= TILE_BYTES, "O^T is stored in the space of the tile");
static_assert(SHARED_BYTES <= SM90_SHARED_BYTES, "");
static_assert(MAX_SOURCES * int(sizeof(Statistics)) <= Q_BYTES, "gathered statistics are stored in the space of Q");

extern __shared__ __align__(1024) uint8_t shared[];

// --- who and what ---------------------------------------------------------------------------------------------

__device__ __forceinline__ Role consumer_role() {
    const int thread = threadIdx.x;
    return Role::of(thread, uniform(thread / WARPGROUP), thread / 32 % 4);
}
__device__ __forceinline__ uint32_t q_lines(const Role& r) {
    return shared_address(shared) + Q_AT + (QUERIES == 2 ? r.warpgroup * Q_BYTES : 0);
}
__device__ __forceinline__ uint32_t tile_of(const Role& r) {
    return shared_address(shared) + TILE_AT + r.warpgroup * TILE_BYTES;
}
__device__ __forceinline__ void sync_warpgroup(const Role& r) {
    named_barrier_sync(WARPGROUP_SYNC + r.warpgroup, WARPGROUP);
}
__device__ __forceinline__ void sync_consumers() { named_barrier_sync(CONSUMER_SYNC, 2 * WARPGROUP); }

__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(shared + SMALL_AT); }

// This warpgroup's tiles of a work item are begin, begin + step, ... below end.
struct Work : WorkItem {
    int step;
};

// Where a CTA's rows are: a query, a tile of its heads, a split of its rows.
struct Place {
    int query, head_tile, split, splits;
};

__device__ __forceinline__ Work find_work(const AttentionParams& p, const Place& place, int warpgroup) {
    Work w;
    w.query = query_by_branch(p, place.query);
    w.first_head = place.head_tile * HEADS;
    w.begin = 0;
    w.end = find_lists(p, w);
    w.step = QUERIES == 2 ? 1 : 2;
    if (QUERIES == 2) {
        // At least one tile, if need be of no rows: with the place of its tile a query takes the space for its O^T.
        w.end = max(w.end, 1);
    } else {
        if (place.splits > 1) {
            const int64_t tiles = w.end;
            w.begin = int(tiles * place.split / place.splits);
            w.end = int(tiles * (place.split + 1) / place.splits);
        }
        w.begin += warpgroup;
    }
    return w;
}

// --- tiles without a valid entry ------------------------------------------------------------------------------

// Whether any of the 128 threads of a named barrier says so.
__device__ __forceinline__ bool any(int barrier, bool mine) { return named_barrier_any(barrier, WARPGROUP, mine); }

// This warpgroup's last tile of a work item, if it has any.
__device__ __forceinline__ int last_tile(const Work& w) {
    return w.begin + max((w.end - 1 - w.begin) / w.step, 0) * w.step;
}

// The entry of the last tile that a thread passes to find_end.
__device__ __forceinline__ int32_t load_last_entry(const AttentionParams& p, const Work& w) {
    return load_entry(p, w, last_tile(w), threadIdx.x % TILE_ROWS);
}

// Where this warpgroup's tiles end: behind the last one with a valid entry; if it has tiles, it keeps one. The 128
// threads of a named barrier look together, each at an entry of one of two tiles.
__device__ __forceinline__ int find_end(const AttentionParams& p, const Work& w, int barrier, int32_t last_entry) {
    constexpr int AT_ONCE = 4;  // entries of a thread on their way
    int from = last_tile(w);
    if (any(barrier, is_valid(p, w, from, last_entry))) return w.end;
    const int row = threadIdx.x % TILE_ROWS, mine = threadIdx.x / TILE_ROWS % 2;
#pragma unroll 1
    for (from -= w.step; from > w.begin; from -= 2 * AT_ONCE * w.step) {
        auto tile = [&](int pair, int i) { return max(from - (2 * pair + i) * w.step, w.begin); };
        int32_t entries[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) entries[i] = load_entry(p, w, tile(i, mine), row);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const bool valid = is_valid(p, w, tile(i, mine), entries[i]);
            if (any(barrier, valid)) return tile(i, any(barrier, valid && mine == 0) ? 0 : 1) + 1;
        }
    }
    return min(w.end, w.begin + 1);
}

// Whether a tile is this warpgroup's last one.
__device__ __forceinline__ bool is_last(const Work& w, int tile) { return tile + w.step >= w.end; }

// --- producer --------------------------------------------------------------------------------------------------

// Starts a copy of 16 bytes of a row. A call with a query a CTA mostly reads a row once, so that it leaves L2 first.
__device__ __forceinline__ void copy_chunk(uint32_t to, const uint8_t* from, bool valid) {
    if constexpr (QUERIES == 1) {
        cp_async_16(to, from, valid, evict_first());
    } else {
        cp_async_16(to, from, valid);
    }
}

// A producer warp copies rows 16 `quarter` .. + 15 of its warpgroup's tiles. Lane l holds row l % 16 of them; eight
// lanes copy 128 bytes of a row.
__device__ __forceinline__ void copy_tiles(const AttentionParams& p, Work w, int warpgroup, int quarter,
                                           uint32_t& parity) {
    const int lane = threadIdx.x % 32, chunk = lane % 8, my_row = 16 * quarter + lane % 16;
    const uint32_t tile_at = shared_address(shared) + TILE_AT + warpgroup * TILE_BYTES;
    Small& sm = small();
    const int32_t last_entry = load_last_entry(p, w);
    int32_t entry = load_entry(p, w, w.begin, my_row);
    w.end = find_end(p, w, PRODUCER_VOTE + warpgroup, last_entry);
#pragma unroll 1
    for (int tile = w.begin; tile < w.end; tile += w.step) {
        const uint8_t* row = find_row(p, w, tile, entry).data;
        const bool has_rows = any(PRODUCER_VOTE + warpgroup, row != nullptr);
        entry = load_entry(p, w, tile + w.step, my_row);  // behind the barrier, which would wait for it
        if (!has_rows && !is_last(w, tile)) continue;
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_wait(shared_address(&sm.empty[warpgroup * STAGES + stage]), parity);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int line = 16 * quarter + 4 * i + lane / 8;
                const uint8_t* from = shuffle_pointer(row, 4 * i + lane / 8);
                // An integer, as otherwise the offsets in all blocks, 128 b + 16 chunk, are kept in registers.
                const uint64_t mine = reinterpret_cast<uint64_t>(from) + chunk * 16;
                const uint32_t to = swizzled(tile_at, line, chunk);
#pragma unroll
                for (int b = 2 * stage; b < (stage == STAGES - 1 ? BLOCKS : 2 * stage + 2); ++b)
                    copy_chunk(to + b * BLOCK_BYTES, reinterpret_cast<const uint8_t*>(mine) + b * 128,
                               from != nullptr);
            }
            mbarrier_arrive_after_copies(shared_address(&sm.full[warpgroup * STAGES + stage]));
        }
        parity ^= 1;
    }
}

// Start copying Q: a line a head, in column blocks like those of a tile. Heads beyond the last are zeros.
__device__ __forceinline__ void copy_q(const AttentionParams& p, const Work& w, const Role& r) {
    constexpr int COPIED_BY = QUERIES == 2 ? WARPGROUP : 2 * WARPGROUP;
    constexpr int UNROLLED = HEADS == 32 ? 2 : 4;  // with 4 some would spill
    const bf16* q = p.q + w.query.b * p.q_b + w.query.s * p.q_s;
    const uint32_t to = q_lines(r);
#pragma unroll UNROLLED
    for (int item = threadIdx.x % COPIED_BY; item < HEADS * BLOCKS * 8; item += COPIED_BY) {
        const int chunk = item % 8, block = item / 8 % BLOCKS, head = item / 8 / BLOCKS;
        const bool here = w.first_head + head < p.h_q;
        cp_async_16(swizzled(to + block * Q_BLOCK_BYTES, head, chunk),
                    here ? q + (w.first_head + head) * p.q_h + 64 * block + 8 * chunk : nullptr, here);
    }
}

// Wait for Q, all consumer threads that share it.
__device__ __forceinline__ void wait_for_q(const Role& r) {
    cp_async_wait_all();
    fence_proxy_async();
    if (QUERIES == 1) {
        sync_consumers();
    } else {
        sync_warpgroup(r);
    }
}

// --- products -------------------------------------------------------------------------------------------------

// Start S^T (+)= K . Q^T over column blocks BEGIN to END - 1. SUM: whether the first step sets S^T or adds.
template <int BEGIN, int END, Sum SUM>
__device__ __forceinline__ void start_qk(const Role& r, float (&acc)[HEADS / 2]) {
    const uint64_t tile = wgmma_operand(tile_of(r), 1024, 16), q = wgmma_operand(q_lines(r), 1024, 16);
    wgmma_fence();
#pragma unroll
    for (int block = BEGIN; block < END; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint64_t a = wgmma_further(tile, block * BLOCK_BYTES + 32 * i);
            const uint64_t b = wgmma_further(q, block * Q_BLOCK_BYTES + 32 * i);
            if (SUM == Sum::SET && block == BEGIN && i == 0) {
                wgmma<Values::BF16, Sum::SET, Major::K, Major::K>(acc, a, b);
            } else {
                wgmma<Values::BF16, Sum::ADD, Major::K, Major::K>(acc, a, b);
            }
        }
    }
    wgmma_commit();
}

__device__ __forceinline__ void wait_for_stage(const Role& r, int stage, uint32_t parity) {
    mbarrier_wait(shared_address(&small().full[r.warpgroup * STAGES + stage]), parity);
}

// Wait for a tile that is not multiplied.
__device__ __forceinline__ void wait_for_tile(const Role& r, uint32_t parity) {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) wait_for_stage(r, stage, parity);
}

// Start what stage `N` of a tile adds to S^T, once it is full.
template <int N>
__device__ __forceinline__ void start_qk_stage(const Role& r, uint32_t parity, float (&s)[HEADS / 2]) {
    wait_for_stage(r, N, parity);
    fence_proxy_async();
    start_qk<2 * N, N == STAGES - 1 ? BLOCKS : 2 * N + 2, N == 0 ? Sum::SET : Sum::ADD>(r, s);
}

// S^T of a tile whose stages are still being copied.
__device__ __forceinline__ void multiply_qk_by_stages(const Role& r, uint32_t parity, float (&s)[HEADS / 2]) {
    start_qk_stage<0>(r, parity, s);
    start_qk_stage<1>(r, parity, s);
    start_qk_stage<2>(r, parity, s);
    start_qk_stage<3>(r, parity, s);
    wgmma_wait<0>();
}

// Start O^T += V^T . P^T for column blocks BEGIN to END - 1.
template <int BEGIN, int END>
__device__ __forceinline__ void start_pv(const Role& r, float (&o)[V_BLOCKS][HEADS / 2]) {
    const uint64_t tile = wgmma_operand(tile_of(r), 1024, BLOCK_BYTES);
    const uint64_t p = wgmma_operand(tile_of(r) + V_BLOCKS * BLOCK_BYTES, 1024, 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int v = BEGIN; v < END; ++v)
            wgmma<Values::BF16, Sum::ADD, Major::MN, Major::K>(o[v], wgmma_further(tile, v * BLOCK_BYTES + 2048 * k),
                                                               wgmma_further(p, 32 * k));
    }
    wgmma_commit();
}

// --- softmax --------------------------------------------------------------------------------------------------

using Softmax = HeadsSoftmax<OWN_HEADS>;

// References rise to the tile's maxima; sums and O^T follow. The whole warpgroup calls.
__device__ __forceinline__ void raise_references(const Role& r, const float (&s)[HEADS / 2], Softmax& state,
                                                 float (&o)[V_BLOCKS][HEADS / 2]) {
    float (&across)[4][HEADS] = small().across[r.warpgroup][0];
    wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float top = rows_max(fmaxf(s[element(0, c)], s[element(1, c)]));
        if (r.g == 0) across[r.warp][r.head(c)] = top;
    }
    sync_warpgroup(r);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const int head = r.head(c);
        const float top = fmaxf(fmaxf(across[0][head], across[1][head]), fmaxf(across[2][head], across[3][head]));
        const float to = fmaxf(state.ref[c], top), f = rescale_factor(state.ref[c], to);
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
__device__ __forceinline__ void softmax_tile(const AttentionParams& p, const Role& r, const bool (&valid)[2],
                                             float (&s)[HEADS / 2], Softmax& state, float (&o)[V_BLOCKS][HEADS / 2]) {
    bool high = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int c = 0; c < OWN_HEADS; ++c) {
            float& x = s[element(i, c)];
            x = valid[i] ? x * p.scale_log2 : -INF;
            high |= x > state.ref[c] + REF_SLACK;
            state.max[c] = fmaxf(state.max[c], x);
        }
    }
    // The vote also tells that all warps have read the tile's RoPE columns, over which P^T is stored.
    if (any(WARPGROUP_SYNC + r.warpgroup, high)) raise_references(r, s, state, o);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const float base = finite_reference(state.ref[c]);
        float &x = s[element(0, c)], &y = s[element(1, c)];
        x = exp2_approx(x - base);
        y = exp2_approx(y - base);
        state.sum[c] += x + y;
    }
}

// P^T to shared memory, rounded: a line a head, a chunk eight rows.
__device__ __forceinline__ void store_p(const Role& r, const float (&s)[HEADS / 2]) {
    const int line = r.lane % 8 + (HEADS > 8 ? r.lane / 16 * 8 : 0), chunk = 2 * r.warp + r.lane / 8 % 2;
    const uint32_t to = swizzled(tile_of(r) + V_BLOCKS * BLOCK_BYTES, line, chunk);
    auto rounded = [&](int j, int i) { return pack_bf16x2(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]); };
    if constexpr (HEADS == 8) {
        stmatrix_x2_trans(to, rounded(0, 0), rounded(0, 1));
    } else {
#pragma unroll
        for (int j = 0; j < HEADS / 8; j += 2)
            stmatrix_x4_trans(to + j * 1024, rounded(j, 0), rounded(j, 1), rounded(j + 1, 0), rounded(j + 1, 1));
    }
    fence_proxy_async();
    sync_warpgroup(r);
}

// --- a query's tiles ------------------------------------------------------------------------------------------

// Release a stage of the tile.
__device__ __forceinline__ void release(const Role& r, int stage) {
    mbarrier_arrive_for_warp(shared_address(&small().empty[r.warpgroup * STAGES + stage]), r.lane);
}

// A warpgroup's turn at the tensor cores, from a tile's Q . K to P . V. Without turns both warpgroups soon wait for
// rows at the same time and multiply at the same time.
__device__ __forceinline__ void begin_turn(const Role& r) {
    if (threadIdx.x % WARPGROUP == 0)
        while (atomicCAS(&small().multiplying, 0, WARPGROUP / 32) != 0) __nanosleep(20);
    sync_warpgroup(r);
}

__device__ __forceinline__ void end_turn(const Role& r) {
    if (r.lane == 0) atomicSub(&small().multiplying, 1);
}

// O^T += V^T . P^T. The tile's stages are released one by one, except those of a work item's last tile.
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

// `turns` counts the tiles that this warpgroup's producers have copied over all its work items.
__device__ __forceinline__ void attend(const AttentionParams& p, Work w, const Role& r, int& turns, Softmax& state,
                                       float (&o)[V_BLOCKS][HEADS / 2]) {
    int32_t entries[2];
    auto load = [&](int tile) {
        entries[0] = load_entry(p, w, tile, r.row(0));
        entries[1] = load_entry(p, w, tile, r.row(1));
    };
    load(w.begin);
    const int32_t last_entry = load_last_entry(p, w);
    copy_q(p, w, r);
    // Uniform, or the compiler takes the loop below for divergent.
    w.end = __reduce_max_sync(~0u, find_end(p, w, WARPGROUP_SYNC + r.warpgroup, last_entry));
    wait_for_q(r);
#pragma unroll 1
    for (int tile = w.begin; tile < w.end; tile += w.step) {
        const bool valid[2] = {is_valid(p, w, tile, entries[0]), is_valid(p, w, tile, entries[1])};
        // Left at once: behind a second branch products began 350 cycles later.
        if (!uniform(any(WARPGROUP_SYNC + r.warpgroup, valid[0] || valid[1]))) {
            if (is_last(w, tile)) wait_for_tile(r, turns++ & 1);
            load(tile + w.step);
            continue;
        }
        float s[HEADS / 2];
        wait_for_stage(r, 1, turns & 1);
        begin_turn(r);
        multiply_qk_by_stages(r, turns++ & 1, s);
        softmax_tile(p, r, valid, s, state, o);
        store_p(r, s);
        load(tile + w.step);  // behind the barrier, which would wait for them
        multiply_pv(r, is_last(w, tile), o);
    }
    sync_warpgroup(r);  // O^T will be stored over the last tile
}

// --- results --------------------------------------------------------------------------------------------------

// Stores O^T, [head][column] float32, over the warpgroup's tile, and its statistics.
__device__ __forceinline__ void store_output(const Role& r, const Softmax& state,
                                             const float (&o)[V_BLOCKS][HEADS / 2]) {
    Small& sm = small();
    float* to = reinterpret_cast<float*>(shared + TILE_AT + r.warpgroup * TILE_BYTES) + r.head(0) * O_LINE + r.row(0);
#pragma unroll
    for (int c = 0; c < OWN_HEADS; ++c) {
        const int head = r.head(c);
        const float sum = rows_sum(state.sum[c]), max = rows_max(state.max[c]);
        if (r.g == 0) {
            sm.across[r.warpgroup][0][r.warp][head] = sum;
            sm.across[r.warpgroup][1][r.warp][head] = max;
            if (r.warp == 0) sm.own[r.warpgroup].ref[head] = state.ref[c];
        }
#pragma unroll
        for (int v = 0; v < V_BLOCKS; ++v) {
#pragma unroll
            for (int i = 0; i < 2; ++i) to[(c / 2 * 8 + c % 2) * O_LINE + 64 * v + 8 * i] = o[v][element(i, c)];
        }
    }
    sync_warpgroup(r);
    const int head = threadIdx.x % WARPGROUP;
    if (head < HEADS) {
        const float (&sums)[4][HEADS] = sm.across[r.warpgroup][0], (&maxima)[4][HEADS] = sm.across[r.warpgroup][1];
        sm.own[r.warpgroup].sum[head] = (sums[0][head] + sums[1][head]) + (sums[2][head] + sums[3][head]);
        sm.own[r.warpgroup].max[head] =
            fmaxf(fmaxf(maxima[0][head], maxima[1][head]), fmaxf(maxima[2][head], maxima[3][head]));
    }
}

// Waits for the threads that merge together: a warpgroup, or the consumers of the CTA.
__device__ __forceinline__ void sync_writers(const Role& r) {
    if (QUERIES == 2) {
        sync_warpgroup(r);
    } else {
        sync_consumers();
    }
}

// Returns the factor of a head's merged O^T, and writes its statistics if `write`.
__device__ __forceinline__ float finish_head(const AttentionParams& p, const Work& w, int head, bool write,
                                             const HeadResult& result, float sum) {
    const bool whole = p.num_splits == 1;
    if (write && whole) write_statistics(p, w.query, head, result);
    if (write && !whole) write_partial_statistics(p, partial_index(p, blockIdx.y, w.query, head), result);
    if (sum == 0.0f) return 0.0f;
    return whole ? 1.0f / sum * sink_factor(p, head, result.lse) : 1.0f / sum;
}

// Four neighbouring columns of a head's result.
__device__ __forceinline__ void write_columns(const AttentionParams& p, const Work& w, int head, int column,
                                              const float (&v)[4]) {
    if (p.num_splits > 1) {
        const int64_t at = partial_index(p, blockIdx.y, w.query, head);
        *reinterpret_cast<float4*>(partial_out(p, at) + column) = make_float4(v[0], v[1], v[2], v[3]);
    } else if (p.flags & WIDE_OUT) {
        const Vec8 packed = {pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3])};
        *reinterpret_cast<Vec8*>(out_of(p, w.query, head, column)) = packed;
    } else {
        write_output(p, w.query, head, column, v[0], v[1]);
        write_output(p, w.query, head, column + 2, v[2], v[3]);
    }
}

// What is done with a head's O^T: the weight of each warpgroup's, and a factor for their sum.
struct HeadWeights {
    float of[SHARERS], scale;
};

// Merges the warpgroups of this CTA that share the query, and writes the results.
__device__ __forceinline__ void write_results(const AttentionParams& p, const Work& w, const Role& r) {
    constexpr int WRITERS = SHARERS * WARPGROUP, HEADS_AT_ONCE = WRITERS / (D_V / 4);
    const int first = QUERIES == 2 ? r.warpgroup : 0, thread = threadIdx.x % WRITERS;
    auto* weights = reinterpret_cast<HeadWeights*>(shared + Q_AT + first * Q_BYTES);  // in the space of Q
    const Statistics* own = small().own + first;
    if (thread < HEADS && w.first_head + thread < p.h_q) {
        float ref = -INF, max = -INF, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SHARERS; ++i) {
            ref = fmaxf(ref, own[i].ref[thread]);
            max = fmaxf(max, own[i].max[thread]);
        }
#pragma unroll
        for (int i = 0; i < SHARERS; ++i) {
            const float weight = rescale_factor(own[i].ref[thread], ref);
            weights[thread].of[i] = weight;
            sum += weight * own[i].sum[thread];
        }
        const HeadResult result = {max, log2_sum_exp(ref, sum)};
        weights[thread].scale = finish_head(p, w, w.first_head + thread, true, result, sum);
    }
    sync_writers(r);
    const int column = thread % (D_V / 4) * 4;
    const uint8_t* o = shared + TILE_AT + first * TILE_BYTES + column * 4;
#pragma unroll 4
    for (int head = thread / (D_V / 4); head < min(HEADS, p.h_q - w.first_head); head += HEADS_AT_ONCE) {
        float v[4] = {};
#pragma unroll
        for (int i = 0; i < SHARERS; ++i) {
            const float4 o4 = *reinterpret_cast<const float4*>(o + i * TILE_BYTES + head * O_LINE * 4);
            const float weight = weights[head].of[i];
            v[0] += weight * o4.x;
            v[1] += weight * o4.y;
            v[2] += weight * o4.z;
            v[3] += weight * o4.w;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k] *= weights[head].scale;
        write_columns(p, w, w.first_head + head, column, v);
    }
}

// Merges the warpgroups of a cluster and writes this CTA's share of the results. Source i is warpgroup i % 2 of CTA
// i / 2 of the cluster.
__device__ __forceinline__ void write_cluster_results(const AttentionParams& p, const Work& w, int rank, int ctas) {
    constexpr int WRITERS = 2 * WARPGROUP;
    const int sources = 2 * ctas, thread = threadIdx.x;
    const uint32_t own = shared_address(&small().own), o = shared_address(shared) + TILE_AT;
    auto* gathered = reinterpret_cast<Statistics*>(shared + Q_AT);

    for (int i = thread; i < sources * 3 * HEADS; i += WRITERS) {
        const int source = i / (3 * HEADS), word = i % (3 * HEADS);
        const uint32_t from = cluster_address(own + source % 2 * sizeof(Statistics) + 4 * word, source / 2);
        reinterpret_cast<float*>(gathered + source)[word] = load_cluster_float(from);
    }
    sync_consumers();
    // A chunk is four columns of a head. If there are more threads than chunks, several threads share the sources of a
    // chunk.
    const int chunks = HEADS * D_V / 4, share = ceil_div(chunks, ctas);
    int sharers = 1;
    while (2 * sharers <= min(sources, 8) && 2 * sharers * share <= WRITERS) sharers *= 2;
    const int sharer = thread % sharers, first = rank * share, end = min(chunks, first + share);
#pragma unroll 1
    for (int chunk = first + thread / sharers;
         chunk < first + ceil_div(share, WRITERS / sharers) * (WRITERS / sharers); chunk += WRITERS / sharers) {
        const int head = chunk / (D_V / 4) % HEADS, column = chunk % (D_V / 4) * 4, global_head = w.first_head + head;
        float ref = -INF, max = -INF, sum = 0.0f, v[4] = {};
        for (int i = 0; i < sources; ++i) {
            ref = fmaxf(ref, gathered[i].ref[head]);
            max = fmaxf(max, gathered[i].max[head]);
        }
#pragma unroll 1
        for (int i = sharer; i < sources; i += 4 * sharers) {
            float4 o4[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int source = min(i + k * sharers, sources - 1);
                o4[k] = load_cluster_float4(
                    cluster_address(o + source % 2 * TILE_BYTES + (head * O_LINE + column) * 4, source / 2));
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int source = min(i + k * sharers, sources - 1);
                const float weight =
                    i + k * sharers < sources ? rescale_factor(gathered[source].ref[head], ref) : 0.0f;
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
        if (sharer != 0 || chunk >= end || global_head >= p.h_q) continue;
        const HeadResult result = {max, log2_sum_exp(ref, sum)};
        const float scale = finish_head(p, w, global_head, column == 0, result, sum);
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k] *= scale;
        write_columns(p, w, global_head, column, v);
    }
}

// --- the kernel -----------------------------------------------------------------------------------------------

// Calls `act` with the work of this CTA (`place`), or (QUERIES 2) of this warpgroup, one query after the other.
template <typename Act>
__device__ __forceinline__ void for_each_work(const AttentionParams& p, const Place& place, int warpgroup, Act act) {
    if constexpr (QUERIES == 1) {
        act(find_work(p, place, warpgroup));
    } else {
        const int head_tiles = num_head_tiles(p);
        auto workers = [] { return int(2 * gridDim.x); };
        const int worker = blockIdx.x + warpgroup * gridDim.x;  // so a second query only once every CTA has one
        for_each_item(
            [&] { return p.num_queries * head_tiles; }, worker, workers,
            [&](int item) { return find_head_tile(p, item, head_tiles); },
            [&](int index) { act(find_work(p, {index / head_tiles, index % head_tiles, 0, 1}, warpgroup)); });
    }
}

// grid: QUERIES 1: x = (query * head tiles + head tile) * CTAs of the cluster + rank, y = split. QUERIES 2: x
// persistent CTAs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bf16_few_heads_sm90(const __grid_constant__ AttentionParams p) {
    Small& sm = small();
    if (threadIdx.x == 0) sm.multiplying = 0;
    if (threadIdx.x < 2 * STAGES) {
        mbarrier_init(shared_address(&sm.full[threadIdx.x]), WARPGROUP);
        mbarrier_init(shared_address(&sm.empty[threadIdx.x]), 4 * WARP_ARRIVALS);
        mbarrier_init_fence();
    }
    __syncthreads();
    Place place;
    int ctas = 1;
    if (QUERIES == 1) {
        ctas = cluster_size();
        const int item = blockIdx.x / ctas, head_tiles = num_head_tiles(p);
        place = {item / head_tiles, item % head_tiles, int(blockIdx.y * ctas + cluster_rank()), p.num_splits * ctas};
        wait_for_earlier_kernels();  // persistent CTAs gain nothing from overlapping launches
        let_next_kernel_start();
        if (has_results(p, place.query)) return;  // the whole cluster does
    }
    if (threadIdx.x >= 2 * WARPGROUP) {
        decrease_registers_to<PRODUCER_REGISTERS>();
        const int warpgroup = threadIdx.x / WARPGROUP - 2, quarter = threadIdx.x / 32 % 4;
        uint32_t parity = 1;  // the first wait for each stage returns at once
        for_each_work(p, place, warpgroup, [&](const Work& w) { copy_tiles(p, w, warpgroup, quarter, parity); });
        if (ctas > 1) {  // cluster barriers count every thread
            cluster_sync();
            cluster_sync();
        }
    } else {
        increase_registers_to<256 - PRODUCER_REGISTERS>();
        const Role r = consumer_role();
        int turns = 0;
        for_each_work(p, place, r.warpgroup, [&](const Work& w) {
            Softmax state;
            state.clear();
            float o[V_BLOCKS][HEADS / 2];
#pragma unroll
            for (int v = 0; v < V_BLOCKS; ++v) {
#pragma unroll
                for (int i = 0; i < HEADS / 2; ++i) o[v][i] = 0.0f;
            }
            attend(p, w, r, turns, state, o);
            store_output(r, state, o);
            if (ctas > 1) {
                cluster_sync();
                write_cluster_results(p, w, cluster_rank(), ctas);
                cluster_sync();  // shared memory must stay until all CTAs have read it
                return;
            }
            sync_writers(r);
            write_results(p, w, r);
            if (QUERIES == 2) {
                sync_warpgroup(r);
#pragma unroll
                for (int stage = 0; stage < STAGES; ++stage) release(r, stage);
            }
        });
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
