"""`group_lists` on an emulated GPU: the union of the lists of a group, of all lengths and with shared rows."""

from __future__ import annotations

import pytest

from ..cases import check_prefill, check_unequal_prefill, prefill_inputs


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    monkeypatch.setenv("CUPY_MLA_KERNELS", "bf16_grouped_sm90")


@pytest.mark.parametrize("h_q", [8, 16])
def test_lengths(kind, rng, h_q):
    check_unequal_prefill(kind, rng, 24, h_q, 576, slice(3, 6))


def test_rows_that_are_listed_twice(kind, rng):
    q, kv, indices = prefill_inputs(rng, 10, 16, 512, 90, 200, share=1)
    indices[1] = indices[0]
    indices[2, :, 100:] = indices[2, :, :100]
    check_prefill(kind, q, kv, indices, 0.05)
