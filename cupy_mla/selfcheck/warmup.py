"""Compiles ahead what the layers of a config need, so that no request waits for NVRTC."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..bridges import require_cupy
from ..config import SparseMLAConfig
from ..cuda import all_kernels
from ..cuda.kernel import Kernel
from ..layouts import BFLOAT16, Layout
from ..metadata.compressed import C128A, c128a_width
from ..ops.attention import sparse_decode, sparse_prefill
from ..ops.table import Wanted
from .cases import cases

SM_SCALE = 1.0  # no kernel depends on it
MOST_QUERIES = 2048  # no choice of a kernel depends on how many more there are


def warmup(config: SparseMLAConfig, device: int = 0) -> list[Kernel]:
    """Compile (or take from CuPy's disk cache) and load the kernels that layers of a config need, on one GPU.

    Calls their operations once each, and attention at every power of two of query tokens up to the config's maxima,
    with index lists without a valid entry. Which kernel runs depends on such numbers; whatever these calls load is
    ready afterwards in this process, and on disk for others. Uses a few hundred MB of GPU memory for a moment.

    Args:
        config: the layers and the engine's maxima.
        device: the GPU.

    Returns:
        the kernels loaded on that GPU, those of earlier calls included.

    Raises:
        RuntimeError: CuPy, a GPU or NVRTC is missing.
    """
    cupy = require_cupy("warmup")
    with cupy.cuda.Device(device):
        for case in cases(np.random.default_rng(0), Wanted((config.layout,))):
            if case.operation.function not in (sparse_decode, sparse_prefill):
                case.run(cupy.asarray)
        _attention(cupy, config)
        cupy.cuda.Device(device).synchronize()
    return [kernel for kernel in all_kernels() if kernel.loaded(device)]


def _attention(cupy: ModuleType, config: SparseMLAConfig) -> None:
    layout, heads, d_qk = config.layout, config.num_heads, config.layout.d_qk
    cache = _empty_cache(cupy, layout, config.block_size)
    sink = cupy.zeros(heads, np.float32) if config.is_v4 else None
    for b in _sizes(config.max_num_batched_tokens if config.use_mixed_batch else config.max_num_seqs):
        s_q = 1 if config.use_mixed_batch or config.is_v4 else 1 + config.num_speculative_tokens
        q, indices = (
            _zeros(cupy, b, s_q, heads, d_qk),
            _nothing(cupy, b, s_q, config.window if config.is_v4 else config.topk),
        )
        length = cupy.zeros(b, np.int32) if config.is_v4 else None
        more: dict[str, Any] = {"attn_sink": sink, "topk_length": length}
        sparse_decode(q, cache, indices, SM_SCALE, **more)
        if config.compress_ratio > 1:
            width = config.topk if config.compress_ratio != C128A else c128a_width(config)
            sparse_decode(
                q, cache, indices, SM_SCALE, **more, extra_k_cache=_empty_cache(cupy, layout, config.rows_per_block),
                extra_indices=_nothing(cupy, b, s_q, width), extra_topk_length=length,
            )  # fmt: skip
    for tokens in _sizes(config.max_num_batched_tokens):
        length = cupy.zeros(tokens, np.int32) if config.is_v4 else None
        sparse_prefill(
            _zeros(cupy, tokens, heads, d_qk), _zeros(cupy, 1, 1, d_qk), _nothing(cupy, tokens, 1, config.topk),
            SM_SCALE, attn_sink=sink, topk_length=length,
        )  # fmt: skip


def _sizes(most: int) -> list[int]:
    """Powers of two up to `most` (or what makes a difference), and that itself."""
    most = min(most, MOST_QUERIES)
    return [*(1 << n for n in range((most - 1).bit_length())), most]


def _zeros(cupy: ModuleType, *shape: int) -> Any:
    """bfloat16 zeros of which only one row exists."""
    return cupy.broadcast_to(cupy.zeros(shape[-1:], BFLOAT16), shape)


def _nothing(cupy: ModuleType, *shape: int) -> Any:
    """Index lists without a valid entry."""
    return cupy.broadcast_to(cupy.full(shape[-1:], -1, np.int32), shape)


def _empty_cache(cupy: ModuleType, layout: Layout, block_size: int) -> Any:
    """One block, with the stride that the layout's writers use."""
    items = layout.block_bytes(block_size) // layout.dtype.itemsize
    whole = cupy.zeros((1, items), layout.dtype)
    return whole[:, : block_size * layout.last_axis].reshape(1, block_size, layout.last_axis)
