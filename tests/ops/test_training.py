"""`attention_target` and `indexer_loss` against the oracle, over every kind of array; and the oracle against finite
differences."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_mla
from cupy_mla.typing import ScaleFormat

from .. import backward
from .. import oracle_training as oracle
from ..backward import FLOAT32, bits, derivative
from ..cases import sinks
from ..kinds import BF16, NumPy, make
from ..training import (
    GRADIENTS,
    check,
    check_bits_whatever,
    check_dense,
    check_gradient,
    check_loss,
    check_target,
    inputs,
    of_all_sizes,
    over_ranges,
    run,
    with_everything,
)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.mark.parametrize(("relu", "per_token"), [(True, False), (False, True)])
def test_finite_differences(rng, relu, per_token):
    """The closed form is the derivative of the loss; lists have duplicates, invalid entries, and no entry at all."""
    a = with_everything(rng, inputs(rng, 5, 3, 9, 12, relu=relu, per_token=per_token))
    k = rng.standard_normal(a.k.shape)
    while nearest_kink(a._replace(k=k)) < 0.015:  # a difference moves a product by less
        k = rng.standard_normal(a.k.shape)
    a = a._replace(q=a.q.astype(np.float64), k=k, w=a.w.astype(np.float64))
    wanted = oracle.gradients(a)
    for field, name, step in zip(("q", "k", "w"), GRADIENTS, (1e-3, 1e-3, 1e-5), strict=True):
        array = getattr(a, field)
        for _ in range(48):
            at = tuple(int(rng.integers(n)) for n in array.shape)

            def loss(by: float, field: str = field, array: np.ndarray = array, at: tuple[int, ...] = at) -> float:
                moved = array.copy()
                moved[at] += by
                return oracle.loss(a._replace(**{field: moved}))

            assert derivative(loss, step) == pytest.approx(wanted[name].value[at], rel=1e-8, abs=1e-9), name


def nearest_kink(a: oracle.Loss) -> float:
    """The smallest product of a query with a key of its list: at 0 relu has no derivative."""
    products = [np.abs(q @ keys.T) for q, keys in map(a.scored, range(len(a.q))) if len(keys)]
    return min(product.min() for product in products)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("heads", [1, 20])
@pytest.mark.parametrize("relu", [True, False])
def test_check_allows_rounding(rng, heads, relu, name):
    """Each dI is rounded to bfloat16; those of a key that a list names often nearly cancel."""
    a = inputs(rng, 1, heads, 2, 12, relu=relu)._replace(k=rng.standard_normal((2, 128)).astype(BF16))
    a.indices[:] = 0
    a.indices[0, 0] = 1
    share = 0.99 * oracle.token(a, 0).pred[0]
    a.target[0, 0] = share / (1 - share) * a.target[0, 1:].sum()
    check_gradient(oracle.gradients(a, rounded)[name].value, oracle.gradients(a)[name], name)


@pytest.mark.parametrize("fault", ["lost dI", "doubled dI", "one wrong element", "what no element shows"])
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("heads", [1, 20])
@pytest.mark.parametrize("relu", [True, False])
def test_check_finds_faults(rng, heads, relu, name, fault):
    a = with_everything(rng, of_all_sizes(rng, inputs(rng, 5, heads, 60, 90, relu=relu)))
    want, largest = oracle.gradients(a)[name], largest_dI(a, name)

    def changed(i: int, d: np.ndarray) -> np.ndarray:
        d = rounded(i, d)
        if i == largest[0]:
            d[largest[1]] *= 2 if fault == "doubled dI" else 0
        return d

    got = oracle.gradients(a, rounded)[name].value
    check_gradient(got, want, name)
    if "dI" in fault:
        got = oracle.gradients(a, changed)[name].value
    elif fault == "one wrong element":
        got.flat[want.squares.argmax()] += 0.25 * np.sqrt(want.squares.max())
    elif fault == "what no element shows":
        got = want.value + 0.029 * np.sqrt(want.squares) * rng.choice([-1, 1], got.shape)
    with pytest.raises(AssertionError, match="cosine" if fault == "what no element shows" else name):
        check_gradient(got, want, name)


def rounded(i: int, d: np.ndarray) -> np.ndarray:
    """A token's dI as kernels multiply it."""
    return d.astype(BF16)


def largest_dI(a: oracle.Loss, name: str) -> tuple[int, int]:
    """The token, and the place among its entries, whose dI makes the largest part of a gradient."""
    sizes = {}
    for i in (i for i in range(len(a.q)) if len(a.support(i))):
        _, z, p, pred, *_ = oracle.token(a, i)
        q, keys = a.scored(i)
        on = (z > 0) | (not a.relu)
        of = {
            "dq_index": np.linalg.norm(a.w[i][:, None] * on, axis=0) * np.linalg.norm(keys, axis=1),
            "dk_index": np.linalg.norm((a.w[i][:, None] * on).T @ q, axis=1),
            "dw": np.linalg.norm(on * z, axis=0),
        }
        sizes |= {(i, j): size for j, size in enumerate(np.abs(pred - p) * of[name])}
    return max(sizes, key=lambda place: sizes[place])


