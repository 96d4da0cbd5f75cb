"""DeepSeek-V4 and V4.1: attention over the paged caches, in place of FlashMLA's decode.

SGLang's backend keeps FlashMLA's function in an attribute, which we replace when the backend has been made. It serves
decodes, and tokens that speculation verifies or drafts; prefills only where `SGLANG_OPT_FLASHMLA_SPARSE_PREFILL` is
off. Other prefills (`flash_mla_sparse_fwd`), the indexer and the compressors are SGLang's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ...config import RATIOS, SparseMLAConfig
from ...layouts import FP4_BESIDE, V41_FP4
from ...ops.attention import sparse_decode
from ...typing import CacheLayout, ModelKind, PagedLayout
from .. import warm
from . import logger
from .attention import MOST_TOKENS

PAGE = 256  # tokens of a page
# SGLang's layouts of rows that our kernels read. The GPU decides: on compute capability 10.x V4 has V4.1's rows,
# elsewhere V4.1 has V4's.
LAYOUTS: dict[str, CacheLayout] = {"V4": "v4_fp8", "V41": "v41_fp8_split", "V41_NEW": "v41_fp8"}


class NamedLayers(SparseMLAConfig):
    """Layers for warming up, of V4 over V4.1's rows, too: calls name the layout."""

    def _require_layouts(self, kind: ModelKind) -> None: ...


def replace(made: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """Let a backend attend by our operation, and compile its kernels. SGLang calls it after `__init__`.

    Backends that do not call FlashMLA's function (`trtllm`, MegaAttention, all on compute capability 12.x) keep what
    they have. So does one over rows that no kernel of ours reads, with a warning.
    """
    from sglang.srt.runtime_context import get_platform

    if get_platform().is_sm120 or self.trtllm_attn or self.mega_attn or not hasattr(self, "_flash_mla_with_kvcache"):
        return
    name = self.token_to_kv_pool.get_swa_key_layout().name
    layout = LAYOUTS.get(name)
    if layout is None:
        logger.warning("cupy_mla leaves DeepSeek-V4's attention to SGLang: ours reads no rows in its layout %s", name)
        return
    self._flash_mla_with_kvcache = partial(flash_mla_with_kvcache, layout)
    warm.up(layers_of(self, layout), torch.device(self.device), logger)


def layers_of(backend: Any, layout: CacheLayout) -> list[NamedLayers]:
    """The kinds of layers of a backend: with a sliding window alone, and with each kind of compressed cache."""
    from sglang.srt.runtime_context import get_parallel

    ranks, heads = get_parallel().attn_tp_size, backend.model_runner.model_config.num_attention_heads
    if ranks > 1:  # SGLang's layers pad the heads of a rank
        heads = 64 if heads // ranks <= 64 else heads
    kind: ModelKind = "v41" if backend.is_dsv41 else "v4"
    pool, window_alone = backend.token_to_kv_pool, RATIOS[kind][0]
    in_fp4 = {ratio for ratio in backend.present_ratios if pool.compressed_kv_layout(ratio).is_fp4}
    return [
        NamedLayers(
            heads, 512, topk=backend.index_topk, block_size=PAGE, cache_layout=layout, max_num_seqs=MOST_TOKENS,
            max_num_batched_tokens=MOST_TOKENS, max_model_len=backend.max_context_len, compress_ratio=ratio,
            window=pool.sliding_window, model=kind, compressed_layout=FP4_BESIDE[layout] if ratio in in_fp4 else None,
        )
        for ratio in RATIOS[kind]
        if ratio == window_alone or ratio in backend.present_ratios
    ]  # fmt: skip


def flash_mla_with_kvcache(
    layout: CacheLayout,
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    **schedule: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_decode` with the keywords with which SGLang's backend calls FlashMLA.

    Args:
        layout: of `k_cache`.
        q: [T, 1, h, 512] bfloat16.
        k_cache: [pages, rows, 1, 584 | 528] uint8 or float8_e4m3fn, the sliding window's.
        indices: [T, 1, width] int32 slots, -1 where there is none.
        softmax_scale: factor on the dot products.
        topk_length, extra_topk_length: [T] int32 entries of each list that are looked at.
        attn_sink: [h] float32.
        extra_k_cache: [pages, rows, 1, 584 | 528 | 288], the compressed cache.
        extra_indices_in_kvcache: [T, 1, width] int32 slots in it.
        schedule: FlashMLA's schedule, and what it needs for dense attention; not used.

    Returns:
        out [T, 1, h, 512] bfloat16, lse [T, h, 1] float32.

    Raises:
        TypeError, ValueError: as `cupy_mla.sparse_decode`.

    Source: SGLang 0.5.23, `DeepseekV4AttnBackend._forward_attention`.
    """
    extra: PagedLayout | None = None
    if extra_k_cache is not None:
        extra = FP4_BESIDE[layout] if extra_k_cache.shape[-1] == V41_FP4.token_bytes else layout
    return sparse_decode(
        q, k_cache, indices, softmax_scale, attn_sink=attn_sink, topk_length=topk_length, extra_k_cache=extra_k_cache,
        extra_indices=extra_indices_in_kvcache, extra_topk_length=extra_topk_length, layout=layout, extra_layout=extra,
    )  # fmt: skip
