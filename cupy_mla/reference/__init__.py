"""The operations in plain NumPy. They run without a GPU, and the kernels are compared with them."""
