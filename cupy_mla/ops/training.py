"""Training of the lightning indexer: `attention_target` and `indexer_loss` over index lists, and the same over ranges
of rows, for its warm-up.

Source: DeepSeek-V3.2 (DeepSeek Sparse Attention, section 2.1): the indexer's scores, as a distribution over the keys,
are trained to be the distribution of the attention's weights, summed over the heads.
"""

from __future__ import annotations

from typing import Any

from .. import arrays
from ..arguments import IndexerLoss, Target
from ..bridges import Place, bind
from ..calls.operation import differentiable, operation
from ..checks.options import require_bool, require_choice, require_integer, require_scale
from ..checks.validate import require_heads
from ..checks.values import check_ranges
from ..cuda import training as cuda
from ..dtypes import BFLOAT16, BOOL, FLOAT32, INT32
from ..reference import training as reference
from ..typing import A, AnyArray, GradientDtype, ScaleFormat
from .attention import HEAD_DIMS
from .backward import DTYPES, MAX_WORKSPACE_BYTES, MOST_BYTES, dtype_of, require_lists, require_sums
from .cache import SCALE_FORMATS
from .logits import D

__all__ = ["attention_target", "dense_attention_target", "dense_indexer_loss", "dense_lse", "indexer_loss"]


@operation
def attention_target(
    q: A,
    kv: AnyArray,
    indices: AnyArray,
    lse: AnyArray,
    sm_scale: float,
    *,
    attn_sink: AnyArray | None = None,
    topk_length: AnyArray | None = None,
    out: A | None = None,
) -> A:
    """The attention weights of each query token, summed over its heads: those of `sparse_prefill`.

    For each query token i, over the valid entries j of its list, which name the rows `r_j`::

        out[j] = sum_h sigma[h] * exp(sm_scale * dot(q[h], r_j) - lse[h])
        sigma[h] = 1 / (1 + exp(attn_sink[h] - lse[h]))        1 without a sink

    `indexer_loss` takes it as `target`, and divides it by its sum. If the heads are distributed over several GPUs, sum
    `out` over these before (all-reduce). The same call gives the same bits.

    Args:
        q, kv, indices, sm_scale, topk_length: those of the attention.
        lse: [s_q, h_q] float32, the attention's: natural logarithm, over the rows alone.
        attn_sink: [h_q] float32; weights are multiplied by `sigma`. Usually it is not given, so that weights of a head
            sum up to 1.
        out: [s_q, topk] float32, written in place when given.

    Returns:
        [s_q, topk] float32 in the order of the lists, 0 at invalid entries.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        RuntimeError: CUDA arrays, and CuPy, a driver or NVRTC is missing.

    Example:
        >>> kv = np.ones((3, 1, 576), bfloat16)
        >>> q, indices = np.zeros((1, 2, 576), bfloat16), np.array([[[0, 2, -1]]], np.int32)  # 1 query token, 2 heads
        >>> _, _, lse = cupy_mla.sparse_prefill(q, kv, indices, sm_scale=192**-0.5)
        >>> cupy_mla.attention_target(q, kv, indices, lse, sm_scale=192**-0.5).tolist()
        [[1.0, 1.0, 0.0]]
    """
    place, (q_, kv_, idx, lse_) = bind(q=q, kv=kv, indices=indices, lse=lse)
    sink, length, out_ = place.optional(attn_sink=attn_sink, topk_length=topk_length, out=out)
    arguments = Target(q_, kv_, sm_scale, lse_, sink, idx, length, None, None, out_)
    tokens, _, rows = _require_attention(arguments)
    topk = require_lists(idx, tokens, rows, length)
    arguments = _squeezed(arguments, place.output("out", out_, (tokens, topk), FLOAT32))
    place.call(cuda.attention_target, reference.attention_target, arguments)
    return arguments.out.obj


