"""FP8 decode of V3.2 and bf16 prefill, ours and FlashMLA's, against float64 on the same (dequantized) rows; and our
decode over every row format, against float64 on the rows as they are stored, and on those before quantization.

python benchmarks/accuracy.py [--only REGEX]

Prints ‖out - ref‖ / ‖ref‖ and the largest error of lse, side by side; of FP8 for scales as vLLM writes them (float32,
which FlashMLA rounds to bf16) and powers of two. Writes accuracy.json: `ours`, `peer`, `ours_lse`, `peer_lse`. Rows of
formats have no peer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from harness import Options, Record, flash_mla_peer
from inputs import PLACE, insert, normal, random_slots

import cupy_mla
from cupy_mla import flash_mla
from cupy_mla.layouts import ATTENTION_LAYOUTS, EXTRA_OF, V32_FP8, Layout

HEADS, TOPK, BATCH, BLOCK_SIZE, TOKENS = 128, 2048, 4, 64, 32768
QUERY_TOKENS = 2

Inputs = tuple[torch.Tensor, torch.Tensor]  # q, rows


def unit_normal() -> Inputs:
    """Unit normal queries and rows, one of the rows' tiles 8 times as large."""
    rows = normal(TOKENS, 576)
    rows[:, : V32_FP8.scale_tile] *= 8
    return normal(BATCH, QUERY_TOKENS, HEADS, 576), rows


def peaked() -> Inputs:
    """The same with queries 4 times as large: a few rows take the softmax."""
    q, rows = unit_normal()
    return 4 * q, rows


def small() -> Inputs:
    """Queries and rows of size 0.1: all rows count alike, and the result is small."""
    return 0.1 * normal(BATCH, QUERY_TOKENS, HEADS, 576), 0.1 * normal(TOKENS, 576)


CASES: dict[str, Callable[[], Inputs]] = {
    "unit normal, one tile 8x larger": unit_normal,
    "peaked softmax, q 4x": peaked,
    "small values": small,
}
PREFILL_FACTORS = (1, 2, 4, 8)  # the larger the queries, the fewer rows take the softmax


