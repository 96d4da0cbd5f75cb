"""The portable kernels (mma.sync) beside FlashMLA's Hopper kernels, on the rows of the performance notes.

python benchmarks/portable.py [--quick]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch
from harness import SETS, Record, flash_mla_peer
from inputs import normal, random_slots, v4_cache, v32_cache
from rows import decode, prefill


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
    os.environ["CUPY_MLA_KERNELS"] = "portable"
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
