"""The backward of sparse attention in plain NumPy, one query at a time, in float32."""

from __future__ import annotations

import numpy as np

from ..arguments import PrefillBackward
from ..layouts import D_V
from .attention import valid_entries


@np.errstate(all="ignore")
def sparse_prefill_backward(a: PrefillBackward) -> None:
    """Gradients of attention over flat rows; see `cupy_mla.sparse_prefill_backward`."""
    s_kv = len(a.kv)
    dkv = a.dkv[:, 0].astype(np.float32) if a.accumulate else np.zeros(a.kv.shape, np.float32)
    d_sink = np.zeros(a.q.shape[1], np.float32)
    for i in range(len(a.q)):
        entries = valid_entries(a.indices, i, a.length, i, s_kv)
        if len(entries) == 0:
            a.dq[i] = 0
            continue
        q, out, dout, rows = (x.astype(np.float32) for x in (a.q[i], a.out[i], a.dout[i], a.kv[entries]))
        lse, delta = a.lse[i], (out * dout).sum(axis=1)
        sigma = np.ones_like(lse) if a.sink is None else 1 / (1 + np.exp(a.sink - lse))
        if a.sink is not None:
            d_sink -= delta / (1 + np.exp(lse - a.sink))
        e = (0 if a.d_lse is None else a.d_lse[i]) - sigma * delta
        p = np.exp(np.float32(a.sm_scale) * (q @ rows.T) - lse[:, None])
        ds = np.float32(a.sm_scale) * p * (sigma[:, None] * (dout @ rows[:, :D_V].T) + e[:, None])
        a.dq[i] = ds @ rows
        of_rows = ds.T @ q
        of_rows[:, :D_V] += (sigma[:, None] * p).T @ dout
        np.add.at(dkv, entries, of_rows)
    a.dkv[:, 0] = dkv
    if a.d_sink is not None:
        a.d_sink[...] = d_sink
