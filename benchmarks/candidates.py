"""Times of attention calls of random sizes in every way that they may be served: each kernel, each division.

python benchmarks/candidates.py [--seconds N] [--only REGEX]

`fit_times.py` finds from this record what work takes on a GPU, and the replay test how good the choices are that are
made with it. Sizes are drawn in rounds, one for each group and number of heads, so that a run that ends early has all
of them. Groups:

    V32, V4, bf16           decode of 1 to 264 query tokens, mostly of 2048 rows (V4: 128 of the window, and others)
    V32 ragged, ...         the same, with a length for each request
    prefill                 1 to 264 queries
    large prefill           1024 to 3072 queries; random lists, lists with locality, lengths, or a prompt's first tokens
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
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cupy_mla.calls.signature import forget_calls
from cupy_mla.cuda.attention.cost import fp8_item_cost
from decode_batches import bf16_cache, calls, lengths
from harness import BEGAN, RESULTS, SETS, Call, environment, graph_of, replay_times
from inputs import normal, random_slots, v4_cache, v32_cache
from rows import decode_sets, local_lists

from cupy_mla import flash_mla
from cupy_mla.cuda import driver
from cupy_mla.cuda.attention import (
    bf16_cluster_sm90,
    bf16_few_heads_sm90,
    bf16_grouped_sm90,
    bf16_shares_sm90,
    bf16_sm90,
    choose,
    combine,
    few_heads_sm90,
    fp8_sm90,
    lists,
    portable,
)
from cupy_mla.cuda.attention.divide import Clusters, Division, Shares, Teams, Whole
from cupy_mla.cuda.driver import MAX_CLUSTER
from cupy_mla.cuda.paging import ceil_div
from cupy_mla.layouts import BF16_512, BF16_576, V4_FP8, V32_FP8

LARGEST = 264  # query tokens of a small call
TOKENS = 1 << 21  # of a cache
ROWS = 32768  # of a prefill
REPEATS = 6  # even, see harness.REPEATS
MOST_SPLITS = 5  # numbers of splits of one kind that are measured for one call
HEADS = (8, 16, 32, 64, 128)
OTHER_HEADS = {8: (2, 4, 7), 16: (12, 10), 32: (20, 24), 64: (40, 48), 128: (80, 96, 112)}
USUAL = 2048  # entries
LAYOUTS = {"V32": V32_FP8, "V4": V4_FP8, "bf16": BF16_576, "bf16_512": BF16_512}
TILE = 64  # rows of a tile of the kernels for Hopper
FOLDED = (math.sqrt(5) - 1) / 2

Row = dict[str, Any]
Way = tuple[str, Division]  # a kernel and a division


# --- sizes ----------------------------------------------------------------------------------------------------


def tokens(rng: random.Random, turn: int, start: float) -> int:
    """A number of query tokens; those of successive turns are spread evenly, half of them over the small ones."""
    u = (start + turn * FOLDED) % 1
    return round(math.exp(math.log(40) * u * 2)) if u < 0.5 else 1 + int(LARGEST * (2 * u - 1))


def decode_row(rng: random.Random, kind: str, h: int, n: int) -> Row:
    ragged = kind.endswith("ragged")
    b, s_q = (n // 2, 2) if n % 2 == 0 and rng.random() < 0.3 else (n, 1)
    topk = USUAL if rng.random() < 0.6 else 64 * rng.randint(1, 32)
    extra = 0
    if kind.startswith("V4"):
        topk, extra = 128, 1024 if h > 64 else 512
        if rng.random() < 0.4:
            topk, extra = (64 * rng.randint(1, 32), 0) if rng.random() < 0.3 else (128, 64 * rng.randint(1, 30))
    return {"kind": kind, "h": h, "b": b, "s_q": s_q, "topk": topk, "extra_topk": extra, "lengths": int(ragged)}


def prefill_row(rng: random.Random, kind: str, h: int, n: int) -> Row:
    large = kind.startswith("large")
    n = 64 * rng.randint(16, 48) if large else n
    topk = USUAL if rng.random() < 0.6 else 64 * rng.randint(2, 32)
    chosen = rng.choice(("random", "local", "lengths", "causal") if large else ("random", "random", "lengths"))
    return {"kind": kind, "h": h, "d_qk": rng.choice((576, 512)), "s_q": n, "topk": topk, "lists": chosen}


def drawn(rng: random.Random) -> Iterator[Row]:
    """Sizes without end."""
    starts: dict[Any, float] = {}
    for turn in range(1 << 30):
        for h in HEADS:
            for kind in ("V32", "V32 ragged", "V4", "V4 ragged", "bf16", "bf16 ragged", "prefill", "large prefill"):
                if kind == "large prefill" and turn % 2 == HEADS.index(h) % 2:
                    continue
                heads = rng.choice(OTHER_HEADS[h]) if rng.random() < 0.15 else h
                n = tokens(rng, turn, starts.setdefault((kind, h), rng.random()))
                yield (prefill_row if "prefill" in kind else decode_row)(rng, kind, heads, n)
        kind = rng.choice(("V32", "V4", "bf16", "V32", "prefill"))
        n = tokens(rng, turn, starts.setdefault("portable", rng.random()))
        row = (prefill_row if "prefill" in kind else decode_row)(rng, kind, rng.choice(HEADS), n)
        for name in ("portable", "portable_99kb"):
            yield {**row, "kernel": name}


# --- candidates -----------------------------------------------------------------------------------------------


def some(rng: random.Random, found: list[Any], most: int = MOST_SPLITS) -> list[Any]:
    """Some of a list, the last one among them."""
    return found if len(found) <= most else [*rng.sample(found[:-1], most - 1), found[-1]]


def split_numbers(tiles: int, most: int) -> list[int]:
    """Numbers of splits from 2 on, each the least with so few tiles a split."""
    return [n for n in range(2, min(tiles, most) + 1) if ceil_div(tiles, n) < ceil_div(tiles, n - 1)]


def ways(rng: random.Random, gpu: driver.Gpu, facts: choose.Facts, sizes: choose.Sizes) -> Iterator[Way]:
    """Every plausible way to serve a call on Hopper."""
    h, queries, rows, _ = sizes
    quantized, sms = facts.layout.quantized, gpu.sms
    tiles = max(1, ceil_div(rows, TILE))

    def items(heads: int) -> int:
        return queries * ceil_div(h, heads)

    def fits(heads: int, splits: int, at_once: tuple[int, ...]) -> bool:
        cluster = largest_cluster(splits)
        return items(heads) * (splits // cluster) <= at_once[cluster - 1]

    if quantized and (h > 8 or facts.layout.scales_apart):
        at_once = gpu.clusters_at_once(fp8_sm90.cluster_kernel())
        for heads in fp8_sm90.HEADS:
            if heads == 64 and h <= 32:
                continue
            work = items(heads)
            yield "fp8_sm90", Whole(heads)
            if work * tiles > 8:
                yield "fp8_sm90", Shares(heads)
            if facts.uneven:
                yield from [("fp8_sm90", Teams(heads))] if work <= sms else []
            else:
                found = [n for n in split_numbers(tiles, MAX_CLUSTER) if work * n <= sms]
                yield from (("fp8_sm90", Teams(heads, n)) for n in some(rng, found, 3))
            found = [n for n in split_numbers(tiles, MAX_CLUSTER) if fits(heads, n, at_once)]
            yield from (("fp8_sm90", Clusters(heads, n, n)) for n in some(rng, found))
    if not facts.layout.scales_apart and (h <= 16 or items(32) <= sms):
        most = few_heads_sm90.block_heads(h)
        at_once = gpu.clusters_at_once(few_heads_sm90.cluster_kernel(most))
        kernels = ["few_heads_sm90"] if quantized else ["few_heads_sm90", "bf16_few_heads_sm90"]
        for kernel in kernels if h <= 32 or not quantized else ():
            for heads in (16, 32) if most == 32 else (most,):
                yield kernel, Whole(heads)
                found = [n for n in split_numbers(tiles, sms) if items(heads) * n <= 2.1 * sms]
                for n in some(rng, found):
                    if largest_cluster(n) > 1 and fits(heads, n, at_once):
                        yield kernel, Clusters(heads, n, largest_cluster(n))
                    yield from [(kernel, Clusters(heads, n, 1))] if rng.random() < 0.4 else []
    if h <= 16 and quantized and not facts.layout.scales_apart and queries > 16 and not facts.prefill:
        yield "few_heads_sm90", Shares(few_heads_sm90.block_heads(h))
    if not quantized:
        heads = few_heads_sm90.block_heads(h)
        if items(heads) > sms:
            yield "bf16_few_heads_sm90", Whole(heads, 2)
        yield from flat_ways(rng, gpu, facts, sizes)


def flat_ways(rng: random.Random, gpu: driver.Gpu, facts: choose.Facts, sizes: choose.Sizes) -> Iterator[Way]:
    """Those of the kernels for flat bf16 rows."""
    h, queries, rows, _ = sizes
    pairs, work = max(1, ceil_div(rows, 2 * TILE)), queries * ceil_div(h, 64)
    at_once = gpu.clusters_at_once(bf16_cluster_sm90.cluster_kernel())
    for heads in bf16_cluster_sm90.HEADS:
        of = queries * ceil_div(h, heads)
        found = [n for n in split_numbers(pairs, MAX_CLUSTER) if of <= at_once[n - 1]]
        if heads == bf16_cluster_sm90.HEADS[0] or h > heads // 2:
            yield from (("bf16_cluster_sm90", Clusters(heads, n, n)) for n in some(rng, found, 4))
    if h > 4:
        yield "bf16_sm90", Whole(64)
        if facts.prefill and not facts.uneven and work > gpu.sms:
            yield "bf16_sm90", Whole(64, counted=True)
        if work * pairs > 8 and work <= 6 * gpu.sms:
            yield "bf16_shares_sm90", Shares(64)
        found = [n for n in split_numbers(pairs, MAX_CLUSTER) if gpu.sms / 2 < work * n <= gpu.sms]
        yield from (("bf16_shares_sm90", Shares(64, splits=n)) for n in some(rng, found, 2))
    if facts.prefill and h <= bf16_grouped_sm90.MAX_HEADS and queries > gpu.sms:
        yield "bf16_grouped_sm90", Whole(64, queries=bf16_grouped_sm90.group_queries(h))


def portable_ways(rng: random.Random, gpu: driver.Gpu, kernel: str, sizes: choose.Sizes) -> Iterator[Way]:
    heads = portable.block_heads(sizes.h_q)
    steps, work = ceil_div(sizes.rows, portable.STEP_ROWS), sizes.queries * ceil_div(sizes.h_q, heads)
    yield kernel, Whole(heads)
    found = [n for n in split_numbers(steps, 2 * gpu.sms) if work * n <= 2.1 * gpu.sms]
    yield from ((kernel, Clusters(heads, n, 1)) for n in some(rng, found))
    if work * steps > 8:
        yield kernel, Shares(heads)


def largest_cluster(splits: int) -> int:
    return max(n for n in range(1, MAX_CLUSTER + 1) if splits % n == 0)


# --- making the package take a way ----------------------------------------------------------------------------


CHOOSE = choose.choose


def take(way: Way | None) -> None:
    """Serve every call so; None: as the package chooses."""
    if way is None:
        choose.choose = CHOOSE
    else:
        choose.choose = lambda facts, sizes, *_: choice_of(facts, sizes, *way)
    choose.chooser.cache_clear()
    forget_calls()


def choice_of(facts: choose.Facts, sizes: choose.Sizes, kernel: str, of: Division) -> choose.Choice:
    """What the launchers take for a kernel and a division."""
    sms, work = facts.gpu.sms, sizes.queries * ceil_div(sizes.h_q, of.heads)
    if kernel == "bf16_grouped_sm90":
        return choose._group(facts, sizes)
    if isinstance(of, Whole):
        ordered = facts.uneven and ((kernel == "bf16_sm90" and work > sms) or of.queries > 1)
        return choose.Choice(
            kernel, of.heads, ctas=min(work, sms) if kernel == "fp8_sm90" else 0, queries=of.queries,
            longest_first=ordered, counted=of.counted,
        )  # fmt: skip
    if isinstance(of, Clusters):
        return choose.Choice(kernel, of.heads, of.splits, of.cluster)
    if isinstance(of, Teams):
        return choose.Choice(kernel, of.heads, of.splits, ctas=work * of.splits or sms, teams=True)
    assert isinstance(of, Shares)
    if of.splits:
        return choose.Choice(kernel, of.heads, of.splits, ctas=work * of.splits)
    pairs = max(1, ceil_div(sizes.rows, 2 * TILE))
    least = {"fp8_sm90": choose.FP8_LEAST_SPLIT, "few_heads_sm90": choose.FEW_SHARE_LEAST_SPLIT}.get(kernel, 1)
    most, parts, cost = sms, work * pairs // least, choose.ITEM_COST
    if kernel.startswith("portable"):
        parts, least = work * ceil_div(sizes.rows, portable.STEP_ROWS), portable.LEAST_SPLIT
    ctas = max(1, min(most, parts))
    if kernel == "fp8_sm90" and of.heads == 64 and not facts.uneven:
        cost = fp8_item_cost(work, ceil_div(ceil_div(sizes.rows, TILE), 2), ctas)
    return choose.Choice(kernel, of.heads, choose.EVENLY, ctas=ctas, least_split=least, item_cost=cost)


def way_of(choice: choose.Choice) -> Way:
    """The kernel and division of a choice."""
    kernel, heads, splits = choice.kernel, choice.heads, choice.splits
    if choice.teams:
        return kernel, Teams(heads, splits)
    if splits == choose.EVENLY:
        return kernel, Shares(heads)
    if splits == 1:
        return kernel, Whole(heads, choice.queries, choice.counted)
    if kernel in ("fp8_sm90", "bf16_shares_sm90") and choice.cluster == 1:
        return kernel, Shares(heads, splits)
    return kernel, Clusters(heads, splits, choice.cluster)


# --- measuring ------------------------------------------------------------------------------------------------


def compile_all() -> None:
    """Compile and load what the candidates need."""
    modules = (
        bf16_cluster_sm90, bf16_few_heads_sm90, bf16_grouped_sm90, bf16_shares_sm90, bf16_sm90, combine,
        few_heads_sm90, fp8_sm90, lists, portable,
    )  # fmt: skip
    found = [kernel for module in modules for kernel in module.kernels()]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda kernel: kernel.load(0), found))


@cache
def caches() -> dict[str, Callable[[], torch.Tensor]]:
    """The main caches, and `extra`, made when they are asked for."""
    return {
        "V32": cache(lambda: v32_cache(TOKENS)), "V4": cache(lambda: v4_cache(TOKENS, 256)), "bf16": cache(bf16_cache),
        "extra": cache(lambda: v4_cache(TOKENS, 64)),
    }  # fmt: skip


def decode_calls(row: Row) -> Callable[[], list[Call]]:
    """Makes the calls of a decode on its input sets, which share one schedule."""
    extra = caches()["extra"]() if row["extra_topk"] else None
    sets = decode_sets(
        row["h"], row["b"], row["s_q"], caches()[row["kind"].split()[0]](), row["topk"], slots=TOKENS, extra=extra,
        extra_topk=row["extra_topk"],
    )  # fmt: skip
    for s in sets if row["lengths"] else ():
        s["topk_length"] = lengths(row["b"], row["topk"])
        if extra is not None:
            s["extra_topk_length"] = lengths(row["b"], row["extra_topk"])
    return lambda: calls(flash_mla, sets)


def prefill_calls(row: Row) -> Callable[[], list[Call]]:
    """The same of a prefill."""
    h, d, s_q, topk = row["h"], row["d_qk"], row["s_q"], row["topk"]
    kv, sets = normal(ROWS, 1, d), []
    for _ in range(SETS):
        of = local_lists(s_q, topk, ROWS) if row["lists"] == "local" else random_slots(s_q, 1, topk, slots=ROWS)
        if row["lists"] == "causal":
            token = torch.arange(topk, device="cuda", dtype=torch.int32)
            of = torch.where(token <= torch.arange(s_q, device="cuda")[:, None], token, -1).to(torch.int32)[:, None]
        sets.append((normal(s_q, h, d), of, lengths(s_q, topk) if row["lists"] == "lengths" else None))
    return lambda: [
        lambda q=q, i=i, n=n: flash_mla.flash_mla_sparse_fwd(q, kv, i, d**-0.5, topk_length=n) for q, i, n in sets
    ]


def facts_and_sizes(gpu: driver.Gpu, row: Row) -> tuple[choose.Facts, choose.Sizes]:
    if "prefill" in row["kind"]:
        layout = BF16_576 if row["d_qk"] == 576 else BF16_512
        facts = choose.Facts(gpu, layout, prefill=True, uneven=row["lists"] == "lengths")
        return facts, choose.Sizes(row["h"], row["s_q"], row["topk"])
    layout = LAYOUTS[row["kind"].split()[0]]
    facts = choose.Facts(gpu, layout, prefill=False, flat=row["extra_topk"] == 0, uneven=bool(row["lengths"]))
    return facts, choose.Sizes(row["h"], row["b"] * row["s_q"], row["topk"] + row["extra_topk"])


def measure(rng: random.Random, gpu: driver.Gpu, row: Row) -> Row:
    """The row with the times of its candidates."""
    facts, sizes = facts_and_sizes(gpu, row)
    chosen = way_of(CHOOSE(facts, sizes, row.get("kernel")))
    if "kernel" in row:
        found = list(portable_ways(rng, gpu, row["kernel"], sizes))
    else:
        found = list(ways(rng, gpu, facts, sizes))
    found = list(dict.fromkeys([chosen, *found]))
    rng.shuffle(found)
    make = (prefill_calls if "prefill" in row["kind"] else decode_calls)(row)
    graphs = []
    for way in found:
        take(way)
        graphs.append(graph_of(make()))
    times = replay_times(graphs, REPEATS)
    us = {f"{kernel} {of}": round(t / SETS, 2) for (kernel, of), t in zip(found, times, strict=True)}
    return {**row, "chosen": f"{chosen[0]} {chosen[1]}", "us": us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=330, help="after which no row is begun")
    parser.add_argument("--only", metavar="REGEX", default="", help="the kinds in whose name this is found")
    options = parser.parse_args()
    seed = random.randrange(1 << 31)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    compile_all()
    print(f"compiled after {time.monotonic() - BEGAN:.0f} s", flush=True)
    gpu = driver.gpu(0)
    at_once = {
        module.__name__.rpartition(".")[2]: gpu.clusters_at_once(kernel)
        for module, kernel in (
            (fp8_sm90, fp8_sm90.cluster_kernel()), (bf16_cluster_sm90, bf16_cluster_sm90.cluster_kernel()),
            (few_heads_sm90, few_heads_sm90.cluster_kernel(16)),
        )
    }  # fmt: skip
    path = Path(os.environ.get("OUT", RESULTS)) / "candidates.json"
    rows: list[Row] = []

    def write() -> None:
        head = {**environment(), "seed": seed, "sms": gpu.sms, "shared_kb": gpu.shared_kb, "clusters_at_once": at_once}
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


if __name__ == "__main__":
    main()
