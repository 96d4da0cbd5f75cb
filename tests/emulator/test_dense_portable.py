"""`portable` over rows of a block table, both its shapes: beside the oracle, and its products are counted."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla.cuda.attention.choose import VARIABLE

from .. import oracle
from ..cases import sinks
from ..dense import Requests, check_dense, dense_queries, in_cache, off_zero, run_dense, some_view
from ..dense_hopper import windows_longer_than_requests
from ..kinds import gapped
from ..ops import test_dense_decode as of_operation
from .emulator import EmulatedGPU
from .test_portable import TILE_ROWS, mmas_of_lost, mmas_of_tile

SHAPES = pytest.mark.parametrize("name", TILE_ROWS)
FORMATS = pytest.mark.parametrize("fmt", oracle.DENSE_FORMATS, ids=lambda fmt: fmt.name)


@pytest.fixture(autouse=True)
def runs_portable(emulated, monkeypatch):
    monkeypatch.setenv(VARIABLE, "portable")
    yield
    assert "portable" in emulated.launched


def some_lengths(rng: np.random.Generator, b: int) -> np.ndarray:
    """Mostly short ones, 0 among them, and one that is far longer."""
    lens = rng.integers(0, 100, b)
    lens[rng.integers(b)] = rng.integers(200, 900)
    return lens


def check_products(emulated: EmulatedGPU, fmt: oracle.Format, of: Requests, h_q: int, tile_rows: int) -> None:
    """No tile was multiplied that has no row of the table which a query sees, and each once for a request's queries."""
    capacity, lines = of.table.shape[1] * of.cache.shape[1], of.s_q * h_q
    begins = [of.sees.rows(int(n), of.s_q, 0).start for n in of.lens]
    ends = [min(of.sees.rows(int(n), of.s_q, of.s_q - 1).stop, capacity) for n in of.lens]
    tiles = sum(-(-max(end - begin, 0) // tile_rows) for begin, end in zip(begins, ends, strict=True))
    more = emulated.products["portable"] - tiles * mmas_of_tile(lines, fmt.d_qk, tile_rows)
    assert more == 0 or (fmt is oracle.V32 and more > 0 and more % mmas_of_lost(lines, tile_rows) == 0)


@pytest.mark.long(sample=2)
@SHAPES
@FORMATS
@pytest.mark.parametrize("num_splits", [None, 1, 3, "shares"])
def test_requests(kind, emulated, rng, monkeypatch, force, name, fmt, num_splits):
    """Lengths, queries, heads, views and strides as they come, by every division."""
    heads = int(rng.choice([16, 32, 64, 128]))
    monkeypatch.setenv(VARIABLE, name)
    if num_splits == "shares":
        force(division="shares")
        num_splits = None
    b, s_q = int(rng.choice([1, 2, 5, 17])), int(rng.choice([1, 2, 5, 8]))
    h_q = int(rng.integers(heads // 2, heads) + 1)
    block_size, sees = int(rng.choice([1, 16, 48, 64, 256])), some_view(rng)
    of = in_cache(rng, fmt, some_lengths(rng, b), block_size, s_q, sees, gap=int(rng.integers(3)))
    q = off_zero(fmt, gapped(dense_queries(rng, fmt, b, s_q, h_q), 0, 0, 1, 8), of)
    check_dense(kind, fmt, q, of, sink=sinks(rng, h_q), num_splits=num_splits, out_gaps=(0, 1, 2, 3))
    check_products(emulated, fmt, of, h_q, TILE_ROWS[name])


@pytest.mark.long(sample=2)
@SHAPES
@FORMATS
@of_operation.every_view
def test_tokens_see_rows_of_their_own(kind, rng, monkeypatch, name, fmt, sees):
    """Also where a request has fewer rows than tokens, and where none of a split's tiles is seen by some of them."""
    monkeypatch.setenv(VARIABLE, name)
    of_operation.test_queries_of_a_request_see_rows_of_their_own(kind, rng, fmt, sees)
    of = in_cache(rng, fmt, [3, 60, 130], 64, 8, sees)
    q = off_zero(fmt, dense_queries(rng, fmt, 3, 8, 6), of)
    check_dense(kind, fmt, q, of, num_splits=int(rng.integers(2, 20)))


@pytest.mark.long(sample=1)
@SHAPES
def test_windows_longer_than_requests(kind, rng, monkeypatch, name):
    monkeypatch.setenv(VARIABLE, name)
    windows_longer_than_requests(kind, rng, 3, oracle.DENSE_FORMATS)


@pytest.mark.long(sample=1)
@SHAPES
@FORMATS
def test_blocks_that_are_not_there(kind, emulated, rng, monkeypatch, name, fmt):
    """Some are strays, whole tiles of them; the table is too narrow for some requests; a length is negative."""
    monkeypatch.setenv(VARIABLE, name)
    of = in_cache(rng, fmt, [300, 200, 400, 64, 90], 16, 3, some_view(rng))
    strays = np.where(rng.random(of.table.shape) < 0.3, of.cache.shape[0] + rng.integers(0, 9), of.table)
    of.table = strays.astype(np.int32)
    of.table[0, 4:12] = -1
    of.table[1, :] = -(2**31)
    of.table = of.table[:, :20]
    of.lens[4] = -5
    q = off_zero(fmt, dense_queries(rng, fmt, 5, 3, 20), of)
    out, _ = check_dense(kind, fmt, q, of, num_splits=rng.choice([None, 2]))
    assert not out[[1, 4]].astype(np.float32).any()
    check_products(emulated, fmt, of, 20, TILE_ROWS[name])


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("fmt", [oracle.BF16_576, oracle.BF16_512], ids=lambda fmt: fmt.name)
@SHAPES
def test_rows_at_odd_places(kind, rng, monkeypatch, fmt, name):
    """bf16 rows that start at multiples of 2 bytes alone are copied value by value."""
    monkeypatch.setenv(VARIABLE, name)
    of = in_cache(rng, fmt, [90, 40], 16, 2)
    of.cache = gapped(of.cache, 0, 1, 3)
    check_dense(kind, fmt, off_zero(fmt, dense_queries(rng, fmt, 2, 2, 9), of), of)


@pytest.mark.long(sample=1)
@FORMATS
def test_bits_of_a_request(kind, rng, fmt):
    """They depend on nothing else in the batch, nor on the table's width, where a call asks for that."""
    of, q = in_cache(rng, fmt, some_lengths(rng, 9), 64, 2), dense_queries(rng, fmt, 9, 2, 16)
    out, lse = run_dense(kind, q, of, batch_invariant=True)
    for r in rng.choice(9, 3):
        table = np.pad(of.table[r : r + 1], ((0, 0), (0, int(rng.integers(2000)))), constant_values=-1)
        alone = Requests(of.cache, table, of.lens[r : r + 1], 2, of.sees)
        got = run_dense(kind, q[r : r + 1], alone, batch_invariant=True)
        assert got[0].tobytes() == out[r].tobytes()
        assert got[1].tobytes() == lse[r].tobytes()


@pytest.mark.long(sample=1)
@FORMATS
def test_a_call_again_with_other_lengths(kind, rng, fmt):
    """Nothing of a call stays from the one before: lengths and blocks are those that then lie in the arrays."""
    of = in_cache(rng, fmt, some_lengths(rng, 7), 64, 2)
    q, longest = dense_queries(rng, fmt, 7, 2, 16), of.lens
    for _ in range(3):
        check_dense(kind, fmt, off_zero(fmt, q, of), of)
        of.lens = rng.integers(0, longest + 1, dtype=np.int32)
        order = rng.permutation(7)
        longest, of.table = longest[order], of.table[order]
        of.lens = np.minimum(of.lens, longest)
