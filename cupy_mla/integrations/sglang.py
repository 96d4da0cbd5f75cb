"""SGLang's FlashMLA attention paths on this package's kernels, for models of the DeepSeek-V3.2 kind.

SGLang calls `register` in each of its processes: setup.cfg names it in the entry-point group `sglang.srt.plugins`.
With `CUPY_MLA_SGLANG=override` this package replaces the attention of `flashmla_sparse` and `flashmla_kv`, which
`--dsa-prefill-backend` and `--dsa-decode-backend` select. Unset, or with `off`, nothing changes. Neither does anything
in an SGLang that lacks a name on which this module relies: one warning then says what is missing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from ..checks.options import require_choice
from ..config import SparseMLAConfig
from ..layouts import BF16_512, BF16_576, V32_FP8
from ..ops.attention import sparse_decode, sparse_prefill
from . import warm
from .contract import Needs, meets, sources

MODES = ("off", "override")
BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
NEEDS: Needs = {
    "srt.plugins.hook_registry": (
        "HookRegistry.register(cls, target, hook, hook_type)",
        "HookType.AFTER",
        "HookType.AROUND",
        "HookType.REPLACE",
    ),
    "srt.layers.attention.dsa_backend": (
        "DeepseekSparseAttnBackend._forward_flashmla_sparse"
        "(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length, attn_sink)",
        "DeepseekSparseAttnBackend._forward_flashmla_kv"
        "(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1)",
        "DeepseekSparseAttnBackend.__init__(self, model_runner)",
        "DeepseekSparseAttnBackend.device",
        "DeepseekSparseAttnBackend.dsa_decode_impl",
        "DeepseekSparseAttnBackend.dsa_index_topk",
        "DeepseekSparseAttnBackend.dsa_prefill_impl",
        "DeepseekSparseAttnBackend.kv_cache_dim",
        "DeepseekSparseAttnBackend.max_context_len",
        "DeepseekSparseAttnBackend.num_q_heads",
        "DeepseekSparseAttnBackend.physical_page_size",
        "DeepseekSparseAttnBackend.qk_rope_head_dim",
    ),
}
# Values of SGLang's options that always or sometimes lead to a replaced path.
REPLACED = ("flashmla_sparse", "flashmla_kv", "flashmla_auto")
# Query tokens of the largest calls that are warmed up. Larger calls run the same kernels.
MOST_TOKENS = 2048
# `kv_cache_dim` of the caches that the decode kernels read: bf16 with and without RoPE, and FP8, whose values are
# bytes.
ROWS = (BF16_576.d_qk, BF16_512.d_qk, V32_FP8.token_bytes)

logger: logging.Logger = logging.getLogger(__name__)


def register() -> None:
    """Replace the attention of this process's SGLang, if `CUPY_MLA_SGLANG` says so.

    Raises:
        ValueError: `CUPY_MLA_SGLANG` is neither "off" nor "override".
    """
    mode = os.environ.get("CUPY_MLA_SGLANG") or "off"
    require_choice("CUPY_MLA_SGLANG", mode, MODES)
    if mode == "off":
        return
    if not meets(sources("sglang"), NEEDS, "SGLang", logger):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{BACKEND}._forward_flashmla_sparse", forward_flashmla_sparse, HookType.REPLACE)
    HookRegistry.register(f"{BACKEND}._forward_flashmla_kv", forward_flashmla_kv, HookType.AROUND)
    HookRegistry.register(f"{BACKEND}.__init__", warm_up, HookType.AFTER)


def warm_up(made: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """Compile and load the kernels of a backend's layers before graphs are captured. SGLang calls it after `__init__`.

    Nothing is compiled if no option selects a replaced path.
    """
    if self.dsa_prefill_impl not in REPLACED and self.dsa_decode_impl not in REPLACED:
        return
    layers = SparseMLAConfig(
        self.num_q_heads, BF16_576.d_qk if self.qk_rope_head_dim else BF16_512.d_qk, topk=self.dsa_index_topk,
        block_size=self.physical_page_size, max_num_seqs=MOST_TOKENS, max_num_batched_tokens=MOST_TOKENS,
        cache_layout="v32_fp8" if self.kv_cache_dim == V32_FP8.token_bytes else "bf16",
        max_model_len=self.max_context_len, model="v32",
    )  # fmt: skip
    warm.up(layers, torch.device(self.device), logger)


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
    """Attention [T, h, 512] over bf16 rows. Unlike SGLang's path, it takes any number of heads without padding."""
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
    """Attention [T, 1, h, 512] over the paged cache, FP8 or bf16. For a cache of other rows SGLang's own code runs."""
    if self.kv_cache_dim not in ROWS:
        return original(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1)
    q = q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
    pages = kv_cache.view(-1, self.physical_page_size, 1, self.kv_cache_dim)
    out, _ = sparse_decode(q, pages, page_table_1[:, None], sm_scale)
    return out
