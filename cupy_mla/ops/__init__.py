"""The public operations. Each checks its arguments once and hands them to one of two twins of the same name:
`cupy_mla.reference` (NumPy) or `cupy_mla.cuda` (launchers of run-time compiled kernels).

What a module lists in its `__all__` is public: `cupy_mla` has it under the same name."""
