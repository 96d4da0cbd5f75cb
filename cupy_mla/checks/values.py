"""Checks of the values in arrays, made under `CUPY_MLA_CHECK=1` or `cupy_mla.set_checks(True)`.

They read values back to the host, so they wait for a GPU. A value out of range is an `IndexError`. Two writes to one
place are a `ValueError`. Both name the argument and the first entry that is wrong.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ..arrays import Array
from ..bridges import to_numpy


def host(array: Array) -> np.ndarray:
    """The values of an array.

    Raises:
        RuntimeError: the caller's stream is being captured, and cannot be waited for.
    """
    place = array.place
    if place.on_gpu and place.is_capturing():
        raise RuntimeError(
            f"{array.name}: no values can be checked while a CUDA graph is captured: call cupy_mla.set_checks(False)"
        )
    return to_numpy(array.obj)


def first_of(wrong: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first True; None: there is none."""
    return tuple(map(int, np.argwhere(wrong)[0])) if wrong.any() else None


def _refuse(name: str, values: np.ndarray, wrong: np.ndarray, why: str) -> None:
    """Raise an IndexError for the first value that is wrong."""
    at = first_of(wrong)
    if at is not None:
        raise IndexError(f"{name}{list(at)} is {values[at]}, {why}")


def check_lengths(array: Array, most: Any = None, of: str = "") -> np.ndarray:
    """Check lengths: from 0 to `most`, which `of` explains; returns them as int64."""
    values = host(array).astype(np.int64)
    _refuse(array.name, values, values < 0, "a length cannot be negative")
    if most is not None:
        _refuse(array.name, values, values > most, f"{of} {most}")
    return values


def check_images(left: Array, right: Array, most: int) -> None:
    """Check the positions [T] of each token's image before it and behind it: none is negative, and with the token they
    are at most `most`, the tokens of the largest image. Tokens of text have none."""
    visible = check_lengths(left) + check_lengths(right)
    wrong = (visible > 0) & (visible >= most)
    _refuse(f"{left.name} + {right.name}", visible, wrong, f"the largest image has {most} tokens (max_image_tokens)")


def check_bounds(array: Array, bounds: np.ndarray) -> None:
    """Check lengths: from 0 to a bound each."""
    values = check_lengths(array)
    at = first_of(values > bounds)
    if at is not None:
        raise IndexError(f"{array.name}{list(at)} is {values[at]}, the batch says at most {bounds[at]}")


def check_ranges(starts: Array | None, ends: Array | None, width: Any) -> None:
    """Check ranges of columns in rows of `width`. They may be empty."""
    if starts is not None:
        values = host(starts)
        _refuse(starts.name, values, values < 0, "a range cannot start below 0")
    if ends is not None:
        values = host(ends)
        _refuse(ends.name, values, values > width, f"rows end at {width}")


def check_widths(starts: Array, ends: Array, width: int) -> None:
    """Check that ranges have at most `width` keys."""
    widths = host(ends).astype(np.int64) - np.maximum(host(starts), 0)
    _refuse(ends.name, host(ends), widths > width, f"its range has more than {width} keys (max_seqlen_k)")


def check_rotations(positions: Array, rows: Any) -> None:
    """Check that a table of angles has a row for each position that is not negative."""
    values = host(positions)
    _refuse(positions.name, values, values >= rows, f"the table of angles has {rows} rows")


def check_contexts(lens: Array, most: Any, table: Array, cache: Array) -> None:
    """Check context lengths of requests [B] or of their tokens [B, n], and that each key has a block of the cache."""
    values = check_lengths(lens, most, "max_context_len is")
    end = values if values.ndim == 1 else values.max(1, initial=0)
    check_blocks(table, np.zeros_like(end), end, cache, lens.name)


def check_offsets(array: Array) -> np.ndarray:
    """Check a running sum: it starts at 0 or above; returns it as int64."""
    values = host(array).astype(np.int64)
    _refuse(array.name, values, np.diff(values, prepend=0) < 0, "offsets must neither start below 0 nor go down")
    return values


def check_lists(indices: Array, rows: Any, length: Array | None) -> None:
    """Check index lists [..., topk] of rows of a cache. Entries at or after the length of a list are not checked."""
    topk, values = indices.shape[-1], host(indices)
    wrong = values >= rows
    if length is not None:
        lengths = check_lengths(length, topk, "the lists have a topk of")
        wrong &= np.arange(topk) < lengths.reshape(-1, *(1,) * (values.ndim - 1))
    _refuse(indices.name, values, wrong, f"there are {rows} rows")


