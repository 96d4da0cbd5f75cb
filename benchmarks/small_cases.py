"""A small call of each kernel over CuPy arrays, checked against the NumPy reference: what compute-sanitizer runs on.

compute-sanitizer --tool memcheck python benchmarks/small_cases.py
"""

from __future__ import annotations

from collections.abc import Callable

import cupy
import ml_dtypes
import numpy as np

import cupy_mla
from cupy_mla import layouts

BF16 = ml_dtypes.bfloat16


def on_gpu(*arrays: np.ndarray | None) -> list:
    return [None if a is None else cupy.asarray(a) for a in arrays]


def compare(name: str, ours: object, reference: np.ndarray) -> None:
    """Integers and fp8 codes to the bit, other numbers within the spread of two summation orders."""
    ours = cupy.asnumpy(ours)
    if reference.dtype == layouts.E4M3:
        reference = reference.view(np.uint8)
    if reference.dtype.kind in "iu":
        different = int((ours != reference).sum())
        assert different == 0, f"{name}: {different} items differ"
    else:
        np.testing.assert_allclose(
            ours.astype(np.float32), reference.astype(np.float32), rtol=0.03, atol=2e-3, err_msg=name
        )
    print("ok", name)


def placed(a: np.ndarray, array: Callable, shift: bool) -> object:
    """A copy of `a`; with `shift` its rows start one item after an aligned address."""
    if not shift:
        return array(a.copy())
    whole = np.zeros((*a.shape[:-1], a.shape[-1] + 8), a.dtype)
    whole[..., 1:-7] = a
    return array(whole)[..., 1:-7]


def check(name: str, operation: Callable, outputs: Sequence[str] = (), shift: Sequence[str] = (), **arguments) -> None:
    """Call an operation on both sides and compare the arguments called `outputs`, or else what it returns.

    Args:
        shift: arguments that shall not be aligned.
    """
    results = []
    for array in (cupy.asarray, np.asarray):
        own = {
            key: placed(value, array, key in shift) if isinstance(value, np.ndarray) else value
            for key, value in arguments.items()
        }
        returned = operation(**own)
        results.append([own[key] for key in outputs] or (returned if isinstance(returned, tuple) else [returned]))
    for i, (ours, reference) in enumerate(zip(*results, strict=True)):
        compare(f"{name} {outputs[i] if outputs else i}", ours, reference)


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


def attention(rng: np.random.Generator) -> None:
    v4_cases(rng)
    for h in (7, 32, 70):
        q = (10 * rng.standard_normal((3, h, 576))).astype(BF16)
        kv = (0.1 * rng.standard_normal((100, 1, 576))).astype(BF16)
        indices = rng.integers(-5, 110, (3, 1, 65), dtype=np.int32)
        sink, length = rng.standard_normal(h).astype(np.float32), np.array([0, 33, 65], np.int32)
        expected = cupy_mla.sparse_prefill(q, kv, indices, 0.04, attn_sink=sink, topk_length=length)
        gpu = on_gpu(q, kv, indices, sink, length)
        result = cupy_mla.sparse_prefill(*gpu[:3], 0.04, attn_sink=gpu[3], topk_length=gpu[4])
        for name, ours, reference in zip(("out", "max_logits", "lse"), result, expected, strict=True):
            compare(f"prefill h {h} {name}", ours, reference)
    for layout in (layouts.V32_FP8, layouts.V4_FP8, layouts.BF16_576):
        cache, gpu_cache = packed(rng, layout, 3, 61)
        extra, gpu_extra = packed(rng, layout, 20, 2)
        for h in (16, 64, 128):
            q = (10 * rng.standard_normal((2, 2, h, layout.d_qk))).astype(BF16)
            indices = rng.integers(-5, 190, (2, 2, 129), dtype=np.int32)
            extra_indices = rng.integers(-5, 45, (2, 2, 33), dtype=np.int32)
            gpu_q, gpu_i, gpu_e = on_gpu(q, indices, extra_indices)
            expected = cupy_mla.sparse_decode(q, cache, indices, extra_k_cache=extra, extra_indices=extra_indices)
            for splits in (1, 3):
                result = cupy_mla.sparse_decode(
                    gpu_q, gpu_cache, gpu_i, extra_k_cache=gpu_extra, extra_indices=gpu_e, num_splits=splits
                )
                for name, ours, reference in zip(("out", "lse"), result, expected, strict=True):
                    compare(f"decode {layout.name} h {h} splits {splits} {name}", ours, reference)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(BF16)


