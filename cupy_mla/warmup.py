"""Compiles the kernels that the layers of a config need before they are used, so that no request waits for NVRTC."""

from .selfcheck.warmup import warmup

__all__ = ["warmup"]
