"""`dense_decode` against the oracle, over every kind of array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupy_mla

from .. import oracle
from ..cases import Output, paged_rows, queries, sinks
from ..dense import (
    Requests,
    Sees,
    assert_dense,
    check_dense,
    dense_oracle,
    dense_queries,
    in_cache,
    off_zero,
    run_dense,
)
from ..kinds import E4M3, gapped, make, poisoned

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

HEADS = (1, 7, 16, 33, 64, 65, 128)
BY_NAME = {fmt.name: fmt for fmt in oracle.DENSE_FORMATS}
every_format = pytest.mark.parametrize("fmt", oracle.DENSE_FORMATS, ids=lambda fmt: fmt.name)
every_view = pytest.mark.parametrize(
    "sees", [Sees(), Sees(False), Sees(True, 1), Sees(True, 40), Sees(False, 70), Sees(True, 10**6)], ids=str
)


@pytest.mark.long(sample=8)
@every_format
@pytest.mark.parametrize("block_size", [1, 16, 48, 64, 128, 256])
@pytest.mark.parametrize(("b", "s_q", "h_q"), [(1, 1, 1), (3, 1, 128), (2, 2, 64), (1, 5, 16), (2, 8, 33)])
def test_sizes(kind, rng, fmt, block_size, b, s_q, h_q):
    """Lengths of any number of blocks, among them the first rows of a block and the last."""
    edges = [1, block_size - 1, block_size, block_size + 1, 2 * block_size, int(rng.integers(1, 300))]
    of = in_cache(rng, fmt, rng.choice(edges, b), block_size, s_q)
    check_dense(kind, fmt, off_zero(fmt, dense_queries(rng, fmt, b, s_q, h_q), of), of)


@given(st.data())
def test_generated(kind, data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    fmt = BY_NAME[draw(*BY_NAME)]
    s_q, h_q = draw(1, 2, 3, 8), draw(*HEADS)
    lens = data.draw(st.lists(st.integers(-2, 140), min_size=1, max_size=3), "lengths")
    sees = Sees(draw(True, False), draw(None, None, 1, 17, 64))
    of = in_cache(rng, fmt, lens, draw(1, 3, 16, 64, 256), s_q, sees, gap=draw(0, 1, 5))
    sink = sinks(rng, h_q) if draw(False, True) else None
    q = off_zero(fmt, gapped(dense_queries(rng, fmt, len(lens), s_q, h_q), 0, 0, 1, draw(0, 2, 8)), of)
    gaps = draw(None, (0, 0, 0, 0), (0, 1, 0, 2), (1, 0, 1, 8))
    check_dense(kind, fmt, q, of, sink=sink, num_splits=draw(None, 1, 2, 5, 40), out_gaps=gaps)


@pytest.mark.long(sample=8)
@every_format
@every_view
def test_queries_of_a_request_see_rows_of_their_own(kind, rng, fmt, sees):
    """Requests of no row, of fewer rows than queries, and longer ones. All rows that no query sees hold NaN."""
    of = in_cache(rng, fmt, [0, 1, 3, 64, 65, 200], 64, 5, sees)
    q = off_zero(fmt, dense_queries(rng, fmt, 6, 5, 8), of)
    out, lse = check_dense(kind, fmt, q, of, sink=sinks(rng, 8))
    nothing = np.array([[len(sees.rows(int(n), 5, i)) == 0 for i in range(5)] for n in of.lens])
    assert nothing[0].all()
    assert (nothing[1].sum(), nothing[2].sum()) == ((4, 2) if sees.causal else (0, 0))
    assert (out[nothing] == 0).all()
    assert (np.isposinf(lse).all(axis=1) == nothing).all()


@pytest.mark.long(sample=4)
@every_format
@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_lengths_that_differ_by_a_thousand(kind, rng, fmt, num_splits):
    of = in_cache(rng, fmt, [1, 1100, 2, 0, 40], 64, 2)
    check_dense(kind, fmt, off_zero(fmt, dense_queries(rng, fmt, 5, 2, 20), of), of, num_splits=num_splits)


@pytest.mark.long(sample=5)
@every_format
@pytest.mark.parametrize("sees", [Sees(), Sees(False), Sees(True, 50)], ids=str)
def test_lengths_beyond_the_table_and_below_zero(kind, rng, fmt, sees):
    """The table's rows are all there are; what a window and a query see is counted from the length."""
    of = in_cache(rng, fmt, [64, 64, 64, 64, 64], 32, 2, Sees(False))
    of.table = np.ascontiguousarray(of.table[:, :2])
    of.lens[:] = 65, 80, 2**31 - 1, -1, -(2**31)
    of.sees = sees
    out, lse = check_dense(kind, fmt, dense_queries(rng, fmt, 5, 2, 8), of, num_splits=2)
    assert not out[3:].astype(np.float32).any()
    assert np.isposinf(lse[3:]).all()


