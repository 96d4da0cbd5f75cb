"""What `python -m cupy_mla` does: the self-check of a machine (`report`), and compiling ahead (`warmup`)."""
