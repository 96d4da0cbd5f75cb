"""The public operations. Each checks its arguments once and hands them to one of two twins of the same name, in
`cupy_mla.reference` (NumPy) or in `cupy_mla.cuda` (launchers of kernels).

The names in a module's `__all__` are public: `cupy_mla` has them, too."""
