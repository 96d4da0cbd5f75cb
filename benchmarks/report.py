"""Puts the records into the README and docs/: tables and plots. `--check` only says whether the texts are up to date.

python benchmarks/report.py [--check] [--part FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import figures
from cases import (
    BATCHES,
    CACHE_OPS,
    DECODE,
    DENSE,
    DENSE_BANDWIDTH,
    DENSE_FP8,
    FORMATS,
    INDEXER,
    INDEXER_V41,
    LAYER,
    NEAREST,
    PORTABLE,
    PREFILL,
    SERVED,
    SHORT_CONTEXTS,
    SMALL_PREFILL,
    TRAINING,
    Group,
    Row,
    geometric_mean,
    numbers,
    of_group,
    rows_of_group,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"

GROUPS = [
    *PREFILL, *SMALL_PREFILL, *DECODE, *BATCHES, *DENSE, *DENSE_FP8, *DENSE_BANDWIDTH, *SHORT_CONTEXTS, *FORMATS,
    *NEAREST, *CACHE_OPS, *PORTABLE, *INDEXER, *INDEXER_V41, *SERVED, *LAYER, *TRAINING,
]  # fmt: skip
NOT_MEASURED = "Not measured yet."
KERNEL_ROWS = {
    "localize": "localize topk", "globalize": "globalize topk", "merge_topk": "merge topk",
    "merge_ranks": "merge attention",
}  # fmt: skip
HEADLINES = (
    "prefill of 32 to 330 queries, 8 to 128 heads",
    "prefill, 16 to 32 heads, random lists of any length",
    "every batch: V32, 64 and 128 heads",
    "every batch: V32, 8 to 32 heads",
    "V4 as served: 64 heads",
    "every batch: bf16, beside FlashAttention 3",
    "indexer: decode selection, logits to slots",
    "portable kernels: FP8 decode V32, 64 and 128 heads",
)  # titles of the groups that the README shows
RATIO_HEAD = "work | card | commit | rows | geometric mean | least | most"
ROW_FORMATS = (
    "FlashMLA's sparse decode does not read the following cache formats on Hopper. Our time is compared with the time\n"
    "over the nearest format, with the same lists: FlashMLA's over V4 or V32, or ours over bf16 or FP8. Packing and\n"
    "gathering are compared with a copy of as many bytes."
)
RATIOS_PLOT = "![ratio to the peer by kind of work](benchmarks/results/ratios.png)"
PLOTS = {
    "sparse_decode": "![decode: time against batch, and the floor](../benchmarks/results/sparse_decode.png)",
    "decode_batches": (
        "![decode of every batch size: time, the peer's, and the floor](../benchmarks/results/decode_batches.png)"
    ),
    "sparse_prefill": "![prefill: time of a query](../benchmarks/results/sparse_prefill.png)",
    "indexer": "![indexer: time of every row, and the best peer's](../benchmarks/results/indexer.png)",
}  # by the record that a plot is made of
DENSE_PLOT = "![dense decode: time against the floor of its bytes and of its arithmetic](../{})"
ACCURACY = (
    "Distance to float64 on the same (dequantized) rows, ‖out − ref‖ / ‖ref‖, and the largest error of lse. FP8\n"
    "decode of V3.2's layout and bf16 prefill, 128 heads."
)
HOST = (
    "Microseconds that a call keeps the host busy, without the time to free its results: the median of the quietest\n"
    "of many rounds. [Host time](host_time.md) says what they are made of."
)
TRAINING_TIMES = (
    "Milliseconds of a backward of lists of 2048 entries, d_qk 576, beside each peer's, and TFLOP/s of whole lists.\n"
    "TileLang is as Megatron-Core ships it, with 32 heads a CTA, and with 64. Loss and warm-up, with 64 heads of the\n"
    "indexer and all gradients, are beside the backward of the attention over the same rows. Memory is beside results."
)
TRAINING_ACCURACY = (
    "Distance of gradients to float64, ‖x − ref‖ / ‖ref‖, of causal random lists and unit normal values, or queries\n"
    "four times as large. The reference has a softmax of its own. dq and dkv are bfloat16; one column has our dkv in\n"
    "float32."
)
WARM_UP = (
    "Seconds of `cupy_mla.warmup` for all kinds of a model's layers on one GPU, as the vLLM plug-in calls it: with an\n"
    "empty disk cache, and in another process with the cache that is then there. Imports are not counted."
)
LONG_LIST = 4096  # entries of an index list, from which on its plots stand in a line of their own


def load(name: str, folder: Path | None = None) -> dict[str, Any]:
    """A record; one without rows where it was never written. Those of another GPU stand in a folder of their own."""
    path = (folder or RESULTS) / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def dense_records() -> list[Path]:
    """The records of dense decode, one a GPU."""
    return [path for folder in folders() if (path := folder / "dense_decode.json").exists()]


def card(record: dict[str, Any]) -> str:
    """The short name of the GPU that a record is of: H200 of "NVIDIA H200", H100 of "NVIDIA H100 80GB HBM3"."""
    return str(record["gpu"]).removeprefix("NVIDIA ").partition(" ")[0]


def commit(record: dict[str, Any], rows: list[Row]) -> str:
    """The commits that rows of a record were measured at. A row that was measured apart names its own."""
    found = {str(row.get("commit", record["commit"]))[:7] for row in rows}
    return ", ".join(sorted(found))


def table(head: str, rows: list[list[str]]) -> str:
    columns = head.split(" | ")
    lines = [head, " | ".join(["---"] * len(columns)), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def filled(rows: list[dict[str, str]]) -> str:
    """A table of rows by column, without the columns that are empty in all of them."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    return table(" | ".join(names), [[row[name] for name in names] for row in rows])


