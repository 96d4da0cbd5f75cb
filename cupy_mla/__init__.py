"""Sparse Multi-head Latent Attention for NumPy, CuPy and torch arrays, compiled at run time."""

# ruff: noqa: F403 - operations are listed in `__all__` of their modules
from collections.abc import Callable as _Callable
from typing import Any as _Any

from . import deep_gemm, flash_mla, layouts, warmup
from . import ops as _ops
from ._version import __version__
from .arrays import set_checks
from .backends.deepseek_v4 import DeepseekV4Impl, DeepseekV4Layer
from .backends.index_groups import IndexGroups, PhysicalTopk, layer_sources
from .backends.indexer import IndexerImpl
from .backends.sparse_mla import SparseMLABackend, SparseMLAImpl
from .backends.workspace import Workspace
from .bridges import Place, cuda_available, to_cupy, to_numpy, to_torch
from .calls.operation import register_graph_operations as _register_graph_operations
from .config import DenseMLAConfig, SparseMLAConfig
from .cuda.attention.choose import forced
from .flash_mla import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    flash_mla_with_kvcache_fp8,
    get_mla_metadata,
    get_mla_metadata_dense_fp8,
)
from .metadata.batch import (
    BatchMetadata,
    prefill_workspace_size,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
    split_decodes_and_prefills,
    split_prefill_chunks,
)
from .metadata.indexer import IndexerMetadata, IndexerMetadataBuilder
from .metadata.sparse_mla import SparseMLAMetadata, SparseMLAMetadataBuilder
from .metadata.swa import SparseSWAMetadata, SparseSWAMetadataBuilder
from .ops.absorb import *
from .ops.attention import *
from .ops.backward import *
from .ops.cache import *
from .ops.candidates import *
from .ops.compressed import *
from .ops.context_parallel import *
from .ops.dense import *
from .ops.gather import *
from .ops.indexer import *
from .ops.indices import *
from .ops.logits import *
from .ops.pools import *
from .ops.quant import *
from .ops.swa import *
from .ops.topk import *
from .ops.training import *


def _graph_operation(name: str) -> _Callable[..., _Any]:
    """The custom op of an operation, for a graph of torch.compile. torch is imported when this is called."""
    from .integrations.torch_ops import TRACED

    return TRACED[name]


_register_graph_operations(_graph_operation)

__all__ = [
    "BatchMetadata",
    "DeepseekV4Impl",
    "DeepseekV4Layer",
    "DenseMLAConfig",
    "FlashMLASchedMeta",
    "IndexGroups",
    "IndexerImpl",
    "IndexerMetadata",
    "IndexerMetadataBuilder",
    "PhysicalTopk",
    "Place",
    "SparseMLABackend",
    "SparseMLAConfig",
    "SparseMLAImpl",
    "SparseMLAMetadata",
    "SparseMLAMetadataBuilder",
    "SparseSWAMetadata",
    "SparseSWAMetadataBuilder",
    "Workspace",
    "__version__",
    "cuda_available",
    "deep_gemm",
    "flash_mla",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "flash_mla_with_kvcache_fp8",
    "forced",
    "get_mla_metadata",
    "get_mla_metadata_dense_fp8",
    "layer_sources",
    "layouts",
    "prefill_workspace_size",
    "reshape_attn_output_for_spec_decode",
    "reshape_query_for_spec_decode",
    "set_checks",
    "split_decodes_and_prefills",
    "split_prefill_chunks",
    "to_cupy",
    "to_numpy",
    "to_torch",
    "warmup",
]
__all__ += [
    name
    for module in (
        _ops.absorb,
        _ops.attention,
        _ops.backward,
        _ops.cache,
        _ops.candidates,
        _ops.compressed,
        _ops.context_parallel,
        _ops.dense,
        _ops.gather,
        _ops.indexer,
        _ops.indices,
        _ops.logits,
        _ops.pools,
        _ops.quant,
        _ops.swa,
        _ops.topk,
        _ops.training,
    )
    for name in module.__all__
]
__all__.sort()
