"""Layouts that a call must name, for rows of their size may be another's, and scales of 0, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_mla

from .. import oracle
from ..cases import (
    check_decode,
    check_result,
    latent,
    off_zero,
    paged,
    poisoned_outputs,
    queries,
    scale_of,
    sinks,
    with_holes,
)
from ..dense import assert_dense, dense_oracle, in_cache
from ..dense import off_zero as off_zero_dense
from ..kinds import BF16, NumPy, poisoned
from ..vectors import LATENT, told

FORMATS = (oracle.V32_NOPE, oracle.V41, oracle.V41_SPLIT)
OF_V4 = (oracle.V41, oracle.V41_SPLIT)
FLOORS = {"fp32": 2.0**-22, "quotient": 2.0**-13}  # of UE8M0 scales
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
FLOAT32 = np.dtype(np.float32)


def scale_formats() -> list[tuple[oracle.Format, str]]:
    """What there is to choose for each format's scales."""
    return [(fmt, scales) for fmt in FORMATS for scales in ("fp32", "quotient" if fmt in OF_V4 else "ue8m0")]


every_scale_format = pytest.mark.parametrize(("fmt", "scale_format"), scale_formats(), ids=str)


def pack(kind: NumPy, fmt: oracle.Format, rows: np.ndarray, cache: Any, slots: np.ndarray, scale_format: str) -> None:
    """Whole rows, or those of a model without RoPE."""
    if fmt in OF_V4:
        cupy_mla.quantize_and_insert_k_cache(
            kind.put(rows), cache, kind.put(slots), layout=fmt.name, scale_floor=FLOORS[scale_format]
        )
        return
    no_rope = np.zeros((len(rows), 0), BF16)
    cupy_mla.concat_and_cache_mla(
        kind.put(rows), kind.put(no_rope), cache, kind.put(slots), layout=fmt.name, scale_format=scale_format
    )


# --- packing, unpacking, gathering ---------------------------------------------------------------------------


@every_scale_format
def test_rows_are_packed(kind, rng, fmt, scale_format):
    """All but the skipped tokens, to the byte; whatever lies beside them stays."""
    block_size, tokens = int(rng.choice([1, 3, 64])), 40
    rows = latent(rng, tokens, fmt.d_qk) * 2.0 ** rng.integers(-20, 20, (tokens, 1))
    rows = rows.astype(BF16)
    rows[1], rows[2, :128] = 0, 0
    num_blocks = tokens // block_size + 2
    slots = rng.permutation(num_blocks * block_size)[:tokens]
    slots[3], slots[5] = -1, num_blocks * block_size
    cache = kind.put(poisoned((num_blocks, block_size, fmt.token_bytes), np.uint8))
    pack(kind, fmt, rows, cache, slots, scale_format=scale_format)
    want = np.full((num_blocks, block_size * fmt.token_bytes), 0xFF, np.uint8)
    for row, slot in zip(rows, slots, strict=True):
        if 0 <= slot < num_blocks * block_size:
            block, t = divmod(int(slot), block_size)
            oracle.write_token(fmt, want[block], block_size, t, row, scale_format)
    np.testing.assert_array_equal(kind.take(cache).reshape(want.shape), want)


@pytest.mark.parametrize(
    ("fmt", "row", "scale_format", "expected"),
    [(oracle.V32_NOPE, "A", "fp32", ("fbd97af8697df372", "36c45837216ed8d7")),
     (oracle.V32_NOPE, "B", "fp32", ("7000000000fe0000", "102630cc76653170")),
     (oracle.V32_NOPE, "A", "ue8m0", ("fad879f6687bf271", "610dda14ecd381ae")),
     (oracle.V32_NOPE, "B", "ue8m0", ("7000000000fe0000", "298982f8829137d3")),
     (oracle.V41, "A", "fp32", ("fad879f6687bf271", "660ab09fb826c4d3")),
     (oracle.V41, "B", "fp32", ("7000000000fe0000", "3122d7eb87410bb1")),
     (oracle.V41_SPLIT, "A", "fp32", ("fad879f6687bf271", "660ab09fb826c4d3")),
     (oracle.V41_SPLIT, "B", "quotient", ("7000000000fe0000", "31d4f767039eb6d9")),
     (oracle.V41, "A", "quotient", ("fad879f6687bf271", "660ab09fb826c4d3")),
     (oracle.V41, "B", "quotient", ("7000000000fe0000", "31d4f767039eb6d9"))],
)  # fmt: skip
def test_vectors(kind, fmt, row, scale_format, expected):
    cache = kind.put(poisoned((1, 1, fmt.token_bytes), np.uint8))
    pack(kind, fmt, LATENT[row][None].copy(), cache, np.array([0]), scale_format=scale_format)
    assert told(kind.take(cache).tobytes()) == expected


