"""Dense decode of FP8 rows: V32_FP8 beside our own bf16 rows; rows and queries in e4m3, one scale each, beside
FlashMLA's FP8 kernel and its bf16 kernel, of which the faster one counts.

python benchmarks/dense_fp8.py [--quick] [--only REGEX] [--limit SECONDS]

Sizes are drawn, and calls share schedules and plans, as in dense_decode.py; the seed is in the record. `bf16_of_copy`
of a row is the share of the copy bandwidth that our bf16 rows reach. FlashMLA's FP8 kernel is an operation of the
library `_flashmla_extension_C.abi3.so` in the folder CUPY_MLA_PEER (default .peer). Writes dense_fp8.json.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from cases import DENSE_FP8, TOKEN_BYTES, dense_floor_us, judge
from dense_decode import Set, filled_cache, flash_mla_calls, input_sets, name_of, our_calls, rows
from harness import (
    NO_PEER,
    ROOT,
    Call,
    Options,
    Record,
    copy_rate,
    flash_mla_peer,
    peer_name,
    shown_difference,
    time_side_by_side,
)
from inputs import normal

LIBRARY = "_flashmla_extension_C.abi3.so"
SCALE = 576**-0.5


def fp8_peer() -> Any:
    """FlashMLA's operations on e4m3 rows and queries; the program ends where there are none, with status NO_PEER."""
    library = Path(os.environ.get("CUPY_MLA_PEER", ROOT / ".peer")) / LIBRARY
    if not library.exists():
        print(f"FlashMLA's FP8 kernel was not found: {library}", file=sys.stderr)
        sys.exit(NO_PEER)
    torch.ops.load_library(str(library.resolve()))
    return torch.ops._flashmla_extension_C


def v32_cache(blocks: int, block_size: int) -> torch.Tensor:
    """Random rows. Packing as many takes longer than all that is measured."""
    cache = torch.empty(blocks, block_size, 1, 656, device="cuda", dtype=torch.uint8)
    for part in cache.view(-1, 656).split(1 << 16):
        part[:, :512] = normal(len(part), 512).to(torch.float8_e4m3fn).view(torch.uint8)
        part[:, 512:528] = torch.ones(len(part), 4, device="cuda").view(torch.uint8)
        part[:, 528:] = normal(len(part), 64).view(torch.uint8)
    return cache


def converted_cache(bf16: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows of a cache in another dtype."""
    converted = torch.empty(bf16.shape, device="cuda", dtype=dtype)
    for part, wide in zip(converted.split(1024), bf16.split(1024), strict=True):
        part.copy_(wide)
    return converted


def sets_with_fp8_queries(row: dict[str, Any], cache: torch.Tensor) -> list[Set]:
    """Those of `input_sets`, with `q8`, their queries in e4m3."""
    return [{**s, "q8": s["q"].to(torch.float8_e4m3fn)} for s in input_sets(row, cache)]


def fp8_calls(peer: Any, sets: list[Set], cache: torch.Tensor) -> list[Call]:
    """One call a set; the schedule is a new one each time that all are made."""
    meta: list[Any] = []
    one = torch.ones(1, device="cuda")

    def call(number: int, s: Set) -> Any:
        if number == 0:
            lines = s["q"].shape[1] * s["q"].shape[2]
            meta[:] = peer.get_mla_decoding_metadata_dense_fp8(s["lengths"], lines, 1)
        q, lengths, table = s["q8"], s["lengths"], s["table"]
        return peer.fwd_kvcache_mla_fp8(q, cache, 512, lengths, table, SCALE, True, *meta, one, one)

    return [lambda i=i, s=s: call(i, s) for i, s in enumerate(sets)]


def main() -> None:
    options = Options.parse(__doc__)
    seed = random.randrange(1 << 31)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    record = Record("dense_fp8", options, "ours us,peer us,ratio,max diff,floor us")
    record.note("seed", seed)
    peer, operations, bf16 = flash_mla_peer(), fp8_peer(), filled_cache()
    v32 = v32_cache(*bf16.shape[:2])
    plain = converted_cache(bf16, torch.float8_e4m3fn)
    copied = copy_rate()
    record.note("copy_tb_s", round(copied / 1e12, 2))
    for row in rows(rng, options.quick):
        sets = sets_with_fp8_queries(row, bf16)
        tokens, lines = [s["lengths"].sum().item() for s in sets], row["h"] * row["s_q"]
        bound = dense_floor_us(tokens, lines, copied)[1]  # of the bf16 rows
        copy_us = 1e6 * sum(tokens) / len(tokens) * TOKEN_BYTES["bf16"] / copied
        wide, of_v32, of_plain = our_calls(sets, bf16), our_calls(sets, v32), our_calls(sets, plain, "q8")
        theirs, theirs_fp8 = flash_mla_calls(peer, sets), fp8_calls(operations, sets, plain)
        cases = [f"{layout} {bound} {name_of(row)}" for layout in ("v32_fp8", "plain_fp8")]
        if not any(map(record.wants, cases)):
            continue
        error = record.compare(cases[1], of_plain[0]()[0], theirs_fp8[0]()[0])
        wide_us, v32_us, plain_us, theirs_us, fp8_us = time_side_by_side(wide, of_v32, of_plain, theirs, theirs_fp8)
        best = min(theirs_us, fp8_us)
        theirs_name = f"{peer_name()}, {'FP8' if fp8_us <= theirs_us else 'bf16'}"
        for case, nbytes, ours_us, peer_us, name, difference in (
            (cases[0], 656, v32_us, wide_us, "cupy_mla, bf16 rows", None),
            (cases[1], 576, plain_us, best, theirs_name, error),
        ):
            floor, _ = dense_floor_us(tokens, lines, copied, nbytes)
            record.add_row(
                {
                    "case": case, "ours_us": round(ours_us, 2), "peer_us": round(peer_us, 2),
                    "ratio": round(peer_us / ours_us, 3), "peer": name, "max_abs_err": difference, **row,
                    "floor_us": round(floor, 2), "bound": bound, "bf16_of_copy": round(copy_us / wide_us, 3),
                },
                f"{ours_us:9.1f} {peer_us:9.1f} {peer_us / ours_us:9.2f} "
                f"{shown_difference(difference)} {floor:9.1f}",
            )  # fmt: skip
    judge(DENSE_FP8, record.rows)
    print(record.write())


if __name__ == "__main__":
    main()
