"""Row formats that no peer reads on Hopper: beside FlashMLA over the nearest rows that it has, or ours over those.

python benchmarks/formats.py [--quick] [--only REGEX] [--limit SECONDS]

Sizes are drawn at random; the seed is in the record. `near_us` is ours over the nearest rows, `peer_us` FlashMLA's over
the same rows, both with the lists and lengths of `ours_us`; FlashMLA's heads are padded to 64, which is not timed.
`ratio` is of the peer where there is one, else of ours over the nearest rows.

`max_abs_err` of attention is the largest difference to our own result over the chosen rows as they are stored, unpacked
to bf16. FlashMLA's result is compared with ours over the nearest rows. Packing and gathering stand beside a copy of as
many bytes as they read and write: `ratio` is the share of its bandwidth, `max_abs_err` the largest difference to the
NumPy reference on fewer tokens. Keys of the indexer are measured by indexer_v41.py. Writes formats.json.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from cache_ops import Case, beside_copy, error_of, filling_slots, paged
from cases import FORMATS, NEAREST, judge
from decode_batches import give_lengths
from harness import SETS, Options, Record, flash_mla_peer, load_kernels, peer_name, time_side_by_side
from inputs import PLACE, insert, layout_cache, normal, random_slots
from rows import Set, decode_calls, padded

import cupy_mla
from cupy_mla import flash_mla, layouts
from cupy_mla.layouts import Layout

HEADS, LARGEST = (8, 16, 32, 64, 128), 264
TOKENS, BLOCK = 1 << 21, 64  # rows of each cache, and of a block
WINDOW = 128
PACKED, COMPARED = 1 << 18, 1 << 12  # tokens that are packed and gathered, and of those that NumPy repeats
# The kernels of decode, packing and gathering.
KERNELS = (
    r"^cache/(pack|unpack|gather)|^attention/(?!backward|dense|group|bf16_grouped|merge|attention_target|portable)"
)


class Format(NamedTuple):
    """Rows to measure.

    Attributes:
        name: what begins the names of its cases.
        main, extra: layouts of both caches; without an extra one there is one list.
        near: the nearest layout, of both caches then.
        peer: whether FlashMLA reads the nearest rows, and the ratio is to it.
        drawn: sizes for each number of heads.
        extra_topk: of the extra list; None: at random.
    """

    name: str
    main: Layout
    extra: Layout | None
    near: Layout
    peer: bool
    drawn: int
    extra_topk: int | None = None


MEASURED = (
    Format("v41_fp8", layouts.V41_FP8, layouts.V41_FP8, layouts.V4_FP8, True, 4),
    Format("v41_fp8+v41_fp4", layouts.V41_FP8, layouts.V41_FP4, layouts.V4_FP8, True, 4, 1024),
    Format("v41_fp8_split", layouts.V41_FP8_SPLIT, layouts.V41_FP8_SPLIT, layouts.V4_FP8, True, 1),
    Format("v32_nope_fp8", layouts.V32_NOPE_FP8, None, layouts.V32_FP8, True, 4),
    Format("plain_fp8_512", layouts.PLAIN_FP8_512, None, layouts.BF16_512, False, 4),
    Format("plain_fp8_576", layouts.PLAIN_FP8_576, None, layouts.BF16_576, False, 2),
    Format("v32_nvfp4", layouts.V32_NVFP4, None, layouts.V32_FP8, False, 4),
    Format("v4_nvfp4", layouts.V4_NVFP4, layouts.V4_NVFP4, layouts.V4_FP8, False, 2),
)
MOVED = {of.name: of.main for of in MEASURED if "+" not in of.name} | {of.name: of for of in layouts.EXTRA_LAYOUTS}


def sizes(rng: random.Random, of: Format, quick: bool) -> Iterator[dict[str, Any]]:
    """What the rows of a format are of, in the fields that the record gives them: requests even on a logarithmic scale,
    with an extra cache lengths of their own."""
    for h in HEADS:
        batches: set[int] = set()
        while len(batches) < (1 if quick else of.drawn):
            batches.add(round(math.exp(rng.uniform(0, math.log(LARGEST)))))
        for b in sorted(batches):
            extra = (of.extra_topk or 128 * rng.randint(2, 8)) if of.extra else 0
            topk = WINDOW if of.extra else 128 * rng.randint(4, 16)
            yield {"format": of.name, "h": h, "b": b, "topk": topk, "extra_topk": extra, "lengths": bool(extra)}


def name_of(size: dict[str, Any]) -> str:
    extra = f"+{size['extra_topk']} lengths" if size["extra_topk"] else ""
    return f"{size['format']} h {size['h']} b {size['b']} topk {size['topk']}{extra}"


def gathering(layout: Layout, tokens: int) -> Case:
    """A reader's call, of a few requests of unequal lengths."""
    lengths, starts, table, blocks = paged(4, tokens)
    kv_cache = layout_cache(layout, blocks * BLOCK, BLOCK)
    name, moved = {"layout": layout.name}, tokens * (layout.token_bytes + 2 * layout.d_qk)
    arrays = {"block_table": table, "seq_lens": lengths}
    if layout.of_v4:
        out = torch.zeros(4, int(lengths.max()), layout.d_qk, device="cuda", dtype=torch.bfloat16)
        arrays |= {"out": out, "k_cache": kv_cache}
        settings = {**name, "gather_lens": None, "block_size": BLOCK, "offset": 0}
        return Case("gather", cupy_mla.dequantize_and_gather_k_cache, arrays, settings, ("out",), moved)
    dst = torch.zeros(tokens, layout.d_qk, device="cuda", dtype=torch.bfloat16)
    arrays |= {"src_cache": kv_cache, "dst": dst, "workspace_starts": starts[:-1].contiguous()}
    return Case("gather", cupy_mla.cp_gather_and_upconvert_fp8_kv_cache, arrays, name, ("dst",), moved)


