"""Repeated calls, cheaply: the first call of a signature is traced, later ones run what the trace was compiled to.

`program.py` traces a call, `form.py` compiles a trace, `code.py` writes functions, `graph.py` makes neighbouring
launches one CUDA graph, `signature.py` says which form a call runs.
"""
