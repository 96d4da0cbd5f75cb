"""A user's program for type checkers, which runs, too: NumPy arrays through packing, decode, metadata and the backend.

`tests/test_types.py` checks it with mypy --strict and pyright. It imports nothing of the tests.
"""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from typing_extensions import assert_type

import cupy_mla
from cupy_mla import BatchMetadata, Place, SparseMLABackend, SparseMLAConfig, SparseMLAImpl, flash_mla
from cupy_mla import SparseMLAMetadataBuilder as Builder
from cupy_mla.typing import AnyArray, CacheLayout, ScaleFormat

Rows = NDArray[np.generic]  # what NumPy's types make of bfloat16


def values(rng: np.random.Generator, *shape: int) -> Rows:
    return rng.standard_normal(shape).astype(bfloat16)


def attend(q: Rows, cache: NDArray[np.uint8], indices: NDArray[np.int32]) -> Rows:
    out, lse = cupy_mla.sparse_decode(q, cache, indices, 192**-0.5, num_splits=2, batch_invariant=True)
    assert_type(out, Rows)
    schedule, _ = flash_mla.get_mla_metadata()
    again, _ = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, schedule, softmax_scale=192**-0.5, is_fp8_kvcache=True, indices=indices
    )
    assert out.shape == again.shape
    lens, table = np.array([2], np.int32), np.array([[0]], np.int32)
    dense, _ = cupy_mla.dense_decode(q, cache, table, lens, 192**-0.5, causal=False, window=1)
    assert_type(dense, Rows)
    same, _ = flash_mla.flash_mla_with_kvcache(
        q, cache, table, lens, 512, flash_mla.get_mla_metadata()[0], causal=True, is_fp8_kvcache=True
    )
    assert same.shape == dense.shape
    assert lse.shape == (1, 4, 1)
    return out


def convert(positions: NDArray[np.int32], table: NDArray[np.int32]) -> None:
    requests = np.zeros(len(positions), np.int32)
    slots = cupy_mla.convert_req_index_to_global_index(requests, table, positions, 64)
    assert_type(slots, NDArray[np.int32])
    both = cupy_mla.convert_req_index_to_global_index(requests, table, positions, 64, return_valid_counts=True)
    assert_type(both, tuple[NDArray[np.int32], NDArray[np.int32]])
    for counted in (False, True):
        print(type(cupy_mla.convert_req_index_to_global_index(requests, table, positions, 64, None, None, counted)))
    ended = cupy_mla.convert_to_slots_and_ends(requests, table, positions, 64)
    assert_type(ended, tuple[NDArray[np.int32], NDArray[np.int32]])


def choose(q: Rows, keys: NDArray[np.uint8], scale_format: ScaleFormat) -> None:
    q8, w = cupy_mla.quantize_indexer_q(q, np.ones(q.shape[:2], np.float32), scale_format=scale_format)
    lens, table = np.array([5], np.int32), np.array([[1]], np.int32)
    schedule = cupy_mla.paged_indexer_schedule(lens, table, 64, block_size=64, shares=2)
    assert_type(schedule, NDArray[np.int32])
    slots = cupy_mla.select_rows_paged(
        q8[:, None], keys, w, lens, table, max_context_len=64, k=4, schedule=schedule, slots=True
    )
    assert_type(slots, Rows)
    assert slots.shape == (1, 4)


def any_kind(array: AnyArray) -> tuple[int, ...]:
    """NumPy, CuPy or torch."""
    cupy_mla.to_numpy(array)
    return array.shape


def main() -> None:
    rng = np.random.default_rng(0)
    scale_format: ScaleFormat = "ue8m0"
    layout: CacheLayout = "fp8_ds_mla"
    config = SparseMLAConfig(4, topk=16, block_size=64, cache_layout=layout, max_model_len=256, model="v32")
    cache = np.zeros(SparseMLABackend.get_kv_cache_shape(4, 64, cache_dtype=layout), np.uint8)
    slots = rng.permutation(256)[:200]
    latent, rope = values(rng, 200, 512), values(rng, 200, 64)
    cupy_mla.concat_and_cache_mla(latent, rope, cache, slots, layout="v32_fp8", scale_format=scale_format)
    q = values(rng, 1, 1, 4, 576)
    out = attend(q, cache, slots[None, None, :16].astype(np.int32))
    assert any_kind(out) == (1, 1, 4, 512)
    convert(np.zeros((2, 3), np.int32), np.zeros((1, 4), np.int32))
    choose(values(rng, 1, 8, 128), np.zeros((2, 64, 132), np.uint8), scale_format)

    place = Place.of(cache)
    impl = SparseMLAImpl(config, 192**-0.5, cupy_mla.Workspace(place))
    batch = BatchMetadata([0, 1], [20], [[0, 1, 2, 3]], [19], np.array([19]))  # sequences of integers or arrays
    assert_type(batch.seq_lens, np.ndarray)
    metadata = Builder(config, place, num_blocks=4).build(batch)
    assert_type(metadata.slot_mapping, AnyArray)
    print(cupy_mla.to_numpy(metadata.block_table[:1]).tolist(), metadata.block_table.shape)
    indexer = cupy_mla.IndexerImpl(config, cupy_mla.Workspace(place), scale_format=scale_format)
    index_metadata = cupy_mla.IndexerMetadataBuilder(config, place).build(batch)
    q8, w = cupy_mla.quantize_indexer_q(values(rng, 1, 8, 128), np.ones((1, 8), np.float32))
    keys = np.zeros((4, 64, 132), np.uint8)
    buffer: NDArray[np.int32] = np.zeros((1, 16), np.int32)
    chosen = indexer.forward(values(rng, 1, 128), q8, w, keys, index_metadata, buffer)
    assert_type(chosen, NDArray[np.int32])
    query: Rows = q[0]
    heads = impl.forward_mqa(query, cache, metadata, chosen)
    assert_type(heads, Rows)
    w_uk, w_uv = cupy_mla.split_kv_b_proj(values(rng, 512, 4 * 256), 4, 128)
    assert_type(cupy_mla.v_up_proj(heads, w_uv), Rows)
    print(cupy_mla.absorb_q(values(rng, 1, 4, 128), w_uk).shape)
    with cupy_mla.set_checks(True):
        print(attend(q, cache, slots[None, None, :16].astype(np.int32)).shape)


if __name__ == "__main__":
    main()