def integers(rng: np.random.Generator, low: int, high: int, *shape: int) -> np.ndarray:
    return rng.integers(low, high, shape, dtype=np.int32)


def some_slots(rng: np.random.Generator, slots: int) -> np.ndarray:
    """Every slot once, but for some that are skipped and one beyond the cache."""
    result = rng.permutation(slots)
    result[::7] = -1
    result[3] = slots
    return result


def packing(rng: np.random.Generator) -> None:
    """What `packed` leaves out: arrays that are not aligned, power-of-two scales, the indexer's keys, whole tensors."""
    slots = some_slots(rng, 90)
    rows = {"kv_c": normal(rng, 90, 512), "k_pe": normal(rng, 90, 64), "slot_mapping": slots}
    rows["kv_c"][5] = 0
    for shift in ((), ("kv_c", "k_pe")):
        for scale_format in ("fp32", "ue8m0"):
            check(
                f"pack v32_fp8 {scale_format} shift {shift}", cupy_mla.concat_and_cache_mla, ("kv_cache",), shift,
                **rows, kv_cache=np.zeros((3, 30, 656), np.uint8), scale_format=scale_format,
            )  # fmt: skip
        bf16_cache = np.zeros((3, 30, 576), np.uint16).view(BF16)
        check(f"pack bf16 shift {shift}", cupy_mla.concat_and_cache_mla, ("kv_cache",), shift, **rows, kv_cache=bf16_cache)
    for shift in ((), ("k",)):
        check(
            f"pack v4_fp8 shift {shift}", cupy_mla.quantize_and_insert_k_cache, ("k_cache",), shift,
            k=rows["kv_c"], k_cache=np.zeros((3, 30, 584), np.uint8), slot_mapping=slots,
        )  # fmt: skip
    for block_size, scale_format in ((30, "fp32"), (30, "ue8m0"), (15, "fp32")):
        check(
            f"pack indexer_fp8 block size {block_size} {scale_format}", cupy_mla.indexer_k_quant_and_cache, ("kv_cache",),
            k=normal(rng, 90, 128), kv_cache=np.zeros((90 // block_size, block_size, 132), np.uint8), slot_mapping=slots,
            scale_format=scale_format,
        )  # fmt: skip
    for x in (normal(rng, 3, 5, 577), rng.standard_normal((30, 500), dtype=np.float32)):
        check(f"quantize tensor {x.dtype}", cupy_mla.dynamic_per_batched_tensor_quant, x=x)


def gathering(rng: np.random.Generator) -> None:
    slots = np.arange(192)
    v32, v4, keys = (np.zeros((3, 64, size), np.uint8) for size in (656, 584, 132))
    cupy_mla.concat_and_cache_mla(normal(rng, 192, 512), normal(rng, 192, 64), v32, slots)
    cupy_mla.quantize_and_insert_k_cache(normal(rng, 192, 512), v4, slots)
    cupy_mla.indexer_k_quant_and_cache(normal(rng, 192, 128), keys, slots)
    table = integers(rng, -1, 4, 3, 2)  # some blocks do not exist
    lens = np.array([9, 0, 100], np.int32)
    for shift in ((), ("dst",)):
        check(
            f"gather v32_fp8 shift {shift}", cupy_mla.cp_gather_and_upconvert_fp8_kv_cache, ("dst",), shift,
            src_cache=v32, dst=np.ones((70, 576), BF16), block_table=table, seq_lens=lens,
            workspace_starts=np.array([0, 9, 12], np.int32),  # the last request goes beyond dst
        )  # fmt: skip
    for gather_lens in (None, np.array([3, 0, 17], np.int32)):
        for shift in ((), ("out",)):
            check(
                f"gather v4_fp8 lens {gather_lens} shift {shift}", cupy_mla.dequantize_and_gather_k_cache, ("out",), shift,
                out=np.ones((3, 30, 512), BF16), k_cache=v4, seq_lens=lens, gather_lens=gather_lens, block_table=table,
                block_size=64, offset=2,
            )  # fmt: skip
    check(
        "gather indexer_fp8", cupy_mla.cp_gather_indexer_k_quant_cache, ("dst_k", "dst_scale"), kv_cache=keys,
        dst_k=np.ones((90, 128), np.uint8), dst_scale=np.ones(90, np.float32), block_table=table,
        cu_seq_lens=np.array([0, 9, 9, 109], np.int32),
    )  # fmt: skip
    for shift in ((), ("q_pe",)):
        check(
            f"concat q shift {shift}", cupy_mla.concat_mla_q, ("out",), shift, ql_nope=normal(rng, 5, 7, 512),
            q_pe=normal(rng, 5, 7, 64), out=np.ones((5, 7, 576), BF16),
        )  # fmt: skip


def index_lists(rng: np.random.Generator) -> None:
    block_size, window, ratio = 4, 20, 4
    starts, seq_lens = np.array([0, 1, 3, 3, 7], np.int32), np.array([5, 40, 3, 100], np.int32)
    token_to_req = np.array([0, 1, 1, 3, 3, 3, 3, -1], np.int32)  # and one token of padding
    positions = np.array([4, 38, 39, 96, 97, 98, 99, 0])
    valid = token_to_req >= 0
    valid[1] = False
    table = integers(rng, -1, 50, 4, 25)
    chosen = integers(rng, -3, 110, 8, 65)
    requests = {"query_start_loc": starts, "seq_lens": seq_lens}
    blocks = {"block_table": table, "block_size": block_size}
    prefills = {
        "prefill_request_ids": integers(rng, -1, 4, 8), "prefill_workspace_starts": np.array([0, 50, -1], np.int32)
    }  # fmt: skip
    for more in ({}, prefills):
        check(
            f"convert indices {' '.join(more)}", cupy_mla.convert_req_index_to_global_index, req_id=token_to_req,
            token_indices=chosen, return_valid_counts=True, **blocks, **more,
        )  # fmt: skip
    check(
        "global topk", cupy_mla.compute_global_topk_indices_and_lens, topk_indices=chosen, token_to_req=token_to_req,
        is_valid_token=valid, **blocks,
    )  # fmt: skip
    check(
        "swa decode", cupy_mla.compute_swa_indices_and_lens, token_to_req=token_to_req, is_valid_token=valid,
        window_size=window, **requests, **blocks,
    )  # fmt: skip
    check("gather lens", cupy_mla.compute_prefill_gather_lens, num_decodes=1, window_size=window, **requests)
    gather_lens = cupy_mla.compute_prefill_gather_lens(seq_lens, starts, 0, window)
    check(
        "combine swa", cupy_mla.combine_topk_swa_indices, topk_indices=integers(rng, -1, 27, 8, 24),
        gather_lens=gather_lens, window_size=window, compress_ratio=ratio, topk=20, M=60, N=26, **requests,
    )  # fmt: skip
    check(
        "compressed slots", cupy_mla.get_compressed_slot_mapping, num_tokens=8, compress_ratio=ratio, **requests, **blocks
    )
    check(
        "c128a", cupy_mla.build_c128a_topk_metadata, ("decode_indices", "decode_lens", "prefill_indices"),
        positions=positions, compress_ratio=ratio, num_decode_tokens=3, token_to_req=token_to_req,
        slot_mapping=np.array([7, -1, 9, 1, 2, 3, 4, -1]), decode_indices=np.ones((4, 30), np.int32),
        decode_lens=np.ones(4, np.int32), prefill_indices=np.ones((6, 30), np.int32), max_compressed_tokens=26, **blocks,
    )  # fmt: skip


def main() -> None:
    rng = np.random.default_rng()
    packing(rng)
    gathering(rng)
    index_lists(rng)
    attention(rng)


if __name__ == "__main__":
    main()
