"""Index and gather operations as plain loops, written from the specification's tables alone."""

from __future__ import annotations

import numpy as np

INT32_MAX = 2**31 - 1


def slot(block_table: np.ndarray, request: int, position: int, block_size: int, stride: int | None = None) -> int:
    """Slot of a request's position; -1 where it has none. Blocks are `stride` slots apart, or `block_size`."""
    requests, width = block_table.shape
    if not 0 <= request < requests or position < 0 or position // block_size >= width:
        return -1
    block = int(block_table[request, position // block_size])
    at = block * (stride or block_size) + position % block_size
    return at if block >= 0 and at <= INT32_MAX else -1


def convert_req_index_to_global_index(
    req_id: np.ndarray,
    block_table: np.ndarray,
    token_indices: np.ndarray,
    block_size: int,
    prefill_ids: np.ndarray | None = None,
    prefill_starts: np.ndarray | None = None,
    stride: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    out = np.empty(token_indices.shape, np.int32)
    for t, k in np.ndindex(out.shape):
        position = int(token_indices[t, k])
        if prefill_ids is None or prefill_ids[t] < 0:
            out[t, k] = slot(block_table, int(req_id[t]), position, block_size, stride)
            continue
        out[t, k] = -1
        if 0 <= position < block_table.shape[1] * block_size and prefill_ids[t] < len(prefill_starts):
            start = int(prefill_starts[prefill_ids[t]])
            if start >= 0 and start + position <= INT32_MAX:
                out[t, k] = start + position
    counts = np.array([sum(1 for entry in row if entry != -1) for row in out], np.int32)
    return out, counts


def to_front(rows: np.ndarray, most: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Each row's entries that are not -1, in their order, the first `most` of them, and -1 behind; and how many."""
    out, counts = np.full_like(rows, -1), np.zeros(len(rows), np.int32)
    for t, row in enumerate(rows.tolist()):
        kept = [entry for entry in row if entry != -1]
        if most is not None:
            kept = kept[: max(int(most[t]), 0)]
        for place, entry in enumerate(kept):
            out[t, place] = entry
        counts[t] = len(kept)
    return out, counts
