"""What the names of the rows say: which rows are judged together, and how fast a decode could be at best."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Row = dict[str, Any]

# Measured on an H200: bytes a second that a gather of random rows reaches, and bf16 multiplications. SMs, their clock
# and L2 are an H100's, too.
GATHER = {"V32": 3.1e12, "V4": 3.1e12, "bf16": 4.25e12}
GATHER_L2, L2_BYTES = 8.5e12, 50e6
FLOPS = 812e12

TOKEN_BYTES = {"V32": 656, "V4": 584, "bf16": 1152}
D_QK = {"V32": 576, "V4": 512, "bf16": 576}


def numbers(case: str) -> dict[str, int]:
    """The numbers in a case's name: {"h": 64, "b": 2, "s_q": 1, ...}; of `topk 128+512` the sum."""
    return {name: sum(map(int, value.split("+"))) for name, value in re.findall(r"(\w+) (\d+(?:\+\d+)*)", case)}


def decode_floor_us(case: str, sets: int) -> float:
    """Microseconds that the rows of a decode take at the gather rate, or its products at the tensor cores' rate.

    Args:
        sets: input sets in rotation; where all their rows fit into L2, the gather rate is that of L2.
    """
    layout, n = case.split()[0], numbers(case)
    rows = n["b"] * n["s_q"] * n["topk"]
    size = rows * TOKEN_BYTES[layout]
    gather = size / (GATHER_L2 if sets * size < L2_BYTES else GATHER[layout])
    return 1e6 * max(gather, 2 * rows * n["h"] * (D_QK[layout] + 512) / FLOPS)


def dense_floor_us(
    tokens: list[int], lines: int, copied: float, token_bytes: int = TOKEN_BYTES["bf16"]
) -> tuple[float, str]:
    """Microseconds that the rows of a dense decode take to copy, or their products at the tensor cores' rate, and which
    of both that is: "bytes" or "arithmetic".

    Args:
        tokens: rows of each input set in rotation; where all fit into L2, the rate is that of L2.
        lines: query tokens times heads of a request.
        copied: bytes a second, read and written, of a copy on the same card.
        token_bytes: of a row.
    """
    size = sum(tokens) * token_bytes
    copy = size / (GATHER_L2 if size < L2_BYTES else copied)
    multiply = 2 * sum(tokens) * lines * (D_QK["bf16"] + 512) / FLOPS
    return 1e6 * max(copy, multiply) / len(tokens), "bytes" if copy > multiply else "arithmetic"


class Group(NamedTuple):
    """Rows whose geometric mean counts.

    Attributes:
        target: the least that it should be, where there is one.
        least: the least that each row should be.
        times: the columns whose quotient counts; None: `ratio`.
        keeps: which of these rows count, by their fields; None: all.
    """

    title: str
    record: str
    holds: Callable[[str, dict[str, int]], bool]
    target: float | None = None
    least: float = 1.0
    times: tuple[str, str] | None = None
    keeps: Callable[[Row], bool] | None = None


def _beginning(*begins: str) -> Callable[[str, dict[str, int]], bool]:
    return lambda case, n: case.startswith(begins)