@operation
def dense_attention_target(
    q: A,
    kv: AnyArray,
    lse: AnyArray,
    sm_scale: float,
    starts: AnyArray,
    ends: AnyArray,
    *,
    attn_sink: AnyArray | None = None,
    out: A | None = None,
) -> A:
    """`attention_target` over ranges of rows, for dense attention.

    For each query token i, over the rows `starts[i] <= j < ends[i]`::

        out[j] = sum_h sigma[h] * exp(sm_scale * dot(q[h], kv[j]) - lse[h])
        sigma[h] = 1 / (1 + exp(attn_sink[h] - lse[h]))        1 without a sink

    The result has a number for every token and row. For a long sequence, compute it and `dense_indexer_loss` for some
    tokens at a time.

    Args:
        q: [M, h_q, d_qk] bfloat16, query tokens; d_qk is 576 or 512.
        kv: [N, 1, d_qk] bfloat16, rows.
        lse: [M, h_q] float32, the dense attention's, for instance from `dense_lse`.
        sm_scale: factor on the dot products.
        starts, ends: [M] int32 range of rows of each token: the first row of its sequence, and its own row + 1.
        attn_sink: as for `attention_target`.
        out: [M, N] float32, written in place when given.

    Returns:
        [M, N] float32, 0 outside of the ranges.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        RuntimeError: CUDA arrays, and CuPy, a driver or NVRTC is missing.

    Example:
        >>> q, kv = np.zeros((3, 2, 576), bfloat16), np.ones((3, 1, 576), bfloat16)
        >>> starts, ends = np.array([0, 0, 1], np.int32), np.array([1, 2, 3], np.int32)  # row 1 begins a sequence
        >>> lse = cupy_mla.dense_lse(q, kv, 192**-0.5, starts, ends)
        >>> cupy_mla.dense_attention_target(q, kv, lse, 192**-0.5, starts, ends).round(3).tolist()
        [[2.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]
    """
    place, (q_, kv_, lse_, first, end) = bind(q=q, kv=kv, lse=lse, starts=starts, ends=ends)
    sink, out_ = place.optional(attn_sink=attn_sink, out=out)
    arguments = Target(q_, kv_, sm_scale, lse_, sink, None, None, first, end, out_)
    tokens, _, rows = _require_attention(arguments)
    _require_ranges(first, end, tokens, rows)
    arguments = _squeezed(arguments, place.output("out", out_, (tokens, rows), FLOAT32))
    place.call(cuda.attention_target, reference.attention_target, arguments)
    return arguments.out.obj


@operation
def dense_lse(q: A, kv: AnyArray, sm_scale: float, starts: AnyArray, ends: AnyArray, *, out: A | None = None) -> A:
    """lse of dense attention over ranges of rows, for `dense_attention_target` if the attention's kernel does not
    return it.

    Args:
        q, kv, sm_scale, starts, ends: as for `dense_attention_target`.
        out: [M, h_q] float32, written in place when given.

    Returns:
        [M, h_q] float32 natural logarithm of the sum of exponentials; +inf for an empty range.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        RuntimeError: CUDA arrays, and CuPy, a driver or NVRTC is missing.

    Example:
        >>> q, kv = np.zeros((2, 1, 576), bfloat16), np.ones((3, 1, 576), bfloat16)
        >>> starts, ends = np.array([0, 2], np.int32), np.array([3, 2], np.int32)
        >>> np.exp(cupy_mla.dense_lse(q, kv, 192**-0.5, starts, ends)).round(3).tolist()  # of three rows, and none
        [[3.0], [inf]]
    """
    place, (q_, kv_, first, end) = bind(q=q, kv=kv, starts=starts, ends=ends)
    (out_,) = place.optional(out=out)
    arguments = Target(q_, kv_, sm_scale, None, None, None, None, first, end, out_)
    tokens, heads, rows = _require_attention(arguments)
    _require_ranges(first, end, tokens, rows)
    arguments = _squeezed(arguments, place.output("out", out_, (tokens, heads), FLOAT32))
    place.call(cuda.dense_lse, reference.dense_lse, arguments)
    return arguments.out.obj


