"""Which kernel makes the indexer's logits, and that the kernels agree."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from cupy_mla import indexer_logits, paged_indexer_logits
from cupy_mla.calls.signature import forget_calls
from cupy_mla.cuda import logits_sm90
from cupy_mla.cuda.driver import Gpu
from cupy_mla.cuda.logits import NAMES, PORTABLE, SM90, VARIABLE, choose
from cupy_mla.cuda.paging import NO_TABLE
from cupy_mla.cuda.program import Launch
from cupy_mla.cuda.structs import LOGITS
from tests import indexers, oracle_indexer
from tests.ops.test_logits import paged, put, ragged

from ..fake_gpu import FakeGPU, HostCuPy


@pytest.fixture
def host(monkeypatch, launched):
    pytest.importorskip("torch")
    cupy = pytest.importorskip("cupy")
    monkeypatch.delenv(VARIABLE, raising=False)
    gpu = FakeGPU(monkeypatch)
    with cupy.cuda.using_allocator(gpu.malloc):
        yield HostCuPy()
    forget_calls()
    gc.collect()


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
    assert choose(90, True, None).kernel == choose(90, True, "").kernel == SM90
    for capability, aligned in ((80, True), (89, True), (90, False), (100, True), (120, True)):
        assert choose(capability, aligned, None).kernel == PORTABLE
        assert choose(capability, aligned, PORTABLE).kernel == PORTABLE
        with pytest.raises(ValueError, match=f"^{VARIABLE} is logits_sm90, which cannot serve this call"):
            choose(capability, aligned, SM90)


@pytest.mark.parametrize("name", NAMES)
def test_compact_rows_are_made_by_every_kernel(host, launched, monkeypatch, rng, name: str) -> None:
    monkeypatch.setenv(VARIABLE, name)
    for keys, width in ((50, 7), (50, 50), (50, 90), (0, 3)):
        launched.clear()
        assert indexer_logits(**put(host, ragged(rng, 3, keys, 64)), compact_width=width).shape == (3, width)
        assert launched == {name}


def launch(heads: int, paged: bool, requests: int, queries: int, width: int) -> Launch:
    params = LOGITS(table=NO_TABLE, **{name: 0 for name in LOGITS.index if "." not in name})
    return logits_sm90.launch(Gpu(0, 132, 90, 227), heads, paged, requests, queries, width, params)


@pytest.mark.parametrize(
    ("heads", "paged", "queries", "rows", "warpgroups", "together"),
    [
        (64, False, 1, 256, 2, 0), (64, False, 4, 256, 2, 0), (64, False, 5, 128, 4, 1), (64, True, 1, 64, 2, 0),
        (64, True, 2, 128, 3, 0), (64, True, 3, 192, 2, 0), (64, True, 4, 256, 2, 0), (64, True, 5, 128, 4, 1),
        (40, True, 1, 64, 2, 0), (32, True, 2, 64, 2, 0), (8, True, 3, 128, 3, 0), (32, True, 5, 192, 2, 0),
        (24, True, 9, 128, 4, 1),
    ],
)  # fmt: skip
def test_tiles(heads: int, paged: bool, queries: int, rows: int, warpgroups: int, together: int) -> None:
    found = launch(heads, paged, 3, queries, 1000).kernel.defines
    padded = 32 if heads <= 32 else 64
    assert (found["HEADS"], found["QUERIES"] * padded) == (padded, rows)
    assert (found["WARPGROUPS"], found["TOGETHER"]) == (warpgroups, together)


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
