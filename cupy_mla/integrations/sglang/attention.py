"""Attention of models of the DeepSeek-V3.2 kind, in place of SGLang's two FlashMLA paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...config import SparseMLAConfig
from ...layouts import BF16_512, BF16_576, V32_FP8, V32_NOPE_FP8
from ...ops.attention import sparse_decode, sparse_prefill
from ...typing import CacheLayout
from .. import warm
from . import logger

# Values of SGLang's options that always or sometimes lead to a replaced path.
REPLACED = ("flashmla_sparse", "flashmla_kv", "flashmla_auto")
# Query tokens of the largest calls that are warmed up. Larger calls run the same kernels.
MOST_TOKENS = 2048


def warm_up(made: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """Compile and load the kernels of a backend's layers before graphs are captured. SGLang calls it after `__init__`.

    Nothing is compiled if no option selects a replaced path.
    """
    if not is_selected(self.dsa_prefill_impl, self.dsa_decode_impl):
        return
    layers = SparseMLAConfig(
        self.num_q_heads, BF16_576.d_qk if self.qk_rope_head_dim else BF16_512.d_qk, topk=self.dsa_index_topk,
        block_size=self.physical_page_size, max_num_seqs=MOST_TOKENS, max_num_batched_tokens=MOST_TOKENS,
        cache_layout=layout_of_rows(self) or "bf16", max_model_len=self.max_context_len, model="v32",
    )  # fmt: skip
    warm.up([layers], torch.device(self.device), logger)


def is_selected(prefill: str, decode: str) -> bool:
    """Whether SGLang's options `--dsa-prefill-backend` and `--dsa-decode-backend` lead to a replaced path."""
    return prefill in REPLACED or decode in REPLACED


def layout_of_rows(backend: Any) -> CacheLayout | None:
    """The layout of the rows of a backend's cache; None: no kernel of ours reads them.

    Rows of 528 bytes are 512 e4m3 values and four float32 scales in models without RoPE. In others they are not.
    """
    width, rope = backend.kv_cache_dim, backend.qk_rope_head_dim
    if width == V32_NOPE_FP8.token_bytes and rope == 0:
        return "v32_nope_fp8"
    if width == V32_FP8.token_bytes:
        return "v32_fp8"
    return "bf16" if width in (BF16_576.d_qk, BF16_512.d_qk) else None


def forward_flashmla_sparse(
    self: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    page_table_1: torch.Tensor,
    sm_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over bf16 rows. Unlike SGLang's path, it takes any number of heads without padding.

    Args:
        q_all: [T, h, 576 | 512] bfloat16.
        kv_cache: [..., 576 | 512] bfloat16, any leading axes.
        v_head_dim: 512.
        page_table_1: [T, topk] int32 rows, -1 where there is none.
        sm_scale: factor on the dot products.
        topk_length: [T] int32 entries of each list that are looked at. One of another length is that of a padded batch,
            and not used.
        attn_sink: [h] float32.

    Returns:
        [T, h, 512] bfloat16.

    Raises:
        TypeError, ValueError: as `cupy_mla.sparse_prefill`.

    Source: SGLang 0.5.23, `DeepseekSparseAttnBackend._forward_flashmla_sparse`.
    """
    if topk_length is not None and len(topk_length) != len(q_all):  # the batch is padded; unused entries are -1
        topk_length = None
    rows = kv_cache.view(-1, 1, kv_cache.shape[-1])
    out, _, _ = sparse_prefill(
        q_all, rows, page_table_1[:, None], sm_scale, d_v=v_head_dim, attn_sink=attn_sink, topk_length=topk_length
    )
    return out


def forward_flashmla_kv(
    original: Callable[..., torch.Tensor],
    self: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    sm_scale: float,
    layer: Any,
    metadata: Any,
    page_table_1: torch.Tensor,
) -> torch.Tensor:
    """Attention over the paged cache, FP8 or bf16. For a cache of other rows SGLang's own code runs.

    Args:
        original: SGLang's method.
        q_all: [T, h * d] or [T, h, d] bfloat16, d 576 or 512.
        kv_cache: the layer's pages: bfloat16 rows of d values, or uint8 or float8_e4m3fn rows of 656 bytes (V32_FP8)
            or, in models without RoPE, 528 (V32_NOPE_FP8).
        v_head_dim: 512.
        sm_scale: factor on the dot products.
        layer: SGLang's layer, with numbers of heads and values.
        metadata: FlashMLA's schedule, which is not used.
        page_table_1: [T, topk] int32 slots, -1 where there is none.

    Returns:
        [T, 1, h, 512] bfloat16.

    Raises:
        TypeError, ValueError: as `cupy_mla.sparse_decode`.

    Source: SGLang 0.5.23, `DeepseekSparseAttnBackend._forward_flashmla_kv`.
    """
    layout = layout_of_rows(self)
    if layout is None:
        return original(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1)
    q = q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
    pages = kv_cache.view(-1, self.physical_page_size, 1, self.kv_cache_dim)
    out, _ = sparse_decode(q, pages, page_table_1[:, None], sm_scale, layout=layout)
    return out
