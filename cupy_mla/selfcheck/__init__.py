"""What `python -m cupy_mla` does: the self-check of a machine, and compiling ahead (`cupy_mla.warmup`)."""

from .report import ALL_WELL, NO_GPU, WRONG, nvrtc_version, run

__all__ = ["ALL_WELL", "NO_GPU", "WRONG", "nvrtc_version", "run"]
