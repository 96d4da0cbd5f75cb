"""`sparse_prefill` and `sparse_decode` against the oracle, over every kind of array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupy_mla

from .. import oracle
from ..cases import (
    LIFT,
    Output,
    Paged,
    as_uint8,
    check_decode,
    check_nan_of_a_named_row,
    check_prefill,
    decode_oracle,
    entries,
    every_batch,
    flat_rows,
    latent,
    lift_logits,
    off_zero,
    paged,
    paged_rows,
    prefill_inputs,
    queries,
    run_decode,
    sinks,
    some,
)
from ..kinds import BF16, E4M3, NumPy, gapped, make, poisoned

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

SEEDS = st.integers(0, 2**32 - 1)
HEADS = (1, 7, 8, 16, 33, 64, 65, 128)
BY_NAME = {fmt.name: fmt for fmt in oracle.FORMATS}
every_format = pytest.mark.parametrize("fmt", oracle.FORMATS, ids=lambda fmt: fmt.name)


def some_of(kind: NumPy, rng: np.random.Generator, batches: range) -> list[int]:
    """All batches where kernels are chosen by them, over CuPy arrays; one of them over other kinds, which show no more,
    and none over torch's on the host."""
    if kind.name == "torch":
        pytest.skip("shows no more than NumPy does")
    return list(batches) if kind.name == "cupy" else [int(rng.choice(batches))]


# --- prefill --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize(
    ("s_q", "h_q", "topk", "s_kv"),
    [(1, 1, 1, 1), (3, 7, 63, 40), (2, 8, 65, 200), (1, 16, 64, 64), (3, 33, 129, 77), (2, 65, 96, 300),
     (5, 64, 32, 50), (2, 128, 2048, 3000)],
)  # fmt: skip
def test_prefill_sizes(kind, rng, d_qk, s_q, h_q, topk, s_kv):
    check_prefill(kind, *prefill_inputs(rng, s_q, h_q, d_qk, s_kv, topk), d_qk**-0.5)


@given(
    SEEDS, st.integers(0, 4), st.sampled_from(HEADS), st.sampled_from([576, 512]), st.integers(1, 150),
    st.integers(0, 200), st.booleans(), st.booleans(), st.sampled_from([0, 2, 8]), st.sampled_from([None, 0, 2, 8]),
)  # fmt: skip
def test_prefill_generated(kind, seed, s_q, h_q, d_qk, topk, s_kv, with_sink, with_length, gap, out_gap):
    rng = np.random.default_rng(seed)
    if s_kv == 0:
        q, kv = queries(rng, s_q, h_q, d_qk), latent(rng, 0, 1, d_qk)
        indices = rng.integers(-1, 2, (s_q, 1, topk), np.int32)
    else:
        q, kv, indices = prefill_inputs(rng, s_q, h_q, d_qk, s_kv, topk, q_gap=gap, kv_gap=gap)
    check_prefill(
        kind, q, kv, indices, d_qk**-0.5,
        sink=sinks(rng, h_q) if with_sink else None,
        length=rng.integers(-1, topk + 3, s_q, np.int32) if with_length else None,
        out_gaps=None if out_gap is None else (0, 1, out_gap),
    )  # fmt: skip


@pytest.mark.long(sample=5)
@pytest.mark.parametrize("d_qk", [576, 512])
@every_batch
def test_prefill_of_every_number_of_queries(kind, rng, d_qk, batches):
    """By whichever kernel is chosen: random heads, lists of any lengths, of a prompt's first tokens, and full ones."""
    for s_q in some_of(kind, rng, batches):
        h_q, topk = (int(2 ** rng.uniform(0, 7.01)), 300) if s_q < 40 else (int(rng.integers(1, 33)), 120)
        topk = int(rng.integers(1, topk))
        q, kv, indices = prefill_inputs(rng, s_q, h_q, d_qk, int(rng.integers(1, 200)), topk)
        lift_logits(q, kv, 0.05)
        lists = rng.integers(3)
        if lists == 0:
            indices[np.arange(topk) > np.arange(s_q)[:, None, None]] = -1
        length = rng.integers(-1, topk + 3, s_q, np.int32) if lists == 1 else None
        check_prefill(kind, q, kv, indices, 0.05, sinks(rng, h_q) + LIFT, length)