@every_format
def test_rows_are_unpacked(kind, rng, fmt):
    of = paged(rng, fmt, 1, 1, 100, 16, gap=2)
    capacity = of.cache.shape[0] * 16
    slots = np.append(np.setdiff1d(np.arange(capacity), of.dead)[:20], [-1, capacity]).astype(np.int32)
    got = cupy_mla.unpack_rows(kind.put(of.cache), kind.put(slots), layout=fmt.name)
    want = np.append(oracle.named_rows(fmt, of.cache, slots[:20]), np.zeros((2, fmt.d_qk)), axis=0)
    np.testing.assert_array_equal(check_result(kind, got, FLOAT32), want.astype(np.float32))


@every_format
def test_rows_are_gathered(kind, rng, fmt):
    """Of V4's kind the last 20 of each request, of the other whole requests."""
    lens, block_size = np.array([20, 0, 33], np.int32), 16
    of = in_cache(rng, fmt, lens, block_size)
    out = kind.put(poisoned((3, 40, fmt.d_qk), BF16))
    arrays = [*map(kind.put, (of.cache, lens, of.table))]
    if fmt in OF_V4:
        last, first = kind.put(np.full(3, 20, np.int32)), np.maximum(lens - 20, 0)
        cupy_mla.dequantize_and_gather_k_cache(
            out, arrays[0], arrays[1], last, arrays[2], block_size, 2, layout=fmt.name
        )
        starts = np.array([2, 42, 82])
    else:
        starts, first = np.array([1, 21, 21], np.int32), np.zeros(3, int)
        cupy_mla.cp_gather_and_upconvert_fp8_kv_cache(
            arrays[0], out.reshape(120, fmt.d_qk), arrays[2], arrays[1], kind.put(starts), layout=fmt.name
        )
    got, written = kind.take(out).reshape(120, fmt.d_qk), np.zeros(120, bool)
    for r, start in enumerate(starts):
        rows = oracle.named_rows(fmt, of.cache, of.slots(r, 0)[first[r] :])
        np.testing.assert_array_equal(got[start : start + len(rows)], rows.astype(np.float32).astype(BF16))
        written[start : start + len(rows)] = True
    assert np.isnan(got[~written].astype(np.float32)).all()


# --- attention -----------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize(("h_q", "num_splits"), [(7, None), (64, 3)])
def test_sparse_decode(kind, rng, fmt, h_q, num_splits):
    main, extra = paged(rng, fmt, 3, 2, 130, 64, lengths=True), paged(rng, fmt, 3, 2, 40, 1)
    q, sink = off_zero(fmt, queries(rng, 3, 2, h_q, fmt.d_qk), main, extra), sinks(rng, h_q)
    with poisoned_outputs():
        results = cupy_mla.sparse_decode(
            *map(kind.put, (q, main.cache, main.indices)), scale_of(q, None), topk_length=kind.put(main.length),
            extra_k_cache=kind.put(extra.cache), extra_indices=kind.put(extra.indices), attn_sink=kind.put(sink),
            num_splits=num_splits, layout=fmt.name,
        )  # fmt: skip
    want = oracle.decode(fmt, q, [(p.cache, p.indices, p.length) for p in (main, extra)], scale_of(q, None), sink)
    for result, got, expected in zip(("out", "lse"), results, want, strict=True):
        oracle.assert_close(kind.take(got), expected, f"decode {result}")


