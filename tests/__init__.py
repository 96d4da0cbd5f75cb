"""The tests. Each process of theirs computes in one thread."""

import os
import sys

# Before NumPy and torch come, for subprocesses as well. Tests' matrices are small, and threads that wait for each other
# on a busy machine take a hundred times as long as one alone.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Bytecode is kept for the next run, whatever the environment says: without it each process takes 7 s more to compile
# the tests and the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