def test_prefill_takes_strides_of_any_kind(kind, rng):
    """Gaps that leave rows 2-byte aligned only, heads before tokens, index lists cut out of wider ones."""
    s_q, h_q, d_qk, s_kv, topk = 3, 16, 576, 90, 70
    live = some(rng, s_kv)
    q = gapped(queries(rng, h_q, s_q, d_qk), 0, 1, 3).transpose(1, 0, 2)
    indices = gapped(entries(rng, (s_q, 1, topk), live, s_kv), 0, 0, 5)
    check_prefill(kind, q, flat_rows(rng, s_kv, d_qk, live, gap=1), indices, 0.04, out_gaps=(0, 0, 1))


def test_prefill_takes_a_row_for_all_queries(kind, rng):
    """Stride 0: one index list, broadcast over the queries."""
    q, kv, indices = prefill_inputs(rng, 4, 8, 512, 100, 66)
    check_prefill(kind, q, kv, np.broadcast_to(indices[:1], indices.shape), 0.04)


@pytest.mark.parametrize("sm_scale", [0.0, -0.03, 1e-4, 3.0])
def test_prefill_scale_is_any_number(kind, rng, sm_scale):
    check_prefill(kind, *prefill_inputs(rng, 2, 9, 576, 120, 100), sm_scale)


def test_prefill_counts_a_row_as_often_as_it_is_listed(kind, rng):
    q, kv = queries(rng, 1, 4, 576), latent(rng, 3, 1, 576)
    once, _, lse_once = check_prefill(kind, q, kv, np.array([[[1, -1, -1]]], np.int32), 0.04)
    thrice, _, lse_thrice = check_prefill(kind, q, kv, np.array([[[1, 1, 1]]], np.int32), 0.04)
    np.testing.assert_array_equal(once.astype(np.float32), thrice.astype(np.float32))
    np.testing.assert_allclose(lse_thrice - lse_once, np.log(3), atol=1e-5)


@pytest.mark.parametrize("fill", [-1, 50, 2**31 - 1, -(2**31)])
def test_prefill_without_a_valid_row(kind, rng, fill):
    """Even beside queries that have rows, and whatever the sink."""
    q, kv, indices = prefill_inputs(rng, 3, 6, 576, 50, 80)
    indices[1] = fill
    sink = np.array([np.inf, -np.inf, 0, 3, -3, 100], np.float32)
    out, max_logits, lse = check_prefill(kind, q, kv, indices, 0.04, sink=sink)
    assert (out[1] == 0).all()
    assert (max_logits[1] == -np.inf).all()
    assert (lse[1] == np.inf).all()


def test_prefill_sink_limits(kind, rng):
    """A sink of -inf changes nothing, one of +inf makes the output zero, neither touches lse."""
    q, kv, indices = prefill_inputs(rng, 2, 3, 512, 90, 70)
    plain = check_prefill(kind, q, kv, indices, 0.04)
    sunk = check_prefill(kind, q, kv, indices, 0.04, sink=np.array([-np.inf, np.inf, 0], np.float32))
    np.testing.assert_array_equal(sunk[0][:, 0].astype(np.float32), plain[0][:, 0].astype(np.float32))
    assert (sunk[0][:, 1] == 0).all()
    np.testing.assert_array_equal(sunk[1], plain[1])
    np.testing.assert_array_equal(sunk[2], plain[2])


def test_prefill_hands_on_nan_of_a_named_row(kind, rng):
    q, kv, indices = prefill_inputs(rng, 3, 20, 576, 80, 70)
    kv[np.isnan(kv.astype(np.float32))] = 0
    indices[1, 0, 40] = 7
    indices[(indices == 7) & (np.arange(3) != 1)[:, None, None]] = -1
    kv[7, 0, 300] = np.nan
    out, max_logits, lse = (
        kind.take(r) for r in cupy_mla.sparse_prefill(kind.put(q), kind.put(kv), kind.put(indices), 0.04)
    )
    assert np.isnan(out[1].astype(np.float32)).all()
    assert np.isnan(lse[1]).all()
    want = oracle.prefill(q[::2], kv, indices[::2], 0.04)
    for name, g, w in zip(("out", "max_logits", "lse"), (out, max_logits, lse), want, strict=True):
        oracle.assert_close(g[::2], w, f"prefill {name}")


