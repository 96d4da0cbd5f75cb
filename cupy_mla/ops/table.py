"""The table of operations: one row for each public operation that has a kernel.

The self-check (`cupy_mla.selfcheck`), the tests of all operations, the sanitizer cases (`benchmarks/small_cases.py`)
and the torch custom ops (`cupy_mla.integrations.torch_ops`) read it. No operation imports it.

To add an operation, add an `Operation` to `TABLE`. Its example calls are made by a function of a random generator and a
`Wanted`; the long ones stand in `ops/examples.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import Any, NamedTuple, get_args

import numpy as np

from ..bridges import as_dtype, to_numpy
from ..dtypes import BFLOAT16, E4M3, E5M2, FLOAT16, FLOAT32, INT32, INT64, UINT8
from ..layouts import CACHE_LAYOUTS, D_V, INDEXER_LAYOUTS, QUANTIZED_OF_V4, QUANTIZED_OF_V32, Layout
from ..typing import A, AnyArray
from . import (
    attention,
    backward,
    cache,
    candidates,
    compressed,
    context_parallel,
    dense,
    examples,
    gather,
    indexer,
    indices,
    logits,
    pools,
    quant,
    swa,
    topk,
    training,
)
from .candidates import BLOCK
from .examples import ALL, Call, Wanted

# By the values of settings.
DTYPES: dict[Any, np.dtype] = {**backward.DTYPES, logits.MXFP4: E5M2}


class Result(NamedTuple):
    """An array that an operation allocates and returns.

    If the operation has a parameter of the same name, the caller may give the array.

    Attributes:
        name: the result's name.
        shape: a function from the operation's arguments, by name, to the shape.
        dtype: the dtype, or its default.
        setting: a bool setting; the result is returned only if it is True. "": always.
        of: an optional array; if it is not given, None is returned in the place of the result. "": never.
        only_if: a bool setting, True by default; if it is False, None is returned in its place. "": never.
        dtype_setting: a setting by which the dtype is another one (`DTYPES`), if there is one.
        half: an array; if it is float16, so is the result. "": there is none.
    """

    name: str
    shape: Callable[..., tuple[int, ...]]
    dtype: np.dtype
    setting: str = ""
    of: str = ""
    only_if: str = ""
    dtype_setting: str = ""
    half: str = ""

    def is_there(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments does not return None in its place."""
        if self.only_if and not arguments.get(self.only_if, True):
            return False
        return not self.of or arguments.get(self.of) is not None

    def dtype_in(self, arguments: Mapping[str, Any]) -> np.dtype:
        """Its dtype in a call with these arguments."""
        if self.half and as_dtype(arguments[self.half].dtype) == FLOAT16:
            return FLOAT16
        return DTYPES.get(arguments.get(self.dtype_setting), self.dtype)


