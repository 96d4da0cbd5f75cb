"""`sort_lists` on an emulated GPU: entries sorted by place are the same entries, in lists of one segment and of two."""

from __future__ import annotations

import pytest

from cupy_mla.cuda.attention.kernels import bf16_grouped_sm90

from ..cases import check_prefill, prefill_inputs


@pytest.mark.parametrize("topk", [130, 2100])
def test_lists(kind, rng, monkeypatch, topk):
    """A bound of 0 takes the cache for one that is larger than the L2 cache."""
    monkeypatch.setenv("CUPY_MLA_KERNELS", "bf16_grouped_sm90")
    monkeypatch.setattr(bf16_grouped_sm90, "SORTED_CACHE_BYTES", 0)
    q, kv, indices = prefill_inputs(rng, 5, 8, 512, 300, topk)
    check_prefill(kind, q, kv, indices, 0.02)
