"""Kernels are compiled before the first request: once a process for all layers of a kind, with a line in vLLM's log."""

from __future__ import annotations

import time
from typing import Any

import torch

from ...config import SparseMLAConfig
from ...cuda.paging import ceil_div
from ...typing import CacheLayout
from ...warmup import warmup
from . import logger

PAGE = 64  # rows of a block, of which vLLM's blocks are multiples

_ready: set[tuple[SparseMLAConfig, int]] = set()


def layers_of(
    vllm_config: Any, heads: int, topk: int, layout: CacheLayout, *, rope: bool = True, all_decodes: bool = False
) -> SparseMLAConfig:
    """Sparse MLA layers and an engine's maxima, as `cupy_mla.warmup` takes them.

    Args:
        heads: query heads that a call has.
        topk: entries of a query token's list.
        layout: of the cache.
        rope: whether rows have a RoPE part; GLM-5.3-Flash's have none.
        all_decodes: whether whole batches may go to the decode kernel.
    """
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    more = speculative.num_speculative_tokens if speculative is not None else 0
    seqs, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if all_decodes:
        seqs = max(seqs, int(ceil_div(tokens, 1 + more)))
    return SparseMLAConfig(
        heads, 576 if rope else 512, topk=topk, block_size=PAGE, cache_layout=layout, max_num_seqs=seqs,
        max_num_batched_tokens=tokens, max_model_len=vllm_config.model_config.max_model_len,
        num_speculative_tokens=more, model="v32",
    )  # fmt: skip


def up(layers: SparseMLAConfig, device: torch.device) -> None:
    """Make the kernels of such layers ready, unless that was done in this process. The CPU has none."""
    if device.type != "cuda":
        return
    number = torch.cuda.current_device() if device.index is None else device.index
    if (layers, number) in _ready:
        return
    _ready.add((layers, number))
    what = f"{layers.num_heads} heads over {layers.cache_layout} rows, topk {layers.topk}"
    logger.info("cupy_mla makes the kernels of %s ready, which takes minutes where they are not compiled yet", what)
    start = time.perf_counter()
    kernels = warmup(layers, number)
    logger.info("cupy_mla: %d kernels are ready after %.1f s", len(kernels), time.perf_counter() - start)
