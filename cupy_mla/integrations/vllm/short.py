"""Steps of short contexts: decodes of sequences of at most topk tokens attend over all rows, without index lists.

That is decided once a step, when its metadata is built, by vLLM's `max_seq_len`, an upper bound on the host. While vLLM
captures a CUDA graph it is the engine's longest sequence, so full graphs use lists.
"""

from __future__ import annotations

from typing import Any

import torch

from ...bridges import Place
from ...cuda.paging import ceil_div
from ...layouts import Layout
from ...metadata.sparse_mla import DenseDecodes
from ...ops.dense import faster_than_lists, planned_dense_decode

NAME = "cupy_mla_dense_decodes"  # the attribute of a metadata object that has them


def dense_decodes(builder: Any, batch: Any, layout: Layout, heads: int, longest: int) -> DenseDecodes | None:
    """The decodes of a batch, if it has nothing but decodes of short contexts and dense attention is faster; else None.

    Args:
        builder: the metadata builder, vLLM's or ours.
        batch: vLLM's description of the batch. The last tokens and requests may be padding.
        layout: of the cache.
        heads: query heads of the rank.
        longest: query tokens that a decode may have; 1 without speculative decoding.
    """
    requests, tokens, query_len = batch.num_reqs, batch.num_actual_tokens, batch.max_query_len
    of_decodes = 0 < query_len <= longest and tokens == requests * query_len
    if not of_decodes or batch.max_seq_len > builder.topk_tokens or batch.causal is not True:
        return None
    if query_len > 1 and not bool((batch.query_start_loc_cpu.diff() == query_len).all()):
        return None
    table, block_size = batch.block_table_tensor, builder.kv_cache_spec.block_size
    width = min(table.shape[1], ceil_div(builder.topk_tokens, block_size))
    shape = requests, query_len, heads
    if not faster_than_lists(Place.of(table), layout, shape, width, block_size):
        return None
    return DenseDecodes(batch.seq_lens, table[:requests, :width], query_len)


def dense_decodes_of(metadata: Any) -> DenseDecodes | None:
    """The dense decodes of a step's metadata; None if attention uses index lists, as in a step that is captured."""
    found: DenseDecodes | None = getattr(metadata, NAME, None)
    return None if found is None or captured() else found


def captured() -> bool:
    """Whether the step is being captured. Then it must serve longer sequences, too."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def attend(
    q: torch.Tensor, cache: torch.Tensor, dense: DenseDecodes, scale: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention [T, h, 512] of query tokens [T, h, d] over all rows of their requests."""
    shape = len(dense.seq_lens), dense.query_len
    out, _ = planned_dense_decode(
        q.view(*shape, *q.shape[1:]), cache, dense.block_table, dense.seq_lens, scale, dense.plan, attn_sink=sinks
    )
    return out.flatten(0, 1)
