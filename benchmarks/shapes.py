"""Times of FP8 decodes in every shape of launch, to fit what `best_shape` estimates with.

python benchmarks/shapes.py [--quick] [--only REGEX]

A shape is heads a block / splits / blocks of a cluster that merge theirs. Prints the best of each decode beside what is
chosen, and writes shapes.json.
"""

from __future__ import annotations

import os

import torch
from cupy_mla.cuda.schedule import Shape, shapes
from cupy_mla.ops._plan import forget_plans
from harness import Options, Record, time_side_by_side
from inputs import v4_cache, v32_cache
from rows import Set, decode_sets, own_decode_calls

from cupy_mla.cuda import few_heads_sm90, sparse_decode_sm90

CHOSEN = few_heads_sm90.best_shape, sparse_decode_sm90.best_shape
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 16, 32)
LEAST_BLOCKS = 14


def take(shape: Shape | None) -> None:
    """Launch every decode in this shape, or as it is chosen."""
    few, many = CHOSEN if shape is None else (lambda *_: shape,) * 2
    few_heads_sm90.best_shape, sparse_decode_sm90.best_shape = few, many
    forget_plans()


def measure(record: Record, case: str, sets: list[Set], tiles: int) -> None:
    if not record.wants(case):
        return
    b, s_q, h, _ = sets[0]["q"].shape
    os.environ["CUPY_MLA_KERNELS"] = "few_heads" if h <= 16 else "sm90"
    heads = (few_heads_sm90.block_heads(h),) if h <= 16 else sparse_decode_sm90.HEADS
    at_once = sparse_decode_sm90.kernel(sparse_decode_sm90.V32_FP8, 64, True).clusters_at_once(0)
    chosen = tuple(CHOSEN[h > 16](h, b * s_q, tiles, at_once, None))
    for splits in SPLITS:
        for shape in shapes(heads, tiles, splits, splits):
            clusters = b * s_q * -(-h // shape.heads) * shape.parts
            if clusters > at_once[shape.cluster - 1] or clusters * shape.cluster < LEAST_BLOCKS or splits > tiles:
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
