"""Small calls of each kernel over CuPy arrays, checked against the NumPy reference: what compute-sanitizer runs on.

compute-sanitizer --tool memcheck python benchmarks/small_cases.py
(racecheck: benchmarks/racecheck.py)
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import cupy_mla
from cupy_mla import layouts, to_cupy
from cupy_mla.calls import scratch
from cupy_mla.calls.operation import forget_calls
from cupy_mla.cuda import driver, indices, logits_sm90, topk
from cupy_mla.cuda import kernel as kernel_module
from cupy_mla.cuda.attention.choose import DENSE_KERNELS, VARIABLE
from cupy_mla.cuda.attention.divide import Clusters, Division, Segments, Shares, Teams, Whole
from cupy_mla.cuda.attention.kernels import fp8_sm90, portable
from cupy_mla.cuda.logits import NAMES as LOGITS_NAMES
from cupy_mla.cuda.logits import VARIABLE as LOGITS_VARIABLE
from cupy_mla.ops.examples import SM_SCALES, Wanted
from cupy_mla.ops.table import OPERATIONS, TABLE, Operation

BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def on_gpu(*arrays: np.ndarray | None) -> list:
    return [None if a is None else to_cupy(a) for a in arrays]


def compare(name: str, ours: object, reference: np.ndarray, size: float = 1.0) -> None:
    """Integers to the bit, others within bounds for numbers of about this size."""
    ours = cupy.asnumpy(ours)
    if reference.dtype.kind in "iu":
        different = int((ours != reference).sum())
        assert different == 0, f"{name}: {different} numbers differ"
    else:
        np.testing.assert_allclose(
            ours.astype(np.float32), reference.astype(np.float32), rtol=0.03, atol=2e-3 * size, err_msg=name
        )
    print("ok", name)


def compare_attention(name: str, results: Sequence[object], references: Sequence[np.ndarray]) -> None:
    """All results of a decode, a merge or a prefill, which has `max_logits`, too."""
    parts = ("out", "max_logits", "lse") if len(references) == 3 else ("out", "lse")
    for part, ours, reference in zip(parts, results, references, strict=True):
        compare(f"{name} {part}", ours, reference)


def packed(
    rng: np.random.Generator, layout: layouts.Layout, blocks: int, block_size: int
) -> tuple[np.ndarray, cupy.ndarray]:
    """A cache packed by the reference and by the kernel; both must write the same bytes."""
    tokens = blocks * block_size
    rows = (0.1 * rng.standard_normal((tokens, layout.d_qk))).astype(BF16)
    if layout.half:  # nothing packs them
        cache = rows.astype(layout.dtype).reshape(blocks, block_size, layout.d_qk)
        return cache, cupy.asarray(cache)
    slots = rng.permutation(tokens).astype(np.int64)
    slots[::7] = -1
    slots[3:4] = tokens  # beyond the cache
    stride = layout.block_bytes(block_size) // layout.dtype.itemsize
    whole = np.zeros((blocks, stride), layout.dtype)
    shape, item = (blocks, block_size, layout.last_axis), layout.dtype.itemsize
    strides = (stride * item, layout.last_axis * item, item)
    cache = np.lib.stride_tricks.as_strided(whole, shape, strides)
    gpu_whole = cupy.asarray(whole)
    gpu_cache = cupy.ndarray(shape, layout.dtype, gpu_whole.data, strides)
    for target, array in ((cache, np.asarray), (gpu_cache, cupy.asarray)):
        if layout.of_v4:
            cupy_mla.quantize_and_insert_k_cache(array(rows), target, array(slots), layout=layout.name)
        else:
            cupy_mla.concat_and_cache_mla(
                array(rows[:, :512]), array(rows[:, 512:]), target, array(slots), layout=layout.name
            )
    compare(f"pack {layout.name}", gpu_whole.view(cupy.uint8), whole.view(np.uint8))
    return cache, gpu_cache


def operation_case(rng: np.random.Generator, operation: Operation) -> None:
    """The operation's calls in the table, some numbers out of range. Both twins must give the same bits."""
    for call in operation.calls(rng, Wanted(strays=True)):
        results = zip(*(operation.run(call, array) for array in (to_cupy, np.asarray)), strict=True)
        for i, pair in enumerate(results):
            name = " ".join([operation.name, *call.detail.split(), str(i)])
            compare(name, *(np.ascontiguousarray(a).view(np.uint8) for a in pair))


def merge_case(rng: np.random.Generator) -> None:
    """The merge of what ranks found; its twins agree to rounding."""
    operation = OPERATIONS["merge_attention"]
    for call in operation.calls(rng, Wanted(strays=True)):
        results, references = (operation.run(call, array) for array in (cupy.asarray, np.asarray))
        compare_attention(f"attention of ranks {call.detail}", results, references)


