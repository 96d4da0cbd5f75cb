"""The float64 oracle of the backward of sparse attention, written from its formulas; see `oracle.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .oracle import D_V, assert_close_to_sum, attend


class Inputs(NamedTuple):
    """What the forward takes, and the gradients that arrive: q [s_q, h, d], kv [s_kv, 1, d], indices [s_q, 1, topk],
    dout [s_q, h, 512], d_lse [s_q, h]."""

    q: np.ndarray
    kv: np.ndarray
    indices: np.ndarray
    scale: float
    dout: np.ndarray
    sink: np.ndarray | None = None
    length: np.ndarray | None = None
    d_lse: np.ndarray | None = None

    def entries(self, i: int) -> np.ndarray:
        """The valid entries of a query's list."""
        entries = self.indices[i, 0] if self.length is None else self.indices[i, 0, : max(int(self.length[i]), 0)]
        return np.array([e for e in entries if 0 <= e < len(self.kv)], np.int64)


class Sum(NamedTuple):
    """A gradient, and the sum of the squares of what was added up for each of its elements. Of dS these are two: what
    comes with dout, and what with delta and d_lse."""

    value: np.ndarray
    squares: np.ndarray


def forward(a: Inputs, i: int) -> tuple[np.ndarray, np.ndarray]:
    """out [h, 512] and lse [h] of a query, float64."""
    out, _, lse = attend(a.q[i], a.kv[a.entries(i), 0].astype(np.float64), a.scale, a.sink)
    return out, lse


def loss(a: Inputs) -> float:
    """The number whose gradients they are: sum of dout * out and d_lse * lse over queries with a valid entry."""
    total = 0.0
    for i in range(len(a.q)):
        if len(a.entries(i)):
            out, lse = forward(a, i)
            total += (out * a.dout[i].astype(np.float64)).sum()
            total += 0.0 if a.d_lse is None else (lse * a.d_lse[i]).sum()
    return total


@np.errstate(over="ignore")
def backward(a: Inputs, outs: np.ndarray | None = None, lses: np.ndarray | None = None) -> tuple[Sum, Sum, Sum]:
    """dq [s_q, h, d], dkv [s_kv, d] and d_sink [h].

    Args:
        outs, lses: of the forward, where they were rounded.
    """
    heads = a.q.shape[1]
    dq, dkv, d_sink = (
        Sum(np.zeros(shape), np.zeros(shape)) for shape in (a.q.shape, (len(a.kv), a.kv.shape[-1]), heads)
    )
    for i in range(len(a.q)):
        entries, times = np.unique(a.entries(i), return_counts=True)
        if len(entries) == 0:
            continue
        q, dout, rows = (x.astype(np.float64) for x in (a.q[i], a.dout[i], a.kv[entries, 0]))
        out, lse = forward(a, i)
        out = out if outs is None else outs[i].astype(np.float64)
        lse = lse if lses is None else lses[i].astype(np.float64)
        sink = np.full(heads, -np.inf) if a.sink is None else a.sink.astype(np.float64)
        sigma, left = 1 / (1 + np.exp(sink - lse)), 1 / (1 + np.exp(lse - sink))
        delta = (out * dout).sum(axis=1)
        p = times * np.exp(a.scale * (q @ rows.T) - lse[:, None])  # of entries that are the same: one summand
        e = (0.0 if a.d_lse is None else a.d_lse[i]) - sigma * delta
        names = (entries == np.arange(len(a.kv))[:, None]).astype(np.float64)  # [s_kv, entries]
        for ds in (sigma[:, None] * (dout @ rows[:, :D_V].T), e[:, None]):
            ds = a.scale * p * ds
            _add(dq, i, ds, rows)
            _add(dkv, ..., names, ds.T, q)
        _add(dkv, np.s_[:, :D_V], names, (sigma[:, None] * p).T, dout)
        d_sink.value[:] -= left * delta
        d_sink.squares[:] += (left * delta) ** 2
    return dq, dkv, d_sink


def _add(to: Sum, at: Any, *factors: np.ndarray) -> None:
    """Add a product of matrices, whose elements are sums of products."""
    to.value[at] += product_of(factors)
    to.squares[at] += product_of([factor**2 for factor in factors])


def product_of(factors: Sequence[np.ndarray]) -> np.ndarray:
    """The product of matrices, the last two first."""
    *others, product = factors
    for factor in others[::-1]:
        product = factor @ product
    return product


# Bounds on the cosine difference: of dq, and of dkv in either dtype; for peaked lists; and of d_sink.
COSINES = {"dq": 8e-6, "dkv bfloat16": 1e-5, "dkv float32": 7e-6, "peaked": 3e-5, "d_sink": 1e-5}


def assert_gradient(got: np.ndarray, want: Sum, result: str) -> None:
    """Every element within `2**-7` of its value and 3 % of the root of the summands' squares, and the cosine
    difference."""
    assert_close_to_sum(got, want.value, want.squares, COSINES[result], result)
