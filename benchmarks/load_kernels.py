"""Compiles and loads every kernel that suits the GPU. Programs after this one find them in CuPy's disk cache.

python benchmarks/load_kernels.py [PART OF]

PART OF: one part of so many, 0 and up, of programs that run side by side.
"""

from __future__ import annotations

import sys
import time

from cupy_mla.cuda import all_kernels, driver
from cupy_mla.selfcheck.warmup import MOST_THREADS, load_all


def main() -> None:
    part, parts = map(int, sys.argv[1:] or (0, 1))
    began, capability = time.monotonic(), driver.gpu(0).capability
    kernels = [kernel for kernel in all_kernels() if kernel.suits(capability)][part::parts]
    load_all(kernels, 0, MOST_THREADS)
    print(f"{len(kernels)} kernels in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
