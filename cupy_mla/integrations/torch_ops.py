"""The operations as torch custom ops, `torch.ops.cupy_mla.*`, for torch.compile, torch.export and CUDA-graph trees.

Under torch.compile the public functions call these custom ops by themselves, and so do those of `cupy_mla.flash_mla`.
Import this module only to use `torch.ops.cupy_mla` directly.

An operation that allocates its results has two custom ops: `torch.ops.cupy_mla.sparse_decode(q, ...)` returns new
tensors; `sparse_decode_out(out, q, ...)` writes the results that the public function accepts as arguments, and returns
the others. Operations that write into caches and workspaces declare what they mutate and return nothing. CPU tensors
are computed by the NumPy reference.

Three operations have a backward. That of `sparse_prefill` is the custom op `sparse_prefill_backward`; that of
`indexer_loss` and `dense_indexer_loss` scales the gradients which their forward has returned. The backward of any other
operation is an error. A custom op must return a tensor for each result: where a call has no such result,
as `d_sink` without sinks, the custom op returns an empty tensor, and the public function None.

Schemas and results follow from the table of operations (`cupy_mla.ops.table`) and the functions' signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import Parameter, formatannotation
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import torch

from ..checks.options import require_bool
from ..checks.validate import require_d_v
from ..flash_mla import layout_of, require_sparse
from ..ops import absorb
from ..ops.table import OPERATIONS, TABLE, Operation

# A schema's number of results is fixed, so a setting that adds a result has custom ops of its own, with this suffix.
SUFFIXES = {"return_valid_counts": "_and_count"}


class TorchOperation:
    """Registers the custom ops of one operation. Calling it calls them with the public function's arguments.

    Args:
        operation: its row of the table.
        setting: the bool setting that is true in every call and adds a result; "": all such settings are false.
    """

    def __init__(self, operation: Operation, setting: str = "") -> None:
        self.name: str = operation.name + SUFFIXES.get(setting, "")
        self._operation = operation
        self._function = partial(operation.writer or operation.function, **{setting: True} if setting else {})
        self._results = {result.name: result for result in operation.results if result.setting in ("", setting)}
        settings = {result.setting for result in operation.results}
        self._names = tuple(name for name in operation.parameters if name not in settings)
        self._given = tuple(name for name in self._results if name in operation.parameters)
        # Arrays that may be left out and are written come first, without a default. torch 2.11 drops arguments at a
        # call's end that are their defaults, and then looks for each written one by its place.
        self._left_out = {n: None for n in self._names if n in operation.written and operation.is_optional(n)}
        others = (name for name in self._names if name not in (*self._given, *self._left_out))
        self._parameters = (*self._left_out, *others)
        self._scales = {name for name in self._names if operation.is_scale(name)}
        self._like = next(n for n in self._parameters if operation.is_array(n) and n not in self._left_out)
        self._allocate = self._register(self.name, ())
        if self._given:
            self._write = self._register(f"{self.name}_out", self._given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(self._names):
            raise TypeError(f"{self.name}() takes {len(self._names)} positional arguments, got {len(args)}")
        arguments = {**self._left_out, **dict(zip(self._names[: len(args)], args, strict=True)), **kwargs}
        for name in self._scales:  # a number becomes an array of one
            if isinstance(arguments.get(name), (float, int)):
                like = arguments[self._like]
                arguments[name] = like.new_full((1,), arguments[name], dtype=torch.float32)
        places = {name: arguments.pop(name, None) for name in self._given}
        if all(place is None for place in places.values()):
            returned = self._allocate(**arguments)
            returned = returned if isinstance(returned, tuple) else (returned,)
            return _unpacked(
                [
                    tensor if result.is_there(arguments) else None
                    for tensor, result in zip(returned, self._results.values(), strict=False)
                ]
            )
        for name, place in places.items():
            if place is None:
                places[name] = self._make(name, arguments)
        others = self._write(**arguments, **places)
        others = others if isinstance(others, tuple) else (others,)
        names = [name for name in self._results if name not in self._given]
        places.update(zip(names, others, strict=False))
        return _unpacked(
            [places[name] if result.is_there(arguments) else None for name, result in self._results.items()]
        )

    def _make(self, result: str, arguments: dict[str, Any]) -> torch.Tensor:
        """A new, uninitialised result on the arguments' device; an empty one where this call has no such result."""
        of = self._results[result]
        shape = of.shape(**arguments) if of.is_there(arguments) else (0,)
        return arguments[self._like].new_empty(shape, dtype=getattr(torch, of.dtype_in(arguments).name))

    def _register(self, name: str, given: tuple[str, ...]) -> Callable[..., Any]:
        """Register the custom op that writes the results named in `given` and allocates the others."""
        parameters = (*given, *self._parameters)
        made = [result for result in self._results if result not in given]

        def implementation(*args: Any) -> Any:
            named = dict(zip(parameters, args, strict=False))
            left_out = [name for name in given if not self._results[name].is_there(named)]
            returned = self._function(**{name: value for name, value in named.items() if name not in left_out})
            returned = returned if isinstance(returned, tuple) else (returned,)
            results = dict(zip(self._results, returned, strict=False))
            return _unpacked([self._make(r, named) if results[r] is None else results[r] for r in made])

        def fake(*args: Any) -> Any:
            named = dict(zip(parameters, args, strict=False))
            return _unpacked([self._make(result, named) for result in made])

        written = [n for n in parameters if n in given or n in self._operation.written]
        schema = self._schema(given, len(made))
        op = torch.library.custom_op(f"cupy_mla::{name}", implementation, mutates_args=written, schema=schema)
        op.register_fake(fake)
        if name in BACKWARDS:
            backward, save = BACKWARDS[name]
            op.register_autograd(backward, setup_context=save)
        elif not written:
            op.register_autograd(partial(_no_backward, name))
        return getattr(torch.ops.cupy_mla, name)

    def _schema(self, given: tuple[str, ...], made: int) -> str:
        """Schema of the custom op that writes the results named in `given` and returns `made` new ones."""
        arguments = [f"Tensor(out{i}!) {result}" for i, result in enumerate(given)]
        letters = iter("abcdefgh")
        for name in self._parameters:
            if name in self._operation.written:
                arguments.append(f"Tensor({next(letters)}!){'?' if name in self._left_out else ''} {name}")
            else:
                default = _default(self._operation.parameters[name])
                arguments.append(f"{_kind(self._operation, name)} {name}{default}")
        return f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * made)})"


