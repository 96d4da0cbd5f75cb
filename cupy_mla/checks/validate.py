"""Checks of arrays that several operations share. An error names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..arrays import Array
from ..dtypes import E4M3, E5M2, INT64, UINT8
from ..layouts import D_V, MAX_HEADS, Layout, names
from .options import require_choice, require_integer

QUANTIZED = (UINT8, E4M3)
MULTIPLIED = (*QUANTIZED, E5M2)  # queries and keys of the indexer's logits; uint8 is e4m3

ALIGNMENT = 16  # bytes: the start and the blocks of a quantized cache are multiples
INDEXER_ALIGNMENT = 4  # the same for the indexer's caches, whose blocks may have an odd number of tokens


def require_d_v(name: str, d_v: int) -> None:
    require_integer(name, d_v, 1)
    if d_v != D_V:
        raise ValueError(f"{name} must be {D_V}, got {d_v}")


def require_heads(h_q: int, name: str = "q") -> None:
    if not 1 <= h_q <= MAX_HEADS:
        raise ValueError(f"{name}: expected 1 to {MAX_HEADS} heads, got {h_q}")


def tokens_of(array: Array) -> Array:
    """Drop the KV-head axis that an array of tokens [T, 1, values] has; returns it."""
    return array.without_axis(1) if len(array.shape) == 3 else array


def require_slots(slots: Array, tokens: int) -> None:
    """Check the slots of tokens [T'], T' <= `tokens`: a padded batch has more tokens than slots."""
    count = slots.require(INT64, "T").shape[0]
    if count > tokens:
        raise ValueError(f"{slots.name}: expected at most {tokens} slots, one a token, got {count}")


def cache_layout(
    cache: Array,
    allowed: Sequence[Layout],
    others: Mapping[Layout, str] | None = None,
    *,
    asked: Any = None,
    asked_by: str = "layout",
) -> Layout:
    """The layout of a cache array, told by its dtype and last axis.

    Args:
        allowed: the layouts that the operation takes.
        others: other layouts, with the names of the functions that take them, for the message.
        asked: the layout's name, if the caller gives one.
        asked_by: the argument that gives it.

    Raises:
        ValueError: the array has no allowed layout, not the one that is asked for, or may have several.
    """
    if asked is not None:
        require_choice(asked_by, asked, names(allowed))
    last = cache.shape[-1] if cache.shape else 0
    found = _layouts_of(cache.dtype, last, asked, (*allowed, *(others or ())))
    if found and found[0] in allowed:
        if asked is None and not found[0].told:
            may_be = " or ".join(repr(layout.name) for layout in found if layout in allowed)
            raise ValueError(f"{cache.name}: rows of {last} bytes may be anything: say {asked_by}={may_be}")
        if asked is not None and asked not in found[0].names:
            is_of = f"{' or '.join(layout.name for layout in found if layout in allowed)} of {found[0].d_qk}"
            raise ValueError(f"{asked_by}: {asked!r} was asked for, {cache.name} is {is_of}")
        return found[0]
    hint = f"; {others[found[0]]} is for layout {found[0].name}" if others and found else ""
    wanted = ", ".join(
        f"{'uint8 or float8_e4m3fn' if a.quantized else a.dtype.name} [..., {a.last_axis}]" for a in allowed
    )
    raise ValueError(
        f"{cache.name}: expected a paged cache ({wanted}), got {cache.dtype.name} {list(cache.shape)}{hint}"
    )


@lru_cache(maxsize=1024)
def _layouts_of(dtype: np.dtype, last: int, asked: str | None, among: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """The layouts that a cache array with such a dtype and last axis may have. If some have the name that is asked for,
    or without a name are told by the array, only those."""
    found = [a for a in dict.fromkeys(among) if a.last_axis == last and a.quantized == (dtype in QUANTIZED)]
    found = [a for a in found if (asked in a.names if asked is not None else a.told)] or found
    return tuple([a for a in found if a.quantized or a.dtype == dtype] or found)


def require_cache(cache: Array, layout: Layout, alignment: int = ALIGNMENT) -> Array:
    """Check a paged cache [num_blocks, block_size, (1,) last axis] of a layout; drops the KV-head axis.

    Start and block stride of a quantized cache must be multiples of `alignment` bytes.
    """
    if len(cache.shape) == 4:
        cache.without_axis(2)
    described = cache.name, None, None, cache.dtype, cache.shape, cache.strides, cache.ptr % ALIGNMENT
    _check_cache(layout, alignment, *described)
    return cache


@lru_cache(maxsize=1024)
def _check_cache(layout: Layout, alignment: int, *described: Any) -> None:
    """`require_cache` of a cache without KV-head axis. The caches of a process have few shapes, so it is remembered.

    Args:
        described: the arguments of `Array`; the address modulo ALIGNMENT.
    """
    cache = Array(*described)
    cache.require(QUANTIZED if layout.quantized else layout.dtype, "num_blocks", "block_size", layout.last_axis)
    num_blocks, block_size, _ = cache.shape
    if block_size < 1:
        raise ValueError(f"{cache.name}: expected block_size >= 1, got shape {list(cache.shape)}")
    if num_blocks == 0 or not layout.quantized:
        return
    if block_size > 1 and cache.strides[1] != layout.last_axis:
        apart = cache.strides[1] * cache.dtype.itemsize
        raise ValueError(f"{cache.name}: tokens of a block must lie {layout.token_bytes} bytes apart, got {apart}")
    if num_blocks > 1 and cache.strides[0] < layout.token_bytes * block_size:
        least = layout.token_bytes * block_size
        raise ValueError(f"{cache.name}: block stride must be at least {least} bytes, got {cache.strides[0]}")
    if cache.ptr % alignment:
        raise ValueError(
            f"{cache.name}: must start at a multiple of {alignment} bytes in memory, "
            f"starts {cache.ptr % alignment} bytes after one"
        )
    if num_blocks > 1 and cache.strides[0] % alignment:
        raise ValueError(
            f"{cache.name}: block stride must be a multiple of {alignment} bytes (writers of {layout.name} "
            f"pad a block of {block_size} tokens to {layout.block_bytes(block_size)} bytes), got {cache.strides[0]}"
        )
