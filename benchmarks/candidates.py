"""Times of attention calls of random sizes in every way that they may be served: each kernel, each division.

python benchmarks/candidates.py [--seconds N] [--only REGEX]

`fit_times.py` finds from this record what work takes on a GPU, and the replay test how good the choices are that are
made with it. Sizes are drawn in rounds, one for each group and number of heads, so that a run that ends early has all
of them. Groups:

    V32, V4, bf16           decode of 1 to 264 query tokens, mostly of 2048 rows (V4: 128 of the window, alone and with
                            the compressed rows that its layers have)
    V32 ragged, ...         the same, with a length for each request
    V4 served               V4's layers as engines call them: 8 to 264 requests of 1 to 3 query tokens, windows that
                            are mostly full, and compressed rows by the length of each context
    prefill                 1 to 330 queries
    large prefill           1024 to 3072 queries; random lists, lists with locality, either with lengths, or a prompt's
                            first tokens
    portable                any of these on the kernel for all GPUs, in both its shapes

A row has the fields of a call, `chosen`, the kernel and division that the package chooses, and `us`: microseconds by
kernel and division, replays of CUDA graphs in turn. Writes candidates.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from decode_batches import calls, give_lengths, lengths
from harness import BEGAN, RESULTS, SETS, Call, environment, graph_of, load_kernels, replay_times
from inputs import bf16_cache, normal, random_slots, v4_cache, v32_cache
from recorded import problem_of
from rows import decode_sets, local_lists
from served import LONGEST, RATIOS, WINDOW, contexts, extra_entries, give_served_lengths, logarithmic

import cupy_mla
from cupy_mla import flash_mla
from cupy_mla.cuda import driver
from cupy_mla.cuda.attention.choose import choose
from cupy_mla.cuda.attention.divide import (
    Clusters,
    Division,
    Shares,
    Teams,
    Whole,
    largest_cluster,
    split_numbers,
)
from cupy_mla.cuda.attention.kernels import (
    bf16_cluster_sm90,
    bf16_few_heads_sm90,
    bf16_grouped_sm90,
    fp8_short_sm90,
    fp8_sm90,
    portable,
)
from cupy_mla.cuda.attention.problem import Problem
from cupy_mla.cuda.driver import MAX_CLUSTER
from cupy_mla.cuda.paging import ceil_div, fitting

LARGEST = {"decode": 264, "prefill": 330}  # query tokens of a small call
TOKENS = 1 << 21  # of a cache
ROWS = 32768  # of a prefill
REPEATS = 6  # even, see harness.REPEATS
MOST_SPLITS = 5  # numbers of splits of one kind that are measured for one call
HEADS = (8, 16, 32, 64, 128)
OTHER_HEADS = {8: (2, 4, 7), 16: (12, 10), 32: (20, 24), 64: (40, 48), 128: (80, 96, 112)}
USUAL = 2048  # entries
LISTS = "random", "local", "lengths", "local lengths", "causal"  # of a large prefill; lengths: one a query
KINDS = "V32", "V32 ragged", "V4", "V4 ragged", "V4 served", "bf16", "bf16 ragged", "prefill", "large prefill"
FOLDED = (math.sqrt(5) - 1) / 2

Row = dict[str, Any]
Way = tuple[str, Division]  # a kernel and a division


# --- sizes ----------------------------------------------------------------------------------------------------


def tokens(kind: str, turn: int, start: float) -> int:
    """A number of query tokens; those of successive turns are spread evenly, half of them over the small ones."""
    u = (start + turn * FOLDED) % 1
    most = LARGEST["prefill" if "prefill" in kind else "decode"]
    return round(math.exp(math.log(40) * u * 2)) if u < 0.5 else 1 + int(most * (2 * u - 1))


def v4_rows(rng: random.Random, h: int) -> tuple[int, int]:
    """Of the window and of the compressed cache."""
    usual, u = (128, 1024 if h > 64 else 512), rng.random()
    if u < 0.45:
        return usual
    if u < 0.65:  # layers without compressed rows, and those that have one for 128 tokens
        return 128, 64 * rng.randint(0, 2)
    return (64 * rng.randint(1, 32), 0) if u < 0.75 else (128, 64 * rng.randint(1, 30))


def decode_row(rng: random.Random, kind: str, h: int, n: int) -> Row:
    ragged = kind.endswith("ragged")
    s_q = rng.choice([of for of in (2, 3) if n % of == 0] or [1]) if rng.random() < 0.3 else 1
    b = n // s_q
    topk, extra = USUAL if rng.random() < 0.6 else 64 * rng.randint(1, 32), 0
    if kind.startswith("V4"):
        topk, extra = v4_rows(rng, h)
    return {"kind": kind, "h": h, "b": b, "s_q": s_q, "topk": topk, "extra_topk": extra, "lengths": int(ragged)}


def served_row(rng: random.Random, kind: str, h: int, n: int) -> Row:
    """One of V4's layers; `longest` is the length that no context exceeds."""
    ratio, longest = rng.choice([*RATIOS.values()]), logarithmic(rng, 4096, LONGEST)
    return {
        "kind": kind, "h": h, "b": max(8, n), "s_q": rng.randint(1, 3), "topk": WINDOW,
        "extra_topk": extra_entries(ratio, longest), "lengths": 1, "ratio": ratio, "longest": longest,
    }  # fmt: skip


