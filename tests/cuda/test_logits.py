"""Which kernel makes the indexer's logits, and that the kernels agree."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from cupy_mla import (
    indexer_logits,
    paged_indexer_logits,
    paged_indexer_schedule,
    quantize_indexer_q,
    select_rows_paged,
    widen_mxfp4,
)
from cupy_mla.calls.operation import forget_calls
from cupy_mla.cuda import logits, logits_sm90
from cupy_mla.cuda.driver import Gpu
from cupy_mla.cuda.logits import NAMES, PORTABLE, SM90, VARIABLE, choose
from cupy_mla.cuda.paging import NO_TABLE
from cupy_mla.cuda.program import Launch
from cupy_mla.cuda.structs import LOGITS
from tests import indexers, oracle_indexer
from tests.kinds import BF16, E5M2
from tests.ops.test_logits import paged, put, ragged

from ..fake_gpu import HostCuPy


@pytest.fixture
def host(monkeypatch, launched, gpu):
    pytest.importorskip("torch")
    cupy = pytest.importorskip("cupy")
    monkeypatch.delenv(VARIABLE, raising=False)
    with cupy.cuda.using_allocator(gpu.malloc):
        yield HostCuPy()


def test_the_environment_names_kernels_at_any_time(host, launched, monkeypatch, rng) -> None:
    inputs = put(host, ragged(rng, 3, 50, 64))
    for name in (PORTABLE, SM90, PORTABLE, SM90):
        launched.clear()
        monkeypatch.setenv(VARIABLE, name)
        indexer_logits(**inputs)
        assert launched == {name}
    monkeypatch.setenv(VARIABLE, "logits_sm9")
    with pytest.raises(ValueError, match=r"^CUPY_MLA_INDEXER_KERNELS must be one of logits, .*, got 'logits_sm9'$"):
        indexer_logits(**inputs)


def test_hopper_takes_its_own_kernel_where_keys_are_aligned() -> None:
    assert choose(90, True, None) == choose(90, True, "") == SM90
    for capability, aligned in ((80, True), (89, True), (90, False), (100, True), (120, True)):
        assert choose(capability, aligned, None) == PORTABLE
        assert choose(capability, aligned, PORTABLE) == PORTABLE
        with pytest.raises(ValueError, match=f"^{VARIABLE} is logits_sm90, which cannot serve this call"):
            choose(capability, aligned, SM90)


def test_hopper_multiplies_two_types_by_the_portable_kernel(host, launched, monkeypatch, rng) -> None:
    for q, k in product((False, True), (False, True)):
        launched.clear()
        inputs = put(host, ragged(rng, 3, 50, 64, e5m2=(q, k)))
        assert (inputs["q8"].dtype == E5M2) == q
        indexer_logits(**inputs)
        assert launched == {SM90 if q == k else PORTABLE}
    monkeypatch.setenv(VARIABLE, SM90)
    with pytest.raises(ValueError, match=r"one of queries and keys is e5m2, the other e4m3$"):
        indexer_logits(**put(host, ragged(rng, 3, 50, 64, e5m2=(True, False))))


def test_widened_arrays_are_e5m2_in_cupy(host) -> None:
    """It has no kernels for this dtype, but keeps it, as views do."""
    q, weights = host.put(np.zeros((3, 8, 128), BF16)), host.put(np.zeros((3, 8), np.float32))
    q8, w = quantize_indexer_q(q, weights, scale_format="mxfp4")
    codes, scales = host.put(np.zeros((3, 8, 64), np.uint8)), host.put(np.zeros((3, 8, 4), np.uint8))
    for made in (q8, widen_mxfp4(codes, scales)[0]):
        assert (made.dtype, made.shape) == (E5M2, (3, 8, 128))
        assert (made[1:, None].dtype, made[1:, None].shape) == (E5M2, (2, 1, 8, 128))
        assert quantize_indexer_q(q, weights)[0].dtype == np.uint8
    assert w.dtype == np.float32


@pytest.mark.parametrize("name", NAMES)
def test_compact_rows_are_made_by_every_kernel(host, launched, monkeypatch, rng, name: str) -> None:
    monkeypatch.setenv(VARIABLE, name)
    for keys, width in ((50, 7), (50, 50), (50, 90), (0, 3)):
        launched.clear()
        assert indexer_logits(**put(host, ragged(rng, 3, keys, 64)), compact_width=width).shape == (3, width)
        assert launched == {name}


def launch(heads: int, paged: bool, requests: int, queries: int, width: int, shares: int | None = None) -> Launch:
    keys = logits_sm90.PAGED_FP8 if paged else logits_sm90.ROWS
    params = LOGITS(table=NO_TABLE, **{name: 0 for name in LOGITS.index if "." not in name})
    return logits_sm90.launch(
        Gpu(0, 132, 90, 227), logits_sm90.Work(heads, keys, requests, queries, width, shares=shares), params
    )


def test_tiles() -> None:
    """Of whole queries, in units of 64 rows. Over a cache one tile has all queries of a request, if they fit."""
    compiled = set(logits_sm90.kernels())
    for heads, of_pages, queries in product(range(8, 65, 8), (False, True), range(1, 10)):
        kernel = launch(heads, of_pages, 3, queries, 1000).kernel
        padded, rows = 32 if heads <= 32 else 64, kernel.defines["HEADS"] * kernel.defines["QUERIES"]
        assert kernel in compiled
        assert kernel.defines["HEADS"] == padded
        assert rows in (64, 128, 192, 256)
        if of_pages and queries * padded <= 256:
            assert rows == -(-queries * padded // 64) * 64
            assert not kernel.defines["TOGETHER"]
        assert kernel.defines["TOGETHER"] == (queries * padded > 256)


@pytest.mark.parametrize(
    ("requests", "queries", "width", "ctas"),
    [
        (1, 1, 1000, 16), (64, 1, 8192, 132), (64, 1, 32768, 264), (64, 2, 32768, 132), (3, 9, 640, 60),
        (3, 8, 640, 30), (2, 1, 0, 2),
    ],
)  # fmt: skip
def test_as_many_ctas_as_run_at_a_time_and_have_work(requests: int, queries: int, width: int, ctas: int) -> None:
    assert launch(64, True, requests, queries, width).grid == (ctas, 1, 1)


def test_ctas_are_alone_where_one_an_sm_is_launched_and_two_fit() -> None:
    compiled = set(logits_sm90.kernels())
    for queries, width, alone in ((1, 8192, True), (1, 32768, False), (2, 8192, False), (9, 8192, False)):
        kernel = launch(64, True, 64, queries, width).kernel
        assert kernel in compiled
        assert kernel.alone == alone


def test_two_queries_have_a_tile_of_their_own_where_an_sm_has_many_units_of_a_schedule() -> None:
    compiled = set(logits_sm90.kernels())
    of_sm = 64 * logits_sm90.LONG_UNITS  # keys
    for heads, queries, width, underway in (
        (64, 2, 2 * of_sm, 0), (64, 2, 2 * of_sm + 64, 1), (32, 4, 2 * of_sm + 64, 1), (64, 3, 9 * of_sm, 0),
        (64, 1, 9 * of_sm, 0),
    ):  # fmt: skip
        for shares in (None, 132):
            kernel = launch(heads, True, 66, queries, width, shares).kernel
            assert kernel in compiled
            assert kernel.defines["UNDERWAY"] == (underway if shares else 0)


def test_a_schedule_has_shares_that_begin_late_where_an_sm_has_two_ctas_and_many_units() -> None:
    gpu = Gpu(0, 132, 90, 227)
    long = 64 * logits_sm90.LATE_SHARES_UNITS  # keys
    for heads, requests, queries, width, shares in (
        (64, 132, 1, long, 264), (64, 132, 1, long + 64, 792), (32, 132, 2, long + 64, 792),
        (64, 132, 2, 9 * long, 132), (64, 1, 1, 640, 10), (64, 1, 1, 132 * long + 64, 792),
    ):  # fmt: skip
        assert logits_sm90.shares_of_schedule(gpu, heads, requests, queries, width) == shares


def test_a_schedule_has_a_cta_a_share() -> None:
    """And the SM for itself where every share has one; the kernel's variant with few instructions serves it."""
    assert launch(64, True, 64, 2, 8192).kernel.defines["SCHEDULED"] == 0
    for queries, shares, alone in ((1, 7, True), (1, 132, True), (1, 133, False), (1, 264, False), (2, 132, False)):
        found = launch(64, True, 64, queries, 8192, shares)
        assert (found.grid, found.kernel.alone) == ((shares, 1, 1), alone)
        assert found.kernel in set(logits_sm90.kernels())
        assert found.kernel.defines["SCHEDULED"] == 1
        beside = queries == 1 and not alone  # two CTAs an SM, of fewer stages
        assert (found.kernel.defines["STAGES"] == logits_sm90.BESIDE.stages) == beside


