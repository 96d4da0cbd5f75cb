"""Rows of the attention benchmarks: one call of ours beside one of FlashMLA's on the same inputs."""

from __future__ import annotations

from typing import Any

import torch
from harness import SETS, Record, largest_difference, time_side_by_side
from inputs import normal, random_slots

from cupy_mla import flash_mla

PEER_HEADS = 64  # fewer heads are padded to this for the peer, untimed


def padded(q: torch.Tensor) -> torch.Tensor:
    """q with its heads padded to what FlashMLA takes."""
    h = q.shape[-2]
    if h >= PEER_HEADS:
        return q
    whole = torch.zeros(*q.shape[:-2], PEER_HEADS, q.shape[-1], device=q.device, dtype=q.dtype)
    whole[..., :h, :] = q
    return whole


def local_lists(s_q: int, topk: int, s_kv: int) -> torch.Tensor:
    """Index lists with locality: of a window twice as wide as topk that moves on slowly, neighbours choose mostly the
    same rows, as an indexer does for neighbouring queries. Every 16th entry is drawn anew for each query."""
    base = torch.stack([torch.randperm(2 * topk, device="cuda")[:topk] for _ in range(-(-s_q // 64))])
    lists = base.repeat_interleave(64, 0)[:s_q].clone()
    lists[:, ::16] = torch.randint(0, 2 * topk, lists[:, ::16].shape, device="cuda")
    start = torch.arange(s_q, device="cuda")[:, None] * max(s_kv - 2 * topk, 0) // s_q
    return (lists + start // 64 * 64).clamp(max=s_kv - 1).to(torch.int32)[:, None]


def prefill(
    record: Record, peer: Any, h: int, d: int, s_kv: int, topk: int = 2048, s_q: int = 2048, kind: str = ""
) -> None:
    """One prefill row; `kind` is "" (random lists), "local" or "lengths"."""
    kv = normal(s_kv, 1, d)
    sets = []
    for _ in range(SETS):
        lists = local_lists(s_q, topk, s_kv) if kind == "local" else random_slots(s_q, 1, topk, slots=s_kv)
        lengths = torch.randint(1, topk + 1, (s_q,), device="cuda", dtype=torch.int32) if kind == "lengths" else None
        sets.append((normal(s_q, h, d), lists, lengths))

    def calls(module: Any, inputs: list[tuple[torch.Tensor, ...]]) -> list:
        return [
            lambda q=q, i=i, n=n: module.flash_mla_sparse_fwd(q, kv, i, d**-0.5, topk_length=n) for q, i, n in inputs
        ]

    ours, theirs = calls(flash_mla, sets), calls(peer, [(padded(q), i, n) for q, i, n in sets])
    error = largest_difference(ours[0]()[0], theirs[0]()[0][:, :h])
    case = f"prefill h {h} d {d} s_q {s_q} s_kv {s_kv} topk {topk} {kind}".strip()
    record.add(case, *time_side_by_side(ours, theirs), error)


def decode_calls(module: Any, sets: list[dict[str, torch.Tensor]]) -> list:
    """One call a set, all sharing one schedule, planned in the first."""
    meta, _ = module.get_mla_metadata()
    return [
        lambda s=s: module.flash_mla_with_kvcache(
            s["q"], s["k_cache"], None, None, 512, meta, is_fp8_kvcache=True, indices=s["indices"],
            extra_k_cache=s.get("extra"), extra_indices_in_kvcache=s.get("extra_indices"),
        )
        for s in sets
    ]  # fmt: skip


def decode(record: Record, peer: Any, case: str, sets: list[dict[str, torch.Tensor]]) -> None:
    h = sets[0]["q"].shape[2]
    ours = decode_calls(flash_mla, sets)
    theirs = decode_calls(peer, [{**s, "q": padded(s["q"])} for s in sets])
    error = largest_difference(ours[0]()[0], theirs[0]()[0][:, :, :h])
    record.add(case, *time_side_by_side(ours, theirs), error)
