"""`dense_cluster_sm90` on an emulated GPU."""

from __future__ import annotations

import pytest

from cupy_mla.cuda.attention.choose import VARIABLE

from ..dense_hopper import every_batch, every_heads, some_requests

# As many SMs as the largest of the calls has work items, twice.
pytestmark = pytest.mark.parametrize("emulated", [64], indirect=True)


@pytest.fixture(autouse=True)
def runs_it(monkeypatch):
    monkeypatch.setenv(VARIABLE, "dense_cluster_sm90")


@pytest.mark.long(sample=2)
@every_heads
def test_requests(kind, rng, heads):
    some_requests(kind, rng, 2, heads)


@pytest.mark.long(sample=4)
@every_batch
def test_batches(kind, rng, check):
    check(kind, rng, 2)
