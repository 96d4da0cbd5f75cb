"""Packing into the paged caches: every byte against the oracle, over every kind of array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupy_mla

from .. import oracle
from ..cases import block_bytes, empty_cache, normal
from ..kinds import BF16, E4M3, NumPy, allocation, gapped, poisoned

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

SEEDS = st.integers(0, 2**32 - 1)
PACKED = (oracle.BF16_576, oracle.V32, oracle.V4)
every_layout = pytest.mark.parametrize("fmt", PACKED, ids=lambda fmt: fmt.name)
every_writer = pytest.mark.parametrize(
    ("fmt", "scale_format"),
    [(oracle.BF16_576, "fp32"), (oracle.V32, "fp32"), (oracle.V32, "ue8m0"), (oracle.V4, "ue8m0")],
    ids=["bf16", "v32 fp32", "v32 ue8m0", "v4"],
)


def insert(kind: NumPy, fmt: oracle.Format, rows: np.ndarray, cache: object, slots: object, scale_format: str) -> None:
    """Hand rows [T, d_qk] to the operation that writes the format."""
    if fmt is oracle.V4:
        cupy_mla.quantize_and_insert_k_cache(kind.put(rows), cache, slots)
    else:
        latent, rope = kind.put(rows[..., :512]), kind.put(rows[..., 512:])
        cupy_mla.concat_and_cache_mla(latent, rope, cache, slots, scale_format=scale_format)


def check_insert(
    kind: NumPy, fmt: oracle.Format, rows: np.ndarray, cache: np.ndarray, slots: np.ndarray, scale_format: str
) -> None:
    """Write the rows and compare the whole allocation behind the cache with what the oracle makes of it."""
    array, whole = kind.put_with_allocation(cache)
    insert(kind, fmt, rows, array, kind.put(slots), scale_format)
    write_all(fmt, rows, cache, slots, scale_format)
    got, want = kind.take(whole), allocation(cache)
    wrong = np.flatnonzero(got != want)
    assert wrong.size == 0, (
        f"{wrong.size} of {want.size} bytes differ, first at {wrong[0]}: got {got[wrong[0]]}, expected {want[wrong[0]]}"
    )


def write_all(fmt: oracle.Format, rows: np.ndarray, cache: np.ndarray, slots: np.ndarray, scale_format: str) -> None:
    num_blocks, block_size = cache.shape[:2]
    for slot, row in zip(slots, rows, strict=False):
        b, t = divmod(int(slot), block_size)
        if 0 <= b < num_blocks:
            if fmt.quantized:
                oracle.write_token(fmt, block_bytes(cache, b), block_size, t, row, scale_format)
            else:
                cache[b, t] = row


def slot_mapping(rng: np.random.Generator, count: int, capacity: int) -> np.ndarray:
    """Distinct slots in random order, some replaced by negative ones and ones beyond the cache."""
    slots = rng.permutation(max(capacity, count))[:count].astype(np.int64)
    beyond = rng.choice(np.array([-1, -5, -(2**63), capacity, capacity + 3, 2**40, 2**63 - 1]), count)
    return np.where(rng.random(count) < 0.3, beyond, slots)


def any_finite(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """bfloat16 of random bits: all magnitudes, subnormals and signed zeros included, without infinities and NaN."""
    bits = rng.integers(0, 2**16, shape, np.uint16)
    bits[(bits & 0x7F80) == 0x7F80] &= 0xBFFF
    return bits.view(BF16)


@every_writer
@pytest.mark.parametrize(
    ("tokens", "num_blocks", "block_size", "gap"),
    [(1, 1, 1, 0), (5, 9, 1, 1), (9, 4, 2, 0), (33, 2, 61, 1), (70, 2, 64, 0), (40, 1, 256, 3)],
)
def test_bytes(kind, rng, fmt, scale_format, tokens, num_blocks, block_size, gap):
    cache = empty_cache(fmt, num_blocks, block_size, gap)
    slots = slot_mapping(rng, tokens, num_blocks * block_size)
    check_insert(kind, fmt, normal(rng, tokens, fmt.d_qk), cache, slots, scale_format)


@every_writer
@given(SEEDS, st.integers(0, 40), st.integers(1, 5), st.sampled_from([1, 2, 7, 61, 64, 128, 256]), st.integers(0, 2))
def test_bytes_generated(kind, fmt, scale_format, seed, tokens, num_blocks, block_size, gap):
    rng = np.random.default_rng(seed)
    cache = empty_cache(fmt, num_blocks, block_size, gap)
    rows = any_finite(rng, tokens, fmt.d_qk)
    rows[rng.random(tokens) < 0.5] *= BF16.type(0)
    slots = slot_mapping(rng, tokens, num_blocks * block_size)
    check_insert(kind, fmt, rows, cache, slots, scale_format)


@every_writer
@pytest.mark.parametrize("exponent", [-133, -130, -126, -100, -20, -7, 0, 5, 60, 120])
def test_bytes_of_tiles_of_one_size(kind, rng, fmt, scale_format, exponent):
    """Tiles whose values span the range of e4m3, around a power of two: scales at and under their floors."""
    rows = (rng.uniform(-1, 1, (6, fmt.d_qk)) * 2.0 ** rng.integers(-20, 1, (6, fmt.d_qk))).astype(np.float32)
    rows = np.ldexp(rows, exponent).astype(BF16)
    check_insert(kind, fmt, rows, empty_cache(fmt, 2, 64), slot_mapping(rng, 6, 128), scale_format)


@every_writer
def test_bytes_of_ties_and_edges(kind, rng, fmt, scale_format):
    """amax 448 makes the scale 1: then every value halfway between two of e4m3 goes to the even one, and 448 stays."""
    values = oracle.E4M3[:127]
    halfway = (values[1:] + values[:-1]) / 2
    pool = np.concatenate([values, halfway])
    rows = (rng.choice(pool, (20, fmt.d_qk)) * rng.choice([-1, 1], (20, fmt.d_qk))).astype(BF16)
    if fmt.tile:
        rows[:, : fmt.nope : fmt.tile] = 448
    check_insert(kind, fmt, rows, empty_cache(fmt, 1, 64), np.arange(20), scale_format)


@every_writer
def test_bytes_of_zeros(kind, fmt, scale_format):
    rows = np.zeros((3, fmt.d_qk), BF16)
    rows[1] = -rows[1]
    check_insert(kind, fmt, rows, empty_cache(fmt, 2, 2), np.array([3, 0, 1]), scale_format)


@every_writer
def test_slot_mapping_may_be_shorter(kind, rng, fmt, scale_format):
    """A padded batch: tokens behind the end of slot_mapping are not written, NaN or not."""
    rows = normal(rng, 12, fmt.d_qk)
    rows[5:] = np.nan
    check_insert(kind, fmt, rows, empty_cache(fmt, 2, 8), np.array([3, 9, -1, 15, 0]), scale_format)


@every_layout
def test_nothing_to_write(kind, rng, fmt):
    for slots in (np.zeros(0, np.int64), np.full(4, -1, np.int64), np.array([16, 17, 2**40])):
        check_insert(kind, fmt, normal(rng, 4, fmt.d_qk), empty_cache(fmt, 2, 8), slots, "fp32")
    check_insert(kind, fmt, normal(rng, 0, fmt.d_qk), empty_cache(fmt, 2, 8), np.zeros(0, np.int64), "fp32")


@every_layout
@pytest.mark.parametrize("gap", [1, 2, 8])
def test_inputs_of_any_strides(kind, rng, fmt, gap):
    """Rows 2-, 4- and 16-byte aligned; latent and RoPE part cut out of one array lie 576 apart anyway."""
    rows = gapped(normal(rng, 9, fmt.d_qk), 0, gap)
    slots = gapped(slot_mapping(rng, 9, 16), 3)
    check_insert(kind, fmt, rows, empty_cache(fmt, 2, 8), slots, "fp32")


def test_bf16_cache_of_any_strides(kind, rng):
    cache = gapped(np.zeros((3, 5, 576), BF16), 0, 1, 3)
    check_insert(kind, oracle.BF16_576, normal(rng, 11, 576), cache, slot_mapping(rng, 11, 15), "fp32")


@pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4], ids=lambda fmt: fmt.name)
def test_cache_of_fp8_items(kind, rng, fmt):
    rows, slots = normal(rng, 6, fmt.d_qk), slot_mapping(rng, 6, 16)
    array, whole = kind.put_with_allocation(empty_cache(fmt, 2, 8).view(E4M3))
    insert(kind, fmt, rows, array, kind.put(slots), "fp32")
    want = empty_cache(fmt, 2, 8)
    write_all(fmt, rows, want, slots, "fp32")
    np.testing.assert_array_equal(kind.take(whole), allocation(want))


# --- models without RoPE, arrays as engines hold them ---------------------------------------------------------


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_tokens_without_rope(kind, rng, scale_format):
    """FP8 rows get a RoPE part of zeros, bf16 rows have 512 values."""
    latent, slots = normal(rng, 9, 512), slot_mapping(rng, 9, 16)
    rope = np.zeros((9, 0), BF16)
    cache = empty_cache(oracle.V32, 2, 8)
    array, whole = kind.put_with_allocation(cache)
    cupy_mla.concat_and_cache_mla(kind.put(latent), kind.put(rope), array, kind.put(slots), scale_format=scale_format)
    write_all(oracle.V32, np.concatenate([latent, np.zeros((9, 64), BF16)], 1), cache, slots, scale_format)
    np.testing.assert_array_equal(kind.take(whole), allocation(cache))
    cache = poisoned((2, 8, 512), BF16)
    array, whole = kind.put_with_allocation(cache)
    cupy_mla.concat_and_cache_mla(kind.put(latent), kind.put(rope), array, kind.put(slots))
    for slot, row in zip(slots, latent, strict=True):
        if 0 <= slot < 16:
            cache[divmod(int(slot), 8)] = row
    np.testing.assert_array_equal(kind.take(whole), allocation(cache))


def test_rope_widths_are_those_of_the_cache(rng):
    for cache, rope in (
        (np.zeros((2, 8, 576), BF16), 0),
        (np.zeros((2, 8, 512), BF16), 64),
        (empty_cache(oracle.V32, 2, 8), 8),
    ):
        with pytest.raises(ValueError, match=r"^k_pe: expected shape \[9, "):
            cupy_mla.concat_and_cache_mla(normal(rng, 9, 512), np.zeros((9, rope), BF16), cache, np.arange(9))


@every_layout
def test_tokens_with_a_head_axis(kind, rng, fmt):
    """[T, 1, values], as engines hold them before they drop the axis."""
    rows, slots = normal(rng, 6, fmt.d_qk), slot_mapping(rng, 6, 16)
    caches = [kind.put(empty_cache(fmt, 2, 8)) for _ in range(2)]
    insert(kind, fmt, rows, caches[0], kind.put(slots), "fp32")
    insert(kind, fmt, rows[:, None], caches[1], kind.put(slots), "fp32")
    assert kind.take(caches[0]).tobytes() == kind.take(caches[1]).tobytes()
    with pytest.raises(ValueError, match=r"axis 1 \(KV heads\) must have length 1"):
        insert(kind, fmt, rows.reshape(3, 2, -1), caches[1], kind.put(slots), "fp32")


@pytest.mark.parametrize("layout", ["fp16", "v4_fp8", "indexer_fp8", ""])
def test_layouts_that_this_function_cannot_write_are_not_offered(rng, layout):
    arguments = concat_arguments(rng)
    with pytest.raises(
        ValueError, match=r"^layout must be one of \('bf16', 'bfloat16', 'auto', 'v32_fp8', 'fp8_ds_mla', 'plain_fp8'"
    ):
        cupy_mla.concat_and_cache_mla(**arguments, layout=layout)
    with pytest.raises(TypeError, match=r"^layout: expected one of"):
        cupy_mla.concat_and_cache_mla(**arguments, layout=3)
    with pytest.raises(TypeError, match=r"^scale_format: expected one of"):
        cupy_mla.concat_and_cache_mla(**arguments, scale_format=None)


@every_layout
def test_an_unaligned_start_is_no_stride(rng, fmt):
    if not fmt.quantized:
        pytest.skip("bf16 caches start anywhere")
    whole = np.zeros(2 * 8 * fmt.token_bytes * 2 + 64, np.uint8)
    start = -whole.__array_interface__["data"][0] % 16 + 8
    cache = np.ndarray((2, 8, fmt.token_bytes), np.uint8, whole, start, (8 * fmt.token_bytes + 576, fmt.token_bytes, 1))
    with pytest.raises(ValueError, match="cache: must start at a multiple of 16 bytes in memory, starts 8 bytes after"):
        insert(NumPy(), fmt, normal(rng, 1, fmt.d_qk), cache, np.arange(1), "fp32")


# --- hostile inputs -------------------------------------------------------------------------------------------


def concat_arguments(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "kv_c": normal(rng, 5, 512),
        "k_pe": normal(rng, 5, 64),
        "kv_cache": empty_cache(oracle.V32, 2, 8),
        "slot_mapping": np.arange(5),
    }


def test_layouts_that_the_cache_has_not_are_refused(rng):
    arguments = concat_arguments(rng)
    for layout in ("bf16", "v4_fp8", "V32"):
        with pytest.raises(ValueError, match=r"^layout\b"):
            cupy_mla.concat_and_cache_mla(**arguments, layout=layout)
    assert (arguments["kv_cache"] == 0xFF).all()
    for layout in ("v32_fp8", "fp8_ds_mla"):
        cupy_mla.concat_and_cache_mla(**arguments, layout=layout)
