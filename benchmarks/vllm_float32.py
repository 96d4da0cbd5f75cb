"""A vLLM backend whose attention is computed in float32: what both vLLM's and ours are measured against.

Cache, index lists and metadata are those of the plug-in; of attention itself nothing is. The rows are read as numbers
(`float(e4m3) * scale`), scores, softmax and sums are float32, the result is rounded to bfloat16 as vLLM takes it.
"""

from __future__ import annotations

from typing import Any

import torch

from cupy_mla.integrations.vllm.sparse_mla import CupyMLASparseBackend, CupyMLASparseImpl
from cupy_mla.ops.indices import convert_req_index_to_global_index

TOKENS = 32  # at a time, so that their rows fit


class Float32Backend(CupyMLASparseBackend):
    @staticmethod
    def get_impl_cls() -> type[Float32Impl]:
        return Float32Impl


class Float32Impl(CupyMLASparseImpl):
    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        slots = convert_req_index_to_global_index(
            attn_metadata.req_id_per_token, attn_metadata.block_table, self.topk_indices_buffer[: len(q)],
            attn_metadata.block_size,
        )  # fmt: skip
        parts = [
            self._attend(q[i : i + TOKENS].float(), kv_c_and_k_pe_cache, slots[i : i + TOKENS])
            for i in range(0, len(q), TOKENS)
        ]
        return torch.cat(parts).to(torch.bfloat16), None

    def _attend(self, q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        rows = numbers(cache.view(-1, cache.shape[-1])[slots.clamp(min=0).long()])  # [T, k, 576]
        scores = self.softmax_scale * torch.einsum("thd,tkd->thk", q, rows)
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
