"""The layers of vLLM's models as configs for `cupy_mla.warmup`, which compiles their kernels before the first
request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...arrays import aligned_up
from ...config import RATIOS, DenseMLAConfig, LayerConfig, SparseMLAConfig
from ...cuda.paging import ceil_div
from ...typing import CacheLayout, ModelKind
from .. import warm
from . import logger

PAGE = 64  # rows of a block; vLLM's blocks are multiples of it
DRAFT_LIST_ALIGN = 64  # the width of the lists of V4's and V4.1's draft models (DSpark) is a multiple
V4_PAGE = {"v4": 256, "v41": 64}  # tokens of a block of DeepSeek-V4's and V4.1's compressed caches


def layers_of(vllm_config: Any, heads: int, topk: int, layout: CacheLayout, *, rope: bool) -> SparseMLAConfig:
    """Sparse MLA layers and an engine's maxima. Whole batches may run as `sparse_decode`.

    Args:
        heads: query heads of a call.
        topk: entries of a query token's list.
        layout: of the cache.
        rope: whether rows have a RoPE part; GLM-5.3-Flash's have none.
    """
    scheduler, more = vllm_config.scheduler_config, _speculative(vllm_config)
    tokens = scheduler.max_num_batched_tokens
    seqs = max(scheduler.max_num_seqs, ceil_div(tokens, 1 + more))
    return SparseMLAConfig(
        heads, 576 if rope else 512, topk=topk, block_size=PAGE, cache_layout=layout, max_num_seqs=seqs,
        max_num_batched_tokens=tokens, max_model_len=vllm_config.model_config.max_model_len,
        num_speculative_tokens=more, model="v32",
    )  # fmt: skip


def dense_layers_of(vllm_config: Any, heads: int, fp8: bool) -> DenseMLAConfig:
    """MLA layers without an indexer.

    Args:
        heads: query heads of a call.
        fp8: whether the cache has FP8 rows, with one scale.
    """
    return DenseMLAConfig(
        heads, block_size=PAGE, cache_layout="plain_fp8" if fp8 else "bf16",
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs, max_model_len=vllm_config.model_config.max_model_len,
        num_speculative_tokens=_speculative(vllm_config),
    )  # fmt: skip


def v4_layers_of(vllm_config: Any, heads: int, kind: ModelKind, image_tokens: int = 0) -> list[SparseMLAConfig]:
    """DeepSeek-V4's or V4.1's layers, of each compress ratio.

    Args:
        heads: query heads of a call.
        kind: "v4" or "v41".
        image_tokens: of the largest image, whose tokens see one another.
    """
    model, scheduler, more = vllm_config.model_config, vllm_config.scheduler_config, _speculative(vllm_config)
    window = model.hf_config.sliding_window
    # Tokens that a draft model guesses see one another, too. Their lists are a window and they, rounded up.
    draft_tokens = aligned_up(window + more, DRAFT_LIST_ALIGN) - window if more else 0
    return [
        SparseMLAConfig(
            heads, 512, topk=model.hf_config.index_topk, block_size=V4_PAGE[kind], cache_layout="v4_fp8",
            max_num_seqs=scheduler.max_num_seqs, max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=model.max_model_len, num_speculative_tokens=more, compress_ratio=ratio, window=window,
            model=kind, max_image_tokens=max(image_tokens, draft_tokens),
        )
        for ratio in RATIOS[kind]
    ]  # fmt: skip


def _speculative(vllm_config: Any) -> int:
    """Query tokens of a decode beyond the first."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens)


def up(kinds: Sequence[LayerConfig], device: torch.device) -> None:
    """Compile and load the kernels of such layers, with lines in vLLM's log."""
    warm.up(kinds, device, logger)
