"""The operations as torch custom ops, `torch.ops.cupy_mla.*`, for torch.compile, torch.export and CUDA-graph trees.

Nobody has to call these: inside a function under torch.compile the public functions turn into them by themselves, and
so do those of `cupy_mla.flash_mla`. Import this module to find them in `torch.ops` before.

An operation that allocates its results is there twice: `torch.ops.cupy_mla.sparse_decode(q, ...)` returns new tensors,
`sparse_decode_out(out, q, ...)` writes those that the public function takes and returns the others. Operations that
write into caches and workspaces declare it and return nothing. CPU tensors go to the NumPy reference. No operation has
a backward, and asking for one is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..layouts import D_V
from ..ops import absorb, attention, cache, compressed, gather, indexer, indices, quant, swa

Make = Callable[..., torch.Tensor]  # arguments of an operation, by name, to one of its results, uninitialised


class TorchOperation:
    """One operation in terms of its custom ops, which it registers. A call takes what the public function takes.

    Args:
        function: the public function.
        arguments: the schema of what it takes, without results that the caller may give.
        results: what it allocates, by name.
        given: those of them that the caller may give.
        name: that of the custom op; default: the function's.
        settings: arguments of the function that every call has.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: str,
        results: dict[str, Make] | None = None,
        given: tuple[str, ...] = (),
        name: str | None = None,
        **settings: Any,
    ) -> None:
        self.name = name or function.__name__
        self._function = partial(function, **settings)
        self._results = results or {}
        self._given = given
        self._parameters = tuple(part.split()[-1].partition("=")[0] for part in arguments.split(","))
        self._allocate = self._register(self.name, arguments, ())
        if given:
            self._write = self._register(f"{self.name}_out", arguments, given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip((*self._parameters, *self._given)[: len(args)], args, strict=True))
        arguments.update(kwargs)
        places = {name: arguments.pop(name, None) for name in self._given}
        if all(place is None for place in places.values()):
            return self._allocate(**arguments)
        for name, place in places.items():
            if place is None:
                places[name] = self._results[name](**arguments)
        others = self._write(**arguments, **places)
        others = others if isinstance(others, tuple) else (others,)
        names = [name for name in self._results if name not in self._given]
        places.update(zip(names, others, strict=False))
        return _unpacked([places[name] for name in self._results])

    def _register(self, name: str, arguments: str, given: tuple[str, ...]) -> Callable[..., Any]:
        """The custom op that takes the given results and allocates the others."""
        makes = {result: make for result, make in self._results.items() if result not in given}
        arguments = "".join(f"Tensor(out{i}!) {result}, " for i, result in enumerate(given)) + arguments
        schema = f"({arguments}) -> ({', '.join(['Tensor'] * len(makes))})"
        written = [part.split()[-1] for part in arguments.split(",") if "!" in part]
        parameters = (*given, *self._parameters)

        def implementation(*args: Any) -> Any:
            returned = self._function(**dict(zip(parameters, args, strict=False)))
            returned = returned if isinstance(returned, tuple) else (returned,)
            return _unpacked([r for r, result in zip(returned, self._results, strict=False) if result in makes])

        def fake(*args: Any) -> Any:
            named = dict(zip(parameters, args, strict=False))
            return _unpacked([make(**named) for make in makes.values()])

        op = torch.library.custom_op(f"cupy_mla::{name}", implementation, mutates_args=written, schema=schema)
        op.register_fake(fake)
        if not written:
            op.register_autograd(partial(_no_backward, name))
        return getattr(torch.ops.cupy_mla, name)


def _unpacked(results: list[torch.Tensor]) -> Any:
    return tuple(results) if len(results) > 1 else results[0] if results else None


def _no_backward(name: str, *context: Any) -> Any:
    raise NotImplementedError(f"cupy_mla.{name} has no backward: call it under torch.no_grad(), or detach its inputs")


def _new(like: str, shape: Callable[..., Any], dtype: torch.dtype | None = None) -> Make:
    """Makes a result where the argument `like` lies, of its dtype unless told another."""
    return lambda **given: given[like].new_empty(shape(**given), dtype=dtype)


FLOAT32, INT32, INT64, E4M3 = torch.float32, torch.int32, torch.int64, torch.float8_e4m3fn