def test_prefill_large_logits(kind, rng):
    """Logits of hundreds neither overflow nor lose the small ones' infinities."""
    q, kv, indices = prefill_inputs(rng, 2, 5, 576, 100, 90)
    check_prefill(kind, q, kv, indices, 8.0)
    check_prefill(kind, q, kv, indices, -8.0)


def test_prefill_same_bits_every_time(kind, rng):
    args = [kind.put(a) for a in prefill_inputs(rng, 4, 128, 576, 400, 300)]
    first, second = ([kind.take(r).tobytes() for r in cupy_mla.sparse_prefill(*args, 0.04)] for _ in range(2))
    assert first == second


# --- decode ---------------------------------------------------------------------------------------------------


@pytest.mark.long(sample=12)
@every_format
@pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk", "block_size"),
    [(1, 1, 1, 1, 1), (3, 1, 7, 63, 61), (1, 3, 8, 65, 2), (3, 2, 16, 64, 64), (1, 1, 33, 97, 256), (3, 1, 65, 33, 1),
     (2, 2, 64, 128, 64), (1, 1, 128, 2048, 64), (3, 1, 128, 65, 61)],
)  # fmt: skip
def test_decode_sizes(kind, rng, fmt, b, s_q, h_q, topk, block_size):
    main = paged(rng, fmt, b, s_q, topk, block_size)
    check_decode(kind, fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main)


