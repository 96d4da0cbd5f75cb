"""The backward of sparse attention, for training: `sparse_prefill_backward`.

Source: DeepSeek-V3.2 (DeepSeek Sparse Attention), whose sparse stage trains through it; the formulas are those of
FlashAttention's backward over the rows of an index list.
"""

from __future__ import annotations

import numpy as np

from .. import arrays
from ..arguments import PrefillBackward
from ..bridges import bind
from ..calls.operation import operation
from ..checks.options import require_bool, require_choice, require_integer, require_scale
from ..checks.validate import require_d_v, require_heads
from ..checks.values import check_lists
from ..cuda import backward as cuda
from ..dtypes import BFLOAT16, FLOAT32, INT32
from ..layouts import D_V
from ..reference import backward as reference
from ..typing import A, AnyArray, GradientDtype
from .attention import HEAD_DIMS

__all__ = ["sparse_prefill_backward"]

MAX_WORKSPACE_BYTES = 2 << 30
MOST_BYTES = int(np.iinfo(np.int64).max)
DTYPES = {"bfloat16": BFLOAT16, "float32": FLOAT32}


@operation
def sparse_prefill_backward(
    q: A,
    kv: AnyArray,
    indices: AnyArray,
    out: AnyArray,
    lse: AnyArray,
    dout: AnyArray,
    sm_scale: float,
    *,
    d_v: int = 512,
    attn_sink: AnyArray | None = None,
    topk_length: AnyArray | None = None,
    d_lse: AnyArray | None = None,
    dq_dtype: GradientDtype = "bfloat16",
    dkv_dtype: GradientDtype = "bfloat16",
    accumulate: bool = False,
    max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
    dq: A | None = None,
    dkv: A | None = None,
    d_sink: A | None = None,
) -> tuple[A, A, A | None]:
    """Gradients of `sparse_prefill`: of the query tokens, of the rows and of the attention sinks.

    For each query token i and head h, over the valid entries j of the token's list, which name the rows `r_j`::

        P[j]  = exp(sm_scale * dot(q, r_j) - lse)
        sigma = 1 / (1 + exp(sink - lse))                      1 without a sink
        delta = dot(out, dout)
        dS[j] = sm_scale * P[j] * (sigma * dot(dout, r_j[:512]) + d_lse - sigma * delta)

        dq     = sum_j dS[j] * r_j
        dkv[r] = sum over all (i, h, j) that name row r: dS[j] * q; its first 512 values also + sigma * P[j] * dout
        d_sink = - sum_i (1 - sigma) * delta

    - The same call gives the same bits, run after run: nothing is added by atomics. Contributions to a row are added in
      float32, ascending by token. So on a GPU the bits of dq and dkv do not depend on the order of a list, nor on
      `max_workspace_bytes`. On Hopper, calls with at most 32 heads work on groups of 2, 4 or 8 neighbouring tokens,
      counted from the first. There the last bits of a token's dq, and of what it adds to dkv, depend on the lists and
      values of its whole group.
    - Invalid entries are as in `sparse_prefill`: such a row is never read and its gradient gets nothing. A row listed
      twice counts twice. A row that no valid entry names has the gradient 0, whatever it holds.
    - A token without a valid row has dq 0 and adds nothing, whatever q, dout and d_lse hold.
    - With a sink of +inf dq, dkv and d_sink are 0 but for what d_lse adds; with -inf it is as without a sink.
    - NaN and infinity reach the gradients of the token and of the rows it lists, no others.

    On a GPU dS and `sigma * P` are rounded to bfloat16 before they are multiplied. So is what a token adds to a row, or
    tokens that are worked on together, summed over up to 64 heads. All sums are float32, and results are rounded once.
    In NumPy all is float32.

    Args:
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length: those of the forward.
        out: [s_q, h_q, 512] bfloat16, the forward's result, with the sink applied.
        lse: [s_q, h_q] float32, the forward's result: natural logarithm, over the rows alone.
        dout: [s_q, h_q, 512] bfloat16, the gradient that arrives for out.
        d_lse: [s_q, h_q] float32, the gradient that arrives for lse; None: 0.
        dq_dtype, dkv_dtype: of results that are allocated. Arrays that are given may have either dtype.
        accumulate: add to what `dkv` holds, which must be given and float32: for micro-batches, or parts of a batch.
            Parts that begin at multiples of 8 tokens give the bits of one call.
        max_workspace_bytes: limit of the memory beside the results, on a GPU. Query tokens are worked on in chunks
            that fit it, of at least one token, or up to 8 on Hopper. A token takes about
            `2 * topk * d_qk * ceil(h_q / 64)` bytes, and as many bytes again on GPUs with less than 163 KB of shared
            memory a CTA, where h_q is above 32. Whatever the limit, a call takes `4 * s_q * h_q` bytes with sinks, on
            Hopper with at most 32 heads `s_q + s_kv`, and with several chunks and bfloat16 dkv `4 * s_kv * d_qk`.
        dq: [s_q, h_q, d_qk] bfloat16 or float32, written in place when given.
        dkv: [s_kv, 1, d_qk] bfloat16 or float32, written in place when given.
        d_sink: [h_q] float32, written in place when given; goes with `attn_sink`.

    Returns:
        dq, dkv, and d_sink [h_q] float32 or, without `attn_sink`, None.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        RuntimeError: CUDA arrays, and CuPy, a driver or NVRTC is missing.

    Example:
        >>> kv = np.ones((3, 1, 576), bfloat16)
        >>> q, indices = np.zeros((1, 2, 576), bfloat16), np.array([[[0, 2, -1]]], np.int32)  # 1 query token, 2 heads
        >>> out, _, lse = cupy_mla.sparse_prefill(q, kv, indices, sm_scale=192**-0.5)
        >>> dout = np.ones((1, 2, 512), bfloat16)
        >>> dq, dkv, d_sink = cupy_mla.sparse_prefill_backward(q, kv, indices, out, lse, dout, sm_scale=192**-0.5)
        >>> dkv[:, 0, 0].tolist()  # half of each head's weight goes to row 0, half to row 2
        [1.0, 0.0, 1.0]
        >>> dq.shape, d_sink is None
        ((1, 2, 576), True)
    """
    place, (q_, kv_, idx, out_, lse_, dout_) = bind(q=q, kv=kv, indices=indices, out=out, lse=lse, dout=dout)
    sink, length, d_lse_, dq_, dkv_, d_sink_ = place.optional(
        attn_sink=attn_sink, topk_length=topk_length, d_lse=d_lse, dq=dq, dkv=dkv, d_sink=d_sink
    )
    require_d_v("d_v", d_v)
    scale = require_scale("sm_scale", sm_scale)
    for name, dtype in (("dq_dtype", dq_dtype), ("dkv_dtype", dkv_dtype)):
        require_choice(name, dtype, DTYPES)
    accumulate = require_bool("accumulate", accumulate)
    max_workspace_bytes = require_integer("max_workspace_bytes", max_workspace_bytes, 1, MOST_BYTES)
    s_q, h_q, d_qk = q_.require(BFLOAT16, "s_q", "h_q", HEAD_DIMS).shape
    require_heads(h_q)
    s_kv = kv_.require(BFLOAT16, "s_kv", 1, d_qk).shape[0]
    require_lists(idx, s_q, s_kv, length)
    out_.require(BFLOAT16, s_q, h_q, D_V)
    lse_.require(FLOAT32, s_q, h_q)
    dout_.require(BFLOAT16, s_q, h_q, D_V)
    if d_lse_ is not None:
        d_lse_.require(FLOAT32, s_q, h_q)
    if sink is not None:
        sink.require(FLOAT32, h_q)
    elif d_sink_ is not None:
        raise ValueError("d_sink was given without attn_sink")
    if accumulate:
        require_sums("dkv", dkv_, s_kv, 1, d_qk)
    kv_.without_axis(1)
    dq_ = place.output("dq", dq_, (s_q, h_q, d_qk), dtype_of(dq_, dq_dtype))
    dkv_ = place.output("dkv", dkv_, (s_kv, 1, d_qk), dtype_of(dkv_, dkv_dtype))
    if sink is not None:
        d_sink_ = place.output("d_sink", d_sink_, (h_q,), FLOAT32)
    arguments = PrefillBackward(
        q_, kv_, idx, out_, lse_, dout_, scale, sink, length, d_lse_, accumulate, max_workspace_bytes, dq_, dkv_,
        d_sink_,
    )  # fmt: skip
    place.call(cuda.sparse_prefill_backward, reference.sparse_prefill_backward, arguments)
    return dq_.obj, dkv_.obj, None if d_sink_ is None else d_sink_.obj


def dtype_of(given: arrays.Array | None, name: GradientDtype) -> np.dtype:
    """The dtype of a result: that of the given array if a gradient may have it, else `name`."""
    return given.dtype if given is not None and given.dtype in DTYPES.values() else DTYPES[name]


def require_lists(indices: arrays.Array, tokens: int, rows: int, length: arrays.Array | None) -> int:
    """Check index lists, and drop their axis of KV heads; returns topk."""
    topk = indices.require(INT32, tokens, 1, "topk").without_axis(1).shape[1]
    if length is not None:
        length.require(INT32, tokens)
    if arrays.CHECK_VALUES:
        check_lists(indices, rows, length)
    return topk


def require_sums(name: str, given: arrays.Array | None, *shape: int) -> None:
    """Check the array to which `accumulate` adds."""
    if given is None:
        raise ValueError(f"accumulate: {name}, to which is added, must be given")
    given.require(FLOAT32, *shape)
