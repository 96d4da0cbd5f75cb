"""Prefill of few queries beside FlashMLA's, and of a prompt's first tokens, whose lists are not full.

python benchmarks/small_prefill.py [--quick] [--only REGEX] [--limit SECONDS]

Numbers of queries are drawn at random; the seed is in the record. Kinds:

    small    1 to 264 queries, random lists of 2048 rows
    causal   the first 2048 tokens of a prompt: token t has t + 1 rows, and -1 behind them

Writes small_prefill.json.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from cases import SMALL_PREFILL, judge
from harness import SETS, Options, Record, flash_mla_peer, peer_name
from inputs import normal, random_slots
from rows import prefill_row

LARGEST, DRAWN = 264, 24
TOPK, ROWS = 2048, 32768


def rows(rng: random.Random, quick: bool) -> Iterator[dict[str, Any]]:
    """What the rows are of, in the fields that the record gives them."""
    for h in (64, 128):
        for d in (576, 512):
            for s_q in sorted(rng.sample(range(1, LARGEST + 1), 2 if quick else DRAWN // 2)):
                yield {"kind": "small", "h": h, "d_qk": d, "s_q": s_q, "topk": TOPK}
            yield {"kind": "causal", "h": h, "d_qk": d, "s_q": TOPK, "topk": TOPK}


def lists(row: dict[str, Any]) -> torch.Tensor:
    """[s_q, 1, topk] rows."""
    s_q, topk = row["s_q"], row["topk"]
    if row["kind"] == "small":
        return random_slots(s_q, 1, topk, slots=ROWS)
    token = torch.arange(topk, device="cuda", dtype=torch.int32)
    return torch.where(token <= token[:s_q, None], token, -1)[:, None]


def main() -> None:
    options = Options.parse(__doc__)
    seed = random.randrange(1 << 31)
    torch.manual_seed(seed)
    peer = flash_mla_peer()
    record = Record("small_prefill", options)
    record.note("seed", seed)
    for row in rows(random.Random(seed), options.quick):
        case = " ".join([row["kind"], *(f"{name} {row[name]}" for name in ("h", "d_qk", "s_q", "topk"))])
        if not record.wants(case):
            continue
        kv = normal(ROWS, 1, row["d_qk"])
        sets = [(normal(row["s_q"], row["h"], row["d_qk"]), lists(row), None) for _ in range(SETS)]
        prefill_row(record, peer, case, kv, sets, peer=peer_name(), **row)
    judge(SMALL_PREFILL, record.rows)
    print(record.write())


if __name__ == "__main__":
    main()
