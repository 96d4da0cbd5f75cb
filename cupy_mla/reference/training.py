"""What the indexer learns from in plain NumPy, one query at a time, in float32."""

from __future__ import annotations

import numpy as np

from ..arguments import IndexerLoss, Target
from ..dtypes import FLOAT32

LEAST = np.float32(1e-10)  # of a sum that is divided by, and of what a logarithm is taken of


@np.errstate(all="ignore")
def attention_target(a: Target) -> None:
    """Attention summed over the heads; see `cupy_mla.attention_target`."""
    a.out[...] = 0
    for i in range(len(a.q)):
        places = _places(a.indices[i], None if a.length is None else a.length[i], len(a.kv))
        if len(places):
            q, rows, lse = a.q[i].astype(FLOAT32), a.kv[a.indices[i, places]].astype(FLOAT32), a.lse[i]
            p = np.exp(np.float32(a.sm_scale) * (q @ rows.T) - lse[:, None])
            if a.sink is not None:
                p = p / (1 + np.exp(a.sink - lse))[:, None]
            a.out[i, places] = p.sum(axis=0)


@np.errstate(all="ignore")
def indexer_loss(a: IndexerLoss) -> None:
    """The loss and its gradients; see `cupy_mla.indexer_loss`."""
    supports = [
        _places(a.indices[i], None if a.length is None else a.length[i], len(a.k_index))
        if a.counted is None or a.counted[i]
        else np.zeros(0, np.int64)
        for i in range(len(a.q_index))
    ]
    g = a.loss_coeff if a.per_token else a.loss_coeff / max(sum(len(places) > 0 for places in supports), 1)
    loss = np.float32(0)
    dk = np.zeros(a.k_index.shape, FLOAT32)
    if a.accumulate:
        dk += a.dk_index
    for i, places in enumerate(supports):
        if a.gradients:
            a.dq_index[i], a.dw[i] = 0, 0
        if len(places) == 0:
            continue
        entries = a.indices[i, places]
        q, rows = a.q_index[i].astype(FLOAT32), a.k_index[entries].astype(FLOAT32)
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


def _divergence(a: IndexerLoss, z: np.ndarray, i: int, places: np.ndarray) -> tuple[np.float32, np.ndarray, np.ndarray]:
    """KL of a query, its derivative by the scores, and z."""
    scores = a.w[i] @ (np.maximum(z, 0) if a.relu else z)
    scores -= scores.max()
    log_pred = scores - np.log(np.exp(scores).sum())
    target = a.target[i, places]
    target = target / np.maximum(target.sum(), LEAST)
    kl = (target * (np.log(np.maximum(target, LEAST)) - log_pred)).sum()
    return kl, np.exp(log_pred) - target, z


def _places(entries: np.ndarray, length: int | None, rows: int) -> np.ndarray:
    """Where in a query's list valid entries stand."""
    if length is not None:
        entries = entries[: max(int(length), 0)]
    return np.flatnonzero((entries >= 0) & (entries < rows))