@every_format
def test_blocks_that_the_cache_has_not(kind, rng, fmt):
    """In the middle of a request, at its end, and everywhere."""
    of = in_cache(rng, fmt, [200, 180, 64, 150], 32, 2)
    num_blocks = of.cache.shape[0]
    of.table[0, 2:4] = num_blocks, 2**31 - 1
    of.table[1, 5] = -1
    of.table[2, :2] = -(2**31), num_blocks + 7
    of.table[3, 0] = -7
    out, lse = check_dense(kind, fmt, dense_queries(rng, fmt, 4, 2, 8), of)
    assert not out[2].astype(np.float32).any()
    assert np.isposinf(lse[2]).all()


@every_format
def test_a_cache_or_a_table_of_nothing(kind, rng, fmt):
    of = in_cache(rng, fmt, [70, 3], 64)
    q = dense_queries(rng, fmt, 2, 1, 8)
    for empty in (
        Requests(of.cache[:0], of.table, of.lens, 1, of.sees),
        Requests(of.cache, of.table[:, :0], of.lens, 1, of.sees),
    ):
        out, lse = run_dense(kind, q, empty)
        assert not out.astype(np.float32).any()
        assert np.isposinf(lse).all()


@pytest.mark.parametrize(("b", "s_q"), [(0, 1), (2, 0)])
def test_of_nothing(kind, rng, b, s_q):
    of = in_cache(rng, oracle.V32, [70] * b, 64, s_q)
    out, lse = run_dense(kind, queries(rng, b, s_q, 8, 576), of)
    assert (out.shape, lse.shape) == ((b, s_q, 8, 512), (b, 8, s_q))


@every_format
def test_requests_may_share_blocks(kind, rng, fmt):
    of = in_cache(rng, fmt, [128, 128, 100], 64)
    of.table[1, 0] = of.table[0, 0]
    of.table[2, :2] = of.table[0, 1]
    check_dense(kind, fmt, dense_queries(rng, fmt, 3, 1, 16), of)


@every_format
@pytest.mark.parametrize("num_splits", [1, 3])
def test_nan_of_a_seen_row(kind, rng, fmt, num_splits):
    """The last row of a request is NaN: the query that sees it is, and no other request's."""
    of = in_cache(rng, fmt, [100, 130, 70], 64, 2)
    of.cache[of.table[1, 2], 1] = np.frombuffer(b"\xff" * fmt.token_bytes, of.cache.dtype)
    if fmt is oracle.V4:  # whose rows lie elsewhere in a block
        block = of.cache[of.table[1, 2]].reshape(-1)
        block[:] = np.frombuffer(b"\xff" * block.size, np.uint8)
        of = Requests(of.cache, of.table, np.array([100, 130, 70], np.int32), 2, of.sees)
    q = dense_queries(rng, fmt, 3, 2, 16)
    out, lse = run_dense(kind, q, of, num_splits=num_splits)
    assert np.isnan(out[1, 1].astype(np.float32)).all()
    assert np.isnan(lse[1, :, 1]).all()
    keep = [0, 2]
    rest = Requests(of.cache, of.table[keep], of.lens[keep], 2, of.sees)
    assert_dense((out[keep], lse[keep]), dense_oracle(fmt, q[keep], rest))


@every_format
def test_sinks(kind, rng, fmt):
    """Of every size, and both infinities: they do not change lse."""
    of = in_cache(rng, fmt, [100, 0], 64)
    q, sink = dense_queries(rng, fmt, 2, 1, 6), np.array([np.inf, -np.inf, 0, 5, 30, -30], np.float32)
    out, lse = check_dense(kind, fmt, q, of, sink=sink)
    plain = run_dense(kind, q, of)
    assert not out[0, 0, 0].astype(np.float32).any()
    assert out[0, 0, 1].tobytes() == plain[0][0, 0, 1].tobytes()
    assert lse.tobytes() == plain[1].tobytes()


