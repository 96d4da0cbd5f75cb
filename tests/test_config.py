"""`SparseMLAConfig`: what it derives and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest

from cupy_mla import SparseMLAConfig, layouts


def test_defaults_are_those_of_v32():
    config = SparseMLAConfig(num_heads=128)
    assert (config.d_qk, config.d_v, config.topk, config.block_size) == (576, 512, 2048, 64)
    assert config.layout is layouts.BF16_576
    assert not config.is_v4


@pytest.mark.parametrize(
    ("cache_layout", "d_qk", "layout"),
    [("bf16", 512, layouts.BF16_512), ("v32_fp8", 576, layouts.V32_FP8), ("fp8_ds_mla", 576, layouts.V32_FP8),
     ("v4_fp8", 512, layouts.V4_FP8)],
)  # fmt: skip
def test_layout(cache_layout, d_qk, layout):
    config = SparseMLAConfig(num_heads=8, d_qk=d_qk, cache_layout=cache_layout)
    assert config.layout is layout
    assert config.is_v4 == (d_qk == 512)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_heads", 0), ("num_heads", 129), ("d_qk", 128), ("d_v", 128), ("topk", 0), ("block_size", 0),
     ("max_num_seqs", 0), ("max_num_batched_tokens", 0), ("max_model_len", -1), ("num_speculative_tokens", -1),
     ("compress_ratio", 2), ("compress_ratio", 0), ("window", 0), ("cache_layout", "v4_fp8")],
)  # fmt: skip
def test_a_field_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"^{field}\b.*{value}"):
        SparseMLAConfig(**{"num_heads": 16, field: value})


def test_an_unknown_layout_is_named():
    with pytest.raises(ValueError, match="'int4'"):
        SparseMLAConfig(num_heads=16, cache_layout="int4")


def test_it_is_frozen_and_hashable():
    config = SparseMLAConfig(num_heads=16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 8
    assert config == SparseMLAConfig(num_heads=16)
    assert hash(config) == hash(SparseMLAConfig(num_heads=16))
