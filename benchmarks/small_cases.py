"""A small call of each kernel over CuPy arrays, checked against the NumPy reference: what compute-sanitizer runs on.

compute-sanitizer --tool memcheck python benchmarks/small_cases.py
"""

from __future__ import annotations

import cupy
import ml_dtypes
import numpy as np

import cupy_mla
from cupy_mla import layouts

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


def main() -> None:
    rng = np.random.default_rng()
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


if __name__ == "__main__":
    main()
