"""The operations in plain NumPy: what runs without a GPU, and a second opinion for the kernels."""
