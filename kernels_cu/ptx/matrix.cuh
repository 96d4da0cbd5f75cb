// PTX ISA: ldmatrix (sm_75), stmatrix (sm_90). They move matrices of 8 x 8 16-bit items between shared memory and
// fragments. In a fragment lane 4 g + t holds row g, columns 2 t and 2 t + 1. Lanes 8 i .. 8 i + 7 pass the addresses
// of the lines of matrix i.
#pragma once
#include "ptx/types.cuh"

// ldmatrix .x4: a line is a row.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// ldmatrix .x4.trans: a line is a column.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// stmatrix .x4: a line is a row.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// stmatrix .x4.trans: a line is a column.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// stmatrix .x2.trans
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, uint32_t a, uint32_t b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
                 : "memory");
}
