"""Inputs of what the indexer learns from, and checks that make a call over a kind of array and compare it with the
oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import cupy_mla

from . import oracle_training as oracle
from .backward import bits
from .cases import Output, check_result, entries, poisoned_outputs, some
from .kinds import BF16, NumPy, gapped
from .oracle import assert_close_to_sum, cosine_difference
from .oracle_backward import Inputs, Sum
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


def over_ranges(rng: np.random.Generator, a: Loss) -> Loss:
    """The same over ranges of keys, some of them empty, some beyond the keys; all keys that no range has are NaN."""
    tokens, keys = len(a.q), len(a.k)
    ranges = np.stack([rng.integers(-2, keys, tokens), rng.integers(0, keys + 3, tokens)], 1).astype(np.int32)
    ranges[:1], ranges[1:2] = (0, keys // 2), (keys // 3, keys + 2)
    k = rng.standard_normal(a.k.shape, np.float32).astype(BF16)
    a = a._replace(ranges=ranges, indices=None, length=None, k=k, target=rng.random((tokens, keys), np.float32))
    for i in range(tokens):
        a.target[i, np.setdiff1d(np.arange(keys), a.support(i))] = np.nan
    k[np.setdiff1d(np.arange(keys), np.concatenate([a.support(i) for i in range(tokens)]))] = np.nan
    return a


def of_all_sizes(rng: np.random.Generator, a: Loss) -> Loss:
    """The same with queries and keys whose scales are far apart, and a key too small for a scale of its own."""
    q, k = (x.astype(np.float32) * np.exp2(rng.uniform(-3, 3, (*x.shape[:-1], 1))) for x in (a.q, a.k))
    k[a.entries(0)[:1]] *= 1e-5
    return a._replace(q=(q / 8).astype(BF16), k=k.astype(BF16))


def clear_kinks(a: Loss) -> None:
    """Make keys zeros whose product with a query float32 may take to be above 0 or below: relu's gradient is 0 or 1."""
    for i in range(len(a.q) if a.relu else 0):
        q, keys = a.scored(i)
        unsure = np.abs(q @ keys.T) <= 2.0**-18 * (np.abs(q) @ np.abs(keys).T)
        a.k[a.entries(i)[unsure.any(axis=0)]] = 0


def run(kind: NumPy, a: Loss, **more: Any) -> list[Any]:
    """Results of `indexer_loss` or `dense_indexer_loss` over a kind of array."""
    arrays = [kind.put(x) for x in (a.q, a.k, a.w, a.target)]
    of = {"loss_coeff": a.coeff, "counted": kind.put(a.counted), "per_token": a.per_token, "relu": a.relu, **more}
    if a.scale_format is not None:
        of |= {"quantized": True, "scale_format": a.scale_format}
    with poisoned_outputs():
        if a.ranges is not None:
            starts, ends = (kind.put(np.ascontiguousarray(x)) for x in a.ranges.T)
            return [*cupy_mla.dense_indexer_loss(*arrays, starts, ends, **of)]
        lists, length = kind.put(a.indices[:, None]), kind.put(a.length)
        return [*cupy_mla.indexer_loss(*arrays, lists, topk_length=length, **of)]


def check(kind: NumPy, a: Loss, dtype: np.dtype = BF16, gaps: tuple[int, ...] | None = None, **more: Any) -> None:
    """Make a call, with given strided results where there are `gaps`, and compare it with the oracle."""
    clear_kinks(a)
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
        check_gradient(values, wanted[name], name)
    listed = {int(e) for i in range(len(a.q)) for e in a.entries(i)}
    unlisted = [r for r in range(len(a.k)) if r not in listed]
    assert not kind.take(got[1])[unlisted].any(), "a key that no list names has a gradient"


def check_gradient(got: np.ndarray, want: Sum, name: str) -> None:
    """One of GRADIENTS. Rounded summands may leave more than the cosine difference allows, where they cancel: heads of
    a dw of few values, or a key that one list names several times, with targets above and below what is predicted."""
    assert_close_to_sum(got, want.value, want.squares, 1e-5, name, left_by_rounding(want.squares))