@given(st.data())
def test_decode_generated(kind, data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    rng = np.random.default_rng(data.draw(SEEDS, "seed"))
    fmt = BY_NAME[draw(*BY_NAME)]
    b, s_q, h_q = draw(1, 3), draw(1, 2, 3), draw(*HEADS)
    topk, block_size = data.draw(st.integers(1, 150), "topk"), draw(1, 2, 61, 64, 256)
    invalid = draw(0.0, 0.3, 1.0)
    main = paged(rng, fmt, b, s_q, topk, block_size, gap=draw(0, 1, 5), lengths=draw(False, True), invalid=invalid)
    extra = None
    if draw(False, True):
        extra_topk = data.draw(st.integers(1, 100), "extra topk")
        extra = paged(rng, fmt, b, s_q, extra_topk, draw(1, 2, 64, 256), gap=draw(0, 3), lengths=draw(False, True))
    q_gap = draw(0, 2, 8)
    check_decode(
        kind, fmt, gapped(queries(rng, b, s_q, h_q, fmt.d_qk), 0, 0, 1, q_gap), main, extra,
        sink=sinks(rng, h_q) if draw(False, True) else None,
        num_splits=draw(None, 1, 2, 5, 40),
        out_gaps=draw(None, (0, 0, 0, 0), (0, 1, 0, 2), (1, 0, 1, 8)),
    )  # fmt: skip


@every_format
@pytest.mark.parametrize("num_splits", [1, 2, 5, 40])
def test_decode_splits(kind, rng, fmt, num_splits):
    """Parts with rows, parts without and, with 40 of them over 5 tiles, many that are empty from the start."""
    main = paged(rng, fmt, 2, 1, 100, 64)
    main.indices[0, 0, 32:96] = -1
    main.indices[1] = -1
    extra = paged(rng, fmt, 2, 1, 50, 2)
    extra.indices[1] = -1
    sink = sinks(rng, 16)
    out, lse = check_decode(kind, fmt, queries(rng, 2, 1, 16, fmt.d_qk), main, extra, sink=sink, num_splits=num_splits)
    assert (out[1] == 0).all()
    assert (lse[1] == np.inf).all()


@every_format
def test_decode_lengths(kind, rng, fmt):
    """0, negative, within, exactly, beyond topk; what stands after a length may be anything, NaN rows included."""
    topk = 70
    main = paged(rng, fmt, 6, 2, topk, 64)
    main.length = np.array([0, -3, 1, 33, topk, topk + 9], np.int32)
    for i, length in enumerate(main.length):
        main.indices[i, :, max(length, 0) :] = main.dead[0]
    out, lse = check_decode(kind, fmt, queries(rng, 6, 2, 8, fmt.d_qk), main, num_splits=2)
    assert (out[:2] == 0).all()
    assert (lse[:2] == np.inf).all()


def lengths_of(rng: np.random.Generator, b: int, topk: int) -> np.ndarray | None:
    """Lengths of b lists: none at all; any; edges; one list with everything, and nothing or an entry in the others."""
    edges = [-1, 0, 1, topk - 1, topk, topk + 9]
    alone = np.where(np.arange(b) == rng.integers(b), topk, rng.integers(2))
    drawn = [None, rng.integers(-1, topk + 3, b), rng.choice(edges, b), alone][rng.integers(4)]
    return None if drawn is None else drawn.astype(np.int32)


@pytest.mark.long(sample=6)
@every_format
@every_batch
def test_decode_of_every_batch(kind, rng, fmt, batches):
    """By whichever kernel and division is chosen: random heads, lists, lengths and splits, one cache and two."""
    for b in some_of(kind, rng, batches):
        s_q = int(rng.integers(1, 4)) if b < 40 else 1
        h_q, topk = (int(2 ** rng.uniform(0, 7.01)), 200) if b < 40 else (int(rng.integers(1, 17)), 80)
        topk = int(rng.integers(1, topk))
        main, extra = paged(rng, fmt, b, s_q, topk, 64, invalid=rng.choice([0, 0.2])), None
        main.length = lengths_of(rng, b, topk)
        if rng.integers(2):
            extra = paged(rng, fmt, b, s_q, int(rng.integers(1, 70)), 2)
            extra.length = lengths_of(rng, b, extra.indices.shape[-1])
        if rng.integers(2):  # a short context
            main.indices[:, :, int(rng.integers(topk + 1)) :] = -1
        q = off_zero(fmt, queries(rng, b, s_q, h_q, fmt.d_qk), main, extra)
        splits = rng.choice([None, None, None, 1, 2, 5, 17])
        check_decode(kind, fmt, q, main, extra, sink=sinks(rng, h_q), num_splits=splits)


@pytest.mark.long(sample=8)
@every_format
@pytest.mark.parametrize("h_q", [1, 16, 64])
@pytest.mark.parametrize("others", [0, 1])
def test_decode_of_one_request_with_everything(kind, rng, fmt, h_q, others):
    """The others' lists are empty, or have an entry each: by lengths, and by -1 behind it."""
    b, topk = 9, 700
    main = paged(rng, fmt, b, 1, topk, 64)
    main.indices[:, :, 0] = np.setdiff1d(np.arange(main.cache.shape[0] * 64), main.dead)[0]  # a row
    main.length = np.full(b, others, np.int32)
    main.length[rng.integers(b)] = topk
    q = off_zero(fmt, queries(rng, b, 1, h_q, fmt.d_qk), main)
    check_decode(kind, fmt, q, main, sink=sinks(rng, h_q))
    main.indices[np.arange(topk) >= main.length[:, None, None]] = -1
    main.length = None
    out, lse = check_decode(kind, fmt, q, main)
    if others == 0:
        assert (out == 0).all(axis=(1, 2, 3)).sum() == np.isposinf(lse).all(axis=(1, 2)).sum() == b - 1


@every_format
def test_decode_extra_alone_counts(kind, rng, fmt):
    """A main list without a valid row beside an extra list that has some, and the other way round."""
    main, extra = paged(rng, fmt, 3, 1, 40, 64, invalid=0), paged(rng, fmt, 3, 1, 130, 2, invalid=0)
    main.indices[0] = -1
    extra.length = np.array([130, 0, 65], np.int32)
    check_decode(kind, fmt, queries(rng, 3, 1, 12, fmt.d_qk), main, extra)


@every_format
def test_decode_same_slot_is_one_row_here_and_none_there(kind, rng, fmt):
    """A slot beyond the small extra cache is valid in the main one."""
    main, extra = paged(rng, fmt, 1, 2, 300, 64), paged(rng, fmt, 1, 2, 5, 2)
    extra.indices[...] = np.where(main.indices[..., :5] >= 0, main.indices[..., :5], 0)
    extra.cache[...] = paged_rows(rng, fmt, extra.cache.shape[0], 2, np.arange(extra.cache.shape[0] * 2))
    check_decode(kind, fmt, queries(rng, 1, 2, 3, fmt.d_qk), main, extra)


@every_format
def test_decode_takes_a_kv_head_axis(kind, rng, fmt):
    main, extra = paged(rng, fmt, 2, 1, 40, 64, gap=1), paged(rng, fmt, 2, 1, 9, 2)
    q = queries(rng, 2, 1, 5, fmt.d_qk)
    plain = check_decode(kind, fmt, q, main, extra)
    for p in (main, extra):
        p.cache = p.cache[:, :, None]
    with_axis = check_decode(kind, fmt, q, main, extra)
    assert [a.tobytes() for a in plain] == [a.tobytes() for a in with_axis]


@pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4], ids=lambda fmt: fmt.name)
def test_decode_takes_a_cache_of_fp8_items(kind, rng, fmt):
    main = paged(rng, fmt, 1, 2, 70, 64, gap=1)
    main.cache = main.cache.view(E4M3)
    check_decode(kind, fmt, queries(rng, 1, 2, 16, fmt.d_qk), main)


