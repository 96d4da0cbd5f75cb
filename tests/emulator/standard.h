// The headers of the standard library that kernels' compilations read. emulator.py compiles them once, ahead of
// kernels: to read them takes as long as to compile a small kernel. Every file still includes what it needs.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>