@operation
@differentiable("dq_index", "dk_index", "dw")
def indexer_loss(
    q_index: A,
    k_index: AnyArray,
    w: AnyArray,
    target: AnyArray,
    indices: AnyArray,
    *,
    topk_length: AnyArray | None = None,
    loss_coeff: float = 1.0,
    counted: AnyArray | None = None,
    per_token: bool = False,
    relu: bool = True,
    quantized: bool = False,
    scale_format: ScaleFormat = "fp32",
    gradients: bool = True,
    gradient_dtype: GradientDtype = "bfloat16",
    accumulate: bool = False,
    max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
    dq_index: A | None = None,
    dk_index: A | None = None,
    dw: A | None = None,
) -> tuple[A, A | None, A | None, A | None]:
    """The divergence of the indexer's scores from the attention's weights, and its gradients.

    For each query token i, over the valid entries j of its list, which name the keys `k_j`::

        z[h, j] = dot(q_index[h], k_j)
        I[j]    = sum_h w[h] * max(z[h, j], 0)                  z itself without `relu`
        p       = target / max(sum_j target, 1e-10);  pred = softmax of I
        KL      = sum_j p[j] * (log(max(p[j], 1e-10)) - log(pred[j]))
        loss    = loss_coeff * sum_i KL / N                     N: tokens that count, 1 at least; 1 with `per_token`

        dI[j]    = loss_coeff / N * (pred[j] - p[j]);  dz[h, j] = dI[j] * w[h] where z[h, j] > 0, else 0
        dw[h]    = sum_j dI[j] * max(z[h, j], 0)
        dq_index = sum_j dz[h, j] * k_j
        dk_index = sum over all (i, h, j) that name the key: dz[h, j] * q_index[h]

    - Gradients are returned with the loss; the backward only multiplies them by the gradient of the loss, a number. A
      torch loss has such a backward if q_index, k_index or w requires a gradient.
    - A token counts if it has a valid entry, and if `counted`, where given, says so. Other tokens have the gradient 0
      and add nothing, whatever they hold. A key that no valid entry names has the gradient 0 and adds nothing.
    - `quantized`: in every formula q_index and k_index are e4m3 numbers times float32 scales, one for each head of a
      token and for each key. So scores are those of `quantize_indexer_q`, `indexer_k_quant_and_cache` and
      `indexer_logits`. On a GPU numbers and scales are multiplied separately, so there is no other rounding. Gradients
      go straight through to q_index and k_index, as if rounding were the identity.
    - A key that a list names twice has two entries in both distributions. `target` and lists have no gradient.
    - The same call gives the same bits, run after run: nothing is added by atomics. On a GPU the bits do not depend on
      `max_workspace_bytes`, nor on the order of a list (and its target) that names no key twice.
    - NaN and infinity reach the loss, and the gradients of the token and of the keys it lists, no others.

    On a GPU dI, `w * q_index` and what a token adds to a key, summed over all heads, are rounded to bfloat16; all sums
    are float32, and results are rounded once. In NumPy all is float32.

    Args:
        q_index: [T, H, 128] bfloat16, the indexer's queries, 1 to 128 heads.
        k_index: [N, 128] bfloat16, its keys.
        w: [T, H] float32, the heads' weights with all factors, as `indexer_logits` takes them.
        target: [T, topk] float32, from `attention_target`, in the order of the lists.
        indices: [T, 1, topk] int32, the lists of the attention.
        topk_length: [T] int32 lengths of lists.
        loss_coeff: a factor.
        counted: [T] bool; tokens with False do not count, for instance padding.
        per_token: do not divide by N: the loss is a sum over the tokens.
        relu: the indexer's heads have a relu.
        quantized: compute scores as inference does, with q_index and k_index rounded to e4m3.
        scale_format: of their scales, "fp32" or "ue8m0", as for `quantize_indexer_q` and `indexer_k_quant_and_cache`;
            used only with `quantized`.
        gradients: if False, the last three results are None.
        gradient_dtype: of dq_index and dk_index if they are allocated. Arrays that are given may have either dtype.
        accumulate: add to what `dk_index` holds, which must be given and float32: for parts of a batch.
        max_workspace_bytes: limit of the memory beside the results, on a GPU. Query tokens are worked on in chunks
            that fit it, of at least one token. A token takes about `topk * (276 + H / 8) + N / 2` bytes; with
            `quantized` besides `260 * H + 4 * topk`, and a key 260. Whatever the limit, several chunks with bfloat16
            dk_index take `512 * N` bytes.
        dq_index: [T, H, 128] bfloat16 or float32, written in place when given.
        dk_index: [N, 128] bfloat16 or float32, written in place when given.
        dw: [T, H] float32, written in place when given.

    Returns:
        the loss, float32 of shape [], and the gradients dq_index, dk_index and dw [T, H] float32.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        RuntimeError: CUDA arrays, and CuPy, a driver or NVRTC is missing.

    Example:
        >>> q_index, k_index = np.ones((1, 2, 128), bfloat16), np.ones((3, 128), bfloat16)
        >>> w, target = np.full((1, 2), 0.01, np.float32), np.array([[3, 1, 9]], np.float32)
        >>> indices = np.array([[[0, 2, -1]]], np.int32)
        >>> loss, dq_index, dk_index, dw = cupy_mla.indexer_loss(q_index, k_index, w, target, indices)
        >>> f"{float(loss):.3f}"  # of 3/4 and 1/4 from 1/2 and 1/2
        '0.131'
        >>> dk_index[:, 0].tolist()  # keys of row 0 shall score more
        [-0.0050048828125, 0.0, 0.0050048828125]
    """
    place, (q, k, w_, target_, idx) = bind(q_index=q_index, k_index=k_index, w=w, target=target, indices=indices)
    length, counted_, dq, dk, dw_ = place.optional(
        topk_length=topk_length, counted=counted, dq_index=dq_index, dk_index=dk_index, dw=dw
    )
    arguments = IndexerLoss(
        q, k, w_, target_, idx, length, None, None, loss_coeff, counted_, per_token, relu, scale_format, gradients,
        accumulate, max_workspace_bytes, None, dq, dk, dw_,
    )  # fmt: skip
    tokens, keys = _require_indexer(arguments)
    return _loss(place, arguments, require_lists(idx, tokens, keys, length), gradient_dtype, quantized)