PREFILL = [
    Group("prefill, 64 and 128 heads", "sparse_prefill", lambda case, n: n["h"] >= 64, 1.2),
    Group(
        "prefill, 8 to 32 heads, random lists", "sparse_prefill",
        lambda case, n: n["h"] <= 32 and not case.endswith("local"), 1.25,
    ),
    Group(
        "prefill, 8 to 32 heads, lists with locality", "sparse_prefill",
        lambda case, n: n["h"] <= 32 and case.endswith("local"), 1.5,
    ),
]  # fmt: skip
DECODE = [
    *(
        Group(
            f"FP8 decode V32, {h} heads, b·s_q ≥ 64", "sparse_decode",
            lambda case, n, h=h: case.startswith("V32") and n["h"] == h and n["b"] * n["s_q"] >= 64, 1.6,
        )
        for h in (128, 64)
    ),
    Group(
        "FP8 decode V32, 8 to 32 heads", "sparse_decode",
        lambda case, n: case.startswith("V32") and n["h"] <= 32, 2.0,
    ),
    Group(
        "FP8 decode V32, b·s_q ≤ 8", "sparse_decode",
        lambda case, n: case.startswith("V32") and n["b"] * n["s_q"] <= 8, 1.6,
    ),
    Group("FP8 decode V4", "sparse_decode", _beginning("V4"), 1.5),
    Group(
        "bf16 paged decode, b ≤ 8", "sparse_decode", lambda case, n: case.startswith("bf16") and n["b"] <= 8, 3.0
    ),
    Group(
        "bf16 paged decode, b > 8", "sparse_decode", lambda case, n: case.startswith("bf16") and n["b"] > 8, 1.2
    ),
]  # fmt: skip


def _kind(
    *kinds: str, heads: tuple[int, ...], least: int = 9, most: int = 264, valid: int | None = None
) -> Callable[[str, dict[str, int]], bool]:
    """Rows of these kinds and heads, of so many queries, with so many valid entries in short lists."""
    return lambda case, n: (
        case.partition(" h ")[0] in kinds and n["h"] in heads and least <= n["b"] * n["s_q"] <= most
        and n.get("valid") == valid
    )  # fmt: skip


MANY, FEW = (64, 128), (8, 16, 32)
BATCHES = [
    Group("every batch: V32, 64 and 128 heads", "decode_batches", _kind("V32", heads=MANY), 1.4, 1.2),
    Group("every batch: V32, 8 to 32 heads", "decode_batches", _kind("V32", heads=FEW), 1.75, 1.45),
    Group("every batch: V32 ragged, 64 and 128 heads", "decode_batches", _kind("V32 ragged", heads=MANY)),
    Group("every batch: V32 ragged, 8 to 32 heads", "decode_batches", _kind("V32 ragged", heads=FEW)),
    Group("every batch: V4, 64 and 128 heads", "decode_batches", _kind("V4", heads=MANY), 1.35, 1.1),
    Group("every batch: V4 ragged, 64 and 128 heads", "decode_batches", _kind("V4 ragged", heads=MANY), 1.35, 1.1),
    Group("every batch: V4, 8 to 32 heads", "decode_batches", _kind("V4", "V4 ragged", heads=FEW), 1.7, 1.35),
    Group(
        "every batch: bf16, beside FlashAttention 3", "decode_batches", _kind("bf16", heads=FEW + MANY, least=1), 1.3,
        1.05,
    ),
    *(
        Group(
            f"short lists: {valid} of 2048 valid", "decode_batches", _kind("V32 short", heads=MANY, valid=valid), target
        )
        for valid, target in ((100, 8.0), (512, 3.5), (1024, 2.2))
    ),
    *(
        Group(
            f"short lists, 8 to 32 heads: {valid} of 2048 valid", "decode_batches",
            _kind("V32 short", heads=FEW, valid=valid),
        )
        for valid in (100, 512, 1024)
    ),
    *(
        Group(
            f"short lists: {valid} of 2048 valid, bf16, beside FlashAttention 3", "decode_batches",
            _kind("bf16 short", heads=FEW + MANY, least=1, valid=valid), 1.0,
        )
        for valid in (512, 1024)
    ),
    Group(
        "every batch: FP8, b·s_q ≤ 8", "decode_batches",
        _kind("V32", "V32 ragged", "V4", "V4 ragged", heads=FEW + MANY, least=1, most=8), 1.6, 1.2,
    ),
    Group(
        "every batch: bf16, b·s_q ≤ 8, beside FlashAttention 3", "decode_batches",
        _kind("bf16", heads=FEW + MANY, least=1, most=8), 1.6, 1.2,
    ),
]  # fmt: skip
SMALL_PREFILL = [
    Group("prefill of 1 to 264 queries, 64 and 128 heads", "small_prefill", _beginning("small"), 1.2, 1.05),
    Group("prefill of a prompt's first 2048 tokens", "small_prefill", _beginning("causal"), 1.8),
]


