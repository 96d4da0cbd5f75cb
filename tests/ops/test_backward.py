"""`sparse_prefill_backward` against the oracle, over every kind of array; and the oracle against finite differences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupy_mla
from cupy_mla.arguments import PrefillBackward
from cupy_mla.reference import backward as reference

from .. import backward, oracle_backward
from ..backward import (
    FLOAT32,
    bits,
    check,
    check_bits_whatever,
    check_same_bits,
    derivative,
    inputs,
    with_everything,
)
from ..cases import sinks
from ..kinds import BF16, NumPy, make
from ..oracle_backward import Inputs

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

INF = np.float32(np.inf)


# --- the oracle -----------------------------------------------------------------------------------------------


def small(rng: np.random.Generator) -> Inputs:
    """float64 inputs whose lists have duplicates, invalid entries, and no entry at all; queries see lengths."""
    a = inputs(rng, 4, 3, 576, 9, 12, size=1.0)
    a = with_everything(rng, a, np.array([0.5, -np.inf, 2.0], np.float32))
    kv = np.nan_to_num(a.kv.astype(np.float64))
    return a._replace(q=a.q.astype(np.float64), kv=kv, dout=a.dout.astype(np.float64), scale=0.2)


def test_finite_differences(rng):
    """The closed form is the derivative of the forward."""
    a = small(rng)
    gradients = {"q": 0, "kv": 1, "sink": 2}
    found = [g.value for g in oracle_backward.backward(a)]
    for name, number in gradients.items():
        array = np.asarray(getattr(a, name), np.float64)
        for _ in range(64 if name != "sink" else 3):
            at = tuple(int(rng.integers(n)) for n in array.shape)
            if not np.isfinite(array[at]):
                assert found[number][at] == 0
                continue

            def loss(by: float, name: str = name, array: np.ndarray = array, at: tuple[int, ...] = at) -> float:
                moved = array.copy()
                moved[at] += by
                return oracle_backward.loss(a._replace(**{name: moved}))

            got = found[number].reshape(array.shape)[at]
            assert derivative(loss, 1e-3) == pytest.approx(got, rel=1e-8, abs=1e-10), f"{name}{at}"


def test_gradcheck(rng, monkeypatch):
    """torch's own check of the NumPy backward, with its numbers in float64: it is the derivative of the forward."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(reference, "np", SimpleNamespace(**{**vars(np), "float32": np.float64}))
    a = small(rng)
    lists = a.indices.copy()
    lists[:, 0, 0] = 3  # a token without a row has no finite lse
    a = a._replace(indices=lists, length=np.maximum(a.length, 1))

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, kv: Any, sink: Any) -> tuple[Any, Any]:
            of = a._replace(q=q.numpy(), kv=kv.numpy(), sink=sink.numpy())
            outs, lses = zip(*(oracle_backward.forward(of, i) for i in range(len(a.q))), strict=True)
            results = torch.from_numpy(np.stack(outs)), torch.from_numpy(np.stack(lses))
            ctx.save_for_backward(q, kv, sink, *results)
            return results

        @staticmethod
        def backward(ctx: Any, dout: Any, d_lse: Any) -> tuple[Any, ...]:
            q, kv, sink, out, lse, dout, d_lse = (x.numpy() for x in (*ctx.saved_tensors, dout, d_lse))
            results = np.full_like(q, np.nan), np.full_like(kv, np.nan), np.full_like(sink, np.nan)
            reference.sparse_prefill_backward(
                PrefillBackward(
                    q, kv[:, 0], a.indices[:, 0], out, lse, dout, a.scale, sink, a.length, d_lse, False, 1, *results
                )
            )
            return tuple(map(torch.from_numpy, results))

    sink = np.array([0.5, -1.0, 2.0])
    given = [torch.from_numpy(np.ascontiguousarray(x)).requires_grad_() for x in (a.q, a.kv, sink)]
    assert torch.autograd.gradcheck(Attention.apply, given, rtol=1e-6, atol=1e-8, fast_mode=True)


# --- results --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize(
    ("s_q", "h_q", "topk", "s_kv"),
    [(1, 1, 1, 1), (3, 8, 63, 40), (2, 16, 100, 300), (5, 40, 64, 17), (3, 64, 130, 77), (2, 128, 200, 500)],
)
def test_sizes(kind, rng, d_qk, s_q, h_q, topk, s_kv):
    check(kind, inputs(rng, s_q, h_q, d_qk, s_kv, topk))


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("h_q", [5, 20])
def test_lists_as_long_as_a_models(kind, rng, h_q):
    """By either kernel of a Hopper GPU."""
    check(kind, inputs(rng, 2, h_q, 576, 3000, 2048))


