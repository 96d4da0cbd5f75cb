"""Calls as engines make them, at sizes drawn at random: decode of V4's three kinds of layers, short prefills, and top-k
of rows that have no more than k entries.

python benchmarks/served.py [--quick] [--only REGEX] [--limit SECONDS] [--seed SEED]

The seed is in the record, and makes the same sizes and inputs again. Kinds:

    V4 swa     lists of a window of 128 rows, lengths on the GPU
    V4 c4a     the same, and up to 512 rows of another cache, one for 4 tokens of the context
    V4 c128a   the same, and up to 64 to 1024 rows, one for 128 tokens of the context
    prefill    32 to 330 queries of 8 to 128 heads, random lists
    few heads  1 to 4096 queries of 16 to 32 heads, random lists
    short rows top-k, contexts of at most k. The logits are no wider than k, or as wide as the longest context that a
               captured step of an engine has to serve, 131072

Contexts are even on a logarithmic scale. A decode has 1 to 3 query tokens a request, and caches have blocks of 64 or
256 rows, those of C128A of 2 or 64. All calls of a replay share one schedule, planned within it. The peer is FlashMLA,
whose heads are padded to multiples of 64, untimed. Beside top-k stand a copy of the results, torch's top-k where logits
are narrow, and vLLM's kernels (CUPY_MLA_INDEXER_PEERS, see `indexer.py`): the best of all is the peer, and `us` has
each. Top-k is timed in three windows, whose median counts. Writes served.json.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import SERVED, judge
from decode_batches import calls
from harness import SETS, Options, Record, flash_mla_peer, load_kernels, peer_name, time_side_by_side
from indexer_peers import PeerProcess, Peers, answer_each, complaining, ready, unpacked
from inputs import normal, random_slots, v4_cache
from rows import Set, decode_sets, padded, prefill_row

import cupy_mla
from cupy_mla import flash_mla

HEADS = (8, 16, 32, 64, 128)
LARGEST = 264  # requests of a decode
LONGEST = 131072  # tokens of a context
WINDOW, C4A = 128, 512
RATIOS = {"swa": 0, "c4a": 4, "c128a": 128}  # tokens of a compressed row of V4's layers; 0: they have none
DRAWN, DRAWN_PREFILL, DRAWN_FEW, DRAWN_SHORT = 8, 24, 12, 8
TOKENS = 1 << 19  # rows of each cache of decode
ROWS = 32768  # of each array of prefill
KS = (512, 2048)
WINDOWS = 3  # of a row of top-k
KERNELS = {  # by what the rows are of
    "decode": r"^attention/fp8_sm90.* DENSE=0 .*TOKEN_BYTES=584|^cache/pack.*TOKEN_BYTES=584",
    "prefill": r"^attention/(bf16|combine|group_lists|sort_lists|order_queries)",
    "topk": r"^indexer/(short_rows|topk\.cu BF16=0)",
}


def logarithmic(rng: random.Random, least: int, most: int) -> int:
    """A number, even on a logarithmic scale."""
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def extra_entries(ratio: int, longest: int) -> int:
    """Of the lists of compressed rows of `ratio` tokens, where no context has more than `longest` tokens."""
    if ratio == RATIOS["c128a"]:
        return -(-longest // (64 * ratio)) * 64
    return C4A if ratio else 0


def decodes(rng: random.Random, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of V4's layers, in the fields that the record gives them."""
    for layers, extra_blocks in (("swa", (0,)), ("c4a", (64, 256)), ("c128a", (2, 64))):
        for h in HEADS:
            batches: set[int] = set()
            while len(batches) < (1 if quick else DRAWN):
                batches.add(logarithmic(rng, 1, LARGEST))
            for b in sorted(batches):
                longest = logarithmic(rng, 4096, LONGEST)
                extra = extra_entries(RATIOS[layers], longest)
                yield {
                    "kind": f"V4 {layers}", "h": h, "b": b, "s_q": rng.randint(1, 3), "topk": WINDOW,
                    "extra_topk": extra, "block": rng.choice((64, 256)), "extra_block": rng.choice(extra_blocks),
                    "longest": longest,
                }  # fmt: skip


