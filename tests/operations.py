"""A small call of every public operation that has kernels: for what must hold of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cupy_mla
from cupy_mla import flash_mla

from . import oracle
from .batches import queries as batch_of
from .batches import table_for
from .cases import empty_cache, entries, flat_rows, normal, paged, queries, sinks, some
from .kinds import BF16, NumPy, poisoned


@dataclass
class Call:
    """An operation with arguments whose shapes are always the same and whose values are random.

    Attributes:
        arrays: array arguments by parameter.
        settings: the other arguments.
        written: which arrays are written in place.
        made: arrays that would be allocated and could be given instead.
    """

    operation: Callable[..., Any]
    arrays: dict[str, np.ndarray]
    settings: dict[str, Any] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    made: dict[str, np.ndarray] = field(default_factory=dict)

    def run(self, kind: NumPy, arrays: dict[str, Any] | None = None) -> list[np.ndarray]:
        """Make the call over a kind of array; what it returned and what it wrote, as NumPy arrays.

        Args:
            arrays: the array arguments, when they already are of that kind.
        """
        arrays = {name: kind.put(a) for name, a in self.arrays.items()} if arrays is None else arrays
        returned = self.operation(**arrays, **self.settings)
        returned = returned if isinstance(returned, tuple) else (returned,)
        results = [a for a in returned if a is not None] + [arrays[name] for name in self.written]
        return [kind.take(a).copy() for a in results]

    def with_outputs(self) -> Call:
        """The same call with every output given."""
        return Call(self.operation, self.arrays | self.made, self.settings, self.written + tuple(self.made))


def sparse_prefill(rng: np.random.Generator) -> Call:
    live = some(rng, 60)
    return Call(
        cupy_mla.sparse_prefill,
        {"q": queries(rng, 3, 5, 576), "kv": flat_rows(rng, 60, 576, live),
         "indices": entries(rng, (3, 1, 40), live, 60), "attn_sink": sinks(rng, 5),
         "topk_length": rng.integers(1, 41, 3, dtype=np.int32)},
        {"sm_scale": 0.05},
        made={"out": poisoned((3, 5, 512), BF16)},
    )  # fmt: skip


def flash_mla_sparse_fwd(rng: np.random.Generator) -> Call:
    call = sparse_prefill(rng)
    return Call(cupy_mla.flash_mla_sparse_fwd, call.arrays, call.settings, made=call.made)


def _decode_arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
    main, extra = paged(rng, oracle.V4, 2, 2, 70, 64, lengths=True), paged(rng, oracle.V4, 2, 2, 33, 2)
    return {
        "q": queries(rng, 2, 2, 3, 512), "k_cache": main.cache, "indices": main.indices, "attn_sink": sinks(rng, 3),
        "topk_length": main.length, "extra_k_cache": extra.cache, "extra_indices": extra.indices,
    }  # fmt: skip


def sparse_decode(rng: np.random.Generator) -> Call:
    made = {"out": poisoned((2, 2, 3, 512), BF16)}
    return Call(cupy_mla.sparse_decode, _decode_arrays(rng), {"sm_scale": 0.04, "num_splits": 3}, made=made)


def flash_mla_with_kvcache(rng: np.random.Generator) -> Call:
    schedule, _ = flash_mla.get_mla_metadata()
    arrays = _decode_arrays(rng)
    arrays["extra_indices_in_kvcache"] = arrays.pop("extra_indices")
    settings = {
        "block_table": None, "cache_seqlens": None, "head_dim_v": 512, "tile_scheduler_metadata": schedule,
        "is_fp8_kvcache": True,
    }  # fmt: skip
    return Call(cupy_mla.flash_mla_with_kvcache, arrays, settings, made={"out": poisoned((2, 2, 3, 512), BF16)})


def concat_and_cache_mla(rng: np.random.Generator) -> Call:
    arrays = {
        "kv_c": normal(rng, 40, 512), "k_pe": normal(rng, 40, 64), "kv_cache": empty_cache(oracle.V32, 3, 16),
        "slot_mapping": rng.permutation(48)[:40].astype(np.int64),
    }  # fmt: skip
    return Call(cupy_mla.concat_and_cache_mla, arrays, {"scale_format": "ue8m0"}, ("kv_cache",))


def quantize_and_insert_k_cache(rng: np.random.Generator) -> Call:
    arrays = {
        "k": normal(rng, 40, 512), "k_cache": empty_cache(oracle.V4, 3, 16, gap=1),
        "slot_mapping": rng.permutation(48)[:40].astype(np.int64),
    }  # fmt: skip
    return Call(cupy_mla.quantize_and_insert_k_cache, arrays, written=("k_cache",))


def indexer_k_quant_and_cache(rng: np.random.Generator) -> Call:
    arrays = {
        "k": normal(rng, 40, 128), "kv_cache": poisoned((3, 16, 132), np.uint8),
        "slot_mapping": rng.permutation(48)[:40].astype(np.int64),
    }  # fmt: skip
    return Call(cupy_mla.indexer_k_quant_and_cache, arrays, {"scale_format": "fp32"}, ("kv_cache",))


def cp_gather_and_upconvert_fp8_kv_cache(rng: np.random.Generator) -> Call:
    lens = rng.integers(1, 20, 3, dtype=np.int32)
    cache = paged(rng, oracle.V32, 1, 1, 200, 16, invalid=0).cache
    arrays = {
        "src_cache": cache, "dst": poisoned((60, 576), BF16), "block_table": table_for(rng, 3, 20, 16)[:, :2] % 12,
        "seq_lens": lens, "workspace_starts": np.array([0, 20, 40], np.int32),
    }  # fmt: skip
    return Call(cupy_mla.cp_gather_and_upconvert_fp8_kv_cache, arrays, written=("dst",))


def dequantize_and_gather_k_cache(rng: np.random.Generator) -> Call:
    lens = rng.integers(1, 20, 3, dtype=np.int32)
    cache = paged(rng, oracle.V4, 1, 1, 200, 16, invalid=0).cache
    arrays = {
        "out": poisoned((3, 24, 512), BF16), "k_cache": cache, "seq_lens": lens, "gather_lens": lens // 2,
        "block_table": table_for(rng, 3, 20, 16) % 12,
    }  # fmt: skip
    return Call(cupy_mla.dequantize_and_gather_k_cache, arrays, {"block_size": 16, "offset": 3}, ("out",))


def cp_gather_indexer_k_quant_cache(rng: np.random.Generator) -> Call:
    starts = np.array([0, rng.integers(1, 20), 30], np.int32)
    arrays = {
        "kv_cache": rng.integers(0, 120, (5, 16, 132), np.uint8), "dst_k": poisoned((33, 128), np.uint8),
        "dst_scale": poisoned(33, np.float32), "block_table": table_for(rng, 2, 32, 16) % 5, "cu_seq_lens": starts,
    }  # fmt: skip
    return Call(cupy_mla.cp_gather_indexer_k_quant_cache, arrays, written=("dst_k", "dst_scale"))


def concat_mla_q(rng: np.random.Generator) -> Call:
    arrays = {
        "ql_nope": normal(rng, 5, 7, 512).swapaxes(0, 1), "q_pe": normal(rng, 7, 5, 64),
        "out": poisoned((7, 5, 576), BF16),
    }  # fmt: skip
    return Call(cupy_mla.concat_mla_q, arrays, written=("out",))


def convert_req_index_to_global_index(rng: np.random.Generator) -> Call:
    arrays = {
        "req_id": rng.integers(0, 3, 9, dtype=np.int32), "block_table": table_for(rng, 3, 40, 8),
        "token_indices": rng.integers(-1, 40, (9, 12), dtype=np.int32),
        "prefill_request_ids": rng.integers(-1, 2, 9, dtype=np.int32),
        "prefill_workspace_starts": np.array([0, 40], np.int32),
    }  # fmt: skip
    settings = {"block_size": 8, "return_valid_counts": True}
    made = {"out": poisoned((9, 12), np.int32)}
    return Call(cupy_mla.convert_req_index_to_global_index, arrays, settings, made=made)


def dynamic_per_batched_tensor_quant(rng: np.random.Generator) -> Call:
    return Call(cupy_mla.dynamic_per_batched_tensor_quant, {"x": normal(rng, 6, 5, 7)})


def compute_swa_indices_and_lens(rng: np.random.Generator) -> Call:
    batch = batch_of([2, 1, 3], rng.integers(3, 40, 3).tolist())
    arrays = {
        "query_start_loc": batch.query_start_loc, "seq_lens": batch.seq_lens, "token_to_req": batch.token_to_req,
        "is_valid_token": rng.random(6) < 0.8, "block_table": table_for(rng, 3, 40, 8),
    }  # fmt: skip
    made = {"out": poisoned((6, 16), np.int32), "lens": poisoned(6, np.int32)}
    return Call(
        cupy_mla.compute_swa_indices_and_lens, arrays, {"block_size": 8, "window_size": 16}, made=made
    )  # fmt: skip


def compute_prefill_gather_lens(rng: np.random.Generator) -> Call:
    batch = batch_of([2, 1, 3], rng.integers(3, 40, 3).tolist())
    arrays = {"seq_lens": batch.seq_lens, "query_start_loc": batch.query_start_loc}
    made = {"out": poisoned(2, np.int32)}
    return Call(cupy_mla.compute_prefill_gather_lens, arrays, {"num_decodes": 1, "window_size": 16}, made=made)


def combine_topk_swa_indices(rng: np.random.Generator) -> Call:
    batch = batch_of([2, 1, 3], rng.integers(6, 40, 3).tolist())
    arrays = {
        "topk_indices": rng.integers(-1, 10, (6, 9), dtype=np.int32), "query_start_loc": batch.query_start_loc,
        "seq_lens": batch.seq_lens, "gather_lens": np.minimum(batch.seq_lens, 18).astype(np.int32),
    }  # fmt: skip
    made = {"out": poisoned((6, 128), np.int32), "lens": poisoned(6, np.int32)}
    settings = {"window_size": 16, "compress_ratio": 4, "topk": 8, "M": 30, "N": 12}
    return Call(cupy_mla.combine_topk_swa_indices, arrays, settings, made=made)


def compute_global_topk_indices_and_lens(rng: np.random.Generator) -> Call:
    arrays = {
        "topk_indices": rng.integers(-1, 40, (9, 12), dtype=np.int32),
        "token_to_req": rng.integers(0, 3, 9, dtype=np.int32),
        "block_table": table_for(rng, 3, 40, 8), "is_valid_token": rng.random(9) < 0.8,
    }  # fmt: skip
    made = {"out": poisoned((9, 12), np.int32), "lens": poisoned(9, np.int32)}
    return Call(cupy_mla.compute_global_topk_indices_and_lens, arrays, {"block_size": 8}, made=made)


def get_compressed_slot_mapping(rng: np.random.Generator) -> Call:
    batch = batch_of([2, 1, 3], rng.integers(3, 40, 3).tolist())
    arrays = {
        "query_start_loc": batch.query_start_loc, "seq_lens": batch.seq_lens, "block_table": table_for(rng, 3, 10, 2),
    }  # fmt: skip
    settings = {"num_tokens": 6, "block_size": 2, "compress_ratio": 4}
    return Call(cupy_mla.get_compressed_slot_mapping, arrays, settings, made={"out": poisoned(8, np.int64)})


def build_c128a_topk_metadata(rng: np.random.Generator) -> Call:
    arrays = {
        "positions": rng.integers(0, 40, 9), "token_to_req": rng.integers(0, 3, 9, dtype=np.int32),
        "block_table": table_for(rng, 3, 10, 2), "slot_mapping": rng.integers(-1, 9, 9),
        "decode_indices": poisoned((5, 12), np.int32), "decode_lens": poisoned(5, np.int32),
        "prefill_indices": poisoned((6, 12), np.int32),
    }  # fmt: skip
    settings = {"compress_ratio": 4, "num_decode_tokens": 4, "block_size": 2, "max_compressed_tokens": 10}
    written = ("decode_indices", "decode_lens", "prefill_indices")
    return Call(cupy_mla.build_c128a_topk_metadata, arrays, settings, written)


OPERATIONS: dict[str, Callable[[np.random.Generator], Call]] = {
    make.__name__: make
    for make in (
        sparse_prefill, sparse_decode, flash_mla_sparse_fwd, flash_mla_with_kvcache, concat_and_cache_mla,
        quantize_and_insert_k_cache, indexer_k_quant_and_cache, cp_gather_and_upconvert_fp8_kv_cache,
        dequantize_and_gather_k_cache, cp_gather_indexer_k_quant_cache, concat_mla_q, convert_req_index_to_global_index,
        dynamic_per_batched_tensor_quant, compute_swa_indices_and_lens, compute_prefill_gather_lens,
        combine_topk_swa_indices, compute_global_topk_indices_and_lens, get_compressed_slot_mapping,
        build_c128a_topk_metadata,
    )
}  # fmt: skip
