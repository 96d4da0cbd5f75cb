"""What an operation refuses: arrays that are not what it asks for, settings of another type or size, and what does not
go together. The error names the argument, and nothing is written. The calls are those of the table, changed."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest

import cupy_mla
from cupy_mla.ops.table import OPERATIONS as TABLE
from tests.kinds import BF16, NumPy
from tests.operations import OPERATIONS, Call

every_operation = pytest.mark.parametrize("name", OPERATIONS)

# --- arrays ---------------------------------------------------------------------------------------------------

# Axes whose length is the caller's, whatever the other arrays are. All others follow from them, or are fixed.
ANY_BLOCKS, ANY_WIDTH = {"block_table": (1,)}, {"logits": (1,)}
FREE: dict[str, dict[str, tuple[int, ...]]] = {
    "sparse_prefill": {"kv": (0,), "indices": (2,)},
    "sparse_prefill_backward": {"indices": (2,)},
    "attention_target": {"kv": (0,)},
    "dense_lse": {"kv": (0,)},
    "sparse_decode": {"k_cache": (0, 1), "indices": (2,), "extra_k_cache": (0, 1), "extra_indices": (2,)},
    "dense_decode": {"k_cache": (0, 1), **ANY_BLOCKS},
    "concat_and_cache_mla": {"kv_cache": (0, 1)},
    "quantize_and_insert_k_cache": {"k": (0,), "k_cache": (0,)},
    "unpack_rows": {"cache": (0, 1)},
    "indexer_k_quant_and_cache": {"k": (0,), "kv_cache": (0, 1)},
    "cp_gather_indexer_k_quant_cache": {"kv_cache": (0, 1), **ANY_BLOCKS},
    "quantize_indexer_q": {"cos_sin_cache": (0,)},
    "quantize_indexer_q_mxfp4": {"cos_sin_cache": (0,)},
    "paged_indexer_logits": {"kv_cache": (0, 1), "schedule": (0,), **ANY_BLOCKS},
    "paged_indexer_schedule": ANY_BLOCKS,
    "topk_indices": ANY_WIDTH,
    "select_rows": {"block_table": (0, 1), "blocks": (1,)},
    "select_rows_paged": {"kv_cache": (0, 1), "schedule": (0,), "blocks": (1,), **ANY_BLOCKS},
    "candidate_blocks": ANY_WIDTH,
    "candidate_logits": {"kv_cache": (0, 1), "block_table": (0, 1)},
    "select_candidate_rows": {"kv_cache": (0, 1), "candidates": (1,), "block_table": (0, 1)},
    "cp_gather_and_upconvert_fp8_kv_cache": {"src_cache": (0, 1), "dst": (0,), **ANY_BLOCKS},
    "dequantize_and_gather_k_cache": {"out": (1,), "k_cache": (0,), **ANY_BLOCKS},
    "convert_req_index_to_global_index": {"block_table": (0, 1), "prefill_workspace_starts": (0,)},
    "convert_to_slots_and_ends": {"block_table": (0, 1), "prefill_workspace_starts": (0,)},
    "slots_of": {"block_table": (0, 1)},
    "kpool_compress": {"ape": (0,), "tail": (0, 2)},
    "dynamic_per_batched_tensor_quant": {"x": (0, 1, 2)},
    "compute_swa_indices_and_lens": ANY_BLOCKS,
    "combine_topk_swa_indices": {"topk_indices": (1,)},
    "compute_global_topk_indices_and_lens": {"block_table": (0, 1)},
    "get_compressed_slot_mapping": {"slot_mapping": (0,), "out": (0,), **ANY_BLOCKS},
    "build_c128a_topk_metadata": {"block_table": (0, 1), "decode_indices": (1,), "prefill_indices": (0, 1)},
    "globalize_topk": ANY_WIDTH,
    "flash_mla_sparse_fwd": {"kv": (0,), "indices": (2,)},
    "flash_mla_with_kvcache": {
        "k_cache": (0, 1), "indices": (2,), "extra_k_cache": (0, 1), "extra_indices_in_kvcache": (2,),
    },
}  # fmt: skip


class Wrong:
    """Calls of an operation with one array that is another than it should be."""

    def __init__(self, kind: NumPy, call: Call) -> None:
        self.kind, self.call, self.any = kind, call, "|".join(call.arrays)
        self.good = self.put()

    def put(self) -> dict[str, Any]:
        return {n: self.kind.put(a) for n, a in self.call.arrays.items()}

    def results(self, name: str, array: Any) -> list[bytes]:
        """Of the call, which is served."""
        given = {**self.good, name: self.kind.put(array)}
        returned = self.call.operation(**given, **fresh(self.call.settings))
        returned = returned if isinstance(returned, tuple) else (returned,)
        arrays = [*(a for a in returned if a is not None), *(given[n] for n in self.call.written)]
        self.good = self.put()
        return [self.kind.take(a).tobytes() for a in arrays]

    def refuse(self, change: dict[str, Any], errors: Any, begin: str) -> None:
        """An error of this kind, whose message begins like that; nothing is written."""
        new = {n: self.kind.put(x) if isinstance(x, np.ndarray) else x for n, x in change.items()}
        with pytest.raises(errors, match=rf"^({begin})(?!\w)"):
            self.call.operation(**{**self.good, **fresh(self.call.settings), **new})
        for n in self.call.written:
            assert self.kind.take(self.good[n]).tobytes() == self.call.arrays[n].tobytes(), f"{n} was written"


def fresh(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings; a schedule that has no plan yet."""
    return {n: cupy_mla.get_mla_metadata()[0] if n == "tile_scheduler_metadata" else s for n, s in settings.items()}


