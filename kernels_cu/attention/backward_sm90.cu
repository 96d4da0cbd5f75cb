// The backward of sparse attention on Hopper, on wgmma: it computes what backward.cu does, with 64 lines and tiles of
// 64 rows. Lines are heads of a query. GROUPED: up to 32 heads leave room for those of neighbouring queries; rows are
// the union of their lists (backward_groups.cu), and dS and P are 0 where a query does not list the row.
//
//   grid   x query * head blocks + head block; of a group the first query's CTA does the work
//   CTA    three warpgroups: 64 lines, all their rows. Shared memory holds Q, dO, and one tile at a time. The tile's
//          rows are K; their first D_V columns are V.
//
//   warpgroup 0 (consumer)              warpgroup 1 (consumer)              warpgroup 2 (producer)
//     S = Q.K^T       m64n64k16           dP = dO.V^T    m64n64k16            Q and dO, then rows of each tile by
//         rows 32 .. 63  --->          <---  rows 0 .. 31                       cp.async, once the tile is released
//     dS and sigma * P of rows 0 .. 31    dS and sigma * P of rows 32 .. 63, bf16, to shared memory
//     dQ += dS.K      m64n256k16          dQ += dS.K     m64n256k16, n64
//       columns 0 .. 255                    columns 256 .. 511, RoPE's        <-- the tile is released
//     C = dS^T.Q + (sigma * P)^T.dO, 64 columns at a time  m64n64k16
//       columns 0 .. 255, RoPE's            columns 256 .. 511
//
// C of 64 columns is written while the next 64 are multiplied. S and dP are exchanged as float32, in the space that dS
// and P take afterwards. At the end a bfloat16 dQ goes through the tile's space, so that lines of 128 bytes are
// written.
//
//   heads_full    Q and dO have arrived   128 arrivals after cp.async
//   full          a tile has arrived      the same
//   empty         a tile is released      the 8 consumer warps
//   FREE_0, _1    named: the other warpgroup has multiplied C, so warpgroup 0, or 1, may overwrite dS and P
//   HANDED_OVER   named: both consumer warpgroups have written their halves of S and dP
//   TAKEN         named: both have read them
//   CONSUMERS     named: both have written dS and P, or the heads' numbers
//
// Shared memory, bytes: Q and a tile 128 * D_QK each, dO 65,536, dS and P 8,192 each, and 1 KB; 576 wide 230,168.
// Registers: 240 a consumer thread, 24 a producer thread, together the 384 x 168 of the launch.
#include "attention/backward.cuh"
#include "attention/role.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/limits.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "tile/swizzle.cuh"

constexpr int LINES = 64;  // of a work item, and rows of a tile
static_assert(HEADS == LINES, "");
constexpr int BLOCKS = D_QK / 64, V_BLOCKS = D_V / 64;  // column blocks: 64 swizzled lines of 64 values, 128 bytes
constexpr int BLOCK_BYTES = LINES * LINE_BYTES;
constexpr bool ROPE = BLOCKS > V_BLOCKS;
constexpr int CONSUMER_THREADS = 2 * WARPGROUP, THREADS = CONSUMER_THREADS + WARPGROUP;

enum NamedBarrier { FREE_0 = 1, FREE_1 = 2, HANDED_OVER = 3, TAKEN = 4, CONSUMERS = 5 };

struct Small {
    uint64_t heads_full, full, empty;
    HeadNumbers numbers;
};

constexpr int Q_AT = 0, DOUT_AT = Q_AT + BLOCKS * BLOCK_BYTES, TILE_AT = DOUT_AT + V_BLOCKS * BLOCK_BYTES,
              DS_AT = TILE_AT + BLOCKS * BLOCK_BYTES, P_AT = DS_AT + BLOCK_BYTES, SMALL_AT = P_AT + BLOCK_BYTES,
              SHARED_BYTES = SMALL_AT + int(sizeof(Small));
static_assert(SHARED_BYTES <= SM90_SHARED_BYTES, "");

extern __shared__ __align__(1024) uint8_t shared[];
__device__ __forceinline__ Small& small() { return *reinterpret_cast<Small*>(shared + SMALL_AT); }
__device__ __forceinline__ uint32_t address_of(int at) { return shared_address(shared) + at; }

// --- producer -------------------------------------------------------------------------------------------------

// Starts to copy this thread's 16 bytes of four lines, 16 apart, in COUNT column blocks. Null lines become zeros.
template <int COUNT>
__device__ __forceinline__ void copy_lines(uint32_t to, const bf16* const (&lines)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int block = 0; block < COUNT; ++block)
            cp_async_16(to + block * BLOCK_BYTES + i * 16 * LINE_BYTES, lines[i] + 64 * block, lines[i] != nullptr);
    }
}