@operation
@differentiable("dq_index", "dk_index", "dw")
def dense_indexer_loss(
    q_index: A,
    k_index: AnyArray,
    w: AnyArray,
    target: AnyArray,
    starts: AnyArray,
    ends: AnyArray,
    *,
    loss_coeff: float = 1.0,
    counted: AnyArray | None = None,
    per_token: bool = False,
    relu: bool = True,
    quantized: bool = False,
    scale_format: ScaleFormat = "fp32",
    gradients: bool = True,
    gradient_dtype: GradientDtype = "bfloat16",
    accumulate: bool = False,
    max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
    dq_index: A | None = None,
    dk_index: A | None = None,
    dw: A | None = None,
) -> tuple[A, A | None, A | None, A | None]:
    """`indexer_loss` over ranges of keys, for the warm-up with dense attention: the same formulas, over the keys
    `starts[i] <= j < ends[i]` instead of a list.

    `target` has a number for every token and key. So call it for parts of a long sequence, with `per_token` and, for
    dk_index, `accumulate`. `cupy_mla.integrations.training.warmup_loss` does so.

    Args:
        q_index: [T, H, 128] bfloat16, the indexer's queries, 1 to 128 heads.
        k_index: [N, 128] bfloat16, its keys.
        w: [T, H] float32, the heads' weights with all factors, as `indexer_logits` takes them.
        target: [T, N] float32, from `dense_attention_target`; nothing is read outside of the ranges.
        starts, ends: [T] int32 range of keys of each token.
        loss_coeff, counted, per_token, relu, quantized, scale_format, gradients, gradient_dtype, accumulate: as in
            `indexer_loss`.
        max_workspace_bytes: limit of the memory beside the results, on a GPU. Query tokens are worked on in chunks
            that fit it, of at least one token. A token takes about `N * (268 + H / 8)` bytes; with `quantized` besides
            `260 * H + 4 * N`, and a key 260.
        dq_index: [T, H, 128] bfloat16 or float32, written in place when given.
        dk_index: [N, 128] bfloat16 or float32, written in place when given.
        dw: [T, H] float32, written in place when given.

    Returns:
        the loss, float32 of shape [], and the gradients dq_index, dk_index and dw [T, H] float32.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        RuntimeError: CUDA arrays, and CuPy, a driver or NVRTC is missing.

    Example:
        >>> q_index, k_index = np.ones((2, 2, 128), bfloat16), np.ones((3, 128), bfloat16)
        >>> w, target = np.full((2, 2), 0.01, np.float32), np.array([[1, 0, 0], [1, 3, 0]], np.float32)
        >>> starts, ends = np.array([0, 0], np.int32), np.array([1, 2], np.int32)
        >>> loss, dq_index, dk_index, dw = cupy_mla.dense_indexer_loss(q_index, k_index, w, target, starts, ends)
        >>> f"{float(loss):.3f}"  # of 3/4 and 1/4 from 1/2 and 1/2, divided by two tokens
        '0.065'
    """
    place, (q, k, w_, target_, first, end) = bind(
        q_index=q_index, k_index=k_index, w=w, target=target, starts=starts, ends=ends
    )
    counted_, dq, dk, dw_ = place.optional(counted=counted, dq_index=dq_index, dk_index=dk_index, dw=dw)
    arguments = IndexerLoss(
        q, k, w_, target_, None, None, first, end, loss_coeff, counted_, per_token, relu, scale_format, gradients,
        accumulate, max_workspace_bytes, None, dq, dk, dw_,
    )  # fmt: skip
    tokens, keys = _require_indexer(arguments)
    _require_ranges(first, end, tokens, keys)
    return _loss(place, arguments, keys, gradient_dtype, quantized)


