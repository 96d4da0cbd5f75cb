"""`gather_lens` on an emulated GPU: one request, and more than a CTA has threads."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla.ops.swa import compute_prefill_gather_lens

from .. import oracle_v4
from ..batches import random_queries


@pytest.mark.parametrize(("requests", "decodes"), [(1, 0), (5, 2), (300, 17)])
def test_lengths(kind, rng, requests, decodes):
    batch = random_queries(rng, requests, 20, 200)
    want = oracle_v4.prefill_gather_lens(batch.seq_lens, batch.query_start_loc, decodes, 8)
    got = compute_prefill_gather_lens(kind.put(batch.seq_lens), kind.put(batch.query_start_loc), decodes, 8)
    np.testing.assert_array_equal(kind.take(got), want)
    start = rng.integers(-1, 200, requests, dtype=np.int32)
    want = oracle_v4.prefill_gather_lens(batch.seq_lens, batch.query_start_loc, decodes, 8, start)
    arrays = (kind.put(a) for a in (batch.seq_lens, batch.query_start_loc))
    got = compute_prefill_gather_lens(*arrays, decodes, 8, replay_start=kind.put(start))
    np.testing.assert_array_equal(kind.take(got), want)