// The addresses of a thread's 16 bytes of four lines, 16 apart; null where there is no line.
template <typename From>
__device__ __forceinline__ void find_lines(int line, int chunk, const bf16* (&lines)[4], From from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        lines[i] = from(line + 16 * i);
        if (lines[i] != nullptr) lines[i] += CHUNK * chunk;
    }
}

__device__ __forceinline__ void run_producer(const BackwardParams& p, const Item& item, int tiles) {
    const int thread = threadIdx.x - CONSUMER_THREADS, line = thread / 8, chunk = thread % 8;
    const uint32_t at = swizzled(address_of(0), line, chunk);  // the swizzle repeats after 16 lines
    const bf16* lines[4];
    find_lines(line, chunk, lines, [&](int i) { return item.q(p, i); });
    copy_lines<BLOCKS>(at + Q_AT, lines);
    find_lines(line, chunk, lines, [&](int i) { return item.dout(p, i); });
    copy_lines<V_BLOCKS>(at + DOUT_AT, lines);
    mbarrier_arrive_after_copies(shared_address(&small().heads_full));
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        find_lines(line, chunk, lines, [&](int i) { return item.row(p, LINES * tile + i); });
        if (tile > 0) mbarrier_wait(shared_address(&small().empty), (tile - 1) & 1);
        copy_lines<BLOCKS>(at + TILE_AT, lines);
        mbarrier_arrive_after_copies(shared_address(&small().full));
    }
}

// --- consumers ------------------------------------------------------------------------------------------------

// S = Q.K^T or dP = dO.V^T, over COUNT column blocks.
template <int COUNT>
__device__ __forceinline__ void multiply_scores(int lines_at, float (&s)[32]) {
    const uint64_t a = wgmma_operand(address_of(lines_at), 1024, 16);
    const uint64_t b = wgmma_operand(address_of(TILE_AT), 1024, 16);
    wgmma_fence();
    wgmma<Values::BF16, Sum::SET, Major::K, Major::K>(s, a, b);
#pragma unroll
    for (int step = 1; step < 4 * COUNT; ++step) {
        const int further = step / 4 * BLOCK_BYTES + step % 4 * 32;
        wgmma<Values::BF16, Sum::ADD, Major::K, Major::K>(s, wgmma_further(a, further), wgmma_further(b, further));
    }
    wgmma_commit();
    wgmma_wait<0>();
}

// Where this thread and its counterpart in the other warpgroup exchange part j: S in the space of P, dP in the space
// of dS.
__device__ __forceinline__ float4* handed_over(bool dp, int j) {
    return reinterpret_cast<float4*>(shared + (dp ? DS_AT : P_AT)) + j * WARPGROUP + threadIdx.x % WARPGROUP;
}

// Which queries list the rows whose weights this thread computes: bit n is query n of the group. They are loaded before
// S is multiplied, and needed after it.
struct Listed {
    uint32_t by[8];
};

template <int W>
__device__ __forceinline__ Listed load_listed(const BackwardParams& p, const Item& item, const Role& r, int tile) {
    Listed listed = {};
#pragma unroll
    for (int n = 0; GROUPED && n < 8; ++n) {
        const int entry = LINES * tile + 32 * W + n / 2 * 8 + 2 * r.t + n % 2;
        if (entry < item.count) listed.by[n] = p.listed[int64_t(item.query) * p.topk + entry];
    }
    return listed;
}

