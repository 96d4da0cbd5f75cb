"""`SparseMLAConfig`: what it derives and what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cupy_mla import SparseMLABackend, SparseMLAConfig, layouts


def test_defaults_are_those_of_v32():
    config = SparseMLAConfig(num_heads=128)
    assert (config.d_qk, config.d_v, config.topk, config.block_size) == (576, 512, 2048, 64)
    assert config.layout is layouts.BF16_576
    assert not config.is_v4


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_heads", 0), ("num_heads", 129), ("d_qk", 128), ("d_v", 128), ("topk", 0), ("block_size", 0),
     ("max_num_seqs", 0), ("max_num_batched_tokens", 0), ("max_model_len", -1), ("num_speculative_tokens", -1),
     ("compress_ratio", 2), ("compress_ratio", 0), ("window", 0), ("cache_layout", "v4_fp8"),
     ("cache_layout", "int4"), ("max_workspace_bytes", 0)],
)  # fmt: skip
def test_a_field_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"^{field}\b.*{value}"):
        SparseMLAConfig(**{"num_heads": 16, field: value})


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(SparseMLAConfig) if f.type == "int"])
@pytest.mark.parametrize("value", [16.0, 16.9, "16", None, True])
def test_a_field_of_another_type_is_named(field, value):
    """16.9 tokens of a window were 16."""
    with pytest.raises(TypeError, match=rf"^{field}: expected an integer, got"):
        SparseMLAConfig(**{"num_heads": 16, field: value})


def test_numpy_integers_become_ints():
    config = SparseMLAConfig(np.int64(16), topk=np.int32(7))
    assert (type(config.num_heads), type(config.topk)) == (int, int)


@pytest.mark.parametrize(
    ("d_qk", "model", "cache_layout", "layout"),
    [(576, None, "fp8_ds_mla", layouts.V32_FP8), (512, None, "fp8_ds_mla", layouts.V4_FP8),
     (576, None, "v32_fp8", layouts.V32_FP8), (512, None, "v4_fp8", layouts.V4_FP8),
     (512, None, "bf16", layouts.BF16_512),
     (512, "v4", "fp8_ds_mla", layouts.V4_FP8), (512, "v4", "bf16", layouts.BF16_512),
     (512, "v32", "fp8_ds_mla", layouts.V32_FP8), (512, "v32", "v32_fp8", layouts.V32_FP8),
     (512, "v32", "bf16", layouts.BF16_512), (576, "v32", "auto", layouts.BF16_576),
     (512, "v41", "v41_fp8", layouts.V41_FP8), (512, "v41", "v41_fp8_split", layouts.V41_FP8_SPLIT),
     (512, "v41", "fp8_ds_mla", layouts.V4_FP8), (512, "v32", "v32_nope_fp8", layouts.V32_NOPE_FP8),
     (512, "v32", "plain_fp8", layouts.PLAIN_FP8_512), (576, None, "fp8", layouts.PLAIN_FP8_576)],
)  # fmt: skip
def test_kinds_of_models(d_qk, model, cache_layout, layout):
    """Rows of 512 are V4's, or those of the V3.2 kind without RoPE; vLLM calls the FP8 layout of either the same."""
    config = SparseMLAConfig(16, d_qk, cache_layout=cache_layout, model=model)
    assert config.layout is layout
    assert config.model == (model or {576: "v32", 512: "v4"}[d_qk])
    assert config.is_v4 == (config.model != "v32")
    names = {"bf16": "bfloat16", "auto": "auto", "fp8_ds_mla": "fp8_ds_mla", "v41_fp8": "v41_fp8"}
    if cache_layout in names:
        shape = SparseMLABackend.get_kv_cache_shape(3, 64, 1, d_qk, names[cache_layout], model)
        assert shape == (3, 64, layout.last_axis)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"d_qk": 576, "model": "v4"}, "d_qk of a V4 model must be 512, got 576"),
     ({"d_qk": 512, "model": "v32", "cache_layout": "v4_fp8"}, "cache_layout: models of kind 'v32' have no caches"),
     ({"d_qk": 512, "cache_layout": "v32_fp8"}, "cache_layout: models of kind 'v4' have no caches 'v32_fp8'"),
     ({"model": "v3"}, r"model must be one of \('v32', 'v4', 'v41'\), got 'v3'"),
     ({"d_qk": 576, "model": "v41"}, "d_qk of a V4.1 model must be 512, got 576"),
     ({"d_qk": 512, "model": "v41", "cache_layout": "v32_fp8"}, "cache_layout: models of kind 'v41' have no caches"),
     ({"d_qk": 512, "model": "v41", "compress_ratio": 4},
      "compress_ratio of models of kind 'v41' must be 0, 1 or 2, got 4"),
     ({"d_qk": 512, "compress_ratio": 0}, "compress_ratio of models of kind 'v4' must be 1, 4 or 128, got 0"),
     ({"d_qk": 512, "model": "v41", "compress_ratio": 2, "block_size": 3}, "block_size: expected a multiple of comp"),
     ({"cache_layout": "indexer_fp8"}, "cache_layout must be one of"),
     ({"compress_ratio": 4, "cache_layout": "fp8_ds_mla"}, "compress_ratio of models of kind 'v32' must be 1, got 4"),
     ({"compress_ratio": 128, "block_size": 128}, "compress_ratio of models of kind 'v32' must be 1, got 128"),
     ({"compress_ratio": 4, "d_qk": 512, "model": "v32"}, "compress_ratio of models of kind 'v32' must be 1, got 4"),
     ({"compress_ratio": 4, "d_qk": 512, "block_size": 6}, "block_size: expected a multiple of compress_ratio 4, got"),
     ({"compress_ratio": 128, "d_qk": 512}, "block_size: expected a multiple of compress_ratio 128, got 64"),
     ({"d_qk": 512, "cache_layout": "v41_fp8"}, "cache_layout: models of kind 'v4' have no caches 'v41_fp8'"),
     ({"d_qk": 512, "model": "v32", "cache_layout": "v41_fp8_split"}, "cache_layout: models of kind 'v32' have no c"),
     ({"d_qk": 512, "model": "v41", "cache_layout": "v41_fp4"}, "cache_layout must be one of .* got 'v41_fp4'"),
     ({"compressed_layout": "v41_fp4"}, "compressed_layout: models of kind 'v32' have no compressed caches"),
     ({"d_qk": 512, "cache_layout": "v4_fp8", "compressed_layout": "v41_fp4"},
      r"compressed_layout beside cache_layout 'v4_fp8' must be one of \('v4_fp8',\), got 'v41_fp4'"),
     ({"d_qk": 512, "model": "v41", "cache_layout": "v41_fp8_split", "compressed_layout": "v41_fp4"},
      "compressed_layout beside cache_layout 'v41_fp8_split' must be one of .* got 'v41_fp4'")],
)  # fmt: skip
def test_kinds_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        SparseMLAConfig(16, **change)