# --- results --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "heads", "topk", "keys"),
    [(1, 1, 1, 1), (40, 1, 300, 100), (3, 8, 63, 40), (2, 40, 100, 300), (3, 64, 130, 77), (2, 128, 300, 500),
     (2, 20, 2048, 3000)],
)  # fmt: skip
def test_sizes(kind, rng, tokens, heads, topk, keys):
    check(kind, inputs(rng, tokens, heads, keys, topk))


@pytest.mark.parametrize(
    ("heads", "dtype", "gaps", "relu", "per_token"),
    [(20, FLOAT32, (1, 2, 8), True, True), (64, BF16, (0, 1, 3), False, False), (128, FLOAT32, None, True, False)],
)
def test_everything(kind, rng, heads, dtype, gaps, relu, per_token):
    """Lists of all lengths, duplicates, tokens that do not count, no relu, a sum over tokens, dtypes, any strides."""
    a = inputs(rng, 6, heads, 60, 90, relu=relu, per_token=per_token)
    check(kind, with_everything(rng, a), dtype, gaps)


@pytest.mark.parametrize(
    ("heads", "scale_format", "gaps", "relu"),
    [
        (1, "fp32", None, True),
        (20, "ue8m0", (1, 2, 8), True),
        (64, "fp32", None, False),
        (128, "fp32", (0, 1, 3), True),
    ],
)
def test_quantized(kind, rng, heads, scale_format, gaps, relu):
    """Queries and keys in e4m3: gradients are those by what is rounded."""
    a = of_all_sizes(rng, inputs(rng, 5, heads, 60, 90, relu=relu, scale_format=scale_format))
    check(kind, with_everything(rng, a), gaps=gaps)


def check_scores_of_inference(kind: NumPy, rng: np.random.Generator, scale_format: ScaleFormat) -> None:
    """Token by token the quantized loss is that of the logits by which inference chooses; that of bfloat16 differs."""
    tokens, heads, keys = 5, 16, 70
    a = inputs(rng, tokens, heads, keys, keys)
    live = np.sort(a.indices[(a.indices >= 0) & (a.indices < keys)])
    every = np.tile(np.arange(keys, dtype=np.int32), (tokens, 1))
    a = a._replace(indices=np.where(np.isin(every, live), every, -1), w=3 * a.w)
    a = of_all_sizes(rng, a._replace(k=np.nan_to_num(a.k.astype(np.float32)).astype(BF16)))
    q8, w = cupy_mla.quantize_indexer_q(a.q, a.w, scale_format=scale_format)
    cache = np.empty((1, keys, 132), np.uint8)
    cupy_mla.indexer_k_quant_and_cache(a.k, cache, np.arange(keys), scale_format)
    codes, scales = cache.reshape(-1)[: 128 * keys].reshape(keys, 128), cache.reshape(-1)[128 * keys :].view(FLOAT32)
    starts, ends = np.zeros(tokens, np.int32), np.full(tokens, keys, np.int32)
    logits = cupy_mla.indexer_logits(q8, codes, scales, w, starts, ends).astype(np.float64) * (heads * 128) ** 0.5
    apart = []
    for i in range(tokens):
        seen = a.support(i)
        p, scores = a.target[i, seen].astype(np.float64), logits[i, seen] - logits[i, seen].max()
        p /= p.sum()
        want = (p * (np.log(np.maximum(p, 1e-10)) - scores + np.log(np.exp(scores).sum()))).sum()
        of_token = a._replace(counted=np.arange(tokens) == i)
        loss, *_ = run(kind, of_token._replace(scale_format=scale_format), gradients=False)
        assert float(kind.take(loss)) == pytest.approx(want, rel=2e-5)
        apart.append(abs(float(kind.take(run(kind, of_token, gradients=False)[0])) / want - 1))
    assert max(apart) > 2e-4


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_scores_of_inference(kind, rng, scale_format):
    check_scores_of_inference(kind, rng, scale_format)