CONVERT = (
    "Tensor req_id, Tensor block_table, Tensor token_indices, int block_size, Tensor? prefill_request_ids=None, "
    "Tensor? prefill_workspace_starts=None"
)
SLOTS = {"out": _new("token_indices", lambda token_indices, **_: token_indices.shape)}
COUNTS = {"valid_counts": _new("token_indices", lambda token_indices, **_: token_indices.shape[:1])}

OPERATIONS = [
    TorchOperation(
        attention.sparse_prefill,
        "Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v=512, Tensor? attn_sink=None, "
        "Tensor? topk_length=None",
        {
            "out": _new("q", lambda q, **_: (*q.shape[:2], D_V)),
            "max_logits": _new("q", lambda q, **_: q.shape[:2], FLOAT32),
            "lse": _new("q", lambda q, **_: q.shape[:2], FLOAT32),
        },
        given=("out",),
    ),
    TorchOperation(
        attention.sparse_decode,
        "Tensor q, Tensor k_cache, Tensor indices, float? sm_scale=None, Tensor? attn_sink=None, "
        "Tensor? topk_length=None, Tensor? extra_k_cache=None, Tensor? extra_indices=None, "
        "Tensor? extra_topk_length=None, int? num_splits=None, bool batch_invariant=False",
        {
            "out": _new("q", lambda q, **_: (*q.shape[:3], D_V)),
            "lse": _new("q", lambda q, **_: (q.shape[0], q.shape[2], q.shape[1]), FLOAT32),
        },
        given=("out",),
    ),
    TorchOperation(
        cache.concat_and_cache_mla,
        "Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, str? layout=None, "
        'str scale_format="fp32"',
    ),
    TorchOperation(cache.quantize_and_insert_k_cache, "Tensor k, Tensor(a!) k_cache, Tensor slot_mapping"),
    TorchOperation(
        indexer.indexer_k_quant_and_cache,
        'Tensor k, Tensor(a!) kv_cache, Tensor slot_mapping, str scale_format="fp32"',
    ),
    TorchOperation(
        indexer.cp_gather_indexer_k_quant_cache,
        "Tensor kv_cache, Tensor(a!) dst_k, Tensor(b!) dst_scale, Tensor block_table, Tensor cu_seq_lens",
    ),
    TorchOperation(
        gather.cp_gather_and_upconvert_fp8_kv_cache,
        "Tensor src_cache, Tensor(a!) dst, Tensor block_table, Tensor seq_lens, Tensor workspace_starts",
    ),
    TorchOperation(
        gather.dequantize_and_gather_k_cache,
        "Tensor(a!) out, Tensor k_cache, Tensor seq_lens, Tensor? gather_lens, Tensor block_table, int block_size, "
        "int offset",
    ),
    TorchOperation(gather.concat_mla_q, "Tensor ql_nope, Tensor q_pe, Tensor(a!) out"),
    TorchOperation(indices.convert_req_index_to_global_index, CONVERT, SLOTS, given=("out",)),
    TorchOperation(
        indices.convert_req_index_to_global_index, CONVERT, SLOTS | COUNTS, given=("out",),
        name="convert_req_index_to_global_index_and_count", return_valid_counts=True,
    ),
    TorchOperation(
        quant.dynamic_per_batched_tensor_quant,
        "Tensor x",
        {"codes": _new("x", lambda x: x.shape, E4M3), "scale": _new("x", lambda x: (), FLOAT32)},
    ),
    TorchOperation(
        swa.compute_swa_indices_and_lens,
        "Tensor query_start_loc, Tensor seq_lens, Tensor token_to_req, Tensor is_valid_token, Tensor block_table, "
        "int block_size, int window_size",
        {
            "out": _new("seq_lens", lambda token_to_req, window_size, **_: (token_to_req.shape[0], window_size)),
            "lens": _new("seq_lens", lambda token_to_req, **_: token_to_req.shape),
        },
        given=("out", "lens"),
    ),
    TorchOperation(
        swa.compute_prefill_gather_lens,
        "Tensor seq_lens, Tensor query_start_loc, int num_decodes, int window_size",
        {"out": _new("seq_lens", lambda seq_lens, num_decodes, **_: (seq_lens.shape[0] - num_decodes,))},
        given=("out",),
    ),
    TorchOperation(
        swa.combine_topk_swa_indices,
        "Tensor topk_indices, Tensor query_start_loc, Tensor seq_lens, Tensor gather_lens, int window_size, "
        "int compress_ratio, int topk, int M, int N",
        {
            "out": _new(
                "seq_lens",
                lambda topk_indices, topk, window_size, **_: (
                    topk_indices.shape[0], swa.combined_width(topk, window_size),
                ),
            ),
            "lens": _new("seq_lens", lambda topk_indices, **_: topk_indices.shape[:1]),
        },
        given=("out", "lens"),
    ),
    TorchOperation(
        compressed.compute_global_topk_indices_and_lens,
        "Tensor topk_indices, Tensor token_to_req, Tensor block_table, int block_size, Tensor is_valid_token",
        {
            "out": _new("topk_indices", lambda topk_indices, **_: topk_indices.shape),
            "lens": _new("topk_indices", lambda topk_indices, **_: topk_indices.shape[:1]),
        },
        given=("out", "lens"),
    ),
    TorchOperation(
        compressed.write_compressed_slot_mapping,
        "int num_tokens, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, int block_size, "
        "int compress_ratio",
        {"out": _new("seq_lens", lambda num_tokens, **_: (num_tokens,), INT64)},
        given=("out",),
        name="get_compressed_slot_mapping",
    ),
    TorchOperation(
        compressed.write_c128a_topk_metadata,
        "Tensor positions, int compress_ratio, int num_decode_tokens, Tensor token_to_req, Tensor block_table, "
        "int block_size, Tensor slot_mapping, Tensor(a!) decode_indices, Tensor(b!) decode_lens, "
        "Tensor(c!) prefill_indices, int max_compressed_tokens",
        name="build_c128a_topk_metadata",
    ),
]  # fmt: skip
_NAMED = {operation.name: operation for operation in OPERATIONS}