def folders() -> list[Path]:
    """The folders of records: that of the first GPU, then those of others, which have their names."""
    return [RESULTS, *sorted(path for path in RESULTS.glob("*") if path.is_dir())]


def ratio_row(group: Group, folder: Path) -> list[str] | None:
    """What a GPU's record says of a group; None where it has no rows of it."""
    record = load(group.record, folder)
    rows = rows_of_group(group, record["rows"])
    if not rows:
        return None
    values = [row["ratio"] for row in rows]
    figures = (f"{x:.2f}" for x in (geometric_mean(values), min(values), max(values)))
    return [group.title, card(record), commit(record, rows), str(len(rows)), *figures]


def ratio_table(groups: Iterable[Group]) -> str:
    """A row for each group and each GPU that has records of it. Where no GPU has any, the row says so: nothing was
    measured, or no call that was is of the group."""
    rows: list[list[str]] = []
    for group in groups:
        found = [row for folder in folders() if (row := ratio_row(group, folder))]
        none = "no such row" if any(load(group.record, folder)["rows"] for folder in folders()) else "not measured"
        rows += found or [[group.title, none, "", "0", "", "", ""]]
    return table(RATIO_HEAD, rows)


def headlines() -> list[Group]:
    """The groups that the README shows."""
    by_title = {group.title: group for group in GROUPS}
    return [by_title[title] for title in HEADLINES]


def readme() -> str:
    """Figures of the groups in HEADLINES on the first GPU, a plot of all groups, and row formats."""
    parts = [f"{group_table(headlines(), RESULTS)}\n\n{RATIOS_PLOT}"]
    measured = next((folder for folder in folders() if load("formats", folder)["rows"]), None)
    if measured:
        parts += [ROW_FORMATS, group_table(FORMATS, measured)]
    return "\n\n".join(parts)


def group_table(groups: Iterable[Group], folder: Path) -> str:
    """A row for each group that a GPU has records of."""
    rows = [row for group in groups if (row := ratio_row(group, folder))]
    return table(RATIO_HEAD, rows)


def accuracy_table() -> str:
    """Distances to float64 on each GPU."""
    rows = [
        [row["case"], card(record), commit(record, [row])]
        + [field(row, name, ".1e") for name in ("ours", "peer", "ours_lse", "peer_lse")]
        for folder in folders()
        for record in [load("accuracy", folder)]
        for row in record["rows"]
    ]
    return table("case | card | commit | ours | FlashMLA | ours, lse | FlashMLA, lse", rows)


def host_table(first: str, columns: dict[str, str]) -> str:
    """Microseconds of host time: the rows of `host_overhead` that have the first of these columns."""
    record = load("host_overhead")
    rows = [
        [row["case"], card(record), commit(record, [row]), *(field(row, key, ".1f") for key in columns.values())]
        for row in record["rows"]
        if next(iter(columns.values())) in row
    ]
    return table(" | ".join([first, "card", "commit", *columns]), rows)


