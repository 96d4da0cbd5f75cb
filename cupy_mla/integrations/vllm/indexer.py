"""The lightning indexer: logits and exact top-k by our operations, over keys that vLLM's layers write.

DeepSeek-V3.2's and GLM-5's layers look up vLLM's function in their module. When the first such layer gets our
attention, that name is bound to our function, which calls vLLM's for layers with another backend. The metadata are
vLLM's, without DeepGEMM's schedule. DeepSeek-V4's and V4.1's layers call an object of theirs, which is told to call
ours.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as envs
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer as stock
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla import indexer as stock_metadata
from vllm.v1.worker.workspace import current_workspace_manager

from ...ops.candidates import BLOCK, select_candidate_rows
from ...ops.indexer import cp_gather_indexer_k_quant_cache
from ...ops.topk import MAX_K, select_rows, select_rows_paged
from . import fused, logger, short
from .rebound import rebound

if TYPE_CHECKING:
    from ..untyped import Untyped as StockBackend
    from ..untyped import Untyped as StockBuilder
    from ..untyped import Untyped as StockMetadata
else:
    StockBackend = stock_metadata.DeepseekV32IndexerBackend
    StockBuilder = stock_metadata.DeepseekV32IndexerMetadataBuilder
    StockMetadata = stock_metadata.DeepseekV32IndexerMetadata

LAYERS = "vllm.models.deepseek_v32.attention"
DEEP_GEMM = (9, 10, 12)  # major compute capabilities for which vLLM's indexers have kernels

stock_indexer: Any = stock.sparse_attn_indexer


class CupyMLAIndexerMetadata(StockMetadata):
    """vLLM's metadata of a step, for layers whose attention is ours."""


class CupyMLAIndexerBuilder(StockBuilder):
    """vLLM's metadata builder, without DeepGEMM's schedule."""

    build: Any = rebound(
        stock_metadata.DeepseekV32IndexerMetadataBuilder.build, has_deep_gemm=lambda: False,
        DeepseekV32IndexerMetadata=CupyMLAIndexerMetadata,
    )  # fmt: skip
    update_draft_decode_metadata: Any = rebound(
        stock_metadata.DeepseekV32IndexerMetadataBuilder.update_draft_decode_metadata, has_deep_gemm=lambda: False
    )


class CupyMLAIndexerBackend(StockBackend):
    """The backend of an indexer's cache."""

    @staticmethod
    def get_builder_cls() -> type[CupyMLAIndexerBuilder]:
        return CupyMLAIndexerBuilder


def adopt(indexer: Any) -> None:
    """Make a layer's indexer run on our operations. If these lack something that it needs, it keeps vLLM's.

    Raises:
        NotImplementedError: it would keep vLLM's, which has no kernels for this GPU.
    """
    layers: Any = sys.modules.get(LAYERS)  # imported if there is such an indexer
    gpu, lacking = current_platform.get_device_capability(), _lacking(layers, indexer)
    if lacking and gpu is not None and gpu.major not in DEEP_GEMM:
        raise NotImplementedError(
            f"cupy_mla: an indexer of vLLM's needs DeepGEMM, which has no kernels for compute capability {gpu.major}."
            f"{gpu.minor}; ours serves none with {lacking}"
        )
    if lacking:
        _warn_of_stock_indexer(lacking)
        return
    indexer.k_cache.get_attn_backend = lambda: CupyMLAIndexerBackend
    layers.sparse_attn_indexer = sparse_attn_indexer
    if gpu is not None and (gpu.major, gpu.minor) < (8, 9):
        fused.replace(layers)


def _lacking(layers: Any, indexer: Any) -> str | None:
    """What an indexer needs and our operations lack; None: nothing."""
    if layers is None or not isinstance(indexer, layers.DeepseekV32Indexer):
        return "layers other than DeepSeek-V3.2's"
    return _lacking_for(indexer.indexer_op, None)


@cache
def _warn_of_stock_indexer(lacking: str) -> None:
    """Say once that layers with our attention keep vLLM's indexer, because of something that our operations lack."""
    logger.warning("cupy_mla leaves the indexer to vLLM: ours serves none with %s", lacking)


