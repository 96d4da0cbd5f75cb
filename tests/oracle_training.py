"""The float64 oracle of the indexer's loss and of what it is drawn to, written from the formulas; see `oracle.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .oracle import E4M3, e4m3_code
from .oracle_backward import Sum


class Loss(NamedTuple):
    """What `indexer_loss` takes: q [T, H, 128], k [N, 128], w [T, H], target [T, topk], indices [T, topk]; or
    `dense_indexer_loss`: ranges [T, 2] in the place of indices."""

    q: np.ndarray
    k: np.ndarray
    w: np.ndarray
    target: np.ndarray
    indices: np.ndarray | None
    length: np.ndarray | None = None
    counted: np.ndarray | None = None
    coeff: float = 1.0
    per_token: bool = False
    relu: bool = True
    ranges: np.ndarray | None = None
    scale_format: str | None = None  # of q and k in e4m3

    def support(self, i: int) -> np.ndarray:
        """Where in a token's list the entries stand that count."""
        if self.counted is not None and not self.counted[i]:
            return np.zeros(0, np.int64)
        if self.ranges is not None:
            start, end = self.ranges[i]
            return np.array([j for j in range(len(self.k)) if start <= j < end], np.int64)
        length = self.indices.shape[1] if self.length is None else max(int(self.length[i]), 0)
        return np.array([j for j, e in enumerate(self.indices[i]) if j < length and 0 <= e < len(self.k)], np.int64)

    def entries(self, i: int) -> np.ndarray:
        """The keys that they name."""
        return self.support(i) if self.indices is None else self.indices[i, self.support(i)]

    def scored(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """What z is the product of: a token's queries [H, 128], and the keys [n, 128] that entries name, in float64."""
        q, k = self.q[i], self.k[self.entries(i)]
        if self.scale_format is None:
            return q.astype(np.float64), k.astype(np.float64)
        return rounded(q, 1e-10, self.scale_format), rounded(k, 1e-4, self.scale_format)

    def divisor(self) -> int:
        return 1 if self.per_token else max(sum(len(self.support(i)) > 0 for i in range(len(self.q))), 1)


def rounded(rows: np.ndarray, floor: float, scale_format: str) -> np.ndarray:
    """Rows [n, 128] through e4m3 under a scale each, `max(amax, floor) / 448`, for "ue8m0" the next power of two."""
    rows = rows.astype(np.float32)
    amax = np.fmax.reduce(np.abs(rows), axis=-1, initial=0)
    scales = np.maximum(amax, np.float32(floor)) / np.float32(448)
    if scale_format == "ue8m0":
        scales = np.exp2(np.ceil(np.log2(scales.astype(np.float64)))).astype(np.float32)
    return E4M3[e4m3_code(rows / scales[:, None])] * scales.astype(np.float64)[:, None]


class Token(NamedTuple):
    """Of a token over its support: entries, z [H, n], both distributions, the second one's logarithm, and KL."""

    entries: np.ndarray
    z: np.ndarray
    p: np.ndarray
    pred: np.ndarray
    log_pred: np.ndarray
    kl: float


def token(a: Loss, i: int) -> Token:
    places, entries = a.support(i), a.entries(i)
    q, keys = a.scored(i)
    z = q @ keys.T
    scores = a.w[i].astype(np.float64) @ (np.where(z > 0, z, 0) if a.relu else z)
    log_pred = scores - scores.max()
    log_pred = log_pred - np.log(np.exp(log_pred).sum())
    p = a.target[i, places].astype(np.float64)
    p = p / max(p.sum(), 1e-10)
    kl = (p * (np.log(np.maximum(p, 1e-10)) - log_pred)).sum()
    return Token(entries, z, p, np.exp(log_pred), log_pred, kl)


def loss(a: Loss) -> float:
    found = [token(a, i).kl for i in range(len(a.q)) if len(a.support(i))]
    return a.coeff * sum(found) / a.divisor()


def gradients(a: Loss, changed: Callable[[int, np.ndarray], np.ndarray] = lambda i, d: d) -> dict[str, Sum]:
    """dq_index, dk_index and dw. `changed(i, d)` is multiplied in the place of token i's dI [n]."""
    shapes = {"dq_index": a.q.shape, "dk_index": a.k.shape, "dw": a.w.shape}
    result = {name: Sum(np.zeros(shape), np.zeros(shape)) for name, shape in shapes.items()}
    for i in range(len(a.q)):
        if len(a.support(i)) == 0:
            continue
        entries, z, p, pred, *_ = token(a, i)
        d_scores = changed(i, a.coeff / a.divisor() * (pred - p)).astype(np.float64)
        on = (z > 0).astype(np.float64) if a.relu else np.ones_like(z)
        dz = d_scores * a.w[i].astype(np.float64)[:, None] * on
        q, rows = a.scored(i)  # straight through: what is rounded has the gradient of what it is rounded to
        _add(result["dw"], i, d_scores * on * z, 1)
        _add(result["dq_index"], i, dz[:, :, None] * rows, 1)
        names = (np.arange(len(a.k))[:, None] == entries).astype(np.float64)
        for h in range(len(q)):
            result["dk_index"].value[:] += (names @ dz[h])[:, None] * q[h]
            result["dk_index"].squares[:] += (names @ dz[h] ** 2)[:, None] * q[h] ** 2
    return result


def _add(to: Sum, i: int, summands: np.ndarray, axis: int) -> None:
    to.value[i] += summands.sum(axis)
    to.squares[i] += (summands**2).sum(axis)


@np.errstate(over="ignore")
def target(
    q: np.ndarray, rows: np.ndarray, lse: np.ndarray, scale: float, sink: np.ndarray | None = None
) -> np.ndarray:
    """t [n] of a token with queries [h, d] over rows [n, d]."""
    p = np.exp(scale * (q.astype(np.float64) @ rows.astype(np.float64).T) - lse.astype(np.float64)[:, None])
    sigma = np.ones(len(q)) if sink is None else 1 / (1 + np.exp(sink.astype(np.float64) - lse))
    return (sigma[:, None] * p).sum(axis=0)


def lse(q: np.ndarray, rows: np.ndarray, scale: float) -> np.ndarray:
    """lse [h] of a token with queries [h, d] over rows [n, d]."""
    logits = scale * (q.astype(np.float64) @ rows.astype(np.float64).T)
    largest = logits.max(axis=1)
    return largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