def compress_case(rng: np.random.Generator) -> None:
    """Keys of pools of tokens, and their rings; the twins of the keys agree to rounding."""
    operation = OPERATIONS["kpool_compress"]
    for call in operation.calls(rng, Wanted(strays=True)):
        (tail, keys), (want_tail, want) = (operation.run(call, array) for array in (cupy.asarray, np.asarray))
        compare(f"rings of {call.detail}", tail.view(np.uint16), want_tail.view(np.uint16))
        compare(f"keys of {call.detail}", keys, want)


def backward_case(rng: np.random.Generator, h: int, dtype: str, d_qk: int = 576, kernel: str = "") -> None:
    """Gradients of a prefill, in one chunk and in several, which must give the same bits."""
    q, kv = (rng.standard_normal(shape).astype(BF16) for shape in ((19, h, d_qk), (300, 1, d_qk)))
    indices = rng.integers(-5, 310, (19, 1, 200), dtype=np.int32)
    dout, sink = rng.standard_normal((19, h, 512)).astype(BF16), rng.standard_normal(h).astype(np.float32)
    length, d_lse = rng.integers(9, 201, 19, dtype=np.int32), rng.standard_normal((19, h), np.float32)
    length[:3] = 0, 33, 200  # the first tokens are no group: one has no rows
    out, _, lse = cupy_mla.sparse_prefill(q, kv, indices, 0.04, attn_sink=sink, topk_length=length)
    of_forward = (q, kv, indices, out, lse, dout)
    gpu, more = on_gpu(*of_forward), {"dq_dtype": dtype, "dkv_dtype": dtype}
    arrays = {"attn_sink": sink, "topk_length": length, "d_lse": d_lse}
    on = dict(zip(arrays, on_gpu(*arrays.values()), strict=True))
    expected = cupy_mla.sparse_prefill_backward(*of_forward, 0.04, **arrays, **more)
    if kernel:
        os.environ[VARIABLE] = kernel
    whole = cupy_mla.sparse_prefill_backward(*gpu, 0.04, **on, **more)
    chunks = cupy_mla.sparse_prefill_backward(*gpu, 0.04, **on, **more, max_workspace_bytes=1 << 20)
    for part, ours, others, reference in zip(("dq", "dkv", "d_sink"), whole, chunks, expected, strict=True):
        name = f"backward h {h} d_qk {d_qk} {dtype} {kernel} {part}"
        size = 2 * np.abs(reference.astype(np.float32)).max()  # sums of many terms: errors are beside the largest
        compare(name, ours, reference, size)
        different = others.view(cupy.uint8) != ours.view(cupy.uint8)
        compare(f"{name}, chunks", different, np.zeros(1, np.uint8))


def training_case(rng: np.random.Generator, name: str) -> None:
    """What the indexer learns from; the loss in one chunk and in several, which must give the same bits."""
    operation = OPERATIONS[name]
    for number, call in enumerate(operation.calls(rng, Wanted(strays=True))):
        ours, expected = (operation.run(call, array) for array in (cupy.asarray, np.asarray))
        for i, (result, reference) in enumerate(zip(ours, expected, strict=True)):
            compare(f"{name} {number} {call.detail} {i}", result, reference, 5 * np.abs(reference).max(initial=1e-3))
        if "loss" in name:
            chunks = operation.run(call._replace(arguments=call.arguments | {"max_workspace_bytes": 1}), cupy.asarray)
            different = [a.tobytes() != b.tobytes() for a, b in zip(ours, chunks, strict=True)]
            compare(
                f"{name} {number} {call.detail}, chunks", np.array(different, np.uint8), np.zeros(len(ours), np.uint8)
            )


@contextmanager
def replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """While it lasts, names of a module that choices depend on have other values."""
    was = {name: getattr(module, name) for name in values}

    def put(those: dict[str, Any]) -> None:
        for name, value in those.items():
            setattr(module, name, value)
        forget_calls()

    put(values)
    try:
        yield
    finally:
        put(was)


def prefill_case(
    rng: np.random.Generator, h: int, kernel: str, queries: int = 3, rows: int = 500, d_qk: int = 576,
    division: str | None = None,
) -> None:  # fmt: skip
    """Here and in decode lists are long enough for the Hopper kernels' rings to come round."""
    q = (10 * rng.standard_normal((queries, h, d_qk))).astype(BF16)
    kv = (0.1 * rng.standard_normal((rows, 1, d_qk))).astype(BF16)
    indices = rng.integers(-5, rows + 10, (queries, 1, 200), dtype=np.int32)
    sink, length = rng.standard_normal(h).astype(np.float32), rng.integers(0, 201, queries, dtype=np.int32)
    length[:3] = 0, 33, 200
    expected = cupy_mla.sparse_prefill(q, kv, indices, 0.04, attn_sink=sink, topk_length=length)
    gpu = on_gpu(q, kv, indices, sink, length)
    os.environ[VARIABLE] = kernel
    with cupy_mla.forced(division=division):
        result = cupy_mla.sparse_prefill(*gpu[:3], 0.04, attn_sink=gpu[3], topk_length=gpu[4])
    compare_attention(f"prefill h {h} d_qk {d_qk} {kernel}", result, expected)


