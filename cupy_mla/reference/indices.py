"""Index operations in plain NumPy."""

from __future__ import annotations

import numpy as np

from ..arguments import Conversion

LARGEST = np.iinfo(np.int32).max


def convert_req_index_to_global_index(a: Conversion) -> None:
    """Positions in requests to slots or workspace rows; see `cupy_mla.convert_req_index_to_global_index`."""
    positions = a.token_indices.astype(np.int64)
    rows = find_slots(a.block_table, a.req_id[:, None], positions, a.block_size, a.block_stride_rows)
    if a.prefill_request_ids is not None and a.prefill_workspace_starts is not None:
        prefill = a.prefill_request_ids[:, None]
        in_table = (positions >= 0) & (positions // a.block_size < a.block_table.shape[1])
        starts = _pick(a.prefill_workspace_starts, prefill)
        rows = np.where(prefill >= 0, np.where(in_table & (starts >= 0), starts + positions, -1), rows)
    found = (rows >= 0) & (rows <= LARGEST)
    rows = np.where(found, rows, -1)
    if a.to_front:
        rows = np.take_along_axis(rows, np.argsort(~found, axis=1, kind="stable"), axis=1)
        if a.most is not None:
            rows[np.arange(rows.shape[1]) >= a.most[:, None]] = -1
        found = rows >= 0
    a.out[...] = rows
    if a.valid_counts is not None:
        a.valid_counts[...] = found.sum(axis=1)
        if a.is_valid_token is not None:
            a.valid_counts[~a.is_valid_token] = 0
    if a.ends is not None:
        a.ends[...] = (found * np.arange(1, found.shape[1] + 1)).max(axis=1, initial=0)


def find_slots(
    block_table: np.ndarray,
    request: np.ndarray,
    positions: np.ndarray,
    block_size: int,
    block_stride: int | None = None,
) -> np.ndarray:
    """The slot of each position of a request, int64; negative if the request, the column or the block does not exist.

    `request` and `positions` are broadcast. `block_stride` is the number of slots from a block to the next; None:
    `block_size`.
    """
    requests, width = block_table.shape
    column, offset = np.divmod(positions, block_size)
    exists = (request >= 0) & (request < requests) & (column >= 0) & (column < width)
    if block_table.size == 0:
        return np.full(exists.shape, -1, np.int64)
    block = block_table[np.where(exists, request, 0), np.where(exists, column, 0)].astype(np.int64)
    stride = block_size if block_stride is None else block_stride
    return np.where(exists & (block >= 0), block * stride + offset, -1)


def slots_of(
    block_table: np.ndarray, positions: np.ndarray, block_size: int, request_ids: np.ndarray | None, out: np.ndarray
) -> None:
    """Slots of positions; see `cupy_mla.slots_of`."""
    requests = np.arange(len(positions)) if request_ids is None else request_ids
    out[...] = find_slots(
        block_table, requests.reshape(-1, *(1,) * (positions.ndim - 1)), positions.astype(np.int64), block_size
    )  # fmt: skip


def _pick(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """`values[index]` as int64, -1 where there is no such entry."""
    if len(values) == 0:
        return np.full(index.shape, -1, np.int64)
    exists = (index >= 0) & (index < len(values))
    return np.where(exists, values[np.where(exists, index, 0)].astype(np.int64), -1)
