"""Training with torch: the indexer's loss, computed from the tensors that the attention of a layer has.

Source: DeepSeek-V3.2 (DeepSeek Sparse Attention, section 2.1). The indexer learns from this loss alone, and the loss
trains the indexer alone. The functions here detach the attention's tensors. The caller detaches the hidden states that
enter the indexer's projections, or the loss would reach the layers before.
"""

from __future__ import annotations

from typing import Any

import torch

import cupy_mla

from ..layouts import INDEXER_FP8
from ..typing import ScaleFormat

__all__ = ["SparseMLATraining", "attach_loss", "sparse_indexer_loss", "warmup_loss"]

TARGET_BYTES = 256 << 20  # most memory of the attention target that `warmup_loss` holds at a time
BLOCK_SIZE = 64  # tokens per block of the temporary cache in which keys are quantized


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
    """The indexer's loss over the rows of the attention's lists: `cupy_mla.indexer_loss` of
    `cupy_mla.attention_target`.

    Args:
        q_index, k_index, w: the indexer's queries, keys and weights, as `cupy_mla.indexer_loss` takes them; the loss
            has gradients of these alone.
        q, kv, indices, sm_scale, topk_length: the arguments of `cupy_mla.sparse_prefill`.
        lse: its result.
        group: process group of GPUs that share the heads of q. Lists must be the same on all, in the same order.
        settings: `loss_coeff`, `counted`, `per_token`, `relu`, `quantized`, `scale_format`, `gradients`,
            `max_workspace_bytes` of `cupy_mla.indexer_loss`.

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
    quantized: bool = False,
    scale_format: ScaleFormat = "fp32",
    target_bytes: int = TARGET_BYTES,
    group: Any = None,
) -> torch.Tensor:
    """The indexer's loss in the warm-up stage, where attention is dense: `cupy_mla.dense_indexer_loss` of
    `cupy_mla.dense_attention_target`. It goes over the tokens in parts, so that no array is as large as tokens x rows.

    Args:
        q_index, k_index, w: the indexer's queries, keys and weights, as `cupy_mla.dense_indexer_loss` takes them; the
            loss has gradients of these alone.
        q: [T, h_q, d_qk] bfloat16, and kv [N, 1, d_qk] bfloat16: queries and rows of the attention, weights absorbed.
        sm_scale: factor on dot products.
        starts, ends: [T] int32; a token attends to rows `starts <= row < ends`. For causal attention in a sequence
            whose first row is `a`, these are `a` and the token's own row + 1.
        lse: [T, h_q] float32 of the dense attention; None: computed here.
        counted, loss_coeff, per_token, relu, quantized, scale_format: as in `cupy_mla.indexer_loss`.
        target_bytes: most memory of the target of one part of the tokens; a part has one token at least.
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
                quantized=quantized, scale_format=scale_format, accumulate=True, dq_index=dq[part], dk_index=dk,
                dw=dw[part],
            )[0]  # fmt: skip
    return _Learned.apply(factor * loss, factor, *learned, dq, dk, dw)


class _Learned(torch.autograd.Function):
    """A loss whose gradients are already computed, up to a factor."""

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
    """Attach a loss to `out`: a backward through `out` then runs the loss's backward, too. A layer trains on a loss of
    its own so, without returning it.

    Args:
        out: a result of the layer.
        loss: the loss to attach. Its gradient is `scale`, whatever the gradient of `out` is.
        scale: for example the factor of a gradient scaler.

    Returns:
        out. Use this tensor and not the argument: only its backward reaches the loss.

    Example:
        >>> out = attach_loss(out, sparse_indexer_loss(q_index, k_index, w, q, kv, indices, lse, sm_scale))
    """
    return _Attached.apply(out, loss, scale)


