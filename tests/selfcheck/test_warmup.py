"""`cupy_mla.warmup` and `python -m cupy_mla warmup`."""

from __future__ import annotations

import pytest

from cupy_mla import BatchMetadata, SparseMLAConfig, SparseMLAMetadataBuilder, __main__
from cupy_mla.cuda import all_kernels
from cupy_mla.selfcheck import report
from cupy_mla.selfcheck import warmup as warmup_module
from cupy_mla.warmup import warmup

from .stand_in import RUN, StandIn, python


def test_it_is_there_without_an_import_of_its_own():
    """As docs/from_flashmla_and_vllm.md calls it."""
    result = python("import cupy_mla; print(cupy_mla.warmup.warmup.__name__)")
    assert result.stdout == "warmup\n", result.stderr


def test_without_a_gpu():
    result = python(RUN.format(["warmup", "--heads", "16"]), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == report.NO_GPU
    assert "warmup needs" in result.stderr


def test_of_no_config(capsys):
    assert __main__.main(["warmup", "--heads", "129"]) == report.WRONG
    assert "num_heads must be in 1..128" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "d_qk", "more"),
    [
        ("bf16", 576, {}),
        ("v32_fp8", 576, {"num_speculative_tokens": 1}),
        ("v32_fp8", 576, {"mixed_below_heads": 1}),
        ("v4_fp8", 512, {"compress_ratio": 4, "block_size": 12}),
        ("v4_fp8", 512, {"compress_ratio": 128, "block_size": 256}),
    ],
)
def test_calls_are_right(monkeypatch, layout, d_qk, more):
    """Their arguments pass the operations' checks; nothing is compiled."""
    config = SparseMLAConfig(
        3, d_qk, topk=5, cache_layout=layout, max_num_seqs=3, max_num_batched_tokens=6, max_model_len=300, **more
    )
    monkeypatch.setattr("cupy_mla.selfcheck.warmup.require_cupy", lambda why: StandIn())
    before = [kernel for kernel in all_kernels() if kernel.loaded(0)]  # other tests of this process, on a GPU
    assert warmup(config) == before


def test_c128a_lists_have_the_width_of_the_metadata(monkeypatch):
    """The forward's lists are those of the builder, whose width is rounded up."""
    config = SparseMLAConfig(
        3, 512, topk=5, cache_layout="v4_fp8", max_num_seqs=2, max_num_batched_tokens=4, max_model_len=300,
        compress_ratio=128, block_size=256,
    )  # fmt: skip
    widths = set()
    monkeypatch.setattr("cupy_mla.selfcheck.warmup.require_cupy", lambda why: StandIn())
    decode = warmup_module.sparse_decode

    def noted(*arguments, extra_indices=None, **more):
        if extra_indices is not None:
            widths.add(extra_indices.shape[-1])
        return decode(*arguments, extra_indices=extra_indices, **more)

    monkeypatch.setattr(warmup_module, "sparse_decode", noted)
    warmup(config)
    builder = SparseMLAMetadataBuilder(config)
    batch = BatchMetadata([0, 1], [300], [[0, 1]], [299], [299])
    assert widths == {builder.build(batch).c128a_global_decode_topk_indices.shape[-1]}


@pytest.mark.gpu
def test_nothing_is_compiled_after_warmup(rng):
    """In a process of its own: what the checks call at a config's heads is ready."""
    code = """
import cupy, numpy as np, cupy_mla
from cupy_mla.warmup import warmup
from cupy_mla.cuda import all_kernels
ready = {repr(k) for k in warmup(cupy_mla.SparseMLAConfig(16, cache_layout="v32_fp8", max_num_seqs=64))}
assert len(ready) < len(all_kernels())
cache = cupy.zeros((4, 64, 656), np.uint8)
for b in (1, 3, 7, 33, 60):
    q = cupy.zeros((b, 1, 16, 576), cupy_mla.layouts.BFLOAT16)
    cupy_mla.sparse_decode(q, cache, cupy.zeros((b, 1, 2048), np.int32), 0.04)
assert {repr(k) for k in all_kernels() if k.loaded(0)} == ready
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