@every_operation
def test_what_is_no_such_array_is_refused(kind, rng, name) -> None:
    """A list, None, and another dtype: each array in turn, which the error names. Nothing is written."""
    wrong = Wrong(kind, OPERATIONS[name](rng).with_outputs())
    parameters = inspect.signature(wrong.call.operation).parameters
    for n, array in wrong.call.arrays.items():
        wrong.refuse({n: [1.0]}, TypeError, n)
        if not (TABLE[name].is_optional(n) if name in TABLE else parameters[n].default is None):
            wrong.refuse({n: None}, (TypeError, ValueError), n)
        # Of which dtype q is to be follows from the rows.
        begin = f"{n}|q|is_fp8_kvcache" if n in ("kv", "k_cache") else n
        wrong.refuse({n: np.zeros(array.shape)}, (TypeError, ValueError), begin)


@every_operation
def test_other_shapes_and_gaps_are_refused(kind, rng, name) -> None:
    """An axis more, one less, one that is longer, and a gap behind each item: of each array in turn. Gaps that are
    taken change nothing."""
    wrong = Wrong(kind, OPERATIONS[name](rng).with_outputs())
    for n, array in wrong.call.arrays.items():
        free = FREE.get(name, {}).get(n, ())
        if array.size > 1 and len(free) < array.ndim:  # neither a scale nor of any shape
            wrong.refuse({n: array[0] if array.ndim > 1 else np.zeros((), array.dtype)}, ValueError, wrong.any)
            wrong.refuse({n: array[None]}, ValueError, wrong.any)
        for axis, size in enumerate(array.shape if array.size > 1 else ()):
            longer = array.take([*range(size), size - 1], axis)
            if axis in free:
                wrong.results(n, longer)
            else:
                wrong.refuse({n: longer}, (TypeError, ValueError), wrong.any)
        gaps = np.repeat(array, 2, axis=-1)[..., ::2]
        if array.size == 1 or (name, n) in TAKE_GAPS:
            assert wrong.results(n, gaps) == wrong.results(n, array)
        else:
            wrong.refuse({n: gaps}, ValueError, n)


TAKE_GAPS = [("widen_mxfp4", "weights"), ("merge_attention", "lses")]


