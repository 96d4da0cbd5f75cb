"""What `tests/test_adding.py` runs in a copy of the tree with a made-up operation and a made-up cache layout.

Layout MADE_UP: rows of 576, of which 512 are e4m3 under a UE8M0 scale for each 64, and 64 are bfloat16. A block holds
the data of all its rows, 640 bytes each, then their scales, 8 bytes each.
"""

from __future__ import annotations

from itertools import islice

import ml_dtypes
import numpy as np
import pytest

import cupy_mla
from cupy_mla import layouts
from cupy_mla.cuda import all_kernels
from cupy_mla.ops.table import OPERATIONS, Wanted
from cupy_mla.selfcheck.cases import Case, cases

from ..compiled import needs_nvrtc
from ..emulator.conftest import emulated, kind  # noqa: F401 - fixtures
from ..emulator.emulator import needs_compiler
from ..test_kernels_compile import check

MADE_UP = layouts.by_name("made_up")
BLOCKS, BLOCK_SIZE = 4, 16
SLOTS = BLOCKS * BLOCK_SIZE
WANTED = Wanted((MADE_UP,), many=4)
OF_LAYOUT = {
    "concat_and_cache_mla", "cp_gather_and_upconvert_fp8_kv_cache", "sparse_decode", "dense_decode", "unpack_rows",
}  # fmt: skip


def drawn(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)


def scales_of(cache: np.ndarray) -> np.ndarray:
    """Of each row, [slots, 8] float64."""
    flat = cache.reshape(BLOCKS, -1)
    return np.exp2(flat[:, BLOCK_SIZE * 640 :].reshape(SLOTS, 8).astype(np.float64) - 127)


