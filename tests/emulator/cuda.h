// CUDA C++ for a host compiler: keywords, types, built-in variables and functions, on the emulated machine
// (machine.h).
#pragma once
#include "machine.h"

#include <cmath>
#include <cstddef>
#include <type_traits>

#define __device__
#define __host__
#define __global__
// A kernel's .bss is shared memory. What a kernel initialises, even with zeros, is not in it
// (-fno-zero-initialized-in-bss).
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))

namespace emu {
// Every 1024th read of gridDim lets other threads run: a loop may wait for other CTAs and call nothing else that does
// (tensor_quant.cu).
inline void tick() {
    if (__builtin_expect(++ticks % 1024 == 0, 0)) yield();
}
}  // namespace emu

#define threadIdx (emu::Dim{uint32_t(emu::current->index), 0, 0})
#define blockIdx (emu::current->cta->block)
#define blockDim (emu::Dim{uint32_t(emu::threads_of_cta), 1, 1})
#define gridDim (emu::tick(), emu::grid)

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace emu {
// A pointer for an instruction that wants it aligned to the size of what it moves. Fails if it is not.
template <class T, class P>
inline T* aligned(P* p) {
    if (__builtin_expect(reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0, 0)) fail("a misaligned address");
    return reinterpret_cast<T*>(p);
}

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}
}  // namespace emu

// --- numbers ---

template <class A, class B>
constexpr auto min(A a, B b) -> std::common_type_t<A, B> {
    using C = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<C>) return std::fmin(C(a), C(b));
    return C(b) < C(a) ? C(b) : C(a);
}
template <class A, class B>
constexpr auto max(A a, B b) -> std::common_type_t<A, B> {
    using C = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<C>) return std::fmax(C(a), C(b));
    return C(a) < C(b) ? C(b) : C(a);
}

