"""The public operations. Each checks its arguments once and hands them to one of two twins of the same name:
`cupy_mla.reference` (NumPy) or `cupy_mla.cuda` (launchers of run-time compiled kernels)."""
