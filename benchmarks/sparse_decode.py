"""Sparse decode beside FlashMLA's: FP8 caches of V3.2 and V4, and a paged bf16 cache.

python benchmarks/sparse_decode.py [--quick] [--only REGEX]

Few heads are padded to 64 for FlashMLA, and the padding is not timed. It has no decode on bf16 caches: there it runs
its prefill kernel over the flattened cache, as its users do. Writes sparse_decode.json and sparse_decode.png.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from cases import DECODE, decode_floor_us, judge
from harness import SETS, Options, Record, flash_mla_peer
from inputs import normal, v4_cache, v32_cache
from report import plot_decode
from rows import MakeSets, decode, decode_sets

REQUEST = 32768  # tokens of a request in the cache
LONG_BATCH, LONG_TOPK = 148, 16384
V4_TOKENS = 1 << 20


def batches(quick: bool) -> Iterator[tuple[int, int, int]]:
    """Heads, requests and query tokens a request."""
    for h in (16, 64, 128) if quick else (8, 16, 32, 64, 128):
        for b in (1, 8, 128) if quick else (1, 2, 8, 32, 64, 128):
            for s_q in (1,) if quick else (1, 2):
                yield h, b, s_q


def v32_rows(quick: bool) -> Iterator[tuple[str, MakeSets]]:
    filled = cache(lambda: v32_cache((128 if quick else LONG_BATCH) * REQUEST))
    rows = [(*batch, 2048) for batch in batches(quick)]
    rows += [] if quick else [(h, LONG_BATCH, s_q, LONG_TOPK) for h in (8, 16, 32, 64, 128) for s_q in (1, 2)]
    for h, b, s_q, topk in rows:
        yield (
            f"V32 h {h} b {b} s_q {s_q} topk {topk}",
            lambda h=h, b=b, s_q=s_q, topk=topk: decode_sets(h, b, s_q, filled(), topk, slots=b * REQUEST),
        )


def v4_rows(quick: bool) -> Iterator[tuple[str, MakeSets]]:
    """The extra cache has blocks of 64 rows, or of 2 where the name says so."""
    window, extra, small = (cache(lambda size=size: v4_cache(V4_TOKENS, size)) for size in (256, 64, 2))
    for h, topk in ((64, 512), (128, 1024)):
        for suffix, more in (("", extra), (" extra block 2", small)):
            for b in (2, 128) if quick else (2, 64, 128, 256):
                yield (
                    f"V4 h {h} b {b} s_q 2 topk 128+{topk}{suffix}",
                    lambda h=h, b=b, topk=topk, more=more: decode_sets(
                        h, b, 2, window(), 128, slots=V4_TOKENS, extra=more(), extra_topk=topk
                    ),
                )


def bf16_rows(quick: bool) -> Iterator[tuple[str, MakeSets]]:
    filled = cache(lambda: normal(128 * REQUEST // 64, 64, 1, 576))
    for h, b, s_q in batches(quick):
        yield (
            f"bf16 h {h} b {b} s_q {s_q} topk 2048",
            lambda h=h, b=b, s_q=s_q: decode_sets(h, b, s_q, filled(), 2048, slots=b * REQUEST),
        )


def main() -> None:
    options = Options.parse(__doc__)
    torch.manual_seed(0)
    peer = flash_mla_peer()
    record = Record("sparse_decode", options)
    for rows in (v32_rows, v4_rows, bf16_rows):
        for case, sets in rows(options.quick):
            decode(record, peer, case, sets, floor_us=round(decode_floor_us(case, SETS), 2))
    judge(DECODE, record.rows)
    path = record.write()
    print(path, plot_decode(path))


if __name__ == "__main__":
    main()