def performance() -> str:
    """Every group on every GPU with plots, then accuracy and host time."""
    parts = ["## Ratios", ratio_table(GROUPS)]
    parts += [text for record, text in PLOTS.items() if load(record)["rows"]]
    parts += [DENSE_PLOT.format(path.relative_to(ROOT).with_suffix(".png")) for path in dense_records()]
    if lines := training():
        parts += ["## Training", TRAINING_TIMES, filled(lines)]
    if lines := training_accuracy():
        parts += ["## Accuracy of gradients", TRAINING_ACCURACY, filled(lines)]
    if load("accuracy")["rows"]:
        parts += ["## Accuracy", ACCURACY, accuracy_table()]
    if load("host_overhead")["rows"]:
        known = {"torch tensors": "torch_us", "CuPy arrays": "cupy_us", "FlashMLA's function": "peer_us"}
        known["its C++ operator"] = "peer_operator_us"
        new = {"torch tensors": "torch_new_us", "CuPy arrays": "cupy_new_us", "FlashMLA's function": "peer_new_us"}
        parts += ["## Host time", HOST, host_table("call of known sizes", known)]
        parts.append(host_table("call of sizes never seen", new))
    parts += ["## Warm-up", WARM_UP, warm_up()]
    return "\n\n".join(parts)


def warm_up() -> str:
    """Seconds until an engine's kernels are ready, on each GPU."""
    rows = [
        [row["case"], card(record), commit(record, [row]), str(row["kernels"]), str(row["cores"])]
        + [field(row, key, ".1f") for key in ("cold_s", "warm_s")]
        for folder in folders()
        for record in [load("warm_up", folder)]
        for row in record["rows"]
    ]
    head = "model | card | commit | kernels | cores | empty cache, s | full cache, s"
    return table(head, rows) if rows else NOT_MEASURED


def training() -> list[dict[str, str]]:
    """Rows by column of the backward and the indexer's loss, on each GPU."""
    times = {
        "ours": "ours_us", "portable": "portable_us", "cuDNN": "cudnn_us", "TileLang": "tilelang_us",
        "TileLang, 64": "tilelang_64_us", "backward": "peer_us",
    }  # fmt: skip
    lines = []
    for folder in folders():
        record = load("training", folder)
        for row in record["rows"]:
            shown = {name: key for name, key in times.items() if key in row}
            if row["work"] == "backward":
                del shown["backward"]
            ms = {name: f"{row[shown[name]] / 1e3:.2f}" if name in shown else "" for name in times}
            head = {"case": row["case"], "card": card(record), "commit": commit(record, [row])}
            tail = {"best / ours": f"{row['ratio']:.2f}", "TFLOP/s": field(row, "tflops", ".0f")}
            lines.append({**head, **ms, **tail, "memory, GB": field(row, "peak_gb", ".2f")})
    return lines


def training_accuracy() -> list[dict[str, str]]:
    """Rows by column of the distances of gradients to float64, on each GPU."""
    kernels = {
        "ours": "", "float32": "float32_", "portable": "portable_", "cuDNN": "cudnn_", "TileLang": "tilelang_",
        "TileLang, 64": "tilelang_64_",
    }  # fmt: skip
    columns = {f"{of}, {name}": f"{key}{of}" for of in ("dq", "dkv") for name, key in kernels.items()}
    return [
        {"case": row["case"], "card": card(record), "commit": commit(record, [row])}
        | {name: field(row, key, ".2e") for name, key in columns.items()}
        for folder in folders()
        for record in [load("training_accuracy", folder)]
        for row in record["rows"]
    ]


def absolute() -> str:
    """Times on each GPU; rates and the share of the ceilings on the first."""
    parts = []
    for heading, name, figures_of in (
        ("Prefill", "sparse_prefill", figures.prefill),
        ("Decode", "sparse_decode", figures.decode),
        ("The indexer's logits", "indexer", figures.indexer),
        ("Packing, gathering, index lists", "cache_ops", figures.cache_ops),
    ):
        records = [record for folder in folders() if (record := load(name, folder))["rows"]]
        times = {card(record): {row["case"]: row["ours_us"] for row in record["rows"]} for record in records}
        lines = [
            figure.line({gpu: us.get(figure.case) for gpu, us in times.items()})
            for figure in figures_of(load(name)["rows"])
        ]
        if lines:
            at = ", ".join(f"{card(record)} at {commit(record, record['rows'])}" for record in records)
            parts.append(f"## {heading}\n\n{figures_of.__doc__} Measured: {at}.\n\n{filled(lines)}")
    return "\n\n".join(parts)