@cache
def attended(layout: Layout) -> torch.Tensor:
    return layout_cache(layout, TOKENS, BLOCK)[:, :, None]


def input_sets(of: Format, size: dict[str, Any]) -> list[Set]:
    """Queries of a width that serves all rows, lists and lengths."""
    b, sets = size["b"], []
    for _ in range(SETS):
        s = {"q": normal(b, 1, size["h"], 576), "indices": random_slots(b, 1, size["topk"], slots=TOKENS)}
        if of.extra:
            s["extra_indices"] = random_slots(b, 1, size["extra_topk"], slots=TOKENS)
        sets.append(s)
    if of.extra:
        give_lengths(sets, size)
    return sets


def over(main: Layout, extra: Layout | None, sets: list[Set]) -> list[Set]:
    """The sets with caches of these layouts, and queries as wide as their rows."""
    caches = {"k_cache": attended(main)} | ({"extra": attended(extra)} if extra else {})
    return [{**s, **caches, "q": s["q"][..., : main.d_qk].contiguous()} for s in sets]


def over_unpacked(of: Format, s: Set) -> torch.Tensor:
    """Our result over the chosen rows as they are stored, in bf16."""
    rows, valid = [], []
    for layout, kv_cache, indices, lengths in (
        (of.main, s["k_cache"], s["indices"], s.get("topk_length")),
        *([(of.extra, s["extra"], s["extra_indices"], s["extra_topk_length"])] if of.extra else []),
    ):
        b, _, topk = indices.shape
        chosen = cupy_mla.unpack_rows(kv_cache, indices.flatten(), layout=layout.name)
        rows.append(chosen.bfloat16().view(b, topk, -1))
        ends = torch.full((b,), topk, device="cuda") if lengths is None else lengths
        valid.append(torch.arange(topk, device="cuda") < ends[:, None])
    flat, used = torch.cat(rows, 1), torch.cat(valid, 1)
    places = torch.arange(used.numel(), device="cuda").view(used.shape)
    lists = torch.where(used, places, -1).int()[:, None]
    return cupy_mla.sparse_decode(s["q"], flat.view(-1, BLOCK, 1, of.main.d_qk), lists, of.main.d_qk**-0.5)[0]


