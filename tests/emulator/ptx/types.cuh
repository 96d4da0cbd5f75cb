// Twin of kernels_cu/ptx/types.cuh.
#pragma once
#include "cuda.h"

using bf16 = unsigned short;  // the bits of a bfloat16

struct alignas(16) Vec16 {
    uint32_t x, y, z, w;
};
struct alignas(8) Vec8 {
    uint32_t x, y;
};

#undef offsetof
#define offsetof(type, member) int(__builtin_offsetof(type, member))

#define INF __int_as_float(0x7f800000)
constexpr float LN2 = 0.69314718055994530942f;
constexpr float LOG2E = 1.4426950408889634074f;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
