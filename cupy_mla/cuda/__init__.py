"""The operations as launchers of CUDA kernels that are compiled at run time.

Nothing here imports CuPy before it is needed.
"""