def _lacking_for(op: Any, block: int | None) -> str | None:
    """`_lacking`, of an indexer's `SparseAttnIndexer`.

    Args:
        block: keys of a candidate block that it may have.
    """
    if op.use_pcp or op.dcp_world_size > 1:
        return "context parallelism"
    # vLLM 0.33 uses MX scales on compute capability 10.x.
    if op.use_fp4_cache or getattr(stock, "mqa_logits_use_mx_scales", bool)():
        return "FP4 keys or MX scales"
    if op.topk_tokens > MAX_K:
        return f"more than {MAX_K} chosen tokens"
    if op.candidate_blocks is None or op.candidate_block_size == block:
        return None
    return "candidate blocks" if block is None else f"candidate blocks of {op.candidate_block_size} keys"


def sparse_attn_indexer(
    hidden_states: torch.Tensor,
    k_cache_prefix: str,
    kv_cache: torch.Tensor,
    q_quant: torch.Tensor,
    q_scale: torch.Tensor | None,
    k: torch.Tensor | None,
    weights: torch.Tensor,
    quant_block_size: int,
    scale_fmt: str | None,
    topk_tokens: int,
    head_dim: int,
    max_model_len: int,
    total_seq_lens: int,
    topk_indices_buffer: torch.Tensor,
    **more: Any,
) -> torch.Tensor:
    """Write the positions that each token chooses in its request to a row of `topk_indices_buffer`, with -1 behind
    them.

    Rows that nobody will read stay as they are. The layer has filled all with -1, and has written the keys.
    """
    context = get_forward_context()
    metadata = context.attn_metadata
    batch = metadata.get(k_cache_prefix) if isinstance(metadata, dict) else None
    if not isinstance(batch, CupyMLAIndexerMetadata):  # no dict: a profiling run; vLLM's allocates
        return stock_indexer(
            hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, quant_block_size, scale_fmt,
            topk_tokens, head_dim, max_model_len, total_seq_lens, topk_indices_buffer, **more,
        )  # fmt: skip
    # vLLM names no attention for a draft model's layer: the lists of one step may serve the next ones.
    attention = metadata.get(more["dense_mha_metadata_layer_name"])
    if short.dense_decodes_of(attention) is not None or _without_lists(context, attention):
        return topk_indices_buffer
    out = topk_indices_buffer[:, :topk_tokens]
    if batch.num_prefills:
        _prefills(batch, kv_cache, q_quant, weights, total_seq_lens, out)
    if batch.num_decode_tokens:  # requests may have no query token
        all_chosen = batch.max_seq_len <= topk_tokens and not short.captured()
        _decodes(batch, kv_cache, q_quant, weights, topk_tokens if all_chosen else max_model_len, out)
    return topk_indices_buffer


def adopt_v4(op: Any) -> None:
    """Make the indexer of a layer of DeepSeek-V4 or V4.1 run on our operations, unless these lack something that it
    needs.

    Args:
        op: the `SparseAttnIndexer` that the layer calls.
    """
    lacking = _lacking_for(op, BLOCK)
    if lacking:
        _warn_of_stock_indexer(lacking)
        return
    op.forward = partial(_choose_v4, op, op.forward)


def _choose_v4(
    op: Any, stock_forward: Any, hidden_states: torch.Tensor, q: torch.Tensor, k: None, weights: torch.Tensor
) -> torch.Tensor:
    """As `sparse_attn_indexer`. The layer has not filled the buffer, and calls only if there is something to choose.

    In V4.1 one layer also leaves candidate blocks, and the layers after it choose among their keys.
    """
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return stock_forward(hidden_states, q, k, weights)
    batch, keys, lists = metadata[op.k_cache.prefix], op.k_cache.kv_cache, op.topk_indices_buffer
    lists[: len(hidden_states)] = -1  # a chunk without complete rows is left out
    out, blocks = lists[:, : op.topk_tokens], op.candidate_blocks
    if blocks is not None and not op.candidate_write:
        _among(batch, keys, q, weights, blocks, out, op.compress_ratio)
        return lists
    if batch.num_prefills:
        _prefills(batch, keys, q, weights, op.max_total_seq_len, out, blocks)
    if batch.num_decode_tokens:
        _decodes(batch, keys, q, weights, op.max_model_len, out, op.compress_ratio, blocks)
    return lists


def _without_lists(context: Any, attention: Any) -> bool:
    """Whether a layer's attention needs no lists in this step, because it has only prefills of at most topk tokens.

    Args:
        attention: the layer's metadata; None: its prefills always need lists.
    """
    prefill = getattr(attention, "prefill", None)
    dense = getattr(prefill, "use_dense_mha", False) and attention.num_decode_tokens == 0
    return bool(dense) and context.cudagraph_runtime_mode != CUDAGraphMode.FULL and not short.captured()