@dataclass(frozen=True)
class Operation:
    """One public operation.

    Attributes:
        function: the public function. A parameter annotated `A` or `AnyArray` (`cupy_mla.typing`) is an array, optional
            if its default is None; every other parameter is a setting.
        examples: yields example calls. Shapes and settings depend on the `Wanted` alone, values on the generator. The
            first call gives every array that the caller may give, except results.
        written: arrays that it writes in place, if they are given.
        results: arrays that it allocates and returns, in order.
        optional: arrays that may be None though the parameter has no default.
        layouts: the cache layouts that it is for; (): all, or none in particular.
        writer: if the function returns views of what it writes, the operation that writes, with the same parameters.
        exact: whether the GPU and NumPy give the same bits; else they agree up to rounding.
        of_largest: because the GPU rounds summands, they may also differ by this part of a result's largest value.
        training: whether only training calls it.
    """

    function: Callable[..., Any]
    examples: Callable[[np.random.Generator, Wanted], Iterator[Call]]
    written: tuple[str, ...] = ()
    results: tuple[Result, ...] = ()
    optional: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = ()
    writer: Callable[..., Any] | None = None
    exact: bool = True
    of_largest: float = 0.0
    training: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The function's parameters by name, annotations evaluated."""
        return dict(signature(self.function, eval_str=True).parameters)

    def is_array(self, parameter: str) -> bool:
        annotation = self.parameters[parameter].annotation
        return any(kind in (A, AnyArray) for kind in (annotation, *get_args(annotation)))

    def is_scale(self, parameter: str) -> bool:
        """Whether an array may be a number instead."""
        return self.is_array(parameter) and float in get_args(self.parameters[parameter].annotation)

    def is_optional(self, parameter: str) -> bool:
        """Whether an array may be None."""
        return parameter in self.optional or self.parameters[parameter].default is None

    def calls(self, rng: np.random.Generator, wanted: Wanted = ALL) -> Iterator[Call]:
        """Its example calls; none if it is for other layouts than the wanted ones."""
        if not self.layouts or set(self.layouts) & set(wanted.layouts):
            yield from self.examples(rng, wanted)

    def arguments(self, call: Call, put: Callable[[np.ndarray], Any]) -> dict[str, Any]:
        """The arguments of a call, with copies of its arrays, made by `put`."""
        return {
            name: _copied(value, put, name in call.unaligned) if isinstance(value, np.ndarray) else value
            for name, value in call.arguments.items()
        }

    def run(self, call: Call, put: Callable[[np.ndarray], Any]) -> list[np.ndarray]:
        """Make a call on copies of its arrays.

        Args:
            put: converts a NumPy array to the kind of array that the call gets.

        Returns:
            the arrays that it wrote in place and those that it returned.
        """
        arguments = self.arguments(call, put)
        returned = self.function(**arguments)
        results = returned if isinstance(returned, tuple) else (returned,)
        written = [arguments.get(name) for name in self.written]
        return [to_numpy(array) for array in (*written, *results) if array is not None]


def _copied(array: np.ndarray, put: Callable[[np.ndarray], Any], unaligned: bool) -> Any:
    """A copy, made by `put`. It keeps the block stride of a cache. `unaligned`: its rows start at odd items."""
    if unaligned:
        whole = np.zeros((*array.shape[:-1], array.shape[-1] + 8), array.dtype)
        whole[..., 1:-7] = array
        return put(whole)[..., 1:-7]
    items, stride = math.prod(array.shape[1:]), array.strides[0] // array.itemsize
    if stride <= items:
        return put(array.copy())
    whole = np.zeros((len(array), stride), array.dtype)
    whole[:, :items] = array.reshape(len(array), items)
    return put(whole)[:, :items].reshape(array.shape)


def _logits_shape(q8: Any, k8: Any, compact_width: int | None = None, **_: Any) -> tuple[int, int]:
    return q8.shape[0], k8.shape[0] if compact_width is None else compact_width


def _width_of(paged: Any) -> int:
    """Values of a row of a cache."""
    known = (*CACHE_LAYOUTS, *INDEXER_LAYOUTS)
    return next(layout.d_qk for layout in known if layout.last_axis == paged.shape[-1])


LOSS_RESULTS = (
    Result("loss", lambda **_: (), FLOAT32),
    Result(
        "dq_index", lambda q_index, **_: q_index.shape, BFLOAT16, only_if="gradients", dtype_setting="gradient_dtype"
    ),
    Result(
        "dk_index", lambda k_index, **_: k_index.shape, BFLOAT16, only_if="gradients", dtype_setting="gradient_dtype"
    ),
    Result("dw", lambda w, **_: w.shape, FLOAT32, only_if="gradients"),
)


# --- the table ------------------------------------------------------------------------------------------------

