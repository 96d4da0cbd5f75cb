export CUPY_CACHE_DIR=/tmp/cupycache
timeout 40 python3 gpu_idx_kernels.py prefill 2>&1 | tail -12 | cut -c1-900
timeout 45 python3 gpu_idx_kernels.py decode 2>&1 | tail -16 | cut -c1-700