# Kernels that take one cache, whose rows are flat, and how many splits they take; the others take any.
FLAT = {"bf16_sm90": (1,), "bf16_cluster_sm90": (2,), "bf16_shares_sm90": (3,)}
# Of `fp8_sm90`: whole work items, a cluster of three, and CTAs that leave partial results to one another.
SPLITS = {**FLAT, "fp8_sm90": (1, 3, 20)}


def decode_case(
    rng: np.random.Generator, layout: layouts.Layout, h: int, kernel: str, other: layouts.Layout | None = None
) -> None:
    """Splits of two caches, the second one of layout `other`, or of one, flat cache. Of `fp8_sm90` over two layouts,
    every division as well."""
    cache, gpu_cache = packed(rng, layout, 3, 61)
    extra, gpu_extra = packed(rng, other or layout, 20, 2)
    q = (10 * rng.standard_normal((2, 2, h, layout.d_qk))).astype(BF16)
    indices = rng.integers(-5, 190, (2, 2, 1025), dtype=np.int32)
    indices[0, :, 64:320] = indices[1, 0, 640:] = -1  # tiles without a valid entry
    extra_indices = rng.integers(-5, 45, (2, 2, 33), dtype=np.int32)
    gpu_q, gpu_i, gpu_e = on_gpu(q, indices, extra_indices)
    second = {} if kernel in FLAT else {"extra_k_cache": extra, "extra_indices": extra_indices}
    gpu_second = {} if kernel in FLAT else {"extra_k_cache": gpu_extra, "extra_indices": gpu_e}
    scale, named = SM_SCALES[layout.d_qk], {"layout": layout.name}
    if other is not None:
        named["extra_layout"] = other.name
    expected = cupy_mla.sparse_decode(q, cache, indices, scale, **named, **second)
    os.environ[VARIABLE] = kernel
    for splits in SPLITS.get(kernel, (1, 3)):
        result = cupy_mla.sparse_decode(gpu_q, gpu_cache, gpu_i, scale, num_splits=splits, **named, **gpu_second)
        compare_attention(f"decode {' '.join(named.values())} h {h} {kernel} splits {splits}", result, expected)
    for division in divisions_of(fp8_sm90.cta_heads(h)[-1]) if other is not None and kernel == "fp8_sm90" else ():
        with cupy_mla.forced(division=division):
            result = cupy_mla.sparse_decode(gpu_q, gpu_cache, gpu_i, scale, **named, **gpu_second)
        compare_attention(f"decode {' '.join(named.values())} h {h} {kernel} {division}", result, expected)


def divisions_of(heads: int) -> tuple[Division, ...]:
    """One of every kind that `fp8_sm90` has."""
    return Whole(heads), Clusters(heads, 3, 3), Shares(heads), Teams(heads, 2), Segments(heads, 3)


DENSE_SPLITS = {"dense_cluster_sm90": (None, 3), "dense_whole_sm90": (None, 1)}
DENSE_DIVISIONS = {
    "dense_whole_sm90": tuple(f"whole(heads={n})" for n in (16, 32, 64)),
    "dense_sm90": ("shares(splits=0)", "shares(splits=3)"),
    "dense_fp8_sm90": tuple(
        text.format(n)
        for text in (
            "whole(heads={})",
            "clusters(heads={})",
            "shares(heads={}, splits=0)",
            "shares(heads={}, splits=3)",
        )
        for n in (32, 64)
    ),
}
DENSE_SHARES = ("dense_sm90", "dense_fp8_sm90")  # kernels that have plans, of shares that end anywhere


