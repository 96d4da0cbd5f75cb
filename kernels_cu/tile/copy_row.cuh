// Copies of rows, which an index list names, to shared memory by cp.async.
#pragma once
#include "ptx/cp_async.cuh"

constexpr int ROWS_AT_ONCE = 4;  // rows that a warp copies at a time

// Eight lanes copy a row of CHUNKS 16-byte chunks, so that they touch 128 neighbouring bytes at a time. Lane l copies
// chunks l % 8, l % 8 + 8, ...; chunk 8 i + l % 8 goes to `to` + 128 i. If `from` is null (no row), zeros are written
// and nothing is read.
template <int CHUNKS>
__device__ __forceinline__ void copy_row(uint32_t to, const uint8_t* from, int lane) {
    const bool valid = from != nullptr;
    from += lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < CHUNKS / 8; ++i) cp_async_16(to + 128 * i, from + 128 * i, valid);
    if (CHUNKS % 8 != 0 && lane % 8 < CHUNKS % 8) cp_async_16(to + CHUNKS / 8 * 128, from + CHUNKS / 8 * 128, valid);
}
