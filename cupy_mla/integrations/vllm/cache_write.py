"""The cache write of a layer, for every vLLM."""

from __future__ import annotations

import torch

from ...ops.cache import concat_and_cache_mla

CACHE_TYPES = ("auto", "bfloat16", "fp8_ds_mla")  # what `concat_and_cache_mla` writes


def write(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, kv_cache_dtype: str
) -> None:
    """Put a step's rows into the cache; a profiling run has none, and nothing is done.

    Raises:
        ValueError: a cache type that our operation does not write.
    """
    if kv_cache.numel() == 0:
        return
    if kv_cache_dtype not in CACHE_TYPES:
        raise ValueError(f"kv_cache_dtype: expected one of {CACHE_TYPES}, got {kv_cache_dtype!r}")
    concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping.flatten())
