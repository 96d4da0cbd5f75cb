"""What an engine hands over wrongly is an error that names it, and writes nothing.

No silent wrong answer, and no error of Python's or NumPy's own. Tests of each operation have their own bad arguments;
here are those of configs, builders, backends, front doors, layouts and places, and of what users call first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupy_mla
from cupy_mla import (
    BatchMetadata,
    DeepseekV4Impl,
    DeepseekV4Layer,
    IndexerImpl,
    IndexerMetadataBuilder,
    SparseMLABackend,
    SparseMLAConfig,
    SparseMLAImpl,
    SparseMLAMetadataBuilder,
    SparseSWAMetadataBuilder,
    Workspace,
    deep_gemm,
    layouts,
)
from tests.kinds import BF16, E4M3, installed

HOST = ("numpy", -1)
SIZES = {"topk": 8, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}


def config(**change: Any) -> SparseMLAConfig:
    return SparseMLAConfig(4, **{**SIZES, **change})


def v4(**change: Any) -> SparseMLAConfig:
    return config(d_qk=512, cache_layout="v4_fp8", **change)


def batch(**change: Any) -> BatchMetadata:
    """A decode at position 40 and a prompt of 3 tokens."""
    arrays = {
        "query_start_loc": [0, 1, 4], "seq_lens": [41, 3], "block_table": [[3, 7, 1, 0], [4, 9, 0, 0]],
        "slot_mapping": [24, 64, 65, 66], "positions": [40, 0, 1, 2],
    }  # fmt: skip
    return BatchMetadata(**{**arrays, **change})


def bf16(*shape: int) -> np.ndarray:
    return np.zeros(shape, BF16)


def i32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def f32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


class Bad(NamedTuple):
    """A call that must fail.

    Attributes:
        message: what the message begins with: first the argument's name.
        needs: a library.
    """

    call: Callable[[], Any]
    error: type[Exception]
    message: str
    needs: str = ""


def mla(layout: str = "bf16", **change: Any) -> Any:
    """`SparseMLAImpl.forward_mqa` of the batch above, with other arguments or metadata of another config."""
    own = config(cache_layout=layout)
    impl = SparseMLAImpl(own, 0.1, Workspace(HOST))
    given = {
        "q": bf16(4, 4, 576), "kv_cache": np.zeros((10, 16, own.layout.last_axis), own.layout.dtype),
        "metadata": SparseMLAMetadataBuilder(own).build(batch()), "topk_indices": i32(4, 8),
    }  # fmt: skip
    return impl.forward_mqa(**{**given, **change})


def swa_layer(ratio: int = 1, **change: Any) -> Any:
    """`DeepseekV4Impl.forward` of the batch above."""
    own = v4(compress_ratio=ratio, block_size=128 if ratio == 128 else 16)
    impl, layer = DeepseekV4Impl(own, 0.1, Workspace(HOST)), {"swa_k_cache": np.zeros((10, 16, 584), np.uint8)}
    layer["attn_sink"] = f32(4)
    if ratio > 1:
        layer["k_cache"] = np.zeros((10, own.rows_per_block, 584), np.uint8)
    if ratio == 4:
        layer["topk_indices"] = i32(4, 8)
    given = {
        "q": bf16(4, 4, 512), "layer": DeepseekV4Layer(**layer), "output": bf16(4, 4, 512),
        "swa_metadata": SparseSWAMetadataBuilder(v4()).build(batch()),
        "metadata": SparseMLAMetadataBuilder(own).build(batch()) if ratio > 1 else None,
    }  # fmt: skip
    return impl.forward(**{**given, **change})


def index(**change: Any) -> Any:
    """`IndexerImpl.forward` of the batch above."""
    impl = IndexerImpl(config(), Workspace(HOST))
    given = {
        "k": bf16(4, 128), "q8": np.zeros((4, 8, 128), E4M3), "w": f32(4, 8),
        "kv_cache": np.zeros((10, 16, 132), np.uint8), "metadata": IndexerMetadataBuilder(config()).build(batch()),
        "topk_indices_buffer": i32(4, 8),
    }  # fmt: skip
    return impl.forward(**{**given, **change})


def fake(*shape: int) -> Any:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(shape, dtype=torch.bfloat16)


def logits(**change: Any) -> Any:
    given = {
        "q": np.zeros((1, 8, 128), E4M3), "kv": (np.zeros((3, 128), E4M3), f32(3)), "weights": f32(1, 8),
        "cu_seq_len_k_start": i32(1), "cu_seq_len_k_end": i32(1),
    }  # fmt: skip
    return deep_gemm.fp8_mqa_logits(**{**given, **change})


def prefill(**change: Any) -> Any:
    given = {"q": bf16(1, 2, 576), "kv": bf16(4, 1, 576), "indices": i32(1, 1, 3), "sm_scale": 0.1}
    return cupy_mla.sparse_prefill(**{**given, **change})


def decode(schedule: Any = None, **change: Any) -> Any:
    """`flash_mla_with_kvcache` of a query."""
    given = {"indices": i32(1, 1, 3), "is_fp8_kvcache": True, "softmax_scale": 0.1, **change}
    schedule = cupy_mla.get_mla_metadata()[0] if schedule is None else schedule
    cache = np.zeros((2, 16, 1, 656), np.uint8)
    return cupy_mla.flash_mla_with_kvcache(bf16(1, 1, 4, 576), cache, None, None, 512, schedule, **given)


def checked(call: Callable[..., Any], **given: Any) -> Any:
    with cupy_mla.set_checks(True):
        return call(**given)


def within(array: np.ndarray, call: Callable[[np.ndarray], Any]) -> Any:
    """A call with an array and a part of it."""
    return call(array)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def locked() -> Workspace:
    workspace = Workspace(HOST)
    workspace.lock()
    return workspace


def torch_zeros(*shape: int) -> Any:
    import torch

    return torch.zeros(shape, dtype=torch.bfloat16)


BAD = {
    # An engine's step, handed over wrongly.
    "batch None": Bad(
        lambda: SparseMLAMetadataBuilder(config()).build(None), TypeError, "batch: expected a BatchMetadata, got None"
    ),
    "split None": Bad(
        lambda: cupy_mla.split_decodes_and_prefills(None), TypeError, "batch: expected a BatchMetadata, got None"
    ),
    "ragged block table": Bad(
        lambda: batch(block_table=[[1, 2], [3]]), ValueError, "block_table: expected rows of one length, got"
    ),
    "offsets from 1 on": Bad(
        lambda: batch(query_start_loc=[1, 2, 4]), ValueError,
        r"query_start_loc: expected R \+ 1 offsets from 0 on, got 1 as the first of 3",
    ),
    "no offsets": Bad(lambda: batch(query_start_loc=[]), ValueError, "query_start_loc: expected .* got none"),
    "fake slots": Bad(lambda: batch(slot_mapping=fake(4)), TypeError, "slot_mapping: expected an array", "torch"),
    "window of a word": Bad(
        lambda: batch().check_cache(16, window="all"), TypeError, "window: expected an integer, got 'all'"
    ),
    "ratios one number": Bad(
        lambda: SparseSWAMetadataBuilder(v4(), compress_ratios=4), TypeError,
        r"compress_ratios: expected some of \(1, 4, 128\), as \[4\], got 4 of type int",
    ),
    "ratios none": Bad(
        lambda: SparseSWAMetadataBuilder(v4(), compress_ratios=[]), ValueError, r"compress_ratios must be among"
    ),
    "ratios words": Bad(
        lambda: SparseSWAMetadataBuilder(v4(), compress_ratios="4"), TypeError, "compress_ratios: expected an integer"
    ),
    "place not a pair": Bad(lambda: Workspace("numpy"), TypeError, "place: expected a kind of array and a device"),
    "place without a GPU": Bad(
        lambda: SparseMLAMetadataBuilder(config(), ("torch", 99)), RuntimeError,
        "place: there is no cuda:99, torch sees", "torch",
    ),
    # Numbers and tensors that Python or torch would complain of.
    "scale too large for a float": Bad(
        lambda: prefill(sm_scale=10**400), ValueError, "sm_scale: expected a finite number that float32 can hold"
    ),
    "scale of a backend": Bad(
        lambda: SparseMLAImpl(config(), 10**400, Workspace(HOST)), ValueError, "scale: expected a finite number"
    ),
    "more digits than Python writes": Bad(
        lambda: config(topk=10**5000), ValueError, "topk must be small enough for int32, got an integer of 16610 bits"
    ),
    "fake tensors": Bad(
        lambda: prefill(q=fake(1, 2, 576)), TypeError, "q: expected a tensor with memory of its own, got FakeTensor",
        "torch",
    ),
    "fake tensor to NumPy": Bad(
        lambda: cupy_mla.to_numpy(fake(3)), TypeError, "array: expected a tensor with memory of its own", "torch"
    ),
    "dtype None": Bad(
        lambda: Workspace(HOST).get_simultaneous(((3,), None)), TypeError, "dtype: expected one that NumPy or torch has"
    ),
    "dtype of no bytes": Bad(
        lambda: Workspace(HOST).get_simultaneous(((3,), [])), TypeError, "dtype: expected one that NumPy or torch has"
    ),
    # Configs, and what is asked of them.
    "rows of the longest sequence": Bad(
        lambda: SparseMLAImpl(
            config(cache_layout="fp8_ds_mla", max_model_len=10**9, mixed_below_heads=0), 0.1, Workspace(HOST)
        ),
        ValueError, "max_model_len must be in 1..429496729, so that int32 counts them, got 1000000000",
    ),
    "rows of V4's prefills": Bad(
        lambda: DeepseekV4Impl(v4(max_num_batched_tokens=10**9), 0.1, Workspace(HOST)), ValueError,
        "config: int32 cannot count the workspace rows .* max_num_batched_tokens 1000000000",
    ),
    "keys of the indexer": Bad(
        lambda: IndexerImpl(config(max_model_len=10**9), Workspace(HOST)), ValueError,
        "config: int32 cannot count the keys of 5 sequences of max_model_len 1000000000",
    ),
    "tokens of all decodes": Bad(
        lambda: config(max_num_seqs=2**20, num_speculative_tokens=2**20), ValueError,
        "num_speculative_tokens: int32 cannot count",
    ),
    "block bytes": Bad(lambda: layouts.V4_FP8.block_bytes(-1), ValueError, "block_size must be >= 0, got -1"),
    "block bytes of a half": Bad(lambda: layouts.V4_FP8.block_bytes(0.5), TypeError, "block_size: expected an integer"),
    "layouts of no layout": Bad(lambda: layouts.names("bf16"), TypeError, "of: expected a Layout, got 'b' of type str"),
    "layout by an array": Bad(lambda: layouts.by_name(f32(2)), TypeError, "layout: expected one of"),
    "block size a word": Bad(
        lambda: SparseMLABackend.supports_block_size("64"), TypeError, "block_size: expected an integer, got '64'"
    ),
    "capability a word": Bad(
        lambda: SparseMLABackend.supports_compute_capability("9", 0), TypeError, "major: expected an integer, got '9'"
    ),
    "heads of a cache": Bad(
        lambda: SparseMLABackend.get_kv_cache_shape(3, 16, i32(2)), TypeError, "num_kv_heads: expected an integer"
    ),
    "layouts that do not go together": Bad(
        lambda: SparseMLABackend.get_kv_cache_shape(3, 16, 1, 576, "v4_fp8"), ValueError,
        "head_size 576, cache_dtype 'v4_fp8' and model None do not go together: cache_layout: models of kind 'v32'",
    ),
    # Front doors name arguments as they call them.
    "batch invariance a word": Bad(
        lambda: cupy_mla.get_mla_metadata(batch_invariant="yes"), TypeError,
        "batch_invariant: expected True or False, got 'yes'",
    ),
    "kv three": Bad(
        lambda: logits(kv=(1, 2, 3)), TypeError, "kv: expected a pair of values and scales, got tuple of 3"
    ),
    "keys": Bad(lambda: logits(kv=(f32(3, 128), f32(3))), TypeError, r"kv\[0\]: expected dtype"),
    "scales": Bad(lambda: logits(kv=(np.zeros((3, 128), E4M3), f32(4))), ValueError, r"kv\[1\]: expected shape \[3\]"),
    "weights": Bad(lambda: logits(weights=f32(2, 8)), ValueError, r"weights: expected shape \[1, 8\], got \[2, 8\]"),
    "ends": Bad(lambda: logits(cu_seq_len_k_end=None), TypeError, "cu_seq_len_k_end: expected a NumPy, CuPy or torch"),
    "packing a V4 cache": Bad(
        lambda: cupy_mla.concat_and_cache_mla(
            bf16(1, 512), bf16(1, 64), np.zeros((2, 16, 584), np.uint8), np.zeros(1, np.int64)
        ), ValueError, "kv_cache: expected a paged cache .*; quantize_and_insert_k_cache is for layout v4_fp8",
    ),
    "packing a V3.2 cache": Bad(
        lambda: cupy_mla.quantize_and_insert_k_cache(
            bf16(1, 512), np.zeros((2, 16, 656), np.uint8), np.zeros(1, np.int64)
        ), ValueError, "k_cache: expected a paged cache .*; concat_and_cache_mla is for layout v32_fp8",
    ),
    "schedule with its None": Bad(
        lambda: decode(schedule=cupy_mla.get_mla_metadata()), TypeError,
        "tile_scheduler_metadata must come from get_mla_metadata, got tuple",
    ),
    "splits beside a schedule": Bad(
        lambda: decode(num_splits=10**5000), ValueError, "num_splits must be None, .* got an integer of 16610 bits"
    ),
    "fewer logits than keys": Bad(
        lambda: checked(logits, max_seqlen_k=2, cu_seq_len_k_end=np.array([3], np.int32)), IndexError,
        r"cu_seq_len_k_end\[0\] is 3, its range has more than 2 keys \(max_seqlen_k\)",
    ),
    "gathering keys": Bad(
        lambda: cupy_mla.cp_gather_and_upconvert_fp8_kv_cache(
            np.zeros((2, 16, 132), np.uint8), bf16(4, 576), i32(1, 1), i32(1), i32(1)
        ), ValueError, "src_cache: .*; cp_gather_indexer_k_quant_cache is for layout indexer_fp8",
    ),
    # What a step's arrays are not.
    "q in float32": Bad(lambda: mla(q=np.zeros((4, 4, 576), np.float32)), TypeError, "q: expected dtype bfloat16"),
    "a pair in a list": Bad(
        lambda: mla(q=[bf16(4, 4, 512), bf16(4, 4, 64)]), TypeError, "q: expected a NumPy, CuPy or torch array, got"
    ),
    "three parts": Bad(lambda: mla(q=(bf16(4, 4, 512),) * 3), ValueError, "q: expected an array or a pair of them"),
    "q of another library": Bad(
        lambda: mla(q=torch_zeros(4, 4, 576)), TypeError, "q: expected a numpy array as the others are", "torch"
    ),
    "chosen in int64": Bad(lambda: mla(topk_indices=np.zeros((4, 8), int)), TypeError, "topk_indices: expected dtype"),
    "lse a word": Bad(lambda: mla(return_lse="yes"), TypeError, "return_lse: expected True or False, got 'yes'"),
    "out within q": Bad(
        lambda: within(bf16(4, 4, 576), lambda q: mla("fp8_ds_mla", q=q, out=q[..., :512])), ValueError,
        "out: overlaps q in memory",
    ),
    "out within the cache": Bad(
        lambda: within(bf16(10, 16, 576), lambda c: mla(kv_cache=c, out=c.reshape(-1)[:8192].reshape(4, 4, 512))),
        ValueError, "out: overlaps kv",
    ),
    "out read-only": Bad(
        lambda: mla(out=read_only(bf16(4, 4, 512))), ValueError, "out: expected a writable array, got a read-only one"
    ),
    "V4's output is q": Bad(
        lambda: within(bf16(4, 4, 512), lambda q: swa_layer(q=q, output=q)), ValueError, "out: overlaps q in memory"
    ),
    "V4's cache missing": Bad(
        lambda: swa_layer(layer=DeepseekV4Layer(None, f32(4))), TypeError, r"layer\.swa_k_cache: expected a NumPy"
    ),
    "V4's sinks of more heads": Bad(
        lambda: swa_layer(layer=DeepseekV4Layer(np.zeros((10, 16, 584), np.uint8), f32(5))), ValueError,
        r"attn_sink: expected shape \[4\], got \[5\]",
    ),
    "keys in a list": Bad(lambda: index(k=[1, 2]), TypeError, "k: expected a NumPy, CuPy or torch array"),
    "the indexer's cache read-only": Bad(
        lambda: index(kv_cache=read_only(np.zeros((10, 16, 132), np.uint8))), ValueError, "kv_cache: expected a writabl"
    ),
    "the indexer's buffer read-only": Bad(
        lambda: index(topk_indices_buffer=read_only(i32(4, 8))), ValueError, "topk_indices_buffer: expected a writable"
    ),
    "locked before it is large enough": Bad(
        lambda: SparseMLAImpl(config(), 0.1, locked()), RuntimeError, "the workspace is locked at 0 bytes"
    ),
    "workspace a place": Bad(
        lambda: SparseMLAImpl(config(), 0.1, HOST), TypeError, "workspace: expected a Workspace, got an object of type"
    ),
    "config a dict": Bad(
        lambda: SparseMLAImpl({"num_heads": 4}, 0.1, Workspace(HOST)), TypeError, "config: expected a SparseMLAConfig"
    ),
    "lengths in a list": Bad(
        lambda: SparseMLAMetadataBuilder(config()).build(batch(), seq_lens=[41, 3]), TypeError,
        "seq_lens: expected a NumPy, CuPy or torch array",
    ),
    "positions in int32": Bad(
        lambda: SparseMLAMetadataBuilder(config()).build(batch(), positions=i32(4)), TypeError,
        "positions: expected dtype int64",
    ),
    "blocks that the cache has not": Bad(
        lambda: SparseMLAMetadataBuilder(config(), num_blocks=2).build(batch()), ValueError,
        "block_table: block 0 of request 0 is 3, the cache has 2 blocks",
    ),
    "blocks a fraction": Bad(
        lambda: SparseMLAMetadataBuilder(config(), num_blocks=2.0), TypeError, "num_blocks: expected an integer, got 2"
    ),
    "buffers beyond any memory": Bad(
        lambda: SparseMLAMetadataBuilder(config(max_num_seqs=2**31 - 1, max_model_len=2**31 - 1, block_size=1)),
        ValueError, r"place: an array of shape .* more than can be addressed",
    ),
    "a batch of words": Bad(lambda: batch(block_table="x"), ValueError, "block_table: expected 2 axes, got shape"),
    "a batch of fractions": Bad(lambda: batch(positions=[40.0, 0, 1, 2]), TypeError, "positions: expected integers"),
    "slots beyond int64": Bad(
        lambda: batch(slot_mapping=[2**70, 1, 2, 3]), TypeError, "slot_mapping: expected integers, got dtype object"
    ),
    "a place of another kind": Bad(
        lambda: SparseMLAMetadataBuilder(config(), ("jax", 0)), ValueError, r"kind must be one of \('numpy', 'cupy'"
    ),
    "warming up a word": Bad(
        lambda: cupy_mla.warmup.warmup("v32"), TypeError, "config: expected a SparseMLAConfig, got 'v32'"
    ),
    "a division by number": Bad(
        lambda: cupy_mla.forced(division=7), TypeError, "division: expected a division or its text, got 7"
    ),
    # The helpers.
    "a cache of True blocks": Bad(
        lambda: cupy_mla.empty_cache("bf16", True, 4), TypeError, "num_blocks: expected an integer, got True"
    ),
    "a cache beyond any memory": Bad(
        lambda: cupy_mla.empty_cache("bf16", 2**31 - 1, 2**31 - 1), ValueError, "place: an array of shape .* addressed"
    ),
    "rows of no width": Bad(
        lambda: cupy_mla.empty_cache("bf16", 1, 4, d_qk=None), TypeError, "d_qk: expected an integer, got None"
    ),
    "scales of another library": Bad(
        lambda: cupy_mla.split_kv_b_proj(np.zeros((512, 256), E4M3), 1, 128, scales=torch_zeros(4, 2)), TypeError,
        "scales: expected a numpy array as the others are", "torch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(name: str) -> None:
    bad = BAD[name]
    if bad.needs and not installed(bad.needs):
        pytest.skip(f"{bad.needs} is not installed")
    with pytest.raises(bad.error, match=f"^{bad.message}"):
        bad.call()


def test_the_calls_are_right_but_for_that() -> None:
    assert mla().shape == mla("fp8_ds_mla").shape == (4, 4, 512)
    assert all(swa_layer(ratio).shape == (4, 4, 512) for ratio in (1, 4))
    assert index()[1].tolist() == [0, *[-1] * 7]  # the first token of a prompt
    assert logits().shape == (1, 3)
    assert prefill()[0].shape == (1, 2, 512)
    assert decode()[0].shape == (1, 1, 4, 512)


@pytest.mark.parametrize("variable", ["CUPY_MLA_KERNELS", "CUPY_MLA_INDEXER_KERNELS"])
def test_an_unknown_kernel_is_an_error_without_a_gpu(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """A known one is none: NumPy serves the call."""
    call = prefill if variable == "CUPY_MLA_KERNELS" else logits
    monkeypatch.setenv(variable, {prefill: "portable", logits: "logits"}[call])
    call()
    monkeypatch.setenv(variable, "garbage")
    with pytest.raises(ValueError, match=f"^{variable} must be one of .*, got 'garbage'"):
        call()


def test_caches_of_every_layout_that_a_config_takes() -> None:
    """`get_kv_cache_shape` knows them under the same names."""
    for name, d_qk, last in (("bf16", 576, 576), ("v32_fp8", 576, 656), ("v4_fp8", 512, 584), ("bf16", 512, 512)):
        assert SparseMLABackend.get_kv_cache_shape(3, 16, 1, d_qk, name) == (3, 16, last)
        assert SparseMLAConfig(4, d_qk, cache_layout=name).layout.last_axis == last
