"""The portable kernels (mma.sync) beside FlashMLA's Hopper kernels, on the rows of the performance notes.

python benchmarks/portable.py [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from harness import SETS, Record, flash_mla_peer, largest_difference, time_side_by_side
from inputs import normal, random_slots, v4_cache, v32_cache

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


def prefill(record: Record, peer: object, h: int, d: int, s_kv: int, topk: int = 2048, s_q: int = 2048) -> None:
    kv = normal(s_kv, 1, d)
    sets = [(normal(s_q, h, d), random_slots(s_q, 1, topk, slots=s_kv)) for _ in range(SETS)]
    padded_sets = [(padded(q), idx) for q, idx in sets]
    scale = d**-0.5
    ours = [lambda q=q, i=i: flash_mla.flash_mla_sparse_fwd(q, kv, i, scale) for q, i in sets]
    theirs = [lambda q=q, i=i: peer.flash_mla_sparse_fwd(q, kv, i, scale) for q, i in padded_sets]
    error = largest_difference(ours[0]()[0], theirs[0]()[0][:, :h])
    record.add(f"prefill h {h} d {d} s_q {s_q} s_kv {s_kv} topk {topk}", *time_side_by_side(ours, theirs), error)


def decode_calls(module: object, sets: list[dict[str, torch.Tensor]]) -> list:
    """One call a set, all sharing one schedule, planned in the first."""
    meta, _ = module.get_mla_metadata()
    return [
        lambda s=s: module.flash_mla_with_kvcache(
            s["q"], s["k_cache"], None, None, 512, meta, is_fp8_kvcache=True, indices=s["indices"],
            extra_k_cache=s.get("extra"), extra_indices_in_kvcache=s.get("extra_indices"),
        )
        for s in sets
    ]  # fmt: skip


def decode(record: Record, peer: object, case: str, sets: list[dict[str, torch.Tensor]]) -> None:
    h = sets[0]["q"].shape[2]
    ours = decode_calls(flash_mla, sets)
    theirs = decode_calls(peer, [{**s, "q": padded(s["q"])} for s in sets])
    error = largest_difference(ours[0]()[0], theirs[0]()[0][:, :, :h])
    record.add(case, *time_side_by_side(ours, theirs), error)


def v32_rows(quick: bool) -> Iterator[tuple[str, list[dict[str, torch.Tensor]]]]:
    per_request, topk = 32768, 2048
    batches = [(1, 1), (2, 1), (8, 1), (32, 1), (64, 1), (128, 1), (128, 2)]
    cache = v32_cache((32 if quick else 128) * per_request)
    for h in (16, 64, 128):
        for b, s_q in batches[::3] if quick else batches:
            slots = min(b, 32 if quick else 128) * per_request
            sets = [
                {"q": normal(b, s_q, h, 576), "k_cache": cache, "indices": random_slots(b, s_q, topk, slots=slots)}
                for _ in range(SETS)
            ]
            yield f"V32 h {h} b {b} s_q {s_q} topk {topk}", sets


def v4_rows(quick: bool) -> Iterator[tuple[str, list[dict[str, torch.Tensor]]]]:
    tokens = 1 << 20
    swa, extra = v4_cache(tokens, 256), v4_cache(tokens, 64)
    for h, topk, batches in ((64, 512, (2, 64, 128, 256)), (128, 1024, (2, 64, 128))):
        for b in batches[:2] if quick else batches:
            sets = [
                {
                    "q": normal(b, 2, h, 512), "k_cache": swa, "indices": random_slots(b, 2, 128, slots=tokens),
                    "extra": extra, "extra_indices": random_slots(b, 2, topk, slots=tokens),
                }
                for _ in range(SETS)
            ]  # fmt: skip
            yield f"V4 h {h} b {b} s_q 2 topk 128+{topk}", sets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rows only")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    peer = flash_mla_peer()
    record = Record("portable")
    for d in (576, 512):
        for h in (64, 128):
            for s_kv in (32768,) if quick else (8192, 32768, 131072):
                prefill(record, peer, h, d, s_kv)
    for rows in (v32_rows, v4_rows):
        for case, sets in rows(quick):
            decode(record, peer, case, sets)
    print(f"geometric mean {record.geometric_mean():.2f}, least {min(r['ratio'] for r in record.rows):.2f}")
    record.write()


if __name__ == "__main__":
    main()