def dense_case(rng: np.random.Generator, layout: layouts.Layout, h: int, kernel: str, e4m3_q: bool = False) -> None:
    """Requests of all lengths, one beyond the table, and blocks that the cache has not: whole, in splits and shares,
    and in shares of one plan for three calls."""
    scales = {}
    if layout.scale_of_call:
        cache = rng.standard_normal((9, 61, layout.d_qk)).astype(E4M3).view(np.uint8)
        (gpu_cache,), scales["k_scale"] = on_gpu(cache), 0.1
    else:
        cache, gpu_cache = packed(rng, layout, 9, 61)
    q = (10 * rng.standard_normal((6, 2, h, layout.d_qk))).astype(E4M3 if e4m3_q else layout.values)
    if e4m3_q:
        q, scales["q_scale"] = q.view(np.uint8), 0.9
    table, lens = rng.integers(0, 9, (6, 15), dtype=np.int32), np.array([1, 0, 915, 64, 940, 3], np.int32)
    table[2, 3:7], table[4, :2] = -1, 9
    scale = SM_SCALES[layout.d_qk]
    gpu_q, gpu_table, gpu_lens = on_gpu(q, table, lens)
    os.environ[VARIABLE] = kernel
    for tokens, view in ((2, {}), (1, {"causal": False, "window": 100})):
        sees = {**view, "layout": layout.name}
        expected = cupy_mla.dense_decode(q[:, :tokens], cache, table, lens, scale, **scales, **sees)
        for splits in DENSE_SPLITS.get(kernel, (None, 1, 3)):
            result = cupy_mla.dense_decode(
                gpu_q[:, :tokens], gpu_cache, gpu_table, gpu_lens, scale, num_splits=splits, **scales, **sees
            )
            compare_attention(f"dense {layout.name} h {h} {kernel} {tokens} tokens splits {splits}", result, expected)
        for division in DENSE_DIVISIONS.get(kernel, ()):
            with cupy_mla.forced(division=division):
                result = cupy_mla.dense_decode(
                    gpu_q[:, :tokens], gpu_cache, gpu_table, gpu_lens, scale, **scales, **sees
                )
            compare_attention(f"dense {layout.name} h {h} {kernel} {tokens} tokens {division}", result, expected)
    if kernel not in DENSE_SHARES:
        return
    schedule, _ = cupy_mla.get_mla_metadata()
    more = {"descale_k": scales.get("k_scale"), "descale_q": scales.get("q_scale")}
    expected = cupy_mla.dense_decode(q, cache, table, lens, scale, layout=layout.name, **scales)
    with cupy_mla.forced(division="shares(splits=0)"):
        for call in range(3):
            result = cupy_mla.flash_mla_with_kvcache(
                gpu_q, gpu_cache, gpu_table, gpu_lens, 512, schedule, softmax_scale=scale, causal=True,
                kv_format=None if layout.told else layout.name, **more,
            )  # fmt: skip
            compare_attention(f"dense {layout.name} h {h} {kernel} call {call} of a plan", result, expected)
    assert schedule.plan.made


def plain_case(rng: np.random.Generator, layout: layouts.Layout, h: int, e4m3_q: bool) -> None:
    """Sparse decode over PLAIN_FP8 rows by `fp8_sm90`, in each division that it has for them."""
    cache = rng.standard_normal((9, 61, layout.d_qk)).astype(E4M3).view(np.uint8)
    q, scales = 10 * rng.standard_normal((6, 2, h, layout.d_qk)), {"k_scale": 0.1}
    q = q.astype(E4M3).view(np.uint8) if e4m3_q else q.astype(BF16)
    if e4m3_q:
        scales["q_scale"] = 0.9
    indices, scale = rng.integers(-99, 9 * 61, (6, 2, 300), dtype=np.int32), SM_SCALES[layout.d_qk]
    expected, on = cupy_mla.sparse_decode(q, cache, indices, scale, **scales), on_gpu(q, cache, indices)
    for kind, heads in product(("whole", "clusters", "shares"), fp8_sm90.HEADS):
        with cupy_mla.forced("fp8_sm90", f"{kind}(heads={heads})"):
            result = cupy_mla.sparse_decode(*on, scale, **scales)
        compare_attention(f"decode plain_fp8 {layout.d_qk} h {h} {kind} {heads}", result, expected)


def cluster_case(rng: np.random.Generator, layout: layouts.Layout, heads: int) -> None:
    """`bf16_cluster_sm90`, so many heads a work item."""
    with cupy_mla.forced(division=f"clusters(heads={heads})"):
        decode_case(rng, layout, 70, "bf16_cluster_sm90")


def short_lists(rng: np.random.Generator, layout: layouts.Layout, h: int) -> tuple[tuple, cupy.ndarray, tuple]:
    """A decode of six requests, whose lists have -1 behind their ends: its arguments on the GPU, the lists' lengths
    there, and the reference's results."""
    cache, gpu_cache = packed(rng, layout, 3, 61)
    q = (10 * rng.standard_normal((6, 1, h, layout.d_qk))).astype(BF16)
    indices = rng.integers(0, 183, (6, 1, 900), dtype=np.int32)
    length = np.array([900, 0, 1, 300, 400, 500], np.int32)
    indices[np.arange(900) >= length[:, None, None]] = -1
    gpu_q, gpu_i, gpu_length = on_gpu(q, indices, length)
    scale = SM_SCALES[layout.d_qk]
    expected = cupy_mla.sparse_decode(q, cache, indices, scale, layout=layout.name)
    return (gpu_q, gpu_cache, gpu_i, scale), gpu_length, expected


