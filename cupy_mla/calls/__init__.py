"""What a repeated call costs: the first call of a signature is traced, later ones run what the trace was compiled to.

`program.py` traces a call and compiles it, `code.py` writes the function, `graph.py` makes neighbouring launches one CUDA
graph, `signature.py` says which compiled form a call runs.
"""
