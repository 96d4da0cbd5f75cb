"""Inputs of the backward of sparse attention, and a check that makes a call over a kind of array and compares it with
the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cupy_mla

from . import oracle_backward
from .cases import Output, check_result, entries, flat_rows, normal, poisoned_outputs, some
from .kinds import BF16, NumPy, gapped
from .oracle_backward import Inputs, assert_gradient

FLOAT32 = np.dtype(np.float32)


def inputs(
    rng: np.random.Generator, s_q: int, h_q: int, d_qk: int, s_kv: int, topk: int, *, invalid: float = 0.2,
    size: float = 10.0, row_gap: int = 0,
) -> Inputs:  # fmt: skip
    """Lists over a part of the rows, all others NaN; queries of this size, for rows of size 0.1."""
    live = some(rng, s_kv)
    q = (size * rng.standard_normal((s_q, h_q, d_qk), np.float32)).astype(BF16)
    kv, dout = flat_rows(rng, s_kv, d_qk, live, row_gap), normal(rng, s_q, h_q, 512)
    return Inputs(q, kv, entries(rng, (s_q, 1, topk), live, s_kv, invalid), d_qk**-0.5, dout)


def forward(a: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of `sparse_prefill` in NumPy."""
    out, _, lse = cupy_mla.sparse_prefill(
        a.q, a.kv, a.indices, a.scale, attn_sink=a.sink, topk_length=a.length
    )  # fmt: skip
    return out, lse


def run(kind: NumPy, a: Inputs, results: tuple[np.ndarray, np.ndarray] | None = None, **more: Any) -> list[Any]:
    """Results of `sparse_prefill_backward` over a kind of array, of what the forward returned."""
    out, lse = forward(a) if results is None else results
    arrays = (kind.put(x) for x in (a.q, a.kv, a.indices, out, lse, a.dout))
    with poisoned_outputs():
        return [
            *cupy_mla.sparse_prefill_backward(
                *arrays, a.scale, attn_sink=kind.put(a.sink), topk_length=kind.put(a.length),
                d_lse=kind.put(a.d_lse), **more,
            )
        ]  # fmt: skip


def bits(kind: NumPy, results: list[Any]) -> list[bytes]:
    """Of results, to compare them."""
    return [kind.take(x).tobytes() for x in results if x is not None]


def check(
    kind: NumPy, a: Inputs, gaps: tuple[int, ...] | None = None, dtype: np.dtype = BF16, peaked: bool = False,
    **more: Any,
) -> list[np.ndarray]:  # fmt: skip
    """Make a call, with given strided results where there are `gaps`, and compare it with the oracle."""
    results = out, lse = forward(a)
    given = {"dq_dtype": dtype.name, "dkv_dtype": dtype.name} if gaps is None else {}
    outputs = {}
    if gaps is not None:
        outputs = {"dq": Output(kind, a.q.shape, gaps, dtype), "dkv": Output(kind, a.kv.shape, gaps, dtype)}
        given = {name: output.array for name, output in outputs.items()}
    got = run(kind, a, results, **given, **more)
    for output in outputs.values():
        output.check_gaps()
    dq, dkv = (check_result(kind, x, dtype) for x in got[:2])
    wanted = oracle_backward.backward(a, out, lse)
    names = ("peaked", "peaked") if peaked else ("dq", f"dkv {dtype.name}")
    assert_gradient(dq, wanted[0], names[0])
    assert_gradient(dkv[:, 0], wanted[1], names[1])
    unlisted = np.setdiff1d(np.arange(len(a.kv)), np.concatenate([a.entries(i) for i in range(len(a.q))]))
    assert not dkv[unlisted].any(), "a row that no list names has a gradient"
    if a.sink is None:
        assert got[2] is None
        return [dq, dkv]
    d_sink = check_result(kind, got[2], FLOAT32)
    assert_gradient(d_sink, wanted[2], "d_sink")
    return [dq, dkv, d_sink]


def derivative(loss: Callable[[float], float], step: float) -> float:
    """Of a function at 0, by differences to the fourth order."""
    near, far = (loss(n * step) - loss(-n * step) for n in (1, 2))
    return (8 * near - far) / (12 * step)


def with_everything(rng: np.random.Generator, a: Inputs, sinks: np.ndarray) -> Inputs:
    """The same with sinks, lists of all lengths, a gradient of lse, and strided arrays."""
    s_q, h_q, _ = a.q.shape
    length = rng.integers(-1, a.indices.shape[-1] + 3, s_q, dtype=np.int32)
    length[:2] = (0, a.indices.shape[-1])[:s_q]
    return a._replace(
        q=gapped(a.q, 1, 2, 8), dout=gapped(a.dout, 0, 1, 8), sink=sinks, length=length,
        d_lse=gapped(rng.standard_normal((s_q, h_q), np.float32), 0, 3),
    )  # fmt: skip


def check_same_bits(kind: NumPy, a: Inputs, times: int = 3) -> None:
    """So many calls give the same bits."""
    results = forward(a)
    want = bits(kind, run(kind, a, results))
    assert all(bits(kind, run(kind, a, results)) == want for _ in range(times - 1))


def check_bits_whatever(kind: NumPy, a: Inputs, workspaces: tuple[int, ...]) -> None:
    """On a GPU, neither the order of lists nor the workspace changes a bit."""
    results = forward(a)
    want = bits(kind, run(kind, a, results))
    for most in workspaces:
        assert bits(kind, run(kind, a, results, max_workspace_bytes=most)) == want, most
    turned = a._replace(indices=np.ascontiguousarray(a.indices[..., ::-1]))
    assert bits(kind, run(kind, turned, results)) == want
