"""Megatron-Core's sparse attention (DSA) on this package's kernels: what `dsa_kernel_backend` selects.

`install` puts this module in the place of one of Megatron's two backends, "tilelang" or "cudnn". Megatron calls the
`run_fused_*` functions of the backend. A function returns None to decline a call, and Megatron's own code then runs.

Rows are chosen by FP8 scores, as in serving (`cupy_mla.select_rows`); attention, loss and gradients take bfloat16.
Results have the same bits in every run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from ..checks.options import require_choice
from ..layouts import D_V, INDEXER_FP8
from ..ops.attention import HEAD_DIMS, sparse_prefill
from .contract import Needs, missing, sources
from .training import chosen_rows, sparse_indexer_loss, warmup_loss

__all__ = [
    "install",
    "run_fused_absorbed_sparse_attention",
    "run_fused_dsa_attention",
    "run_fused_qk_topk",
    "run_fused_qk_topk_with_loss",
]

PACKAGE = "megatron.core"
KERNELS = "transformer.experimental_attention_variant.dsa_kernels"
BACKENDS = ("tilelang", "cudnn")
HOOKS = (
    "run_fused_absorbed_sparse_attention(config, query, key, topk_indices, softmax_scale, v_channels, topk_length)",
    "run_fused_qk_topk(config, q, k, weights, index_topk, starts, ends)",
    "run_fused_qk_topk_with_loss(config, q, k, weights, index_topk, starts, ends)",
    "run_fused_dsa_attention",
)
# Arguments of the hooks that describe how context parallelism lays out queries and keys. A call that gives `starts` and
# `ends` is served whatever they are: its ranges already say which rows a token sees.
LAYOUT = {
    "block_size", "config", "cp_size", "local_packed_cp_query_len", "local_packed_cp_query_start",
    "local_packed_cp_rank", "packed_seq_params", "single_packed_thd_sequence", "varlen_is_plain_causal",
}  # fmt: skip
MOST_HEADS, MOST_INDEXER_HEADS, MOST_CHOSEN = 128, 64, 4096


def install(replaces: str = "tilelang") -> None:
    """Replace one of Megatron-Core's sparse attention backends by this package, in this process.

    Call it before Megatron's configuration is made, and set `dsa_kernel_backend` to the replaced backend. The packages
    of that backend need not be installed.

    Args:
        replaces: "tilelang" or "cudnn".

    Raises:
        ValueError: `replaces` is another name.
        RuntimeError: Megatron-Core is not installed, or lacks a name that this module relies on; the message says
            which.

    Example:
        >>> from cupy_mla.integrations import megatron
        >>> megatron.install(replaces="tilelang")  # TransformerConfig(dsa_kernel_backend="tilelang", ...) comes later
    """
    require_choice("replaces", replaces, BACKENDS)
    lacking = missing(sources(PACKAGE), needs(replaces))
    if lacking:
        raise RuntimeError(f"cupy_mla cannot serve this {PACKAGE}. Missing: {'; '.join(lacking)}")
    import_module(f"{PACKAGE}.{KERNELS}")._BACKEND_MODULE_NAME_BY_BACKEND[replaces] = __name__
    setattr(import_module(f"{PACKAGE}.utils"), _check_of(replaces), _nothing_is_missing)


def needs(replaces: str) -> Needs:
    """The names and signatures in Megatron-Core's sources on which `install` relies."""
    return {KERNELS: ("_BACKEND_MODULE_NAME_BY_BACKEND", *HOOKS), "utils": (f"{_check_of(replaces)}()",)}


def _check_of(backend: str) -> str:
    return f"_missing_{backend}_dsa_kernel_dependencies"


def _nothing_is_missing() -> list[str]:
    """Replaces Megatron's function that lists the packages which a backend needs and are not installed."""
    return []


# --- the hooks ------------------------------------------------------------------------------------------------