def ways(record: str, heading: str, first: str, second: str, digits: int) -> str:
    """The rows of a record of two ways: their times, and the second's over the first's."""
    rows = [
        [row["case"], f"{row[first]:.{digits}f}", f"{row[second]:.{digits}f}", f"{row['ratio']:.2f}"]
        for row in load(record)["rows"]
    ]
    return table(heading, rows)


def thresholds() -> str:
    """Each kind of batch under both modes of the FP8 backend."""
    heading = "batch | mixed, µs | separate, µs | separate / mixed"
    return ways("thresholds", heading, "mixed_us", "separate_us", 0)


def layouts() -> str:
    """Decode of one query token a request over each layout of V3.2's rows."""
    times = {row["case"]: row["ours_us"] for row in load("sparse_decode")["rows"]}
    rows = [
        [str(h), str(b), *(f"{times[f'{layout} h {h} b {b} s_q 1 topk 2048']:.1f}" for layout in ("V32", "bf16"))]
        for h in (16, 128)
        for b in (1, 64, 128)
    ]
    return table("heads | batch | `v32_fp8` | `bf16`", rows)


def batch_invariant() -> str:
    """What `batch_invariant=True` costs."""
    heading = "decode | batch_invariant, µs | by default, µs | default / batch_invariant"
    return ways("batch_invariant", heading, "invariant_us", "default_us", 1)


def vllm() -> str:
    """Engines on the plug-in beside vLLM's own layers: a part for each run that rows are of."""
    parts = [part for folder in folders() for part in vllm_of(load("vllm", folder))]
    return "\n\n".join(parts) or NOT_MEASURED


def vllm_of(record: dict[str, Any]) -> list[str]:
    """The parts of a GPU's record."""
    runs: dict[tuple[int, str, str], list[Row]] = {}
    for row in record["rows"]:
        runs.setdefault((row["tensor_parallel"], row["version"], row["commit"]), []).append(row)
    parts: list[str] = []
    for (gpus, version, commit), rows in sorted(runs.items()):
        place = record["gpu"] if gpus == 1 else f"{record['gpu']}, tensor parallel over {gpus}"
        note = record.get("notes", {}).get(commit, "")
        parts.append(f"vLLM {version}, {place}, at {commit[:9]}. {note}".strip())
        results = {row["setting"].split(", ")[0]: row for row in rows if "tokens" in row}
        if results:
            parts.append(filled([vllm_results(name, row) for name, row in results.items()]))
        timed = [vllm_speed(row) for row in rows if "tokens_per_s_ours" in row]
        if timed:
            parts.append(filled(timed))
        served = [vllm_traffic(row) for row in rows if "traffic_requests" in row]
        if served:
            parts.append(filled(served))
    return parts


def field(row: Row, key: str, kind: str = "") -> str:
    """A field of a row; "" where it has none."""
    return f"{row[key]:{kind}}" if key in row else ""


def vllm_results(name: str, row: Row) -> dict[str, str]:
    """Tokens and log-probabilities of a setting, as a row by columns."""
    return {
        "setting": name,
        "tokens equal": f"{row['tokens_equal']} of {row['tokens']}",
        "gap where not": field(row, "gap_apart"),
        "equal to one GPU's, ours": field(row, "tokens_equal_one_gpu_ours"),
        "vLLM's": field(row, "tokens_equal_one_gpu_stock"),
        "ours, one kernel and float32 sums": field(row, "tokens_equal_one_gpu_alike"),
        "log-probability error, ours": field(row, "logprob_error_ours", ".5f"),
        "vLLM's own": field(row, "logprob_error_stock", ".5f"),
        "± of their difference": field(row, "logprob_error_noise", ".5f"),
        "within topk, ours": field(row, "logprob_error_within_topk_ours", ".5f"),
        "vLLM's own, within topk": field(row, "logprob_error_within_topk_stock", ".5f"),
        "± within topk": field(row, "logprob_error_within_topk_noise", ".5f"),
    }