def _shape(kb: int, *begins: str) -> Callable[[str, dict[str, int]], bool]:
    """Rows of one shape of the portable kernel: of the shared memory that it is built for."""
    return lambda case, n: case.startswith(begins) and n.get("shape", 163) == kb


PORTABLE = [
    Group(f"portable kernels{suffix}: {title}", "portable", _shape(kb, *begins), target, least)
    for kb, suffix, prefill in ((163, "", 0.6), (99, " in 99 KB", 0.5))
    for title, begins, target, least in (
        ("prefill", ("prefill",), prefill, 0.5),
        ("FP8 decode V32, 8 to 32 heads", ("V32 h 8 ", "V32 h 16 ", "V32 h 32 "), 1.0, 0.5),
        ("FP8 decode V32, 64 and 128 heads", ("V32 h 64 ", "V32 h 128 "), 0.75, 0.5),
        ("FP8 decode V4", ("V4 ",), 0.75, 0.5),
        ("bf16 decode, beside FlashAttention 3", ("bf16 ",), 0.8, 0.5),
        ("dense decode", ("dense ",), 0.75, 0.55),
    )
]
CACHE_OPS = [
    Group(
        "packing, gathering, concatenating, beside a copy of as many bytes", "cache_ops",
        _beginning("pack", "gather", "concat"),
    )
]  # fmt: skip
INDEXER = [
    Group("indexer: prefill logits", "indexer", _beginning("prefill_logits"), 1.15),
    Group("indexer: decode logits", "indexer", _beginning("decode_logits"), 1.1),
    Group("indexer: prefill top-k", "indexer", _beginning("topk_prefill"), 2.0, 1.3),
    Group("indexer: decode top-k", "indexer", _beginning("topk_decode"), 1.4, 1.1),
    Group("indexer: prefill selection, logits to slots", "indexer", _beginning("select_prefill"), 1.3, 1.1),
    Group("indexer: decode selection, logits to slots", "indexer", _beginning("select_decode"), 1.3, 1.1),
    Group("indexer: portable kernel's logits", "indexer", _beginning("portable_"), 0.35, 0.25),
]
INDEXER_V41 = [
    *(
        Group(
            f"V4.1's index: logits of candidates of {title} keys, beside dense ones", "indexer_v41",
            lambda case, n, keys=keys: case.startswith("candidates") and n["context"] == keys, 5.0, 3.0,
        )
        for title, keys in (("128 K", 1 << 17), ("1 M", 1 << 20))
    ),
    Group(
        "V4.1's index: logits over more than 1 GB of MXFP4 keys, beside FP8 keys", "indexer_v41", _beginning("mxfp4"),
        1.2, 1.0, keeps=lambda row: row["keys_gb"] > 1,
    ),
    Group(
        "V4.1's index: logits over fewer MXFP4 keys, beside FP8 keys", "indexer_v41", _beginning("mxfp4"),
        keeps=lambda row: row["keys_gb"] <= 1,
    ),
    Group(
        "V4.1's index: packing and gathering, beside a copy", "indexer_v41", _beginning("pack", "gather", "widen"), 0.85
    ),
]  # fmt: skip
DENSE = [
    Group("dense decode, bf16", "dense_decode", lambda case, n: n["h"] > 0, 1.15),
    Group("dense decode, bf16, 1 to 4 requests", "dense_decode", lambda case, n: n["b"] <= 4, 1.25, 1.05),
    Group("dense decode, bf16, 2 to 4 query tokens", "dense_decode", lambda case, n: n["s_q"] >= 2, 1.1),
]
DENSE_FP8 = [
    Group("dense decode, V32_FP8 against our bf16 where memory bounds", "dense_fp8", _beginning("v32_fp8 bytes"), 1.5),
    Group(
        "dense decode, V32_FP8 against our bf16 that reaches 70 % of the copy bandwidth", "dense_fp8",
        _beginning("v32_fp8 "), 1.5, keeps=lambda row: row.get("bf16_of_copy", 0.0) >= 0.7,
    ),
    Group("dense decode, PLAIN_FP8, q in e4m3", "dense_fp8", _beginning("plain_fp8"), 1.2),
]  # fmt: skip
DENSE_BANDWIDTH = [
    *(
        Group(
            f"dense decode, 16 heads, over 1 GB of {title} rows, beside a copy", "dense_bandwidth",
            _beginning(f"full {name} "), 0.9, 0.9,
        )
        for title, name in (
            ("bf16", "bf16"), ("float16", "fp16"), ("V32_FP8", "v32_fp8"), ("PLAIN_FP8", "plain_fp8"),
            ("V4_FP8", "v4_fp8"),
        )
    ),
    Group("dense decode, float16 beside our bf16", "dense_bandwidth", _beginning("fp16 "), least=0.95),
    Group("dense decode, V4_FP8 beside our bf16", "dense_bandwidth", _beginning("v4_fp8 ")),
]  # fmt: skip
SHORT_CONTEXTS = [
    Group(
        "short contexts: the dense way, where it is taken, beside lists", "short_contexts",
        _beginning("short"), 1.0, 0.95, keeps=lambda row: row["taken"] == "dense",
    ),
    Group(
        "short contexts: lists, where they are taken, beside the dense way", "short_contexts",
        _beginning("short"), 1.0, 0.95, ("dense_us", "lists_us"), keeps=lambda row: row["taken"] == "lists",
    ),
]  # fmt: skip
TRAINING = [
    Group(
        "backward, 64 and 128 heads, beside the faster of cuDNN and TileLang", "training",
        lambda case, n: case.startswith("backward") and n["h"] >= 64, 1.1, 0.9,
    ),
    Group(
        "backward, 64 and 128 heads, from 16384 tokens on", "training",
        lambda case, n: case.startswith("backward") and n["h"] >= 64 and n["s"] >= 16384, 1.3, 0.9,
    ),
    Group(
        "backward, 8 to 32 heads, beside TileLang", "training",
        lambda case, n: case.startswith("backward") and n["h"] <= 32, 1.5,
    ),
    *(
        Group(
            f"backward, 64 and 128 heads, {title}", "training",
            lambda case, n: case.startswith("backward") and n["h"] >= 64, target, least, times,
        )
        for title, target, least, times in (
            ("beside TileLang's", 4.0, 1.0, ("tilelang_us", "ours_us")),
            ("beside TileLang's of 64 heads a CTA", 2.2, 1.0, ("tilelang_64_us", "ours_us")),
            ("portable, beside the faster of cuDNN and TileLang", 0.37, 0.3, ("peer_us", "portable_us")),
        )
    ),
    Group("indexer's loss and gradients, beside the attention's backward", "training", _beginning("loss"), 0.67, 0.67),
    Group("indexer's warm-up, beside the attention's backward", "training", _beginning("warm-up"), 0.67, 0.67),
]  # fmt: skip