def short_case(rng: np.random.Generator, h: int) -> None:
    """`fp8_short_sm90`: more requests than CTAs, both caches, lengths of 0 to all, and entries that name no row."""
    cache, gpu_cache = packed(rng, layouts.V4_FP8, 3, 61)
    extra, gpu_extra = packed(rng, layouts.V4_FP8, 20, 2)
    b = driver.gpu(0).sms + 3
    q = (10 * rng.standard_normal((b, 1, h, 512))).astype(BF16)
    indices, more = (rng.integers(-5, most, (b, 1, n), dtype=np.int32) for most, n in ((190, 100), (45, 33)))
    lengths, of_extra = (rng.integers(0, n + 1, b, dtype=np.int32) for n in (100, 33))
    names = ("topk_length", "extra_k_cache", "extra_indices", "extra_topk_length")
    expected = cupy_mla.sparse_decode(
        q, cache, indices, SM_SCALES[512], **dict(zip(names, (lengths, extra, more, of_extra), strict=True))
    )
    gpu_q, gpu_i, *others = on_gpu(q, indices, lengths, more, of_extra)
    gpu_more = dict(zip(names, (others[0], gpu_extra, *others[1:]), strict=True))
    with cupy_mla.forced("fp8_short_sm90"):
        result = cupy_mla.sparse_decode(gpu_q, gpu_cache, gpu_i, SM_SCALES[512], **gpu_more)
    compare_attention(f"short h {h}", result, expected)


def divided_case(rng: np.random.Generator, layout: layouts.Layout, h: int) -> None:
    """`fp8_sm90` in each of its divisions, as larger batches have them: short lists as whole work items, in clusters,
    over all CTAs by one plan for three calls, in teams of CTAs, and splits taken in turn."""
    decode, length, expected = short_lists(rng, layout, h)
    os.environ[VARIABLE] = "fp8_sm90"
    heads, schedule = fp8_sm90.cta_heads(h)[-1], cupy_mla.get_mla_metadata()[0]

    def planned() -> tuple:
        q, cache, indices, scale = decode
        return cupy_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, schedule, softmax_scale=scale, is_fp8_kvcache=True, indices=indices,
            kv_format=layout.name,
        )  # fmt: skip

    alike = partial(cupy_mla.sparse_decode, *decode, layout=layout.name)

    for name, division, call, times in (
        ("whole", Whole(heads), alike, 1),
        ("clusters", Clusters(heads, 3, 3), alike, 1),
        ("shares", Shares(heads), planned, 3),
        ("teams", Teams(heads, 2), alike, 1),
        ("teams by length", Teams(heads), partial(alike, topk_length=length), 1),
        ("segments", Segments(heads, 3), alike, 1),
    ):
        with cupy_mla.forced(division=division):
            results = [call() for _ in range(times)]
        for number, result in enumerate(results):
            compare_attention(f"divided {layout.name} h {h} {name} {number}", result, expected)


MOST_HEADS = layouts.V32_FP8, layouts.V4_FP8, layouts.BF16_576  # layouts that are tried with 128 heads, too


def decode_kernels(layout: layouts.Layout) -> Iterator[str]:
    """The kernels for Hopper that can serve a decode."""
    if layout in fp8_sm90.LAYOUTS:
        yield "fp8_sm90"
    if layout in (layouts.BF16_576, layouts.BF16_512):
        yield from ("bf16_few_heads_sm90", *FLAT)


def dense_kernels(gpu: driver.Gpu, layout: layouts.Layout) -> Iterator[str]:
    """The kernels of dense attention that a GPU can run."""
    for name, module in DENSE_KERNELS.items():
        if name.startswith("portable"):
            runs = name != "portable" or gpu.shared_kb >= portable.LARGE
        else:
            runs = gpu.capability == 90 and layout in module.LAYOUTS
        if runs:
            yield name


# Heads, and query tokens of a request: one for each tile of `logits_sm90`.
LOGITS_SIZES = (64, 1), (64, 2), (64, 3), (40, 4), (64, 5), (32, 2), (8, 4), (32, 6), (24, 8), (32, 11)
TOPK_SIZES = (300, 1500), (200, 5000), (200, 20000), (900, 8000), (600, 17000), (3, 20000), (2, 200000), (100, 40000)