def _require_attention(a: Target) -> tuple[int, int, int]:
    """Check queries, rows and lse; returns the numbers of query tokens, heads and rows."""
    tokens, heads, d_qk = a.q.require(BFLOAT16, "s_q", "h_q", HEAD_DIMS).shape
    require_heads(heads)
    rows = a.kv.require(BFLOAT16, "s_kv", 1, d_qk).shape[0]
    if a.lse is not None:
        a.lse.require(FLOAT32, tokens, heads)
    if a.sink is not None:
        a.sink.require(FLOAT32, heads)
    return tokens, heads, rows


def _squeezed(a: Target, out: arrays.Array) -> Target:
    """The arguments as the twins take them: without axes of length 1, with the scale checked and the result."""
    a.kv.without_axis(1)
    return a._replace(sm_scale=require_scale("sm_scale", a.sm_scale), out=out)


def _require_ranges(starts: arrays.Array, ends: arrays.Array, tokens: int, rows: int) -> None:
    starts.require(INT32, tokens)
    ends.require(INT32, tokens)
    if arrays.CHECK_VALUES:
        check_ranges(starts, ends, rows)


def _require_indexer(a: IndexerLoss) -> tuple[int, int]:
    """Check queries, keys and weights; returns the numbers of tokens and keys."""
    tokens, heads, _ = a.q_index.require(BFLOAT16, "T", "H", D).shape
    require_heads(heads, "q_index")
    a.w.require(FLOAT32, tokens, heads)
    return tokens, a.k_index.require(BFLOAT16, "N", D).shape[0]


def _loss(
    place: Place, a: IndexerLoss, width: int, gradient_dtype: GradientDtype, quantized: bool
) -> tuple[Any, Any, Any, Any]:
    """Check the other arguments of a loss over lists or ranges of `width` entries, and compute it."""
    (tokens, heads, _), keys = a.q_index.shape, a.k_index.shape[0]
    for name in ("per_token", "relu", "gradients", "accumulate"):
        require_bool(name, getattr(a, name))
    require_bool("quantized", quantized)
    require_choice("scale_format", a.scale_format, SCALE_FORMATS)
    require_choice("gradient_dtype", gradient_dtype, DTYPES)
    a.target.require(FLOAT32, tokens, width)
    if a.counted is not None:
        a.counted.require(BOOL, tokens)
    dq, dk, dw = a.dq_index, a.dk_index, a.dw
    if not a.gradients and not (dq is dk is dw is None and not a.accumulate):
        raise ValueError("gradients: dq_index, dk_index, dw and accumulate go with them, got False")
    if a.accumulate:
        require_sums("dk_index", dk, keys, D)
    loss = place.new("loss", (), FLOAT32)
    if a.gradients:
        dq = place.output("dq_index", dq, (tokens, heads, D), dtype_of(dq, gradient_dtype))
        dk = place.output("dk_index", dk, (keys, D), dtype_of(dk, gradient_dtype))
        dw = place.output("dw", dw, (tokens, heads), FLOAT32)
    arguments = a._replace(
        loss_coeff=require_scale("loss_coeff", a.loss_coeff), scale_format=a.scale_format if quantized else None,
        loss=loss, dq_index=dq, dk_index=dk, dw=dw,
        max_workspace_bytes=require_integer("max_workspace_bytes", a.max_workspace_bytes, 1, MOST_BYTES),
    )  # fmt: skip
    place.call(cuda.indexer_loss, reference.indexer_loss, arguments)
    dq, dk, dw = (None if x is None else x.obj for x in (dq, dk, dw))
    return loss.obj, dq, dk, dw
