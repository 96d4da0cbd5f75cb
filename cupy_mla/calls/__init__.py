"""Repeated calls, cheaply: the first call of a signature is traced, later ones run what the trace was compiled to.

`program.py` traces a call, `form.py` compiles a trace, `tree.py` finds the form that holds for a call, `code.py` writes
functions, `graph.py` makes neighbouring launches one CUDA graph, `signature.py` remembers what served a call.
"""
