"""Times of FP8 decodes in every division of a launch, to fit the figures of `cupy_mla/cuda/attention/cost.py`.

python benchmarks/shapes.py [--quick] [--only REGEX]

A division is heads of a CTA / splits / CTAs of a cluster that merge theirs, 0 for a team. Prints the best of each
decode beside what is chosen, and writes shapes.json.
"""

from __future__ import annotations

import os

import torch
from cupy_mla.cuda.attention.cost import (
    TEAM,
    Candidates,
    Division,
    divisions,
    few_heads_candidates,
    fp8_candidates,
)
from harness import Options, Record, time_side_by_side
from inputs import v4_cache, v32_cache
from rows import Set, decode_sets, own_decode_calls

from cupy_mla.calls.operation import forget_calls
from cupy_mla.cuda import driver
from cupy_mla.cuda.attention import choose, few_heads_sm90, fp8_sm90

CHEAPEST = Candidates.cheapest
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 16, 32)
LEAST_CTAS = 14


def take(division: Division | None) -> None:
    """Divide every decode like this; None: as it is chosen."""
    Candidates.cheapest = CHEAPEST if division is None else lambda candidates, queries: division
    choose.chooser.cache_clear()
    forget_calls()


def measure(record: Record, case: str, sets: list[Set], tiles: int) -> None:
    if not record.wants(case):
        return
    b, s_q, h, _ = sets[0]["q"].shape
    few = h <= 16
    os.environ[choose.VARIABLE] = "few_heads_sm90" if few else "fp8_sm90"
    at_once = driver.gpu(0).clusters_at_once(fp8_sm90.cluster_kernel())
    heads = (few_heads_sm90.block_heads(h),) if few else fp8_sm90.HEADS
    candidates = (few_heads_candidates if few else fp8_candidates)(heads, h, tiles, at_once, None)
    chosen = tuple(candidates.cheapest(b * s_q))
    for splits in SPLITS:
        shapes = list(divisions(heads, splits, splits).all)
        if not few and 1 < splits <= driver.MAX_CLUSTER:
            shapes += [Division(n, splits, TEAM) for n in heads]
        for shape in shapes:
            ctas, together = b * s_q * -(-h // shape.heads) * splits, max(1, shape.cluster)
            if ctas > at_once[together - 1] * together or ctas < LEAST_CTAS or splits > tiles:
                continue
            take(shape)
            (time,) = time_side_by_side(own_decode_calls(sets, num_splits=splits))
            row = {
                "case": f"{case} {'/'.join(map(str, shape))}",
                "us": round(time, 1),
                "chosen": tuple(shape) == chosen,
            }
            record.add_row(row, f"{time:9.1f} {'chosen' if tuple(shape) == chosen else ''}")
    take(None)


def main() -> None:
    options = Options.parse(__doc__)
    torch.manual_seed(0)
    record = Record("shapes", options, "us")
    cache = v32_cache(64 * 32768)
    for h in (64,) if options.quick else (8, 16, 32, 64, 128):
        for b, s_q in ((1, 1), (2, 2), (8, 1), (8, 2), (32, 1), (32, 2)):
            sets = decode_sets(h, b, s_q, cache, 2048, slots=b * 32768)
            measure(record, f"V32 h {h} b {b} s_q {s_q}", sets, 32)
    del cache
    window, extra = v4_cache(1 << 19, 256), v4_cache(1 << 19, 64)
    for h, topk in ((64, 512), (128, 1024)):
        sets = decode_sets(h, 2, 2, window, 128, slots=1 << 19, extra=extra, extra_topk=topk)
        measure(record, f"V4 h {h} b 2 s_q 2", sets, 2 + topk // 64)
    print(record.write())


if __name__ == "__main__":
    main()