def prefill_row(rng: random.Random, kind: str, h: int, n: int) -> Row:
    large = kind.startswith("large")
    n = 64 * rng.randint(16, 48) if large else n
    topk = USUAL if rng.random() < 0.4 else 64 * rng.randint(2, 32)
    chosen = rng.choice(LISTS if large else ("random", "random", "lengths"))
    return {"kind": kind, "h": h, "d_qk": rng.choice((576, 512)), "s_q": n, "topk": topk, "lists": chosen}


def row_of(rng: random.Random, kind: str, h: int, n: int) -> Row:
    """A row of a kind, of so many heads and query tokens; `V4 served`: requests."""
    make = prefill_row if "prefill" in kind else served_row if "served" in kind else decode_row
    return make(rng, kind, h, n)


def drawn(rng: random.Random) -> Iterator[Row]:
    """Sizes without end."""
    starts: dict[Any, float] = {}
    for turn in range(1 << 30):
        for h in HEADS:
            for kind in KINDS:
                if kind == "large prefill" and turn % 2 == HEADS.index(h) % 2:
                    continue
                heads = rng.choice(OTHER_HEADS[h]) if rng.random() < 0.2 else h
                n = tokens(kind, turn, starts.setdefault((kind, h), rng.random()))
                yield row_of(rng, kind, heads, n)
        kind = rng.choice(("V32", "V4", "bf16", "V32", "prefill"))
        n = tokens(kind, turn, starts.setdefault("portable", rng.random()))
        row = row_of(rng, kind, rng.choice(HEADS), n)
        for name in ("portable", "portable_99kb"):
            yield {**row, "kernel": name}


# --- candidates -----------------------------------------------------------------------------------------------


def some(rng: random.Random, found: list[Any], most: int = MOST_SPLITS) -> list[Any]:
    """Some of a list, the last one among them."""
    return found if len(found) <= most else [*rng.sample(found[:-1], most - 1), found[-1]]