# The root mean square of the relative error of rounding to bfloat16. A value is m times a power of two, 1 <= m < 2, and
# log(m) is uniform; its error is uniform up to 2**-8 of that power: 2**-16 / 3 is the mean square, and 3 / (8 log 2)
# that of 1 / m.
BF16_ERROR = 2.0**-8 / math.sqrt(8 * math.log(2))


def left_by_rounding(squares: np.ndarray) -> float:
    """The norm of the error that rounding each dI to bfloat16 leaves, except by a chance of about one in a million.

    Args:
        squares: sums of the squares of the summands, [tokens, ...] of dw and dq_index, [keys, 128] of dk_index.
    """
    # What belongs to a token, or to a key, shares dI: its errors may all lie in one direction. So 5 standard deviations
    # of one such, and less of more.
    of_rows = squares.reshape(len(squares), -1).sum(axis=1)
    return BF16_ERROR * float(np.sqrt(of_rows.sum()) + 4 * np.sqrt(of_rows.max(initial=0.0)))


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
    if a.indices is None:
        return
    once = a.indices.copy()
    for entries_ in once:
        again = np.setdiff1d(np.arange(len(entries_)), np.unique(entries_, return_index=True)[1])
        entries_[again] = -1
    a = a._replace(indices=once)
    turned = a._replace(indices=once[:, ::-1].copy(), target=a.target[:, ::-1].copy())
    assert bits(kind, run(kind, turned)) == bits(kind, run(kind, a))


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


def check_dense(kind: NumPy, rng: np.random.Generator, h_q: int, d_qk: int, gap: int = 0) -> None:
    """`dense_lse` and `dense_attention_target` over ranges, some of them empty; rows that no range has are NaN."""
    tokens, s_kv = 5, 300
    q = (10 * rng.standard_normal((tokens, h_q, d_qk), np.float32)).astype(BF16)
    kv = gapped((0.1 * rng.standard_normal((s_kv, 1, d_qk), np.float32)).astype(BF16), 0, 0, gap)
    kv[280:] = np.nan
    starts, ends = np.array([0, -3, -4, 60, 270], np.int32), np.array([280, 1, 0, 20, 275], np.int32)
    sink, scale = rng.standard_normal(h_q).astype(np.float32), d_qk**-0.5
    seen = [np.arange(max(a, 0), max(a, b)) for a, b in zip(starts, ends, strict=True)]
    lse = np.stack(
        [oracle.lse(q[i], kv[seen[i], 0], scale) if len(seen[i]) else np.full(h_q, np.inf) for i in range(5)]
    )
    want = np.zeros((tokens, s_kv))
    for i, rows in enumerate(seen):
        if len(rows):
            want[i, rows] = oracle.target(q[i], kv[rows, 0], lse[i].astype(np.float32), scale, sink)
    arrays = [kind.put(x) for x in (q, kv)]
    outputs = [Output(kind, shape, (0, gap), FLOAT32) for shape in (lse.shape, want.shape)]
    ranges, given = [kind.put(starts), kind.put(ends)], [{"out": o.array} if gap else {} for o in outputs]
    with poisoned_outputs():
        got = cupy_mla.dense_lse(*arrays, scale, *ranges, **given[0])
        target = cupy_mla.dense_attention_target(
            *arrays, kind.put(lse.astype(np.float32)), scale, *ranges, attn_sink=kind.put(sink), **given[1]
        )  # fmt: skip
    for output in outputs if gap else []:
        output.check_gaps()
    np.testing.assert_allclose(check_result(kind, got, FLOAT32), lse, rtol=1e-5, atol=1e-5)
    values = check_result(kind, target, FLOAT32).astype(np.float64)
    assert not values[want == 0].any()
    assert (np.abs(values - want) <= 2e-3 * want + 1e-6).all()
    assert cosine_difference(values, want) < 1e-6