FORMATS = [
    Group(f"{title}, beside {beside}", "formats", _beginning(f"{name} h "), target, least)
    for title, name, beside, target, least in (
        ("V41_FP8", "v41_fp8", "FlashMLA's V4", 1.4, 1.1),
        ("V41_FP8 and V41_FP4", "v41_fp8+v41_fp4", "FlashMLA's V4", 1.4, 1.1),
        ("V41_FP8_SPLIT", "v41_fp8_split", "FlashMLA's V4", 1.4, 1.1),
        ("V32_NOPE_FP8", "v32_nope_fp8", "FlashMLA's V32", 1.5, 1.2),
        ("PLAIN_FP8 of 512", "plain_fp8_512", "our bf16", 1.4, 1.0),
        ("PLAIN_FP8 of 576", "plain_fp8_576", "our bf16", None, 1.0),
        ("V32_NVFP4", "v32_nvfp4", "our V32_FP8", 1.0, 0.9),
        ("V4_NVFP4", "v4_nvfp4", "our V4_FP8", None, 0.9),
    )
] + [
    Group("packing these rows, beside a copy of as many bytes", "formats", _beginning("pack"), 0.85, 0.85),
    Group("gathering these rows, beside a copy of as many bytes", "formats", _beginning("gather"), 0.85, 0.85),
]
# Smaller rows beside the rows of V4 and V3.2: at most 3 % longer where arithmetic bounds, else less time.
NEAREST = [
    Group(f"{title}, beside our {near}", "formats", _beginning(f"{name} h "), 0.97, 0.97, ("near_us", "ours_us"))
    for title, name, near in (
        ("V41_FP8", "v41_fp8", "V4_FP8"),
        ("V41_FP8 and V41_FP4", "v41_fp8+v41_fp4", "V4_FP8"),
        ("V41_FP8_SPLIT", "v41_fp8_split", "V4_FP8"),
        ("V32_NOPE_FP8", "v32_nope_fp8", "V32_FP8"),
    )
]
SERVED = [
    *(
        Group(
            f"V4 as served: {title}", "served",
            lambda case, n, heads=heads: case.startswith("V4 ") and n["h"] in heads, target, least,
        )
        for title, heads, target, least in (
            ("64 heads", (64,), 1.5, 1.15), ("128 heads", (128,), 1.4, 1.1), ("8 to 32 heads", FEW, 1.7, 1.4)
        )
    ),
    Group("prefill of 32 to 330 queries, 8 to 128 heads", "served", _beginning("prefill"), 1.35, 1.05),
    Group("prefill, 16 to 32 heads, random lists of any length", "served", _beginning("few heads"), 1.35, 1.05),
    Group("top-k of rows of at most k, beside the best peer or a copy", "served", _beginning("short rows"), 1.0),
]  # fmt: skip
LAYER = [
    Group("V3.2's decode step of a layer, cache writes to attention", "layer", _beginning("layer"), 1.35, 1.15)
]  # fmt: skip


