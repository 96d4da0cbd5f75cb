"""The tests. Each process of theirs computes in one thread."""

import os

# Before NumPy and torch come, for subprocesses as well. Tests' matrices are small, and threads that wait for each other
# on a busy machine take a hundred times as long as one alone.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
