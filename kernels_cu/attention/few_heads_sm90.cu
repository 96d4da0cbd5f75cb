// Sparse attention of few heads on Hopper, bf16 rows, decode and prefill: rows go from the ring into registers.
//
// Heads are the N side of the products, 8, 16 or 32 of them, so nothing is padded to 64. Rows or value columns are the
// M side and come from registers (tile/fragments.cuh). So shared memory holds rows as they lie in the cache and nothing
// else:
//
//   S^T = K . Q^T     a warp: 16 rows x heads        A = its own rows            d / 16 steps of m16n8k16
//   O^T = V^T . P^T   a warp: 128 columns x heads    A = pairs of rows a column  8 mma tiles x 4 steps
//
//   4 producer warps       each a quarter of every tile of 64 rows, by bulk copies, as far ahead as its ring of STAGES x
//                          8 rows reaches. Each looks at all entries of a tile: tiles in which none is valid are left
//                          out, by all four alike
//   CONSUMERS warpgroups   (3; 2 for 32 heads) take tiles in turn, each with a softmax of its own:
//     S^T
//     P^T                  to shared memory, as bf16
//     vote                 if a value is far above its reference, references rise, O^T follows, and P^T is computed
//                          again
//     O^T += V^T . P^T     quarter after quarter; each stage is released when it has been read
//
//   While one warpgroup waits, the others multiply. At the end they merge their O^T in shared memory.
//
// The CTAs of a cluster merge their results (merge.cuh). Splits that do not fit a cluster lie along gridDim.y and are merged
// by combine.cu.
//
//   full[quarter][..]       copies done          bulk copies, and one arrival for `told`; two barriers a stage
//   empty[quarter][stage]   stage released       the 4 warps of the warpgroup that has the tile
//   WARPGROUP_SYNC + w      named: the 128 threads of consumer warpgroup w
//   CONSUMER_SYNC           named: all consumer threads
//
// Products are mma.sync: wgmma with A in registers takes a warpgroup 60 cycles or more whatever N is, and its fences
// keep the next fragments from being widened in the meantime.
//
// Shared memory: Q heads x D_QK x 2; P CONSUMERS x heads x 128; 4 rings of STAGES x 8 staged rows of 2 x D_QK + 16 bytes;
// statistics and mbarriers.
// Registers: 152 (32 heads: 232) a consumer thread, 56 (40) a producer thread, together 512 x 128 (384 x 168):
// setmaxnreg hands out no more than the launch had.
// What was tried, what bounds it: docs/kernels/few_heads_sm90.md.
#include "attention/few_heads_sm90/results.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"

// --- a query's tiles ------------------------------------------------------------------------------------------

// Releases the two stages of each quarter at `place`. The warpgroup must have met.
__device__ __forceinline__ void release_stages(const Role& r, const uint32_t (&place)[2]) {
    uint32_t empty = shared_address(small().empty[0]) + 8 * (r.lane == 0 ? place[0] : place[1]);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter, empty += 8 * STAGES) mbarrier_arrive_for_warp_at_two(empty, r.lane);
}

// Where the two stages of a tile stand in each ring. `number`: of the first one, counted over all tiles.
struct TilePlace {
    uint32_t stage[2];

    __device__ __forceinline__ TilePlace(uint32_t number) : stage{number % STAGES, (number + 1) % STAGES} {}
    __device__ __forceinline__ StagedRows rows(int quarter) const {
        const uint32_t ring = shared_address(shared) + RING_AT + quarter * RING_BYTES;
        return {{ring + stage[0] * STAGE_BYTES, ring + stage[1] * STAGE_BYTES}};
    }
};

// Bits 0 and 1: which of a lane's two rows are valid. `told`: what is told of this warp's quarter.
__device__ __forceinline__ uint32_t valid_rows(const Role& r, uint32_t told, const TilePlace& place) {
    const FirstRow first = first_qk_row(r.g);
    return load_shared_4(told + 4 * (first.stage == 0 ? place.stage[0] : place.stage[1])) >> first.row;
}

// Places and what is derived from the lane are found anew after each product, or they would be kept in memory in the
// meantime.
__device__ __forceinline__ void attend(const AttentionParams& p, const Work& w, const Role& r, Softmax& state,
                                       float (&o)[V_TILES][HEAD_TILES][4]) {
    const uint32_t begin = 2 * r.warpgroup, end = 2 * w.count();
#pragma unroll 1
    for (uint32_t number = begin; number < end; number += 2 * CONSUMERS) {
        TilePlace place(number);
        const uint32_t row = place.rows(r.warp).qk_row(r.g);
        const uint32_t told = shared_address(small().told[r.warp]);
        wait_for_stage(r.warp, number);
        wait_for_stage(r.warp, number + 1);
        const uint32_t of_stage = load_shared_4(told + 4 * place.stage[0]);
        if (of_stage & NO_TILE) {
            sync_warpgroup(r);  // all quarters have it
            release_stages(r, place.stage);
            return;
        }
        float s[HEAD_TILES][4];
        multiply_qk(anew(r), row, s);
        place = TilePlace(opaque(number));
        const uint32_t rows_valid = valid_rows(r, told, place);
        const bool valid[2] = {(rows_valid & 1) != 0, (rows_valid & 2) != 0};
        softmax_tile(anew(r), number == begin, valid, p.scale_log2, s, state, o);
        multiply_pv(anew(r), TilePlace(opaque(number)).stage, o);
    }
}

// --- the kernel -----------------------------------------------------------------------------------------------

// grid: x a cluster a query, y splits beyond those of a cluster, z head tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 1) few_heads_sm90(const __grid_constant__ AttentionParams p) {
    Small& sm = small();
    if (threadIdx.x % 32 == 0) {  // one lane of each warp: the lanes of a warp would take turns
#pragma unroll 1
        for (int i = threadIdx.x / 32; i < 4 * STAGES; i += THREADS / 32) {
            mbarrier_init(shared_address(&sm.full[0][0] + 2 * i), WARP_ARRIVALS);
            mbarrier_init(shared_address(&sm.full[0][0] + 2 * i + 1), WARP_ARRIVALS);
            mbarrier_init(shared_address(&sm.empty[0][0] + i), 4 * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < CONSUMERS * HEADS; i += THREADS) (&sm.ref[0][0])[i] = -INF;
    __syncthreads();
    const int ctas = cluster_size(), rank = cluster_rank();
    if (has_lengths(p)) wait_for_earlier_kernels();
    Work w;
    const int split = blockIdx.y * ctas + rank, splits = p.num_splits * ctas;
    find_equal_split(p, w, cluster_index(), blockIdx.z, [&] { return split; }, [&] { return splits; });
    wait_for_earlier_kernels();
    let_next_kernel_start();
    if (threadIdx.x >= CONSUMER_THREADS) {
        decrease_registers_to<PRODUCER_REGISTERS>();
        copy_tiles(p, w, threadIdx.x / 32 % 4);
        if (ctas > 1) cluster_sync_with_one_fence(false);  // cluster barriers count every thread
    } else {
        increase_registers_to<REGISTERS>();
        const Role r = consumer_role();
        Softmax state;
        state.clear();
        load_q(p, w, r);
        float o[V_TILES][HEAD_TILES][4];
#pragma unroll
        for (int v = 0; v < V_TILES; ++v) clear(o[v]);
        attend(p, w, r, state, o);
        write_results(p, w, r, state, o);
    }
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = SHARED_BYTES;
