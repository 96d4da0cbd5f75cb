export CUPY_CACHE_DIR=/tmp/cupycache
date -u +%T
timeout 28 python3 gpu_idx_kernels.py prefill 2>&1 | tail -10 | cut -c1-700
date -u +%T
timeout 40 python3 gpu_idx_kernels.py decode 2>&1 | tail -12 | cut -c1-560
date -u +%T