class _Attached(torch.autograd.Function):
    """Returns its first argument. The gradient of its second does not depend on that of the result."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, loss: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss.new_ones(loss.shape) * scale)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (d_loss,) = ctx.saved_tensors
        return d_out, d_loss, None


class SparseMLATraining(torch.nn.Module):
    """Sparse attention of a layer and its indexer, in training; it has no weights.

    The indexer chooses rows by FP8 scores, as in serving (`choose`). Attention over these rows is
    `cupy_mla.sparse_prefill`, and the indexer's loss is `sparse_indexer_loss`. Under `torch.compile(fullgraph=True)`
    and with activation checkpointing, results have the same bits.

    Args:
        sm_scale: factor on dot products of the attention.
        topk: rows that are chosen for a token, up to 4096.
        attach: a number or a tensor: the loss is attached to `out` and has this gradient (`attach_loss`). None: the
            caller adds the returned loss to the model's loss.
        group: process group of GPUs that share the heads of q; all of them choose the same rows.
        settings: `loss_coeff`, `per_token`, `relu`, `quantized`, `scale_format`, `max_workspace_bytes` of
            `cupy_mla.indexer_loss`. `scale_format` is also that of the FP8 scores by which rows are chosen, whether
            or not the loss is `quantized`.

    Example:
        >>> layer = SparseMLATraining(192**-0.5, topk=2048, quantized=True, attach=1.0)
        >>> out, loss = layer(q_index, k_index, w, q, kv, (starts, ends))  # loss to be looked at
        >>> out, loss = layer(q_index, k_index, w, q, kv, indices=indices)  # over lists of a server
    """

    def __init__(
        self,
        sm_scale: float,
        topk: int = 2048,
        *,
        attach: float | torch.Tensor | None = None,
        group: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.sm_scale: float = sm_scale
        self.topk: int = topk
        self.attach: float | torch.Tensor | None = attach
        self.group: Any = group
        self.settings: dict[str, Any] = settings

    def forward(
        self,
        q_index: torch.Tensor,
        k_index: torch.Tensor,
        w: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        ranges: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        indices: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        counted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the chosen rows, and the indexer's loss.

        Args:
            q_index: [T, H, 128] bfloat16, k_index [N, 128] bfloat16 and w [T, H] float32 with all factors: the
                indexer's queries, keys and weights. The loss has gradients of these; detach the hidden states that they
                come from.
            q: [T, h_q, d_qk] bfloat16, and kv [N, 1, d_qk] bfloat16: queries with weights absorbed, and rows.
            ranges: starts and ends, [T] int32 each: a token's rows are chosen among `starts <= row < ends`.
            indices: [T, 1, topk] int32 lists, instead of `ranges`.
            topk_length: [T] int32 lengths of the lists.
            attn_sink: [h_q] float32; the loss leaves sinks out.
            counted: [T] bool, tokens that count in the loss.

        Returns:
            out [T, h_q, 512] bfloat16, and the loss, float32 of shape []. A loss that is attached to `out` is returned
            detached.

        Raises:
            ValueError: neither or both of ranges and indices are given; or as the operations raise it.
        """
        if (ranges is None) == (indices is None):
            raise ValueError("ranges, indices: expected one of them")
        lists: Any = indices if ranges is None else self.choose(q_index, k_index, w, *ranges)
        out, _, lse = cupy_mla.sparse_prefill(q, kv, lists, self.sm_scale, attn_sink=attn_sink, topk_length=topk_length)
        scores, attention = (q_index, k_index, w), (q, kv, lists, lse, self.sm_scale)
        settings = {"topk_length": topk_length, "counted": counted, "group": self.group, **self.settings}
        if self.attach is not None:
            return with_loss(out, self.attach, scores, *attention, **settings)
        return out, sparse_indexer_loss(*scores, *attention, gradients=learns(*scores), **settings)

    def choose(
        self, q_index: torch.Tensor, k_index: torch.Tensor, w: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """The lists of rows that the indexer chooses, from the arguments of `forward`.

        Returns:
            [T, 1, min(topk, N)] int32 rows, ascending, -1 behind the last.

        Raises:
            ValueError: the indexer has no relu.
        """
        if not self.settings.get("relu", True):
            raise ValueError("relu: rows are chosen by scores with it; give indices")
        most = min(self.topk, len(k_index))
        return chosen_rows(q_index, k_index, w, starts, ends, most, self.settings.get("scale_format", "fp32"))[:, None]


def learns(*scores: torch.Tensor) -> bool:
    """Whether autograd follows one of q_index, k_index and w."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in scores)


def with_loss(
    out: torch.Tensor,
    scale: float | torch.Tensor,
    scores: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *attention: Any,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out with the indexer's loss attached, if the indexer has gradients, and the detached loss.

    Args:
        out, scale: as `attach_loss` takes them.
        scores: q_index, k_index and w.
        attention, settings: what `sparse_indexer_loss` takes besides.
    """
    loss = sparse_indexer_loss(*scores, *attention, gradients=learns(*scores), **settings)
    return attach_loss(out, loss, scale) if learns(*scores) else out, loss.detach()


@torch.no_grad()
def chosen_rows(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    w: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    scale_format: ScaleFormat = "fp32",
) -> torch.Tensor:
    """The k rows that the indexer chooses for each token among `starts <= row < ends`, by FP8 scores as in serving.

    Args:
        q_index, k_index, w, starts, ends: as `warmup_loss` takes them; w may lack factors that all heads share.
        k: rows per token, up to 4096.
        scale_format: of queries and keys.

    Returns:
        [T, k] int32, ascending, -1 behind the last.
    """
    k8, scales = quantized_keys(k_index, scale_format)
    q8, w = quantized_queries(q_index, w, scale_format=scale_format)
    rows = cupy_mla.select_rows(q8, k8, scales, w, starts, ends, k)
    return torch.where(rows >= 0, rows + starts.clamp(min=0)[:, None], -1)


def quantized_queries(q: torch.Tensor, weights: torch.Tensor, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_indexer_q` of q [T, H, 128] and weights [T, H]. The kernels need a multiple of 8 heads: heads of weight
    zero are added up to it. They change all logits by the same factor, which changes no choice of rows."""
    missing = -q.shape[1] % 8
    if missing:
        q, weights = (torch.nn.functional.pad(x, (*[0, 0] * (x.ndim - 2), 0, missing)) for x in (q, weights))
    return cupy_mla.quantize_indexer_q(q, weights, **more)


@torch.no_grad()
def quantized_keys(keys: torch.Tensor, scale_format: ScaleFormat = "fp32") -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [N, 128] bfloat16, quantized as in a server's cache: e4m3 bytes [N, 128] uint8 and scales [N] float32."""
    blocks = -(-len(keys) // BLOCK_SIZE)
    cache = keys.new_empty((blocks, BLOCK_SIZE, INDEXER_FP8.token_bytes), dtype=torch.uint8)
    cupy_mla.indexer_k_quant_and_cache(keys, cache, torch.arange(len(keys), device=keys.device), scale_format)
    k8 = torch.empty_like(keys, dtype=torch.uint8)
    scales = torch.empty(len(keys), dtype=torch.float32, device=keys.device)
    table = torch.arange(blocks, dtype=torch.int32, device=keys.device)[None]
    bounds = torch.arange(0, len(keys) + 1, len(keys), dtype=torch.int32, device=keys.device)
    cupy_mla.cp_gather_indexer_k_quant_cache(cache, k8, scales, table, bounds)
    return k8, scales