@pytest.mark.parametrize("fmt", [oracle.BF16_576, oracle.BF16_512], ids=lambda fmt: fmt.name)
def test_decode_takes_a_bf16_cache_of_any_strides(kind, rng, fmt):
    """Rows and blocks with gaps that leave them 2-byte aligned only."""
    main = paged(rng, fmt, 2, 1, 70, 8)
    main.cache = gapped(main.cache, 0, 1, 3)
    check_decode(kind, fmt, queries(rng, 2, 1, 16, fmt.d_qk), main, out_gaps=(0, 0, 0, 1))


def test_decode_reads_any_positive_float32_scale(kind, rng):
    """Scales that are no powers of two and have all 24 bits, from tiny to large."""
    num_blocks, block_size = 5, 16
    codes = rng.integers(0, 256, (num_blocks, block_size, 656), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = (10 ** rng.uniform(-6, -2.5, (num_blocks, block_size, 4))).astype(np.float32)
    codes[..., 512:528] = scales.view(np.uint8)
    codes[..., 528:] = latent(rng, num_blocks, block_size, 64).view(np.uint8)
    main = Paged(codes, entries(rng, (2, 1, 90), np.arange(80), 80))
    check_decode(kind, oracle.V32, queries(rng, 2, 1, 16, 576), main)


@every_format
@pytest.mark.parametrize("h_q", [16, 64])
def test_decode_of_a_cache_of_zeros(kind, rng, fmt, h_q):
    """Memory that nobody has written to, scales included: every logit and every value is zero."""
    main = paged(rng, fmt, 2, 1, 70, 64)
    main.cache = np.zeros_like(main.cache)
    check_decode(kind, fmt, queries(rng, 2, 1, h_q, fmt.d_qk), main)


def test_decode_hands_on_nan_of_a_named_row(kind, rng):
    fmt = oracle.V32
    main = paged(rng, fmt, 3, 1, 70, 64, invalid=0)
    main.indices[1, 0, 50] = main.dead[0]
    q = queries(rng, 3, 1, 9, 576)
    check_nan_of_a_named_row(kind, fmt, q, main, 3)


@pytest.mark.parametrize("sm_scale", [0.0, -0.03, 8.0])
def test_decode_scale_is_any_number(kind, rng, sm_scale):
    main = paged(rng, oracle.V4, 1, 2, 100, 64)
    check_decode(kind, oracle.V4, queries(rng, 1, 2, 9, 512), main, sm_scale=sm_scale, num_splits=2)


@pytest.mark.parametrize(("b", "s_q"), [(0, 1), (2, 0)])
def test_decode_of_nothing(kind, rng, b, s_q):
    cache = paged_rows(rng, oracle.V32, 2, 64, np.arange(4))
    main = Paged(cache, np.zeros((b, s_q, 3), np.int32))
    out, lse = run_decode(kind, queries(rng, b, s_q, 4, 576), main)
    assert out.shape == (b, s_q, 4, 512)
    assert lse.shape == (b, 4, s_q)


def test_decode_of_a_cache_without_blocks(kind, rng):
    main = Paged(np.empty((0, 64, 656), np.uint8), np.zeros((2, 1, 5), np.int32))
    check_decode(kind, oracle.V32, queries(rng, 2, 1, 4, 576), main)


@every_format
def test_decode_same_bits_every_time(kind, rng, fmt):
    main = paged(rng, fmt, 3, 1, 300, 64)
    q = queries(rng, 3, 1, 64, fmt.d_qk)
    first, second = ([r.tobytes() for r in run_decode(kind, q, main, num_splits=4)] for _ in range(2))
    assert first == second


@pytest.mark.long(sample=6)
@every_format
@pytest.mark.parametrize("h_q", [16, 64])
@pytest.mark.parametrize("topk", [300, 1100])
def test_decode_bits_do_not_depend_on_the_batch(kind, rng, fmt, h_q, topk):
    """Each of 264 requests, two for a multiprocessor of an H200, alone, in threes, and with all others: there CTAs take
    the splits of FP8 rows in turn."""
    b = 264 if kind.on_gpu else 5
    main = paged(rng, fmt, b, 1, topk, 64, lengths=True)
    q = queries(rng, b, 1, h_q, fmt.d_qk)

    def run(first, last):
        part = Paged(main.cache, main.indices[first:last], main.length[first:last])
        return run_decode(kind, q[first:last], part, batch_invariant=True)

    out, lse = run(0, b)
    for first, last in ((0, 1), (1, 4), (b - 1, b)):
        got = run(first, last)
        assert got[0].tobytes() == out[first:last].tobytes()
        assert got[1].tobytes() == lse[first:last].tobytes()
    want = decode_oracle(fmt, q[:2], Paged(main.cache, main.indices[:2], main.length[:2]))
    oracle.assert_close(out[:2], want[0], "decode out")
    oracle.assert_close(lse[:2], want[1], "decode lse")


def test_decode_leaves_its_inputs_alone(kind, rng):
    main = paged(rng, oracle.V4, 2, 1, 65, 61, gap=1)
    host = [queries(rng, 2, 1, 8, 512), main.cache, main.indices]
    put = [kind.put_with_allocation(a) for a in host]
    before = [kind.take(whole).tobytes() for _, whole in put]
    cupy_mla.sparse_decode(*(array for array, _ in put), 0.04, num_splits=2)
    assert before == [kind.take(whole).tobytes() for _, whole in put]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "torch_cuda"])
