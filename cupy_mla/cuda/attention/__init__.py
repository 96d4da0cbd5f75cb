"""Sparse attention as launchers: `launch.py` has the operations, `choose.py` says which kernel serves a call and how it
is cut up, and each kernel has a module under its own name."""