def rows_of(cache: np.ndarray) -> np.ndarray:
    """The rows that a cache holds, [slots, 576] float64."""
    data = cache.reshape(BLOCKS, -1)[:, : BLOCK_SIZE * 640].reshape(SLOTS, 640)
    nope = data[:, :512].view(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.repeat(scales_of(cache), 64, axis=1)
    rope = np.ascontiguousarray(data[:, 512:]).view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([nope, rope], axis=1)


@pytest.fixture
def packed(rng) -> tuple[np.ndarray, np.ndarray]:
    """A full cache, and what was packed into it, by slot."""
    rows, cache = drawn(rng, SLOTS, 576), np.full((BLOCKS, BLOCK_SIZE, 648), 0xFF, np.uint8)
    slots = rng.permutation(SLOTS)
    cupy_mla.concat_and_cache_mla(rows[:, :512], rows[:, 512:], cache, slots, layout="made_up")
    by_slot = np.empty((SLOTS, 576))
    by_slot[slots] = rows
    return cache, by_slot


def test_rows_are_packed(packed) -> None:
    cache, rows = packed
    amax = np.abs(rows[:, :512]).reshape(SLOTS, 8, 64).max(axis=-1)
    scales = scales_of(cache)
    assert (amax <= 448 * scales).all()
    assert (amax > 448 * scales / 2).all()
    of_columns = np.pad(np.repeat(scales, 64, axis=1), ((0, 0), (0, 64)))  # RoPE has none
    bound = np.maximum(np.abs(rows) / 16, np.exp2(-10) * of_columns)  # half a step of e4m3
    assert (np.abs(rows_of(cache) - rows) <= bound).all()
    np.testing.assert_array_equal(rows_of(cache)[:, 512:], rows[:, 512:])


def test_rows_are_gathered(packed) -> None:
    cache, _ = packed
    table, lens = np.array([[2, 1], [0, 3]], np.int32), np.array([20, 9], np.int32)
    out = np.zeros((29, 576), ml_dtypes.bfloat16)
    cupy_mla.cp_gather_and_upconvert_fp8_kv_cache(cache, out, table, lens, np.array([0, 20], np.int32))
    slots = np.concatenate([np.arange(32, 48), np.arange(16, 20), np.arange(9)])
    np.testing.assert_array_equal(out.astype(np.float64), rows_of(cache)[slots])


def test_rows_are_unpacked(packed) -> None:
    cache, _ = packed
    np.testing.assert_array_equal(cupy_mla.unpack_rows(cache, np.arange(SLOTS)), rows_of(cache))


def test_rows_are_attended(rng, packed) -> None:
    cache, _ = packed
    q, indices, scale = drawn(rng, 2, 3, 5, 576), rng.integers(-5, SLOTS, (2, 3, 40), dtype=np.int32), 0.1
    out, lse = cupy_mla.sparse_decode(q, cache, indices, scale)
    for b, s in np.ndindex(2, 3):
        rows = rows_of(cache)[indices[b, s][indices[b, s] >= 0]]
        p = np.exp(q[b, s].astype(np.float64) @ rows.T * scale)
        np.testing.assert_allclose(lse[b, :, s], np.log(p.sum(-1)), rtol=1e-5, atol=1e-5)
        want = (p / p.sum(-1, keepdims=True)) @ rows[:, :512]
        np.testing.assert_allclose(out[b, s].astype(np.float64), want, rtol=2**-7, atol=1e-3)
    table, lens = np.array([[3, 1], [2, 0]], np.int32), np.array([20, 32], np.int32)
    dense = cupy_mla.dense_decode(q, cache, table, lens, scale, causal=False)
    lists = table[:, np.arange(32) // 16] * 16 + np.arange(32) % 16
    lists = np.where(np.arange(32) < lens[:, None], lists, -1)[:, None].repeat(3, axis=1).astype(np.int32)
    for of_rows, of_lists in zip(dense, cupy_mla.sparse_decode(q, cache, lists, scale), strict=True):
        np.testing.assert_array_equal(of_rows, of_lists)


def test_front_doors_take_the_layout(rng, packed) -> None:
    cache, _ = packed
    q, indices = drawn(rng, 1, 1, 64, 576), rng.integers(0, SLOTS, (1, 1, 64), dtype=np.int32)
    schedule, _ = cupy_mla.get_mla_metadata()
    out, _ = cupy_mla.flash_mla_with_kvcache(
        q, cache[:, :, None], None, None, 512, schedule, is_fp8_kvcache=True, softmax_scale=0.1, indices=indices
    )
    np.testing.assert_array_equal(out, cupy_mla.sparse_decode(q, cache, indices, 0.1)[0])
    config = cupy_mla.SparseMLAConfig(16, cache_layout="made_up")
    assert config.layout is MADE_UP
    assert config.use_mixed_batch


def test_self_check_finds_them(rng) -> None:
    found = {(case.operation.name, "made_up" in case.call.detail) for case in cases(rng, WANTED)}
    assert {name for name, of_layout in found if of_layout} == OF_LAYOUT
    assert ("negate", False) in found


def test_graphs_find_the_operation() -> None:
    torch = pytest.importorskip("torch")
    import cupy_mla.integrations.torch_ops  # noqa: F401 - registers the custom ops

    assert str(torch.ops.cupy_mla.negate.default._schema) == "cupy_mla::negate(Tensor x) -> Tensor"
    assert torch.ops.cupy_mla.negate(torch.ones(2)).tolist() == [-1, -1]


@needs_nvrtc
def test_kernels_compile() -> None:
    of_layout = [kernel for kernel in all_kernels() if kernel.defines.get("ROW_READER") == "rows/made_up.cuh"]
    assert {kernel.name for kernel in of_layout} == {"pack", "unpack", "gather", "portable"}
    (negate,) = (kernel for kernel in all_kernels() if kernel.name == "negate")
    most_heads = [kernel for kernel in of_layout if kernel.defines.get("HEADS", 64) == 64]
    for kernel in (*most_heads, negate):
        check(kernel, "90")


@needs_compiler
@pytest.mark.parametrize("name", [*sorted(OF_LAYOUT), "negate"])
def test_kernels_run(emulated, kind, rng, name: str) -> None:  # noqa: F811
    """On an emulated Hopper GPU, beside NumPy."""
    for call in islice(OPERATIONS[name].calls(rng, WANTED), 2):
        case = Case(OPERATIONS[name], call)
        got = [a if isinstance(a, np.ndarray) else kind.take(a) for a in case.run(kind.put)]
        assert case.agrees(got, case.run(np.asarray)), case.name
    assert emulated.launched
