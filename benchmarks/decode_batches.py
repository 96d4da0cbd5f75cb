"""Decode of batches of every size beside FlashMLA's: full lists, short ones, and lists of unequal length; over a bf16
cache beside FlashAttention 3's.

python benchmarks/decode_batches.py [--quick] [--only REGEX] [--limit SECONDS]

Batch sizes are drawn at random, for each kind and number of heads from 1 to 264 query tokens, and some from 1 to 8; the
seed is in the record. Kinds:

    V32         2048 rows a query
    V32 short   lists of 2048 entries of which the first `valid` are rows and the others -1; from 64 query tokens on
    V32 ragged  lengths drawn for each request; FlashMLA has none there, and is timed with full lists
    V4          128 rows of the window and 512 or, from 128 heads on, 1024 others
    V4 ragged   the same, lengths of both lists drawn for each request
    bf16        2048 rows of 576 numbers a query
    bf16 short  the same of which the first `valid` are rows and the others -1; FlashAttention 3 gets their number

All calls of a replay share one schedule, which is planned within it. Writes decode_batches.json and decode_batches.png.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from cases import BATCHES, decode_floor_us, judge
from fa3_peer import fa3_calls, fa3_peer
from harness import SETS, Call, Options, Record, flash_mla_peer, peer_name, time_side_by_side
from inputs import bf16_cache, v4_cache, v32_cache
from report import plot_batches
from rows import Set, decode_call, decode_sets, padded

from cupy_mla import flash_mla

LARGEST, DRAWN = 264, 24  # batches are 1 to LARGEST; so many are drawn for each kind and number of heads,
SMALL, DRAWN_SMALL = 8, 2  # and so many of up to SMALL
TOKENS = 1 << 21
TOPK = 2048
HEADS = (8, 16, 32, 64, 128)
VALID = (100, 512, 1024)
BF16_VALID = (512, 1024)
PLOTTED = ("V32", "V4", "bf16")  # with a floor
BF16_KINDS = {"bf16", "bf16 short"}  # whose peer is FlashAttention 3


def batches(rng: random.Random, quick: bool, least: int = 1, count: int = DRAWN) -> list[tuple[int, int]]:
    """Requests, and query tokens of each: mostly one, sometimes two."""
    drawn = rng.sample(range(least, LARGEST + 1), 3 if quick else count)
    if least <= SMALL:
        drawn += rng.sample([b for b in range(least, SMALL + 1) if b not in drawn], 1 if quick else DRAWN_SMALL)
    return [(b, 1) if b % 2 or rng.random() < 0.7 else (b // 2, 2) for b in sorted(drawn)]


def rows(rng: random.Random, quick: bool) -> Iterator[dict[str, Any]]:
    """What the rows are of, in the fields that the record gives them."""
    for h in HEADS:
        for kind in ("V32", "V32 ragged", "V4", "V4 ragged"):
            extra = 0 if kind.startswith("V32") else 1024 if h >= 128 else 512
            for b, s_q in batches(rng, quick):
                yield {"kind": kind, "h": h, "b": b, "s_q": s_q, "topk": 128 if extra else TOPK, "extra_topk": extra}
    for h in HEADS:
        for valid in VALID:
            for b, s_q in batches(rng, quick, 64, DRAWN if h >= 64 else DRAWN // len(VALID)):
                yield {
                    "kind": "V32 short", "h": h, "b": b, "s_q": s_q, "topk": TOPK, "extra_topk": 0, "valid": valid
                }  # fmt: skip
    for h in HEADS:
        row = {"kind": "bf16", "h": h, "topk": TOPK, "extra_topk": 0}
        for b, s_q in batches(rng, quick):
            yield {**row, "b": b, "s_q": s_q}
        for valid in BF16_VALID:
            for b, s_q in batches(rng, quick, count=DRAWN // 4):
                yield {**row, "kind": "bf16 short", "b": b, "s_q": s_q, "valid": valid}


def name_of(row: dict[str, Any]) -> str:
    topk = f"{row['topk']}+{row['extra_topk']}" if row["extra_topk"] else row["topk"]
    valid = f" valid {row['valid']}" if "valid" in row else ""
    return f"{row['kind']} h {row['h']} b {row['b']} s_q {row['s_q']} topk {topk}{valid}"


def lengths(b: int, most: int) -> torch.Tensor:
    return torch.randint(1, most + 1, (b,), device="cuda", dtype=torch.int32)


def give_lengths(sets: list[Set], row: dict[str, Any]) -> None:
    """The same to all input sets, as to a step's layers: a schedule is made for them."""
    both = {"topk_length": lengths(row["b"], row["topk"])}
    if row["extra_topk"]:
        both["extra_topk_length"] = lengths(row["b"], row["extra_topk"])
    for s in sets:
        s |= both