@pytest.mark.parametrize("sm_scale", [0.0, -0.03, 8.0])
def test_scale_is_any_number(kind, rng, sm_scale):
    of = in_cache(rng, oracle.V32, [100, 37], 64)
    check_dense(kind, oracle.V32, queries(rng, 2, 1, 16, 576), of, sm_scale=sm_scale)


@pytest.mark.parametrize("fmt", [oracle.BF16_576, oracle.BF16_512], ids=lambda fmt: fmt.name)
def test_a_bf16_cache_of_any_strides(kind, rng, fmt):
    """Rows apart, so that they start at odd multiples of 2 bytes, and a KV-head axis."""
    of = in_cache(rng, fmt, [100, 37], 16, 2)
    of.cache = gapped(of.cache, 0, 1, 3)
    check_dense(kind, fmt, dense_queries(rng, fmt, 2, 2, 16), of)
    of.cache = of.cache[:, :, None]
    q = dense_queries(rng, fmt, 2, 2, 16)
    got = cupy_mla.dense_decode(*map(kind.put, (q, of.cache, of.table, of.lens)), 0.04)
    of.cache = of.cache[:, :, 0]
    assert_dense(tuple(map(kind.take, got)), dense_oracle(fmt, q, of, sm_scale=0.04))


@pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4], ids=lambda fmt: fmt.name)
def test_a_cache_of_fp8_items(kind, rng, fmt):
    of = in_cache(rng, fmt, [100, 37], 16)
    of.cache = of.cache.view(E4M3)
    q = dense_queries(rng, fmt, 2, 1, 16)
    out, lse = run_dense(kind, q, of)
    assert_dense((out, lse), dense_oracle(fmt, q, of))


@every_format
def test_strided_lengths_tables_and_results(kind, rng, fmt):
    of = in_cache(rng, fmt, [100, 37, 64], 16, 2, gap=2)
    q = gapped(dense_queries(rng, fmt, 3, 2, 20), 1, 0, 1, 8)
    out = Output(kind, (3, 2, 20, 512), (0, 1, 1, 8), fmt.dtype)
    lse = Output(kind, (3, 20, 2), (0, 1, 3), np.float32)
    got = cupy_mla.dense_decode(
        *map(kind.put, (q, of.cache, of.table, of.lens)), 0.04, out=out.array, lse=lse.array, num_splits=3
    )
    for result, array, place, want in zip(
        ("out", "lse"), got, (out, lse), dense_oracle(fmt, q, of, sm_scale=0.04), strict=True
    ):
        assert array is place.array
        oracle.assert_close(kind.take(array), want, f"decode {result}")
        place.check_gaps()


def test_inputs_are_left_alone(kind, rng):
    of = in_cache(rng, oracle.V4, [65, 20], 16, gap=1)
    put = [kind.put_with_allocation(a) for a in (queries(rng, 2, 1, 8, 512), of.cache, of.table, of.lens)]
    before = [kind.take(whole).tobytes() for _, whole in put]
    cupy_mla.dense_decode(*(array for array, _ in put), 0.04, num_splits=2)
    assert before == [kind.take(whole).tobytes() for _, whole in put]


@every_format
def test_same_bits_every_time(kind, rng, fmt):
    of, q = in_cache(rng, fmt, [300, 1, 700], 64, 2), dense_queries(rng, fmt, 3, 2, 64)
    for splits in (None, 4):
        first, second = ([r.tobytes() for r in run_dense(kind, q, of, num_splits=splits)] for _ in range(2))
        assert first == second