def check_slots(slots: Array, cache: Array, written: bool = True) -> None:
    """Check slots of a cache [num_blocks, block_size, ...]; `written`: each may occur once. Negative ones are
    ignored."""
    capacity = cache.shape[0] * cache.shape[1]
    values = host(slots)
    _refuse(slots.name, values, values >= capacity, f"the cache has {capacity} slots")
    if written:
        check_written_once(slots.name, values)


def check_written_once(name: str, slots: np.ndarray) -> None:
    """Check that no slot of [T] occurs twice. Negative ones are ignored."""
    order = np.argsort(slots, kind="stable")
    again = np.flatnonzero((np.diff(slots[order]) == 0) & (slots[order[1:]] >= 0))
    if again.size:
        one, other = order[again[0]], order[again[0] + 1]
        raise ValueError(f"{name}: tokens {one} and {other} both go to slot {slots[one]}")


def check_requests(array: Array, requests: Any, looked_at: Array | None = None) -> None:
    """Check numbers of requests; with `looked_at` only those that the operation reads."""
    values = host(array)
    wrong = (values < 0) | (values >= requests)
    if looked_at is not None:
        wrong &= host(looked_at)
    _refuse(array.name, values, wrong, f"there are {requests} requests")


def check_prefills(array: Array, starts: Array) -> None:
    """Check numbers of prefills [T], of which negative ones are ignored, and the first rows [P] of prefills."""
    values, first = host(array), host(starts)
    _refuse(array.name, values, values >= len(first), f"there are {len(first)} prefills")
    _refuse(starts.name, first, first < 0, "a workspace has no such row")


def check_positions(array: Array, table: Array, block_size: Any, looked_at: np.ndarray | None = None) -> None:
    """Check that the rows of a block table reach positions [T, K]. Negative ones, and tokens not `looked_at` [T], are
    ignored."""
    values, reach = host(array), table.shape[1] * block_size
    wrong = values >= reach
    if looked_at is not None:
        wrong &= looked_at[:, None]
    _refuse(array.name, values, wrong, f"a request's row of the block table holds {reach}")


def stray_block(
    table: np.ndarray,
    first: np.ndarray,
    end: np.ndarray,
    block_size: int,
    num_blocks: int,
) -> tuple[int, ...] | None:
    """The first entry of a block table [R, M] that is no block of the cache though request r needs it, for one of its
    tokens first[r] .. end[r] - 1."""
    column = np.arange(table.shape[1])
    wrong = (table < 0) | (table >= num_blocks)
    if not wrong.any():  # the usual case: entries behind a sequence are blocks, too
        return None
    wrong &= (column >= first[:, None] // block_size) & (column < -(-end[:, None] // block_size))
    return first_of(wrong & (first < end)[:, None])


def check_blocks(table: Array, first: np.ndarray, end: np.ndarray, cache: Array, lengths: str = "seq_lens") -> None:
    """Check that the table has a block of the cache for each of the tokens first[r] .. end[r] - 1 of request r.

    Args:
        lengths: the name of the argument that `end` comes from.
    """
    num_blocks, block_size = cache.shape[0], cache.shape[1]
    blocks = host(table)
    reach = blocks.shape[1] * block_size
    for r in np.flatnonzero(end > reach):
        raise IndexError(f"{lengths}: request {r} has {end[r]} tokens, its row of the block table holds {reach}")
    at = stray_block(blocks, first, end, block_size, num_blocks)
    if at is not None:
        raise IndexError(
            f"block_table: block {at[1]} of request {at[0]} is {blocks[at]}, the cache has {num_blocks} blocks"
        )


def check_workspace(starts: Array, lens: np.ndarray, rows: Any) -> None:
    """Check that the requests' rows starts[r] .. starts[r] + lens[r] - 1 lie in a workspace of `rows` and do not
    overlap."""
    first = host(starts).astype(np.int64)
    for r in np.flatnonzero((lens > 0) & ((first < 0) | (first + lens > rows))):
        raise IndexError(f"{starts.name}: request {r} takes rows {first[r]} to {first[r] + lens[r]}, dst has {rows}")
    order = np.argsort(first, kind="stable")
    order = order[lens[order] > 0]
    for before, after in pairwise(order):
        if first[before] + lens[before] > first[after]:
            raise ValueError(f"{starts.name}: rows of requests {before} and {after} overlap")