def run_fused_absorbed_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    topk_indices: torch.Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Attention over the rows of lists: `cupy_mla.sparse_prefill`, with its backward.

    Args:
        query: [sq, b, h, 576 or 512] bfloat16, up to 128 heads.
        key: [sk, b, 1, 576 or 512] bfloat16.
        topk_indices: [b, sq, topk] integers, rows of the same batch element; -1: none.
        softmax_scale: factor on dot products.
        v_channels: 512, or the call is declined.
        topk_length: [b, sq] lengths of lists.

    Returns:
        [sq, b, h, 512] bfloat16, or None.
    """
    shapes = (query.ndim, key.ndim, topk_indices.ndim) == (4, 4, 3)
    if not shapes or topk_indices.shape[:2] != query.shape[1::-1] or not _can_attend(query, key, v_channels):
        return None
    if topk_length is not None:
        if topk_length.shape != topk_indices.shape[:2]:
            return None
        topk_length = topk_length.transpose(0, 1).flatten().int()
    lists = _flat_lists(topk_indices.transpose(0, 1))
    return _attend(query, key, lists, softmax_scale, topk_length)[0]


def run_fused_qk_topk(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    index_topk: int,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    use_relu: bool = True,
    use_local_indexer_varlen: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None] | None:
    """The rows that the indexer chooses, as `cupy_mla.select_rows` of FP8 queries and keys.

    Args:
        q: [sq, b, H, 128] bfloat16, H a multiple of 8 up to 64.
        k: [sk, b, 128] bfloat16.
        weights: [sq, b, H], with all factors.
        index_topk: rows chosen of a token, up to 4096; all, of fewer keys.
        starts, ends: [sq] rows that a token sees: `starts <= row < ends`.
        use_relu: without relu the call is declined.
        use_local_indexer_varlen: keys in Megatron's order of packed sequences under context parallelism: declined.
        others: those in `LAYOUT` change nothing. Any other that is neither None nor False is declined.

    Returns:
        [b, sq, topk] int32, ascending, -1 behind the last, and None in place of the lists' lengths. Or None.
    """
    if use_local_indexer_varlen or _has_unknown(others) or not (use_relu and _can_choose(q, k, weights, index_topk)):
        return None
    return _choose(q, k, weights, index_topk, starts, ends).transpose(0, 1).contiguous(), None


def run_fused_qk_topk_with_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    index_topk: int,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    softmax_scale: float,
    loss_coeff: float,
    pg_collection: Any,
    query_valid_rows: torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
    use_relu: bool = True,
    use_local_indexer_varlen: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None, torch.Tensor] | None:
    """`run_fused_qk_topk`, and the indexer's loss over the chosen rows, `cupy_mla.indexer_loss`.

    Args:
        q, k, weights, index_topk, starts, ends, use_relu, use_local_indexer_varlen, others: as for
            `run_fused_qk_topk`; the loss has gradients of the first three.
        query, key, softmax_scale: the attention's, as for `run_fused_absorbed_sparse_attention`.
        loss_coeff: factor on the loss.
        pg_collection: its group `tp` shares the heads of query.
        query_valid_rows: [sq] or [b, sq] bool, tokens that count; None: all.
        calculate_per_token_loss: leave out the division by the number of tokens that count.

    Returns:
        [b, sq, topk] int32, None, and the loss, float32 of shape []. Or None.
    """
    if not _can_attend(query, key, D_V):
        return None
    found = run_fused_qk_topk(
        q, k, weights, index_topk, starts, ends, use_relu=use_relu,
        use_local_indexer_varlen=use_local_indexer_varlen, **others,
    )  # fmt: skip
    if found is None:
        return None
    lists = _flat_lists(found[0].transpose(0, 1))
    with torch.no_grad():
        _, lse = _attend(query, key, lists, softmax_scale)
    learned = q.flatten(0, 1), k.flatten(0, 1), weights.flatten(0, 1).float()
    settings, divisor = _settings(query_valid_rows, q, loss_coeff, calculate_per_token_loss)
    loss = sparse_indexer_loss(
        *learned, query.flatten(0, 1), key.flatten(0, 1), lists, lse, softmax_scale, group=_shared(pg_collection),
        **settings,
    )  # fmt: skip
    return *found, loss / divisor


def run_fused_dsa_attention(
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    up_v_weight: torch.Tensor | None,
    q_indexer: torch.Tensor,
    k_indexer: torch.Tensor,
    indexer_weights: torch.Tensor,
    indexer_topk: int,
    softmax_scale: float,
    loss_coeff: float,
    sparse_loss: bool,
    calculate_per_token_loss: bool,
    absorbed_mla: bool,
    attn_mask_type: Any,
    varlen_starts: torch.Tensor | None,
    varlen_ends: torch.Tensor | None,
    key_positions: torch.Tensor | None,
    query_valid_rows: torch.Tensor | None,
    use_relu: bool,
    use_local_indexer_varlen: bool = False,
    pg_collection: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Indexer, attention and the indexer's loss in one call, so that the loss takes the lse of this attention.

    Args:
        query, key, softmax_scale: as for `run_fused_absorbed_sparse_attention`.
        value, absorbed_mla: None and True, or the call is declined.
        up_v_weight: [h, v, 512] of the projection behind attention.
        q_indexer, k_indexer, indexer_weights, indexer_topk, use_relu: as for `run_fused_qk_topk`.
        loss_coeff: factor on the loss. The loss is not computed where this is 0 or gradients are off.
        sparse_loss: True: the loss is over the chosen rows. False: over all rows that a token sees (`warmup_loss`).
        calculate_per_token_loss, query_valid_rows, pg_collection: as for `run_fused_qk_topk_with_loss`.
        attn_mask_type: causal, or the call is declined.
        varlen_starts, varlen_ends: [sq]; a token sees rows `starts <= row < ends`. None: rows up to its own.
        key_positions: an order of the rows; None, or the call is declined.
        use_local_indexer_varlen, others: as for `run_fused_qk_topk`.

    Returns:
        [sq, b, h * v] and the loss, float32 of shape []. Or None.
    """
    if up_v_weight is None or value is not None or key_positions is not None or not absorbed_mla:
        return None
    if getattr(attn_mask_type, "name", None) != "causal":
        return None
    if use_local_indexer_varlen or _has_unknown(others) or not _can_attend(query, key, up_v_weight.shape[-1]):
        return None
    if not (use_relu and _can_choose(q_indexer, k_indexer, indexer_weights, indexer_topk)):
        return None
    if varlen_starts is None or varlen_ends is None:
        of_one = others.get("cp_size", 1) == 1 and others.get("packed_seq_params") is None
        if varlen_starts is not varlen_ends or not of_one or len(query) != len(key):
            return None
        varlen_ends = torch.arange(1, len(query) + 1, device=query.device)
        varlen_starts = torch.zeros_like(varlen_ends)
    chosen = _choose(q_indexer, k_indexer, indexer_weights, indexer_topk, varlen_starts, varlen_ends)
    lists = _flat_lists(chosen)
    out, lse = _attend(query, key, lists, softmax_scale)
    loss = lse.new_zeros(())
    if loss_coeff and torch.is_grad_enabled():
        q, w, tokens = q_indexer.flatten(0, 1), indexer_weights.flatten(0, 1).float(), query.detach().flatten(0, 1)
        of, divisor = _settings(query_valid_rows, query, loss_coeff, calculate_per_token_loss)
        of["group"] = _shared(pg_collection)
        if sparse_loss:
            k, rows = k_indexer.flatten(0, 1), key.detach().flatten(0, 1)
            loss = sparse_indexer_loss(q, k, w, tokens, rows, lists, lse, softmax_scale, **of)
        else:
            k, rows = _by_element(k_indexer), _by_element(key.detach())
            ranges = _ranges(varlen_starts, varlen_ends, key)
            loss = warmup_loss(q, k, w, tokens, rows, softmax_scale, *ranges, **of)
        loss = loss / divisor
    return torch.einsum("sbhc,hvc->sbhv", out, up_v_weight).flatten(2), loss


