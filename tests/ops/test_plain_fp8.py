"""Rows in layout PLAIN_FP8, whose one scale each call brings, and queries in e4m3, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupy_mla

from .. import oracle
from ..cases import (
    BLOCK_SIZES,
    as_uint8,
    block_bytes,
    blocks_of,
    check_result,
    empty_cache,
    latent,
    paged,
    paged_rows,
    poisoned_outputs,
    queries,
    scale_of,
    sinks,
)
from ..dense import assert_dense, dense_oracle, in_cache
from ..kinds import BF16, E4M3, NumPy, allocation, gapped, poisoned
from ..vectors import LATENT, ROPE, told

FORMATS = [replace(oracle.PLAIN_576, scale=0.0007), replace(oracle.PLAIN_512, scale=1 / 1024)]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt.name} {fmt.scale}")
FLOAT32 = np.dtype(np.float32)


class Scale:
    """A scale as a caller has it: a number, or an array of one float32."""

    def __init__(self, shape: tuple[int, ...] | None) -> None:
        self.shape = shape

    def __call__(self, kind: NumPy, value: float) -> Any:
        if self.shape is None:
            return value
        return kind.put(np.full(self.shape or 1, value, np.float32)).reshape(self.shape)


every_scale = pytest.mark.parametrize("scale", [Scale(None), Scale((1,)), Scale(())], ids=["number", "[1]", "[]"])


def e4m3_queries(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Queries in e4m3 of a gap, what they stand for (float64), and their scale."""
    scale = float(np.float32(rng.uniform(0.1, 0.3)))
    q = gapped((np.clip(queries(rng, *shape).astype(np.float32) / scale, -448, 448)).astype(E4M3), 0, 0, 1, 3)
    return q, q.astype(np.float64) * np.float64(np.float32(scale)), scale


# --- packing, unpacking, gathering ---------------------------------------------------------------------------


@every_format
@every_scale
def test_rows_are_packed(kind, rng, fmt, scale):
    """All but the skipped tokens, to the byte; whatever lies beside them stays."""
    tokens, rope = 20, fmt.d_qk - 512
    for block_size in BLOCK_SIZES:
        num_blocks = tokens // block_size + 2
        cache = empty_cache(fmt, num_blocks, block_size, int(rng.integers(3))).view(E4M3)
        rows = latent(rng, tokens, fmt.d_qk)
        rows[0, :5] = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0], BF16)
        slots = rng.permutation(num_blocks * block_size)[:tokens]
        slots[3], slots[5] = -1, num_blocks * block_size
        got, whole = kind.put_with_allocation(cache)
        cupy_mla.concat_and_cache_mla(
            kind.put(rows[:, :512]), kind.put(rows[:, 512:].reshape(tokens, rope)), got, kind.put(slots),
            layout="plain_fp8", k_scale=scale(kind, fmt.scale),
        )  # fmt: skip
        for row, slot in zip(rows, slots, strict=True):
            if 0 <= slot < num_blocks * block_size:
                block, t = divmod(int(slot), block_size)
                oracle.write_token(fmt, block_bytes(cache, block), block_size, t, row)
        np.testing.assert_array_equal(kind.take(whole), allocation(cache), f"blocks of {block_size}")


