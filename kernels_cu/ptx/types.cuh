// Fixed-width names. No CUDA header is included anywhere: NVRTC compiles faster and needs no header files.
#pragma once

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int32_t = int;
using int64_t = long long;
using uint64_t = unsigned long long;
using bf16 = unsigned short;  // the bits of a bfloat16

struct alignas(16) Vec16 {
    uint32_t x, y, z, w;
};
struct alignas(8) Vec8 {
    uint32_t x, y;
};

static_assert(sizeof(int64_t) == 8 && sizeof(Vec16) == 16, "");

// A member's offset in a struct, as a constant expression. NVRTC has no <cstddef>, and no __builtin_offsetof.
#define offsetof(type, member) int(__INTADDR__(&(((type*)0)->member)))

#define INF __int_as_float(0x7f800000)
constexpr float LN2 = 0.69314718055994530942f;
constexpr float LOG2E = 1.4426950408889634074f;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