def attend(record: Record, peer: Any, of: Format, size: dict[str, Any]) -> None:
    """A row of attention, if wanted."""
    case = name_of(size)
    if not record.wants(case):
        return
    sets = input_sets(of, size)
    own, near = over(of.main, of.extra, sets), over(of.near, of.extra and of.near, sets)
    calls = [decode_calls(flash_mla, s, kv_format=layout.name) for s, layout in ((own, of.main), (near, of.near))]
    error = record.compare(case, calls[0][0]()[0], over_unpacked(of, own[0]))
    if of.peer:
        calls.append(decode_calls(peer, [{**s, "q": padded(s["q"])} for s in near]))
        record.compare(f"{case}, the nearest rows", calls[1][0]()[0], calls[2][0]()[0][:, :, : size["h"]])
    us = time_side_by_side(*calls)
    names = {"kind": f"decode {of.name}", "near": of.near.name, **({"peer": peer_name()} if of.peer else {})}
    add(record, case, dict(zip(("ours_us", "near_us", "peer_us"), us, strict=False)), error, **size, **names)


def add(record: Record, case: str, us: dict[str, float], error: float, **more: Any) -> None:
    """A row whose ratio is that of the last time to the first; `more` goes into the record only."""
    ratio = list(us.values())[-1] / us["ours_us"]
    times = "".join(f"{us[key]:9.1f} " if key in us else " " * 10 for key in ("ours_us", "near_us", "peer_us"))
    row = {"case": case, **{key: round(time, 2) for key, time in us.items()}, "ratio": round(ratio, 3)}
    record.add_row({**row, "max_abs_err": error, **more}, f"{times}{ratio:9.2f} {error:9.1e}")


def cache_cases(layout: Layout, tokens: int) -> Iterator[Case]:
    kv_cache = cupy_mla.empty_cache(layout, tokens // BLOCK, BLOCK, PLACE)
    arrays = {"rows": normal(tokens, layout.d_qk), "kv_cache": kv_cache, "slots": filling_slots(tokens)}
    moved = tokens * (2 * layout.d_qk + layout.token_bytes + 8)
    yield Case("pack", insert, arrays, {"layout": layout}, ("kv_cache",), moved)
    yield gathering(layout, tokens)


def move(record: Record, name: str, layout: Layout) -> None:
    """The rows of packing and gathering, if wanted."""
    names = [f"{work} {name} tokens {PACKED}" for work in ("pack", "gather")]
    if not any(map(record.wants, names)):
        return
    errors = map(error_of, cache_cases(layout, COMPARED))
    sets = zip(*(cache_cases(layout, PACKED) for _ in range(SETS)), strict=True)
    for case, error, cases in zip(names, errors, sets, strict=True):
        kind = case.partition(" tokens")[0]
        ours_us, copy_us = beside_copy(cases)
        rates = {key: round(1e-3 * cases[0].moved / us) for key, us in (("gb_s", ours_us), ("copy_gb_s", copy_us))}
        if error:
            record.wrong.append(f"{case}: {error} from NumPy")
        add(record, case, {"ours_us": ours_us, "peer_us": copy_us}, error, format=name, kind=kind, peer="copy", **rates)


def main() -> None:
    options = Options.parse(__doc__)
    seed = random.randrange(1 << 31)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    record = Record("formats", options, "ours us,near us,peer us,ratio,max diff")
    record.note("seed", seed)
    peer = flash_mla_peer()
    if not options.only:
        load_kernels(KERNELS)
    for of in MEASURED:
        for size in sizes(rng, of, options.quick):
            attend(record, peer, of, size)
    for name, layout in MOVED.items():
        move(record, name, layout)
    judge([*FORMATS, *NEAREST], record.rows)
    print(record.write())


if __name__ == "__main__":
    main()
