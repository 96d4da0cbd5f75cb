"""Unpacking rows of the paged caches; packing is tested through the public operations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import layouts
from cupy_mla.reference.cache import rows_of

from .. import oracle
from ..cases import empty_cache, paged_rows, some
from ..kinds import E4M3

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

FORMATS = (*oracle.FORMATS, oracle.V32_NOPE, oracle.V41, oracle.V41_SPLIT, *oracle.FP4)
LAYOUTS = dict(zip(FORMATS, layouts.CACHE_LAYOUTS, strict=True))


@given(
    st.integers(0, 2**32 - 1), st.sampled_from(FORMATS), st.integers(1, 4), st.sampled_from([1, 2, 61, 64, 128, 256]),
    st.integers(0, 2),
)  # fmt: skip
def test_rows_are_those_of_the_oracle(seed, fmt, num_blocks, block_size, gap):
    """Exactly: the product of an e4m3 value and a float32 scale is rounded to float32 once."""
    rng = np.random.default_rng(seed)
    live = some(rng, num_blocks * block_size)
    cache = paged_rows(rng, fmt, num_blocks, block_size, live, gap)
    slots = rng.choice(live, 50)
    got = rows_of(cache, LAYOUTS[fmt], slots)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, oracle.named_rows(fmt, cache, slots).astype(np.float32))


@pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4], ids=lambda fmt: fmt.name)
def test_every_code_and_every_exponent(rng, fmt):
    """Random bytes: NaN and subnormal codes, scales from 2**-127 to infinity and NaN."""
    cache = empty_cache(fmt, 3, 64)
    cache[...] = rng.integers(0, 256, cache.shape, np.uint8)
    if fmt is oracle.V4:  # byte 255 is NaN in the OCP format and 2**128 by formula: no number either way
        cache.reshape(3, -1)[:, 576 * 64 :] %= 255
    slots = rng.permutation(192)
    with np.errstate(over="ignore", invalid="ignore"):
        want = oracle.named_rows(fmt, cache, slots).astype(np.float32)
    np.testing.assert_array_equal(rows_of(cache, LAYOUTS[fmt], slots), want)


def test_cache_of_fp8_items(rng):
    cache = paged_rows(rng, oracle.V4, 2, 8, np.arange(16))
    slots = rng.permutation(16)
    got = rows_of(cache.view(E4M3), layouts.V4_FP8, slots)
    np.testing.assert_array_equal(got, rows_of(cache, layouts.V4_FP8, slots))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_no_rows(fmt):
    assert rows_of(empty_cache(fmt, 2, 8), LAYOUTS[fmt], np.zeros(0, np.int32)).shape == (0, fmt.d_qk)
