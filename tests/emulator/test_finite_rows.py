"""`finite_rows` on an emulated Hopper GPU: it finds what is not finite at any place, or queries of a group mix it."""

from __future__ import annotations

import numpy as np
import pytest

from ..backward import forward, inputs, run


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("array", ["q", "kv", "dout"])
def test_any_place(kind, rng, d_qk, array):
    """A query's neighbour in its group, which lists other rows, has finite gradients all the same."""
    a = inputs(rng, 2, 32, d_qk, 64, 32, invalid=0)
    a.kv[...] = np.nan_to_num(a.kv.astype(np.float32))
    a = a._replace(indices=rng.permutation(64).astype(np.int32).reshape(2, 1, 32))
    results = forward(a)
    width = getattr(a, array).shape[-1]
    for column in (0, width - 1, *rng.integers(width, size=2)):  # the first, the last, and others
        wrong = getattr(a, array).copy()
        at = [int(rng.integers(n)) for n in wrong.shape]
        at[-1] = int(column)
        at[0] = int(rng.choice(a.entries(1))) if array == "kv" else 1
        wrong[tuple(at)] = rng.choice([np.nan, np.inf, -np.inf])
        dq, dkv = (kind.take(x).astype(np.float32) for x in run(kind, a._replace(**{array: wrong}), results)[:2])
        assert np.isfinite(dq[0]).all(), at
        assert np.isfinite(dkv[a.entries(0)]).all(), at
        assert not np.isfinite(dkv).all(), at
