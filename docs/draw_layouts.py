"""Draws the cache layouts of `cupy_mla/layouts.py` into docs/layouts/; `--check` only says whether they are up to date.

python docs/draw_layouts.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

from cupy_mla.layouts import (
    BF16_512,
    BF16_576,
    D_V,
    INDEXER_FP8,
    INDEXER_MXFP4,
    PLAIN_FP8_512,
    PLAIN_FP8_576,
    V4_FP8,
    V4_NVFP4,
    V32_FP8,
    V32_NOPE_FP8,
    V32_NVFP4,
    V41_FP4,
    V41_FP4_SPLIT,
    V41_FP8,
    V41_FP8_SPLIT,
    Layout,
)

FOLDER = Path(__file__).resolve().parent / "layouts"
LAYOUTS = {
    "bf16_576": BF16_576, "bf16_512": BF16_512, "v32_fp8": V32_FP8, "v4_fp8": V4_FP8, "plain_fp8_576": PLAIN_FP8_576,
    "plain_fp8_512": PLAIN_FP8_512, "v32_nope_fp8": V32_NOPE_FP8, "v41_fp8": V41_FP8, "v41_fp8_split": V41_FP8_SPLIT,
    "v32_nvfp4": V32_NVFP4, "v4_nvfp4": V4_NVFP4, "v41_fp4": V41_FP4, "v41_fp4_split": V41_FP4_SPLIT,
    "indexer_fp8": INDEXER_FP8, "indexer_mxfp4": INDEXER_MXFP4,
}  # fmt: skip

WIDTH, BAR, LEAST = 880, 44, 96  # pixels: of all, of a bar's height, of the narrowest part
COLOURS = {"nope": "#cfe3f7", "rope": "#fde3c3", "scales": "#cdebd0", "pad": "#e6e6e6"}
ITEM = {"fp32": (4, "float32"), "ue8m0": (1, "UE8M0"), "e4m3": (1, "e4m3")}
EXAMPLE_BLOCK = 64


class Part(NamedTuple):
    """Bytes `start` to `end` (exclusive), what they are, and how many values of them share a scale (0: none)."""

    start: int
    end: int
    label: str
    kind: str
    tile: int = 0


def token_parts(layout: Layout) -> list[Part]:
    """A token's data, in the order of its bytes."""
    parts = []
    if layout.quantized:
        what = "NoPE" if layout.d_rope else "values" if layout.d_qk >= D_V else "key"
        item, tile = "e2m1" if layout.code_bits == 4 else "e4m3", layout.scale_tile * layout.code_bits // 8
        parts.append(Part(0, layout.nope_bytes, f"{what}: {layout.d_nope} × {item}", "nope", tile))
    else:
        parts.append(Part(0, 2 * layout.d_nope, f"NoPE: {layout.d_nope} × bf16", "nope"))
    if layout.d_rope:
        end, item = layout.rope_offset + layout.rope_bytes, "e4m3" if layout.rope_coded else "bf16"
        parts.append(Part(layout.rope_offset, end, f"RoPE: {layout.d_rope} × {item}", "rope"))
    if layout.num_scales and not layout.scales_apart:
        parts.append(scales(layout, layout.scale_offset))
    return sorted(parts)


def scales(layout: Layout, start: int) -> Part:
    size, name = ITEM[layout.scale_kind]
    return Part(start, start + size * layout.num_scales, f"{layout.num_scales} × {name}", "scales")


def scale_parts(layout: Layout) -> list[Part]:
    """A token's scales where they stand apart."""
    parts = [scales(layout, 0)]
    if parts[0].end < layout.scale_stride:
        parts.append(Part(parts[0].end, layout.scale_stride, "0", "pad"))
    return parts


def block_parts(layout: Layout, block_size: int) -> list[Part]:
    """A block: data of its tokens, their scales where these stand apart, and what fills its stride."""
    last, data = block_size - 1, layout.row_stride
    parts = [
        Part(0, data, "token 0", "nope"),
        Part(data, 2 * data, "token 1", "nope"),
        Part(2 * data, last * data, "…", "nope"),
        Part(last * data, block_size * data, f"token {last}", "nope"),
    ]
    end = block_size * data
    if layout.scales_apart:
        each = layout.scale_stride
        parts += [
            Part(end, end + each, "scales of 0", "scales"),
            Part(end + each, end + last * each, "…", "scales"),
            Part(end + last * each, end + block_size * each, f"of {last}", "scales"),
        ]
        end += block_size * each
    if end < layout.block_bytes(block_size):
        parts.append(Part(end, layout.block_bytes(block_size), "not read", "pad"))
    return parts


def bar(parts: list[Part], y: int, equal: bool = False) -> Iterator[str]:
    """A row of boxes: as wide as their bytes say (but not too narrow to read) or all alike; offsets below."""
    weights = [1 if equal else part.end - part.start for part in parts]
    room = WIDTH - LEAST * len(parts)
    x = 0.0
    for part, weight in zip(parts, weights, strict=True):
        width = LEAST + room * weight / sum(weights)
        box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"'
        yield f'<rect {box} fill="{COLOURS[part.kind]}" stroke="#444"/>'
        for n in range(1, (part.end - part.start) // part.tile if part.tile else 0):
            at = x + width * n * part.tile / (part.end - part.start)
            yield f'<path d="M{at:.1f} {y}v6m0 {BAR - 12}v6" stroke="#444"/>'
        yield text(x + width / 2, y + BAR / 2 + 5, part.label, "middle")
        yield text(x + 2, y + BAR + 15, str(part.start), "start", 11)
        x += width
    yield text(x - 2, y + BAR + 15, str(parts[-1].end), "end", 11)


def text(x: float, y: float, words: str, anchor: str, size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def draw(layout: Layout) -> str:
    """The picture of a layout: a token, its scales where they stand apart, a block."""
    rows: list[tuple[str, list[Part], bool]] = [("a token's data, bytes", token_parts(layout), False)]
    if layout.scales_apart and layout.quantized:
        rows.append(("a token's scales, bytes", scale_parts(layout), True))
    rows.append((f"a block of {EXAMPLE_BLOCK} tokens, bytes", block_parts(layout, EXAMPLE_BLOCK), True))
    lines = []
    for i, (title, parts, equal) in enumerate(rows):
        y = 10 + 100 * i
        lines += [text(0, y + 10, title, "start"), *bar(parts, y + 18, equal)]
    height = 100 * len(rows)
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {WIDTH + 20} {height}" font-family="sans-serif">\n'
        f'<rect x="-10" width="{WIDTH + 20}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail when a picture differs from cupy_mla/layouts.py")
    check = parser.parse_args().check
    for name, layout in LAYOUTS.items():
        path = FOLDER / f"{name}.svg"
        if not check:
            path.write_text(draw(layout))
        elif path.read_text() != draw(layout):
            sys.exit(f"docs/layouts/{path.name} differs from cupy_mla/layouts.py: run python docs/draw_layouts.py")


if __name__ == "__main__":
    main()