def check_predictions_that_underflow(kind: NumPy, rng: np.random.Generator) -> None:
    """Scores hundreds apart: the key that attention looks at, of which the indexer thinks nothing, has a gradient."""
    a = inputs(rng, 2, 4, 30, 20)
    a = a._replace(w=400 * np.abs(a.w), k=np.nan_to_num(a.k.astype(np.float32)).astype(BF16))
    lists = np.stack([rng.permutation(30)[:20] for _ in range(2)]).astype(np.int32)
    a = a._replace(indices=lists)
    target = np.zeros_like(a.target)
    for i in range(2):
        pred = oracle.token(a, i).pred
        assert pred.min() < 1e-60
        target[i, pred.argmin()] = 3
    a = a._replace(target=target)
    loss, *got = run(kind, a)
    check_loss(kind, loss, a)
    assert kind.take(loss) > 100
    for array, want in zip(got, oracle.gradients(a).values(), strict=True):
        error = np.abs(kind.take(array).astype(np.float64) - want.value)
        small = 1e-3 * np.abs(want.value).max()  # of what nearly underflows little is known
        assert (error <= 0.02 * np.abs(want.value) + 0.03 * np.sqrt(want.squares) + small).all()
    assert np.abs(kind.take(got[0]).astype(np.float32)).max(axis=(1, 2)).min() > 0.01


def test_predictions_that_underflow(kind, rng):
    check_predictions_that_underflow(kind, rng)


def check_nothing_reaches(kind: NumPy, rng: np.random.Generator, heads: int) -> None:
    """Tokens without entries and those that do not count hold NaN and change no bit; NaN of a token stays with it."""
    a = inputs(rng, 5, heads, 50, 40)
    lists, counted = a.indices.copy(), np.array([True, True, True, True, False])
    lists[1], lists[2] = -1, len(a.k)
    a = a._replace(indices=lists, length=np.array([40, 40, 40, 0, 40], np.int32), counted=counted)
    want = bits(kind, run(kind, a))
    for array in (a.q, a.w, a.target):
        array[1:] = np.nan
    got = run(kind, a)
    assert bits(kind, got) == want
    assert not any(kind.take(got[n])[1:].any() for n in (1, 3))
    b = inputs(rng, 3, heads, 60, 20)
    clean = [kind.take(x) for x in run(kind, b)]
    b.q[1, 0, 7] = np.nan
    loss, dq, dk, dw = (kind.take(x) for x in run(kind, b))
    listed = np.unique(b.indices[1, b.support(1)])
    if len(listed) > 0:
        assert np.isnan(loss)
        assert np.isnan(dw[1]).any()
        assert np.isnan(dk[listed].astype(np.float32)).any()
    for got_, want_, own in ((dq, clean[1], [1]), (dk, clean[2], listed), (dw, clean[3], [1])):
        got_[own] = want_[own]
        assert got_.tobytes() == want_.tobytes()


def test_nothing_reaches_from_what_does_not_count(kind, rng):
    check_nothing_reaches(kind, rng, 17)


def check_no_tokens_and_no_keys(kind: NumPy, rng: np.random.Generator) -> None:
    a = inputs(rng, 2, 4, 5, 3)
    none = a._replace(q=a.q[:0], w=a.w[:0], target=a.target[:0], indices=a.indices[:0])
    loss, dq, dk, _ = run(kind, none)
    assert (float(kind.take(loss)), dq.shape, kind.take(dk).any()) == (0, (0, 4, 128), False)
    loss, dq, dk, dw = run(kind, a._replace(k=a.k[:0]))
    assert (float(kind.take(loss)), dk.shape[0]) == (0, 0)
    assert not kind.take(dq).any()
    assert not kind.take(dw).any()
    lists = a._replace(target=a.target[:, :0], indices=a.indices[:, :0])
    ranges = a._replace(target=a.target[:, :0], k=a.k[:0], indices=None, ranges=np.zeros((2, 2), np.int32))
    for empty in (lists, ranges):
        loss, *got = run(kind, empty)
        assert [float(kind.take(loss)), *(kind.take(x).any() for x in got)] == [0, False, False, False]
    a = inputs(rng, 3, 64, 50, 40)
    loss, *nothing = run(kind, a, gradients=False)
    check_loss(kind, loss, a)
    assert nothing == [None, None, None]
    assert kind.take(loss).tobytes() == kind.take(run(kind, a)[0]).tobytes()


def test_no_tokens_no_keys_and_no_gradients(kind, rng):
    check_no_tokens_and_no_keys(kind, rng)


def check_accumulate(kind: NumPy, rng: np.random.Generator) -> None:
    """Parts in their order, from zero and without division: those of one call, to the bit."""
    a = inputs(rng, 7, 12, 40, 30, per_token=True)
    dk, parts = kind.put(np.zeros(a.k.shape, np.float32)), []
    for part in (slice(3), slice(3, 4), slice(4, None)):
        of_part = a._replace(q=a.q[part], w=a.w[part], target=a.target[part], indices=a.indices[part])
        _, dq, given, _ = run(kind, of_part, dk_index=dk, accumulate=True)
        assert given is dk
        parts.append(kind.take(dq).tobytes())
    _, dq, whole, _ = run(kind, a, gradient_dtype="float32")
    assert kind.take(dk).tobytes() == kind.take(whole).tobytes()
    assert b"".join(parts) == kind.take(run(kind, a)[1]).tobytes()


