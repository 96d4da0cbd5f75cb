"""The portable kernels (mma.sync) beside FlashMLA's Hopper kernels, on the rows of the performance notes.

python benchmarks/portable.py [--quick] [--only REGEX]
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

import torch
from cases import PORTABLE, judge
from harness import Options, Record, flash_mla_peer
from inputs import v4_cache, v32_cache
from rows import MakeSets, decode, decode_sets, prefill

REQUEST = 32768  # tokens of a request in the cache
V4_TOKENS = 1 << 20


def v32_rows(quick: bool) -> Iterator[tuple[str, MakeSets]]:
    most = 32 if quick else 128
    filled = cache(lambda: v32_cache(most * REQUEST))
    batches = [(1, 1), (2, 1), (8, 1), (32, 1), (64, 1), (128, 1), (128, 2)]
    for h in (16, 64, 128):
        for b, s_q in batches[::3] if quick else batches:
            yield (
                f"V32 h {h} b {b} s_q {s_q} topk 2048",
                lambda h=h, b=b, s_q=s_q: decode_sets(h, b, s_q, filled(), 2048, slots=min(b, most) * REQUEST),
            )


def v4_rows(quick: bool) -> Iterator[tuple[str, MakeSets]]:
    window, extra = (cache(lambda size=size: v4_cache(V4_TOKENS, size)) for size in (256, 64))
    for h, topk, batches in ((64, 512, (2, 64, 128, 256)), (128, 1024, (2, 64, 128))):
        for b in batches[:2] if quick else batches:
            yield (
                f"V4 h {h} b {b} s_q 2 topk 128+{topk}",
                lambda h=h, b=b, topk=topk: decode_sets(
                    h, b, 2, window(), 128, slots=V4_TOKENS, extra=extra(), extra_topk=topk
                ),
            )


def main() -> None:
    options = Options.parse(__doc__)
    os.environ["CUPY_MLA_KERNELS"] = "portable"
    torch.manual_seed(0)
    peer = flash_mla_peer()
    record = Record("portable", options)
    for d in (576, 512):
        for h in (64, 128):
            for s_kv in (32768,) if options.quick else (8192, 32768, 131072):
                prefill(record, peer, h, d, s_kv)
    for rows in (v32_rows, v4_rows):
        for case, sets in rows(options.quick):
            decode(record, peer, case, sets)
    judge(PORTABLE, record.rows)
    print(record.write())


if __name__ == "__main__":
    main()
