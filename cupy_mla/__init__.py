"""Sparse Multi-head Latent Attention for NumPy, CuPy and torch arrays, compiled at run time."""

from . import flash_mla, layouts
from ._version import __version__
from .arrays import cuda_available, to_cupy, to_numpy, to_torch
from .config import SparseMLAConfig
from .flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from .ops.absorb import absorb_q, split_kv_b_proj, v_up_proj
from .ops.attention import plan_splits, sparse_decode, sparse_prefill
from .ops.cache import concat_and_cache_mla, quantize_and_insert_k_cache

__all__ = [
    "FlashMLASchedMeta",
    "SparseMLAConfig",
    "__version__",
    "absorb_q",
    "concat_and_cache_mla",
    "cuda_available",
    "flash_mla",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "layouts",
    "plan_splits",
    "quantize_and_insert_k_cache",
    "sparse_decode",
    "sparse_prefill",
    "split_kv_b_proj",
    "to_cupy",
    "to_numpy",
    "to_torch",
    "v_up_proj",
]