// Computes dS and sigma * P of the warpgroup's half of a tile, 32 rows, in shared memory. `mine`: S or dP of all 64
// rows.
template <int W>
__device__ __forceinline__ void find_weights(const BackwardParams& p, const Role& r, int tile, int rows,
                                             const Listed& listed, const float (&mine)[32]) {
    constexpr int FIRST = 4 * W, GIVEN = 4 - FIRST;  // first n tile that it keeps, and that it gives away
    if (tile > 0) named_barrier_sync(W == 0 ? FREE_0 : FREE_1, CONSUMER_THREADS);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float* x = mine + 4 * (GIVEN + j);
        *handed_over(W == 1, j) = make_float4(x[0], x[1], x[2], x[3]);
    }
    named_barrier_sync(HANDED_OVER, CONSUMER_THREADS);
    float4 taken[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) taken[j] = *handed_over(W == 0, j);
    named_barrier_sync(TAKEN, CONSUMER_THREADS);
    const HeadNumbers& of = small().numbers;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int line = r.row(i);
        const float lse = of.lse[line], sigma = of.sigma[line], e = of.e[line];
        const int query = GROUPED ? min(line / p.h_q, 31) : 0;  // of the group; none of 8 and more lists a row
        auto weights = [&](int j, int k, float x, float y) {
            const bool there = GROUPED ? listed.by[2 * j + k] >> query & 1 : 8 * (FIRST + j) + 2 * r.t + k < rows;
            const Weights w = weights_from(p, there, W == 0 ? x : y, W == 0 ? y : x, lse, sigma, e);
            return !GROUPED || there ? w : Weights{0.0f, 0.0f};  // another query's dP may be infinite
        };
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int chunk = FIRST + j, at = 4 * chunk + 2 * i;
            const Weights first = weights(j, 0, mine[at], i == 0 ? taken[j].x : taken[j].z);
            const Weights second = weights(j, 1, mine[at + 1], i == 0 ? taken[j].y : taken[j].w);
            store_shared_4(swizzled(address_of(DS_AT), line, chunk) + 4 * r.t, pack_bf16x2(first.ds, second.ds));
            store_shared_4(swizzled(address_of(P_AT), line, chunk) + 4 * r.t, pack_bf16x2(first.p, second.p));
        }
    }
    fence_proxy_async();
}

// dQ += dS.K, for column blocks from `first` on; the accumulator's size says how many.
template <int N>
__device__ __forceinline__ void multiply_dq(int first, float (&dq)[N]) {
    const uint64_t ds = wgmma_operand(address_of(DS_AT), 1024, 16);
    const uint64_t k = wgmma_operand(address_of(TILE_AT + first * BLOCK_BYTES), 1024, BLOCK_BYTES);
#pragma unroll
    for (int step = 0; step < 4; ++step)
        wgmma<Values::BF16, Sum::ADD, Major::K, Major::MN>(dq, wgmma_further(ds, 32 * step),
                                                           wgmma_further(k, 2048 * step));
}

// C of a column block.
__device__ __forceinline__ void multiply_c(int block, float (&c)[32]) {
    const uint64_t ds = wgmma_operand(address_of(DS_AT), 1024, BLOCK_BYTES);
    const uint64_t weight = wgmma_operand(address_of(P_AT), 1024, BLOCK_BYTES);
    const uint64_t q = wgmma_operand(address_of(Q_AT + block * BLOCK_BYTES), 1024, BLOCK_BYTES);
    const uint64_t dout = wgmma_operand(address_of(DOUT_AT + block * BLOCK_BYTES), 1024, BLOCK_BYTES);
    wgmma_fence();
    wgmma<Values::BF16, Sum::SET, Major::MN, Major::MN>(c, ds, q);
#pragma unroll
    for (int step = 1; step < 4; ++step)
        wgmma<Values::BF16, Sum::ADD, Major::MN, Major::MN>(c, wgmma_further(ds, 2048 * step),
                                                            wgmma_further(q, 2048 * step));
    if (block < V_BLOCKS) {
#pragma unroll
        for (int step = 0; step < 4; ++step)
            wgmma<Values::BF16, Sum::ADD, Major::MN, Major::MN>(c, wgmma_further(weight, 2048 * step),
                                                                wgmma_further(dout, 2048 * step));
    }
    wgmma_commit();
}

__device__ __forceinline__ void write_c(const BackwardParams& p, const Item& item, const Role& r, int tile, int block,
                                        const float (&c)[32]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int entry = LINES * tile + r.row(i);
        if (entry >= item.count) continue;
        uint32_t pairs[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) pairs[j] = pack_bf16x2(c[4 * j + 2 * i], c[4 * j + 2 * i + 1]);
        store_contribution(item.contribution(p, entry) + 64 * block, r.t, pairs);
    }
}

// C of the warpgroup's columns. Where dQ leaves too few registers, each 64 columns are written before the next are
// multiplied.
template <int W>
__device__ __forceinline__ void contribute(const BackwardParams& p, const Item& item, const Role& r, int tile) {
    constexpr int COUNT = 4 + (W == 0 && ROPE), AT_ONCE = W == 1 && ROPE ? 1 : 2;
    auto block = [](int i) { return i == 4 ? V_BLOCKS : 4 * W + i; };
    float c[AT_ONCE][32];
    if (AT_ONCE == 2) multiply_c(block(0), c[0]);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int next = i + AT_ONCE - 1;
        if (next < COUNT) multiply_c(block(next), c[next % AT_ONCE]);
        if (AT_ONCE == 2 && next < COUNT) {
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        write_c(p, item, r, tile, block(i), c[i % AT_ONCE]);
    }
}