@every_operation
def test_arrays_of_another_library_are_refused(kind, rng, name) -> None:
    if kind.name == "numpy":
        pytest.skip("needs a second kind")
    wrong = Wrong(kind, OPERATIONS[name](rng).with_outputs())
    for n, array in wrong.call.arrays.items() if len(wrong.call.arrays) > 1 else ():
        with pytest.raises(TypeError, match=rf"^({wrong.any})\b.*array as the others are"):
            wrong.call.operation(**{**wrong.good, n: array}, **wrong.call.settings)


# --- settings -------------------------------------------------------------------------------------------------

NO_NUMBER = (None, "0.1", True, np.True_, 1j, [0.1], np.array([0.1, 0.2]))
NO_SCALE = (float("nan"), math.inf, -math.inf, 1e300)  # the last is too large for float32


@pytest.mark.parametrize("name", [*TABLE, "flash_mla_sparse_fwd"])
def test_settings_of_another_type_are_refused(rng, name) -> None:
    """Numbers and words of the wrong kind, and words that no setting has: each setting in turn."""
    call = OPERATIONS[name](rng).with_outputs()
    for n, parameter in inspect.signature(call.operation).parameters.items():
        value = call.settings.get(n, parameter.default)
        if n in call.arrays:
            continue
        of_type: tuple[Any, ...] = {bool: (1, None, "yes"), int: ("4", 2.5, [2], True), float: NO_NUMBER}.get(
            type(value), (2.5, [2], True)
        )
        of_value: tuple[Any, ...] = {bool: (), int: (), float: NO_SCALE}.get(type(value), ("garbage",))
        for errors, values in ((TypeError, of_type), ((TypeError, ValueError), of_value)):
            for wrong in values:
                with pytest.raises(errors, match=rf"^{n}\b"):
                    call.operation(**call.arrays, **{**call.settings, n: wrong})


# --- what is out of range, or does not go together ------------------------------------------------------------


def no_heads(q: np.ndarray) -> np.ndarray:
    return q[..., :0, :]


def many_heads(q: np.ndarray) -> np.ndarray:
    return np.zeros((*q.shape[:-2], 129, q.shape[-1]), q.dtype)


def of(dtype: Any, *shape: int) -> Any:
    """In place of an array."""
    return lambda array: np.zeros(shape, dtype)


def first_items(n: int) -> Any:
    """Rows that end sooner, and so have gaps."""
    return lambda array: np.zeros((*array.shape[:-1], array.shape[-1] + n), array.dtype)[..., :-n]


def cut_blocks(gap: int) -> Any:
    """Blocks with so many bytes behind each."""
    return lambda a: np.zeros((len(a), a[0].size + gap), a.dtype)[:, :-gap].reshape(a.shape)


def one_for_all(array: np.ndarray) -> np.ndarray:
    return np.broadcast_to(array[:1], array.shape)


def overlapping(array: np.ndarray) -> np.ndarray:
    """Along the first two axes."""
    step = array.shape[-1] * array.itemsize
    strides = (step, *array.strides[1:]) if array.ndim < 4 else array.strides
    return np.ndarray(array.shape, array.dtype, array, 0, strides)


CACHES = {
    "rows of another width": of(BF16, 3, 4, 512), "rows of V4": of(np.uint8, 3, 4, 584),
    "two KV heads": lambda a: np.stack([a, a], axis=2), "blocks of no tokens": lambda a: a[:, :0],
    "gaps between tokens": first_items(16), "blocks at odd places": cut_blocks(8), "overlapping blocks": overlapping,
}  # fmt: skip
OF_CACHES = [
    (operation, {cache: wrong}, f"{cache}|q|k_pe")
    for operation, cache in (("sparse_decode", "k_cache"), ("sparse_decode", "extra_k_cache"),
                             ("dense_decode", "k_cache"), ("concat_and_cache_mla", "kv_cache"))
    for wrong in CACHES.values()
]  # fmt: skip
SPLITS = [
    (f"{kind}_decode", {"num_splits": n}, "num_splits") for kind in ("sparse", "dense") for n in (0, -1, 1025, 10**6)
]