def ways(rng: random.Random, p: Problem) -> Iterator[Way]:
    """Every plausible way to serve a call on Hopper."""
    gpu, h, tiles, items = p.gpu, p.heads, p.tiles, p.items
    quantized, sms = p.layout.quantized, gpu.sms

    def fits(heads: int, splits: int, at_once: tuple[int, ...]) -> bool:
        cluster = largest_cluster(splits)
        return items(heads) * (splits // cluster) <= at_once[cluster - 1]

    if quantized:
        at_once = gpu.clusters_at_once(fp8_sm90.cluster_kernel())
        for heads in fp8_sm90.cta_heads(h):
            work = items(heads)
            yield "fp8_sm90", Whole(heads)
            if work * tiles > 8:
                yield "fp8_sm90", Shares(heads)
            if p.uneven:
                yield from [("fp8_sm90", Teams(heads))] if work <= sms else []
            else:
                found = [n for n in split_numbers(tiles, MAX_CLUSTER) if work * n <= sms]
                yield from (("fp8_sm90", Teams(heads, n)) for n in some(rng, found, 3))
            found = [n for n in split_numbers(tiles, MAX_CLUSTER) if fits(heads, n, at_once)]
            yield from (("fp8_sm90", Clusters(heads, n, n)) for n in some(rng, found))
    if fp8_short_sm90.serves(p):
        yield from (("fp8_short_sm90", division) for division in some(rng, [*fp8_short_sm90.candidates(p)]))
    if not quantized:
        most, at_once = fitting(bf16_few_heads_sm90.HEADS, h), gpu.clusters_at_once(bf16_cluster_sm90.cluster_kernel())
        tried = (16, 32) if most == 32 else (most,)
        for heads in tried if h <= 16 or items(32) <= sms else ():
            yield "bf16_few_heads_sm90", Whole(heads)
            found = [n for n in split_numbers(tiles, sms) if items(heads) * n <= 2.1 * sms]
            for n in some(rng, found):
                if largest_cluster(n) > 1 and fits(heads, n, at_once):
                    yield "bf16_few_heads_sm90", Clusters(heads, n, largest_cluster(n))
                yield from [("bf16_few_heads_sm90", Clusters(heads, n, 1))] if rng.random() < 0.4 else []
        if items(most) > sms:
            yield "bf16_few_heads_sm90", Whole(most, 2)
        yield from flat_ways(rng, p)


def flat_ways(rng: random.Random, p: Problem) -> Iterator[Way]:
    """Those of the kernels for flat bf16 rows."""
    gpu, h, queries, pairs, work = p.gpu, p.heads, p.queries, p.pairs, p.items(64)
    at_once = gpu.clusters_at_once(bf16_cluster_sm90.cluster_kernel())
    for heads in bf16_cluster_sm90.HEADS:
        of = queries * ceil_div(h, heads)
        found = [n for n in split_numbers(pairs, MAX_CLUSTER) if of <= at_once[n - 1]]
        if heads == bf16_cluster_sm90.HEADS[0] or h > heads // 2:
            yield from (("bf16_cluster_sm90", Clusters(heads, n, n)) for n in some(rng, found, 4))
    if h > 4:
        yield "bf16_sm90", Whole(64)
        if work * pairs > 8 and work <= 6 * gpu.sms:
            yield "bf16_shares_sm90", Shares(64)
        found = [n for n in split_numbers(pairs, MAX_CLUSTER) if gpu.sms / 2 < work * n <= gpu.sms]
        yield from (("bf16_shares_sm90", Shares(64, splits=n)) for n in some(rng, found, 2))
    if p.prefill and h <= bf16_grouped_sm90.MAX_HEADS and queries > gpu.sms:
        yield "bf16_grouped_sm90", Whole(64, queries=bf16_grouped_sm90.group_queries(h))


def portable_ways(rng: random.Random, p: Problem) -> Iterator[Way]:
    """Those of a shape of the kernel for all GPUs."""
    heads, gpu, kernel = fitting(portable.HEADS, p.heads), p.gpu, p.kernel
    steps, work = ceil_div(p.rows, portable.STEP_ROWS), p.items(heads)
    yield kernel, Whole(heads)
    found = [n for n in split_numbers(steps, 2 * gpu.sms) if work * n <= 2.1 * gpu.sms]
    yield from ((kernel, Clusters(heads, n, 1)) for n in some(rng, found))
    if work * steps > 8:
        yield kernel, Shares(heads)


# --- measuring ------------------------------------------------------------------------------------------------


@cache
def caches() -> dict[str, Callable[[], torch.Tensor]]:
    """The main caches, and `extra`, made when they are asked for."""
    return {
        "V32": cache(lambda: v32_cache(TOKENS)), "V4": cache(lambda: v4_cache(TOKENS, 256)),
        "bf16": cache(lambda: bf16_cache(TOKENS)), "extra": cache(lambda: v4_cache(TOKENS, 64)),
    }  # fmt: skip


def decode_calls(row: Row) -> Callable[[], list[Call]]:
    """Makes the calls of a decode on its input sets, which share one schedule."""
    extra = caches()["extra"]() if row["extra_topk"] else None
    sets = decode_sets(
        row["h"], row["b"], row["s_q"], caches()[row["kind"].split()[0]](), row["topk"], slots=TOKENS, extra=extra,
        extra_topk=row["extra_topk"],
    )  # fmt: skip
    if "longest" in row:
        give_served_lengths(sets, contexts(row["b"], row["longest"]), row["ratio"], row["extra_topk"])
    elif row["lengths"]:
        give_lengths(sets, row)
    return lambda: calls(flash_mla, sets)


def prefill_calls(row: Row) -> Callable[[], list[Call]]:
    """The same of a prefill."""
    h, d, s_q, topk = row["h"], row["d_qk"], row["s_q"], row["topk"]
    kv, sets = normal(ROWS, 1, d), []
    for _ in range(SETS):
        of = local_lists(s_q, topk, ROWS) if "local" in row["lists"] else random_slots(s_q, 1, topk, slots=ROWS)
        if row["lists"] == "causal":
            token = torch.arange(topk, device="cuda", dtype=torch.int32)
            of = torch.where(token <= torch.arange(s_q, device="cuda")[:, None], token, -1).to(torch.int32)[:, None]
        sets.append((normal(s_q, h, d), of, lengths(s_q, topk) if "lengths" in row["lists"] else None))
    return lambda: [
        lambda q=q, i=i, n=n: flash_mla.flash_mla_sparse_fwd(q, kv, i, d**-0.5, topk_length=n) for q, i, n in sets
    ]


def measure(rng: random.Random, gpu: driver.Gpu, row: Row) -> Row:
    """The row with the times of its candidates."""
    if gpu.capability != 90:  # no other kernel serves it
        row = {**row, "kernel": "portable" if gpu.shared_kb >= portable.LARGE else "portable_99kb"}
    problem = problem_of(gpu, row)._replace(kernel=row.get("kernel", ""))
    chosen = choose(problem)[:2]
    found = list((portable_ways if problem.kernel else ways)(rng, problem))
    found = list(dict.fromkeys([chosen, *found]))
    rng.shuffle(found)
    make = (prefill_calls if "prefill" in row["kind"] else decode_calls)(row)
    return {**row, "chosen": f"{chosen[0]} {chosen[1]}", "us": times_of(found, make)}


def times_of(found: list[Way], make: Callable[[], list[Call]]) -> dict[str, float]:
    """Microseconds of a call by each way, by its text."""
    graphs = []
    for kernel, division in found:
        # Where the kernel is forced, it groups lists whatever they share; so the division alone names it.
        with cupy_mla.forced(None if kernel == "bf16_grouped_sm90" else kernel, division):
            graphs.append(graph_of(make()))
    times = replay_times(graphs, REPEATS)
    return {f"{kernel} {of}": round(t / SETS, 2) for (kernel, of), t in zip(found, times, strict=True)}


def run(
    name: str,
    description: str | None,
    kernels: str,
    seconds: float,
    drawn: Callable[[random.Random], Iterator[Row]],
    measure: Callable[[random.Random, driver.Gpu, Row], Row],
) -> None:
    """A program that measures rows until its time is over, and writes the record of that name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=seconds, help="after which no row is begun")
    parser.add_argument("--only", metavar="REGEX", default="", help="the kinds in whose name this is found")
    options = parser.parse_args()
    seed = random.randrange(1 << 31)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    load_kernels(kernels)
    print(f"compiled after {time.monotonic() - BEGAN:.0f} s", flush=True)
    gpu = driver.gpu(0)
    at_once = {
        module.__name__.rpartition(".")[2]: gpu.clusters_at_once(kernel)
        for module, kernel in (
            (fp8_sm90, fp8_sm90.cluster_kernel()), (bf16_cluster_sm90, bf16_cluster_sm90.cluster_kernel()),
        )
        if kernel.suits(gpu.capability)
    }  # fmt: skip
    path = Path(os.environ.get("OUT", RESULTS)) / f"{name}.json"
    rows: list[Row] = []

    def write() -> None:
        head = {**environment(), "seed": seed, "capability": gpu.capability, "sms": gpu.sms, "shared_kb": gpu.shared_kb}
        head["clusters_at_once"] = at_once
        lines = ",\n".join(json.dumps(row) for row in rows)
        path.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n]\n}}\n')

    for row in drawn(rng):
        if time.monotonic() - BEGAN > options.seconds:
            break
        if re.search(options.only, row["kind"]):
            rows.append(measure(rng, gpu, row))
            best = min(rows[-1]["us"], key=rows[-1]["us"].get)
            us, chosen = rows[-1]["us"], rows[-1]["chosen"]
            print(f"{row} {len(us)}: {chosen} {us[chosen]}, {best} {us[best]}", flush=True)
            if torch.cuda.memory_reserved() > 30 << 30:
                torch.cuda.empty_cache()
            if len(rows) % 100 == 0:
                write()
    write()
    print(f"{path}: {len(rows)} calls, {sum(len(row['us']) for row in rows)} candidates")


def main() -> None:
    run("candidates", __doc__, "^attention/(?!dense)", 330, drawn, measure)


if __name__ == "__main__":
    main()
