"""What the lightning indexer learns from: `attention_target` and `indexer_loss`.

Source: DeepSeek-V3.2 (DeepSeek Sparse Attention, section 2.1): the indexer's scores, as a distribution over the keys,
are drawn to where the attention's heads look.
"""

from __future__ import annotations

from .. import arrays
from ..arguments import IndexerLoss, Target
from ..bridges import bind
from ..calls.operation import differentiable, operation
from ..checks.options import require_bool, require_choice, require_integer, require_scale
from ..checks.validate import require_heads
from ..checks.values import check_lists
from ..cuda import training as cuda
from ..dtypes import BFLOAT16, BOOL, FLOAT32, INT32
from ..reference import training as reference
from ..typing import A, AnyArray, GradientDtype
from .attention import HEAD_DIMS
from .backward import DTYPES, MAX_WORKSPACE_BYTES, MOST_BYTES, dtype_of
from .logits import D

__all__ = ["attention_target", "indexer_loss"]


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
    """Where the heads of a query token look together: the weights of `sparse_prefill`, summed over the heads.

    For each query token i, over the valid entries j of its list, which name the rows `r_j`::

        out[j] = sum_h sigma[h] * exp(sm_scale * dot(q[h], r_j) - lse[h])
        sigma[h] = 1 / (1 + exp(attn_sink[h] - lse[h]))        1 without a sink

    It is what `indexer_loss` takes as `target`, and divides by its sum. Heads that several GPUs share are summed up
    before: an all-reduce of `out`. The same call gives the same bits.

    Args:
        q, kv, indices, sm_scale, topk_length: those of the attention.
        lse: [s_q, h_q] float32, of the attention: natural logarithm, over the rows alone.
        attn_sink: [h_q] float32, to have what the sinks take away left out of the weights; mostly they stay whole.
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
    scale = require_scale("sm_scale", sm_scale)
    s_q, h_q, d_qk = q_.require(BFLOAT16, "s_q", "h_q", HEAD_DIMS).shape
    require_heads(h_q)
    s_kv = kv_.require(BFLOAT16, "s_kv", 1, d_qk).shape[0]
    topk = idx.require(INT32, s_q, 1, "topk").without_axis(1).shape[1]
    lse_.require(FLOAT32, s_q, h_q)
    if sink is not None:
        sink.require(FLOAT32, h_q)
    if length is not None:
        length.require(INT32, s_q)
    if arrays.CHECK_VALUES:
        check_lists(idx, s_kv, length)
    kv_.without_axis(1)
    out_ = place.output("out", out_, (s_q, topk), FLOAT32)
    arguments = Target(q_, kv_, idx, lse_, scale, sink, length, out_)
    place.call(cuda.attention_target, reference.attention_target, arguments)
    return out_.obj


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
    gradients: bool = True,
    gradient_dtype: GradientDtype = "bfloat16",
    accumulate: bool = False,
    max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
    dq_index: A | None = None,
    dk_index: A | None = None,
    dw: A | None = None,
) -> tuple[A, A | None, A | None, A | None]:
    """How far the indexer's scores are from where attention looks, and the gradients of that.

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

    - Gradients come with the loss, for nothing but the gradient of the loss itself is still to come: a factor. With
      torch the loss differentiates by itself where q_index, k_index or w want a gradient.
    - A token counts that has a valid entry, and `counted`, if that is given. Others have the gradient 0, and nothing
      comes from them, whatever they hold. A key that no valid entry names is never read and has the gradient 0.
    - An entry that names a key once more is an entry of its own in both distributions. `target` and lists have no
      gradient.
    - The same call gives the same bits, run after run: nothing is added by atomics. They do not depend on
      `max_workspace_bytes`, nor on the order of a list (and its target) that names no key twice.
    - NaN and infinity reach the loss, and the gradients of the token and of the keys it lists, no others.

    On a GPU dI, `w * q_index` and what a token adds to a key, summed over all heads, are rounded to bfloat16; all sums
    are float32, and results are rounded once. In NumPy all is float32.

    Args:
        q_index: [T, H, 128] bfloat16, the indexer's queries, 1 to 128 heads.
        k_index: [N, 128] bfloat16, its keys.
        w: [T, H] float32, the heads' weights with all factors, as `indexer_logits` takes them.
        target: [T, topk] float32, of `attention_target`, in the order of the lists.
        indices: [T, 1, topk] int32, the lists of the attention.
        topk_length: [T] int32 lengths of lists.
        loss_coeff: a factor.
        counted: [T] bool; others do not count, as those of padding.
        per_token: leave out the division by N: the sum over the tokens.
        relu: of the indexer's heads; models of GLM-5's kind have none.
        gradients: without, the last three results are None.
        gradient_dtype: of dq_index and dk_index that are allocated. Arrays that are given may have either dtype.
        accumulate: add to what `dk_index` holds, which must be given and float32: for parts of a batch.
        max_workspace_bytes: most memory beside the results, on a GPU; more query tokens are worked on in chunks, of
            one token at least. A token takes about `topk * (276 + H / 8)` bytes.
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
    coeff = require_scale("loss_coeff", loss_coeff)
    per_token, relu = require_bool("per_token", per_token), require_bool("relu", relu)
    gradients, accumulate = require_bool("gradients", gradients), require_bool("accumulate", accumulate)
    require_choice("gradient_dtype", gradient_dtype, DTYPES)
    max_workspace_bytes = require_integer("max_workspace_bytes", max_workspace_bytes, 1, MOST_BYTES)
    tokens, heads, _ = q.require(BFLOAT16, "T", "H", D).shape
    require_heads(heads, "q_index")
    keys = k.require(BFLOAT16, "N", D).shape[0]
    w_.require(FLOAT32, tokens, heads)
    topk = idx.require(INT32, tokens, 1, "topk").without_axis(1).shape[1]
    target_.require(FLOAT32, tokens, topk)
    if length is not None:
        length.require(INT32, tokens)
    if counted_ is not None:
        counted_.require(BOOL, tokens)
    if not gradients and not (dq is dk is dw_ is None and not accumulate):
        raise ValueError("gradients: dq_index, dk_index, dw and accumulate go with them, got False")
    if accumulate:
        if dk is None:
            raise ValueError("accumulate: dk_index, to which is added, must be given")
        dk.require(FLOAT32, keys, D)
    if arrays.CHECK_VALUES:
        check_lists(idx, keys, length)
    loss = place.new("loss", (), FLOAT32)
    if gradients:
        dq = place.output("dq_index", dq, (tokens, heads, D), dtype_of(dq, gradient_dtype))
        dk = place.output("dk_index", dk, (keys, D), dtype_of(dk, gradient_dtype))
        dw_ = place.output("dw", dw_, (tokens, heads), FLOAT32)
    arguments = IndexerLoss(
        q, k, w_, target_, idx, length, coeff, counted_, per_token, relu, gradients, accumulate, max_workspace_bytes,
        loss, dq, dk, dw_,
    )  # fmt: skip
    place.call(cuda.indexer_loss, reference.indexer_loss, arguments)
    return loss.obj, *(None if x is None else x.obj for x in (dq, dk, dw_))
