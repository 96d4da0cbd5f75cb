// Twin of kernels_cu/ptx/shared.cuh.
#pragma once
#include "ptx/types.cuh"

inline uint32_t shared_address(const void* p) { return emu::shared_address(p); }
inline void store_shared_16(uint32_t address, const Vec16& v) { *emu::aligned<Vec16>(emu::stored(address, 16)) = v; }
inline void store_shared_8(uint32_t address, const Vec8& v) { *emu::aligned<Vec8>(emu::stored(address, 8)) = v; }
inline void store_shared_4(uint32_t address, uint32_t v) { *emu::aligned<uint32_t>(emu::stored(address, 4)) = v; }
inline Vec16 load_shared_16(uint32_t address) { return *emu::aligned<Vec16>(emu::loaded(address, 16)); }
inline Vec8 load_shared_8(uint32_t address) { return *emu::aligned<Vec8>(emu::loaded(address, 8)); }
inline uint32_t load_shared_4(uint32_t address) { return *emu::aligned<uint32_t>(emu::loaded(address, 4)); }
inline uint32_t load_shared_2(uint32_t address) { return *emu::aligned<uint16_t>(emu::loaded(address, 2)); }
inline uint32_t load_shared_byte(uint32_t address) { return *reinterpret_cast<uint8_t*>(emu::loaded(address, 1)); }