def _kind(operation: Operation, name: str) -> str:
    """The schema's type of a parameter that is not written."""
    if operation.is_array(name):
        return "Tensor?" if operation.is_optional(name) else "Tensor"
    annotation = operation.parameters[name].annotation
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType]
    kind = kinds[0]
    if get_origin(kind) is Literal or isinstance(kind, str):
        kind = str
    return formatannotation(kind) + ("?" if NoneType in get_args(annotation) else "")


def _default(parameter: Parameter) -> str:
    if parameter.default is Parameter.empty:
        return ""
    return f'="{parameter.default}"' if isinstance(parameter.default, str) else f"={parameter.default}"


def _unpacked(results: list[torch.Tensor]) -> Any:
    return tuple(results) if len(results) > 1 else results[0] if results else None


def _no_backward(name: str, *context: Any) -> Any:
    raise NotImplementedError(f"cupy_mla.{name} has no backward: call it under torch.no_grad(), or detach its inputs")


def _save_prefill(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep what the backward of `sparse_prefill` needs."""
    q, kv, indices, ctx.sm_scale, _, attn_sink, topk_length, _, _ = inputs
    if kv.dtype != torch.bfloat16:
        _no_backward("sparse_prefill over e4m3 rows")
    out, max_logits, lse = output
    ctx.save_for_backward(q, kv, indices, attn_sink, topk_length, out, lse)
    ctx.mark_non_differentiable(max_logits)
    ctx.set_materialize_grads(False)


def _sparse_prefill_backward(ctx: Any, dout: Any, _: Any, d_lse: Any) -> tuple[Any, ...]:
    """Gradients of the arguments of `sparse_prefill`, None for arguments without one. An incoming gradient that is None
    counts as zero."""
    q, kv, indices, attn_sink, topk_length, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()  # that of a sum is an expanded number
    d_lse = None if d_lse is None else d_lse.contiguous()
    dq, dkv, d_sink = _NAMED["sparse_prefill_backward"](
        q, kv, indices, out, lse, dout, ctx.sm_scale, attn_sink=attn_sink, topk_length=topk_length, d_lse=d_lse
    )
    return dq, dkv, None, None, None, d_sink, None, None, None


_GRADIENTS = [*OPERATIONS["indexer_loss"].parameters].index("gradients")  # and of `dense_indexer_loss`


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep the gradients that `indexer_loss` or `dense_indexer_loss` has returned beside the loss."""
    ctx.gradients, ctx.others = inputs[_GRADIENTS], len(inputs) - 3
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _loss_backward(ctx: Any, d_loss: Any, *_: Any) -> tuple[Any, ...]:
    """Gradients of q_index, k_index and w."""
    if not ctx.gradients:
        raise RuntimeError("gradients=False: the indexer's loss was asked for without its gradients")
    dq, dk, dw = (d_loss * gradient for gradient in ctx.saved_tensors)
    return dq.bfloat16(), dk.bfloat16(), dw, *(None,) * ctx.others


# Custom op: its backward, and the function that saves what this backward needs.
BACKWARDS = {
    "sparse_prefill": (_sparse_prefill_backward, _save_prefill),
    "indexer_loss": (_loss_backward, _save_loss),
    "dense_indexer_loss": (_loss_backward, _save_loss),
}


def _traced(operation: Operation) -> Callable[..., Any]:
    """The function that torch.compile traces in place of the operation. It calls the operation's custom ops."""
    plain = TorchOperation(operation)
    settings = {result.setting for result in operation.results if result.setting}
    if not settings:
        return plain
    (setting,) = settings
    more, names = TorchOperation(operation, setting), tuple(operation.parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names[: len(args)], args, strict=True))
        arguments.update(kwargs)
        return (more if arguments.pop(setting, False) else plain)(**arguments)

    return call


