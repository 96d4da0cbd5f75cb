"""Context parallelism in plain NumPy."""

from __future__ import annotations

import numpy as np

from .topk import ordered


def local_seq_lens(seq_lens: np.ndarray, world_size: int, rank: int, interleave: int, out: np.ndarray) -> None:
    """Tokens of a rank; see `cupy_mla.local_seq_lens`."""
    turns, rest = np.divmod(seq_lens.astype(np.int64).clip(0), interleave * world_size)
    out[...] = turns * interleave + (rest - rank * interleave).clip(0, interleave)


def localize_topk(
    topk_indices: np.ndarray, world_size: int, rank: int, interleave: int, out: np.ndarray, topk_length: np.ndarray
) -> None:
    """A rank's positions, renumbered, in front; see `cupy_mla.localize_topk`."""
    positions = topk_indices.copy()
    mine = (positions >= 0) & (positions // interleave % world_size == rank)
    local = positions // (interleave * world_size) * interleave + positions % interleave
    order = np.argsort(~mine, axis=1, kind="stable")
    out[...] = np.take_along_axis(np.where(mine, local, -1), order, 1)
    topk_length[...] = mine.sum(axis=1)


def globalize_topk(
    logits: np.ndarray,
    topk_indices: np.ndarray,
    world_size: int,
    rank: int,
    interleave: int,
    values: np.ndarray,
    out: np.ndarray,
) -> None:
    """A rank's positions in the request and their logits; see `cupy_mla.globalize_topk`."""
    if logits.shape[1] == 0:
        values[...], out[...] = -np.inf, -1
        return
    valid = (topk_indices >= 0) & (topk_indices < logits.shape[1])
    local = np.where(valid, topk_indices, 0)
    values[...] = np.where(valid, np.take_along_axis(logits, local, 1), -np.inf)
    turn, in_turn = np.divmod(local, interleave)
    out[...] = np.where(valid, (turn * world_size + rank) * interleave + in_turn, -1)


def merge_topk(values: np.ndarray, positions: np.ndarray, k: int, out: np.ndarray) -> None:
    """The k largest of all ranks' logits; see `cupy_mla.merge_topk`."""
    ranks, tokens, width = values.shape
    order, position = (
        a.swapaxes(0, 1).reshape(tokens, ranks * width) for a in (ordered(values), positions.astype(np.int64))
    )
    order = np.where(position < 0, -1, order)
    chosen = np.lexsort((position, -order), axis=1)[:, :k]
    nowhere = np.iinfo(np.int64).max
    found = np.where(np.take_along_axis(order, chosen, 1) >= 0, np.take_along_axis(position, chosen, 1), nowhere)
    found.sort(axis=1)
    out[...] = -1
    out[:, : found.shape[1]] = np.where(found < nowhere, found, -1)


def merge_attention(
    outs: np.ndarray, lses: np.ndarray, attn_sink: np.ndarray | None, out: np.ndarray, lse: np.ndarray
) -> None:
    """One result of all ranks'; see `cupy_mla.merge_attention`."""
    lses = np.where(np.isinf(lses), -np.inf, lses)  # ranks without a row
    top = lses.max(axis=0, initial=-np.inf)
    empty = top == -np.inf
    weights = np.exp(lses - np.where(empty, 0, top))
    total = np.where(empty, 1, weights.sum(axis=0))
    merged = np.zeros(out.shape, np.float32)
    for weight, rows, adds in zip(weights, outs, lses != -np.inf, strict=True):
        merged += np.where(adds[..., None], weight[..., None] * rows.astype(np.float32), 0)
    whole = np.where(empty, 0, top) + np.log(total)
    with np.errstate(over="ignore"):
        factor = 1 / total if attn_sink is None else 1 / (total * (1 + np.exp(attn_sink - whole)))
    out[...] = merged * factor[..., None]
    lse[...] = np.where(empty, np.inf, whole)
