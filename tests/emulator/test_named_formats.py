"""The kernels over layouts that a call names, and scales of 0, beside the oracle."""

from __future__ import annotations

import pytest

from ..ops import test_named_formats as of_operation
from ..ops.test_named_formats import every_format, every_scale_format, scales_of_0
from .emulator import needs_compiler

pytestmark = needs_compiler


@every_scale_format
def test_caches(kind, emulated, rng, fmt, scale_format):
    of_operation.test_rows_are_packed(kind, rng, fmt, scale_format)
    of_operation.test_rows_are_unpacked(kind, rng, fmt)
    of_operation.test_rows_are_gathered(kind, rng, fmt)
    gather = "gather_tail" if fmt in of_operation.OF_V4 else "gather"
    assert {"pack", "unpack", gather} <= set(emulated.launched)


@pytest.mark.long(sample=4)
@every_format
@pytest.mark.parametrize(("name", "h_q", "num_splits"), [("portable", 7, None), ("portable", 64, 3), (None, 64, 3)])
def test_attention(kind, emulated, rng, force, fmt, name, h_q, num_splits):
    """By the portable kernel, and by those that are chosen on Hopper."""
    force(name)
    of_operation.test_sparse_decode(kind, rng, fmt, h_q, num_splits)
    of_operation.test_dense_decode(kind, rng, fmt, h_q)
    of_operation.test_scales_far_apart(kind, rng, fmt, h_q)
    assert ({name} if name else {"fp8_sm90", "dense_fp8_sm90"}) <= set(emulated.launched)


@pytest.mark.long(sample=3)
@scales_of_0
@pytest.mark.parametrize("name", ["portable", "portable_99kb", "dense_fp8_sm90"])
def test_what_is_stored_under_a_scale_of_0_is_0(kind, emulated, rng, force, fmt, name):
    force(name)
    of_operation.test_what_is_stored_under_a_scale_of_0_is_0(kind, rng, fmt)
    assert {name.removesuffix("_99kb"), "unpack", "gather"} <= set(emulated.launched)


@pytest.mark.long(sample=2)
@scales_of_0
@pytest.mark.parametrize(("name", "h_q"), [("fp8_sm90", 64), ("few_heads_sm90", 7)])
def test_sparse_decode_under_scales_of_0(kind, emulated, rng, force, fmt, name, h_q):
    force(name)
    of_operation.test_sparse_decode_under_scales_of_0(kind, rng, fmt, h_q)
    assert name in emulated.launched
