"""Sparse Multi-head Latent Attention for NumPy, CuPy and torch arrays, compiled at run time."""

from collections.abc import Callable as _Callable
from typing import Any as _Any

from . import deep_gemm, flash_mla, layouts, warmup
from ._version import __version__
from .arrays import set_checks
from .backends.deepseek_v4 import DeepseekV4Impl, DeepseekV4Layer
from .backends.indexer import IndexerImpl
from .backends.sparse_mla import SparseMLABackend, SparseMLAImpl
from .backends.workspace import Workspace
from .bridges import Place, cuda_available, to_cupy, to_numpy, to_torch
from .calls.operation import register_graph_operations as _register_graph_operations
from .config import SparseMLAConfig
from .cuda.attention.choose import forced
from .flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
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
from .ops.absorb import absorb_q, split_kv_b_proj, v_up_proj
from .ops.attention import plan_splits, sparse_decode, sparse_prefill
from .ops.cache import concat_and_cache_mla, quantize_and_insert_k_cache
from .ops.compressed import build_c128a_topk_metadata, compute_global_topk_indices_and_lens, get_compressed_slot_mapping
from .ops.context_parallel import globalize_topk, local_seq_lens, localize_topk, merge_attention, merge_topk
from .ops.gather import concat_mla_q, cp_gather_and_upconvert_fp8_kv_cache, dequantize_and_gather_k_cache
from .ops.indexer import cp_gather_indexer_k_quant_cache, indexer_k_quant_and_cache
from .ops.indices import convert_req_index_to_global_index, convert_to_slots_and_ends
from .ops.logits import indexer_logits, paged_indexer_logits, paged_indexer_schedule, quantize_indexer_q
from .ops.quant import dynamic_per_batched_tensor_quant
from .ops.swa import combine_topk_swa_indices, compute_prefill_gather_lens, compute_swa_indices_and_lens
from .ops.topk import select_rows, select_rows_paged, topk_indices


def _graph_operation(name: str) -> _Callable[..., _Any]:
    """What an operation becomes in a graph of torch.compile, which is there when this is called."""
    from .integrations.torch_ops import TRACED

    return TRACED[name]


_register_graph_operations(_graph_operation)

__all__ = [
    "BatchMetadata",
    "DeepseekV4Impl",
    "DeepseekV4Layer",
    "FlashMLASchedMeta",
    "IndexerImpl",
    "IndexerMetadata",
    "IndexerMetadataBuilder",
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
    "absorb_q",
    "build_c128a_topk_metadata",
    "combine_topk_swa_indices",
    "compute_global_topk_indices_and_lens",
    "compute_prefill_gather_lens",
    "compute_swa_indices_and_lens",
    "concat_and_cache_mla",
    "concat_mla_q",
    "convert_req_index_to_global_index",
    "convert_to_slots_and_ends",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_indexer_k_quant_cache",
    "cuda_available",
    "deep_gemm",
    "dequantize_and_gather_k_cache",
    "dynamic_per_batched_tensor_quant",
    "flash_mla",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "forced",
    "get_compressed_slot_mapping",
    "get_mla_metadata",
    "globalize_topk",
    "indexer_k_quant_and_cache",
    "indexer_logits",
    "layouts",
    "local_seq_lens",
    "localize_topk",
    "merge_attention",
    "merge_topk",
    "paged_indexer_logits",
    "paged_indexer_schedule",
    "plan_splits",
    "prefill_workspace_size",
    "quantize_and_insert_k_cache",
    "quantize_indexer_q",
    "reshape_attn_output_for_spec_decode",
    "reshape_query_for_spec_decode",
    "select_rows",
    "select_rows_paged",
    "set_checks",
    "sparse_decode",
    "sparse_prefill",
    "split_decodes_and_prefills",
    "split_kv_b_proj",
    "split_prefill_chunks",
    "to_cupy",
    "to_numpy",
    "to_torch",
    "topk_indices",
    "v_up_proj",
    "warmup",
]
