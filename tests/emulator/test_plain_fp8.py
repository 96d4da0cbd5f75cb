"""The kernels over rows in layout PLAIN_FP8, with scales that are known and scales on the device, beside the oracle."""

from __future__ import annotations

import pytest

from ..ops import test_plain_fp8 as of_operation
from ..ops.test_plain_fp8 import drawn_queries, every_format, every_scale  # noqa: F401 - a fixture


@every_format
@every_scale
def test_caches(kind, emulated, rng, fmt, scale):
    of_operation.test_rows_are_packed(kind, rng, fmt, scale)
    of_operation.test_rows_are_unpacked(kind, rng, fmt, scale)
    of_operation.test_rows_are_gathered(kind, rng, fmt, scale)
    assert {"pack", "unpack", "gather"} <= set(emulated.launched)


@pytest.mark.parametrize("scale", [1.0, 0.3, 3e4])
def test_every_bf16_value(kind, emulated, scale):
    of_operation.test_every_bf16_value(kind, scale)
    assert "pack" in emulated.launched


@pytest.mark.long(sample=1)
@every_format
@every_scale
@pytest.mark.parametrize(("h_q", "num_splits"), [(7, None), (64, 3)])
def test_attention(kind, emulated, rng, fmt, scale, drawn_queries, h_q, num_splits):  # noqa: F811
    of_operation.test_sparse_decode(kind, rng, fmt, scale, drawn_queries, h_q, num_splits)
    of_operation.test_dense_decode(kind, rng, fmt, scale, drawn_queries, h_q, num_splits)
    of_operation.test_sparse_prefill(kind, rng, fmt, scale, drawn_queries, h_q)
    assert "portable" in emulated.launched


def test_scales_are_read_when_the_call_runs(kind, emulated, rng):
    of_operation.test_scales_are_read_when_the_call_runs(kind, rng)
    assert "dense_fp8_sm90" in emulated.launched
