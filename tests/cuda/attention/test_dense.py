"""Dense attention: which kernel serves a call, how its work is divided, and what is forced. Needs no GPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupy_mla
from cupy_mla.calls.operation import forget_calls
from cupy_mla.cuda.attention.choose import VARIABLE
from cupy_mla.cuda.attention.kernels import dense_fp8_sm90
from cupy_mla.cuda.kernel import Kernel
from cupy_mla.cuda.structs import DENSE
from cupy_mla.layouts import ATTENTION_LAYOUTS, BF16_576, PLAIN_FP8_576, V32_FP8, Layout

from ...fake_gpu import FakeGPU
from ...kinds import BF16, Torch

WIDTH = 100


@pytest.fixture(autouse=True)
def not_forced(monkeypatch) -> Iterator[None]:
    """Nor remembered from other GPUs."""
    monkeypatch.delenv(VARIABLE, raising=False)
    forget_calls()
    with cupy_mla.forced():
        yield
    forget_calls()


def on(monkeypatch: pytest.MonkeyPatch, capability: int, sms: int = 108) -> FakeGPU:
    return FakeGPU(monkeypatch, sms, capability)


def decode(
    layout: Layout, b: int, heads: int, s_q: int = 1, width: int = WIDTH, q_dtype: np.dtype = BF16, **more: Any
) -> None:
    kind = Torch()
    q, cache = np.zeros((b, s_q, heads, layout.d_qk), q_dtype), np.zeros((3, 64, layout.last_axis), layout.dtype)
    table, lens = np.zeros((b, width), np.int32), np.zeros(b, np.int32)
    cupy_mla.dense_decode(*map(kind.put, (q, cache, table, lens)), 0.04, layout=layout.name, **more)


def launched(gpu: FakeGPU) -> list[tuple[Kernel, tuple[int, ...]]]:
    """Kernels and grids since it was last asked."""
    found = [(of.kernel, of.grid[:3]) for of in gpu.log if of.kernel is not None]
    gpu.log.clear()
    return found


@pytest.mark.parametrize(("capability", "limit"), [(80, 163), (86, 99), (89, 99), (100, 163), (120, 99)])
@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS, ids=lambda layout: f"{layout.name} {layout.d_qk}")
def test_every_gpu_and_layout_is_served(monkeypatch, capability, limit, layout):
    """By the portable kernel in the shape that fits the GPU, over rows of a block table."""
    gpu = on(monkeypatch, capability)
    for heads, s_q, tile in ((1, 1, 16), (5, 3, 16), (17, 1, 32), (8, 4, 32), (16, 3, 64), (64, 1, 64), (128, 2, 64)):
        for b in (1, 7, 200):
            decode(layout, b, heads, s_q)
            kernel = launched(gpu)[0][0]
            assert kernel.name == "portable"
            assert kernel.defines["DENSE"] == 1
            assert (kernel.defines["HEADS"], kernel.defines["SHARED_LIMIT"]) == (tile, 1024 * limit)
            assert str(capability) in kernel.archs


def test_lengths_are_not_known_to_the_host(monkeypatch):
    """A large batch may have one long request: shares of its rows are found on the GPU, no CTA has whole items."""
    gpu = on(monkeypatch, 80)
    for b in (108, 216, 250, 1000):
        decode(BF16_576, b, 64)
        (_, grid), *more = launched(gpu)
        assert grid == (108, 1, 1), b
        assert not more


def test_asked_splits(monkeypatch):
    gpu = on(monkeypatch, 80)
    decode(BF16_576, 3, 128, 2, num_splits=5)
    assert [(kernel.name, grid) for kernel, grid in launched(gpu)] == [
        ("portable", (3 * 2 * 2, 5, 1)), ("combine", (6, 128, 1))
    ]  # fmt: skip
    decode(BF16_576, 3, 128, 2, num_splits=1)
    assert [grid for _, grid in launched(gpu)] == [(12, 1, 1)]


def test_batch_invariant_calls_are_split_alike(monkeypatch):
    """Whatever the batch and the width of the block table."""
    gpu = on(monkeypatch, 80)
    splits = set()
    for b, width in ((1, 1), (1, 4000), (7, 100), (300, 20)):
        decode(V32_FP8, b, 16, 2, width, batch_invariant=True)
        (_, grid), _ = launched(gpu)
        assert grid[0] == b
        splits.add(grid[1])
    assert len(splits) == 1


def test_more_rows_than_shares_can_count(monkeypatch):
    """They are worked on as whole items."""
    gpu = on(monkeypatch, 80)
    decode(BF16_576, 1, 64, 5, width=2**25)
    assert [grid for _, grid in launched(gpu)] == [(5, 1, 1)]


@pytest.mark.parametrize("layout", dense_fp8_sm90.LAYOUTS, ids=lambda layout: f"{layout.name} {layout.d_qk}")
def test_fp8_rows_on_hopper(monkeypatch, layout):
    """Few rows in clusters, many short requests whole, long ones in shares with a merge behind."""
    gpu = on(monkeypatch, 90, 132)
    for b, heads, width, names, grid in (
        (1, 16, 30, ["dense_fp8_sm90"], (15, 1, 1)),
        (300, 64, 3, ["dense_fp8_sm90"], (132, 1, 1)),
        (9, 128, 2000, ["dense_fp8_sm90", "dense_combine"], (132, 1, 1)),
    ):
        decode(layout, b, heads, width=width)
        kernels = launched(gpu)
        assert [kernel.name for kernel, _ in kernels] == names
        assert kernels[0][1] == grid
        assert kernels[0][0].defines["HEADS"] == (16 if heads <= 16 else 64)
        assert layout.defines().items() <= kernels[0][0].defines.items()


@pytest.mark.parametrize(
    ("b", "heads", "s_q", "cost"),
    [(66, 64, 1, 24), (67, 64, 1, 46), (120, 16, 4, 46), (67, 128, 1, 46), (100, 8, 1, 24), (100, 32, 1, 30)],
)
def test_what_cutting_items_costs_on_hopper(monkeypatch, b, heads, s_q, cost):
    """The more, the more lines an item has. Less where half of the SMs would have no item if none were cut."""
    gpu = on(monkeypatch, 90, 132)
    cupy_mla.forced("dense_sm90", "shares(heads=64)")
    decode(BF16_576, b, heads, s_q)
    kernel, params = gpu.log[0].kernel, gpu.log[0].params
    assert kernel is not None
    assert kernel.name == "dense_sm90"
    assert struct.unpack_from("i", params, DENSE.offsets[DENSE.index["cut_cost"]]) == (132 * cost,)


def test_queries_in_e4m3_have_the_same_kernels(monkeypatch):
    gpu = on(monkeypatch, 90, 132)
    for width in (3, 30, 2000):
        decode(PLAIN_FP8_576, 40, 16, width=width)
        of_bf16 = launched(gpu)
        decode(PLAIN_FP8_576, 40, 16, width=width, q_dtype=np.dtype(np.uint8))
        assert launched(gpu) == of_bf16
        assert of_bf16[0][0].name == "dense_fp8_sm90"


def test_splits_and_bits_of_fp8_rows_on_hopper(monkeypatch):
    """Asked splits are made; those of batch-invariant calls depend on neither batch nor table."""
    gpu = on(monkeypatch, 90, 132)
    decode(V32_FP8, 30, 64, width=2000, num_splits=7)
    kernel, grid = launched(gpu)[0]
    assert grid == (30 * 64 // kernel.defines["HEADS"] * 7, 1, 1)
    ctas = set()
    for b, width in ((1, 1), (1, 4000), (50, 100)):
        decode(V32_FP8, b, 16, 2, width, batch_invariant=True)
        (kernel, grid), (merge, _) = launched(gpu)
        assert merge.name == "dense_combine"
        ctas.add((kernel, grid[0] // b))
    assert len(ctas) == 1


@pytest.mark.parametrize("name", ["portable", "portable_99kb"])
@pytest.mark.parametrize("by", ["forced", "environment"])
def test_a_kernel_that_is_asked_for_runs(monkeypatch, name, by):
    gpu = on(monkeypatch, 80)
    if by == "environment":
        monkeypatch.setenv(VARIABLE, name)
    else:
        cupy_mla.forced(name)
    decode(BF16_576, 3, 16)
    kernel = launched(gpu)[0][0]
    assert kernel.defines["SHARED_LIMIT"] == 1024 * {"portable": 163, "portable_99kb": 99}[name]


@pytest.mark.parametrize(
    ("division", "grid"), [("whole", (3, 1, 1)), ("shares(ctas=5)", (5, 1, 1)), ("clusters(splits=4)", (3, 4, 1))]
)
def test_a_division_that_is_asked_for_is_taken(monkeypatch, division, grid):
    gpu = on(monkeypatch, 80)
    cupy_mla.forced(division=division)
    decode(BF16_576, 3, 16)
    assert launched(gpu)[0][1] == grid


@pytest.mark.parametrize(
    ("capability", "name", "division", "message"),
    [
        (80, "fp8_sm90", None, "^kernel is fp8_sm90, which cannot serve this call: dense decode of 16 heads over bf16"),
        (86, "portable", None, r"^kernel is portable, which cannot serve .* capability 8.6; portable_99kb can$"),
        (80, None, "teams", "^division is teams, which does not fit this call"),
    ],
)
def test_what_cannot_serve_a_call_is_an_error(monkeypatch, capability, name, division, message):
    gpu = on(monkeypatch, capability)
    cupy_mla.forced(name, division)
    with pytest.raises(ValueError, match=message):
        decode(BF16_576, 3, 16)
    assert not gpu.log


def test_an_unknown_name_in_the_environment_is_an_error(monkeypatch):
    on(monkeypatch, 80)
    monkeypatch.setenv(VARIABLE, "dense")
    with pytest.raises(ValueError, match=rf"^{VARIABLE} must be one of .*portable_99kb.*, got 'dense'"):
        decode(BF16_576, 3, 16)


def test_the_choice_is_explained(monkeypatch, capsys):
    on(monkeypatch, 80)
    monkeypatch.setenv("CUPY_MLA_EXPLAIN", "1")
    decode(BF16_576, 3, 16, 2)
    assert "dense decode of 16 heads over bf16 rows of 576, 3 x 2 queries, 6400 rows" in capsys.readouterr().err


@pytest.mark.parametrize("layout", [BF16_576, V32_FP8], ids=lambda layout: layout.name)
@pytest.mark.parametrize("offset", [0, 1, 4, 7])
def test_queries_that_are_not_aligned(monkeypatch, layout, offset):
    """Kernels for Hopper load 16 bytes of q at once: where it starts elsewhere, the portable kernel serves the call."""
    gpu, kind, d = on(monkeypatch, 90, 132), Torch(), layout.d_qk
    q = kind.put(np.zeros(5 * 16 * d + 8, BF16))[offset : offset + 5 * 16 * d].reshape(5, 1, 16, d)
    odd = q.data_ptr() % 16 != 0
    cache = np.zeros((3, 64, layout.last_axis), layout.dtype)
    table, lens = np.zeros((5, 30), np.int32), np.zeros(5, np.int32)
    cupy_mla.dense_decode(q, *map(kind.put, (cache, table, lens)), 0.04)
    assert odd or offset == 0
    assert (launched(gpu)[0][0].name == "portable") == odd
