"""Inputs of the attention benchmarks, made on the GPU."""

from __future__ import annotations

import torch

import cupy_mla
from cupy_mla import layouts
from cupy_mla.layouts import Layout

PLACE = "torch", 0
CHUNK = 1 << 18  # tokens packed at a time
SCORES = 1 << 26  # drawn at a time


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def random_slots(*shape: int, slots: int) -> torch.Tensor:
    """Uniform slot numbers, int32."""
    return torch.randint(0, slots, shape, device="cuda", dtype=torch.int32)


def bf16_cache(tokens: int, block_size: int = 64) -> torch.Tensor:
    """A cache of layout BF16 full of unit normal rows of 576 values."""
    cache = torch.empty(tokens // block_size, block_size, 1, 576, device="cuda", dtype=torch.bfloat16)
    for part in cache.split(1024):
        part.copy_(normal(*part.shape))
    return cache


def v32_cache(tokens: int, block_size: int = 64, scale_format: str = "fp32") -> torch.Tensor:
    """A V32_FP8 cache full of unit normal rows, packed by our own kernel."""
    cache = torch.empty(tokens // block_size, block_size, 1, 656, device="cuda", dtype=torch.uint8)
    for start in range(0, tokens, CHUNK):
        slots = torch.arange(start, min(start + CHUNK, tokens), device="cuda")
        rows = len(slots)
        cupy_mla.concat_and_cache_mla(
            normal(rows, 512), normal(rows, 64), cache, slots, layout="v32_fp8", scale_format=scale_format
        )
    return cache


def v4_cache(tokens: int, block_size: int) -> torch.Tensor:
    """A V4_FP8 cache full of unit normal rows with its block stride padded to a multiple of 576 bytes."""
    blocks, stride = tokens // block_size, layouts.V4_FP8.block_bytes(block_size)
    whole = torch.empty(blocks, stride, device="cuda", dtype=torch.uint8)
    cache = whole.as_strided((blocks, block_size, 1, 584), (stride, 584, 584, 1))
    for start in range(0, tokens, CHUNK):
        slots = torch.arange(start, min(start + CHUNK, tokens), device="cuda")
        cupy_mla.quantize_and_insert_k_cache(normal(len(slots), 512), cache, slots)
    return cache


def insert(layout: Layout, rows: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows with the operation that models of the layout's kind have. A scale of the call is 1."""
    if layout.of_v4:
        cupy_mla.quantize_and_insert_k_cache(rows, kv_cache, slots, layout=layout.name)
    else:
        latent, rope = rows[:, : layouts.D_V], rows[:, layouts.D_V :]
        cupy_mla.concat_and_cache_mla(latent, rope, kv_cache, slots, layout=layout.name)


def layout_cache(layout: Layout, tokens: int, block_size: int = 64) -> torch.Tensor:
    """A cache of any layout full of unit normal rows."""
    kv_cache = cupy_mla.empty_cache(layout, tokens // block_size, block_size, PLACE)
    for slots in torch.arange(tokens, device="cuda").split(CHUNK):
        insert(layout, normal(len(slots), layout.d_qk), kv_cache, slots)
    return kv_cache


def causal_lists(kind: str, s: int, topk: int, device: str = "cuda") -> torch.Tensor:
    """Index lists [s, topk] int32 of s tokens over their rows: token i lists `min(i + 1, topk)` rows up to its own, -1
    behind them.

    Args:
        kind: "random": any rows, in any order. "ascending": the same in order. "local": of the newest `2 * topk`, in
            any order; 64 neighbours list mostly the same. "all": the first ones.
    """
    lists = torch.full((s, topk), -1, device=device, dtype=torch.int32)
    step = max(64, SCORES // s // 64 * 64)
    for first in range(0, s, step):
        end = min(first + step, s)
        rows, tokens = torch.arange(end, device=device), torch.arange(first, end, device=device)[:, None]
        outside = rows > tokens
        scores = -rows.float().expand_as(outside) if kind == "all" else torch.rand(outside.shape, device=device)
        if kind == "local":
            shared = torch.rand(-(-len(tokens) // 64), end, device=device).repeat_interleave(64, 0)[: len(tokens)]
            scores, outside = shared + scores / 16, outside | (rows <= tokens - 2 * topk)
        chosen = scores.masked_fill(outside, -torch.inf).topk(min(topk, end), 1)
        found = chosen.indices.masked_fill(chosen.values == -torch.inf, s)
        found = found.sort(1).values if kind == "ascending" else found
        lists[first:end, : found.shape[1]] = found.masked_fill(found == s, -1)
    return lists
