"""`schedule` on an emulated GPU: the same schedule as NumPy's, of few requests and of many."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import paged_indexer_schedule


@pytest.mark.parametrize("requests", [1, 5, 300])
def test_shares(kind, rng, requests):
    """Some requests are of no key, and some blocks are none."""
    lens = rng.integers(0, 2000, requests, dtype=np.int32)
    lens[rng.random(requests) < 0.2] = 0
    table = rng.integers(-1, 50, (requests, 32), dtype=np.int32)
    for shares in (1, 7, 132):
        want = paged_indexer_schedule(lens, table, 2000, 64, shares)
        got = paged_indexer_schedule(kind.put(lens), kind.put(table), 2000, 64, shares)
        np.testing.assert_array_equal(kind.take(got), want)
