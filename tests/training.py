"""Inputs of what the indexer learns from, and checks that make a call over a kind of array and compare it with the
oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

import cupy_mla

from . import oracle_training as oracle
from .backward import bits
from .cases import Output, check_result, entries, poisoned_outputs, some
from .kinds import BF16, NumPy, gapped
from .oracle import assert_close_to_sum, cosine_difference
from .oracle_backward import Inputs
from .oracle_training import Loss

FLOAT32 = np.dtype(np.float32)
GRADIENTS = ("dq_index", "dk_index", "dw")


def inputs(rng: np.random.Generator, tokens: int, heads: int, keys: int, topk: int, **more: Any) -> Loss:
    """Lists over a part of the keys, with entries that name none and some twice; all other keys are NaN."""
    live = some(rng, keys)
    q, k = (rng.standard_normal(shape, np.float32).astype(BF16) for shape in ((tokens, heads, 128), (keys, 128)))
    k[np.setdiff1d(np.arange(keys), live)] = np.nan
    w = (rng.standard_normal((tokens, heads)) * heads**-0.5 / 8).astype(np.float32)
    target = rng.exponential(size=(tokens, topk)).astype(np.float32) ** 3
    lists = entries(rng, (tokens, topk), live, keys, 0.2)
    return Loss(q, k, w, target, lists, **more)


def with_everything(rng: np.random.Generator, a: Loss) -> Loss:
    """The same with lists of all lengths, tokens that do not count and hold NaN, and strided arrays."""
    tokens, topk = a.indices.shape
    length = rng.integers(-1, topk + 3, tokens, dtype=np.int32)
    length[:2] = (0, topk)[:tokens]
    counted = rng.random(tokens) < 0.8
    counted[1:3] = (True, False)[: max(tokens - 1, 0)]
    for array in (a.q, a.w, a.target):
        array[~counted] = np.nan
    return a._replace(
        q=gapped(a.q, 1, 2, 8), k=gapped(a.k, 0, 8), w=gapped(a.w, 0, 3), target=gapped(a.target, 1, 5),
        length=length, counted=counted, coeff=0.7,
    )  # fmt: skip


def run(kind: NumPy, a: Loss, **more: Any) -> list[Any]:
    """Results of `indexer_loss` over a kind of array."""
    q, k, w, target, lists = (kind.put(x) for x in (a.q, a.k, a.w, a.target, a.indices[:, None]))
    with poisoned_outputs():
        return [
            *cupy_mla.indexer_loss(
                q, k, w, target, lists, topk_length=kind.put(a.length), loss_coeff=a.coeff,
                counted=kind.put(a.counted), per_token=a.per_token, relu=a.relu, **more,
            )
        ]  # fmt: skip


def check(kind: NumPy, a: Loss, dtype: np.dtype = BF16, gaps: tuple[int, ...] | None = None, **more: Any) -> None:
    """Make a call, with given strided results where there are `gaps`, and compare it with the oracle."""
    outputs: dict[str, Output] = {}
    if gaps is not None:
        shapes = {"dq_index": a.q.shape, "dk_index": a.k.shape, "dw": a.w.shape}
        for name, shape in shapes.items():
            of = FLOAT32 if name == "dw" else dtype
            outputs[name] = Output(kind, shape, gaps[-len(shape) :], of)
    given = {name: output.array for name, output in outputs.items()} or {"gradient_dtype": dtype.name}
    loss, *got = run(kind, a, **given, **more)
    for output in outputs.values():
        output.check_gaps()
    check_loss(kind, loss, a)
    wanted = oracle.gradients(a)
    for name, array in zip(GRADIENTS, got, strict=True):
        values = check_result(kind, array, FLOAT32 if name == "dw" else dtype)
        assert_close_to_sum(values, wanted[name].value, wanted[name].squares, 1e-5, name)
    listed = {int(e) for i in range(len(a.q)) for e in a.indices[i, a.support(i)]}
    unlisted = [r for r in range(len(a.k)) if r not in listed]
    assert not kind.take(got[1])[unlisted].any(), "a key that no list names has a gradient"


def check_loss(kind: NumPy, got: Any, a: Loss) -> None:
    """Within 1e-5 of what is summed up."""
    value = check_result(kind, got, FLOAT32)
    parts = [oracle.token(a, i) for i in range(len(a.q)) if len(a.support(i))]
    size = sum(np.abs(t.p * (np.log(np.maximum(t.p, 1e-10)) - t.log_pred)).sum() for t in parts)
    assert abs(float(value) - oracle.loss(a)) <= 1e-5 * abs(a.coeff) * size / a.divisor()


def check_bits_whatever(kind: NumPy, a: Loss, workspaces: tuple[int, ...]) -> None:
    """On a GPU neither another run, the workspace, nor the order of a list with its target changes a bit."""
    want = bits(kind, run(kind, a))
    for most in workspaces:
        assert bits(kind, run(kind, a, max_workspace_bytes=most)) == want, most
    turned = a._replace(indices=a.indices[:, ::-1].copy(), target=a.target[:, ::-1].copy())
    twice = any(len(np.unique(a.indices[i, a.support(i)])) < len(a.support(i)) for i in range(len(a.q)))
    assert twice or bits(kind, run(kind, turned)) == want


def check_target(kind: NumPy, a: Inputs, gap: int | None = None) -> np.ndarray:
    """`attention_target` of lse in float64, given and strided where there is a gap."""
    _, _, lse = cupy_mla.sparse_prefill(a.q, a.kv, a.indices, a.scale, topk_length=a.length)
    want = np.zeros((len(a.q), a.indices.shape[-1]))
    for i in range(len(a.q)):
        length = want.shape[1] if a.length is None else max(int(a.length[i]), 0)
        places = [j for j, e in enumerate(a.indices[i, 0]) if j < length and 0 <= e < len(a.kv)]
        if places:
            want[i, places] = oracle.target(a.q[i], a.kv[a.indices[i, 0, places], 0], lse[i], a.scale, a.sink)
    output = None if gap is None else Output(kind, want.shape, (0, gap), FLOAT32)
    arrays = [kind.put(x) for x in (a.q, a.kv, a.indices, lse)]
    with poisoned_outputs():
        got = cupy_mla.attention_target(
            *arrays, a.scale, attn_sink=kind.put(a.sink), topk_length=kind.put(a.length),
            **({} if output is None else {"out": output.array}),
        )  # fmt: skip
    if output is not None:
        output.check_gaps()
    values = check_result(kind, got, FLOAT32).astype(np.float64)
    assert not values[want == 0].any()
    assert (np.abs(values - want) <= 2e-3 * want + 1e-6).all()
    assert cosine_difference(values, want) < 1e-6
    return values