_NAMED = {operation.name: _traced(operation) for operation in TABLE}


def _with_kvcache(q: Any, k_cache: Any, indices: Any, plan: Any, settings: tuple[Any, ...], **others: Any) -> Any:
    """As in `cupy_mla.flash_mla`, but no plan is made: each run of the graph chooses its splits. `num_splits` is
    followed."""
    head_dim_v, softmax_scale, causal, is_fp8_kvcache, batch_invariant, _, num_splits, kv_format = settings
    require_sparse(head_dim_v, causal)
    _require_kind(k_cache, is_fp8_kvcache)
    return _NAMED["sparse_decode"](
        q, k_cache, indices, int(q.shape[-1]) ** -0.5 if softmax_scale is None else softmax_scale,
        num_splits=num_splits, batch_invariant=batch_invariant, layout=layout_of(kv_format), **others,
    )  # fmt: skip


def _dense_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    plan: Any,
    settings: tuple[Any, ...],
    **others: Any,
) -> Any:
    """As in `cupy_mla.flash_mla`, but no plan is made. `num_splits` is followed."""
    head_dim_v, softmax_scale, causal, is_fp8_kvcache, batch_invariant, _, num_splits, kv_format = settings
    require_d_v("head_dim_v", head_dim_v)
    _require_kind(k_cache, is_fp8_kvcache)
    return _NAMED["dense_decode"](
        q, k_cache, block_table, cache_seqlens, int(q.shape[-1]) ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal, num_splits=num_splits, batch_invariant=batch_invariant, layout=layout_of(kv_format), **others,
    )  # fmt: skip


def _require_kind(k_cache: Any, is_fp8_kvcache: bool | None) -> None:
    if is_fp8_kvcache is not None:
        require_bool("is_fp8_kvcache", is_fp8_kvcache)
    if is_fp8_kvcache is not None and is_fp8_kvcache != (k_cache.dtype in (torch.uint8, torch.float8_e4m3fn)):
        raise ValueError(f"is_fp8_kvcache is {is_fp8_kvcache}, but k_cache has dtype {k_cache.dtype}")


def _planned_decode(
    q: Any,
    k_cache: Any,
    indices: Any,
    sm_scale: float,
    num_splits: int | None,
    plan: Any,
    *,
    padded: bool = False,
    **others: Any,
) -> Any:
    """Without the plan: a graph makes none."""
    return _NAMED["sparse_decode"](q, k_cache, indices, sm_scale, num_splits=num_splits, **others)


def _planned_dense_decode(
    q: Any, k_cache: Any, block_table: Any, seq_lens: Any, sm_scale: float, plan: Any, **others: Any
) -> Any:
    """Without the plan: a graph makes none."""
    return _NAMED["dense_decode"](q, k_cache, block_table, seq_lens, sm_scale, **others)


def _split_kv_b_proj(weight: Any, num_heads: int, d_nope: int, *, scales: Any = None) -> Any:
    if scales is not None:
        rows, columns = weight.shape
        of_values = scales.repeat_interleave(absorb.SCALE_BLOCK, 0).repeat_interleave(absorb.SCALE_BLOCK, 1)
        weight = (weight.view(torch.float8_e4m3fn).float() * of_values[:rows, :columns]).bfloat16()
    return absorb.split_by_head(weight, num_heads, d_nope)


# What an operation becomes while a graph is traced, by the name of the function that torch.compile meets.
TRACED: dict[str, Callable[..., Any]] = {
    **_NAMED,
    **{operation.writer.__name__: _NAMED[operation.name] for operation in TABLE if operation.writer},
    "_with_kvcache": _with_kvcache,
    "_dense_with_kvcache": _dense_with_kvcache,
    "planned_decode": _planned_decode,
    "planned_dense_decode": _planned_dense_decode,
    "split_kv_b_proj": _split_kv_b_proj,
    "absorb_q": lambda q_nope, w_uk: absorb.product_by_head("torch", q_nope, w_uk.permute(1, 2, 0)),
    "v_up_proj": lambda x, w_uv: absorb.product_by_head("torch", x, w_uv.swapaxes(0, 1)),
}