# --- steps of the hooks ---------------------------------------------------------------------------------------
# Megatron's tensors are [s, b, ...]. Attention over lists takes them flattened in this order: row j of batch element e
# is row `j * b + e`. Functions that take ranges need the rows of a batch element side by side: row `e * sk + j`.


def _has_unknown(others: dict[str, Any]) -> bool:
    """Whether a newer Megatron passes an argument that this module does not know."""
    return any(value is not None and value is not False for name, value in others.items() if name not in LAYOUT)


def _can_attend(query: torch.Tensor, key: torch.Tensor, v_channels: int) -> bool:
    bf16 = query.dtype == key.dtype == torch.bfloat16
    if not bf16 or (query.ndim, key.ndim) != (4, 4) or v_channels != D_V:
        return False
    rows = (query.shape[1], 1, query.shape[3])
    return key.shape[1:] == rows and query.shape[3] in HEAD_DIMS and 1 <= query.shape[2] <= MOST_HEADS


def _can_choose(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, topk: int) -> bool:
    bf16 = q.dtype == k.dtype == torch.bfloat16
    if not bf16 or (q.ndim, k.ndim) != (4, 3) or weights.shape != q.shape[:3]:
        return False
    shapes = k.shape[1:] == (q.shape[1], INDEXER_FP8.d_qk) and q.shape[3] == INDEXER_FP8.d_qk
    heads = q.shape[2] % 8 == 0 and 8 <= q.shape[2] <= MOST_INDEXER_HEADS
    return shapes and heads and 1 <= min(topk, len(k)) <= MOST_CHOSEN


