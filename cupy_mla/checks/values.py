"""Checks of what arrays hold, made when asked: `CUPY_MLA_CHECK=1` or `cupy_mla.set_checks(True)`.

They read values back to the host, so they wait for a GPU. A number out of range is an `IndexError`, two of a kind where
each may be written once are a `ValueError`; both name the argument and the first entry that is wrong.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ..arrays import Array
from ..bridges import to_numpy


def host(array: Array) -> np.ndarray:
    """What an array holds.

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
    """Where the first True is; None where there is none."""
    return tuple(map(int, np.argwhere(wrong)[0])) if wrong.any() else None


def _refuse(name: str, values: np.ndarray, wrong: np.ndarray, why: str) -> None:
    at = first_of(wrong)
    if at is not None:
        raise IndexError(f"{name}{list(at)} is {values[at]}, {why}")


def check_lengths(array: Array, most: Any = None, of: str = "") -> np.ndarray:
    """Lengths of 0 to `most`; returns them as int64."""
    values = host(array).astype(np.int64)
    _refuse(array.name, values, values < 0, "a length cannot be negative")
    if most is not None:
        _refuse(array.name, values, values > most, f"{of} {most}")
    return values


def check_bounds(array: Array, bounds: np.ndarray) -> None:
    """Lengths that are not negative and within bounds, one a length."""
    values = check_lengths(array)
    at = first_of(values > bounds)
    if at is not None:
        raise IndexError(f"{array.name}{list(at)} is {values[at]}, the batch says at most {bounds[at]}")


def check_ranges(starts: Array | None, ends: Array | None, width: Any) -> None:
    """Ranges of columns, which may be empty, in rows of `width`."""
    if starts is not None:
        values = host(starts)
        _refuse(starts.name, values, values < 0, "a range cannot start below 0")
    if ends is not None:
        values, width = host(ends), width
        _refuse(ends.name, values, values > width, f"rows end at {width}")


def check_widths(starts: Array, ends: Array, width: int) -> None:
    """Ranges of at most so many keys."""
    widths = host(ends).astype(np.int64) - np.maximum(host(starts), 0)
    _refuse(ends.name, host(ends), widths > width, f"its range has more than {width} keys (max_seqlen_k)")


def check_rotations(positions: Array, rows: Any) -> None:
    """Positions that a table of angles has a row for, negative ones aside."""
    values, rows = host(positions), rows
    _refuse(positions.name, values, values >= rows, f"the table of angles has {rows} rows")


def check_contexts(lens: Array, most: Any, table: Array, cache: Array) -> None:
    """Context lengths, of requests [B] or of their tokens [B, n], and that a block of the cache holds every key."""
    values = check_lengths(lens, most, "max_context_len is")
    end = values if values.ndim == 1 else values.max(1, initial=0)
    check_blocks(table, np.zeros_like(end), end, cache, lens.name)


def check_offsets(array: Array) -> np.ndarray:
    """A running sum that does not start below 0; returns it as int64."""
    values = host(array).astype(np.int64)
    _refuse(array.name, values, np.diff(values, prepend=0) < 0, "offsets must neither start below 0 nor go down")
    return values


def check_lists(indices: Array, rows: Any, length: Array | None) -> None:
    """Index lists [..., topk] of rows of a cache; entries at or after the length of a query are not looked at."""
    topk, rows = indices.shape[-1], rows
    values = host(indices)
    wrong = values >= rows
    if length is not None:
        lengths = check_lengths(length, topk, "the lists have a topk of")
        wrong &= np.arange(topk) < lengths.reshape(-1, *(1,) * (values.ndim - 1))
    _refuse(indices.name, values, wrong, f"there are {rows} rows")


def check_slots(slots: Array, cache: Array, written: bool = True) -> None:
    """Slots of a cache [num_blocks, block_size, ...], each written once where they are; negative ones are skipped."""
    capacity = cache.shape[0] * cache.shape[1]
    values = host(slots)
    _refuse(slots.name, values, values >= capacity, f"the cache has {capacity} slots")
    if written:
        check_written_once(slots.name, values)


def check_written_once(name: str, slots: np.ndarray) -> None:
    """That no slot of [T], negative ones aside, stands there twice."""
    order = np.argsort(slots, kind="stable")
    again = np.flatnonzero((np.diff(slots[order]) == 0) & (slots[order[1:]] >= 0))
    if again.size:
        one, other = order[again[0]], order[again[0] + 1]
        raise ValueError(f"{name}: tokens {one} and {other} both go to slot {slots[one]}")


def check_requests(array: Array, requests: Any, looked_at: Array | None = None) -> None:
    """Numbers of requests; `looked_at` says which of them are read."""
    values, requests = host(array), requests
    wrong = (values < 0) | (values >= requests)
    if looked_at is not None:
        wrong &= host(looked_at)
    _refuse(array.name, values, wrong, f"there are {requests} requests")


def check_prefills(array: Array, starts: Array) -> None:
    """Numbers of prefills [T], negative ones aside, and their first rows [P], none negative."""
    values, first = host(array), host(starts)
    _refuse(array.name, values, values >= len(first), f"there are {len(first)} prefills")
    _refuse(starts.name, first, first < 0, "a workspace has no such row")


def check_positions(array: Array, table: Array, block_size: Any, looked_at: np.ndarray | None = None) -> None:
    """Positions [T, K] that the rows of a block table reach, negative ones aside, of tokens `looked_at` [T]."""
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
    """Where a block table [R, M] names no block of the cache for one of the tokens first[r] .. end[r] - 1."""
    column = np.arange(table.shape[1])
    wrong = (table < 0) | (table >= num_blocks)
    if not wrong.any():  # mostly: what stands past a sequence is some block, too
        return None
    wrong &= (column >= first[:, None] // block_size) & (column < -(-end[:, None] // block_size))
    return first_of(wrong & (first < end)[:, None])


def check_blocks(table: Array, first: np.ndarray, end: np.ndarray, cache: Array, lengths: str = "seq_lens") -> None:
    """That the table has a block of the cache for each of the tokens first[r] .. end[r] - 1 of request r.

    Args:
        lengths: what the argument is called that `end` is from.
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
    """That the requests' rows starts[r] .. starts[r] + lens[r] - 1 lie in a workspace of `rows`, each its own."""
    first, rows = host(starts).astype(np.int64), rows
    for r in np.flatnonzero((lens > 0) & ((first < 0) | (first + lens > rows))):
        raise IndexError(f"{starts.name}: request {r} takes rows {first[r]} to {first[r] + lens[r]}, dst has {rows}")
    order = np.argsort(first, kind="stable")
    order = order[lens[order] > 0]
    for before, after in pairwise(order):
        if first[before] + lens[before] > first[after]:
            raise ValueError(f"{starts.name}: rows of requests {before} and {after} overlap")