@pytest.mark.long(sample=6)
@every_format
@pytest.mark.parametrize("h_q", [16, 64])
def test_bits_do_not_depend_on_the_batch(kind, rng, fmt, h_q):
    """Nor on the width of the block table. Each of the requests alone, in threes, and with all others."""
    b = 264 if kind.on_gpu else 5
    of = in_cache(rng, fmt, rng.integers(0, 150, b), 64, 2)
    q = dense_queries(rng, fmt, b, 2, h_q)

    def run(first, last, more=0):
        table = np.pad(of.table[first:last], ((0, 0), (0, more)), constant_values=-1)
        part = Requests(of.cache, table, of.lens[first:last], 2, of.sees)
        return run_dense(kind, q[first:last], part, batch_invariant=True)

    out, lse = run(0, b)
    for first, last, more in ((0, 1, 0), (1, 4, 100), (b - 1, b, 2000)):
        got = run(first, last, more)
        assert got[0].tobytes() == out[first:last].tobytes()
        assert got[1].tobytes() == lse[first:last].tobytes()
    part = Requests(of.cache, of.table[:2], of.lens[:2], 2, of.sees)
    assert_dense((out[:2], lse[:2]), dense_oracle(fmt, q[:2], part))


@pytest.mark.parametrize("fmt", [oracle.V32, oracle.BF16_512], ids=lambda fmt: fmt.name)
def test_agrees_with_lists_of_all_rows(kind, rng, fmt):
    """A dense decode is a sparse one whose lists name what its queries see, up to rounding."""
    of, q = in_cache(rng, fmt, [100, 150], 64, 3), dense_queries(rng, fmt, 2, 3, 16)
    lists = np.full((2, 3, 150), -1, np.int32)
    for r, i in np.ndindex(2, 3):
        slots = of.slots(r, i)
        lists[r, i, : len(slots)] = slots
    sparse = cupy_mla.sparse_decode(*map(kind.put, (q, of.cache, lists)), 0.04)
    for a, b in zip(run_dense(kind, q, of, sm_scale=0.04), map(kind.take, sparse), strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=2**-7, atol=1e-3)


@pytest.mark.gpu
@every_format
def test_in_a_captured_graph(rng, fmt):
    """Replayed, it takes the lengths and blocks that then lie in the arrays."""
    torch = pytest.importorskip("torch")
    kind = make("torch_cuda")
    of, other = (in_cache(rng, fmt, lens, 64, 2) for lens in ([500, 1, 0, 70], [3, 499, 80, 2]))
    shape = np.maximum(of.table.shape, other.table.shape)
    for requests in (of, other):
        missing = shape[1] - requests.table.shape[1]
        requests.table = np.pad(requests.table, ((0, 0), (0, missing)), constant_values=-1)
    blocks = max(of.cache.shape[0], other.cache.shape[0])
    caches = [paged_rows(rng, fmt, blocks, 64, np.zeros(0, np.int64)) for _ in range(2)]
    for cache, requests in zip(caches, (of, other), strict=True):
        cache[: requests.cache.shape[0]] = requests.cache
    q = dense_queries(rng, fmt, 4, 2, 16)
    arrays = [kind.put(a) for a in (q, caches[0], of.table, of.lens)]
    out = kind.put(poisoned((4, 2, 16, 512), fmt.dtype))
    cupy_mla.dense_decode(*arrays, 0.04, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = cupy_mla.dense_decode(*arrays, 0.04, out=out)
    for requests, cache in ((other, caches[1]), (of, caches[0])):
        for array, values in zip(arrays[1:], (cache, requests.table, requests.lens), strict=True):
            array.copy_(kind.put(values))
        graph.replay()
        kind.synchronize()
        assert_dense((kind.take(out), kind.take(lse)), dense_oracle(fmt, q, requests, sm_scale=0.04))


# --- values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sees", [Sees(), Sees(True, 35), Sees(False, 36)], ids=str)
def test_blocks_that_no_query_sees_may_be_anything(kind, rng, checked, sees):
    """Behind a request, and before its windows: the oldest of them is the first query's."""
    s_q, length, size = 3, 100, 16
    of = in_cache(rng, oracle.V32, [length, 0], size, s_q, sees)
    first = min(sees.rows(length, s_q, i).start for i in range(s_q)) // size
    of.table[0, :first] = -1
    check_dense(kind, oracle.V32, queries(rng, 2, s_q, 8, 576), of)
    of.table[0, first] = -1
    with pytest.raises(IndexError, match=rf"^block_table: block {first} of request 0 is -1"):
        run_dense(kind, queries(rng, 2, s_q, 8, 576), of)
