// Twin of kernels_cu/ptx/setmaxnreg.cuh.
#pragma once

template <int N>
inline void decrease_registers_to() {}
template <int N>
inline void increase_registers_to() {}