def test_decode_runs_on_the_callers_stream(rng, name):
    """Behind the work that the caller's stream still has to do: q is zero until long after the call."""
    kind = make(name)
    main, q = paged(rng, oracle.V32, 2, 1, 300, 64), queries(rng, 2, 1, 16, 576)
    cache, indices, late = kind.put(main.cache), kind.put(main.indices), kind.put(q)
    cupy_mla.sparse_decode(late, cache, indices, 0.04, num_splits=3)  # compiled and loaded before the race
    kind.synchronize()
    stream, scope = kind.stream()
    with scope:
        early = kind.put(np.zeros_like(q))
        kind.keep_busy()
        early[...] = late
        results = cupy_mla.sparse_decode(early, cache, indices, 0.04, num_splits=3)
    stream.synchronize()
    for result, got, want in zip(
        ("out", "lse"), results, decode_oracle(oracle.V32, q, main, sm_scale=0.04), strict=True
    ):
        oracle.assert_close(kind.take(got), want, f"decode {result}")


@pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4])
@pytest.mark.parametrize(("heads", "num_splits"), [(4, 1), (64, 3), (128, None)])
def test_decode_writes_out_and_lse_in_place(kind, rng, fmt, heads, num_splits):
    main, q = paged(rng, fmt, 2, 2, 100, 64), queries(rng, 2, 2, heads, fmt.d_qk)
    out = Output(kind, (2, 2, heads, 512), (0, 1, 1, 8))
    lse = Output(kind, (2, heads, 2), (0, 1, 3), np.float32)
    results = cupy_mla.sparse_decode(
        kind.put(q), kind.put(main.cache), kind.put(main.indices), 0.04, out=out.array, lse=lse.array,
        num_splits=num_splits,
    )  # fmt: skip
    for result, got, place, want in zip(
        ("out", "lse"), results, (out, lse), decode_oracle(fmt, q, main, sm_scale=0.04), strict=True
    ):
        assert got is place.array
        oracle.assert_close(kind.take(got), want, f"decode {result}")
        place.check_gaps()