@pytest.mark.parametrize(
    ("row", "width", "expected"),
    [("A", 512, ("caa849c6384bc241", "79b268c1f95c317a")), ("B", 512, ("4800000000d60000", "e85d3b3896c3f6f3")),
     ("A", 576, ("caa849c6384bc241", "332ef2759c0fe98e")), ("B", 576, ("4800000000d60000", "5ed105ecf0010b20"))],
)  # fmt: skip
def test_vectors(kind, row, width, expected):
    cache = kind.put(poisoned((1, 1, width), np.uint8))
    rope = ROPE[row][None, : width - 512]
    cupy_mla.concat_and_cache_mla(
        kind.put(LATENT[row][None].copy()), kind.put(rope.copy()), cache, kind.put(np.array([0])), k_scale=0.25
    )
    assert told(kind.take(cache).tobytes()) == expected


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # signalling NaN
@pytest.mark.parametrize("scale", [1.0, 0.0625, 0.3, 1e-3, 3e4])
def test_every_bf16_value(kind, scale):
    """NaN, infinities, zeros and subnormals among them."""
    every = np.arange(2**16, dtype=np.uint16).view(BF16).reshape(128, 512)
    cache = kind.put(poisoned((2, 64, 512), np.uint8))
    cupy_mla.concat_and_cache_mla(
        kind.put(every.copy()), kind.put(np.zeros((128, 0), BF16)), cache, kind.put(np.arange(128)), k_scale=scale
    )
    got, x = kind.take(cache).reshape(128, 512), every.astype(np.float32)
    with np.errstate(all="ignore"):
        want = oracle.e4m3_code(x / np.float32(scale))
    np.testing.assert_array_equal(got, want)


@every_format
@every_scale
def test_rows_are_unpacked(kind, rng, fmt, scale):
    for block_size in BLOCK_SIZES:
        num_blocks, capacity = 20 // block_size + 2, (20 // block_size + 2) * block_size
        slots = rng.permutation(capacity)[:20]
        cache = paged_rows(rng, fmt, num_blocks, block_size, slots, int(rng.integers(3)))
        want = np.append(oracle.named_rows(fmt, cache, slots), np.zeros((2, fmt.d_qk)), axis=0)
        slots = np.append(slots, [-1, capacity]).astype(np.int32)
        got = cupy_mla.unpack_rows(kind.put(cache), kind.put(slots), k_scale=scale(kind, fmt.scale))
        np.testing.assert_array_equal(check_result(kind, got, FLOAT32), want.astype(np.float32))


@every_format
@every_scale
def test_rows_are_gathered(kind, rng, fmt, scale):
    for block_size in BLOCK_SIZES:
        check_gather(kind, rng, fmt, scale, block_size, int(rng.integers(3)))


def check_gather(kind, rng, fmt, scale, block_size, gap):
    lens = np.array([20, 0, 33], np.int32)
    of, starts = in_cache(rng, fmt, lens, block_size, gap=gap), np.array([1, 21, 21], np.int32)
    out = kind.put(gapped(poisoned((56, fmt.d_qk), BF16), 0, 3))
    cupy_mla.cp_gather_and_upconvert_fp8_kv_cache(
        kind.put(of.cache), out, kind.put(of.table), kind.put(lens), kind.put(starts), k_scale=scale(kind, fmt.scale)
    )
    got = kind.take(out)
    for r, (start, length) in enumerate(zip(starts, lens, strict=True)):
        rows = oracle.named_rows(fmt, as_uint8(of.cache), of.slots(r, 0))
        np.testing.assert_array_equal(got[start : start + length], rows.astype(np.float32).astype(BF16))
    assert np.isnan(got[[0, 54, 55]].astype(np.float32)).all()


# --- attention -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["bfloat16", "e4m3"])
def drawn_queries(request: pytest.FixtureRequest) -> Callable[..., tuple[np.ndarray, np.ndarray, float | None]]:
    """A function that draws queries: those of the call, what they stand for, and their scale."""
    if request.param == "e4m3":
        return e4m3_queries

    def bf16_queries(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray, None]:
        q = gapped(queries(rng, *shape), 0, 0, 1, 3)
        return q, q, None

    return bf16_queries


