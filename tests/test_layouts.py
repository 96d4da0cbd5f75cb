"""The layouts' numbers against the byte tables of the formats."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest

from cupy_mla import layouts
from cupy_mla.cuda.kernel import kernels_root
from cupy_mla.dtypes import BFLOAT16
from cupy_mla.layouts import (
    BF16_512,
    BF16_576,
    CACHE_LAYOUTS,
    INDEXER_FP8,
    PLAIN_FP8_512,
    PLAIN_FP8_576,
    V4_FP8,
    V4_NVFP4,
    V32_FP8,
    V32_NOPE_FP8,
    V32_NVFP4,
    V41_FP4,
    V41_FP4_SPLIT,
    V41_FP8,
    V41_FP8_SPLIT,
)
from cupy_mla.ops import cache as ops_cache

ALL = (*CACHE_LAYOUTS, INDEXER_FP8)
every_layout = pytest.mark.parametrize("layout", ALL, ids=lambda layout: f"{layout.name}-{layout.d_qk}")


@pytest.mark.parametrize(
    ("layout", "d_qk", "d_nope", "token_bytes", "row_stride", "rope_offset", "num_scales", "scale_offset"),
    [
        (BF16_576, 576, 512, 1152, 1152, 1024, 0, 0),
        (BF16_512, 512, 448, 1024, 1024, 896, 0, 0),
        (V32_FP8, 576, 512, 656, 656, 528, 4, 512),
        (V4_FP8, 512, 448, 584, 576, 448, 7, -1),
        (PLAIN_FP8_576, 576, 576, 576, 576, 576, 0, 0),
        (PLAIN_FP8_512, 512, 512, 512, 512, 512, 0, 0),
        (V32_NOPE_FP8, 512, 512, 528, 528, 528, 4, 512),
        (V41_FP8, 512, 512, 528, 528, 528, 16, 512),
        (V41_FP8_SPLIT, 512, 512, 528, 512, 512, 16, -1),
        (V32_NVFP4, 576, 512, 352, 352, 256, 32, 320),
        (V4_NVFP4, 512, 448, 384, 352, 224, 28, -1),
        (V41_FP4, 512, 512, 288, 288, 288, 32, 256),
        (V41_FP4_SPLIT, 512, 512, 288, 256, 256, 32, -1),
        (INDEXER_FP8, 128, 128, 132, 128, 128, 1, -1),
    ],
)
def test_offsets(layout, d_qk, d_nope, token_bytes, row_stride, rope_offset, num_scales, scale_offset):
    assert (layout.d_qk, layout.d_nope, layout.token_bytes) == (d_qk, d_nope, token_bytes)
    assert (layout.row_stride, layout.rope_offset) == (row_stride, rope_offset)
    assert (layout.num_scales, layout.scale_offset) == (num_scales, scale_offset)


@every_layout
def test_parts_fill_a_token(layout):
    padded = {"ue8m0": -(-layout.num_scales // 8) * 8, "e4m3": -(-layout.num_scales // 32) * 32}
    scale_bytes = {"none": 0, "call": 0, "fp32": 4 * layout.num_scales, **padded}[layout.scale_kind]
    nope_bytes = layout.nope_bytes if layout.quantized else 2 * layout.d_nope
    assert nope_bytes + layout.rope_bytes + scale_bytes == layout.token_bytes
    assert layout.d_nope + layout.d_rope == layout.d_qk
    if layout.scales_apart:
        assert layout.row_stride + layout.scale_stride == layout.token_bytes
        assert layout.scale_stride == scale_bytes
    else:
        assert layout.row_stride == layout.token_bytes


@every_layout
def test_array_of_a_layout(layout):
    assert layout.dtype == (np.uint8 if layout.quantized else BFLOAT16)
    assert layout.last_axis * layout.dtype.itemsize == layout.token_bytes


@pytest.mark.parametrize(
    ("layout", "block_size", "expected"),
    [(V41_FP4, 3, 864), (V41_FP4_SPLIT, 3, 1024), (V41_FP8_SPLIT, 1, 1024), (V41_FP8_SPLIT, 64, 33792),
     (V41_FP8, 3, 1584), (V32_NVFP4, 3, 1056), (V4_NVFP4, 3, 1152),
     (V4_FP8, 1, 1152), (V4_FP8, 2, 1728), (V4_FP8, 64, 37440), (V4_FP8, 61, 35712), (V4_FP8, 256, 149760),
     (V32_FP8, 64, 41984), (V32_FP8, 1, 656), (BF16_576, 3, 3456), (INDEXER_FP8, 64, 8448)],
)  # fmt: skip
def test_block_stride(layout, block_size, expected):
    assert layout.block_bytes(block_size) == expected
    assert layout.block_bytes(block_size) >= block_size * layout.token_bytes


@every_layout
def test_defines(layout):
    """Numbers, and the header of its rows."""
    defines = layout.defines()
    reader = defines.pop("ROW_READER", None)
    assert (kernels_root() / reader).is_file() if layout in CACHE_LAYOUTS else reader is None
    assert all(isinstance(value, int) for value in defines.values())
    assert (defines["D_QK"], defines["NUM_SCALES"]) == (layout.d_qk, layout.num_scales)


def test_layouts_are_told_by_dtype_and_last_axis():
    """But for those that must be named."""
    told = [layout for layout in layouts.DENSE_LAYOUTS if layout.told]
    assert len({(layout.dtype, layout.last_axis) for layout in told}) == len(told)


def test_names_for_type_checkers():
    """Those of the tuples."""
    assert get_args(layouts.CacheLayout) == layouts.names()
    assert get_args(layouts.PagedLayout) == layouts.names(CACHE_LAYOUTS)
    assert get_args(layouts.WritableLayout) == layouts.names(ops_cache.LAYOUTS)


@pytest.mark.parametrize(
    ("name", "wide", "narrow"),
    [(name, BF16_576, BF16_512) for name in ("bf16", "bfloat16", "auto")]
    + [(name, PLAIN_FP8_576, PLAIN_FP8_512) for name in ("plain_fp8", "fp8", "fp8_e4m3")],
)
def test_of_two_widths_by_name(name, wide, narrow):
    assert layouts.by_name(name) is wide
    assert layouts.by_name(name, 512) is narrow
    with pytest.raises(ValueError, match=r"d_qk.*576 or 512.*got 128"):
        layouts.by_name(name, 128)


def test_others_by_name():
    for layout in (V32_FP8, V4_FP8, INDEXER_FP8):
        assert layouts.by_name(layout.name) is layout
        assert layouts.by_name(layout) is layout
    assert layouts.by_name("fp8_ds_mla") is V32_FP8
    with pytest.raises(ValueError, match=r"layout must be one of.*'fp32'"):
        layouts.by_name("fp32")


def test_layouts_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        V32_FP8.d_qk = 512