def _prefills(
    batch: Any,
    kv_cache: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    most_keys: int,
    out: torch.Tensor,
    blocks: torch.Tensor | None = None,
) -> None:
    """Choose for the prefills, chunk by chunk. In a tensor-parallel group each rank may have a part of the tokens.

    Args:
        blocks: where their candidate blocks are written; None: nowhere. With them, each rank has all tokens.
    """
    keys, scales = current_workspace_manager().get_simultaneous(
        ((most_keys, 128), q.dtype), ((most_keys,), torch.float32)
    )
    shard = None
    if blocks is None:
        shard = stock.PrefillRowShard.from_metadata(batch.prefill, batch.num_decode_tokens)
    for chunk in batch.prefill.chunks:
        chunk_keys, chunk_scales = keys[: chunk.total_seq_lens], scales[: chunk.total_seq_lens]
        if not chunk.skip_kv_gather:
            cp_gather_indexer_k_quant_cache(kv_cache, chunk_keys, chunk_scales, chunk.block_table, chunk.cu_seq_lens)
        start, end, first, last = chunk.token_start, chunk.token_end, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke
        if shard is not None:
            narrowed = shard.narrow(chunk)
            if narrowed is None:
                continue
            start, end, first, last = narrowed
        select_rows(
            q[start:end], chunk_keys, chunk_scales, weights[start:end], first, last, out.shape[1],
            max_workspace_bytes=envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20, out=out[start:end],
            blocks=None if blocks is None else blocks[start:end],
        )  # fmt: skip
    if shard is not None:
        shard.exchange_topk(out, out.shape[1])


def _decodes(
    batch: Any,
    kv_cache: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    most_keys: int,
    out: torch.Tensor,
    ratio: int = 1,
    blocks: torch.Tensor | None = None,
) -> None:
    """Choose for the decodes.

    Args:
        ratio: tokens of a key.
        blocks: as for `_prefills`.
    """
    tokens = batch.num_decode_tokens
    lens, table = _decoding(batch, ratio)
    select_rows_paged(
        q[:tokens].view(len(table), -1, *q.shape[1:]), kv_cache, weights[:tokens], lens, table, most_keys, out.shape[1],
        max_workspace_bytes=envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20, out=out[:tokens],
        blocks=None if blocks is None else blocks[:tokens],
    )  # fmt: skip


def _decoding(batch: Any, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many keys the decodes' tokens see, and the block table of their requests, all with equal numbers of query
    tokens. If these are not equal, each token counts as a request."""
    decode, tokens = batch.decode, batch.num_decode_tokens
    lens, table = decode.seq_lens, decode.block_table
    if decode.requires_padding or tokens % len(decode.decode_lens):
        ends = decode.decode_lens.cumsum(0)
        token = torch.arange(tokens, device=ends.device)
        request = torch.searchsorted(ends, token, right=True)
        padding = request == len(ends)
        request.clamp_(max=len(ends) - 1)
        lens = (batch.seq_lens[request] - (ends[request] - token) + 1) // ratio
        lens = lens.masked_fill(padding, 0).int()
        table = table[request]
    return lens, table


def _among(
    batch: Any,
    kv_cache: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    ratio: int,
) -> None:
    """Choose among the keys of the candidate blocks that an earlier layer of the step left. No other keys are read."""

    def select(tokens: slice, lens: torch.Tensor, request: torch.Tensor, table: torch.Tensor) -> None:
        select_candidate_rows(
            q[tokens], kv_cache, weights[tokens], blocks[tokens], lens, request, table, out.shape[1],
            max_workspace_bytes=envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20, out=out[tokens],
        )  # fmt: skip

    for chunk in batch.prefill.chunks if batch.num_prefills else ():
        first = chunk.cu_seqlen_ks  # a token without keys may be taken for another request's
        request = torch.searchsorted(chunk.cu_seq_lens, first, right=True, out_int32=True) - 1
        select(
            slice(chunk.token_start, chunk.token_end), chunk.cu_seqlen_ke - first,
            request.clamp_(max=len(chunk.block_table) - 1), chunk.block_table,
        )  # fmt: skip
    if batch.num_decode_tokens:
        lens, table = _decoding(batch, ratio)
        token = torch.arange(batch.num_decode_tokens, dtype=torch.int32, device=q.device)
        select(slice(batch.num_decode_tokens), lens.reshape(-1), token // (len(token) // len(table)), table)
