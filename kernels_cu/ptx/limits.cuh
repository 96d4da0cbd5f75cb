// What the hardware grants a CTA.
#pragma once

constexpr int SM90_SHARED_BYTES = 232448;  // shared memory on sm_90: 227 KB