def test_accumulate(kind, rng):
    check_accumulate(kind, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("scale_format", [None, "fp32"])
@pytest.mark.parametrize("library", ["cupy", "torch_cuda"])
def test_bits_do_not_depend_on_lists_and_workspace(rng, library, scale_format):
    a = inputs(rng, 300, 64, 700, 200, scale_format=scale_format)
    check_bits_whatever(make(library), a, (1, 5 << 20, 9 << 20))


@pytest.mark.parametrize(("h_q", "d_qk", "gap"), [(1, 576, None), (40, 512, 3), (128, 576, None)])
def test_target(kind, rng, h_q, d_qk, gap):
    """Of lists with lengths, invalid entries and duplicates, without and with sinks; of one token none is valid."""
    a = backward.inputs(rng, 4, h_q, d_qk, 300, 270)
    a.indices[1] = -1
    values = check_target(kind, a)
    for i in (0, 2, 3):
        assert values[i].sum() == pytest.approx(h_q, rel=1e-4)
    length = np.array([0, 270, 33, 500], np.int32)
    check_target(kind, a._replace(length=length, sink=sinks(rng, h_q)), gap)


def test_target_of_long_lists(kind, rng):
    check_target(kind, backward.inputs(rng, 2, 5, 576, 3000, 2048))


# --- over ranges of rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("h_q", "d_qk", "gap"), [(1, 576, 0), (40, 512, 3), (100, 576, 0)])
def test_dense_attention(kind, rng, h_q, d_qk, gap):
    check_dense(kind, rng, h_q, d_qk, gap)


@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "gaps"), [(1, 1, 1, None), (6, 20, 90, (1, 2, 8)), (3, 128, 200, None)]
)
@pytest.mark.parametrize("scale_format", [None, "fp32"])
def test_dense_loss(kind, rng, tokens, heads, keys, gaps, scale_format):
    a = with_everything(rng, inputs(rng, tokens, heads, keys, 5, scale_format=scale_format))
    check(kind, over_ranges(rng, a), gaps=gaps)


def test_ranges_are_lists(kind, rng):
    """Over the same keys both losses are the same, to the bit."""
    a = over_ranges(rng, inputs(rng, 6, 9, 70, 5, counted=np.arange(6) != 3))
    lists = np.full((6, 70), -1, np.int32)
    for i in range(6):
        lists[i, a.support(i)] = a.support(i)
    got, want = (bits(kind, run(kind, x)) for x in (a, a._replace(ranges=None, indices=lists)))
    assert got == want


@pytest.mark.gpu
@pytest.mark.parametrize("most", [2 << 30, 4 << 20], ids=["one chunk", "several"])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("ranges", [False, True])
def test_same_bits_in_a_hundred_runs(rng, ranges, quantized, most):
    """Of the loss over lists and over ranges."""
    kind = make("torch_cuda")
    a = inputs(rng, 200, 64, 400, 300)
    a = over_ranges(rng, a) if ranges else a
    of = [*a.ranges.T] if ranges else [a.indices[:, None]]
    given = [kind.put(np.ascontiguousarray(x)) for x in (a.q, a.k, a.w, a.target, *of)]
    loss = cupy_mla.dense_indexer_loss if ranges else cupy_mla.indexer_loss
    kind.check_bits_on_any_stream(lambda: loss(*given, quantized=quantized, max_workspace_bytes=most))


@pytest.mark.gpu
@pytest.mark.parametrize("h_q", [16, 128])
def test_same_bits_of_targets_in_a_hundred_runs(rng, h_q):
    """Over lists and over ranges, and of the dense lse."""
    kind = make("torch_cuda")
    a = backward.inputs(rng, 200, h_q, 576, 400, 300)
    kv = np.nan_to_num(a.kv.astype(np.float32)).astype(BF16)
    q, kv, lists = (kind.put(x) for x in (a.q, kv, a.indices))
    starts, ends = (kind.put(x.astype(np.int32)) for x in (rng.integers(0, 200, 200), rng.integers(150, 400, 200)))
    _, _, lse = cupy_mla.sparse_prefill(q, kv, lists, a.scale)

    def results() -> list[object]:
        dense = cupy_mla.dense_lse(q, kv, a.scale, starts, ends)
        of_ranges = cupy_mla.dense_attention_target(q, kv, dense, a.scale, starts, ends)
        return [cupy_mla.attention_target(q, kv, lists, lse, a.scale), dense, of_ranges]

    kind.check_bits_on_any_stream(results)
