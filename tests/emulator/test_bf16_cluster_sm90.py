"""`bf16_cluster_sm90` on an emulated GPU, with each number of heads of a cluster."""

from __future__ import annotations

import pytest

from cupy_mla.cuda.attention.kernels import bf16_cluster_sm90

from .. import oracle
from ..cases import check_decode, paged, queries, sinks


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("heads", bf16_cluster_sm90.HEADS)
def test_heads_of_a_cluster(kind, rng, force, heads):
    """Fewer than a query has, the last of its work items maybe with padding; each CTA has at most a pair of tiles."""
    force("bf16_cluster_sm90", f"clusters(heads={heads})")
    fmt, h_q = (oracle.BF16_576, oracle.BF16_512)[int(rng.integers(2))], int(rng.integers(1, 81))
    main = paged(rng, fmt, 1, 2, int(rng.integers(130, 400)), 64, invalid=rng.choice([0, 0.3]))
    q, splits = queries(rng, 1, 2, h_q, fmt.d_qk), rng.choice([2, 6])
    check_decode(kind, fmt, q, main, sink=sinks(rng, h_q), num_splits=splits)
