"""The portable kernel (mma.sync) in both its shapes, on a Hopper GPU beside FlashMLA's and FlashAttention 3's kernels.

python benchmarks/portable.py [--quick] [--only REGEX] [--limit SECONDS]

`shape` is the shared memory in KB that the kernel is built for: 163 (sm_80, 90, 100), 99 (sm_86, 89, 120). Batches of
decode are drawn at random; the seed is in the record. Decode over bf16 rows is beside FlashAttention 3, and left out
where that is not found; all other rows are beside FlashMLA. Dense decode is of dense_decode.py's sizes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import dense_decode
import torch
from cases import PORTABLE, judge
from fa3_peer import fa3_calls, fa3_peer
from harness import Call, Options, Record, flash_mla_peer, time_side_by_side
from inputs import normal, random_slots, v4_cache, v32_cache
from rows import Set, decode_calls, decode_sets, padded

from cupy_mla import flash_mla
from cupy_mla.calls.operation import forget_calls
from cupy_mla.cuda.attention.choose import VARIABLE
from cupy_mla.cuda.attention.kernels import portable

SHAPES = {portable.LARGE: "portable", portable.SMALL: "portable_99kb"}
LARGEST, DRAWN = 264, 6  # batches are 1 to LARGEST; so many are drawn for each kind and number of heads
TOKENS = 1 << 21
TOPK = 2048
OurCalls = Callable[[], list[Call]]  # made anew for each shape: a schedule keeps the kernel that it was planned for
Make = Callable[[], tuple[OurCalls, list[Call], int]]  # ours, the peer's, heads


def compile_for(kernel: int) -> None:
    """Compile one kernel, which CuPy keeps on disk."""
    [*portable.kernels()][kernel].load(0)


def prefill(peer: Any, h: int, d: int, s_kv: int) -> Make:
    def make() -> tuple[OurCalls, list[Call], int]:
        kv = normal(s_kv, 1, d)
        sets = [(normal(2048, h, d), random_slots(2048, 1, TOPK, slots=s_kv)) for _ in range(4)]

        def calls(module: Any) -> list[Call]:
            return [partial(module.flash_mla_sparse_fwd, q, kv, lists, d**-0.5) for q, lists in sets]

        return partial(calls, flash_mla), calls(peer), h

    return make


def decode(peer: Any, sets: Callable[[], list[Set]], fa3: bool = False) -> Make:
    def make() -> tuple[OurCalls, list[Call], int]:
        made = sets()
        theirs = fa3_calls(made) if fa3 else decode_calls(peer, [{**s, "q": padded(s["q"])} for s in made])
        return partial(decode_calls, flash_mla, made), theirs, made[0]["q"].shape[2]

    return make


def dense(peer: Any, row: dict[str, Any], rows_of_cache: Callable[[], torch.Tensor]) -> Make:
    def make() -> tuple[OurCalls, list[Call], int]:
        sets = dense_decode.input_sets(row, rows_of_cache())
        return partial(dense_decode.our_calls, sets), dense_decode.flash_mla_calls(peer, sets), row["h"]

    return make


def rows(rng: random.Random, peer: Any, fa3: bool, quick: bool) -> Iterator[tuple[str, str, Make]]:
    """Kind, name and calls of each row. Those that count most come first."""
    for h, d, s_kv in ((64, 576, 32768), (128, 576, 131072), (64, 512, 131072), (128, 512, 32768))[: 1 if quick else 4]:
        yield "prefill", f"prefill h {h} d {d} s_q 2048 s_kv {s_kv} topk {TOPK}", prefill(peer, h, d, s_kv)

    def batches() -> list[int]:
        return sorted(rng.sample(range(1, LARGEST + 1), 2 if quick else DRAWN))

    v32 = cache(lambda: v32_cache(TOKENS))
    for h in (64, 128, 16, 32, 8):
        for b in batches():
            sets = partial(lambda h, b: decode_sets(h, b, 1, v32(), TOPK, slots=TOKENS), h, b)
            yield "V32", f"V32 h {h} b {b} s_q 1 topk {TOPK}", decode(peer, sets)
    window, extra = (cache(lambda size=size: v4_cache(TOKENS, size)) for size in (256, 64))
    for h, topk in ((64, 512), (128, 1024)):
        for b in batches():
            sets = partial(
                lambda h, b, n: decode_sets(h, b, 1, window(), 128, slots=TOKENS, extra=extra(), extra_topk=n),
                h, b, topk,
            )  # fmt: skip
            yield "V4", f"V4 h {h} b {b} s_q 1 topk 128+{topk}", decode(peer, sets)
    dense_rows = cache(dense_decode.filled_cache)
    for row in dense_decode.rows(rng, quick):
        yield "dense", dense_decode.name_of(row), dense(peer, row, dense_rows)
    if fa3:
        bf16 = cache(lambda: normal(TOKENS // 128, 64, 1, 576))
        for h in (16, 64, 128):
            for b in batches()[::2]:
                sets = partial(lambda h, b: decode_sets(h, b, 1, bf16(), TOPK, slots=TOKENS // 2), h, b)
                yield "bf16", f"bf16 h {h} b {b} s_q 1 topk {TOPK}", decode(peer, sets, fa3=True)


def first(result: Any) -> torch.Tensor:
    """The output of a call, [..., heads, 512]."""
    out = result[0] if isinstance(result, (tuple, list)) else result
    return out.flatten(0, -3)


def measure(record: Record, kind: str, case: str, make: Make) -> None:
    """One row for each shape."""
    if not record.wants(case):
        return
    ours, theirs, h = make()
    want = first(theirs[0]())[:, :h]
    for shape, name in SHAPES.items():
        os.environ[VARIABLE] = name
        forget_calls()
        row = f"{case} shape {shape}"
        calls = ours()
        error = record.compare(row, first(calls[0]()), want)
        record.add(row, *time_side_by_side(calls, theirs), error, shape=shape, kind=kind)


def main() -> None:
    options = Options.parse(__doc__)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_for, range(len([*portable.kernels()]))))
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    peer = flash_mla_peer()
    try:
        fa3_peer()
        fa3 = True
    except SystemExit:
        fa3 = False
    record = Record("portable", options)
    record.note("seed", seed)
    for row in rows(rng, peer, fa3, options.quick):
        measure(record, *row)
    judge(PORTABLE, record.rows)
    print(record.write())


if __name__ == "__main__":
    main()
