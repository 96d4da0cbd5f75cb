"""Layouts of 2026, some of which a call must name, for rows of their size may be another's; every bf16 value in every
layout with scales in its rows; scales of 0; an oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_mla

from .. import oracle
from ..cases import (
    BLOCK_SIZES,
    block_bytes,
    blocks_of,
    check_decode,
    check_result,
    empty_cache,
    latent,
    off_zero,
    paged,
    paged_rows,
    poisoned_outputs,
    queries,
    scale_of,
    sinks,
    with_holes,
)
from ..dense import assert_dense, dense_oracle, in_cache
from ..dense import off_zero as off_zero_dense
from ..kinds import BF16, NumPy, allocation, poisoned
from ..vectors import LATENT, ROPE, told

OF_528 = (oracle.V32_NOPE, oracle.V41, oracle.V41_SPLIT)  # bytes; e4m3 values
FORMATS = (*OF_528, oracle.V32_NVFP4, oracle.V4_NVFP4)
CACHES = (*FORMATS, *oracle.V41_FP4S)
WRITTEN = (oracle.V32, oracle.V4, *CACHES)  # under scales of their own
OF_V4 = (oracle.V4, oracle.V41, oracle.V41_SPLIT, oracle.V4_NVFP4, *oracle.V41_FP4S)
FLOORS = {"fp32": 2.0**-22, "quotient": 2.0**-13}  # of UE8M0 scales
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
every_528 = pytest.mark.parametrize("fmt", OF_528, ids=lambda fmt: fmt.name)
every_cache = pytest.mark.parametrize("fmt", CACHES, ids=lambda fmt: fmt.name)
every_written = pytest.mark.parametrize("fmt", WRITTEN, ids=lambda fmt: fmt.name)
FLOAT32 = np.dtype(np.float32)


def shown(value: Any) -> str:
    """In a test's name."""
    return getattr(value, "name", value)


def scale_formats(formats: tuple[oracle.Format, ...]) -> list[tuple[oracle.Format, str]]:
    """What there is to choose for each format's scales."""
    other = {
        oracle.V32: ("fp32", "no floor", "ue8m0"),
        oracle.V32_NOPE: ("fp32", "no floor", "ue8m0"),
        oracle.V32_NVFP4: ("up", "nearest"),
    }
    other |= dict.fromkeys((oracle.V4_NVFP4, *oracle.V41_FP4S), ("nearest",))
    return [(fmt, scales) for fmt in formats for scales in other.get(fmt, ("fp32", "quotient"))]


every_scale_format = pytest.mark.parametrize(("fmt", "scale_format"), scale_formats(CACHES), ids=shown)
every_writer = pytest.mark.parametrize(("fmt", "scale_format"), scale_formats(WRITTEN), ids=shown)


def pack(kind: NumPy, fmt: oracle.Format, rows: np.ndarray, cache: Any, slots: np.ndarray, scale_format: str) -> None:
    """Whole rows, or those of a model without RoPE."""
    if fmt in OF_V4:
        floor = {"scale_floor": FLOORS[scale_format]} if scale_format in FLOORS else {}
        cupy_mla.quantize_and_insert_k_cache(kind.put(rows), cache, kind.put(slots), layout=fmt.name, **floor)
        return
    option = "scale_rounding" if fmt in oracle.FP4 else "scale_format"
    latent, rope = kind.put(rows[:, :512].copy()), kind.put(rows[:, 512:].copy())
    more = {"layout": fmt.name, option: scale_format}
    if scale_format == "no floor":
        more = {"layout": fmt.name, "scale_floor": 0}
    cupy_mla.concat_and_cache_mla(latent, rope, cache, kind.put(slots), **more)


# --- packing, unpacking, gathering ---------------------------------------------------------------------------