def logits_case(rng: np.random.Generator, heads: int, queries: int, kernel: str) -> None:
    """Logits over rows, or for requests of a few queries over paged keys: exact in any order of summation."""
    os.environ[LOGITS_VARIABLE] = kernel
    requests = 70  # of whose keys there are more units than SMs
    codes = ml_dtypes.float8_e4m3fn(1).view(np.uint8) * rng.integers(0, 2, (9, 64, 128), dtype=np.uint8)
    cache = np.zeros((9, 64 * 132), np.uint8)
    cache[:, : 64 * 128] = codes.reshape(9, -1)
    cache[:, 64 * 128 :] = np.full((9, 64), 0.5, np.float32).view(np.uint8)
    q8 = ml_dtypes.float8_e4m3fn(-1).view(np.uint8)
    q8 = q8 * rng.integers(0, 2, (requests, queries, heads, 128), dtype=np.uint8)
    q8[:, :, ::2] &= 0x7F
    w = rng.choice(np.array([-1, 0.5], np.float32), (requests * queries, heads))
    table, lens = rng.integers(0, 9, (requests, 4), dtype=np.int32), rng.integers(0, 256, requests, dtype=np.int32)
    lens[:2] = 250, 70
    of_pages = q8, cache.reshape(9, 64, 132), w, lens, table, 255
    pages, expected = on_gpu(*of_pages[:5]), cupy_mla.paged_indexer_logits(*of_pages)
    for many in (False, True):  # as if there were many units an SM
        with replaced(logits_sm90, **({"LONG_UNITS": 0, "FEW_UNITS": 0} if many else {})):
            for shares in (0, 3, 20, 300):  # the last: more CTAs than run at a time
                schedule = cupy_mla.paged_indexer_schedule(*pages[3:], 255, 64, shares) if shares else None
                ours = cupy_mla.paged_indexer_logits(*pages, 255, schedule=schedule)
                name = f"paged logits h {heads} n {queries} {kernel}, {shares} shares"
                compare(f"{name}, many units" if many else name, ours, expected)
    q8, w = q8[:2], w[: 2 * queries]
    ends = np.arange(2 * queries, dtype=np.int32) * 30 + 40
    of_rows = q8.reshape(-1, heads, 128), codes.reshape(-1, 128)[:511], np.ones(511, np.float32), w, ends // 2, ends
    compare(
        f"logits h {heads} queries {2 * queries} {kernel}",
        cupy_mla.indexer_logits(*on_gpu(*of_rows)), cupy_mla.indexer_logits(*of_rows),
    )  # fmt: skip
    compare(
        f"compact logits h {heads} queries {2 * queries} {kernel}",
        cupy_mla.indexer_logits(*on_gpu(*of_rows), compact_width=70),
        cupy_mla.indexer_logits(*of_rows, compact_width=70),
    )
    os.environ.pop(LOGITS_VARIABLE)