def test_schedules_serve_requests_of_one_tile_and_blocks_of_whole_units() -> None:
    for heads, queries, block_size, served in (
        (64, 4, 64, True), (64, 5, 64, False), (40, 5, 64, False), (32, 8, 128, True), (8, 9, 64, False),
        (64, 1, 16, False), (64, 1, 96, False),
    ):  # fmt: skip
        assert logits_sm90.scheduled(heads, queries, block_size) == served


@pytest.mark.parametrize(
    ("name", "n", "limit", "grids"),
    [
        (SM90, 1, 1 << 20, [9]), (SM90, 2, 1 << 20, [9]), (SM90, 5, 1 << 20, None), (PORTABLE, 1, 1 << 20, None),
        (SM90, 1, 800, None),
    ],
)  # fmt: skip
def test_who_takes_a_schedule(host, monkeypatch, rng, name: str, n: int, limit: int, grids: list[int] | None) -> None:
    """The portable kernel, requests of several tiles and chunks do without one."""
    found: list[int] = []
    make = logits._launch

    def noting(*args, **kwargs) -> Launch:
        made = make(*args, **kwargs)
        found.append(made.grid[0])
        return made

    monkeypatch.setattr(logits, "_launch", noting)
    monkeypatch.setenv(VARIABLE, name)
    made_inputs = paged(rng, 3, n, 64, 64, 200)
    inputs = put(host, made_inputs | {"kv_cache": np.ascontiguousarray(made_inputs["kv_cache"])})
    schedule = paged_indexer_schedule(inputs["context_lens"], inputs["block_table"], 200, 64, 9)
    assert schedule.shape == (9, 32)
    select_rows_paged(**inputs, k=20, max_workspace_bytes=limit)
    without = found.copy()
    found.clear()
    select_rows_paged(**inputs, k=20, max_workspace_bytes=limit, schedule=schedule)
    assert found == (grids or without)
    assert len(found) == (3 if limit < 1 << 20 else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_graph_that_makes_the_schedule_follows_lengths_and_table(hopper_gpu, launched, rng, n: int) -> None:
    """Calls one behind the other, which begin early, read the schedule of their own replay."""
    cupy = hopper_gpu.cupy
    requests, longest = 9, 3000
    made = paged(rng, requests, n, 64, 64, longest)
    blocks = len(made["kv_cache"])  # none of NaN, whoever sees them
    cache = indexers.key_cache(indexers.codes(rng, blocks, 64, 128), indexers.scales(rng, blocks, 64))
    inputs = put(hopper_gpu, made | {"kv_cache": np.ascontiguousarray(cache)})
    lens, table = inputs["context_lens"], inputs["block_table"]
    schedule = cupy.zeros((132, 32), np.int32)
    outs = [cupy.empty((requests * n, longest), np.float32) for _ in range(3)]
    chosen = cupy.empty((requests * n, 64), np.int32)

    def step() -> None:
        paged_indexer_schedule(lens, table, longest, 64, 132, out=schedule)
        for out in outs:
            paged_indexer_logits(**inputs, schedule=schedule, out=out)
        select_rows_paged(**inputs, k=64, schedule=schedule, out=chosen)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):  # compile, and let the memory pool have what a step allocates
            step()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for _ in range(5):
            lens[...] = cupy.asarray(rng.integers(0, longest + 1, requests, dtype=np.int32))
            table[...] = cupy.asarray(rng.permutation(table.size).reshape(table.shape).astype(np.int32))
            for out in outs:
                out.fill(np.nan)
            for _ in range(3):  # the next replay writes what the last one still reads
                graph.launch(stream)
            expected = paged_indexer_logits(**inputs)
            positions = select_rows_paged(**inputs, k=64)
            for out in outs:
                np.testing.assert_array_equal(out.get(), expected.get())
            np.testing.assert_array_equal(chosen.get(), positions.get())
    assert {"schedule", SM90} <= launched


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heads", [24, 64])
@pytest.mark.parametrize("n", [1, 2, 4, 9])
def test_paged_by_every_kernel(hopper_gpu, launched, monkeypatch, rng, name: str, heads: int, n: int) -> None:
    monkeypatch.setenv(VARIABLE, name)
    inputs = paged(rng, 5, n, heads, 64, 700)
    inputs["kv_cache"] = np.ascontiguousarray(inputs["kv_cache"])
    got = hopper_gpu.take(paged_indexer_logits(**put(hopper_gpu, inputs)))
    expected = oracle_indexer.paged_logits(**{"cache" if k == "kv_cache" else k: a for k, a in inputs.items()})
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    indexers.assert_close(got, expected)
    assert launched == {name}


