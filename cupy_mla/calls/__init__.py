"""Repeated calls, cheaply: the first call of a key is prepared, later ones run what was prepared with new addresses.

`key.py` says what a key consists of, `prepared.py` prepares and runs a launcher's program, `graph.py` makes
neighbouring launches one CUDA graph, `scratch.py` and `plan.py` keep memory, `operation.py` remembers what was
prepared.
"""