@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=str)
@pytest.mark.parametrize(("d_qk", "h_q", "gaps"), [(576, 20, (1, 2, 8)), (512, 70, (0, 1, 3)), (576, 64, None)])
def test_everything(kind, rng, d_qk, h_q, gaps, dtype):
    """Sinks of any value, lists of all lengths, duplicates, a gradient of lse, results of both dtypes, any strides."""
    a = with_everything(rng, inputs(rng, 6, h_q, d_qk, 60, 90), sinks(rng, h_q))
    check(kind, a, gaps, dtype)


def test_peaked_lists(kind, rng):
    check(kind, inputs(rng, 4, 32, 576, 200, 128, size=40.0), peaked=True)


def far_from_zero(rng: np.random.Generator, logit: float, h_q: int) -> Inputs:
    a = inputs(rng, 3, h_q, 576, 60, 37)
    a.q[..., -1], a.kv[..., -1] = 16, logit / (16 * a.scale)
    return a


def check_far_from_zero(kind: NumPy, a: Inputs) -> None:
    results = backward.forward(a)
    dq, dkv, _ = (x if x is None else kind.take(x).astype(np.float32) for x in backward.run(kind, a, results))
    assert np.isfinite(dq).all()
    wants = oracle_backward.backward(a, *results)
    for got, want, name in zip((dq, dkv[:, 0]), wants[:2], ("dq", "dkv bfloat16"), strict=True):
        others = oracle_backward.Sum(want.value[..., :-1], want.squares[..., :-1])
        oracle_backward.assert_gradient(got[..., :-1], others, name)


@pytest.mark.parametrize("logit", [-300, 300])
def test_logits_far_from_zero(kind, rng, logit):
    """Weights of what is no row would be infinite, or the others 0, without lse. The last column, which makes logits so
    large, has a gradient that cancels, and is only finite."""
    check_far_from_zero(kind, far_from_zero(rng, logit, 10))


def test_same_lists_and_rows(kind, rng):
    """One row repeated, the first row in every list, and lists that are all the same."""
    a = inputs(rng, 70, 4, 512, 40, 33, invalid=0)
    a.kv[...] = np.nan_to_num(a.kv.astype(np.float32))
    lists = a.indices.copy()
    lists[0] = 7
    lists[1:40, :, 0] = 0
    lists[40:] = lists[40]
    check(kind, a._replace(indices=lists))


def test_no_queries_and_no_rows(kind, rng):
    a = inputs(rng, 2, 4, 576, 5, 3)
    none = a._replace(q=a.q[:0], indices=a.indices[:0], dout=a.dout[:0])
    dq, dkv, _ = backward.run(kind, none)
    assert (dq.shape, not kind.take(dkv).any()) == ((0, 4, 576), True)
    dq, dkv, d_sink = backward.run(kind, a._replace(kv=a.kv[:0], sink=np.zeros(4, np.float32)))
    assert (dkv.shape[0], kind.take(dq).any(), kind.take(d_sink).any()) == (0, False, False)


def test_nothing_reaches_from_queries_without_rows(kind, rng):
    """NaN everywhere in such a query, and in every row that nobody lists."""
    check_queries_without_rows(kind, rng, 17)


def check_queries_without_rows(kind: NumPy, rng: np.random.Generator, h_q: int) -> None:
    a = inputs(rng, 4, h_q, 576, 50, 40)._replace(sink=np.zeros(h_q, np.float32), d_lse=np.ones((4, h_q), np.float32))
    lists = a.indices.copy()
    lists[1], lists[2] = -1, len(a.kv)
    a = a._replace(indices=lists, length=np.array([40, 40, 40, 0], np.int32))
    results = backward.forward(a)
    want = bits(kind, backward.run(kind, a, results))
    for array in (a.q, a.dout, a.d_lse, *results):
        array[1:] = np.nan
    results[1][1:] = np.inf
    assert bits(kind, backward.run(kind, a, results)) == want
    assert not kind.take(backward.run(kind, a, results)[0])[1:].any()


def test_nan_stays_with_its_query(kind, rng):
    """It reaches the query's gradient, and those of the rows that it lists."""
    check_nan(kind, rng, 8)


def check_nan(kind: NumPy, rng: np.random.Generator, h_q: int) -> None:
    a = inputs(rng, 3, h_q, 512, 60, 20, invalid=0)
    dout = a.dout.copy()
    dout[1, 5, 100] = np.nan
    results = backward.forward(a)
    dq, dkv = (
        kind.take(x).astype(np.float32) for x in backward.run(kind, a._replace(dout=dout), results)[:2]
    )  # fmt: skip
    want_dq, want_dkv, _ = oracle_backward.backward(a, *results)
    if not kind.on_gpu or h_q > 32:  # no groups
        without = kind.take(backward.run(kind, a, results)[0]).astype(np.float32)
        assert dq[[0, 2]].tobytes() == without[[0, 2]].tobytes()
    assert np.isnan(dq[1, 5]).all()
    dq[1, 5] = want_dq.value[1, 5]
    oracle_backward.assert_gradient(dq, want_dq, "dq")
    listed = np.unique(a.entries(1))
    assert np.isnan(dkv[listed, 0, 100]).all()
    dkv[listed, 0] = want_dkv.value[listed]
    oracle_backward.assert_gradient(dkv[:, 0], want_dkv, "dkv bfloat16")