@pytest.mark.gpu
def test_decode_in_a_captured_graph(rng):
    """Replayed, it reads what then lies in the arrays and writes where it did."""
    torch = pytest.importorskip("torch")
    kind = make("torch_cuda")
    main, values = paged(rng, oracle.V4, 2, 1, 300, 64), queries(rng, 2, 1, 16, 512)
    cache, indices, q = kind.put(main.cache), kind.put(main.indices), kind.put(np.zeros_like(values))
    out = kind.put(poisoned((2, 1, 16, 512), BF16))
    cupy_mla.sparse_decode(q, cache, indices, 0.04, out=out, num_splits=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = cupy_mla.sparse_decode(q, cache, indices, 0.04, out=out, num_splits=3)
    q.copy_(kind.put(values))
    graph.replay()
    kind.synchronize()
    for result, got, want in zip(
        ("out", "lse"), (out, lse), decode_oracle(oracle.V4, values, main, sm_scale=0.04), strict=True
    ):
        oracle.assert_close(kind.take(got), want, f"decode {result}")


def test_plan_splits(kind, rng):
    """Some number of parts from 1 to the number of tiles; one query of many rows is worth splitting on a GPU."""
    q = kind.put(queries(rng, 1, 1, 16, 576))
    few, many = (kind.put(np.zeros((1, 1, topk), np.int32)) for topk in (1, 2048))
    assert cupy_mla.plan_splits(q, few) == 1
    planned = cupy_mla.plan_splits(q, many, few)
    assert 1 < planned <= 65 if kind.on_gpu else planned == 1


# --- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [np.float32(0.04), np.float64(0.04), np.array(0.04), 1, np.int64(2), 0])
def test_scales_of_any_kind_of_number(rng, scale):
    main = paged(rng, oracle.V32, 2, 1, 5, 4)
    arrays = queries(rng, 2, 1, 4, 576), main.cache, main.indices
    out, lse = cupy_mla.sparse_decode(*arrays, sm_scale=scale)
    want, want_lse = cupy_mla.sparse_decode(*arrays, sm_scale=float(scale))
    assert out.tobytes() == want.tobytes()
    assert lse.tobytes() == want_lse.tobytes()


def test_v4_blocks_of_odd_size_need_padding(kind, rng):
    """61 tokens take 35624 bytes, which is no multiple of 16: the block stride is rounded up to one of 576."""
    q, indices = queries(rng, 1, 1, 4, 512), np.zeros((1, 1, 3), np.int32)
    with pytest.raises(ValueError, match=r"^k_cache\b.*35712"):
        cupy_mla.sparse_decode(kind.put(q), kind.put(np.zeros((2, 61, 584), np.uint8)), kind.put(indices), 0.04)
    cache = paged_rows(rng, oracle.V4, 2, 61, np.arange(122))
    assert cache.strides[0] == 35712
    check_decode(kind, oracle.V4, q, Paged(cache, indices))


def test_oracle_reads_what_the_tests_write(rng):
    """The packers of the tests and the readers of the oracle agree: rows come back within half a step of e4m3."""
    for fmt in oracle.FORMATS:
        live = some(rng, 61 * 3)
        cache = paged_rows(rng, fmt, 3, 61, live)
        rows = oracle.named_rows(fmt, as_uint8(cache), live)
        assert not np.isnan(rows).any()
        assert 0.095 < rows.std() < 0.105
