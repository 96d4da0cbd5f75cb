// How a math warpgroup of logits_sm90 stores logits.
#pragma once
#include "indexer/logits_sm90/products.cuh"
#include "ptx/registers.cuh"

constexpr int UNIT_STEP = TOGETHER ? 1 : WARPGROUPS;  // from a unit of a warpgroup to its next one
// Whether units that all queries see whole are told apart: their logits are stored without a look at each.
constexpr bool FINDS_WHOLE_UNITS = !COMPACT;

// The key of a unit that a thread stores.
__device__ __forceinline__ int key_of_thread(uint32_t thread) {
    return 16 * (thread / 32 % 4) + thread % 32 / 4 + 8 * (thread % 2);
}

// What a lane stores of a tile: of every unit one key (key_of_thread), for every second query from t / 2 on. A unit's
// logits are stored while the warpgroup's next unit is multiplied.
struct Results {
    const Header& h;
    int own_queries;
    float* out;   // the logit of query t / 2 and the lane's key in unit `ahead` - UNIT_STEP
    Units whole;  // units that all queries see whole, numbered UNIT_STEP higher: by `ahead` when they are stored

    __device__ __forceinline__ Results(const LogitsParams& p, const Header& h, int own_queries, int my_key, int t,
                                       int ahead)
        : h(h), own_queries(own_queries) {
        const int key = h.first_key + my_key + (ahead - UNIT_STEP) * UNIT;
        out = p.out + (h.row + own_queries + t / 2) * p.out_stride + key;
        whole = {0, 0};
        if constexpr (FINDS_WHOLE_UNITS) {
            int begin = 0, end = h.count - own_queries < QUERIES ? 0 : p.width;
#pragma unroll
            for (int i = 0; i < QUERIES; ++i) {
                const KeyRange seen = h.range[own_queries + i];
                begin = max(begin, seen.begin), end = min(end, seen.end);
            }
            const int first = ceil_div(max(begin - h.first_key, 0), UNIT);
            whole.first = uniform(first + UNIT_STEP);
            whole.count = uniform(max(min((end - h.first_key) / UNIT, h.units) - first, 0));
        }
    }

    // Stores the logits of the warpgroup's unit before unit `ahead`, if there is one.
    __device__ __forceinline__ void store(const LogitsParams& p, const float (&logits)[PAIRS], int ahead, int t) {
        const int u = ahead - UNIT_STEP;
        if (FINDS_WHOLE_UNITS && uint32_t(ahead - whole.first) < uint32_t(whole.count)) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                if (QUERIES % 2 && t / 2 + 2 * i >= QUERIES) continue;
                out[2 * i * p.out_stride] = logits[i];
            }
        } else if (u >= 0) {
            const int key = h.first_key + u * UNIT + key_of_thread(read_thread_index());
            const int first = own_queries + t / 2;
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                if (QUERIES % 2 && first + 2 * i >= own_queries + QUERIES || first + 2 * i >= h.count) continue;
                const KeyRange seen = h.range[first + 2 * i];
                float* to = out + 2 * i * p.out_stride;
                if constexpr (COMPACT) {
                    if (seen.has(key) && key - seen.begin < p.compact_width) *(to - seen.begin) = logits[i];
                } else {
                    if (key < p.width) *to = seen.has(key) ? logits[i] : -INF;
                }
            }
        }
        out += UNIT_STEP * UNIT;
    }
};
