"""Puts the records into the README: a table and a plot. `--check` only says whether they are up to date.

python benchmarks/report.py [--check]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"

Row = dict[str, Any]

# What the table has a line for: title, record, how its rows' cases begin.
GROUPS = [
    ("prefill, Hopper kernel, 64 and 128 heads", "sparse_prefill", ("prefill h 64 ", "prefill h 128 ")),
    ("prefill, Hopper kernel, 8 to 32 heads", "sparse_prefill", ("prefill h 8 ", "prefill h 16 ", "prefill h 32 ")),
    ("prefill, portable kernel", "portable", ("prefill",)),
    ("FP8 decode V32, portable kernel, 16 heads", "portable", ("V32 h 16 ",)),
    ("FP8 decode V32, portable kernel, 64 and 128 heads", "portable", ("V32 h 64 ", "V32 h 128 ")),
    ("FP8 decode V4, portable kernel", "portable", ("V4 ",)),
    ("packing, gathering, concatenating, beside a copy of as many bytes", "cache_ops", ("pack", "gather", "concat")),
]


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def geometric_mean(rows: list[Row]) -> float:
    return math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows))


def table() -> str:
    lines = ["| work | rows | geometric mean | least | most |", "|---|---|---|---|---|"]
    for title, name, begins in GROUPS:
        rows = [row for row in load(name)["rows"] if row["case"].startswith(begins)]
        ratios = [row["ratio"] for row in rows]
        lines.append(f"| {title} | {len(rows)} | {geometric_mean(rows):.2f} | {min(ratios):.2f} | {max(ratios):.2f} |")
    return "\n".join(lines)


def section() -> str:
    head = load("portable")
    return f"""{BEGIN}
On one {head["gpu"]} (driver {head["driver"]}), beside FlashMLA's own kernels in the same run: ratio = FlashMLA's time /
ours, so above 1 ours is faster. FlashMLA gets 8 to 32 heads padded to 64, not timed. Every row stands in
[benchmarks/results](benchmarks/results).

{table()}

![ratio to FlashMLA by row](benchmarks/results/ratios.png)
{END}"""


def plot() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [(name, row) for name in ("sparse_prefill", "portable") for row in load(name)["rows"]]
    figure, axes = pyplot.subplots(figsize=(9, 0.16 * len(rows) + 1))
    colours = {"sparse_prefill": "tab:green", "portable": "tab:blue"}
    axes.barh(range(len(rows)), [row["ratio"] for _, row in rows], color=[colours[name] for name, _ in rows])
    axes.set_yticks(range(len(rows)), [f"{row['case']}" for _, row in rows], fontsize=5)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("FlashMLA's time / ours (green: Hopper kernel, blue: portable kernel on the same GPU)")
    figure.tight_layout()
    figure.savefig(RESULTS / "ratios.png", dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the README differs from the records")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    text = readme.read_text()
    start, stop = text.index(BEGIN), text.index(END) + len(END)
    if check:
        if text[start:stop] != section():
            sys.exit("README.md differs from benchmarks/results: run python benchmarks/report.py")
        return
    readme.write_text(text[:start] + section() + text[stop:])
    plot()


if __name__ == "__main__":
    main()
