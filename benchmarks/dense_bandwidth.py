"""Dense decode of 16 heads over more than 1 GB of rows of each format, beside a copy of as many bytes; float16 and
V4_FP8 rows of drawn sizes beside our own bf16 rows.

python benchmarks/dense_bandwidth.py [--quick] [--only REGEX] [--limit SECONDS] [--seed N]

The ratio of a row over 1 GB is the share of the copy bandwidth, which counts bytes read and written, measured in the
same run. Sizes are drawn, and calls share a plan, as in dense_decode.py; the seed is in the record. Writes
dense_bandwidth.json.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from cases import DENSE_BANDWIDTH, judge
from dense_decode import BLOCK, HEADS, TOKENS, Set, drawn_row, filled_cache, input_sets, name_of, our_calls
from dense_fp8 import converted_cache, v32_cache
from harness import Call, Options, Record, copy_of, time_side_by_side
from inputs import v4_cache

FULL, FULL_HEADS = 1.2e9, 16  # bytes of rows, and heads
BATCHES, QUERIES = (16, 67, 250), (1, 2, 4)
DRAWN = 8  # of each format that is beside bf16, half of them of 1 to 4 requests


class Format(NamedTuple):
    """Rows of the cache.

    Attributes:
        cache: of as many rows as one in bf16, which is given.
        d_qk, q_dtype: of queries.
        beside: whether drawn sizes are measured beside bf16 rows.
    """

    token_bytes: int
    cache: Callable[[torch.Tensor], torch.Tensor]
    d_qk: int = 576
    q_dtype: torch.dtype = torch.bfloat16
    beside: bool = False


FORMATS = {
    "bf16": Format(1152, lambda bf16: bf16),
    "fp16": Format(1152, lambda bf16: converted_cache(bf16, torch.float16), q_dtype=torch.float16, beside=True),
    "v32_fp8": Format(656, lambda bf16: v32_cache(*bf16.shape[:2])),
    "plain_fp8": Format(576, lambda bf16: converted_cache(bf16, torch.float8_e4m3fn), q_dtype=torch.float8_e4m3fn),
    "v4_fp8": Format(584, lambda bf16: v4_cache(TOKENS, BLOCK), d_qk=512, beside=True),
}


def full_rows(token_bytes: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Batches with more than 1 GB of rows."""
    for s_q in QUERIES:
        for b in BATCHES[:1] if quick else BATCHES:
            length = math.ceil(FULL / (b * token_bytes))
            yield {"h": FULL_HEADS, "b": b, "s_q": s_q, "length": length, "lengths": "equal"}


def calls_of(of: Format, cache: torch.Tensor, sets: list[Set]) -> list[Call]:
    """Ours on the input sets, over a cache of the format."""
    return our_calls([{**s, "q": s["q"][..., : of.d_qk].contiguous().to(of.q_dtype)} for s in sets], cache)


def measure(record: Record, rng: random.Random, name: str, bf16: torch.Tensor) -> None:
    """All rows of a format."""
    of, quick = FORMATS[name], record.options.quick
    cache = of.cache(bf16)
    for row in full_rows(of.token_bytes, quick):
        case = f"full {name} {name_of(row)}"
        if record.wants(case):
            sets = input_sets(row, bf16)
            ours = calls_of(of, cache, sets)
            copies = [copy_of(row["b"] * row["length"] * of.token_bytes)] * len(sets)
            record.add(case, *time_side_by_side(ours, copies), None, peer="copy", format=name, **row)
    for number in range((2 if quick else DRAWN) if of.beside else 0):
        row = drawn_row(rng, rng.choice(HEADS), few=number % 2 == 0)
        case = f"{name} {name_of(row)}"
        if record.wants(case):
            sets = input_sets(row, bf16)
            ours, wide = calls_of(of, cache, sets), our_calls(sets, bf16)
            error = record.compare(case, ours[0]()[0], wide[0]()[0]) if name == "fp16" else None
            times = time_side_by_side(ours, wide)
            record.add(case, *times, error, peer="cupy_mla, bf16 rows", format=name, **row)


def main() -> None:
    options, seed = Options.parse_with_seed(__doc__)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    record = Record("dense_bandwidth", options)
    record.note("seed", seed)
    bf16 = filled_cache()
    for name in FORMATS:
        measure(record, rng, name, bf16)
    judge(DENSE_BANDWIDTH, record.rows)
    print(record.write())


if __name__ == "__main__":
    main()