def mxfp4_case(rng: np.random.Generator, heads: int, queries: int, kernel: str) -> None:
    """Logits over MXFP4 keys, and over candidate blocks of them and of FP8 keys: exact in any order of summation."""
    os.environ[LOGITS_VARIABLE] = kernel
    requests = 70
    keys = rng.integers(-1, 2, (9 * 64, 4, 32)) * np.exp2(rng.integers(-2, 2, (9 * 64, 4, 1)))
    caches = [np.zeros((9, 64, token_bytes), np.uint8) for token_bytes in (68, 132)]
    for cache in caches:
        cupy_mla.indexer_k_quant_and_cache(keys.reshape(-1, 128).astype(BF16), cache, np.arange(9 * 64), "ue8m0")
    numbers = rng.integers(-1, 2, (requests, queries, heads, 128))
    e4m3, e5m2 = numbers.astype(E4M3).view(np.uint8), numbers.astype(E5M2)
    w = rng.choice(np.array([-1, 0.5], np.float32), (requests * queries, heads))
    table, lens = rng.integers(0, 9, (requests, 4), dtype=np.int32), rng.integers(0, 256, requests, dtype=np.int32)
    name = f"h {heads} n {queries} {kernel}"
    given = e5m2, caches[0], w, lens, table
    ours = cupy_mla.paged_indexer_logits(*on_gpu(*given), 255)
    compare(f"paged logits of MXFP4 {name}", ours, cupy_mla.paged_indexer_logits(*given, 255))
    if queries == 1:
        blocks = -(-lens // 8)
        chosen = np.where(np.arange(9) < blocks[:, None], np.arange(9), -1).astype(np.int32)
        chosen[:, -1] = np.where(blocks > 9, blocks - 1, chosen[:, -1])
        for cache, many in itertools.product(caches, (False, True)):  # as if there were many units an SM
            q8 = e5m2 if cache is caches[0] else e4m3
            given = q8[:, 0], cache, w, chosen, lens, np.arange(requests, dtype=np.int32), table
            with replaced(logits_sm90, **({"FEW_UNITS": 0} if many else {})):
                ours = cupy_mla.candidate_logits(*on_gpu(*given))
            of = f"candidates {cache.shape[2]} {name}{', many units' * many}"
            compare(f"logits of {of}", ours, cupy_mla.candidate_logits(*given))
            ours = cupy_mla.select_candidate_rows(*on_gpu(*given), 40)
            compare(f"rows of {of}", ours, cupy_mla.select_candidate_rows(*given, 40))
    k8, ends = keys.clip(-1, 1).reshape(-1, 128).astype(E5M2), np.arange(2 * queries, dtype=np.int32) * 30 + 40
    k8, ks, w = k8[:511], np.ones(511, np.float32), w[: 2 * queries]
    of_rows = e5m2[:2].reshape(-1, heads, 128), k8, ks, w, ends // 2, ends
    for compact in ({}, {"compact_width": 70}):
        ours = cupy_mla.indexer_logits(*on_gpu(*of_rows), **compact)
        compare(
            f"logits of e5m2 {name}{' compact' * bool(compact)}", ours, cupy_mla.indexer_logits(*of_rows, **compact)
        )
    os.environ.pop(LOGITS_VARIABLE)


def convert_case(rng: np.random.Generator) -> None:
    """Several tokens a CTA, which then copies rows of the block table, of both sizes that it has memory for."""
    for width, counted in product((300, 5000), (False, True)):
        tokens, requests, k = 4 * indices.BLOCKS_PER_SM * driver.gpu(0).sms, 3, 40
        table = rng.integers(0, 1 << 20, (requests, width), dtype=np.int32)
        lists = rng.integers(-1, 64 * width, (tokens, k), dtype=np.int32)
        given = rng.integers(0, requests, tokens, dtype=np.int32), table, lists
        convert = partial(cupy_mla.convert_req_index_to_global_index, block_size=64, return_valid_counts=counted)
        name = f"slots of {width} blocks{', counted' * counted}"
        if counted:
            for ours, theirs in zip(convert(*on_gpu(*given)), convert(*given), strict=True):
                compare(name, ours, theirs)
        else:
            compare(name, convert(*on_gpu(*given)), convert(*given))


def topk_case(rng: np.random.Generator, rows: int, width: int) -> None:
    logits = np.maximum(rng.standard_normal((rows, width), np.float32), -0.3)
    starts = rng.integers(0, width // 8, rows, dtype=np.int32)
    ends = rng.integers(width // 2, width + 1, rows, dtype=np.int32)
    ours = cupy_mla.topk_indices(*on_gpu(logits), 2000, *on_gpu(starts, ends))
    compare(f"topk {rows} x {width}", ours, cupy_mla.topk_indices(logits, 2000, starts, ends))


def topk_shapes_case(rng: np.random.Generator, table: tuple[topk.Widths, ...]) -> None:
    """Every shape of a table, over rows of float32 that are aligned and of bfloat16 that are not."""
    for shape in dict.fromkeys(shape for widths in table for _, shape in widths.shapes):
        cluster = 2 if shape.clusters else 1
        stride = cluster * shape.held * (3 if shape.streamed else 1)
        width = stride - 5
        logits = np.maximum(rng.standard_normal((3, stride), np.float32), -0.3)
        starts, ends = np.array([0, 3, 200], np.int32), np.array([width, width - 100, 250], np.int32)
        for dtype, of in ((np.float32, logits), (BF16, logits[:, :width])):
            of, k = np.ascontiguousarray(of.astype(dtype)), min(2000, shape.most_k)
            with replaced(topk, choose=lambda *_, of=(shape, cluster): of):
                ours = cupy_mla.topk_indices(on_gpu(of)[0][:, :width], k, *on_gpu(starts, ends))
            compare(
                f"topk {shape} {np.dtype(dtype)}", ours, cupy_mla.topk_indices(of[:, :width], k, starts, ends)
            )  # fmt: skip


def cases() -> Iterator[tuple[str, Callable[[np.random.Generator], None]]]:
    """The cache and index operations, then attention by every kernel that can serve a call, named by CUPY_MLA_KERNELS;
    on GPUs other than Hopper that is the portable one, in the shapes that fit the GPU."""
    shapes = ("portable_99kb", "portable")[: 2 if driver.gpu(0).shared_kb >= portable.LARGE else 1]
    hopper = cupy.cuda.Device().compute_capability == "90"
    for operation in TABLE:
        if operation.exact:  # attention has cases of its own, one for each of its kernels
            yield operation.name, partial(operation_case, operation=operation)
    yield "convert many tokens", convert_case
    for kernel in LOGITS_NAMES if hopper else LOGITS_NAMES[:1]:
        for heads, queries in LOGITS_SIZES:
            yield (
                f"logits {kernel} h {heads} n {queries}",
                partial(logits_case, heads=heads, queries=queries, kernel=kernel),
            )
        for heads, queries in (*LOGITS_SIZES, (32, 1)):
            yield (
                f"MXFP4 logits {kernel} h {heads} n {queries}",
                partial(mxfp4_case, heads=heads, queries=queries, kernel=kernel),
            )
    yield "attention of ranks", merge_case
    yield "compress pools", compress_case
    sizes = ((7, 576), (7, 512), (32, 576), (32, 512), (64, 576), (70, 512))
    sizes += ((16, 576), (16, 512), (64, 512), (128, 576), (128, 512))
    for (h, d_qk), dtype in zip(sizes, itertools.cycle(("float32", "bfloat16")), strict=False):
        for kernel in (*shapes, "") if hopper else shapes:
            name = f"prefill_backward h {h} d_qk {d_qk} {kernel}".strip()
            yield name, partial(backward_case, h=h, dtype=dtype, d_qk=d_qk, kernel=kernel)
    for name in ("attention_target", "dense_attention_target", "dense_lse", "indexer_loss", "dense_indexer_loss"):
        yield f"{name.partition('_')[2]} of {name}", partial(training_case, name=name)
    for rows, width in TOPK_SIZES:
        yield f"topk {rows} x {width}", partial(topk_case, rows=rows, width=width)
    tables = {"many": topk.MANY, "few": topk.FEW, "clusters": topk.CLUSTERS}
    for name, table in tables.items():
        if name != "clusters" or hopper:
            yield f"topk of {name}", partial(topk_shapes_case, table=table)
    if hopper:  # more queries than multiprocessors go in the order of their lengths; lists are sorted for large caches
        for kernel in ("bf16_few_heads_sm90", "bf16_sm90", "bf16_shares_sm90"):
            for h in (8, 16, 32) if "few_heads" in kernel else (16,):
                two = "whole(queries=2)" if kernel == "bf16_few_heads_sm90" else None
                case = partial(prefill_case, h=h, kernel=kernel, queries=140, division=two)
                yield f"prefill of 140 queries h {h} {kernel}", case
        grouped = "bf16_grouped_sm90"
        yield f"prefill of a large cache {grouped}", partial(prefill_case, h=8, kernel=grouped, rows=60000)
        for kernel in ("bf16_few_heads_sm90", "bf16_sm90", "bf16_shares_sm90", grouped):
            yield f"prefill d_qk 512 {kernel}", partial(prefill_case, h=24, kernel=kernel, d_qk=512)
        for h in (8, 16, 32):
            case = partial(prefill_case, h=h, kernel="bf16_few_heads_sm90", queries=140, d_qk=512)
            yield f"prefill d_qk 512 h {h}, two queries a CTA", partial(case, division="whole(queries=2)")
    for h in (7, 32, 70):
        flat = "bf16_shares_sm90", "bf16_sm90", "bf16_grouped_sm90"
        for kernel in ("bf16_few_heads_sm90", *flat) if hopper else ():
            if kernel != "bf16_grouped_sm90" or h <= 32:
                yield f"prefill h {h} {kernel}", partial(prefill_case, h=h, kernel=kernel)
        for kernel in shapes:
            yield f"prefill h {h} {kernel}", partial(prefill_case, h=h, kernel=kernel)
    divided = [layout for layout in fp8_sm90.LAYOUTS if not layout.scale_of_call]
    for layout, h in product(divided, (7, 32, 70)) if hopper else ():
        yield f"divided {layout.name} h {h}", partial(divided_case, layout=layout, h=h)
    for h in (20, 70) if hopper else ():
        yield f"short h {h}", partial(short_case, h=h)
    for layout, heads in product((layouts.BF16_576, layouts.BF16_512), (16, 32, 64)) if hopper else ():
        case = partial(cluster_case, layout=layout, heads=heads)
        yield f"decode d_qk {layout.d_qk} in clusters of {heads} heads", case
    for layout in layouts.DENSE_LAYOUTS:
        both = sum(other.name == layout.name for other in layouts.DENSE_LAYOUTS) > 1
        name = f"{layout.name} {layout.d_qk}" if both and layout.d_qk == 512 else layout.name
        for h in (16, 32, 64, 128) if layout in MOST_HEADS else (8, 32, 64):
            for kernel in (*(decode_kernels(layout) if hopper else ()), *shapes) if not layout.half else ():
                yield f"decode {name} h {h} {kernel}", partial(decode_case, layout=layout, h=h, kernel=kernel)
            for kernel in dense_kernels(driver.gpu(0), layout):
                yield f"dense {name} h {h} {kernel}", partial(dense_case, layout=layout, h=h, kernel=kernel)
    for layout, others in layouts.EXTRA_OF.items():
        for other, h, kernel in product(others, (8, 32, 64), (*(decode_kernels(layout) if hopper else ()), *shapes)):
            case = partial(decode_case, layout=layout, h=h, kernel=kernel, other=other)
            yield f"decode {layout.name} beside {other.name} h {h} {kernel}", case
    plain = (layouts.PLAIN_FP8_576, layouts.PLAIN_FP8_512) if hopper else ()
    for layout, h, e4m3_q in product(plain, (16, 70), (False, True)):
        act = partial(dense_case, layout=layout, h=h, kernel="dense_fp8_sm90", e4m3_q=e4m3_q)
        name = f"plain_fp8 {layout.d_qk} h {h} q {'e4m3' if e4m3_q else 'bf16'}"
        yield f"dense {name}", act
        yield f"decode {name}", partial(plain_case, layout=layout, h=h, e4m3_q=e4m3_q)


def is_named(name: str, starts: Sequence[str]) -> bool:
    """Whether a case's name begins with one of these; without any, all do."""
    return not starts or any(f"{name} ".startswith(f"{start} ") for start in starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases whose names begin so; without, all")
    parser.add_argument("--exactly", action="store_true", help="cases of these names alone")
    parser.add_argument("--options", default="", help="more NVRTC options for all kernels")
    arguments = parser.parse_args()
    scratch.BLOCK_BYTES = 0  # each call allocates what it needs, so that memcheck sees where it ends
    kernel_module.OPTIONS = (*kernel_module.OPTIONS, *arguments.options.split())
    rng = np.random.default_rng()
    for name, act in cases():
        if name in arguments.names if arguments.exactly else is_named(name, arguments.names):
            act(rng)
            os.environ.pop(VARIABLE, None)


if __name__ == "__main__":
    main()