def vllm_speed(row: Row) -> dict[str, str]:
    """Tokens a second and the GPU's time of a setting and number of requests, as a row by columns."""

    def rate(name: str) -> str:
        key = f"tokens_per_s_{name}"
        spread = f" ({row[f'{key}_low']:,.0f} to {row[f'{key}_high']:,.0f})" if f"{key}_low" in row else ""
        return f"{row[key]:,.0f}{spread}"

    def both(name: str, kind: str) -> str:
        """Ours and vLLM's."""
        return " and ".join(filter(None, (field(row, f"{name}_{engine}", kind) for engine in ("ours", "stock"))))

    ratios = (field(row, "tokens_per_s_ratio", ".3f"), field(row, "tokens_per_s_ratio_noise", ".3f"))
    return {
        "setting": row["setting"],
        "tokens a second, ours": rate("ours"),
        "vLLM's": rate("stock"),
        "ours / vLLM's": f"{row['tokens_per_s_ours'] / row['tokens_per_s_stock']:.2f}",
        "of all pairs": " ± ".join(filter(None, ratios)),
        "first tokens, ms, ours and vLLM's": both("first_tokens_ms", ".1f"),
        "µs of a piece of Python beside both": both("loop_us", ".0f"),
        "GPU, µs a step, ours": field(row, "gpu_us_ours", ".0f"),
        "vLLM's own": field(row, "gpu_us_stock", ".0f"),
        "vLLM's own / ours": f"{row['gpu_us_stock'] / row['gpu_us_ours']:.2f}" if "gpu_us_ours" in row else "",
    }


def vllm_traffic(row: Row) -> dict[str, str]:
    """What traffic took, as a row by columns."""
    columns = {
        "tokens a second": ("traffic_tokens_per_s", ",.0f"), "first token, ms": ("traffic_first_token_ms", ".1f"),
        "longest step, ms": ("longest_step_ms", ".1f"), "texts the same three times": ("texts_equal_thrice", ""),
    }  # fmt: skip
    cells = {
        f"{column}{who}": field(row, f"{key}_{engine}", kind)
        for column, (key, kind) in columns.items()
        for who, engine in ((", ours", "ours"), (", vLLM's", "stock"))
    }
    texts = f"{row['traffic_texts_equal']} of {row['traffic_requests']}"
    return {"setting": row["setting"], **cells, "texts of ours that are vLLM's": texts}


def context_parallel() -> str:
    """A decode step on one GPU and divided over several, and the divided step's parts."""
    columns = {
        "requests": "", "one GPU": "one_us", "heads divided": "replicated_us", "rows divided": "two_us",
        "logits": "logits_us", "top-k": "topk_us", "merge top-k": "merge_topk_us", "localize": "localize_us",
        "gather q": "gather_q_us", "attention": "attention_us", "merge attention": "merge_attention_us",
    }  # fmt: skip
    rows = [
        {name: f"{row[key]:.0f}" if key else str(numbers(row["case"])["b"]) for name, key in columns.items()}
        for row in load("context_parallel")["rows"]
    ]
    return filled(rows) if rows else NOT_MEASURED


def portable_shapes() -> str:
    """Each kind of work in both shapes of the portable kernel: geometric mean and least of the ratios."""
    record = load("portable")
    half = len(PORTABLE) // 2
    rows = [
        [large.title.partition(": ")[2], *(f"{geometric_mean(v):.2f}; {min(v):.2f}" for v in both)]
        for large, small in zip(PORTABLE[:half], PORTABLE[half:], strict=True)
        if all(both := [of_group(group, record["rows"]) for group in (large, small)])
    ]
    if not rows:
        return NOT_MEASURED
    return f"At {commit(record, record['rows'])}, {record['date']}:\n\n{table('kind | 163 KB | 99 KB', rows)}"


def beside_copy(beginning: str) -> str:
    """The rows of `cache_ops` whose names begin so."""
    rows = [
        [row["case"], f"{row['ours_us']:.1f}", f"{row['ratio']:.2f}"]
        for row in load("cache_ops")["rows"]
        if row["case"].startswith(beginning)
    ]
    return table("case | µs | time of a copy of as many bytes / ours", rows) if rows else NOT_MEASURED


