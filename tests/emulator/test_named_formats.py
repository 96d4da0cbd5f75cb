"""The kernels over the layouts of 2026, and scales of 0, beside the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from .. import oracle
from ..ops import test_named_formats as of_operation
from ..ops.test_named_formats import (
    every_528,
    every_attention,
    every_fp4_list,
    every_pair,
    every_scale_format,
    every_writer,
    every_written,
    scales_of_0,
)


@pytest.mark.long(sample=2)
@every_scale_format
def test_caches(kind, emulated, rng, fmt, scale_format):
    of_operation.test_rows_are_packed(kind, rng, fmt, scale_format)
    of_operation.test_rows_are_unpacked(kind, rng, fmt)
    of_operation.test_rows_are_gathered(kind, rng, fmt)
    gather = "gather_tail" if fmt in of_operation.OF_V4 else "gather"
    assert {"pack", "unpack", gather} <= set(emulated.launched)


@pytest.mark.long(sample=2)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # signalling NaN
@every_writer
def test_every_bf16_value(kind, emulated, rng, fmt, scale_format):
    of_operation.test_every_bf16_value(kind, rng, fmt, scale_format)
    assert "pack" in emulated.launched


@pytest.mark.parametrize("floor", [0, 2.0**-126, 2.0**-30, 1])
def test_floor_of_float32_scales(kind, emulated, floor):
    of_operation.test_floor_of_float32_scales(kind, floor)
    assert "pack" in emulated.launched


@pytest.mark.long(sample=2)
@every_written
def test_nan_infinity_and_any_bytes(kind, emulated, rng, fmt):
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        of_operation.test_nan_and_infinity_are_read_back_as_nan(kind, rng, fmt, value)
    if fmt in oracle.FP4:
        of_operation.test_any_bytes_are_read(kind, rng, fmt)
    assert {"pack", "unpack"} <= set(emulated.launched)


@pytest.mark.long(sample=2)
@every_attention
def test_attention(kind, emulated, rng, force, fmt, h_q, num_splits):
    force("portable")
    of_operation.test_sparse_decode(kind, rng, fmt, h_q, num_splits)
    of_operation.test_dense_decode(kind, rng, fmt, h_q)
    if fmt in of_operation.OF_528:
        of_operation.test_scales_far_apart(kind, rng, fmt, h_q)
    assert "portable" in emulated.launched


@pytest.mark.long(sample=2)
@every_528
def test_attention_on_hopper(kind, emulated, rng, fmt):
    of_operation.test_sparse_decode(kind, rng, fmt, 64, 3)
    of_operation.test_dense_decode(kind, rng, fmt, 64)
    of_operation.test_scales_far_apart(kind, rng, fmt, 64)
    assert {"fp8_sm90", "dense_fp8_sm90"} <= set(emulated.launched)


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("name", ["portable", "fp8_sm90"])
@every_pair
def test_extra_cache_of_another_layout(kind, emulated, rng, force, fmt, extra_fmt, h_q, num_splits, name):
    force(name)
    of_operation.test_extra_cache_of_another_layout(kind, rng, fmt, extra_fmt, h_q, num_splits)
    assert name in emulated.launched


@pytest.mark.long(sample=2)
@pytest.mark.parametrize(("name", "h_q"), [("portable", 7), ("fp8_sm90", 7), ("fp8_sm90", 64)])
@every_fp4_list
def test_fp4_rows_are_exact(kind, emulated, rng, force, fmt, extra_fmt, name, h_q):
    force(name)
    of_operation.test_fp4_rows_are_exact(kind, rng, fmt, extra_fmt, h_q)
    assert name in emulated.launched


@pytest.mark.long(sample=3)
@scales_of_0
@pytest.mark.parametrize("name", ["portable", "portable_99kb", "dense_fp8_sm90"])
def test_what_is_stored_under_a_scale_of_0_is_0(kind, emulated, rng, force, fmt, name):
    force(name)
    of_operation.test_what_is_stored_under_a_scale_of_0_is_0(kind, rng, fmt)
    assert {name.removesuffix("_99kb"), "unpack", "gather"} <= set(emulated.launched)


@pytest.mark.long(sample=2)
@scales_of_0
@pytest.mark.parametrize(("name", "h_q"), [("fp8_sm90", 64), ("fp8_sm90", 7)])
def test_sparse_decode_under_scales_of_0(kind, emulated, rng, force, fmt, name, h_q):
    force(name)
    of_operation.test_sparse_decode_under_scales_of_0(kind, rng, fmt, h_q)
    assert name in emulated.launched
