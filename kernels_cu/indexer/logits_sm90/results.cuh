// Of logits_sm90: how a math warpgroup stores logits.
#pragma once
#include "indexer/logits_sm90/products.cuh"
#include "ptx/registers.cuh"

constexpr int EVERY = TOGETHER ? 1 : WARPGROUPS;  // units from one of a warpgroup to its next one
constexpr bool LOOKS_FOR_WHOLE = !COMPACT;        // for units that all queries see, to store them without looking

// The key of a unit that a thread stores.
__device__ __forceinline__ int key_of_thread(uint32_t thread) {
    return 16 * (thread / 32 % 4) + thread % 32 / 4 + 8 * (thread % 2);
}

// What a lane stores: lane t has key g + 8 (t % 2) of every unit, of every second query from t / 2 on. A unit's logits
// are stored behind the product of the warpgroup's next one.
struct Results {
    const Header& h;
    int own_queries;
    float* out;   // of query t / 2 and the lane's key, in unit `ahead` - EVERY
    Units whole;  // all keys of these are seen by all queries; in other units each key is looked at

    __device__ __forceinline__ Results(const LogitsParams& p, const Header& h, int own_queries, int my_key, int t,
                                       int ahead)
        : h(h), own_queries(own_queries) {
        const int key = h.first_key + my_key + (ahead - EVERY) * UNIT;
        out = p.out + (h.row + own_queries + t / 2) * p.out_stride + key;
        whole = {0, 0};  // by the unit EVERY further on
        if constexpr (LOOKS_FOR_WHOLE) {
            int begin = 0, end = h.count - own_queries < QUERIES ? 0 : p.width;
#pragma unroll
            for (int i = 0; i < QUERIES; ++i) {
                const KeyRange seen = h.range[own_queries + i];
                begin = max(begin, seen.begin), end = min(end, seen.end);
            }
            const int first = ceil_div(max(begin - h.first_key, 0), UNIT);
            whole.first = uniform(first + EVERY);
            whole.count = uniform(max(min((end - h.first_key) / UNIT, h.units) - first, 0));
        }
    }

    // Stores the logits of the warpgroup's unit before unit `ahead`, if there was one.
    __device__ __forceinline__ void store(const LogitsParams& p, const float (&logits)[PAIRS], int ahead, int t) {
        const int u = ahead - EVERY;
        if (LOOKS_FOR_WHOLE && uint32_t(ahead - whole.first) < uint32_t(whole.count)) {
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
        out += EVERY * UNIT;
    }
};