@every_scale_format
def test_rows_are_packed(kind, rng, fmt, scale_format):
    """All but the skipped tokens, to the byte; whatever lies beside them stays, between blocks too."""
    tokens = 20
    for block_size in BLOCK_SIZES:
        rows = latent(rng, tokens, fmt.d_qk) * 2.0 ** rng.integers(-20, 20, (tokens, 1))
        rows = rows.astype(BF16)
        rows[1], rows[2, :128] = 0, 0
        num_blocks = tokens // block_size + 2
        slots = rng.permutation(num_blocks * block_size)[:tokens]
        slots[3], slots[5] = -1, num_blocks * block_size
        cache = empty_cache(fmt, num_blocks, block_size, int(rng.integers(3)))
        there, whole = kind.put_with_allocation(cache)
        pack(kind, fmt, rows, there, slots, scale_format=scale_format)
        for row, slot in zip(rows, slots, strict=True):
            if 0 <= slot < num_blocks * block_size:
                block, t = divmod(int(slot), block_size)
                oracle.write_token(fmt, block_bytes(cache, block), block_size, t, row, scale_format)
        np.testing.assert_array_equal(kind.take(whole), allocation(cache), f"blocks of {block_size}")


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
     (oracle.V41, "B", "quotient", ("7000000000fe0000", "31d4f767039eb6d9")),
     (oracle.V32_NVFP4, "A", "up", ("8ee6724cafe6603d", "12b64ca2ef639aab")),
     (oracle.V32_NVFP4, "B", "up", ("0300f00000000000", "112840480692e4ab")),
     (oracle.V32_NVFP4, "A", "nearest", ("9fe6724dafe6703d", "7373cd398a6d6def")),
     (oracle.V32_NVFP4, "B", "nearest", ("0400f00000000000", "2f041d26cee9bc44")),
     (oracle.V4_NVFP4, "A", "nearest", ("9fe6724dafe6703d", "a1831d6fed04cfec")),
     (oracle.V4_NVFP4, "B", "nearest", ("0400f00000000000", "6b528ce79d330558")),
     (oracle.V41_FP4, "A", "nearest", ("9fe6724dafe6703d", "1305d0ecb449da84")),
     (oracle.V41_FP4, "B", "nearest", ("0400f00000000000", "cd3ed54359d51563")),
     (oracle.V41_FP4_SPLIT, "A", "nearest", ("9fe6724dafe6703d", "1305d0ecb449da84")),
     (oracle.V41_FP4_SPLIT, "B", "nearest", ("0400f00000000000", "cd3ed54359d51563"))],
)  # fmt: skip
def test_vectors(kind, fmt, row, scale_format, expected):
    cache = kind.put(poisoned((1, 1, fmt.token_bytes), np.uint8))
    rows = np.concatenate([LATENT[row], ROPE[row]])[None, : fmt.d_qk].copy()
    pack(kind, fmt, rows, cache, np.array([0]), scale_format=scale_format)
    assert told(kind.take(cache).tobytes()) == expected


@pytest.mark.parametrize(
    ("row", "rope", "scale_format", "expected"),
    [("A", 64, "ue8m0", ("fad879f6687bf271", "987b257b89e83f58")),
     ("B", 64, "ue8m0", ("7000000000fe0000", "d400a1ae08504325")),
     ("A", 0, "ue8m0", ("fad879f6687bf271", "5fc8c6546a728ee0")),
     ("B", 0, "ue8m0", ("7000000000fe0000", "aa302ebda5baf77b")),
     ("A", 0, "fp32", ("fbd97af8697df372", "953e348f89c9b562")),
     ("B", 0, "fp32", ("7000000000fe0000", "3353f6f5ba093ac9"))],
)  # fmt: skip
def test_vectors_of_656_bytes(kind, row, rope, scale_format, expected):
    """With RoPE, and of models without, whose part of the row is zeros."""
    cache = kind.put(poisoned((1, 1, 656), np.uint8))
    given = kind.put(LATENT[row][None].copy()), kind.put(ROPE[row][None, :rope].copy())
    cupy_mla.concat_and_cache_mla(*given, cache, kind.put(np.array([0])), scale_format=scale_format)
    assert told(kind.take(cache).tobytes()) == expected