# An operation, what is changed in its call (a function: of the array or setting), and what the error begins with.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *((operation, {"q": wrong}, "q") for operation in ("sparse_prefill", "sparse_decode", "dense_decode")
      for wrong in (no_heads, many_heads)),
    *((operation, {"q": many_heads}, "q: expected 1 to 128 heads") for operation in (
        "sparse_prefill_backward", "attention_target", "dense_attention_target", "dense_lse")),
    *OF_CACHES, *SPLITS,
    ("sparse_prefill", {"kv": lambda a: a[..., :512].copy()}, "kv"),
    ("sparse_prefill", {"out": one_for_all}, "out"),
    ("sparse_prefill", {"out": overlapping}, "out"),
    ("sparse_decode", {"out": one_for_all}, "out"),
    ("sparse_prefill", {"d_v": 256}, "d_v"),
    ("sparse_decode", {"extra_k_cache": None}, "extra_k_cache and extra_indices must be given together"),
    ("sparse_decode", {"extra_indices": None}, "extra_k_cache and extra_indices must be given together"),
    ("sparse_decode", {"extra_k_cache": None, "extra_indices": None}, "extra_topk_length"),
    ("dense_decode", {"window": 0}, "window"),
    ("dense_decode", {"window": -1}, "window"),
    # Packing, unpacking and gathering.
    ("concat_and_cache_mla", {"kv_cache": one_for_all}, "kv_cache"),
    ("quantize_and_insert_k_cache", {"k_cache": of(np.uint8, 2, 8, 656)}, "k_cache"),
    ("quantize_and_insert_k_cache", {"k_cache": of(np.uint8, 2, 61, 584)}, "k_cache"),
    ("quantize_and_insert_k_cache", {"k_cache": of(np.int8, 4, 32, 584)}, "k_cache"),
    ("unpack_rows", {"cache": of(np.uint8, 2, 8, 655)}, "cache: expected a paged cache"),
    ("cp_gather_and_upconvert_fp8_kv_cache", {"src_cache": of(np.uint8, 4, 8, 584)}, "src_cache: expected a paged"),
    ("cp_gather_and_upconvert_fp8_kv_cache", {"dst": one_for_all}, "dst"),
    ("dequantize_and_gather_k_cache", {"k_cache": of(np.uint8, 4, 8, 656)}, "k_cache: expected a paged cache"),
    ("dequantize_and_gather_k_cache", {"block_size": 16}, "block_size: k_cache has 32 tokens a block, got 16"),
    ("dequantize_and_gather_k_cache", {"offset": 61}, r"offset must be in 0\.\.60"),
    ("dequantize_and_gather_k_cache", {"offset": -1}, r"offset must be in 0\.\.60"),
    # The indexer.
    ("indexer_k_quant_and_cache", {"kv_cache": of(np.uint8, 2, 4, 656)}, "kv_cache: expected a paged cache"),
    ("indexer_k_quant_and_cache", {"kv_cache": of(np.uint8, 2, 4, 64)}, "kv_cache: expected a paged cache .*132.*68"),
    ("indexer_k_quant_and_cache", {"kv_cache": cut_blocks(1)}, "kv_cache: block stride must be a multiple of 4 bytes"),
    ("cp_gather_indexer_k_quant_cache", {"dst_k": first_items(1)}, "dst_k: rows must start at"),
    ("quantize_indexer_q", {"q": of(BF16, 11, 12, 128)}, "q: expected shape"),
    ("quantize_indexer_q", {"cos_sin_cache": None}, "positions and cos_sin_cache must be given together, got"),
    ("widen_mxfp4", {"codes": first_items(1)}, "codes: rows must start at multiples of 4 bytes"),
    ("indexer_logits", {"q8": of(np.uint8, 7, 60, 128)}, "q8: expected shape"),
    ("indexer_logits", {"k8": first_items(8)}, "k8: rows must start at multiples of 16 bytes"),
    ("paged_indexer_logits", {"kv_cache": of(np.uint8, 3, 8, 656)}, "kv_cache: expected a paged cache"),
    ("paged_indexer_logits", {"q8": of(np.uint8, 3, 2, 64, 128), "w": of(np.float32, 6, 64),
                              "context_lens": lambda a: np.broadcast_to(np.int32([5, 6]), (3, 2))},
     "context_lens: requests share one row"),
    ("paged_indexer_logits", {"max_context_len": -1}, "max_context_len must be >= 0, got -1"),
    ("paged_indexer_logits", {"schedule": of(np.int32, 0, 32)}, "schedule: expected a share at least, got none"),
    ("select_rows_paged", {"schedule": of(np.int32, 0, 32)}, "schedule: expected a share at least, got none"),
    ("paged_indexer_schedule", {"context_lens": lambda a: np.broadcast_to(np.int32([5, 6]), (300, 2))},
     "context_lens: requests share one row"),
    ("paged_indexer_schedule", {"max_context_len": -1}, "max_context_len must be >= 0, got -1"),
    ("paged_indexer_schedule", {"block_size": 0}, "block_size must be >= 1, got 0"),
    ("paged_indexer_schedule", {"shares": 0}, r"shares must be in 1\.\.1024, got 0"),
    ("paged_indexer_schedule", {"shares": 1025}, r"shares must be in 1\.\.1024, got 1025"),
    *((operation, {"k": k}, rf"k must be in 1\.\.4096, got {k}") for k in (0, 4097)
      for operation in ("topk_indices", "select_rows", "select_rows_paged", "select_candidate_rows", "merge_topk")),
    ("candidate_blocks", {"count": 4097}, "count must be in"),
    ("select_rows", {"max_workspace_bytes": 0}, "max_workspace_bytes must be in 1"),
    ("select_rows", {"block_size": None}, ".*block_size must be given together, got req_id and block_table alone"),
    ("select_rows", {"block_size": 0}, "block_size must be >= 1, got 0"),
    *((operation, {"q8": first_items(1)}, "q8: rows must start at multiples of 16")
      for operation in ("candidate_logits", "select_candidate_rows")),
    *((operation, {"kv_cache": of(np.uint8, 2, 8, 64)}, "kv_cache: expected a paged cache")
      for operation in ("candidate_logits", "select_candidate_rows")),
    # Lists and slots.
    *((operation, change, message) for operation in ("convert_req_index_to_global_index", "convert_to_slots_and_ends")
      for change, message in (
          ({"block_size": 0}, "block_size must be >= 1"),
          ({"block_stride_rows": 31}, r"block_stride_rows must be in 32\.\..*, the rows of a block at least"),
          ({"prefill_workspace_starts": None}, ".*given together, got prefill_request_ids alone"),
      )),
    ("slots_of", {"block_size": 0}, "block_size must be >= 1"),
    ("compute_global_topk_indices_and_lens", {"block_size": 0}, "block_size must be >= 1"),
    ("compute_global_topk_indices_and_lens", {"block_stride_rows": 15}, "block_stride_rows must be in 32"),
    ("get_compressed_slot_mapping", {"compress_ratio": 0}, "compress_ratio must be >= 1"),
    ("get_compressed_slot_mapping", {"slot_mapping": of(np.int64, 4)}, "slot_mapping: expected at least"),
    ("get_compressed_slot_mapping", {"dcp_world_size": 0}, "dcp_world_size must be in 1"),
    ("get_compressed_slot_mapping", {"dcp_rank": 2}, "dcp_rank must be in 0"),
    ("get_compressed_slot_mapping", {"cp_interleave": 0}, "cp_interleave must be in 1"),
    ("get_compressed_slot_mapping", {"cp_interleave": 3}, "block_size: expected a multiple of cp_interleave 3, got 32"),
    ("get_compressed_slot_mapping", {"num_tokens": -1}, "num_tokens must be >= 0"),
    ("get_compressed_slot_mapping", {"out": of(np.int64, 4)}, "out: expected at least num_tokens = 63"),
    ("build_c128a_topk_metadata", {"num_decode_tokens": 61}, r"num_decode_tokens must be in 0\.\.60"),
    ("build_c128a_topk_metadata", {"max_compressed_tokens": 71}, "decode_indices: expected at least"),
    ("build_c128a_topk_metadata", {"prefill_indices": of(np.int32, 39, 70)}, ".*at least 40 rows of 66, got"),
    ("compute_swa_indices_and_lens", {"block_size": 0}, "block_size must be >= 1"),
    ("compute_swa_indices_and_lens", {"window_size": 0}, "window_size must be >= 1"),
    ("compute_swa_indices_and_lens", {"left_visible": None}, ".*given together, got right_visible alone"),
    ("compute_swa_indices_and_lens", {"max_image_tokens": 2}, r"out: expected shape \[60, 18\]"),
    ("combine_topk_swa_indices", {"topk": 66}, "topk_indices: expected at least topk = 66 columns"),
    ("combine_topk_swa_indices", {"N": 201}, "M must be >= 201, got 200"),
    ("combine_topk_swa_indices", {"M": 2**30}, "M: 3 requests of 1073741824 workspace rows"),
    ("combine_topk_swa_indices", {"compress_ratio": -1}, "compress_ratio must be >= 0"),
    ("combine_topk_swa_indices", {"right_visible": None}, ".*given together, got left_visible alone"),
    ("combine_topk_swa_indices", {"max_image_tokens": -1}, "max_image_tokens must be >= 0"),
    ("combine_topk_swa_indices", {"max_image_tokens": 200}, r"out: expected shape \[60, 384\]"),
    ("compute_prefill_gather_lens", {"num_decodes": 4}, r"num_decodes must be in 0\.\.3"),
    ("kpool_compress", {"ape": of(np.float32, 9, 128)}, "ape: expected pools of 1 to 8"),
    ("kpool_compress", {"tail": first_items(128)}, "tail: rings must have no gaps"),
    ("expand_pools_and_append_tail", {"kpool": 0}, "kpool must be >= 1"),
    ("expand_pools_and_append_tail", {"kpool": 2**30}, "kpool: int32 cannot count"),
    ("local_seq_lens", {"world_size": 0}, r"world_size must be in 1\.\.1024, got 0"),
    ("local_seq_lens", {"rank": 2}, r"rank must be in 0\.\.1, below world_size, got 2"),
    ("localize_topk", {"interleave": 0}, r"interleave must be in 1\.\.1048576, got 0"),
    # Training.
    ("sparse_prefill_backward", {"d_v": 256}, "d_v must be 512"),
    ("sparse_prefill_backward", {"attn_sink": None}, "d_sink was given without attn_sink"),
    ("sparse_prefill_backward", {"accumulate": True, "dkv": None}, "accumulate: dkv, to which is added, must be given"),
    ("sparse_prefill_backward", {"accumulate": True}, "dkv: expected dtype float32"),
    ("sparse_prefill_backward", {"max_workspace_bytes": 0}, "max_workspace_bytes must be in 1"),
    *((operation, {"q_index": many_heads}, "q_index: expected 1 to 128 heads")
      for operation in ("indexer_loss", "dense_indexer_loss")),
    ("indexer_loss", {"accumulate": True, "dk_index": None}, "accumulate: dk_index, to which is added, must be given"),
    ("indexer_loss", {"gradients": False}, "gradients: dq_index, dk_index, dw and"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_served_is_refused(kind, rng, name, change, message) -> None:
    wrong = Wrong(kind, OPERATIONS[name](rng).with_outputs())
    given = wrong.call.arrays | wrong.call.settings
    new = {n: x(given[n]) if callable(x) else x for n, x in change.items()}
    wrong.refuse(new, (TypeError, ValueError), message)
