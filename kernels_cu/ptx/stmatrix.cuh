// PTX ISA: stmatrix.trans. Matrices of 8 x 8 16-bit items, as fragments hold them (row g, columns 2 t, 2 t + 1), are
// written transposed: lanes 8 i .. 8 i + 7 give the addresses of the columns of matrix i. sm_90.
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, uint32_t a, uint32_t b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
