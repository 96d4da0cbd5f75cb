// The standard library's headers that a kernel's compilation reads, together, so that emulator.py can have them compiled
// ahead: reading them takes as long as compiling a small kernel. Files include what they need themselves.
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
