"""Times of dense decodes of random sizes in every way that they may be served, as candidates.py has sparse ones.

python benchmarks/dense_candidates.py [--seconds N] [--only REGEX]

Groups: `dense bf16`, `dense V32`, `dense plain` (e4m3 rows and queries, one scale each). Half of the calls have 1 to 4
requests, the others 1 to 264; lengths are 64 to 131,072 rows, equal or drawn for each request from 64 up to that; at
most 2M rows in a batch. A row has the fields of a call, `rows`, the sum of its lengths, and what rows of candidates.py
have. The calls of a graph share a plan. Writes dense_candidates.json.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import torch
from candidates import HEADS, Row, Way, run, some, times_of
from dense_decode import BLOCK, TOKENS, drawn_row, filled_cache, our_calls
from dense_fp8 import converted_cache, sets_with_fp8_queries, v32_cache
from recorded import dense_problem_of

from cupy_mla.cuda import driver
from cupy_mla.cuda.attention.dense import choose_dense
from cupy_mla.cuda.attention.divide import Clusters, Shares, Whole, split_numbers
from cupy_mla.cuda.attention.kernels import bf16_cluster_sm90, dense_cluster_sm90, dense_fp8_sm90
from cupy_mla.cuda.attention.problem import DenseProblem
from cupy_mla.cuda.driver import MAX_CLUSTER

MOST_PAIRS = 40  # of tiles that a CTA has at most: with more it was never the fastest
SHARES = (1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 5 / 6)  # of the SMs, that may have a share of all rows each
KERNELS = "^attention/dense_(combine|.* D_QK=576 .*HALF_ITEMS=0 .*ROW_READER=rows/(bf16|v32_fp8|plain_fp8).cuh)"


def drawn(rng: random.Random) -> Iterator[Row]:
    """Sizes without end."""
    for turn in range(1 << 30):
        for number, h in enumerate(HEADS):
            for kind in ("dense bf16", ("dense V32", "dense plain")[(turn + number) % 2]):
                yield {"kind": kind, **drawn_row(rng, h, few=rng.random() < 0.5)}


def ways(rng: random.Random, p: DenseProblem) -> Iterator[Way]:
    """Every plausible way to serve a call on Hopper."""
    at_once, sms = p.gpu.clusters_at_once(bf16_cluster_sm90.cluster_kernel()), p.gpu.sms
    quantized = p.layout.quantized
    names = ["dense_fp8_sm90"] * 3 if quantized else ["dense_cluster_sm90", "dense_whole_sm90", "dense_sm90"]
    of_clusters, of_whole, of_shares = names
    numbers = dense_fp8_sm90.LINES if quantized else dense_cluster_sm90.LINES
    for lines in numbers:
        items, padded = p.items(lines), lines > min(numbers) and p.lines <= lines // 2
        if not padded:
            most = sum(items <= at for at in at_once[: max(2, min(p.pairs, MAX_CLUSTER))])
            found = [n for n in {*split_numbers(p.pairs, most), most} if n > 1 and p.pairs <= MOST_PAIRS * n]
            yield from ((of_clusters, Clusters(lines, n, n)) for n in some(rng, sorted(found), 4))
        largest = lines == max(numbers)
        if p.pairs <= MOST_PAIRS and (not padded or (largest and not quantized)):
            yield of_whole, Whole(lines)
        if padded if quantized else not largest:
            continue
        yield of_shares, Shares(lines)
        fewer = [round(part * sms) for part in SHARES if part * sms <= items * p.pairs <= 8 * sms]
        yield from ((of_shares, Shares(lines, ctas=n)) for n in rng.sample(fewer, min(2, len(fewer))))
        equal = [n for n in split_numbers(p.pairs, sms) if items * n <= sms]
        yield from ((of_shares, Shares(lines, splits=n)) for n in some(rng, equal, 2))


@cache
def cache_of(kind: str) -> torch.Tensor:
    if kind == "dense V32":
        return v32_cache(TOKENS // BLOCK, BLOCK)
    if kind == "dense plain":
        return converted_cache(cache_of("dense bf16"), torch.float8_e4m3fn)
    return filled_cache()


def measure(rng: random.Random, gpu: driver.Gpu, row: Row) -> Row:
    """The row with the times of its candidates."""
    rows_of = cache_of(row["kind"])
    problem, sets = dense_problem_of(gpu, row), sets_with_fp8_queries(row, rows_of)
    chosen = choose_dense(problem)[:2]
    found = list(dict.fromkeys([chosen, *ways(rng, problem)]))
    rng.shuffle(found)
    queries = "q8" if row["kind"] == "dense plain" else "q"
    rows = round(sum(s["lengths"].sum().item() for s in sets) / len(sets))
    us = times_of(found, lambda: our_calls(sets, rows_of, queries))
    return {**row, "rows": rows, "chosen": f"{chosen[0]} {chosen[1]}", "us": us}


def main() -> None:
    run("dense_candidates", __doc__, KERNELS, 90, drawn, measure)


if __name__ == "__main__":
    main()
