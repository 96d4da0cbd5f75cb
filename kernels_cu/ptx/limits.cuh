// What the hardware grants a thread block.
#pragma once

constexpr int SM90_SHARED_BYTES = 232448;  // dynamic shared memory, 227 KB
