"""The indexer's training targets and loss in plain NumPy, one query at a time, in float32."""

from __future__ import annotations

import numpy as np

from ..arguments import IndexerLoss, Target
from ..dtypes import FLOAT32
from .cache import AMAX_FLOOR as KEY_FLOOR
from .logits import AMAX_FLOOR as QUERY_FLOOR
from .logits import rounded

LEAST = np.float32(1e-10)  # divisors and arguments of logarithms are at least this


@np.errstate(all="ignore")
def attention_target(a: Target) -> None:
    """Attention summed over the heads; see `cupy_mla.attention_target`."""
    a.out[...] = 0
    for i in range(len(a.q)):
        places, rows = _support(a, i, len(a.kv))
        if len(places):
            p = np.exp(_logits(a, i, rows) - a.lse[i][:, None])
            if a.sink is not None:
                p = p / (1 + np.exp(a.sink - a.lse[i]))[:, None]
            a.out[i, places] = p.sum(axis=0)


@np.errstate(all="ignore")
def dense_lse(a: Target) -> None:
    """lse over a range of rows; see `cupy_mla.dense_lse`."""
    for i in range(len(a.q)):
        _, rows = _support(a, i, len(a.kv))
        if len(rows) == 0:
            a.out[i] = np.inf
            continue
        logits = _logits(a, i, rows)
        largest = logits.max(axis=1)
        a.out[i] = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))


def _logits(a: Target, i: int, rows: np.ndarray) -> np.ndarray:
    """The logits [h, n] of a query's heads over these rows."""
    return np.float32(a.sm_scale) * (a.q[i].astype(FLOAT32) @ a.kv[rows].astype(FLOAT32).T)


@np.errstate(all="ignore")
def indexer_loss(a: IndexerLoss) -> None:
    """The loss and its gradients; see `cupy_mla.indexer_loss`."""
    tokens, keys = len(a.q_index), len(a.k_index)
    counted = [a.counted is None or bool(a.counted[i]) for i in range(tokens)]
    count = sum(counted[i] and len(_support(a, i, keys)[0]) > 0 for i in range(tokens))
    g = a.loss_coeff if a.per_token else a.loss_coeff / max(count, 1)
    loss = np.float32(0)
    dk = np.zeros(a.k_index.shape, FLOAT32)
    if a.accumulate:
        dk += a.dk_index
    for i in range(tokens):
        if a.gradients:
            a.dq_index[i], a.dw[i] = 0, 0
        places, entries = _support(a, i, keys)
        if len(places) == 0 or not counted[i]:
            continue
        q, rows = _scored(a, a.q_index[i], QUERY_FLOOR), _scored(a, a.k_index[entries], np.float32(KEY_FLOOR))
        kl, d_scores, z = _divergence(a, q @ rows.T, i, places)
        loss += kl
        if a.gradients:
            mask = (z > 0).astype(FLOAT32) if a.relu else np.ones_like(z)
            dz = np.float32(g) * d_scores * mask
            a.dw[i] = (dz * z).sum(axis=1)
            dz *= a.w[i][:, None]
            a.dq_index[i] = dz @ rows
            np.add.at(dk, entries, dz.T @ q)
    a.loss[...] = np.float32(g) * loss
    if a.gradients:
        a.dk_index[...] = dk


def _scored(a: IndexerLoss, values: np.ndarray, floor: np.float32) -> np.ndarray:
    """Queries or keys [n, 128] float32, rounded to e4m3 if the call asks for it."""
    values = values.astype(FLOAT32)
    if a.scale_format is None:
        return values
    codes, scales = rounded(values, floor, a.scale_format)
    return codes.astype(FLOAT32) * scales[:, None]


def _divergence(a: IndexerLoss, z: np.ndarray, i: int, places: np.ndarray) -> tuple[np.float32, np.ndarray, np.ndarray]:
    """KL of a query, its derivative by the scores, and z."""
    scores = a.w[i] @ (np.maximum(z, 0) if a.relu else z)
    scores -= scores.max()
    log_pred = scores - np.log(np.exp(scores).sum())
    target = a.target[i, places]
    target = target / np.maximum(target.sum(), LEAST)
    kl = (target * (np.log(np.maximum(target, LEAST)) - log_pred)).sum()
    return kl, np.exp(log_pred) - target, z


def _support(a: Target | IndexerLoss, i: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The places of the valid entries in a query's list or range, and the rows that they name."""
    if a.indices is None:
        places = np.arange(max(int(a.starts[i]), 0), min(int(a.ends[i]), rows))
        return places, places
    entries = a.indices[i]
    if a.length is not None:
        entries = entries[: max(int(a.length[i]), 0)]
    places = np.flatnonzero((entries >= 0) & (entries < rows))
    return places, entries[places]