def without(indices: torch.Tensor, length: torch.Tensor | int) -> torch.Tensor:
    """The lists with -1 from `length` on."""
    at = torch.arange(indices.shape[-1], device="cuda")
    limit = length if isinstance(length, int) else length[:, None, None]
    return torch.where(at < limit, indices, -1)


def input_sets(row: dict[str, Any], cache: Any, extra: Any) -> list[Set]:
    sets = decode_sets(
        row["h"], row["b"], row["s_q"], cache, row["topk"], slots=TOKENS, extra=extra, extra_topk=row["extra_topk"]
    )
    for s in sets:
        if "valid" in row:
            s["indices"] = without(s["indices"], row["valid"])
    if row["kind"].endswith("ragged"):
        give_lengths(sets, row)
    return sets


def calls(module: Any, sets: list[Set]) -> list[Call]:
    """One call a set. The schedule is a new one each time that all are made."""
    meta: list[Any] = []

    def call(number: int, s: Set) -> Any:
        if number == 0:
            meta[:] = [module.get_mla_metadata()[0]]
        return decode_call(module, meta[0], s)

    return [lambda i=i, s=s: call(i, s) for i, s in enumerate(sets)]


def peer_calls(peer: Any, row: dict[str, Any], sets: list[Set]) -> tuple[list[Call], Call]:
    """One call of the peer's a set, and one of the first set whose result ours should have."""
    if row["kind"] in BF16_KINDS:
        timed = fa3_calls(sets, row.get("valid"))
        return timed, timed[0]
    sets = alike = [{**s, "q": padded(s["q"])} for s in sets]
    if row["kind"] == "V32 ragged":  # FlashMLA takes no lengths here: full lists, and for the comparison -1
        alike = [{**s, "indices": without(s["indices"], s["topk_length"]), "topk_length": None} for s in sets]
        sets = [{**s, "topk_length": None} for s in sets]
    compared = calls(peer, alike)[0]
    return calls(peer, sets), lambda: compared()[0][:, :, : row["h"]]


def main() -> None:
    options = Options.parse(__doc__)
    seed = random.randrange(1 << 31)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    record = Record("decode_batches", options)
    record.note("seed", seed)
    wanted = [row for row in rows(rng, options.quick) if record.wants(name_of(row))]
    kinds = {row["kind"] for row in wanted}
    if BF16_KINDS & kinds:
        fa3_peer()
    peer = flash_mla_peer() if kinds - BF16_KINDS else None
    caches = {
        "V32": cache(lambda: v32_cache(TOKENS)), "V4": cache(lambda: v4_cache(TOKENS, 256)),
        "bf16": cache(lambda: bf16_cache(TOKENS)),
    }  # fmt: skip
    extra_cache = cache(lambda: v4_cache(TOKENS, 64))
    for row in wanted:
        case = name_of(row)
        if not record.in_time(case):
            continue
        sets = input_sets(row, caches[row["kind"].split()[0]](), extra_cache() if row["extra_topk"] else None)
        theirs, compared = peer_calls(peer, row, sets)
        ours = calls(flash_mla, sets)
        error = record.compare(case, ours[0]()[0], compared())
        times = time_side_by_side(ours, theirs)
        floor = {} if row["kind"] not in PLOTTED else {"floor_us": round(decode_floor_us(case, SETS), 2)}
        name = "FlashAttention 3" if row["kind"] in BF16_KINDS else peer_name()
        record.add(case, *times, error, peer=name, **row, **floor)
    judge(BATCHES, record.rows)
    path = record.write()
    print(path, plot_batches(path))


if __name__ == "__main__":
    main()
