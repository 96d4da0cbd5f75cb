"""Which shape of the top-k kernel serves a call."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from cupy_mla import topk_indices
from cupy_mla.arguments import PagedKeys, RaggedKeys, Selection
from cupy_mla.bridges import describe
from cupy_mla.calls.operation import forget_calls
from cupy_mla.cuda import driver, logits, topk
from cupy_mla.cuda.driver import Gpu
from cupy_mla.cuda.structs import LOGITS
from cupy_mla.cuda.topk import (
    ANY_WIDTH,
    BF16_TABLES,
    FLOAT32_TABLES,
    LEAST_CLUSTER_WIDTH,
    Tables,
    choose,
    kernel,
    kernels,
)
from tests.ops.test_topk import ADVERSARIAL, adversarial, by_sort

SMS = 132
AT_ONCE = (SMS, SMS // 2, 44, 30, 24, 20, 16, 13)  # clusters of 1 to 8 CTAs


@pytest.fixture
def at_once(monkeypatch) -> None:
    monkeypatch.setattr(driver, "clusters_at_once", lambda kernel, device: AT_ONCE)


def test_calls_have_the_shape_for_their_rows_and_width(at_once, rng) -> None:
    """Of the table for so many rows and CTAs a row: of the narrowest rows that fit, the last shape that is for so many
    rows an SM and serves k."""
    widths = (1, *(of.most + n for table in FLOAT32_TABLES for of in table[:-1] for n in (0, 1)))
    for width, rows in product(widths, (1, 12, 31, 64, SMS, SMS + 1, 2 * SMS + 1, 3 * SMS + 1, 4 * SMS + 1, 4096)):
        k = int(rng.choice([1, 512, 2048, 2049, 3072, 3073, 4096]))
        shape, cluster = choose(Gpu(0, SMS, 90, 227), rows, width, k)
        table = FLOAT32_TABLES.many if rows > SMS else FLOAT32_TABLES.few if cluster == 1 else FLOAT32_TABLES.clusters
        narrowest = next(of for of in table if width <= cluster * of.most)
        serving = {above: of for above, of in narrowest.shapes if rows > above * SMS and k <= of.most_k}
        assert shape == serving[max(serving)]


def test_clusters_are_for_few_rows_that_are_wide(at_once) -> None:
    """The fewer rows and the wider, the larger; all run at a time."""
    rows, widths = range(1, SMS + 2), (4096, 12288, 12289, 16384, 24576, 32768, 65536, 131072, 131073, 1 << 20)
    sizes = np.array([[choose(Gpu(0, SMS, 90, 227), n, width, 2048)[1] for width in widths] for n in rows])
    assert (np.diff(sizes, axis=0) <= 0).all()
    assert (np.diff(sizes, axis=1) >= 0).all()
    assert {*sizes.flat} == {1, 2, 4, 8}
    assert all(n <= AT_ONCE[size - 1] for n, row in zip(rows, sizes, strict=True) for size in row if size > 1)
    held_by_one = max(of.most for of in FLOAT32_TABLES.few for _, shape in of.shapes if not shape.streamed)
    some_sms = sizes * np.array(rows)[:, None] * (sizes > 1)
    assert (some_sms[:, np.array(widths) <= held_by_one] <= 4 * SMS // 5).all()


def test_clusters_that_run_at_a_time_are_those_of_the_gpu(monkeypatch) -> None:
    monkeypatch.setattr(driver, "clusters_at_once", lambda kernel, device: (SMS, 66, 44, 29, 26, 22, 18, 15))
    chosen = [choose(Gpu(0, SMS, 90, 227), rows, 33856, 2048)[1] for rows in (15, 16, 29, 30)]
    assert chosen == [8, 4, 4, 1]


@pytest.mark.parametrize("kind", Tables._fields)
@pytest.mark.parametrize("tables", [FLOAT32_TABLES, BF16_TABLES], ids=["float32", "bfloat16"])
def test_tables_are_in_order_and_leave_no_call_out(tables, kind: str) -> None:
    table = getattr(tables, kind)
    assert [widths.most for widths in table] == sorted({widths.most for widths in table})
    assert table[-1].most == ANY_WIDTH
    for most, shapes in table:
        assert [above for above, _ in shapes] == sorted({above for above, _ in shapes})
        assert shapes[0][0] == (kind == "many")
        assert shapes[0][1].most_k == 4096
        for _, shape in shapes:
            assert (shape.clusters, shape.few) == (kind == "clusters", kind == "few")
            assert shape.streamed or most <= shape.held


def test_any_call_has_a_kernel_that_holds_or_streams_its_rows(monkeypatch) -> None:
    sms = 0
    monkeypatch.setattr(driver, "clusters_at_once", lambda kernel, device: tuple(sms // n for n in range(1, 9)))
    compiled = set(kernels())
    for rows in (1, 2, 7, 12, 13, 16, 17, 33, 66, 67, 108, 109, 132, 133, 300, 390, 500, 5000):
        for width in (
            0, 1, 4096, 4097, 8192, 10240, 10752, 12288, 12289, 16384, 24576, 24577, 65536, 131072, 131073, 1 << 20
        ):  # fmt: skip
            for sms, capability, k, bf16 in product((16, 108, 132), (80, 90), (1, 2048, 3072, 4096), (False, True)):
                shape, cluster = choose(Gpu(0, sms, capability, 163), rows, width, k, bf16)
                assert kernel(shape, bf16) in compiled
                assert k <= shape.most_k
                assert shape.streamed or width <= shape.held * cluster
                assert shape.clusters == (cluster > 1)
                assert cluster == 1 or (capability == 90 and rows * cluster <= sms and width > LEAST_CLUSTER_WIDTH)
                if cluster > 1:
                    assert kernel(shape, bf16).max_cluster >= cluster


@pytest.mark.parametrize("limit", [1, 3000, 9000, 1 << 20])
def test_logits_fit_the_workspace(limit: int) -> None:
    """All chunks have one workspace of at most so many bytes, or of a chunk of one query or one request."""
    gpu = Gpu(0, SMS, 90, 227)
    of_rows = {
        "q8": np.zeros((60, 64, 128), np.uint8), "k8": np.zeros((41, 128), np.uint8), "ks": np.zeros(41, np.float32),
        "w": np.zeros((60, 64), np.float32), "starts": np.zeros(60, np.int32), "ends": np.zeros(60, np.int32),
    }  # fmt: skip
    of_pages = {
        "q8": np.zeros((20, 3, 64, 128), np.uint8), "kv_cache": np.zeros((5, 64, 132), np.uint8),
        "w": np.zeros((60, 64), np.float32), "lens": np.zeros(20, np.int32), "table": np.zeros((20, 1), np.int32),
    }  # fmt: skip
    rows, pages = ([describe(name, a) for name, a in of.items()] for of in (of_rows, of_pages))
    chosen = describe("out", np.zeros((60, 9), np.int32))
    row = 4 * 44  # bytes of the logits over 41 keys
    for least, program in (
        (row, topk.select_rows(gpu, RaggedKeys(*rows), Selection(9, limit, chosen), None, None, None)),
        (3 * row, topk.select_rows_paged(gpu, PagedKeys(*pages, None), Selection(9, limit, chosen), 41, True)),
    ):
        steps = [step.params.values[LOGITS.index["out"]] for step in program if step.params.of is LOGITS]
        assert len({out.buffer for out in steps}) == 1
        assert steps[0].buffer.nbytes <= max(limit, least)
        assert len(steps) == -(-60 * row // (max(limit // least, 1) * least))


ABOUT_K = "about k are numbers"


def about_k_numbers(rng: np.random.Generator, width: int, k: int) -> np.ndarray:
    """Three rows of about k numbers. The others are -inf, and some NaN of either sign, which are smaller still."""
    rows = rng.standard_normal((3, width), np.float32)
    for row in rows:
        others = rng.permutation(width)[k + rng.integers(-k // 4, k // 4 + 1) :]
        bits = rng.choice(np.array([0xFF800000, 0x7FC00000, 0xFFFFFFFF], np.uint32), len(others), p=[0.9, 0.05, 0.05])
        row[others] = bits.view(np.float32)
    return rows


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["random", ABOUT_K, *ADVERSARIAL])
def test_each_shape(monkeypatch, rng, name: str) -> None:
    """Each shape gets rows with ends of their own, however many rows it is meant for; with starts, and without."""
    cupy = pytest.importorskip("cupy")
    gpu = driver.gpu(driver.THREAD.current_device())
    for table in FLOAT32_TABLES:
        for most, shapes in table:
            for _, shape in shapes:
                if not kernel(shape, False).suits(gpu.capability):
                    continue
                cluster = int(rng.choice([2, 4, 8])) if shape.clusters else 1
                least, most_held = (shape.held, 5 * shape.held) if shape.streamed else (most // 2, most)
                width = cluster * int(rng.integers(least, most_held + 1))
                drawn = name not in ADVERSARIAL
                row = rng.standard_normal(width, np.float32) if drawn else adversarial(rng, name, width)
                # Stored behind one another, or so that all begin at multiples of four; what lies between is largest.
                stored = np.full((3, width + int(rng.choice([0, -width % 4]))), np.inf, np.float32)
                stored[:, :width] = row, np.roll(row, width // 3), row[::-1]
                logits = cupy.asarray(stored)[:, :width]
                starts = rng.integers(-2, width // 4, 3, dtype=np.int32)
                ends = rng.integers([1, width // 2, width // 2], width + 5, dtype=np.int32)
                k = int(rng.choice([1, 63, 2048, shape.most_k]))
                if name == ABOUT_K:
                    stored[:, :width] = about_k_numbers(rng, width, k)
                    logits, ends = cupy.asarray(stored)[:, :width], np.full(3, width, np.int32)
                monkeypatch.setattr(topk, "choose", lambda *_, of=(shape, cluster): of)
                for begins in (starts, None):
                    forget_calls()
                    of_rows = begins if begins is None else cupy.asarray(begins)
                    got = cupy.asnumpy(topk_indices(logits, k, of_rows, cupy.asarray(ends)))
                    for i in range(3):
                        begin = 0 if begins is None else max(begins[i], 0)
                        expected = by_sort(stored[i, begin : min(max(ends[i], begin), width)], k)
                        case = f"{shape}, {cluster}, {width}, k {k}, {begin} to {ends[i]}"
                        np.testing.assert_array_equal(got[i], expected, err_msg=case)
    forget_calls()


def all_chosen(program) -> list[int]:
    """Of the launches that make logits: queries that see so many keys get none."""
    return [step.params.values[LOGITS.index["all_chosen"]] for step in program if step.params.of is LOGITS]


def test_only_selections_make_no_logits_of_short_rows() -> None:
    gpu = Gpu(0, SMS, 90, 227)
    of = {
        "q8": np.zeros((6, 64, 128), np.uint8), "k8": np.zeros((40, 128), np.uint8), "ks": np.zeros(40, np.float32),
        "w": np.zeros((6, 64), np.float32), "starts": np.zeros(6, np.int32), "ends": np.zeros(6, np.int32),
    }  # fmt: skip
    rows = [describe(name, a) for name, a in of.items()]
    chosen = describe("out", np.zeros((6, 9), np.int32))
    program = topk.select_rows(gpu, RaggedKeys(*rows), Selection(9, 4 * 40 * 4, chosen), None, None, None)
    assert all_chosen(program) == [9, 9]
    assert all_chosen(
        logits.indexer_logits(gpu, RaggedKeys(*rows), True, False, describe("out", np.zeros((6, 40), np.float32)))
    ) == [0]

    of = {
        "q8": np.zeros((3, 2, 64, 128), np.uint8), "kv_cache": np.zeros((5, 64, 132), np.uint8),
        "w": np.zeros((6, 64), np.float32), "lens": np.zeros(3, np.int32), "table": np.zeros((3, 1), np.int32),
    }  # fmt: skip
    pages = [describe(name, a) for name, a in of.items()]
    assert all_chosen(
        topk.select_rows_paged(gpu, PagedKeys(*pages, None), Selection(9, 1 << 20, chosen), 40, True)
    ) == [9]
    out = describe("out", np.zeros((6, 40), np.float32))
    assert all_chosen(logits.paged_indexer_logits(gpu, PagedKeys(*pages, None), True, out)) == [0]

    schedule = describe("schedule", np.zeros((4, 32), np.int32))  # its shares count the logits of every row
    assert all_chosen(
        topk.select_rows_paged(gpu, PagedKeys(*pages, schedule), Selection(9, 1 << 20, chosen), 40, True)
    ) == [0]
    assert all_chosen(
        topk.select_rows_paged(gpu, PagedKeys(*pages, schedule), Selection(9, 4 * 40 * 2, chosen), 40, True)
    ) == [
        9,
        9,
        9,
    ]
    # No row is longer than k.
    for width, launches in ((9, []), (10, [0])):
        program = topk.select_rows_paged(gpu, PagedKeys(*pages, schedule), Selection(9, 1 << 20, chosen), width, True)
        assert (all_chosen(program), len(program)) == (launches, 1 + len(launches))
