"""A vLLM backend computed in float32: what both vLLM's and ours are measured against.

Caches, quantized queries and metadata are those of the plug-in; of the indexer's logits and top-k and of attention
nothing is. Rows are read as numbers (`float(e4m3) * scale`); logits, scores, softmax and sums are float32, the result
is rounded to bfloat16 as vLLM takes it. So what either side's logits choose otherwise counts as its error.
"""

from __future__ import annotations

from typing import Any

import torch

from cupy_mla.integrations.vllm import indexer
from cupy_mla.integrations.vllm.sparse_mla import CupyMLASparseBackend, CupyMLASparseBuilder, CupyMLASparseImpl
from cupy_mla.ops.indices import convert_req_index_to_global_index

TOKENS = 32  # at a time, so that their rows fit
INDEXED_TOKENS = 128  # at a time, so that their scores fit


class Float32Builder(CupyMLASparseBuilder):
    """Attention takes index lists in every step."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return self._stock_build(common_prefix_len, common_attn_metadata, fast_build)


class Float32Backend(CupyMLASparseBackend):
    @staticmethod
    def get_builder_cls() -> type[Float32Builder]:
        return Float32Builder

    @staticmethod
    def get_impl_cls() -> type[Float32Impl]:
        return Float32Impl


class Float32Impl(CupyMLASparseImpl):
    """Prefills of at most topk tokens have no attention of their own; nothing is compiled ahead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        indexer.select_rows, indexer.select_rows_paged = select_rows, select_rows_paged  # of this process
        self.supports_dense_mha_prefill = False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None: ...

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        slots = convert_req_index_to_global_index(
            attn_metadata.req_id_per_token[: len(q)], attn_metadata.block_table, self.topk_indices_buffer[: len(q)],
            attn_metadata.block_size,
        )  # fmt: skip
        parts = [
            attend(q[i : i + TOKENS].float(), kv_c_and_k_pe_cache, slots[i : i + TOKENS], self.scale)
            for i in range(0, len(q), TOKENS)
        ]
        return torch.cat(parts).to(torch.bfloat16), None


def attend(q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention [T, h, 512] of queries [T, h, 576] over the rows at slots [T, k] of a cache [blocks, size, row]."""
    at, size = slots.clamp(min=0).long(), cache.shape[1]
    rows = numbers(cache[at // size, at % size])  # [T, k, 576]; blocks may have gaps between them
    scores = scale * torch.einsum("thd,tkd->thk", q, rows)
    scores.masked_fill_(slots[:, None] < 0, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0)  # a token without rows
    return torch.einsum("thk,tkd->thd", weights, rows[..., :512])


def numbers(rows: torch.Tensor) -> torch.Tensor:
    """Rows of a bf16 or V32_FP8 cache as float32 [..., 576]."""
    if rows.dtype == torch.bfloat16:
        return rows.float()
    rows = rows.view(torch.uint8)
    values = rows[..., :512].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[..., 512:528].contiguous().view(torch.float32)
    rope = rows[..., 528:].contiguous().view(torch.bfloat16).float()
    return torch.cat([values * scales.repeat_interleave(128, dim=-1), rope], dim=-1)


def select_rows(
    q8: torch.Tensor,
    k8: torch.Tensor,
    ks: torch.Tensor,
    w: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    *,
    max_workspace_bytes: int = 0,
    out: torch.Tensor,
    blocks: None = None,
) -> None:
    """As `cupy_mla.select_rows`: of a stable sort of float32 logits."""
    out.fill_(-1)
    for i in range(0, len(q8), INDEXED_TOKENS):
        t = slice(i, i + INDEXED_TOKENS)
        first, last = int(starts[t].min()), int(ends[t].max())
        scores = products(q8[t].flatten(0, 1), k8[first:last]).view(*q8[t].shape[:2], -1)
        logits = torch.einsum("thn,th->tn", scores.relu_(), w[t].float()) * ks[first:last]
        keys = torch.arange(first, last, device=q8.device)
        logits.masked_fill_((keys < starts[t, None]) | (keys >= ends[t, None]), -torch.inf)
        best = logits.sort(descending=True, stable=True)
        chosen = torch.where(best.values > -torch.inf, best.indices + first - starts[t, None], -1)[:, :k]
        out[t, : chosen.shape[1]] = chosen


def select_rows_paged(
    q8: torch.Tensor,
    kv_cache: torch.Tensor,
    w: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    k: int,
    *,
    max_workspace_bytes: int = 0,
    out: torch.Tensor,
    blocks: None = None,
) -> None:
    """As `cupy_mla.select_rows_paged`, request by request."""
    pages, n = kv_cache.view(torch.uint8).flatten(1), q8.shape[1]
    key_bytes = 128 * kv_cache.shape[1]
    for r, lens in enumerate(context_lens.view(len(q8), n)):
        mine, t = pages[block_table[r].long()], slice(r * n, (r + 1) * n)
        keys = mine[:, :key_bytes].reshape(-1, 128).view(torch.float8_e4m3fn)
        scales = mine[:, key_bytes:].contiguous().view(torch.float32).flatten()
        select_rows(q8[r], keys, scales, w[t], torch.zeros_like(lens), lens, k, out=out[t])


def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 products of rows of e4m3, which bfloat16 holds as well."""
    if not a.is_cuda:
        return a.float() @ b.float().T
    return torch.mm(a.bfloat16(), b.bfloat16().T, out_dtype=torch.float32)