@every_format
@pytest.mark.parametrize("h_q", [7, 64])
def test_dense_decode(kind, rng, fmt, h_q):
    of = in_cache(rng, fmt, [0, 130, 2], 64, 2)
    q = off_zero_dense(fmt, queries(rng, 3, 2, h_q, fmt.d_qk), of)
    with poisoned_outputs():
        results = cupy_mla.dense_decode(
            *map(kind.put, (q, of.cache, of.table, of.lens)), scale_of(q, None), layout=fmt.name
        )
    assert_dense(
        (check_result(kind, results[0], BF16), check_result(kind, results[1], FLOAT32)), dense_oracle(fmt, q, of)
    )


@every_format
@pytest.mark.parametrize("h_q", [7, 64])
def test_scales_far_apart(kind, rng, fmt, h_q):
    """A query that sees one row gets its values, those of small scales too, but for what is 2^-32 of the largest."""
    shrunk = np.repeat(rng.integers(-14, 1, (4, 16)), 32, axis=1)
    rows = np.ldexp(latent(rng, 4, 512).astype(np.float32), shrunk).astype(BF16)
    cache, slots = poisoned((1, 4, fmt.token_bytes), np.uint8), rng.permutation(4).astype(np.int32)
    for t, row in enumerate(rows):
        oracle.write_token(fmt, cache.reshape(1, -1)[0], 4, t, row)
    q = np.zeros((4, 1, h_q, 512), BF16)  # logits of 0 are exact
    with poisoned_outputs():
        out, lse = cupy_mla.sparse_decode(
            *map(kind.put, (q, cache, slots[:, None, None])), scale_of(q, None), layout=fmt.name
        )
    want = oracle.named_rows(fmt, cache, slots)[:, None, None]
    error, least = np.abs(kind.take(out).astype(np.float64) - want), 2.0**-32 * np.abs(want).max(-1, keepdims=True)
    assert (error <= 2.0**-7 * np.abs(want) + least).all()
    assert not kind.take(lse).any()


@pytest.mark.parametrize(
    ("kv_format", "use_legacy", "fmt"),
    [("V32_NO_ROPE", False, oracle.V32_NOPE), ("v32_nope_fp8", True, oracle.V32_NOPE), ("V41", False, oracle.V41),
     ("V41", True, oracle.V41_SPLIT), ("v41_fp8", True, oracle.V41)],
)  # fmt: skip
def test_front_door(kind, rng, kv_format, use_legacy, fmt):
    main = paged(rng, fmt, 2, 1, 64, 64)
    q = kind.put(queries(rng, 2, 1, 64, fmt.d_qk))
    cache, indices = kind.put(main.cache[:, :, None]), kind.put(main.indices)
    schedule, _ = cupy_mla.get_mla_metadata()
    got = cupy_mla.flash_mla_with_kvcache(
        q,
        cache,
        None,
        None,
        512,
        schedule,
        is_fp8_kvcache=True,
        indices=indices,
        kv_format=kv_format,
        use_legacy=use_legacy,
    )
    want = cupy_mla.sparse_decode(q, cache, indices, fmt.d_qk**-0.5, layout=fmt.name)
    for a, b in zip(got, want, strict=True):
        assert kind.take(a).tobytes() == kind.take(b).tobytes()


# --- scales of 0 ---------------------------------------------------------------------------------------------

scales_of_0 = pytest.mark.parametrize("fmt", [oracle.V32, oracle.V32_NOPE], ids=lambda fmt: fmt.name)


def under_scales_of_0(rng: np.random.Generator, fmt: oracle.Format, cache: np.ndarray) -> None:
    """Set scales of some tiles to 0 or -0, with NaN and other codes under them."""
    for row in cache.reshape(-1, fmt.token_bytes):
        for tile in rng.choice(4, rng.integers(3), replace=False):
            row[128 * tile : 128 * (tile + 1)] = rng.choice([0x7F, 0xFF, 0x38], 128)
            row[512 + 4 * tile : 516 + 4 * tile] = 0, 0, 0, rng.choice([0, 0x80])