TABLE = (
    Operation(
        attention.sparse_prefill,
        examples.prefill_calls,
        results=(
            Result("out", lambda q, **_: (*q.shape[:2], D_V), BFLOAT16),
            Result("max_logits", lambda q, **_: q.shape[:2], FLOAT32),
            Result("lse", lambda q, **_: q.shape[:2], FLOAT32),
        ),
        exact=False,
    ),
    Operation(
        backward.sparse_prefill_backward,
        examples.backward_calls,
        results=(
            Result("dq", lambda q, **_: q.shape, BFLOAT16, dtype_setting="dq_dtype"),
            Result("dkv", lambda kv, **_: kv.shape, BFLOAT16, dtype_setting="dkv_dtype"),
            Result("d_sink", lambda q, **_: q.shape[1:2], FLOAT32, of="attn_sink"),
        ),
        exact=False,
        of_largest=0.01,
        training=True,
    ),
    Operation(
        training.attention_target,
        examples.target_calls,
        results=(Result("out", lambda q, indices, **_: (q.shape[0], indices.shape[2]), FLOAT32),),
        exact=False,
        training=True,
    ),
    Operation(
        training.dense_attention_target,
        examples.dense_target_calls,
        results=(Result("out", lambda q, kv, **_: (q.shape[0], kv.shape[0]), FLOAT32),),
        exact=False,
        training=True,
    ),
    Operation(
        training.dense_lse,
        examples.dense_lse_calls,
        results=(Result("out", lambda q, **_: q.shape[:2], FLOAT32),),
        exact=False,
        training=True,
    ),
    Operation(
        training.indexer_loss,
        examples.loss_calls,
        results=LOSS_RESULTS,
        exact=False,
        of_largest=0.01,
        training=True,
    ),
    Operation(
        training.dense_indexer_loss,
        examples.dense_loss_calls,
        results=LOSS_RESULTS,
        exact=False,
        of_largest=0.01,
        training=True,
    ),
    Operation(
        attention.sparse_decode,
        examples.decode_calls,
        results=(
            Result("out", lambda q, **_: (*q.shape[:3], D_V), BFLOAT16),
            Result("lse", lambda q, **_: (q.shape[0], q.shape[2], q.shape[1]), FLOAT32),
        ),
        exact=False,
    ),
    Operation(
        dense.dense_decode,
        examples.dense_calls,
        results=(
            Result("out", lambda q, **_: (*q.shape[:3], D_V), BFLOAT16, half="q"),
            Result("lse", lambda q, **_: (q.shape[0], q.shape[2], q.shape[1]), FLOAT32),
        ),
        exact=False,
    ),
    Operation(cache.concat_and_cache_mla, examples.mla_packing_calls, written=("kv_cache",), layouts=cache.LAYOUTS),
    Operation(
        cache.quantize_and_insert_k_cache, examples.v4_packing_calls, written=("k_cache",), layouts=QUANTIZED_OF_V4
    ),
    Operation(
        cache.unpack_rows,
        examples.unpacking_calls,
        results=(Result("out", lambda cache, slots, **_: (slots.shape[0], _width_of(cache)), FLOAT32),),
    ),
    Operation(indexer.indexer_k_quant_and_cache, examples.indexer_packing_calls, written=("kv_cache",)),
    Operation(indexer.cp_gather_indexer_k_quant_cache, examples.indexer_gather_calls, written=("dst_k", "dst_scale")),
    Operation(
        logits.quantize_indexer_q,
        examples.quantize_q_calls,
        results=(
            Result("q8", lambda q, **_: q.shape, E4M3, dtype_setting="scale_format"),
            Result("w", lambda weights, **_: weights.shape, FLOAT32),
        ),
    ),
    Operation(
        logits.quantize_indexer_q_mxfp4,
        examples.quantize_q_mxfp4_calls,
        results=(
            Result("q4", lambda q, **_: (*q.shape[:2], q.shape[2] // 2), UINT8),
            Result("scales", lambda q, **_: (*q.shape[:2], logits.SCALES), UINT8),
            Result("w", lambda weights, **_: weights.shape, FLOAT32),
        ),
    ),
    Operation(
        logits.widen_mxfp4,
        examples.widen_mxfp4_calls,
        results=(
            Result("values", lambda codes, **_: (*codes.shape[:-1], logits.D), E5M2),
            Result("factors", lambda codes, **_: codes.shape[:-1], FLOAT32),
        ),
    ),
    Operation(
        logits.indexer_logits,
        examples.logits_calls,
        results=(Result("out", _logits_shape, FLOAT32),),
    ),
    Operation(
        logits.paged_indexer_logits,
        examples.paged_logits_calls,
        results=(Result("out", lambda w, max_context_len, **_: (w.shape[0], max_context_len), FLOAT32),),
    ),
    Operation(
        logits.paged_indexer_schedule,
        examples.schedule_calls,
        results=(Result("out", lambda shares, **_: (shares, logits.SCHEDULE_WORDS), INT32),),
    ),
    Operation(
        topk.topk_indices,
        examples.topk_calls,
        results=(Result("out", lambda logits, k, **_: (logits.shape[0], k), INT32),),
    ),
    Operation(
        topk.select_rows,
        examples.select_calls,
        written=("blocks",),
        results=(Result("out", lambda w, k, **_: (w.shape[0], k), INT32),),
    ),
    Operation(
        topk.select_rows_paged,
        examples.paged_select_calls,
        written=("blocks",),
        results=(Result("out", lambda w, k, **_: (w.shape[0], k), INT32),),
    ),
    Operation(
        candidates.candidate_blocks,
        examples.candidate_blocks_calls,
        results=(Result("out", lambda logits, count, **_: (logits.shape[0], count), INT32),),
    ),
    Operation(
        candidates.candidate_logits,
        examples.candidate_logits_calls,
        results=(Result("out", lambda candidates, **_: (candidates.shape[0], BLOCK * candidates.shape[1]), FLOAT32),),
    ),
    Operation(
        candidates.select_candidate_rows,
        examples.candidate_select_calls,
        results=(Result("out", lambda candidates, k, **_: (candidates.shape[0], k), INT32),),
    ),
    Operation(
        gather.cp_gather_and_upconvert_fp8_kv_cache,
        examples.mla_gather_calls,
        written=("dst",),
        layouts=QUANTIZED_OF_V32,
    ),
    Operation(
        gather.dequantize_and_gather_k_cache,
        examples.v4_gather_calls,
        written=("out",),
        optional=("gather_lens",),
        layouts=QUANTIZED_OF_V4,
    ),
    Operation(gather.concat_mla_q, examples.concat_calls, written=("out",)),
    Operation(
        indices.convert_req_index_to_global_index,
        examples.convert_calls,
        results=(
            Result("out", lambda token_indices, **_: token_indices.shape, INT32),
            Result("valid_counts", lambda token_indices, **_: token_indices.shape[:1], INT32, "return_valid_counts"),
        ),
    ),
    Operation(
        indices.convert_to_slots_and_ends,
        examples.slots_and_ends_calls,
        results=(
            Result("out", lambda token_indices, **_: token_indices.shape, INT32),
            Result("ends", lambda token_indices, **_: token_indices.shape[:1], INT32),
        ),
    ),
    Operation(
        indices.slots_of,
        examples.slots_calls,
        results=(Result("out", lambda positions, **_: positions.shape, INT64),),
    ),
    Operation(
        pools.kpool_compress,
        examples.pool_calls,
        written=("tail",),
        results=(Result("out", lambda k, **_: k.shape, BFLOAT16),),
        exact=False,
    ),
    Operation(
        pools.expand_pools_and_append_tail,
        examples.expand_calls,
        results=(
            Result(
                "out",
                lambda pool_ids, kpool, **_: (pool_ids.shape[0], pool_ids.shape[1] * kpool + kpool - 1),
                INT32,
            ),
            Result("lens", lambda pool_ids, **_: pool_ids.shape[:1], INT32),
        ),
    ),
    Operation(
        quant.dynamic_per_batched_tensor_quant,
        examples.quant_calls,
        results=(Result("codes", lambda x: x.shape, E4M3), Result("scale", lambda x: (), FLOAT32)),
    ),
    Operation(
        swa.compute_swa_indices_and_lens,
        examples.swa_calls,
        results=(
            Result(
                "out",
                lambda token_to_req, window_size, max_image_tokens=0, **_: (
                    token_to_req.shape[0],
                    swa.window_width(window_size, max_image_tokens),
                ),
                INT32,
            ),
            Result("lens", lambda token_to_req, **_: token_to_req.shape, INT32),
        ),
        layouts=QUANTIZED_OF_V4,
    ),
    Operation(
        swa.compute_prefill_gather_lens,
        examples.gather_lens_calls,
        results=(Result("out", lambda seq_lens, num_decodes, **_: (seq_lens.shape[0] - num_decodes,), INT32),),
        layouts=QUANTIZED_OF_V4,
    ),
    Operation(
        swa.combine_topk_swa_indices,
        examples.combine_calls,
        results=(
            Result(
                "out",
                lambda topk_indices, topk, window_size, max_image_tokens=0, **_: (
                    topk_indices.shape[0],
                    swa.combined_width(topk, window_size, max_image_tokens),
                ),
                INT32,
            ),
            Result("lens", lambda topk_indices, **_: topk_indices.shape[:1], INT32),
        ),
        layouts=QUANTIZED_OF_V4,
    ),
    Operation(
        compressed.compute_global_topk_indices_and_lens,
        examples.global_topk_calls,
        results=(
            Result("out", lambda topk_indices, **_: topk_indices.shape, INT32),
            Result("lens", lambda topk_indices, **_: topk_indices.shape[:1], INT32),
        ),
        layouts=QUANTIZED_OF_V4,
    ),
    Operation(
        compressed.get_compressed_slot_mapping,
        examples.slot_mapping_calls,
        results=(Result("out", lambda num_tokens, **_: (num_tokens,), INT64),),
        layouts=QUANTIZED_OF_V4,
        writer=compressed.write_compressed_slot_mapping,
    ),
    Operation(
        compressed.build_c128a_topk_metadata,
        examples.c128a_calls,
        written=("decode_indices", "decode_lens", "prefill_indices"),
        layouts=QUANTIZED_OF_V4,
        writer=compressed.write_c128a_topk_metadata,
    ),
    Operation(
        context_parallel.local_seq_lens,
        examples.local_lens_calls,
        results=(Result("out", lambda seq_lens, **_: seq_lens.shape, INT32),),
    ),
    Operation(
        context_parallel.localize_topk,
        examples.localize_calls,
        results=(
            Result("out", lambda topk_indices, **_: topk_indices.shape, INT32),
            Result("topk_length", lambda topk_indices, **_: topk_indices.shape[:1], INT32),
        ),
    ),
    Operation(
        context_parallel.globalize_topk,
        examples.globalize_calls,
        results=(
            Result("values", lambda topk_indices, **_: topk_indices.shape, FLOAT32),
            Result("out", lambda topk_indices, **_: topk_indices.shape, INT32),
        ),
    ),
    Operation(
        context_parallel.merge_topk,
        examples.merge_topk_calls,
        results=(Result("out", lambda values, k, **_: (values.shape[1], k), INT32),),
    ),
    Operation(
        context_parallel.merge_attention,
        examples.merge_attention_calls,
        results=(
            Result("out", lambda outs, **_: outs.shape[1:], BFLOAT16),
            Result("lse", lambda lses, **_: lses.shape[1:], FLOAT32),
        ),
        exact=False,
    ),
)
OPERATIONS = {operation.name: operation for operation in TABLE}