template <int N>
__device__ __forceinline__ void write_dq(const BackwardParams& p, const Item& item, const Role& r, int column,
                                         const float (&dq)[N]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const Line line = item.line(p, r.row(i));
        if (line.head >= p.h_q) continue;
#pragma unroll
        for (int j = 0; j < N / 4; ++j)
            store_dq(p, line, column + 8 * j + 2 * r.t, dq[4 * j + 2 * i], dq[4 * j + 2 * i + 1]);
    }
}

// Writes a column block of dQ as bfloat16, through its part of the tile's space, which only this warpgroup still
// reads.
__device__ __forceinline__ void write_dq_lines(const BackwardParams& p, const Item& item, const Role& r, int block,
                                               const float* dq) {
    const uint32_t at = address_of(TILE_AT + block * BLOCK_BYTES);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j)
            store_shared_4(swizzled(at, r.row(i), j) + 4 * r.t, pack_bf16x2(dq[4 * j + 2 * i], dq[4 * j + 2 * i + 1]));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int n = 16 * r.warp + 4 * i + r.lane / 8, chunk = r.lane % 8;
        const Line line = item.line(p, n);
        if (line.head < p.h_q)
            store_16(static_cast<bf16*>(p.dq) + line.query * p.dq_token + line.head * p.dq_head + 64 * block +
                         CHUNK * chunk,
                     load_shared_16(swizzled(at, n, chunk)));
    }
}

template <int W>
__device__ __forceinline__ void run_consumer(const BackwardParams& p, const Item& item, int tiles) {
    constexpr bool HAS_ROPE = W == 1 && ROPE;
    const Role r = Role::of(threadIdx.x, W, threadIdx.x / 32 % 4);
    float dq[128], dq_rope[HAS_ROPE ? 32 : 1];
#pragma unroll
    for (int i = 0; i < 128; ++i) dq[i] = 0.0f;
#pragma unroll
    for (float& x : dq_rope) x = 0.0f;
    if (tiles > 0) {
        mbarrier_wait(shared_address(&small().heads_full), 0);
        find_head_numbers(p, item, small().numbers, true, [](int line, int chunk) {
            return load_shared_16(swizzled(address_of(DOUT_AT + chunk / 8 * BLOCK_BYTES), line, chunk % 8));
        });
        named_barrier_sync(CONSUMERS, CONSUMER_THREADS);
    }
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        mbarrier_wait(shared_address(&small().full), tile & 1);
        fence_proxy_async();  // waits for loads, too
        const Listed listed = load_listed<W>(p, item, r, tile);
        float s[32];
        multiply_scores<W == 0 ? BLOCKS : V_BLOCKS>(W == 0 ? Q_AT : DOUT_AT, s);
        find_weights<W>(p, r, tile, item.count - LINES * tile, listed, s);
        named_barrier_sync(CONSUMERS, CONSUMER_THREADS);
        wgmma_fence();
        multiply_dq(4 * W, dq);
        if constexpr (HAS_ROPE) multiply_dq(V_BLOCKS, dq_rope);
        wgmma_commit();
        wgmma_wait<0>();
        __syncwarp();
        if (r.lane == 0) mbarrier_arrive(shared_address(&small().empty));
        contribute<W>(p, item, r, tile);
        if (tile + 1 < tiles) named_barrier_arrive(W == 0 ? FREE_1 : FREE_0, CONSUMER_THREADS);
    }
    if (p.lines_dq) {
#pragma unroll
        for (int block = 0; block < 4; ++block) write_dq_lines(p, item, r, 4 * W + block, dq + 32 * block);
        if constexpr (HAS_ROPE) write_dq_lines(p, item, r, V_BLOCKS, dq_rope);
    } else {
        write_dq(p, item, r, 256 * W, dq);
        if constexpr (HAS_ROPE) write_dq(p, item, r, D_V, dq_rope);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_sm90(const __grid_constant__ BackwardParams p) {
    const Item item = Item::of_cta(p);
    if (GROUPED && item.count == OF_ITEM_BEFORE) return;
    const int tiles = ceil_div(item.count, LINES), warpgroup = uniform(threadIdx.x / WARPGROUP);
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&small().heads_full), WARPGROUP);
        mbarrier_init(shared_address(&small().full), WARPGROUP);
        mbarrier_init(shared_address(&small().empty), CONSUMER_THREADS / 32);
    }
    if (tiles == 0) leave_no_terms(p, item);
    __syncthreads();
    if (warpgroup == 2) {
        decrease_registers_to<24>();
        if (tiles > 0) run_producer(p, item, tiles);
    } else {
        increase_registers_to<240>();
        if (warpgroup == 0) {
            run_consumer<0>(p, item, tiles);
        } else {
            run_consumer<1>(p, item, tiles);
        }
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