@pytest.mark.parametrize(
    ("cache_layout", "compressed_layout", "layout"),
    [("v41_fp8", None, layouts.V41_FP8), ("v41_fp8", "v41_fp8", layouts.V41_FP8),
     ("v41_fp8", "v41_fp4", layouts.V41_FP4), ("v41_fp8_split", "v41_fp4_split", layouts.V41_FP4_SPLIT),
     ("fp8_ds_mla", "fp8_ds_mla", layouts.V4_FP8), ("fp8_ds_mla", "v4_fp8", layouts.V4_FP8),
     ("bf16", "bf16", layouts.BF16_512)],
)  # fmt: skip
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_compressed_caches_may_have_a_layout_of_their_own(cache_layout, compressed_layout, layout, ratio):
    """One for all layers of a model, those of the window alone included, which have no such cache."""
    config = SparseMLAConfig(
        16, 512, model="v41", compress_ratio=ratio, cache_layout=cache_layout, compressed_layout=compressed_layout
    )
    assert config.layout_of_compressed is layout
    assert config.layout is layouts.of_model(cache_layout, 512, True)


@pytest.mark.parametrize(
    ("model", "ratio", "compressed", "chosen", "rows", "longest"),
    [("v32", 1, False, True, 256, 0), ("v4", 1, False, False, 256, 0), ("v4", 4, True, True, 64, 251),
     ("v4", 128, True, False, 2, 8), ("v41", 0, False, False, 256, 0), ("v41", 1, True, True, 256, 1001),
     ("v41", 2, True, True, 128, 501)],
)  # fmt: skip
def test_the_model_says_what_a_compress_ratio_means(model, ratio, compressed, chosen, rows, longest):
    """A ratio of 1 is a sliding window alone in V4, and a compressed row for every token in V4.1."""
    config = SparseMLAConfig(
        16, 576 if model == "v32" else 512, model=model, compress_ratio=ratio, block_size=256, max_model_len=1001
    )
    assert (config.has_compressed_rows, config.has_topk) == (compressed, chosen)
    assert (config.rows_per_block, config.max_compressed_rows) == (rows, longest)
    assert config.max_index_keys == 1001 // max(ratio, 1)


def test_it_is_frozen_and_hashable():
    config = SparseMLAConfig(num_heads=16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 8
    assert config == SparseMLAConfig(num_heads=16)
    assert hash(config) == hash(SparseMLAConfig(num_heads=16))