def all_rows() -> str:
    """Every row of every record."""
    parts = []
    names = {path.stem for path in RESULTS.glob("*.json") if not path.stem.endswith(".part")}
    # Candidates are thousands of rows, which nobody reads here.
    for name in sorted(name for name in names if "candidates" not in name):
        record = load(name)
        columns = list(dict.fromkeys(key for row in record["rows"] for key in row))
        rows = [[_shown(row.get(column)) for column in columns] for row in record["rows"]]
        head = ", ".join(f"{key} {record[key]}" for key in record if key != "rows")
        parts.append(f"## {name}\n\n{head}\n\n{table(' | '.join(columns), rows)}")
    return "\n\n".join(parts)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 0.01 else f"{value:.2f}"
    return "" if value is None else str(value)


def texts() -> dict[Path, str]:
    """The files with a part between BEGIN and END, and what should stand there."""
    docs = ROOT / "docs"
    wanted = {ROOT / "README.md": readme(), RESULTS / "README.md": all_rows()}
    wanted[docs / "performance.md"] = performance()
    wanted |= {docs / "vllm.md": vllm(), docs / "several_gpus.md": context_parallel()}
    wanted |= {docs / "portable.md": portable_shapes(), docs / "figures.md": absolute()}
    for kernel, beginning in KERNEL_ROWS.items():
        wanted[docs / "kernels" / f"{kernel}.md"] = beside_copy(beginning)
    if load("thresholds")["rows"]:
        wanted[ROOT / "docs" / "mixed_batches.md"] = thresholds()
    if load("sparse_decode")["rows"]:
        wanted[ROOT / "docs" / "choosing.md"] = layouts()
    if load("batch_invariant")["rows"]:
        wanted[ROOT / "docs" / "batch_invariance.md"] = batch_invariant()
    return wanted


