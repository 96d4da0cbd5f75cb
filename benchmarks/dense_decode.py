"""Dense decode of bf16 rows beside FlashMLA's and FlashAttention 3's: the faster of both counts.

python benchmarks/dense_decode.py [--quick] [--only REGEX] [--limit SECONDS]

Sizes are drawn at random; the seed is in the record. For each number of heads: batches of 1 to 264 requests of 1 to 4
query tokens, and batches of 1 to 4 requests; lengths of 64 to 131,072 rows, equal or drawn for each request from 64 up
to that; at most 2M rows in a batch. Blocks of 64 rows, at random places of the cache.

All calls of a replay have the same lengths, as the layers of a step. They share one schedule of each peer's, and ours
one plan, as in our backends and plug-ins. Schedules and plans are made within the replay. Writes dense_decode.json and
dense_decode.png.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from cases import DENSE, dense_floor_us, judge
from fa3_peer import fa3_dense_calls
from harness import SETS, Call, Options, Record, copy_rate, flash_mla_peer, peer_name, time_side_by_side
from inputs import bf16_cache, normal
from report import plot_dense

from cupy_mla.cuda.program import Plan
from cupy_mla.ops.dense import planned_dense_decode

LARGEST, LONGEST, SHORTEST = 264, 131072, 64
TOKENS, MOST = 1 << 22, 1 << 21  # rows of the cache, and of a batch
HEADS = (8, 16, 32, 64, 128)
DRAWN, DRAWN_SMALL = 12, 4  # batches for each number of heads, and of them with 1 to 4 requests
BLOCK = 64

Set = dict[str, torch.Tensor]


def rows(rng: random.Random, quick: bool) -> Iterator[dict[str, Any]]:
    """What the rows are of, in the fields that the record gives them."""
    for h in HEADS:
        for n in range(4 if quick else DRAWN):
            yield drawn_row(rng, h, few=n < (1 if quick else DRAWN_SMALL))


def drawn_row(rng: random.Random, h: int, few: bool) -> dict[str, Any]:
    """A row of random sizes; `few`: of 1 to 4 requests."""
    b = rng.randint(1, 4) if few else rng.randint(1, LARGEST)
    length = round(math.exp(rng.uniform(math.log(SHORTEST), math.log(min(LONGEST, MOST // b)))))
    s_q = rng.randint(1, 4) if rng.random() < 0.5 else 1
    return {"h": h, "b": b, "s_q": s_q, "length": length, "lengths": rng.choice(("equal", "drawn"))}


def name_of(row: dict[str, Any]) -> str:
    return f"dense h {row['h']} b {row['b']} s_q {row['s_q']} length {row['length']} {row['lengths']}"


def filled_cache() -> torch.Tensor:
    return bf16_cache(TOKENS, BLOCK)


def input_sets(row: dict[str, Any], cache: torch.Tensor) -> list[Set]:
    """Blocks of a set are not those of another where the cache has enough."""
    b, width = row["b"], -(-row["length"] // BLOCK)
    blocks = torch.cat([torch.randperm(len(cache), device="cuda") for _ in range(-(-SETS * b * width // len(cache)))])
    tables = blocks[: SETS * b * width].view(SETS, b, width).to(torch.int32)
    lengths = torch.full((b,), row["length"], device="cuda", dtype=torch.int32)
    if row["lengths"] == "drawn":
        lengths = torch.randint(SHORTEST, row["length"] + 1, (b,), device="cuda", dtype=torch.int32)
    return [
        {"q": normal(b, row["s_q"], row["h"], 576), "k_cache": cache, "table": table, "lengths": lengths}
        for table in tables
    ]


def our_calls(sets: list[Set], cache: torch.Tensor | None = None, q: str = "q") -> list[Call]:
    """One call a set; the plan is a new one each time that all are made.

    Args:
        cache: in place of that of the sets.
        q: the name of the queries.
    """
    plans = [Plan()]

    def call(number: int, s: Set) -> Any:
        if number == 0:
            plans[:] = [Plan()]
        rows = s["k_cache"] if cache is None else cache
        return planned_dense_decode(s[q], rows, s["table"], s["lengths"], 576**-0.5, plans[0])

    return [lambda i=i, s=s: call(i, s) for i, s in enumerate(sets)]


def flash_mla_calls(peer: Any, sets: list[Set]) -> list[Call]:
    """One call a set; the schedule is a new one each time that all are made."""
    meta: list[Any] = []

    def call(number: int, s: Set) -> Any:
        if number == 0:
            meta[:] = [peer.get_mla_metadata()[0]]
        return peer.flash_mla_with_kvcache(s["q"], s["k_cache"], s["table"], s["lengths"], 512, meta[0], causal=True)

    return [lambda i=i, s=s: call(i, s) for i, s in enumerate(sets)]


def main() -> None:
    options = Options.parse(__doc__)
    seed = random.randrange(1 << 31)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    record = Record("dense_decode", options, "ours us,FlashMLA,FA3,ratio,max diff,floor us")
    record.note("seed", seed)
    peer, cache = flash_mla_peer(), filled_cache()
    copied = copy_rate()
    record.note("copy_tb_s", round(copied / 1e12, 2))
    for row in rows(rng, options.quick):
        case = name_of(row)
        if not record.wants(case):
            continue
        sets = input_sets(row, cache)
        ours, theirs, fa3 = our_calls(sets), flash_mla_calls(peer, sets), fa3_dense_calls(sets)
        out = ours[0]()[0]
        error = max(record.compare(case, out, theirs[0]()[0]), record.compare(case, out, fa3[0]()))
        ours_us, theirs_us, fa3_us = time_side_by_side(ours, theirs, fa3)
        best = min(theirs_us, fa3_us)
        tokens = [s["lengths"].sum().item() for s in sets]
        floor, bound = dense_floor_us(tokens, row["h"] * row["s_q"], copied)
        record.add_row(
            {
                "case": case, "ours_us": round(ours_us, 2), "flash_mla_us": round(theirs_us, 2),
                "fa3_us": round(fa3_us, 2), "peer_us": round(best, 2), "ratio": round(best / ours_us, 3),
                "peer": peer_name() if theirs_us <= fa3_us else "FlashAttention 3", "max_abs_err": error, **row,
                "floor_us": round(floor, 2), "bound": bound,
            },
            f"{ours_us:9.1f} {theirs_us:9.1f} {fa3_us:9.1f} {best / ours_us:9.2f} {error:9.1e} {floor:9.1f}",
        )  # fmt: skip
    judge(DENSE, record.rows)
    path = record.write()
    print(path, plot_dense(path))


if __name__ == "__main__":
    main()