inline float __int_as_float(int x) { return emu::bits<float>(x); }
inline float __uint_as_float(uint32_t x) { return emu::bits<float>(x); }
inline int __float_as_int(float x) { return emu::bits<int>(x); }
inline uint32_t __float_as_uint(float x) { return emu::bits<uint32_t>(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(uint32_t(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint32_t __brev(uint32_t x) {
    uint32_t y = 0;
    for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i);
    return y;
}
inline uint32_t __funnelshift_l(uint32_t lo, uint32_t hi, uint32_t by) {
    return uint32_t(((uint64_t(hi) << 32 | lo) << (by & 31)) >> 32);
}
inline uint32_t __funnelshift_r(uint32_t lo, uint32_t hi, uint32_t by) {
    return uint32_t((uint64_t(hi) << 32 | lo) >> (by & 31));
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
    const uint64_t both = uint64_t(b) << 32 | a;
    uint32_t y = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t s = select >> 4 * i & 15;
        uint32_t byte = uint32_t(both >> 8 * (s & 7)) & 255;
        if (s & 8) byte = byte & 128 ? 255 : 0;
        y |= byte << 8 * i;
    }
    return y;
}

// --- memory ---

template <class T>
inline T __ldg(const T* p) {
    return *p;
}
template <class T>
inline T __ldcg(const T* p) {
    return *p;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(uint32_t) { emu::yield(); }

template <class T, class V, class F>
inline T change_word(T* p, V, F change) {
    const T before = *emu::aligned<T>(p);
    *p = change(before);
    return before;
}
template <class T, class V>
inline T atomicAdd(T* p, V v) {
    return change_word(p, v, [=](T x) { return T(x + T(v)); });
}
template <class T, class V>
inline T atomicSub(T* p, V v) {
    return change_word(p, v, [=](T x) { return T(x - T(v)); });
}
template <class T, class V>
inline T atomicMax(T* p, V v) {
    return change_word(p, v, [=](T x) { return x < T(v) ? T(v) : x; });
}
template <class T, class V>
inline T atomicMin(T* p, V v) {
    return change_word(p, v, [=](T x) { return T(v) < x ? T(v) : x; });
}
template <class T, class V>
inline T atomicOr(T* p, V v) {
    return change_word(p, v, [=](T x) { return T(x | T(v)); });
}
template <class T, class V>
inline T atomicAnd(T* p, V v) {
    return change_word(p, v, [=](T x) { return T(x & T(v)); });
}
template <class T, class V>
inline T atomicExch(T* p, V v) {
    return change_word(p, v, [=](T) { return T(v); });
}
template <class T, class C, class V>
inline T atomicCAS(T* p, C compare, V v) {
    return change_word(p, v, [=](T x) { return x == T(compare) ? T(v) : x; });
}

// --- warps and CTAs ---

inline void __syncthreads() { emu::barrier_sync(0, emu::threads_left()); }
inline int __syncthreads_and(int mine) { return emu::barrier_sync(0, emu::threads_left(), mine).was_all; }
inline int __syncthreads_or(int mine) { return emu::barrier_sync(0, emu::threads_left(), mine).was_any; }
inline void __syncwarp(uint32_t mask = ~0u) { emu::exchange(0, mask); }
inline uint32_t __activemask() { return 1u << emu::lane(); }

namespace emu {
// What lane `from` passes. Where `mask` leaves that lane out, the result is not defined: here it is a poison word.
template <class T>
inline T number_of_lane(uint32_t mask, T mine, int from) {
    uint64_t number = 0;
    memcpy(&number, &mine, sizeof(T));
    const uint64_t* numbers = exchange(number, mask);
    number = mask >> from & 1 ? numbers[from] : 0xdeaddeaddeaddeadull;
    memcpy(&mine, &number, sizeof(T));
    return mine;
}

// The numbers of the lanes of `mask`, reduced to one.
template <class T, class F>
inline T reduce_lanes(uint32_t mask, T mine, F fold) {
    const uint64_t* numbers = exchange(uint64_t(mine), mask);
    int i = __builtin_ctz(mask);
    T sum = T(numbers[i]);
    while (++i < 32)
        if (mask >> i & 1) sum = fold(sum, T(numbers[i]));
    return sum;
}
}  // namespace emu

template <class T>
inline T __shfl_sync(uint32_t mask, T mine, int from, int width = 32) {
    return emu::number_of_lane(mask, mine, (emu::lane() & ~(width - 1)) | (from & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(uint32_t mask, T mine, int by, int width = 32) {
    const int from = emu::lane() ^ by;
    return emu::number_of_lane(mask, mine, from / width > emu::lane() / width ? emu::lane() : from);
}
template <class T>
inline T __shfl_up_sync(uint32_t mask, T mine, uint32_t by, int width = 32) {
    return emu::number_of_lane(mask, mine, emu::lane() % width < int(by) ? emu::lane() : emu::lane() - int(by));
}
template <class T>
inline T __shfl_down_sync(uint32_t mask, T mine, uint32_t by, int width = 32) {
    return emu::number_of_lane(mask, mine,
                               emu::lane() % width + int(by) >= width ? emu::lane() : emu::lane() + int(by));
}
inline uint32_t __ballot_sync(uint32_t mask, int mine) {
    return emu::reduce_lanes(mask, uint32_t(mine != 0) << emu::lane(), [](uint32_t a, uint32_t b) { return a | b; });
}
inline int __any_sync(uint32_t mask, int mine) { return __ballot_sync(mask, mine) != 0; }
inline int __all_sync(uint32_t mask, int mine) { return __ballot_sync(mask, mine) == mask; }
template <class T>
inline T __reduce_add_sync(uint32_t mask, T mine) {
    return emu::reduce_lanes(mask, mine, [](T a, T b) { return T(uint32_t(a) + uint32_t(b)); });
}
template <class T>
inline T __reduce_max_sync(uint32_t mask, T mine) {
    return emu::reduce_lanes(mask, mine, [](T a, T b) { return a < b ? b : a; });
}
template <class T>
inline T __reduce_min_sync(uint32_t mask, T mine) {
    return emu::reduce_lanes(mask, mine, [](T a, T b) { return b < a ? b : a; });
}
template <class T>
inline T __reduce_or_sync(uint32_t mask, T mine) {
    return emu::reduce_lanes(mask, mine, [](T a, T b) { return a | b; });
}
