"""Compiles ahead what the layers of a config need, so that no request waits for NVRTC."""

from .selfcheck.warmup import warmup

__all__ = ["warmup"]