@pytest.mark.gpu
@pytest.mark.parametrize("shares", [None, 5])
def test_two_queries_of_many_units(hopper_gpu, launched, monkeypatch, rng, shares: int | None) -> None:
    """By the tile that such calls have."""
    monkeypatch.setattr(logits_sm90, "LONG_UNITS", 0)
    forget_calls()
    inputs = paged(rng, 7, 2, 64, 64, 3000)
    inputs["kv_cache"] = np.ascontiguousarray(inputs["kv_cache"])
    there = put(hopper_gpu, inputs)
    schedule = (
        None if shares is None
        else paged_indexer_schedule(there["context_lens"], there["block_table"], 3000, 64, shares)
    )  # fmt: skip
    got = hopper_gpu.take(paged_indexer_logits(**there, schedule=schedule))
    forget_calls()
    expected = oracle_indexer.paged_logits(**{"cache" if k == "kv_cache" else k: a for k, a in inputs.items()})
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    indexers.assert_close(got, expected)
    assert SM90 in launched
    assert PORTABLE not in launched


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("m", "n", "heads"), [(17, 2000, 64), (300, 333, 40), (40, 1500, 32)])
def test_rows_by_every_kernel(hopper_gpu, launched, monkeypatch, rng, name: str, m: int, n: int, heads: int) -> None:
    monkeypatch.setenv(VARIABLE, name)
    inputs = ragged(rng, m, n, heads)
    got = hopper_gpu.take(indexer_logits(**put(hopper_gpu, inputs)))
    expected = oracle_indexer.ragged_logits(**inputs)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    indexers.assert_close(got, expected)
    assert launched == {name}
