"""Absolute figures of recorded rows: what arithmetic and memory reach, and the share of what an H200 can give.

A function takes the rows of a record and yields those of a table: the columns that say what was done, the name of the
case, operations and bytes of it, and the least time that the ceilings (`cases.py`) allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cases import D_QK, FLOPS, TOKEN_BYTES, Row, numbers

COPY = 4.25e12  # bytes a second, read and written, of a copy on an H200
FP8_FLOPS = 1979e12  # NVIDIA's figure for dense FP8 products of an H200
MOVED = {
    "pack V32": 1152 + 656, "pack bf16": 2 * 1152, "pack V4": 1024 + 584, "pack indexer": 256 + 132,
    "gather V32": 656 + 1152, "gather indexer": 2 * 132, "gather V4": 584 + 1024,
}  # fmt: skip
"""Bytes read and written a token by the rows of `cache_ops` whose names begin so, without slots."""
BATCHES = (1, 8, 64, 128, 256)
KEYS = (4096, 8192, 32768, 131072)


class Figure(NamedTuple):
    """A row of a table.

    Attributes:
        work: what was done, by column.
        case: its name in the record.
        flops, moved: operations, and bytes; 0: not told.
        least_us: at the ceilings.
    """

    work: dict[str, str]
    case: str
    flops: float
    moved: float
    least_us: float

    def line(self, us: dict[str, float | None]) -> dict[str, str]:
        """By column, with the microseconds on each GPU by its name, None where it was not measured; rates and share
        are those of the first."""
        first = next(time for time in us.values() if time is not None)
        return {
            **self.work,
            **{f"{card}, µs": f"{time:,.1f}" if time else "" for card, time in us.items()},
            "TFLOP/s": f"{self.flops / first * 1e-6:,.0f}" if self.flops else "",
            "TB/s": f"{self.moved / first * 1e-6:.2f}" if self.moved else "",
            "% of the ceiling": f"{100 * self.least_us / first:.0f}",
        }


def prefill(rows: list[Row]) -> Iterator[Figure]:
    """2048 queries of 2048 random rows each out of 32768."""
    for row in rows:
        case, n = row["case"], numbers(row["case"])
        if case.startswith("prefill") and case.endswith("s_kv 32768 topk 2048"):
            flops = 2 * n["s_q"] * n["topk"] * n["h"] * (n["d"] + 512)
            yield Figure({"heads": str(n["h"]), "width": str(n["d"])}, case, flops, 0, flops / FLOPS * 1e6)


def decode(rows: list[Row]) -> Iterator[Figure]:
    """Entries are rows that each query token attends."""
    for row in rows:
        case, n = row["case"], numbers(row["case"])
        layout, topk = case.split()[0], case.partition(" topk ")[2]
        queries = 2 if layout == "V4" else 1
        if n["s_q"] != queries or n["b"] not in BATCHES or topk not in ("2048", "128+512", "128+1024"):
            continue
        entries = n["b"] * queries * n["topk"]
        work = {"layout": layout, "heads": str(n["h"]), "requests x queries": f"{n['b']} x {queries}", "entries": topk}
        flops = 2 * entries * n["h"] * (D_QK[layout] + 512)
        yield Figure(work, case, flops, entries * TOKEN_BYTES[layout], row["floor_us"])


def indexer(rows: list[Row]) -> Iterator[Figure]:
    """64 heads. Prefill: the last queries of so many keys, each of which sees the keys before it."""
    for row in rows:
        case, keys = row["case"], row.get("context", row.get("n"))
        if keys not in KEYS:
            continue
        if row["work"] == "prefill_logits":
            seen = row["m"] * keys - row["m"] * (row["m"] - 1) / 2
            flops = 2 * 128 * row["heads"] * seen
            work = {"logits": "prefill", "queries": str(row["m"]), "keys": str(keys)}
            yield Figure(work, case, flops, 0, flops / FP8_FLOPS * 1e6)
        elif row["work"] == "decode_logits":
            moved = row["keys_tb_s"] * row["ours_us"] * 1e6
            flops = 2 * 128 * row["heads"] * row["b"] * row["next_n"] * keys
            work = {"logits": "decode", "queries": f"{row['b']} x {row['next_n']}", "keys": f"{keys} a request"}
            yield Figure(work, case, flops, moved, moved / COPY * 1e6)


def cache_ops(rows: list[Row]) -> Iterator[Figure]:
    """The ceiling is a copy of as many bytes, in the same run."""
    for row in rows:
        case = row["case"]
        token = next((size for name, size in MOVED.items() if case.startswith(name)), 0)
        yield Figure({"operation": case}, case, 0, token * numbers(case).get("tokens", 0), row["peer_us"])