def _convert_req_index_to_global_index(
    req_id: Any,
    block_table: Any,
    token_indices: Any,
    block_size: int,
    prefill_request_ids: Any = None,
    prefill_workspace_starts: Any = None,
    return_valid_counts: bool = False,
    *,
    out: Any = None,
) -> Any:
    operation = _NAMED["convert_req_index_to_global_index" + ("_and_count" if return_valid_counts else "")]
    return operation(
        req_id, block_table, token_indices, block_size, prefill_request_ids, prefill_workspace_starts, out=out
    )


def _with_kvcache(
    q: Any,
    k_cache: Any,
    indices: Any,
    attn_sink: Any,
    topk_length: Any,
    extra_k_cache: Any,
    extra_indices: Any,
    extra_topk_length: Any,
    out: Any,
    softmax_scale: float | None,
    is_fp8_kvcache: bool,
    batch_invariant: bool,
    shapes: Any,
    num_splits: int | None,
) -> Any:
    """As in `cupy_mla.flash_mla`. A schedule that is there is followed; none is made, each run of a graph plans."""
    if is_fp8_kvcache != (k_cache.dtype in (torch.uint8, E4M3)):
        raise ValueError(f"is_fp8_kvcache is {is_fp8_kvcache}, but k_cache has dtype {k_cache.dtype}")
    results = _NAMED["sparse_decode"](
        q, k_cache, indices, softmax_scale, attn_sink, topk_length, extra_k_cache, extra_indices, extra_topk_length,
        num_splits, batch_invariant, out=out,
    )  # fmt: skip
    return *results, shapes, num_splits


# What a planned operation becomes while a graph is traced, by the operation's name.
TRACED: dict[str, Callable[..., Any]] = {
    **_NAMED,
    "convert_req_index_to_global_index": _convert_req_index_to_global_index,
    "write_compressed_slot_mapping": _NAMED["get_compressed_slot_mapping"],
    "write_c128a_topk_metadata": _NAMED["build_c128a_topk_metadata"],
    "flash_mla_sparse_fwd": _NAMED["sparse_prefill"],
    "_with_kvcache": _with_kvcache,
    "split_kv_b_proj": absorb.split_by_head,
    "absorb_q": lambda q_nope, w_uk: absorb.product_by_head("torch", q_nope, w_uk.permute(1, 2, 0)),
    "v_up_proj": lambda x, w_uv: absorb.product_by_head("torch", x, w_uv.swapaxes(0, 1)),
}