def packed(rows: torch.Tensor, scale_format: str) -> torch.Tensor:
    cache = torch.empty(TOKENS // BLOCK_SIZE, BLOCK_SIZE, 1, V32_FP8.token_bytes, device="cuda", dtype=torch.uint8)
    slots = torch.arange(TOKENS, device="cuda")
    cupy_mla.concat_and_cache_mla(rows[:, :512], rows[:, 512:], cache, slots, scale_format=scale_format)
    return cache


def dequantized(cache: torch.Tensor) -> torch.Tensor:
    """The rows of a V32_FP8 cache in float64, exactly."""
    layout, rows = V32_FP8, cache.view(-1, V32_FP8.token_bytes)
    scales_end = layout.scale_offset + 4 * layout.num_scales
    values = rows[:, : layout.d_nope].contiguous().view(torch.float8_e4m3fn).float().double()
    scales = rows[:, layout.scale_offset : scales_end].contiguous().view(torch.float32).double()
    rope = rows[:, layout.rope_offset :].contiguous().view(torch.bfloat16).double()
    return torch.cat([values * scales.repeat_interleave(layout.scale_tile, 1), rope], 1)


def in_float64(q: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out [b, s_q, h, 512] and lse [b, h, s_q] of float64 rows."""
    chosen = rows[indices.long()]  # [b, s_q, topk, d_qk]
    logits = torch.einsum("bshd,bstd->bsht", q.double(), chosen) * q.shape[-1] ** -0.5
    lse = logits.logsumexp(-1)
    return torch.einsum("bsht,bstd->bshd", (logits - lse[..., None]).exp(), chosen[..., :512]), lse.transpose(1, 2)


def distance(got: Inputs, want: Inputs) -> tuple[float, float]:
    """Relative error of out, largest error of lse."""
    (out, lse), (ref, ref_lse) = got, want
    return ((out.double() - ref).norm() / ref.norm()).item(), (lse.double() - ref_lse).abs().max().item()


def decode_errors(peer: Any, make: Callable[[], Inputs], scale_format: str) -> Iterator[tuple[float, float]]:
    """`distance` of our decode, and of the peer's."""
    q, rows = make()
    cache, indices = packed(rows, scale_format), random_slots(BATCH, QUERY_TOKENS, TOPK, slots=TOKENS)
    want = in_float64(q, dequantized(cache), indices)
    for module in (flash_mla, peer):
        meta, _ = module.get_mla_metadata()
        got = module.flash_mla_with_kvcache(q, cache, None, None, 512, meta, is_fp8_kvcache=True, indices=indices)
        yield distance(got, want)


def prefill_errors(peer: Any, factor: int) -> Iterator[tuple[float, float]]:
    """`distance` of our prefill, and of the peer's, of unit normal rows and queries `factor` times as large."""
    s_q = BATCH * QUERY_TOKENS
    q, rows, indices = factor * normal(s_q, HEADS, 576), normal(TOKENS, 576), random_slots(s_q, 1, TOPK, slots=TOKENS)
    out, lse = in_float64(q[None], rows.double(), indices[None, :, 0])
    for module in (flash_mla, peer):
        result = module.flash_mla_sparse_fwd(q, rows[:, None], indices, 576**-0.5)
        yield distance((result[0], result[2]), (out[0], lse[0].T))


FORMATS: dict[str, tuple[Layout, ...]] = {  # a layout, or those of a main and an extra cache
    f"{layout.name} {layout.d_qk}": (layout,) for layout in ATTENTION_LAYOUTS if layout.quantized
} | {f"{main.name} and {extra.name}": (main, extra) for main, extras in EXTRA_OF.items() for extra in extras}


def format_errors(of: tuple[Layout, ...]) -> Iterator[tuple[float, float]]:
    """`distance` of our decode over caches of these layouts: from the rows as they are stored, and from those before
    quantization. Half of each list is of each cache."""
    d_qk = of[0].d_qk
    q, rows = (part[..., :d_qk].contiguous() for part in unit_normal())
    caches, slots = [], torch.arange(TOKENS, device="cuda")
    for layout in of:
        caches.append(cupy_mla.empty_cache(layout, TOKENS // BLOCK_SIZE, BLOCK_SIZE, PLACE))
        insert(layout, rows, caches[-1], slots)
    lists = [random_slots(BATCH, QUERY_TOKENS, TOPK // len(of), slots=TOKENS) for _ in of]
    extra = {"extra_k_cache": caches[1], "extra_indices": lists[1], "extra_layout": of[1].name} if of[1:] else {}
    got = cupy_mla.sparse_decode(q, caches[0], lists[0], d_qk**-0.5, layout=of[0].name, **extra)
    stored = [
        cupy_mla.unpack_rows(kv_cache, slots, layout=layout.name) for kv_cache, layout in zip(caches, of, strict=True)
    ]
    places = torch.cat([indices + TOKENS * i for i, indices in enumerate(lists)], -1)
    for seen in (stored, [rows] * len(of)):
        yield distance(got, in_float64(q, torch.cat(seen).double(), places))


def add_format_rows(record: Record, name: str, of: tuple[Layout, ...]) -> None:
    """The two rows of a format, if they are wanted."""
    cases = [f"{name}; {rows}" for rows in ("rows as stored", "rows before quantization")]
    if not any(map(record.wants, cases)):
        return
    for case, (ours, lse) in zip(cases, format_errors(of), strict=True):
        if not math.isfinite(ours + lse):
            record.wrong.append(f"{case}: a result is not finite")
        record.add_row({"case": case, "ours": ours, "ours_lse": lse}, f"{ours:9.1e} {'':9} {lse:9.1e}")


def add_row(record: Record, case: str, errors: Callable[[], Iterable[tuple[float, float]]]) -> None:
    """The row of a case, if it is wanted."""
    if not record.wants(case):
        return
    (ours, ours_lse), (theirs, theirs_lse) = errors()
    if not all(map(math.isfinite, (ours, ours_lse, theirs, theirs_lse))):
        record.wrong.append(f"{case}: a result is not finite")
    row = {"case": case, "ours": ours, "peer": theirs, "ours_lse": ours_lse, "peer_lse": theirs_lse}
    record.add_row(row, "".join(f"{x:10.1e}" for x in (ours, theirs, ours_lse, theirs_lse))[1:])


def main() -> None:
    torch.manual_seed(0)
    record = Record("accuracy", Options.parse(__doc__), "ours,peer,ours lse,peer lse")
    peer = flash_mla_peer()
    for scale_format, scales in (("fp32", "float32 scales"), ("ue8m0", "scales powers of two")):
        for name, make in CASES.items():
            add_row(record, f"{name}; {scales}", partial(decode_errors, peer, make, scale_format))
    for factor in PREFILL_FACTORS:
        add_row(record, f"bf16 prefill, q {factor}x", partial(prefill_errors, peer, factor))
    for name, of in FORMATS.items():
        add_format_rows(record, name, of)
    print(record.write())


if __name__ == "__main__":
    main()