@scales_of_0
@pytest.mark.parametrize("h_q", [7, 64])
def test_sparse_decode_under_scales_of_0(kind, rng, fmt, h_q):
    """Lists have holes, too."""
    main = paged(rng, fmt, 2, 1, 300, 64)
    under_scales_of_0(rng, fmt, main.cache)
    with_holes(rng, main)
    check_decode(kind, fmt, off_zero(fmt, queries(rng, 2, 1, h_q, fmt.d_qk), main), main)


@scales_of_0
def test_what_is_stored_under_a_scale_of_0_is_0(kind, rng, fmt):
    of = in_cache(rng, fmt, [100, 30], 16, sees=None)
    under_scales_of_0(rng, fmt, of.cache)
    q = off_zero_dense(fmt, queries(rng, 2, 1, 16, fmt.d_qk), of)
    arrays = [*map(kind.put, (of.cache, of.table, of.lens))]
    with poisoned_outputs():
        results = cupy_mla.dense_decode(kind.put(q), *arrays, scale_of(q, None), layout=fmt.name)
    assert_dense(tuple(map(kind.take, results)), dense_oracle(fmt, q, of))
    slots = np.array(of.slots(0, 0))
    rows = oracle.named_rows(fmt, of.cache, slots).astype(np.float32)
    np.testing.assert_array_equal(kind.take(cupy_mla.unpack_rows(arrays[0], kind.put(slots), layout=fmt.name)), rows)
    out = kind.put(poisoned((100, fmt.d_qk), BF16))
    cupy_mla.cp_gather_and_upconvert_fp8_kv_cache(
        arrays[0], out, arrays[1], kind.put(np.array([100, 0], np.int32)), kind.put(np.zeros(2, np.int32)),
        layout=fmt.name,
    )  # fmt: skip
    np.testing.assert_array_equal(kind.take(out), rows.astype(BF16))


# --- what is wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", [0, 3.0, 2.0, 0.3, -0.5, 2.0**-127, float("nan")])
def test_scale_floors_are_powers_of_two(floor):
    k, cache = np.zeros((1, 512), BF16), np.zeros((2, 64, 528), np.uint8)
    with pytest.raises(ValueError, match=r"^scale_floor: expected a "):
        cupy_mla.quantize_and_insert_k_cache(k, cache, np.array([0]), layout="v41_fp8", scale_floor=floor)


ANYTHING = "rows of 528 bytes may be anything: say"
NAMES = "'v32_nope_fp8' or 'v41_fp8' or 'v41_fp8_split'"


def test_a_layout_must_be_named():
    q, cache = np.zeros((1, 1, 4, 512), BF16), np.zeros((2, 64, 528), np.uint8)
    indices = np.zeros((1, 1, 3), np.int32)
    with pytest.raises(ValueError, match=f"^k_cache: {ANYTHING} layout={NAMES}"):
        cupy_mla.sparse_decode(q, cache, indices, 0.1)
    with pytest.raises(ValueError, match=f"^cache: {ANYTHING} layout={NAMES}"):
        cupy_mla.unpack_rows(cache, np.array([0]))
    schedule, _ = cupy_mla.get_mla_metadata()
    with pytest.raises(ValueError, match=f"^k_cache: {ANYTHING} kv_format={NAMES}"):
        cupy_mla.flash_mla_with_kvcache(q, cache, None, None, 512, schedule, indices=indices)
    with pytest.raises(ValueError, match=r"^kv_format: 'v32_fp8' was asked for, k_cache is v32_nope_fp8 of 512"):
        cupy_mla.flash_mla_with_kvcache(q, cache, None, None, 512, schedule, indices=indices, kv_format="V32")
    with pytest.raises(ValueError, match=r"^kv_format must be one of \('V32', 'V32_NO_ROPE', 'V4', 'V41', 'bf16'"):
        cupy_mla.flash_mla_with_kvcache(q, cache, None, None, 512, schedule, indices=indices, kv_format="V5")
    with pytest.raises(ValueError, match=r"^cache_layout: layers have no 'v32_nope_fp8', which each call must name"):
        cupy_mla.SparseMLAConfig(16, d_qk=512, model="v32", cache_layout="v32_nope_fp8")
