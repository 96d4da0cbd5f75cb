// The schedule of paged logits: divides the units of keys of all requests into shares (work.cuh), once for all layers
// of a model. One CTA makes one share, a line of the schedule (schedule.cuh).
//
// The logits' kernel reads the schedule without waiting for the launches before its own. So this kernel must not call
// let_next_kernel_start: what is launched behind it starts when its CTAs have ended, and each of them makes what it
// wrote visible before it ends.
#include "indexer/keys.cuh"
#include "indexer/schedule.cuh"

// The launcher declares the same fields.
struct ScheduleParams : LogitsWork {
    int32_t* out;  // [shares, SCHEDULE_WORDS]
    int64_t out_stride;
};

constexpr int THREADS = 128;
constexpr int EVERY_QUERY = 1 << 20;  // a tile has all queries of a request

// No Hopper GPU runs more CTAs of the logits at a time: two on each of 144 SMs. Up to so many shares are equal,
// as far as places are whole. Of more shares, the CTAs of the first third run first and have 92 % of the units. The
// others begin as earlier ones end: they have few units, 5.5 % and 2.5 %, and so even out that SMs end at different
// times.
constexpr int SHARES_AT_ONCE = 288;
struct ScheduleShares {
    __device__ __forceinline__ static int64_t begin(int64_t total, int i, int shares) {
        if (shares <= SHARES_AT_ONCE) return EqualShares::begin(total, i, shares);
        const int third = ceil_div(shares, 3), number = min(i / third, 2);
        const int size = min(third, shares - number * third);  // shares of this third; the last one may have fewer
        const int before = number == 0 ? 0 : number == 1 ? 920 : 975;  // thousandths of all places in thirds before
        const int own = number == 0 ? 920 : number == 1 ? 55 : 25;     // and in this one
        return total * (before * size + own * (i - number * third)) / (1000 * size);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) schedule(const __grid_constant__ ScheduleParams p) {
    const Share share = share_of_cta<THREADS, EVERY_QUERY, SCHEDULE_UNIT, ScheduleShares>(p);
    const int word = threadIdx.x;
    if (word >= SCHEDULE_WORDS) return;
    int ends[SCHEDULE_REQUESTS] = {};
    for (int i = 0; i < SCHEDULE_REQUESTS; ++i) {
        const int request = share.tile + i;
        if (share.count > 0 && request < p.requests)
            ends[i] = range_of_tile<EVERY_QUERY>(p, tile_of<EVERY_QUERY>(p, request)).end;
    }
    int value;
    if (word < SCHEDULE_BLOCKS_AT) {
        value = word == 0 ? share.tile : word == 1 ? share.place : word == 2 ? share.count : ends[word == 4];
    } else {
        int unit = share.place + word - SCHEDULE_BLOCKS_AT;
        const int units = units_in<SCHEDULE_UNIT>({0, ends[0]});
        const bool next = unit >= units;
        if (next) unit -= units;
        value = block_of_key(p, share.tile + next, unit * SCHEDULE_UNIT, ends[next]).block;
    }
    p.out[blockIdx.x * p.out_stride + word] = value;
    __threadfence();
}

// Read by the launcher.
extern "C" __device__ int kernel_threads = THREADS;
extern "C" __device__ int kernel_shared_bytes = 0;
