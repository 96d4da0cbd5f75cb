"""Training with torch: the loss from which the indexer learns, of what the attention of a layer has at hand.

Source: DeepSeek-V3.2 (DeepSeek Sparse Attention, section 2.1). The indexer learns from this loss alone, and nothing
else does: tensors of the attention are detached here. So that the indexer's loss changes nothing but the indexer,
detach what it is made of, too, the hidden states before its projections.
"""

from __future__ import annotations

from typing import Any

import torch

import cupy_mla

__all__ = ["attach_loss", "sparse_indexer_loss"]


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
