"""Training with torch: the loss from which the indexer learns, of what the attention of a layer has at hand.

Source: DeepSeek-V3.2 (DeepSeek Sparse Attention, section 2.1). The indexer learns from this loss alone, and nothing
else does: tensors of the attention are detached here. So that the indexer's loss changes nothing but the indexer,
detach what it is made of, too, the hidden states before its projections.
"""

from __future__ import annotations

from typing import Any

import torch

import cupy_mla

from ..layouts import INDEXER_FP8

__all__ = ["attach_loss", "sparse_indexer_loss", "warmup_loss"]

TARGET_BYTES = 256 << 20  # of the target of a part of the tokens
BLOCK_SIZE = 64  # tokens of a block of the cache through which keys are quantized


def sparse_indexer_loss(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    w: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    *,
    topk_length: torch.Tensor | None = None,
    group: Any = None,
    **settings: Any,
) -> torch.Tensor:
    """The indexer's loss over the rows that attention was given, `cupy_mla.indexer_loss` of its `attention_target`.

    Args:
        q_index, k_index, w: of the indexer; these have gradients.
        q, kv, indices, sm_scale, topk_length: what `cupy_mla.sparse_prefill` took.
        lse: what it returned.
        group: process group of GPUs that share the heads of q; lists must be the same on all, in one order.
        settings: `loss_coeff`, `counted`, `per_token`, `relu`, `max_workspace_bytes` of `cupy_mla.indexer_loss`.

    Returns:
        the loss, float32 of shape [].
    """
    target = cupy_mla.attention_target(
        q.detach(), kv.detach(), indices, lse.detach(), sm_scale, topk_length=topk_length
    )  # fmt: skip
    if group is not None:
        torch.distributed.all_reduce(target, group=group)
    loss, *_ = cupy_mla.indexer_loss(q_index, k_index, w, target, indices, topk_length=topk_length, **settings)
    return loss


def warmup_loss(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    w: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    sm_scale: float,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    counted: torch.Tensor | None = None,
    loss_coeff: float = 1.0,
    per_token: bool = False,
    relu: bool = True,
    target_bytes: int = TARGET_BYTES,
    group: Any = None,
) -> torch.Tensor:
    """The indexer's loss in its warm-up, beside dense attention: `cupy_mla.dense_indexer_loss` of
    `cupy_mla.dense_attention_target`, some tokens at a time, so that no array has a number for every token and row.

    Args:
        q_index, k_index, w: of the indexer; these have gradients.
        q: [T, h_q, d_qk] bfloat16, and kv [N, 1, d_qk] bfloat16: queries and rows of the attention, weights absorbed.
        sm_scale: factor on dot products.
        starts, ends: [T] int32 rows that a token looks at; in a sequence from row `a` on, `a` and its own row + 1.
        lse: [T, h_q] float32, of the dense attention; made here where it is not given.
        counted, loss_coeff, per_token, relu: as in `cupy_mla.indexer_loss`.
        target_bytes: most memory of the target of some tokens, of one token at least.
        group: process group of GPUs that share the heads of q.

    Returns:
        the loss, float32 of shape [].
    """
    learned = (q_index, k_index, w)
    with torch.no_grad():
        tokens, keys = len(q), len(k_index)
        counts = ends.clamp(max=keys) > starts.clamp(min=0)
        counts = counts if counted is None else counts & counted
        factor = loss_coeff / (1 if per_token else counts.sum().clamp(min=1))
        dq, dw = torch.empty_like(q_index, memory_format=torch.contiguous_format), w.new_empty(w.shape)
        dk, loss = k_index.new_zeros(k_index.shape, dtype=torch.float32), w.new_zeros(())
        step = max(1, target_bytes // max(4 * keys, 1))
        for first in range(0, tokens, step):
            part = slice(first, first + step)
            ranges = (starts[part], ends[part])
            of_part = cupy_mla.dense_lse(q[part], kv, sm_scale, *ranges) if lse is None else lse[part]
            target = cupy_mla.dense_attention_target(q[part], kv, of_part, sm_scale, *ranges)
            if group is not None:
                torch.distributed.all_reduce(target, group=group)
            loss += cupy_mla.dense_indexer_loss(
                q_index[part], k_index, w[part], target, *ranges, counted=counts[part], per_token=True, relu=relu,
                accumulate=True, dq_index=dq[part], dk_index=dk, dw=dw[part],
            )[0]  # fmt: skip
    return _Learned.apply(factor * loss, factor, *learned, dq, dk, dw)


class _Learned(torch.autograd.Function):
    """A loss whose gradients are known, but for a factor."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, factor: Any, *tensors: torch.Tensor) -> torch.Tensor:
        learned, gradients = tensors[:3], tensors[3:]
        ctx.dtypes, ctx.factor = [x.dtype for x in learned], factor
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = d_loss * ctx.factor
        given = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *((factor * gradient).to(dtype) for gradient, dtype in given), None, None, None


def attach_loss(out: torch.Tensor, loss: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Let a loss take part in whatever backward goes through `out`, as a layer's own loss that nobody passes on.

    Args:
        out: a result of the layer, which must be used.
        loss: whose gradient is `scale` then, whatever arrives for out.
        scale: of a gradient scaler, say.

    Returns:
        out, to be used in its place.

    Example:
        >>> out = attach_loss(out, sparse_indexer_loss(q_index, k_index, w, q, kv, indices, lse, sm_scale))
    """
    return _Attached.apply(out, loss, scale)


class _Attached(torch.autograd.Function):
    """The identity of its first argument; its second one has a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, loss: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss.new_ones(loss.shape) * scale)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (d_loss,) = ctx.saved_tensors
        return d_out, d_loss, None


@torch.no_grad()
def quantized_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [N, 128] bfloat16 as a server has them in its cache: e4m3 bytes [N, 128] uint8 and scales [N] float32."""
    blocks = -(-len(keys) // BLOCK_SIZE)
    cache = keys.new_empty((blocks, BLOCK_SIZE, INDEXER_FP8.token_bytes), dtype=torch.uint8)
    cupy_mla.indexer_k_quant_and_cache(keys, cache, torch.arange(len(keys), device=keys.device))
    k8 = torch.empty_like(keys, dtype=torch.uint8)
    scales = torch.empty(len(keys), dtype=torch.float32, device=keys.device)
    table = torch.arange(blocks, dtype=torch.int32, device=keys.device)[None]
    bounds = torch.arange(0, len(keys) + 1, len(keys), dtype=torch.int32, device=keys.device)
    cupy_mla.cp_gather_indexer_k_quant_cache(cache, k8, scales, table, bounds)
    return k8, scales