def plot_ratios(path: Path) -> Path:
    """A bar a group, as long as its geometric mean, and a dot a row."""
    pyplot = _pyplot()
    rows = [(group, load(group.record)["rows"]) for group in GROUPS]
    groups = [(group, values) for group, found in rows if (values := of_group(group, found))]
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(groups) + 1))
    for i, (group, values) in enumerate(groups):
        mean = geometric_mean(values)
        axes.barh(i, mean, color="tab:green" if mean >= 1 else "tab:blue", alpha=0.6)
        axes.plot(values, [i] * len(values), ".", color="black", markersize=3)
        if group.target:
            axes.plot([group.target] * 2, [i - 0.4, i + 0.4], color="tab:red")
    axes.set_yticks(range(len(groups)), [group.title for group, _ in groups], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("peer's time / ours; bar: geometric mean, dots: rows, red: target", fontsize=8)
    return _save(figure, path)


def plot_decode(record: Path) -> Path:
    """Time against query tokens, ours, FlashMLA's and the floor: a panel for all that a case names but b and s_q."""
    pyplot = _pyplot()
    lines: dict[tuple[str, bool], dict[str, list[Row]]] = {}  # panels of a layout, long lists apart
    for row in sorted(json.loads(record.read_text())["rows"], key=lambda row: numbers(row["case"])["h"]):
        panel = re.sub(r"b \d+ s_q \d+ ", "", row["case"])
        key = row["case"].split()[0], numbers(row["case"])["topk"] >= LONG_LIST
        lines.setdefault(key, {}).setdefault(panel, []).append(row)
    width = max(map(len, lines.values()), default=1)
    height = max(len(lines), 1)
    figure, grid = pyplot.subplots(height, width, figsize=(2.9 * width, 2.7 * height), squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for line, key in zip(grid, sorted(lines), strict=False):
        for axes, (panel, rows) in zip(line, lines[key].items(), strict=False):
            axes.axis("on")
            points = sorted((_queries(row), row["ours_us"], row["peer_us"], row["floor_us"]) for row in rows)
            queries, ours, theirs, floor = zip(*points, strict=True)
            axes.loglog(queries, theirs, "s-", label="FlashMLA", color="tab:gray", markersize=3)
            axes.loglog(queries, ours, "o-", label="cupy_mla", color="tab:green", markersize=3)
            axes.loglog(queries, floor, "--", label="floor", color="tab:red")
            axes.set_xticks(sorted(set(queries)), [str(count) for count in sorted(set(queries))])
            axes.set_xticks([], minor=True)
            axes.set_xlabel("query tokens (b·s_q)", fontsize=7)
            axes.set_ylabel("µs", fontsize=7)
            axes.set_title(panel, fontsize=8)
            axes.tick_params(which="both", labelsize=7)
    grid[0][0].legend(fontsize=7)
    return _save(figure, record.with_suffix(".png"))


def plot_batches(record: Path) -> Path:
    """Time against query tokens on linear axes, ours, the peer's and the floor; a panel a kind of lists and heads."""
    pyplot = _pyplot()
    panels: dict[tuple[str, int], list[Row]] = {}
    for row in json.loads(record.read_text())["rows"]:
        if not row["kind"].endswith("ragged"):
            kind = row["kind"]
            if "valid" in row:
                kind = f"{kind.removesuffix(' short')}, {row['valid']} of {row['topk']} valid"
            panels.setdefault((kind, row["h"]), []).append(row)
    kinds = list(dict.fromkeys(kind for kind, _ in panels))
    heads = sorted({h for _, h in panels})
    figure, grid = pyplot.subplots(
        max(len(kinds), 1), max(len(heads), 1), figsize=(2.8 * len(heads) + 1, 2.6 * len(kinds) + 0.5), squeeze=False
    )
    for axes in grid.flat:
        axes.axis("off")
    for (kind, h), rows in panels.items():
        axes = grid[kinds.index(kind)][heads.index(h)]
        axes.axis("on")
        rows.sort(key=_queries)
        queries = [_queries(row) for row in rows]
        peer = "FlashAttention 3" if kind == "bf16" else "FlashMLA"
        axes.plot(queries, [row["peer_us"] for row in rows], "s-", label=peer, color="tab:gray", markersize=3)
        axes.plot(queries, [row["ours_us"] for row in rows], "o-", label="cupy_mla", color="tab:green", markersize=3)
        if "floor_us" in rows[0]:
            axes.plot(queries, [row["floor_us"] for row in rows], "--", label="floor", color="tab:red")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{kind}, {h} heads", fontsize=8)
        axes.set_xlabel("query tokens (b·s_q)", fontsize=7)
        axes.set_ylabel("µs", fontsize=7)
        axes.tick_params(labelsize=7)
        if h == min(n for other, n in panels if other == kind):
            axes.legend(fontsize=7)
    return _save(figure, record.with_suffix(".png"))


def plot_dense(record: Path) -> Path:
    """Time against the floor on logarithmic axes, ours and both peers'; a panel for rows that bytes bound, one for
    those that arithmetic does."""
    pyplot = _pyplot()
    rows = json.loads(record.read_text())["rows"]
    figure, grid = pyplot.subplots(1, 2, figsize=(11, 4.5), squeeze=False)
    marks = {"flash_mla_us": ("FlashMLA", "s", "tab:gray"), "fa3_us": ("FlashAttention 3", "^", "tab:orange")}
    marks["ours_us"] = "cupy_mla", "o", "tab:green"
    for axes, bound in zip(grid[0], ("bytes", "arithmetic"), strict=True):
        shown = [row for row in rows if row["bound"] == bound]
        floors = [row["floor_us"] for row in shown]
        for column, (label, marker, color) in marks.items():
            axes.plot(floors, [row[column] for row in shown], marker, label=label, color=color, markersize=4)
        if floors:
            axes.plot([min(floors), max(floors)], [min(floors), max(floors)], "--", label="floor", color="tab:red")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"dense decode, bound by {bound}", fontsize=9)
        axes.set_xlabel("floor, µs", fontsize=8)
        axes.set_ylabel("µs", fontsize=8)
        axes.legend(fontsize=8)
    return _save(figure, record.with_suffix(".png"))


def plot_prefill(record: Path) -> Path:
    """Time of a query, ours and FlashMLA's: a panel a number of heads, a pair of bars a row."""
    pyplot = _pyplot()
    panels: dict[int, list[Row]] = {}
    for row in json.loads(record.read_text())["rows"]:
        panels.setdefault(numbers(row["case"])["h"], []).append(row)
    most = max(map(len, panels.values()), default=1)
    figure, line = pyplot.subplots(
        1, max(len(panels), 1), figsize=(3.2 * len(panels) + 1, 0.32 * most + 1.2), squeeze=False
    )
    for axes, (h, rows) in zip(line[0], sorted(panels.items()), strict=False):
        for shift, key, label, color in (
            (-0.2, "peer_us", "FlashMLA", "tab:gray"),
            (0.2, "ours_us", "cupy_mla", "tab:green"),
        ):
            times = [row[key] / numbers(row["case"])["s_q"] for row in rows]
            axes.barh([i + shift for i in range(len(rows))], times, 0.4, label=label, color=color)
        names = [re.sub(r"prefill h \d+ |s_q \d+ |topk 2048 ?", "", row["case"]).strip() for row in rows]
        axes.set_yticks(range(len(rows)), names, fontsize=7)
        axes.set_ylim(most - 0.5, -0.5)
        axes.set_title(f"{h} heads", fontsize=8)
        axes.set_xlabel("µs a query", fontsize=8)
        axes.tick_params(labelsize=7)
    line[0][0].legend(fontsize=7)
    return _save(figure, record.with_suffix(".png"))


def plot_indexer(record: Path) -> Path:
    """Time of every row, ours and the best peer's, on logarithmic axes: a panel a kind of work."""
    pyplot = _pyplot()
    panels: dict[str, list[Row]] = {}
    for row in json.loads(record.read_text())["rows"]:
        panels.setdefault(row["work"], []).append(row)
    most = max(map(len, panels.values()), default=1)
    height = -(-len(panels) // 2)
    figure, grid = pyplot.subplots(max(height, 1), 2, figsize=(10, max(height, 1) * (0.2 * most + 1.2)), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (work, rows) in zip(grid.flat, panels.items(), strict=False):
        rows.sort(key=lambda row: row["peer_us"])
        for shift, key, label, color in (
            (-0.2, "peer_us", "best peer", "tab:gray"),
            (0.2, "ours_us", "cupy_mla", "tab:green"),
        ):
            axes.barh([i + shift for i in range(len(rows))], [row[key] for row in rows], 0.4, label=label, color=color)
        axes.set_yticks(range(len(rows)), [row["case"].removeprefix(work).strip() for row in rows], fontsize=6)
        axes.set_xscale("log")
        axes.set_title(work.replace("_", " "), fontsize=8)
        axes.set_xlabel("µs", fontsize=7)
        axes.tick_params(axis="x", labelsize=7)
    grid[0][0].legend(fontsize=7)
    return _save(figure, record.with_suffix(".png"))


def _queries(row: Row) -> int:
    n = numbers(row["case"])
    return n["b"] * n["s_q"]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    return path


def write() -> None:
    """Bring the texts and plots up to date."""
    for path, wanted in texts().items():
        before, _, after = split(path)
        path.write_text(f"{before}{BEGIN}\n{wanted}\n{END}{after}")
    plot_ratios(RESULTS / "ratios.png")
    if load("sparse_decode")["rows"]:
        plot_decode(RESULTS / "sparse_decode.json")
    if load("decode_batches")["rows"]:
        plot_batches(RESULTS / "decode_batches.json")
    if load("sparse_prefill")["rows"]:
        plot_prefill(RESULTS / "sparse_prefill.json")
    if load("indexer")["rows"]:
        plot_indexer(RESULTS / "indexer.json")
    for path in dense_records():
        plot_dense(path)


def take_part(path: Path) -> None:
    """Put the rows of a `<name>.part.json` into `<name>.json`, in place of those of the same kinds, or cases where rows
    have no kind. Each of them says what was measured when: `commit`, `date` and `seed`."""
    part = json.loads(path.read_text())
    whole = path.with_name(path.name.replace(".part.json", ".json"))
    record = json.loads(whole.read_text())
    kinds = {row.get("kind", row["case"]) for row in part["rows"]}
    of_run = {name: part[name] for name in ("commit", "date", "seed") if name in part}
    record["rows"] = [row for row in record["rows"] if row.get("kind", row["case"]) not in kinds]
    record["rows"] += [{**row, **of_run} for row in part["rows"]]
    if "left_out" in part:
        record["left_out"] = part["left_out"]
    whole.write_text(json.dumps(record, indent=1) + "\n")


def split(path: Path) -> tuple[str, str, str]:
    """A file's text before BEGIN, between the marks, and after END."""
    before, _, rest = path.read_text().partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside.strip(), after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail when a text differs from the records")
    parser.add_argument("--part", type=Path, metavar="FILE", help="first put these rows into the record of all")
    options = parser.parse_args()
    if options.part:
        take_part(options.part)
    if not options.check:
        write()
        return
    for path, wanted in texts().items():
        if split(path)[1] != wanted:
            sys.exit(f"{path.relative_to(ROOT)} differs from benchmarks/results: run python benchmarks/report.py")


if __name__ == "__main__":
    main()
