"""The lightning indexer of models of the DeepSeek-V3.2 kind: logits and exact top-k by our operations, over keys that
SGLang's layers write.

SGLang's attention takes the chosen tokens in one of three forms, which the metadata name:

- slots of the paged cache;
- rows of the step's gathered keys: in prefills with FP8 caches, `flashmla_sparse`;
- positions in the request: with `SGLANG_DSA_FUSE_TOPK=0`, and where SGLang itself converts them.

What our operations do not serve is left to SGLang's code, with one warning.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ...layouts import INDEXER_FP8
from ...ops.logits import HEADS
from ...ops.topk import MAX_K, MAX_WORKSPACE_BYTES, select_rows, select_rows_paged
from . import attention, logger

PAGE = 64  # tokens of a page of SGLang's caches on CUDA


def get_topk_paged(
    original: Callable[..., torch.Tensor],
    self: Any,
    forward_batch: Any,
    layer_id: int,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    metadata: Any,
) -> torch.Tensor:
    """Choose for decodes, and for the tokens that speculation verifies or drafts: keys in the paged cache.

    Args:
        original: SGLang's method.
        forward_batch: SGLang's batch.
        layer_id: the layer whose keys are read.
        q_fp8: [T, H, 128] float8_e4m3fn, H a multiple of 8 up to 64. Tokens behind those that the metadata count pad
            the batch.
        weights: [T, H, 1] float32.
        metadata: SGLang's `DSAIndexerMetadata`, with a row of the page table for each token.

    Returns:
        [T, topk] int32 slots or positions, ascending by position, -1 behind them and for padding.

    Raises:
        TypeError, ValueError: as `cupy_mla.select_rows_paged`.

    Source: SGLang 0.5.23, `Indexer._get_topk_paged`.
    """
    pool = _pool()
    if _is_left(self, pool, metadata):
        return original(self, forward_batch, layer_id, q_fp8, weights, metadata)
    tokens = sum(metadata.get_dsa_extend_len_cpu())
    out = q_fp8.new_empty((len(q_fp8), self.index_topk), dtype=torch.int32)
    out[tokens:] = -1
    lens, table = metadata.get_seqlens_expanded()[:tokens], metadata.get_page_table_64()[:tokens]
    requests = len(metadata.get_seqlens_int32()) if forward_batch.forward_mode.is_target_verify() else tokens
    if requests == 0:
        return out
    each = tokens // requests  # tokens of a request beside each other read its keys once
    keys = self._get_index_k_read_buffer(pool, layer_id).view(-1, PAGE, INDEXER_FP8.token_bytes)
    select_rows_paged(
        q_fp8[:tokens].view(requests, each, *q_fp8.shape[1:]), keys, weights[:tokens].squeeze(-1),
        lens.view(requests, each), table[::each], table.shape[1] * PAGE, self.index_topk,
        slots=not metadata.force_unfused_topk, out=out[:tokens],
    )  # fmt: skip
    return out


def get_topk_ragged(
    original: Callable[..., torch.Tensor],
    self: Any,
    enable_dual_stream: bool,
    forward_batch: Any,
    layer_id: int,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    metadata: Any,
    topk_result: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose for prefills: keys that SGLang's pool gathers.

    Args:
        original: SGLang's method.
        enable_dual_stream: not used.
        forward_batch: SGLang's batch.
        layer_id: the layer whose keys are read.
        q_fp8: [T, H, 128] float8_e4m3fn, H a multiple of 8 up to 64. Tokens behind those that the metadata count pad
            the batch.
        weights: [T or more, H, 1] float32.
        metadata: SGLang's `DSAIndexerMetadata`, with each token's range of gathered keys.
        topk_result: [T or more, topk] int32 of -1, to be written; default: a new one.

    Returns:
        topk_result: rows of gathered keys, slots or positions, ascending by position, -1 behind them and for padding.

    Raises:
        TypeError, ValueError: as `cupy_mla.select_rows`.

    Source: SGLang 0.5.23, `Indexer._get_topk_ragged`.
    """
    pool = _pool()
    if _is_left(self, pool, metadata):
        return original(
            self, enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata, topk_result=topk_result
        )
    if topk_result is None:
        topk_result = q_fp8.new_full((len(q_fp8), self.index_topk), -1, dtype=torch.int32)
    table = metadata.get_logical_page_table()
    first, last = metadata.get_indexer_kvcache_range()
    tokens = len(first)
    if len(table) == 0 or tokens == 0:
        return topk_result
    lens = metadata.get_indexer_seq_len_cpu()
    keys, scales = pool.get_index_k_scale_buffer(
        layer_id, metadata.get_indexer_seq_len(), table, int(lens.sum()), int(lens.max())
    )
    converted, out = not metadata.force_unfused_topk, topk_result[:tokens]
    in_gathered = converted and metadata.topk_transform_method.name == "RAGGED"
    in_cache: dict[str, Any] = {}
    if converted and not in_gathered:
        requests = metadata.get_token_to_batch_idx()
        in_cache = {"req_id": requests, "block_table": metadata.get_page_table_64(), "block_size": PAGE}
    select_rows(
        q_fp8[:tokens], keys.view(torch.float8_e4m3fn), scales.view(torch.float32).view(-1),
        weights[:tokens].squeeze(-1), first, last, self.index_topk,
        max_workspace_bytes=min(MAX_WORKSPACE_BYTES, self._get_mqa_logits_budget_bytes(q_fp8.device.index)), out=out,
        **in_cache,
    )  # fmt: skip
    if in_gathered:
        out += metadata.attn_metadata.topk_indices_offset[:tokens, None] * (out >= 0)
    return topk_result


def _pool() -> Any:
    """SGLang's caches of the step."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    return get_token_to_kv_pool()


def _is_left(indexer: Any, pool: Any, metadata: Any) -> bool:
    """Whether SGLang's code runs: because its attention does, or because of something that our operations lack."""
    from sglang.srt.runtime_context import get_exec

    options = get_exec().kernel
    if not attention.is_selected(options.dsa_prefill_backend, options.dsa_decode_backend):
        return True
    lacking = _lacking(indexer, pool, metadata)
    if lacking is not None:
        warn_of(lacking)
    return lacking is not None


@cache
def warn_of(lacking: str) -> None:
    """Say once a process that SGLang keeps its indexer, because of something that our operations lack."""
    logger.warning("cupy_mla leaves the indexer to SGLang: ours serves none with %s", lacking)


def _lacking(indexer: Any, pool: Any, metadata: Any) -> str | None:
    """What an indexer needs and our operations lack; None: nothing."""
    if indexer.num_init_tokens or indexer.num_local_tokens:
        return "first or last tokens that are always chosen"
    if indexer.dsa_enable_prefill_cp:
        return "context parallelism"
    if indexer.n_heads not in HEADS:
        return f"{indexer.n_heads} heads"
    if indexer.index_topk > MAX_K:
        return f"more than {MAX_K} chosen tokens"
    if pool.index_page_size != PAGE or metadata.attn_metadata.page_size != PAGE:
        return f"pages other than of {PAGE} tokens"
    return None
