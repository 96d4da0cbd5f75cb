"""Rows of the attention benchmarks: one call of ours beside one of FlashMLA's on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import SETS, Record, time_side_by_side
from inputs import normal, random_slots

from cupy_mla import flash_mla, layouts, sparse_decode

PEER_HEADS = 64  # heads are padded to multiples of this for the peer, untimed


def padded(q: torch.Tensor) -> torch.Tensor:
    """q with its heads padded to what FlashMLA takes."""
    h = q.shape[-2]
    heads = -(-h // PEER_HEADS) * PEER_HEADS
    if h == heads:
        return q
    whole = torch.zeros(*q.shape[:-2], heads, q.shape[-1], device=q.device, dtype=q.dtype)
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
    """One prefill row, if wanted; `kind` is "" (random lists), "local" or "lengths"."""
    case = f"prefill h {h} d {d} s_q {s_q} s_kv {s_kv} topk {topk} {kind}".strip()
    if not record.wants(case):
        return
    kv = normal(s_kv, 1, d)
    sets = []
    for _ in range(SETS):
        lists = local_lists(s_q, topk, s_kv) if kind == "local" else random_slots(s_q, 1, topk, slots=s_kv)
        lengths = torch.randint(1, topk + 1, (s_q,), device="cuda", dtype=torch.int32) if kind == "lengths" else None
        sets.append((normal(s_q, h, d), lists, lengths))
    prefill_row(record, peer, case, kv, sets)


def prefill_row(
    record: Record,
    peer: Any,
    case: str,
    kv: torch.Tensor,
    sets: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
    /,
    **more: Any,
) -> None:
    """A row of prefills of q, lists and lengths over one array of rows; `more` goes into the record."""
    _, h, d = sets[0][0].shape

    def calls(module: Any, inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> list:
        return [
            lambda q=q, i=i, n=n: module.flash_mla_sparse_fwd(q, kv, i, d**-0.5, topk_length=n) for q, i, n in inputs
        ]

    ours, theirs = calls(flash_mla, sets), calls(peer, [(padded(q), i, n) for q, i, n in sets])
    error = record.compare(case, ours[0]()[0], theirs[0]()[0][:, :h])
    record.add(case, *time_side_by_side(ours, theirs), error, **more)


Set = dict[str, torch.Tensor]
MakeSets = Callable[[], list[Set]]


def decode_sets(
    h: int,
    b: int,
    s_q: int,
    cache: torch.Tensor,
    topk: int,
    *,
    slots: int,
    extra: torch.Tensor | None = None,
    extra_topk: int = 0,
) -> list[Set]:
    """Input sets of a decode: random queries, and lists over the first `slots` slots of each cache."""
    d_qk = 512 if cache.shape[-1] == layouts.V4_FP8.last_axis else 576
    sets = [
        {"q": normal(b, s_q, h, d_qk), "k_cache": cache, "indices": random_slots(b, s_q, topk, slots=slots)}
        for _ in range(SETS)
    ]
    if extra is not None:
        sets = [{**s, "extra": extra, "extra_indices": random_slots(b, s_q, extra_topk, slots=slots)} for s in sets]
    return sets


def decode_calls(module: Any, sets: list[Set], **more: Any) -> list:
    """One call a set, all sharing one schedule, planned in the first."""
    meta, _ = module.get_mla_metadata()
    return [lambda s=s: decode_call(module, meta, s, **more) for s in sets]


def decode_call(module: Any, meta: Any, s: Set, **more: Any) -> Any:
    """FlashMLA's decode, ours or its own, of an input set with a schedule; `more` are arguments that ours alone has."""
    return module.flash_mla_with_kvcache(
        s["q"], s["k_cache"], None, None, 512, meta, is_fp8_kvcache=s["k_cache"].dtype == torch.uint8,
        indices=s["indices"], topk_length=s.get("topk_length"), extra_k_cache=s.get("extra"),
        extra_indices_in_kvcache=s.get("extra_indices"), extra_topk_length=s.get("extra_topk_length"), **more,
    )  # fmt: skip


def own_decode_calls(sets: list[Set], **settings: Any) -> list:
    """One call of `sparse_decode` a set, with settings of its own."""
    return [
        lambda s=s: sparse_decode(
            s["q"], s["k_cache"], s["indices"], s["q"].shape[-1] ** -0.5, extra_k_cache=s.get("extra"),
            extra_indices=s.get("extra_indices"), **settings,
        )
        for s in sets
    ]  # fmt: skip


def flattened_calls(peer: Any, sets: list[Set]) -> list:
    """What FlashMLA's users run over a paged bf16 cache: its prefill kernel on the flattened cache."""
    flat = [
        (s["q"].flatten(0, 1), s["k_cache"].view(-1, 1, s["q"].shape[-1]), s["indices"].flatten(0, 1)[:, None])
        for s in sets
    ]
    return [lambda q=q, kv=kv, i=i: peer.flash_mla_sparse_fwd(q, kv, i, q.shape[-1] ** -0.5) for q, kv, i in flat]


def decode(record: Record, peer: Any, case: str, make_sets: MakeSets, **more: Any) -> None:
    """One decode row, if wanted; `more` goes into the record."""
    if not record.wants(case):
        return
    sets = make_sets()
    b, s_q, h, _ = sets[0]["q"].shape
    ours = decode_calls(flash_mla, sets)
    their_calls = decode_calls if sets[0]["k_cache"].dtype == torch.uint8 else flattened_calls
    theirs = their_calls(peer, [{**s, "q": padded(s["q"])} for s in sets])
    error = record.compare(case, ours[0]()[0], theirs[0]()[0].view(b, s_q, -1, 512)[:, :, :h])
    record.add(case, *time_side_by_side(ours, theirs), error, **more)