def _choose(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, topk: int, starts: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Lists [sq, b, topk] int32 of rows within the token's batch element, ascending, -1 behind the last."""
    (sk, b), ranges = k.shape[:2], _ranges(starts, ends, k)
    rows = chosen_rows(q.flatten(0, 1), _by_element(k), weights.flatten(0, 1).float(), *ranges, min(topk, sk))
    first = sk * torch.arange(b, dtype=torch.int32, device=k.device)
    rows = rows.view(*q.shape[:2], -1)
    return torch.where(rows >= 0, rows - first[:, None], -1)


def _ranges(starts: torch.Tensor, ends: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """starts and ends, [sq * b] int32 each, among the rows `e * sk + j` of all batch elements; keys: [sk, b, ...]."""
    sk, b = keys.shape[:2]
    first = sk * torch.arange(b, dtype=torch.int32, device=keys.device)
    low, high = ((x.clamp(0, sk).int()[:, None] + first).flatten() for x in (starts, ends))
    return low, high


def _by_element(rows: torch.Tensor) -> torch.Tensor:
    """[sk, b, ...] as [b * sk, ...]: row j of batch element e becomes row `e * sk + j`."""
    return rows.transpose(0, 1).flatten(0, 1).contiguous()


def _flat_lists(chosen: torch.Tensor) -> torch.Tensor:
    """Lists [sq, b, topk] of rows j of a batch element e, as lists [sq * b, 1, topk] of rows `j * b + e`."""
    b = chosen.shape[1]
    element = torch.arange(b, dtype=torch.int32, device=chosen.device)[:, None]
    chosen = chosen.int()
    return torch.where(chosen >= 0, chosen * b + element, -1).flatten(0, 1)[:, None]


def _attend(
    query: torch.Tensor, key: torch.Tensor, lists: torch.Tensor, scale: float, length: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [sq, b, h, 512] and lse [sq * b, h]."""
    out, _, lse = sparse_prefill(query.flatten(0, 1), key.flatten(0, 1), lists, float(scale), topk_length=length)
    return out.view(*query.shape[:3], D_V), lse


def _settings(
    valid: torch.Tensor | None, q: torch.Tensor, coeff: float, per_token: bool
) -> tuple[dict[str, Any], torch.Tensor | int]:
    """Settings of the loss, and the divisor that the caller applies to it.

    `cupy_mla.indexer_loss` would divide by the tokens that count and see a row. Megatron divides by all tokens that are
    no padding. So the settings leave that division out (`per_token`)."""
    sq, b = q.shape[:2]
    if valid is None:
        coeff /= 1 if per_token else sq * b
        return {"per_token": True, "loss_coeff": float(coeff)}, 1
    counted = valid.to(q.device, torch.bool).expand(b, sq).transpose(0, 1).flatten().contiguous()
    settings = {"counted": counted, "per_token": True, "loss_coeff": float(coeff)}
    return settings, 1 if per_token else counted.sum().clamp(min=1)


def _shared(groups: Any) -> Any:
    """The process group that shares the heads; None for a single rank."""
    tp = getattr(groups, "tp", None)
    return tp if tp is not None and tp.size() > 1 else None
