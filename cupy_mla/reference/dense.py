"""Dense attention over a paged cache in plain NumPy, one query at a time."""

from __future__ import annotations

import numpy as np

from ..arguments import DenseDecode
from .attention import attend_in_splits, queries
from .cache import rows_of


@np.errstate(all="ignore")
def dense_decode(a: DenseDecode) -> None:
    """Attention over all rows of requests; see `cupy_mla.dense_decode`."""
    q = queries(a)
    for i, j in np.ndindex(q.shape[:2]):
        rows = rows_of(a.cache, a.layout, _seen_slots(a, i, j), a.k_scale)
        a.out[i, j], a.lse[i, :, j] = attend_in_splits(q[i, j], rows, a.sm_scale, a.num_splits, a.sink)


def _seen_slots(a: DenseDecode, request: int, token: int) -> np.ndarray:
    """The slots of the rows that a query sees, without rows that the table or the cache does not have."""
    num_blocks, block_size, _ = a.cache.shape
    table = a.block_table[request]
    end = int(a.seq_lens[request]) - (a.q.shape[1] - 1 - token if a.causal else 0)
    first = max(end - a.window, 0) if a.window else 0
    column, offset = np.divmod(np.arange(first, min(end, table.size * block_size)), block_size)
    block = table[column].astype(np.int64)
    return (block * block_size + offset)[(block >= 0) & (block < num_blocks)]