@pytest.mark.long(part=12)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # signalling NaN
@every_writer
def test_every_bf16_value(kind, rng, fmt, scale_format):
    """With either sign as the largest of a tile, NaN and infinities too, above others of its size, down to those that
    become 0; and without a scale."""
    count, spread = -(-(2**15) * fmt.tile // fmt.nope), 700 if fmt in oracle.FP4 else 2500  # rows; bf16 numbers
    bits = np.resize(np.arange(2**15), (count * fmt.nope // fmt.tile, 1))
    bits = np.maximum(bits - rng.integers(0, spread, (len(bits), fmt.tile)) * (np.arange(fmt.tile) > 1), 0)
    signs = rng.integers(2, size=bits.shape)
    signs[:, 1] = 1 - signs[:, 0]
    rope = np.resize(np.arange(2**16), (count, fmt.d_qk - fmt.nope))
    rows = np.concatenate([(bits | signs << 15).reshape(count, -1), rope], axis=1).astype(np.uint16).view(BF16)
    cache = empty_cache(fmt, -(-count // 64), 64)
    there, whole = kind.put_with_allocation(cache)
    pack(kind, fmt, rows, there, np.arange(count), scale_format)
    for t, row in enumerate(rows):
        oracle.write_token(fmt, block_bytes(cache, t // 64), 64, t % 64, row, scale_format)
    np.testing.assert_array_equal(kind.take(whole), allocation(cache))


@pytest.mark.parametrize("floor", [0, 2.0**-126, 2.0**-30, 1])
def test_floor_of_float32_scales(kind, floor):
    """A scale that is smaller, or no normal number, becomes the floor. Under a scale of 0 all codes are 0."""
    least = 448 * 2.0**-126  # of a normal scale
    largest = np.array([
        0, -0.0, 2.0**-133, -(2.0**-126), least, -least * (1 - 2.0**-8), least * (1 + 2.0**-7), 448 * 2.0**-30,
        -448 * 2.0**-31, 500 * 2.0**-31, 446 * 2.0**-30, 448, 446, 450, 1e30, -1e-3,
    ])  # fmt: skip
    values = np.zeros((len(largest), 128), np.float32)
    values[:, 0], values[:, 1], values[:, 2], values[:, 3] = largest, -largest / 3, largest / 100, -0.0
    tiles = values.astype(BF16).astype(np.float32)
    cache = kind.put(poisoned((4, 1, 528), np.uint8))
    cupy_mla.concat_and_cache_mla(
        kind.put(tiles.reshape(4, 512).astype(BF16)), kind.put(np.zeros((4, 0), BF16)), cache,
        kind.put(np.arange(4)), layout="v32_nope_fp8", scale_floor=floor,
    )  # fmt: skip
    got = kind.take(cache)[:, 0]
    ratios = np.abs(tiles).max(1) / np.float32(448)
    scales = np.where(ratios >= max(floor, 2.0**-126), ratios, np.float32(floor))
    np.testing.assert_array_equal(got[:, 512:].copy().view(np.float32).reshape(-1), scales)
    with np.errstate(all="ignore"):
        codes = np.where(scales[:, None] == 0, 0, oracle.e4m3_code(tiles / scales[:, None]))
    np.testing.assert_array_equal(got[:, :512].reshape(-1, 128), codes)


@every_written
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_read_back_as_nan(kind, rng, fmt, value):
    """In FP8 a NaN is lost alone, infinity with its tile, whose scale is infinite; in FP4 the tile is. Others stay."""
    rows = latent(rng, 2, fmt.d_qk)
    rows[:, 70], rows[1] = 0, rows[0]
    rows[1, 70] = value
    cache = kind.put(empty_cache(fmt, 1, 2))
    pack(kind, fmt, rows, cache, np.arange(2), "nearest" if fmt in oracle.FP4 else "fp32")
    want, got = kind.take(cupy_mla.unpack_rows(cache, kind.put(np.arange(2)), layout=fmt.name))
    assert np.isfinite(want).all()
    first = 70 // fmt.tile * fmt.tile
    want[slice(70, 71) if np.isnan(value) and fmt not in oracle.FP4 else slice(first, first + fmt.tile)] = np.nan
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("fmt", oracle.FP4, ids=shown)
def test_any_bytes_are_read(kind, rng, fmt):
    """Scales that are 0, negative or NaN, too."""
    cache = rng.integers(0, 256, (3, 5, fmt.token_bytes), np.uint8)
    cache[rng.random(cache.shape) < 0.1] = 0x7F
    cache[rng.random(cache.shape) < 0.1] = 0x80
    slots = np.arange(15)
    got = kind.take(cupy_mla.unpack_rows(kind.put(cache), kind.put(slots), layout=fmt.name))
    with np.errstate(invalid="ignore"):
        want = oracle.named_rows(fmt, cache, slots).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    out, table, lens = poisoned((1, 15, fmt.d_qk), BF16), np.array([[0, 1, 2]], np.int32), np.array([15], np.int32)
    cache, out, table, lens = map(kind.put, (cache, out, table, lens))
    if fmt in OF_V4:
        cupy_mla.dequantize_and_gather_k_cache(out, cache, lens, None, table, 5, 0, layout=fmt.name)
    else:
        first = kind.put(np.zeros(1, np.int32))
        cupy_mla.cp_gather_and_upconvert_fp8_kv_cache(cache, out[0], table, lens, first, layout=fmt.name)
    np.testing.assert_array_equal(kind.take(out)[0].astype(np.float32), want.astype(BF16).astype(np.float32))


@every_cache
def test_rows_are_unpacked(kind, rng, fmt):
    for block_size in BLOCK_SIZES:
        num_blocks, capacity = 20 // block_size + 2, (20 // block_size + 2) * block_size
        slots = rng.permutation(capacity)[: min(20, capacity)]
        cache = paged_rows(rng, fmt, num_blocks, block_size, slots, int(rng.integers(3)))
        want = np.append(oracle.named_rows(fmt, cache, slots), np.zeros((2, fmt.d_qk)), axis=0)
        slots = np.append(slots, [-1, capacity]).astype(np.int32)
        got = cupy_mla.unpack_rows(kind.put(cache), kind.put(slots), layout=fmt.name)
        np.testing.assert_array_equal(check_result(kind, got, FLOAT32), want.astype(np.float32))


@every_cache
def test_rows_are_gathered(kind, rng, fmt):
    """Of V4's kind the last 20 of each request, of the other whole requests."""
    for block_size in BLOCK_SIZES:
        check_gather(kind, rng, fmt, block_size, int(rng.integers(3)))


def check_gather(kind, rng, fmt, block_size, gap):
    lens = np.array([20, 0, 33], np.int32)
    of = in_cache(rng, fmt, lens, block_size, gap=gap)
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


every_attention = pytest.mark.parametrize(  # NVFP4: one kernel apiece
    ("fmt", "h_q", "num_splits"),
    [(fmt, 7, None) for fmt in FORMATS if fmt is not oracle.V32_NVFP4]
    + [(fmt, 64, 3) for fmt in FORMATS if fmt is not oracle.V4_NVFP4],
    ids=shown,
)


@every_attention
def test_sparse_decode(kind, rng, fmt, h_q, num_splits):
    (block, gap), (extra_block, extra_gap) = blocks_of(rng), blocks_of(rng)
    main = paged(rng, fmt, 3, 2, 130, block, gap=gap, lengths=True)
    extra = paged(rng, fmt, 3, 2, 40, extra_block, gap=extra_gap)
    check_both_caches(kind, rng, (fmt, fmt), (main, extra), h_q, num_splits)


every_pair = pytest.mark.parametrize(
    ("fmt", "extra_fmt", "h_q", "num_splits"),
    [(oracle.V41, oracle.V41_FP4, 7, None), (oracle.V41, oracle.V41_FP4_SPLIT, 64, 2),
     (oracle.V41_SPLIT, oracle.V41_FP4_SPLIT, 17, 1)],
    ids=shown,
)  # fmt: skip


@every_pair
def test_extra_cache_of_another_layout(kind, rng, fmt, extra_fmt, h_q, num_splits):
    """With tiles without rows in both lists, so that tiles of either are passed over."""
    (block, gap), (extra_block, extra_gap) = blocks_of(rng), blocks_of(rng)
    main = paged(rng, fmt, 2, 2, 130, block, gap=gap)
    extra = paged(rng, extra_fmt, 2, 2, 150, extra_block, gap=extra_gap, lengths=True)
    main.indices[0, :, 32:96] = main.indices[1, 1] = extra.indices[1, :, 32:64] = -1
    check_both_caches(kind, rng, (fmt, extra_fmt), (main, extra), h_q, num_splits, extra_layout=extra_fmt.name)


def check_both_caches(kind, rng, formats, caches, h_q, num_splits, **more):
    """Over two caches, beside the oracle."""
    (fmt, _), (main, extra) = formats, caches
    q, sink = off_zero(formats, queries(rng, *main.indices.shape[:2], h_q, fmt.d_qk), main, extra), sinks(rng, h_q)
    with poisoned_outputs():
        results = cupy_mla.sparse_decode(
            *map(kind.put, (q, main.cache, main.indices)), scale_of(q, None), topk_length=kind.put(main.length),
            extra_k_cache=kind.put(extra.cache), extra_indices=kind.put(extra.indices), attn_sink=kind.put(sink),
            extra_topk_length=kind.put(extra.length), num_splits=num_splits, layout=fmt.name, **more,
        )  # fmt: skip
    want = oracle.decode(formats, q, [(p.cache, p.indices, p.length) for p in (main, extra)], scale_of(q, None), sink)
    for result, got, expected in zip(("out", "lse"), results, want, strict=True):
        oracle.assert_close(kind.take(got), expected, f"decode {result}")


@every_format
@pytest.mark.parametrize("h_q", [7, 64])
def test_dense_decode(kind, rng, fmt, h_q):
    block_size, gap = blocks_of(rng)
    of = in_cache(rng, fmt, [0, 130, 2], block_size, 2, gap=gap)
    q = off_zero_dense(fmt, queries(rng, 3, 2, h_q, fmt.d_qk), of)
    with poisoned_outputs():
        results = cupy_mla.dense_decode(
            *map(kind.put, (q, of.cache, of.table, of.lens)), scale_of(q, None), layout=fmt.name
        )
    assert_dense(
        (check_result(kind, results[0], BF16), check_result(kind, results[1], FLOAT32)), dense_oracle(fmt, q, of)
    )


@every_528
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


every_fp4_list = pytest.mark.parametrize(
    ("fmt", "extra_fmt"),
    [(oracle.V32_NVFP4, None), (oracle.V4_NVFP4, None), (oracle.V41, oracle.V41_FP4),
     (oracle.V41, oracle.V41_FP4_SPLIT), (oracle.V41_SPLIT, oracle.V41_FP4_SPLIT)],
    ids=shown,
)  # fmt: skip


# Bytes of an FP4 row, and where in it its scales begin, if not behind all rows of a block.
FP4_ROWS = {
    oracle.V32_NVFP4: (352, 320), oracle.V4_NVFP4: (352, None), oracle.V41_FP4: (288, 256),
    oracle.V41_FP4_SPLIT: (256, None),
}  # fmt: skip


@every_fp4_list
@pytest.mark.parametrize("h_q", [7, 64])
def test_fp4_rows_are_exact(kind, rng, fmt, extra_fmt, h_q):
    """A query that sees one row gets its values, whatever its codes and scales: 0, subnormal, negative, large; NaN
    under a scale of NaN."""
    of, tokens = extra_fmt or fmt, 40
    cache = np.zeros((1, tokens, of.token_bytes), np.uint8)
    for t, row in enumerate(latent(rng, tokens, of.d_qk)):
        oracle.write_token(of, cache.reshape(-1), tokens, t, row)
    each, scales_at = FP4_ROWS[of]
    rows, behind = np.split(cache.reshape(-1), [tokens * each])
    rows = rows.reshape(tokens, each)
    rows[:, : of.nope // 2] = rng.integers(0, 256, (tokens, of.nope // 2))
    scales = behind.reshape(tokens, 32) if scales_at is None else rows[:, scales_at:]
    scales[:] = rng.integers(0, 256, scales.shape)
    scales[(scales & 0x7F) == 0x7F] = 0x7E
    slots = rng.permutation(tokens).astype(np.int32)[:, None, None]
    q = np.zeros((tokens, 1, h_q, fmt.d_qk), BF16)

    def decode() -> np.ndarray:
        caches, more = [cache, slots], {}
        if extra_fmt is not None:
            caches = [np.zeros((1, 1, fmt.token_bytes), np.uint8), np.full_like(slots, -1)]
            more = {"extra_k_cache": kind.put(cache), "extra_indices": kind.put(slots), "extra_layout": of.name}
        out, _ = cupy_mla.sparse_decode(*map(kind.put, (q, *caches)), scale_of(q, None), layout=fmt.name, **more)
        return kind.take(out).astype(np.float64)

    with poisoned_outputs():
        got = decode()
        want = np.broadcast_to(oracle.named_rows(of, cache, slots.reshape(-1))[:, None, None, :512], got.shape)
        np.testing.assert_array_equal(got[..., : of.nope], want[..., : of.nope])
        np.testing.assert_allclose(got, want, rtol=2.0**-8, atol=2.0**-23)
        scales[0, 0] = 0x7F
        got = decode()
    first = slots.reshape(-1) == 0
    assert np.isnan(got[first][..., :16]).all()
    assert np.isfinite(got[~first]).all()


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


@pytest.mark.parametrize(
    ("use_legacy", "formats"),
    [(False, (oracle.V41, oracle.V41_FP4)), (True, (oracle.V41_SPLIT, oracle.V41_FP4_SPLIT))],
)
def test_front_door_with_an_extra_cache(kind, rng, use_legacy, formats):
    """Of another layout, whose scales stand as those of the main cache."""
    (fmt, extra_fmt), schedule = formats, cupy_mla.get_mla_metadata()[0]
    main, extra = paged(rng, fmt, 2, 1, 64, 64), paged(rng, extra_fmt, 2, 1, 40, 32)
    q, indices, extra_indices = map(kind.put, (queries(rng, 2, 1, 64, 512), main.indices, extra.indices))
    cache, extra_cache = kind.put(main.cache[:, :, None]), kind.put(extra.cache)
    got = cupy_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, schedule, indices=indices, extra_k_cache=extra_cache,
        extra_indices_in_kvcache=extra_indices, kv_format="V41", use_legacy=use_legacy,
    )  # fmt: skip
    want = cupy_mla.sparse_decode(
        q, cache, indices, 512**-0.5, extra_k_cache=extra_cache, extra_indices=extra_indices, layout=fmt.name,
        extra_layout=extra_fmt.name,
    )  # fmt: skip
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
    k, keys, slots = np.zeros((1, 512), BF16), np.zeros((1, 128), BF16), np.array([0])
    with pytest.raises(ValueError, match=r"^scale_floor: expected a "):
        cupy_mla.quantize_and_insert_k_cache(
            k, np.zeros((2, 64, 528), np.uint8), slots, layout="v41_fp8", scale_floor=floor
        )
    with pytest.raises(ValueError, match=r"^scale_floor: expected a "):
        cupy_mla.indexer_k_quant_and_cache(keys, np.zeros((2, 64, 68), np.uint8), slots, scale_floor=floor)
    if floor != 0:
        with pytest.raises(ValueError, match=r"^scale_floor: expected (0 or )?a "):
            cupy_mla.concat_and_cache_mla(k, k[:, :64], np.zeros((2, 64, 656), np.uint8), slots, scale_floor=floor)


ANYTHING = "rows of 528 bytes may be anything: say"
NAMES = "'v32_nope_fp8' or 'v41_fp8' or 'v41_fp8_split'"


def test_what_extra_caches_may_be():
    q, indices = np.zeros((1, 1, 4, 512), BF16), np.zeros((1, 1, 3), np.int32)
    extra = {"extra_k_cache": np.zeros((2, 64, 288), np.uint8), "extra_indices": indices}
    cache = np.zeros((2, 64, 528), np.uint8)
    with pytest.raises(
        ValueError, match=r"^extra_k_cache: rows of 288 bytes may be anything: say extra_layout='v41_fp4' or"
    ):
        cupy_mla.sparse_decode(q, cache, indices, 0.1, layout="v41_fp8", **extra)
    with pytest.raises(ValueError, match=r"^extra_layout must be one of \('v41_fp8_split', 'v41_fp4_split'\), got"):
        cupy_mla.sparse_decode(q, cache, indices, 0.1, layout="v41_fp8_split", extra_layout="v41_fp4", **extra)
    with pytest.raises(ValueError, match=r"^extra_layout must be one of \('v4_fp8',\), got 'v41_fp4'"):
        cupy_mla.sparse_decode(q, np.zeros((2, 64, 584), np.uint8), indices, 0.1, extra_layout="v41_fp4", **extra)
    with pytest.raises(ValueError, match=r"^layout must be one of \("):
        cupy_mla.sparse_decode(q, extra["extra_k_cache"], indices, 0.1, layout="v41_fp4")
    with pytest.raises(ValueError, match=r"^extra_layout was given without extra_k_cache"):
        cupy_mla.sparse_decode(q, cache, indices, 0.1, layout="v41_fp8", extra_layout="v41_fp4")


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
    with pytest.raises(ValueError, match=r"^kv_format: 'v32_fp8' was asked for, k_cache is v32_nope_fp8 or v41_fp8 "):
        cupy_mla.flash_mla_with_kvcache(q, cache, None, None, 512, schedule, indices=indices, kv_format="V32")
    for name in ("V41_FP4", "v41_fp4", "v41_fp4_split"):
        with pytest.raises(ValueError, match=f"^kv_format: '{name}' is a format of extra caches .* as extra_k_cache, "):
            cupy_mla.flash_mla_with_kvcache(q, cache, None, None, 512, schedule, indices=indices, kv_format=name)
    with pytest.raises(ValueError, match=r"^kv_format must be one of \('V32', 'V32_NO_ROPE', 'V4', 'V41', 'bf16'"):
        cupy_mla.flash_mla_with_kvcache(q, cache, None, None, 512, schedule, indices=indices, kv_format="V5")
