"""`count_entries` on an emulated GPU: lists without lengths end with their last valid entry."""

from __future__ import annotations

import numpy as np

from ..cases import check_prefill, prefill_inputs


def test_ends(kind, rng, monkeypatch):
    """Lists of no entry, of one, and full ones, of so many queries that looking for their ends is worth it."""
    monkeypatch.setenv("CUPY_MLA_KERNELS", "bf16_sm90")
    q, kv, indices = prefill_inputs(rng, 49, 3, 512, 300, 130, share=1)
    ends = rng.choice([0, 1, 64, 65, 129, 130], 49)
    indices[np.arange(130) >= ends[:, None, None]] = -1
    check_prefill(kind, q, kv, indices, 0.05)