def off_zero(q: np.ndarray, stands_for: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `cases.off_zero`; `lse` [b, h_q, s_q]."""
    zeros = np.abs(lse).swapaxes(1, 2) < 0.03
    return tuple(np.where(zeros[..., None], np.zeros((), a.dtype), a) for a in (q, stands_for))


def scales_of(kind: NumPy, scale: Scale, fmt: oracle.Format, q_scale: float | None) -> dict[str, Any]:
    return {"k_scale": scale(kind, fmt.scale)} | ({} if q_scale is None else {"q_scale": scale(kind, q_scale)})


@every_format
@every_scale
@pytest.mark.parametrize(("h_q", "num_splits"), [(7, None), (64, 3)])
def test_sparse_decode(kind, rng, fmt, scale, drawn_queries, h_q, num_splits):
    (block, gap), (extra_block, extra_gap) = blocks_of(rng), blocks_of(rng)
    main = paged(rng, fmt, 3, 2, 130, block, gap=gap, lengths=True)
    extra = paged(rng, fmt, 3, 2, 40, extra_block, gap=extra_gap)
    q, stands_for, q_scale = drawn_queries(rng, 3, 2, h_q, fmt.d_qk)
    sink, lists = sinks(rng, h_q), [(p.cache, p.indices, p.length) for p in (main, extra)]
    q, stands_for = off_zero(q, stands_for, oracle.decode(fmt, stands_for, lists, scale_of(q, None))[1])
    with poisoned_outputs():
        results = cupy_mla.sparse_decode(
            *map(kind.put, (q, main.cache, main.indices)), scale_of(q, None), topk_length=kind.put(main.length),
            extra_k_cache=kind.put(extra.cache), extra_indices=kind.put(extra.indices), attn_sink=kind.put(sink),
            num_splits=num_splits, **scales_of(kind, scale, fmt, q_scale),
        )  # fmt: skip
    want = oracle.decode(fmt, stands_for, lists, scale_of(q, None), sink)
    for result, got, expected in zip(("out", "lse"), results, want, strict=True):
        oracle.assert_close(kind.take(got), expected, f"decode {result}")


@every_format
@every_scale
@pytest.mark.parametrize(("h_q", "num_splits"), [(7, None), (64, 3)])
def test_dense_decode(kind, rng, fmt, scale, drawn_queries, h_q, num_splits):
    block_size, gap = blocks_of(rng)
    of = in_cache(rng, fmt, [0, 130, 2], block_size, 2, gap=gap)
    q, stands_for, q_scale = drawn_queries(rng, 3, 2, h_q, fmt.d_qk)
    q, stands_for = off_zero(q, stands_for, dense_oracle(fmt, stands_for, of)[1])
    with poisoned_outputs():
        results = cupy_mla.dense_decode(
            *map(kind.put, (q, of.cache, of.table, of.lens)), scale_of(q, None), num_splits=num_splits,
            **scales_of(kind, scale, fmt, q_scale),
        )  # fmt: skip
    got = check_result(kind, results[0], BF16), check_result(kind, results[1], FLOAT32)
    assert_dense(got, dense_oracle(fmt, stands_for, of))


@every_format
@every_scale
@pytest.mark.parametrize("h_q", [7, 64])
def test_sparse_prefill(kind, rng, fmt, scale, drawn_queries, h_q):
    """Rows of a cache of blocks of one, 16 bytes between them."""
    rows = paged(rng, fmt, 5, 1, 130, 1, gap=1, lengths=True)
    q, stands_for, q_scale = drawn_queries(rng, 5, 1, h_q, fmt.d_qk)
    q, stands_for = q[:, 0], stands_for[:, 0]
    lists = [max(int(n), 0) for n in rows.length]
    named = [oracle.named_rows(fmt, rows.cache, rows.indices[i, 0, :n]) for i, n in enumerate(lists)]

    def of_oracle() -> list[tuple[np.ndarray, ...]]:
        return [oracle.attend(stands_for[i], named[i], scale_of(q, None), None) for i in range(5)]

    zeros = np.abs([(top, lse) for _, top, lse in of_oracle()]).min(axis=1) < 0.05
    q[zeros] = stands_for[zeros] = 0
    with poisoned_outputs():
        results = cupy_mla.sparse_prefill(
            *map(kind.put, (q, rows.cache, rows.indices)), scale_of(q, None), topk_length=kind.put(rows.length),
            **scales_of(kind, scale, fmt, q_scale),
        )  # fmt: skip
    for i, want in enumerate(of_oracle()):
        for result, got, expected in zip(("out", "max_logits", "lse"), results, want, strict=True):
            oracle.assert_close(kind.take(got)[i], expected, f"prefill {result}")


def test_scales_are_read_when_the_call_runs(kind, rng):
    """The same arrays with another value in them: another result, on a GPU from the same launches."""
    of, scales = in_cache(rng, FORMATS[0], [50], 64), np.ones(1, np.float32)
    q, given = kind.put(queries(rng, 1, 1, 8, 576)), kind.put(scales)
    arrays = [*map(kind.put, (of.cache, of.table, of.lens))]
    for value in (0.5, 1.0, 2.0):
        given[...] = value
        got = [kind.take(a).copy() for a in cupy_mla.dense_decode(q, *arrays, 0.01, k_scale=given)]
        want = [kind.take(a) for a in cupy_mla.dense_decode(q, *arrays, 0.01, k_scale=value)]
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


# --- what is wrong -------------------------------------------------------------------------------------------

ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k_scale": 0}, ValueError, r"^k_scale: expected a positive number, got 0"),
        ({"k_scale": -0.5}, ValueError, r"^k_scale: expected a positive number, got -0\.5"),
        ({"k_scale": float("nan")}, ValueError, r"^k_scale: expected a finite number"),
        ({"k_scale": "fp32"}, TypeError, r"^k_scale: expected a number"),
        ({"k_scale": [1.0]}, TypeError, r"^k_scale: expected a number, got an object of type list"),
        ({"k_scale": ONE.astype(np.float64)}, TypeError, r"^k_scale: expected dtype float32, got float64"),
        ({"k_scale": np.ones(2, np.float32)}, ValueError, r"^k_scale: expected shape \[1\], got \[2\]"),
        ({"k_scale": np.ones((1, 1), np.float32)}, ValueError, r"^k_scale: expected shape \[\], got \[1, 1\]"),
        ({"q_scale": 1.0}, ValueError, r"^q_scale was given, but q is bfloat16"),
        ({"k_cache": np.zeros((2, 64, 656), np.uint8)}, ValueError, r"^k_scale was given, but .* layout v32_fp8"),
        ({"layout": "v32_fp8"}, ValueError, r"^layout: 'v32_fp8' was asked for, k_cache is plain_fp8 of 576"),
        ({"layout": "fp16"}, ValueError, "^layout(: 'fp16' was asked for| must be one of)"),
        ({"q": np.zeros((1, 1, 4, 576), np.int8)}, TypeError, r"^q: expected dtype bfloat16 or uint8 or float8_e4m3fn"),
    ],
)  # fmt: skip
def test_wrong_scales(change, error, message):
    given = {
        "q": np.zeros((1, 1, 4, 576), BF16), "k_cache": np.zeros((2, 64, 576), E4M3),
        "indices": np.zeros((1, 1, 3), np.int32), "sm_scale": 0.1, "k_scale": ONE, **change,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        cupy_mla.sparse_decode(**given)
    given["block_table"], given["seq_lens"] = given.pop("indices")[0], np.ones(1, np.int32)
    with pytest.raises(error, match=message):
        cupy_mla.dense_decode(**given)


def test_e4m3_queries_are_for_plain_rows():
    q = np.zeros((1, 1, 4, 576), E4M3)
    with pytest.raises(TypeError, match=r"^q: expected dtype bfloat16, got float8_e4m3fn"):
        cupy_mla.sparse_decode(q, np.zeros((2, 64, 656), np.uint8), np.zeros((1, 1, 3), np.int32), 0.1)
    with pytest.raises(TypeError, match=r"^q: expected dtype bfloat16, got float8_e4m3fn"):
        cupy_mla.sparse_prefill(q[0], np.zeros((5, 1, 576), BF16), np.zeros((1, 1, 3), np.int32), 0.1)


def test_rows_of_a_prefill_start_at_multiples_of_16_bytes():
    kv = np.zeros((5, 1, 584), E4M3)[:, :, :576]
    with pytest.raises(ValueError, match=r"^kv: rows of plain_fp8 must start at multiples of 16 bytes"):
        cupy_mla.sparse_prefill(np.zeros((1, 4, 576), BF16), kv, np.zeros((1, 1, 3), np.int32), 0.1)
