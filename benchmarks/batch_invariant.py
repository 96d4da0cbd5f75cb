"""What it costs that a request's bits do not depend on the rest of the batch: FP8 decode with `batch_invariant=True`.

python benchmarks/batch_invariant.py [--quick] [--only REGEX]

Both ways are timed under CUDA-graph replay, and their outputs compared. Writes batch_invariant.json with ratio = time
by default / time with `batch_invariant=True`, so what is below 1 is the cost.
"""

from __future__ import annotations

import torch
from harness import Options, Record, time_side_by_side
from inputs import v32_cache
from rows import decode_sets, own_decode_calls

HEADS, BATCHES = (16, 64, 128), (1, 2, 8, 32, 64, 128)
TOPK, TOKENS = 2048, 32768  # rows of a query, and slots a request


def main() -> None:
    options = Options.parse(__doc__)
    torch.manual_seed(0)
    record = Record("batch_invariant", options, "invar. us,default,ratio,max diff")
    cache = v32_cache(max(BATCHES) * TOKENS)
    for h in HEADS[1:2] if options.quick else HEADS:
        for b in BATCHES:
            case = f"V32 h {h} b {b} s_q 1 topk {TOPK}"
            if not record.wants(case):
                continue
            sets = decode_sets(h, b, 1, cache, TOPK, slots=b * TOKENS)
            both = [own_decode_calls(sets, batch_invariant=invariant) for invariant in (True, False)]
            error = record.compare(case, both[0][0]()[0], both[1][0]()[0])
            record.add_ways(case, dict(zip(("invariant", "default"), time_side_by_side(*both), strict=True)), error)
    print(record.write())


if __name__ == "__main__":
    main()
