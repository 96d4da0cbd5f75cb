"""A small call of each kernel over CuPy arrays, checked against the NumPy reference: what compute-sanitizer runs on.

compute-sanitizer --tool memcheck python benchmarks/small_cases.py
(racecheck: benchmarks/racecheck.py)
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import cupy
import ml_dtypes
import numpy as np

import cupy_mla
from cupy_mla import layouts
from cupy_mla.cuda.jit import Kernel

BF16 = ml_dtypes.bfloat16


def on_gpu(*arrays: np.ndarray | None) -> list:
    return [None if a is None else cupy.asarray(a) for a in arrays]


def compare(name: str, ours: object, reference: np.ndarray) -> None:
    ours = cupy.asnumpy(ours)
    if reference.dtype == np.uint8:
        different = int((ours != reference).sum())
        assert different == 0, f"{name}: {different} bytes differ"
    else:
        np.testing.assert_allclose(
            ours.astype(np.float32), reference.astype(np.float32), rtol=0.03, atol=2e-3, err_msg=name
        )
    print("ok", name)


def packed(
    rng: np.random.Generator, layout: layouts.Layout, blocks: int, block_size: int
) -> tuple[np.ndarray, cupy.ndarray]:
    """A cache packed by the reference and by the kernel; both must write the same bytes."""
    tokens = blocks * block_size
    rows = (0.1 * rng.standard_normal((tokens, layout.d_qk))).astype(BF16)
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
        if layout is layouts.V4_FP8:
            cupy_mla.quantize_and_insert_k_cache(array(rows), target, array(slots))
        else:
            cupy_mla.concat_and_cache_mla(array(rows[:, :512]), array(rows[:, 512:]), target, array(slots))
    compare(f"pack {layout.name}", gpu_whole.view(cupy.uint8), whole.view(np.uint8))
    return cache, gpu_cache


def same(name: str, operation: Callable, *arguments: object) -> None:
    """Both twins must give the same bits."""
    expected = operation(*(a.copy() if isinstance(a, np.ndarray) else a for a in arguments))
    result = operation(*(cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in arguments))
    several = isinstance(expected, tuple)
    for i, (ours, reference) in enumerate(zip(result, expected, strict=True) if several else [(result, expected)]):
        ours = np.ascontiguousarray(cupy.asnumpy(ours))
        compare(f"{name} {i}", ours.view(np.uint8), np.ascontiguousarray(reference).view(np.uint8))


def placed(a: np.ndarray, array: Callable, shift: bool) -> object:
    """A copy of `a`; with `shift` its rows start one item after an aligned address."""
    if not shift:
        return array(a.copy())
    whole = np.zeros((*a.shape[:-1], a.shape[-1] + 8), a.dtype)
    whole[..., 1:-7] = a
    return array(whole)[..., 1:-7]


def same_written(
    name: str, operation: Callable, written: Sequence[str], shift: Sequence[str] = (), **arguments: object
) -> None:
    """Both twins must write the same bits into the arguments called `written`; those in `shift` are not aligned."""
    ours, reference = (
        {k: placed(v, array, k in shift) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
        for array in (cupy.asarray, np.asarray)
    )
    operation(**ours)
    operation(**reference)
    for key in written:
        pair = (np.ascontiguousarray(a).view(np.uint8) for a in (cupy.asnumpy(ours[key]), reference[key]))
        compare(" ".join([name, key, *(f"{k} shifted" for k in shift)]), *pair)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(BF16)


def pack_cases(rng: np.random.Generator) -> None:
    """What `packed` leaves out: arrays that are not aligned, both scale formats, the indexer's keys."""
    slots = rng.permutation(90)
    slots[::7], slots[3] = -1, 90  # 90 is beyond the cache
    latent, rope, keys = normal(rng, 90, 512), normal(rng, 90, 64), normal(rng, 90, 128)
    latent[5] = keys[5] = 0
    row = {"kv_c": latent, "k_pe": rope, "slot_mapping": slots}
    fp8, bf16 = np.zeros((3, 30, 656), np.uint8), np.zeros((3, 30, 576), BF16)
    for shift in ([], ["kv_c", "k_pe"]):
        for scale_format in ("fp32", "ue8m0"):
            same_written(
                f"pack V32 {scale_format}", cupy_mla.concat_and_cache_mla, ["kv_cache"], shift, **row, kv_cache=fp8,
                scale_format=scale_format,
            )  # fmt: skip
        same_written("pack bf16", cupy_mla.concat_and_cache_mla, ["kv_cache"], shift, **row, kv_cache=bf16)
    same_written(
        "pack V4", cupy_mla.quantize_and_insert_k_cache, ["k_cache"], ["k"], k=latent, slot_mapping=slots,
        k_cache=np.zeros((3, 30, 584), np.uint8),
    )  # fmt: skip
    for block_size in (30, 15):  # blocks of 15 tokens allow 4-byte stores only
        for scale_format in ("fp32", "ue8m0"):
            same_written(
                f"pack indexer {scale_format} {block_size}", cupy_mla.indexer_k_quant_and_cache, ["kv_cache"], k=keys,
                kv_cache=np.zeros((90 // block_size, block_size, 132), np.uint8), slot_mapping=slots,
                scale_format=scale_format,
            )  # fmt: skip


def gather_cases(rng: np.random.Generator) -> None:
    """Requests of which one goes beyond the rows there are, in blocks of which some do not exist."""
    slots = np.arange(192)
    cache, keys = (np.zeros((3, 64, nbytes), np.uint8) for nbytes in (656, 132))
    cupy_mla.concat_and_cache_mla(normal(rng, 192, 512), normal(rng, 192, 64), cache, slots)
    cupy_mla.indexer_k_quant_and_cache(normal(rng, 192, 128), keys, slots)
    table = rng.integers(-1, 4, (3, 2), dtype=np.int32)
    for shift in ([], ["dst"]):
        same_written(
            "gather V32", cupy_mla.cp_gather_and_upconvert_fp8_kv_cache, ["dst"], shift, src_cache=cache,
            dst=np.ones((70, 576), BF16), block_table=table, seq_lens=np.array([9, 0, 100], np.int32),
            workspace_starts=np.array([0, 9, 12], np.int32),
        )  # fmt: skip
    same_written(
        "gather indexer", cupy_mla.cp_gather_indexer_k_quant_cache, ["dst_k", "dst_scale"], kv_cache=keys,
        dst_k=np.ones((90, 128), np.uint8), dst_scale=np.ones(90, np.float32), block_table=table,
        cu_seq_lens=np.array([0, 9, 9, 109], np.int32),
    )  # fmt: skip
    for shift in ([], ["q_pe"]):
        same_written(
            "concat q", cupy_mla.concat_mla_q, ["out"], shift, ql_nope=normal(rng, 5, 7, 512),
            q_pe=normal(rng, 5, 7, 64), out=np.ones((5, 7, 576), BF16),
        )  # fmt: skip


def other_cases(rng: np.random.Generator) -> None:
    """Slots of chosen positions, with and without prefills, and whole tensors."""
    request = rng.integers(-1, 4, 8, dtype=np.int32)
    table = rng.integers(-1, 50, (3, 25), dtype=np.int32)
    chosen = rng.integers(-3, 110, (8, 65), dtype=np.int32)
    prefill, starts = rng.integers(-1, 4, 8, dtype=np.int32), np.array([0, 50, -1], np.int32)
    for prefills in ((None, None), (prefill, starts)):
        same("convert", cupy_mla.convert_req_index_to_global_index, request, table, chosen, 4, *prefills, True)
    for x in (normal(rng, 3, 5, 577), rng.standard_normal((30, 500), dtype=np.float32)):
        same(f"quantize {x.dtype}", cupy_mla.dynamic_per_batched_tensor_quant, x)


def v4_cases(rng: np.random.Generator) -> None:
    """The index operations of V4 layers on numbers of which some are out of range, and the gather."""
    starts, seq_lens = np.array([0, 3, 3, 140], np.int32), np.array([900, 5, 137], np.int32)
    tokens = int(starts[-1])
    request = np.repeat(np.arange(3, dtype=np.int32), np.diff(starts))
    request[5], valid = 9, rng.random(tokens) < 0.8
    slots = np.where(valid, 7, -1).astype(np.int64)
    positions = (seq_lens[:, None] - np.arange(137))[request % 3, 0].astype(np.int64)
    chosen = rng.integers(-3, 300, (tokens, 65), dtype=np.int32)
    gather_lens = cupy_mla.compute_prefill_gather_lens(seq_lens, starts, 0, 9)
    for block_size in (1, 61):
        table = rng.integers(-1, 30, (3, 150), dtype=np.int32)
        same("swa", cupy_mla.compute_swa_indices_and_lens, starts, seq_lens, request, valid, table, block_size, 9)
        same("global topk", cupy_mla.compute_global_topk_indices_and_lens, chosen, request, table, block_size, valid)
        same("slots", cupy_mla.get_compressed_slot_mapping, tokens + 3, starts, seq_lens, table, block_size, 4)
        lists = np.zeros((tokens, 70), np.int32)
        same(
            "c128a", cupy_mla.build_c128a_topk_metadata, positions, 4, 60, request, table, block_size, slots, lists,
            lists[:, 0].copy(), lists.copy(), 66,
        )  # fmt: skip
    same("gather lens", cupy_mla.compute_prefill_gather_lens, seq_lens, starts, 1, 9)
    same("combine", cupy_mla.combine_topk_swa_indices, chosen, starts, seq_lens, gather_lens, 9, 4, 65, 400, 225)
    for block_size in (2, 61):
        cache, gpu_cache = packed(rng, layouts.V4_FP8, 122 // block_size, block_size)
        table = rng.integers(-1, 130 // block_size, (3, 500), dtype=np.int32)
        out = np.zeros((3, 150, 512), BF16)
        gpu_out, *gpu = on_gpu(out, seq_lens, gather_lens, table)
        cupy_mla.dequantize_and_gather_k_cache(out, cache, seq_lens, gather_lens, table, block_size, 5)
        cupy_mla.dequantize_and_gather_k_cache(gpu_out, gpu_cache, *gpu, block_size, 5)
        compare(f"gather V4 {block_size}", gpu_out.view(cupy.uint8), out.view(np.uint8))


def prefill_case(rng: np.random.Generator, h: int, family: str, queries: int = 3, rows: int = 500) -> None:
    """Here and in decode lists are long enough for the Hopper kernels' rings to come round."""
    q = (10 * rng.standard_normal((queries, h, 576))).astype(BF16)
    kv = (0.1 * rng.standard_normal((rows, 1, 576))).astype(BF16)
    indices = rng.integers(-5, rows + 10, (queries, 1, 200), dtype=np.int32)
    sink, length = rng.standard_normal(h).astype(np.float32), rng.integers(0, 201, queries, dtype=np.int32)
    length[:3] = 0, 33, 200
    expected = cupy_mla.sparse_prefill(q, kv, indices, 0.04, attn_sink=sink, topk_length=length)
    gpu = on_gpu(q, kv, indices, sink, length)
    os.environ["CUPY_MLA_KERNELS"] = family
    result = cupy_mla.sparse_prefill(*gpu[:3], 0.04, attn_sink=gpu[3], topk_length=gpu[4])
    for name, ours, reference in zip(("out", "max_logits", "lse"), result, expected, strict=True):
        compare(f"prefill h {h} {family} {name}", ours, reference)


def decode_case(rng: np.random.Generator, layout: layouts.Layout, h: int, family: str) -> None:
    """With 1 and 3 splits of two caches; "flat": of one cache of bf16 rows, by the prefill kernel."""
    flat = family == "flat"
    cache, gpu_cache = packed(rng, layout, 3, 61)
    extra, gpu_extra = packed(rng, layout, 20, 2)
    q = (10 * rng.standard_normal((2, 2, h, layout.d_qk))).astype(BF16)
    indices = rng.integers(-5, 190, (2, 2, 1025), dtype=np.int32)
    extra_indices = rng.integers(-5, 45, (2, 2, 33), dtype=np.int32)
    gpu_q, gpu_i, gpu_e = on_gpu(q, indices, extra_indices)
    second = {} if flat else {"extra_k_cache": extra, "extra_indices": extra_indices}
    gpu_second = {} if flat else {"extra_k_cache": gpu_extra, "extra_indices": gpu_e}
    expected = cupy_mla.sparse_decode(q, cache, indices, **second)
    os.environ["CUPY_MLA_KERNELS"] = "sm90" if flat else family
    for splits in (1, 2) if flat else (1, 3):
        result = cupy_mla.sparse_decode(gpu_q, gpu_cache, gpu_i, num_splits=splits, **gpu_second)
        for name, ours, reference in zip(("out", "lse"), result, expected, strict=True):
            compare(f"decode {layout.name} h {h} {family} splits {splits} {name}", ours, reference)


def cases() -> Iterator[tuple[str, Callable[[np.random.Generator], None]]]:
    """Each of the kernels that can serve a call in turn, chosen by CUPY_MLA_KERNELS; but for Hopper that is one."""
    hopper = cupy.cuda.Device().compute_capability == "90"
    yield from {"pack": pack_cases, "gather": gather_cases, "other": other_cases, "v4": v4_cases}.items()
    if hopper:  # more queries than multiprocessors go in the order of their lengths; lists are sorted for large caches
        for family in ("few_heads", "sm90"):
            yield f"prefill of 140 queries {family}", partial(prefill_case, h=16, family=family, queries=140)
        yield "prefill of a large cache grouped", partial(prefill_case, h=8, family="grouped", rows=60000)
    for h in (7, 32, 70):
        for family in ("few_heads", "sm90", *["grouped"] * (h <= 32)) if hopper else ():
            yield f"prefill h {h} {family}", partial(prefill_case, h=h, family=family)
        yield f"prefill h {h} portable", partial(prefill_case, h=h, family="portable")
    for layout in (layouts.V32_FP8, layouts.V4_FP8, layouts.BF16_576):
        for h in (16, 32, 64, 128):
            for family in (*["few_heads"] * (not layout.scales_apart), "sm90" if layout.quantized else "flat") * hopper:
                yield f"decode {layout.name} h {h} {family}", partial(decode_case, layout=layout, h=h, family=family)
            yield f"decode {layout.name} h {h} portable", partial(decode_case, layout=layout, h=h, family="portable")


def is_named(name: str, starts: Sequence[str]) -> bool:
    """Whether a case's name begins with one of these; without any, all do."""
    return not starts or any(f"{name} ".startswith(f"{start} ") for start in starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases whose names begin so; without, all")
    parser.add_argument("--options", default="", help="more NVRTC options for all kernels")
    arguments = parser.parse_args()
    options, more = Kernel.options.fget, arguments.options.split()
    Kernel.options = property(lambda kernel: (*options(kernel), *more))
    rng = np.random.default_rng()
    for name, act in cases():
        if is_named(name, arguments.names):
            act(rng)
            os.environ.pop("CUPY_MLA_KERNELS", None)


if __name__ == "__main__":
    main()