@pytest.mark.parametrize("sink", [INF, -INF, np.float32(2.4e38), np.float32(-2.4e38)])
def test_extreme_sinks(kind, rng, sink):
    check_sink(kind, rng, sink, 5)


def check_sink(kind: NumPy, rng: np.random.Generator, sink: np.float32, h_q: int) -> None:
    """Of all heads; huge ones leave nothing, others change nothing, but what a gradient of lse adds."""
    a = inputs(rng, 3, h_q, 576, 30, 20)
    plain = backward.run(kind, a)
    got = [kind.take(x) for x in backward.run(kind, a._replace(sink=np.full(h_q, sink)))]
    if sink > 0:
        assert not any(x.any() for x in got)
    else:
        assert [x.tobytes() for x in got[:2]] == bits(kind, plain)
        assert not got[2].any()
    d_lse = rng.standard_normal((3, h_q), np.float32)
    check(kind, a._replace(sink=np.full(h_q, sink), d_lse=d_lse))


# --- the same bits ----------------------------------------------------------------------------------------------


def test_same_bits(kind, rng):
    check_same_bits(kind, inputs(rng, 9, 70, 576, 80, 50)._replace(sink=sinks(rng, 70)))


@pytest.mark.gpu
@pytest.mark.parametrize("most", [2 << 30, 20 << 20], ids=["one chunk", "several"])
@pytest.mark.parametrize(("h_q", "d_qk"), [(16, 576), (64, 576), (128, 512)])
def test_same_bits_in_a_hundred_runs(rng, h_q, d_qk, most):
    kind = make("torch_cuda")
    a = inputs(rng, 200, h_q, d_qk, 400, 300)
    q, kv, lists, dout, sink = (kind.put(x) for x in (a.q, a.kv, a.indices, a.dout, sinks(rng, h_q)))
    out, _, lse = cupy_mla.sparse_prefill(q, kv, lists, a.scale, attn_sink=sink)
    kind.check_bits_on_any_stream(
        lambda: cupy_mla.sparse_prefill_backward(
            q, kv, lists, out, lse, dout, a.scale, attn_sink=sink, max_workspace_bytes=most
        )
    )


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch_cuda"])
def test_bits_do_not_depend_on_lists_and_workspace(rng, library):
    a = inputs(rng, 300, 70, 576, 700, 200)._replace(sink=sinks(rng, 70))
    check_bits_whatever(make(library), a, (1, 50 << 20, 100 << 20))


def test_accumulate(kind, rng):
    """Two halves of the queries, to what is there: one call of all within rounding."""
    a = inputs(rng, 15, 12, 576, 40, 30)
    out, lse = backward.forward(a)
    start = rng.standard_normal(a.kv.shape, np.float32)
    dkv = kind.put(start)
    for part in (slice(8), slice(8, None)):
        of_part = a._replace(q=a.q[part], indices=a.indices[part], dout=a.dout[part])
        given = backward.run(kind, of_part, (out[part], lse[part]), dkv=dkv, accumulate=True)
        assert given[1] is dkv
    whole = kind.take(backward.run(kind, a, (out, lse), dkv_dtype="float32")[1])
    np.testing.assert_allclose(kind.take(dkv) - start, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("h_q", [7, 12])
def test_accumulated_bits(kind, rng, h_q):
    """Parts in their order that begin at multiples of 8 tokens, from zero: those of one call."""
    a = inputs(rng, 27, h_q, 576, 40, 30)
    out, lse = backward.forward(a)
    dkv = kind.put(np.zeros(a.kv.shape, np.float32))
    for part in (slice(16), slice(16, 24), slice(24, None)):
        of_part = a._replace(q=a.q[part], indices=a.indices[part], dout=a.dout[part])
        backward.run(kind, of_part, (out[part], lse[part]), dkv=dkv, accumulate=True)
    whole = kind.take(backward.run(kind, a, (out, lse), dkv_dtype="float32")[1])
    assert kind.take(dkv).tobytes() == whole.tobytes()


def test_numpy_results_are_float32_sums(rng):
    """Float32 results of NumPy are closer to the oracle than bfloat16 can hold."""
    a = inputs(rng, 3, 8, 576, 50, 30)
    out, lse = backward.forward(a)
    dq, dkv, _ = backward.run(NumPy(), a, (out, lse), dq_dtype="float32", dkv_dtype="float32")
    for got, want in zip((dq, dkv[:, 0]), oracle_backward.backward(a, out, lse)[:2], strict=True):
        assert np.linalg.norm(got - want.value) < 1e-5 * np.linalg.norm(want.value)