def rows_of_group(group: Group, rows: Iterable[Row]) -> list[Row]:
    """A group's rows, with its ratio."""
    held = [row for row in rows if group.holds(row["case"], numbers(row["case"]))]
    if group.keeps is not None:
        held = [row for row in held if group.keeps(row)]
    if group.times is None:
        return held
    above, below = group.times
    return [{**row, "ratio": row[above] / row[below]} for row in held if above in row and below in row]


def of_group(group: Group, rows: Iterable[Row]) -> list[float]:
    """The ratios of a group's rows."""
    return [row["ratio"] for row in rows_of_group(group, rows)]


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def judge(groups: Iterable[Group], rows: list[Row]) -> None:
    """Print each group's geometric mean beside its target, and its rows under the least that they should be."""
    below: dict[str, float] = {}
    for group in groups:
        found = {row["case"]: row["ratio"] for row in rows_of_group(group, rows)}
        if found:
            target = f", target {group.target}; {group.least}" if group.target else ""
            print(
                f"{group.title}: {len(found)} rows, geometric mean {geometric_mean([*found.values()]):.2f}, "
                f"least {min(found.values()):.2f}{target}"
            )
        below |= {f"{case}: {group.title}": ratio for case, ratio in found.items() if ratio < group.least}
    print(f"{len(below)} times under the least that a row of {len(rows)} should be")
    for case, ratio in below.items():
        print(f"  {ratio:.2f} {case}")