def prefills(rng: random.Random, quick: bool) -> Iterator[dict[str, Any]]:
    for kind, drawn, heads, least, most in (
        ("prefill", DRAWN_PREFILL, (8, 128), 32, 330), ("few heads", DRAWN_FEW, (16, 32), 1, 4096)
    ):  # fmt: skip
        drawn = 2 if quick else drawn
        for s_q in sorted({logarithmic(rng, least, most) for _ in range(drawn)}):
            h = 8 * rng.randint(heads[0] // 8, heads[1] // 8)
            yield {"kind": kind, "h": h, "d_qk": rng.choice((512, 576)), "s_q": s_q, "topk": 128 * rng.randint(1, 16)}


def selections(rng: random.Random, quick: bool) -> Iterator[dict[str, Any]]:
    for k in KS:
        for wide in (False, True):
            for b in sorted({logarithmic(rng, 1, 256) for _ in range(1 if quick else DRAWN_SHORT // 2)}):
                width = LONGEST if wide else 64 * rng.randint(1, k // 64)
                yield {"kind": "short rows", "b": b, "width": width, "k": k, "seed": rng.randrange(1 << 31)}


def work_of(row: dict[str, Any]) -> str:
    """Which of KERNELS it needs."""
    return "topk" if row["kind"] == "short rows" else "prefill" if "d_qk" in row else "decode"


def name_of(row: dict[str, Any]) -> str:
    if work_of(row) == "topk":
        return f"short rows b {row['b']} width {row['width']} k {row['k']}"
    if work_of(row) == "prefill":
        return " ".join([row["kind"], *(f"{name} {row[name]}" for name in ("h", "d_qk", "s_q", "topk"))])
    topk = f"{row['topk']}+{row['extra_topk']}" if row["extra_topk"] else row["topk"]
    blocks = f" extra_block {row['extra_block']}" if row["extra_topk"] else ""
    return f"{row['kind']} h {row['h']} b {row['b']} s_q {row['s_q']} topk {topk} block {row['block']}{blocks}"


# --- decode and prefill ---------------------------------------------------------------------------------------


@cache
def cache_of(block: int, number: int) -> torch.Tensor:
    """Full of rows; `number` tells caches of the same block size apart."""
    return v4_cache(TOKENS, block)


def contexts(b: int, longest: int) -> torch.Tensor:
    """Tokens of each request."""
    return torch.exp(torch.rand(b, device="cuda") * math.log(longest)).ceil().clamp(max=longest).to(torch.int32)


def give_served_lengths(sets: list[Set], tokens: torch.Tensor, ratio: int, extra_topk: int) -> None:
    """To all input sets the same: of the window, and of compressed rows where there are any.

    Args:
        tokens: of each request's context.
        ratio: tokens of a compressed row.
        extra_topk: entries of the lists of compressed rows, or 0.
    """
    for s in sets:
        s["topk_length"] = tokens.clamp(max=WINDOW)
        if extra_topk:
            s["extra_topk_length"] = (tokens // ratio).clamp(max=extra_topk)


def input_sets(row: dict[str, Any]) -> list[Set]:
    """Lists without an end of their own: lengths tell it, also where a request has no row of the extra cache yet.

    The sets are a step's layers: they share lengths, as they share a schedule.
    """
    extra = cache_of(row["extra_block"], 1) if row["extra_topk"] else None
    sets = decode_sets(
        row["h"], row["b"], row["s_q"], cache_of(row["block"], 0), row["topk"], slots=TOKENS, extra=extra,
        extra_topk=row["extra_topk"],
    )  # fmt: skip
    ratio = RATIOS[row["kind"].split()[1]]
    give_served_lengths(sets, contexts(row["b"], row["longest"]), ratio, row["extra_topk"])
    return sets


def decode(record: Record, peer: Any, case: str, row: dict[str, Any]) -> None:
    sets = input_sets(row)
    ours, theirs = calls(flash_mla, sets), calls(peer, [{**s, "q": padded(s["q"])} for s in sets])
    error = record.compare(case, ours[0]()[0], theirs[0]()[0][:, :, : row["h"]])
    record.add(case, *time_side_by_side(ours, theirs), error, peer=peer_name(), **row)


def prefill(record: Record, peer: Any, case: str, row: dict[str, Any]) -> None:
    kv = normal(ROWS, 1, row["d_qk"])
    lists = [random_slots(row["s_q"], 1, row["topk"], slots=ROWS) for _ in range(SETS)]
    sets = [(normal(row["s_q"], row["h"], row["d_qk"]), of, None) for of in lists]
    prefill_row(record, peer, case, kv, sets, peer=peer_name(), **row)


# --- top-k ----------------------------------------------------------------------------------------------------


class Selection(NamedTuple):
    """Logits [b, width], of which the first `lens` [b, 1] are of keys, and what is chosen."""

    logits: torch.Tensor
    lens: torch.Tensor
    out: torch.Tensor


def selection_sets(row: dict[str, Any]) -> list[Selection]:
    """The same in every process."""
    torch.manual_seed(row["seed"])
    b, width, k = row["b"], row["width"], row["k"]
    sets = []
    for _ in range(SETS):
        lens = torch.randint(1, min(width, k) + 1, (b, 1), device="cuda", dtype=torch.int32)
        out = torch.empty(b, k, device="cuda", dtype=torch.int32)
        sets.append(Selection(torch.randn(b, width, device="cuda"), lens, out))
    return sets


def serve(pipe: Connection, folder: Path) -> None:
    """Microseconds of vLLM's kernels for each row that is asked for."""
    peers = Peers(folder)
    answer_each(pipe, lambda row: times_of_peers(peers, row, folder.name))


def times_of_peers(peers: Peers, row: dict[str, Any], version: str) -> dict[str, float]:
    """Of those that can serve the row. `cooperative_topk` takes 64 rows at most."""
    sets, times = selection_sets(row), {}
    for name in peers.names:
        if name == "cooperative_topk" and row["b"] > 64:
            continue
        with complaining(f"{version} {name_of(row)} {name}"):
            (times[name],) = time_side_by_side(
                [lambda s=s, name=name: peers.topk_decode(name, s.logits, s.lens, s.out) for s in sets]
            )
    return times


def select(record: Record, processes: list[PeerProcess], case: str, row: dict[str, Any]) -> None:
    sets, k = selection_sets(row), row["k"]
    candidates = {
        "ours": [lambda s=s: cupy_mla.topk_indices(s.logits, k, None, s.lens.view(-1), out=s.out) for s in sets],
        "copy": [partial(s.out.copy_, s.out.clone()) for s in sets],
    }  # fmt: skip
    if row["width"] <= k:
        candidates["torch"] = [lambda s=s: torch.topk(s.logits, row["width"]) for s in sets]
    candidates["ours"][0]()
    at = torch.arange(k, device="cuda", dtype=torch.int32)
    wrong = int((sets[0].out != torch.where(at < sets[0].lens, at, -1)).sum())
    if wrong:
        record.wrong.append(f"{case}: {wrong} entries are not the row's")
    windows: list[dict[str, float]] = []
    for _ in range(WINDOWS):
        window = dict(zip(candidates, time_side_by_side(*candidates.values()), strict=True))
        for process in processes:
            window |= process.ask(row, time.monotonic() + 60)
        windows.append(window)
    us = {name: statistics.median(window[name] for window in windows if name in window) for name in windows[0]}
    ours_us = us.pop("ours")
    best = min(us, key=lambda name: us[name])
    times = {name: round(value, 2) for name, value in us.items()}
    record.add(case, ours_us, us[best], wrong, peer=best, us=times, **row)


def main() -> None:
    options, seed = Options.parse_with_seed(__doc__)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    record = Record("served", options)
    record.note("seed", seed)
    drawn = [*decodes(rng, options.quick), *prefills(rng, options.quick), *selections(rng, options.quick)]
    wanted = [row for row in drawn if record.wants(name_of(row))]
    works = {work_of(row) for row in wanted}
    peer = flash_mla_peer() if works - {"topk"} else None
    processes = [PeerProcess(folder, serve) for folder in unpacked()] if "topk" in works else []
    if processes:
        processes = ready(processes, time.monotonic() + 120)
    load_kernels("|".join(KERNELS[work] for work in works) or "^$")
    for row in wanted:
        case = name_of(row)
        if not record.in_time(case):
            continue
        if work_of(row) == "topk":
            select(record, processes, case, row)
        else:
            {"decode": decode, "prefill": prefill}[work_of(row)](record, peer, case, row)
    for process in processes:
        process.process.kill()
    judge(SERVED, record.rows)
    print(record.write())


if __name__ == "__main__":
    main()
