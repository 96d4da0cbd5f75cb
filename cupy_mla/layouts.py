"""The cache layouts as data: sizes, offsets, tiles and scale kinds, one `Layout` each.

No byte offset of a cached token stands anywhere else. The NumPy reference slices by these numbers, and the CUDA kernels
get them as compile-time constants (`Layout.defines`). Code that serves all layouts goes through `ATTENTION_LAYOUTS` and
reads a layout's fields.

Sources: FlashMLA's description of its FP8 KV caches (DeepSeek V3.2 and V4), vLLM's `fp8_ds_mla` cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from .checks.options import require_bool, require_choice, require_instance, require_integer
from .dtypes import BFLOAT16, FLOAT16, UINT8

D_V = 512  # value width of every DeepSeek sparse layer
MAX_HEADS = 128
LEAST_E4M3 = 2.0**-9  # the smallest e4m3 number above 0
LEAST_SCALE = 2.0**-22  # the smallest UE8M0 scale of vLLM's writers: 1e-4 / 448 rounded up to a power of two
LEAST_NORMAL = 2.0**-126  # the least normal float32: the smallest float32 scale, and MXFP4 scale, of vLLM's writers


@dataclass(frozen=True, eq=False)  # there is one object of each, so a key compares it by identity, which is fast
class Layout:
    """How one token's latent KV row lies in a paged cache. All offsets and sizes are in bytes, widths in values.

    Attributes:
        name: "bf16", "fp16", "v32_fp8", "v4_fp8", "plain_fp8", "v32_nope_fp8", "v41_fp8", "v41_fp8_split",
            "v32_nvfp4", "v4_nvfp4", "v41_fp4", "v41_fp4_split", "indexer_fp8" or "indexer_mxfp4".
        d_qk: values of a row for Q.K; the first `D_V` are V. 576 or 512 (128 for the indexer).
        d_nope, d_rope: values that are quantized under scales, and values behind them without a scale (the RoPE part of
            V3.2 and V4).
        token_bytes: bytes of a token in the cache array: its last axis times the item size.
        row_stride: bytes from a token's data to the next token's data in a block.
        rope_offset: bytes from a token's data to its values without a scale.
        code_bits: bits of a quantized value: 8 (e4m3) or 4 (e2m1; the first of two has the lower bits).
        rope_coded: whether the values without a scale are e4m3; else bf16.
        scale_kind: how the scales are stored: "none", "fp32", "ue8m0", "e4m3", or "call": one float32 for all rows,
            which is an argument of each call. `kernels_cu/rows/scales.cuh` and `reference/cache.py` know the kinds.
        scale_tile: values that share one scale.
        scale_offset: bytes from a token's data to its scales; -1: a block's scales stand behind the data of all its
            tokens.
        scale_stride: bytes from a token's scales to the next token's, if `scale_offset` is -1.
        scales_in_fours: whether the scales of tiles 0, 4, 8, ... come first, then those of 1, 5, 9, ...
        least_scale: writers replace smaller e4m3 scales by it; 0: they do not.
        divided: whether e2m1 codes are values divided by an e4m3 scale; else values times its rounded inverse.
        block_align: the block stride that writers use is a multiple of it.
        half: whether values are float16; then queries and results are, too.
        told: whether dtype and last axis of a cache tell the layout; else callers must name it.
        of_v4: whether the functions for V4's models write and gather it; else those for models of V3.2's kind do.
        reader: the header of `kernels_cu/rows` that reads and writes a row, without its ending; "": kernels have code
            of their own.
        aliases: other names that users and engines give it.
    """

    name: str
    d_qk: int
    d_nope: int
    d_rope: int
    token_bytes: int
    row_stride: int
    rope_offset: int
    code_bits: int = 8
    rope_coded: bool = False
    scale_kind: str = "none"
    scale_tile: int = 0
    scale_offset: int = 0
    scale_stride: int = 0
    scales_in_fours: bool = False
    least_scale: float = 0.0
    divided: bool = False
    block_align: int = 1
    half: bool = False
    told: bool = True
    of_v4: bool = False
    reader: str = ""
    aliases: tuple[str, ...] = ()

    @cached_property
    def quantized(self) -> bool:
        """True when the NoPE part is stored as float8_e4m3fn or e2m1."""
        return self.scale_kind != "none"

    @cached_property
    def scale_of_call(self) -> bool:
        """True when the scale of all rows is an argument of the call, `k_scale`."""
        return self.scale_kind == "call"

    @property
    def nope_bytes(self) -> int:
        """Bytes of a token's quantized values."""
        return self.d_nope * self.code_bits // 8

    @property
    def rope_bytes(self) -> int:
        """Bytes of a token's values without a scale."""
        return self.d_rope if self.rope_coded else 2 * self.d_rope

    @property
    def num_scales(self) -> int:
        """Scales of a token."""
        return self.d_nope // self.scale_tile if self.scale_tile else 0

    @property
    def scales_apart(self) -> bool:
        """True when the scales of a block stand behind the data of all its tokens."""
        return self.scale_offset < 0

    @cached_property
    def rope_apart(self) -> bool:
        """True when the RoPE values stand behind V (V3.2 and the like). In V4's rows they are the last values of V."""
        return self.d_qk > D_V

    @cached_property
    def dtype(self) -> np.dtype:
        """Item type of the cache array: uint8 for quantized layouts, else bfloat16 or float16."""
        return UINT8 if self.quantized else self.values

    @cached_property
    def values(self) -> np.dtype:
        """Item type of results, and of queries without a scale."""
        return FLOAT16 if self.half else BFLOAT16

    @cached_property
    def last_axis(self) -> int:
        """Length of the cache array's last axis, in items."""
        return self.token_bytes // self.dtype.itemsize

    def block_bytes(self, block_size: int) -> int:
        """The block stride that the writers of this layout use, in bytes."""
        block_size = require_integer("block_size", block_size, 0)
        return -(-self.token_bytes * block_size // self.block_align) * self.block_align

    @property
    def names(self) -> tuple[str, ...]:
        """The names that users and engines give it."""
        return (self.name, *self.aliases)

    def defines(self) -> dict[str, int | str]:
        """The layout as constants of the kernels; `ROW_READER` is the header of its rows."""
        reader: dict[str, int | str] = {"ROW_READER": f"rows/{self.reader}.cuh"} if self.reader else {}
        return reader | {
            "D_QK": self.d_qk,
            "D_NOPE": self.d_nope,
            "D_ROPE": self.d_rope,
            "QUANTIZED_ROWS": int(self.quantized),
            "HALF_ITEMS": int(self.half),
            "TOKEN_BYTES": self.token_bytes,
            "ROW_STRIDE": self.row_stride,
            "ROPE_OFFSET": self.rope_offset,
            "SCALE_TILE": self.scale_tile,
            "NUM_SCALES": self.num_scales,
            "SCALE_OFFSET": self.scale_offset,
            "SCALE_STRIDE": self.scale_stride,
            "SCALE_E8M0": int(self.scale_kind == "ue8m0"),
            "SCALE_E4M3": int(self.scale_kind == "e4m3"),
            "SCALE_OF_CALL": int(self.scale_of_call),
            "SCALES_IN_FOURS": int(self.scales_in_fours),
            "SCALES_FLOORED": int(self.least_scale > 0),
            "DIVIDED": int(self.divided),
            "CODE_BITS": self.code_bits,
            "ROPE_CODED": int(self.rope_coded),
        }

    def defines_beside(self, extra: Layout | None) -> dict[str, int | str]:
        """The constants of a main cache's layout, and of the extra cache's layout where it differs."""
        of_extra = {"EXTRA_ROWS": int(extra is not None)}
        if extra is not None:
            of_extra |= {
                "EXTRA_ROW_STRIDE": extra.row_stride,
                "EXTRA_SCALE_OFFSET": extra.scale_offset,
                "EXTRA_SCALE_STRIDE": extra.scale_stride,
            }
        return self.defines() | of_extra


def _of_16_bits(d_qk: int, name: str, half: bool, *aliases: str) -> Layout:
    return Layout(
        name, d_qk, d_qk - 64, 64, token_bytes=2 * d_qk, row_stride=2 * d_qk, rope_offset=2 * (d_qk - 64),
        half=half, reader="bf16", aliases=aliases,
    )  # fmt: skip


def _plain_fp8(d_qk: int) -> Layout:
    return Layout(
        "plain_fp8", d_qk, d_qk, 0, token_bytes=d_qk, row_stride=d_qk, rope_offset=d_qk,
        scale_kind="call", reader="plain_fp8", aliases=("fp8", "fp8_e4m3"),  # vLLM's names
    )  # fmt: skip


BF16_576, BF16_512 = (_of_16_bits(d_qk, "bf16", False, "bfloat16", "auto") for d_qk in (576, 512))
FP16_576, FP16_512 = (_of_16_bits(d_qk, "fp16", True, "float16") for d_qk in (576, 512))
V32_FP8 = Layout(
    "v32_fp8", 576, 512, 64, token_bytes=656, row_stride=656, rope_offset=528,
    scale_kind="fp32", scale_tile=128, scale_offset=512, reader="v32_fp8",
    aliases=("fp8_ds_mla",),  # vLLM's name
)  # fmt: skip
V4_FP8 = Layout(
    "v4_fp8", 512, 448, 64, token_bytes=584, row_stride=576, rope_offset=448,
    scale_kind="ue8m0", scale_tile=64, scale_offset=-1, scale_stride=8, block_align=576,
    of_v4=True, reader="v4_fp8",
)  # fmt: skip
PLAIN_FP8_576 = _plain_fp8(576)
PLAIN_FP8_512 = _plain_fp8(512)
V32_NOPE_FP8 = Layout(
    "v32_nope_fp8", 512, 512, 0, token_bytes=528, row_stride=528, rope_offset=528,
    scale_kind="fp32", scale_tile=128, scale_offset=512, told=False, reader="v32_fp8",
)  # fmt: skip
V41_FP8 = Layout(
    "v41_fp8", 512, 512, 0, token_bytes=528, row_stride=528, rope_offset=528,
    scale_kind="ue8m0", scale_tile=32, scale_offset=512, told=False, of_v4=True, reader="v32_fp8",
)  # fmt: skip
V41_FP8_SPLIT = Layout(
    "v41_fp8_split", 512, 512, 0, token_bytes=528, row_stride=512, rope_offset=512,
    scale_kind="ue8m0", scale_tile=32, scale_offset=-1, scale_stride=16, block_align=512, told=False, of_v4=True,
    reader="v4_fp8",
)  # fmt: skip
V32_NVFP4 = Layout(
    "v32_nvfp4", 576, 512, 64, token_bytes=352, row_stride=352, rope_offset=256, code_bits=4, rope_coded=True,
    scale_kind="e4m3", scale_tile=16, scale_offset=320, scales_in_fours=True, least_scale=LEAST_E4M3, reader="fp4",
    aliases=("nvfp4_ds_mla",),  # vLLM's name
)  # fmt: skip
V4_NVFP4 = Layout(
    "v4_nvfp4", 512, 448, 64, token_bytes=384, row_stride=352, rope_offset=224, code_bits=4,
    scale_kind="e4m3", scale_tile=16, scale_offset=-1, scale_stride=32, block_align=16, of_v4=True, reader="fp4",
)  # fmt: skip
V41_FP4 = Layout(
    "v41_fp4", 512, 512, 0, token_bytes=288, row_stride=288, rope_offset=288, code_bits=4,
    scale_kind="e4m3", scale_tile=16, scale_offset=256, least_scale=LEAST_E4M3, divided=True, told=False, of_v4=True,
    reader="fp4",
)  # fmt: skip
V41_FP4_SPLIT = Layout(
    "v41_fp4_split", 512, 512, 0, token_bytes=288, row_stride=256, rope_offset=256, code_bits=4,
    scale_kind="e4m3", scale_tile=16, scale_offset=-1, scale_stride=32, least_scale=LEAST_E4M3, divided=True,
    block_align=512, told=False, of_v4=True, reader="fp4",
)  # fmt: skip
INDEXER_FP8 = Layout(
    "indexer_fp8", 128, 128, 0, token_bytes=132, row_stride=128, rope_offset=128,
    scale_kind="fp32", scale_tile=128, scale_offset=-1, scale_stride=4,
)  # fmt: skip

INDEXER_MXFP4 = Layout(
    "indexer_mxfp4", 128, 128, 0, token_bytes=68, row_stride=64, rope_offset=64, code_bits=4,
    scale_kind="ue8m0", scale_tile=32, scale_offset=-1, scale_stride=4,
)  # fmt: skip

# A cache's dtype and last axis tell these apart, or (`told` False) callers name them.
ATTENTION_LAYOUTS = (
    BF16_576,
    BF16_512,
    V32_FP8,
    V4_FP8,
    PLAIN_FP8_576,
    PLAIN_FP8_512,
    V32_NOPE_FP8,
    V41_FP8,
    V41_FP8_SPLIT,
    V32_NVFP4,
    V4_NVFP4,
)
# Layouts of extra caches alone, and the main caches' layouts beside which they may stand.
EXTRA_LAYOUTS = (V41_FP4, V41_FP4_SPLIT)
EXTRA_OF = {V41_FP8: (V41_FP4, V41_FP4_SPLIT), V41_FP8_SPLIT: (V41_FP4_SPLIT,)}
# The extra layout of FP4 rows whose scales stand in the same place as those of the FP8 rows beside it.
FP4_BESIDE: dict[str | None, Literal["v41_fp4", "v41_fp4_split"]] = {
    "v41_fp8": "v41_fp4", "v41_fp8_split": "v41_fp4_split",
}  # fmt: skip
CACHE_LAYOUTS = (*ATTENTION_LAYOUTS, *EXTRA_LAYOUTS)
DENSE_LAYOUTS = (*ATTENTION_LAYOUTS, FP16_576, FP16_512)  # of `dense_decode`
INDEXER_LAYOUTS = (INDEXER_FP8, INDEXER_MXFP4)  # dtype and last axis tell them apart
QUANTIZED_OF_V32 = tuple(layout for layout in CACHE_LAYOUTS if layout.quantized and not layout.of_v4)
QUANTIZED_OF_V4 = tuple(layout for layout in CACHE_LAYOUTS if layout.of_v4)
OF_V41 = tuple(layout for layout in QUANTIZED_OF_V4 if not layout.told)  # V4's models have none of these

# The names for type checkers, which cannot read them from the layouts.
CacheLayout = Literal[
    "bf16", "bfloat16", "auto", "v32_fp8", "fp8_ds_mla", "v4_fp8", "plain_fp8", "fp8", "fp8_e4m3",
    "v32_nope_fp8", "v41_fp8", "v41_fp8_split", "v32_nvfp4", "nvfp4_ds_mla", "v4_nvfp4",
]  # fmt: skip
PagedLayout = Literal[CacheLayout, "v41_fp4", "v41_fp4_split"]
DenseLayout = Literal[CacheLayout, "fp16", "float16"]
WritableLayout = Literal[
    "bf16", "bfloat16", "auto", "v32_fp8", "fp8_ds_mla", "plain_fp8", "fp8", "fp8_e4m3", "v32_nope_fp8",
    "v32_nvfp4", "nvfp4_ds_mla",
]  # fmt: skip


def names(of: Iterable[Layout] = ATTENTION_LAYOUTS) -> tuple[str, ...]:
    """The names that users and engines give these layouts, each once.

    Raises:
        TypeError: `of` has something that is no layout.
    """
    of = tuple(of) if isinstance(of, Iterable) else (of,)
    for layout in of:
        require_instance("of", layout, Layout)
    return tuple(dict.fromkeys(name for layout in of for name in layout.names))


def fp8_of(is_v4: bool) -> Layout:
    """The FP8 layout of V4 models, or of those of the V3.2 kind."""
    return V4_FP8 if require_bool("is_v4", is_v4) else V32_FP8


def of_model(name: str, d_qk: int, is_v4: bool) -> Layout:
    """The layout that a model with rows of `d_qk` values calls `name`.

    Raises:
        TypeError, ValueError: there is no such layout.
    """
    require_choice("cache_layout", name, names())
    return fp8_of(is_v4) if name == "fp8_ds_mla" else by_name(name, d_qk)


def by_name(name: str | Layout, d_qk: int = 576) -> Layout:
    """The layout called `name`. If there are two widths ("bf16", "fp16", "plain_fp8"), `d_qk` says which.

    Raises:
        TypeError, ValueError: no layout has that name, or `d_qk` is none of its widths.
    """
    if isinstance(name, Layout):
        return name
    known = (*DENSE_LAYOUTS, *EXTRA_LAYOUTS, *INDEXER_LAYOUTS)
    require_choice("layout", name, names(known))
    widths = {layout.d_qk: layout for layout in known if name in layout.names}
    if len(widths) == 1:
        return next(iter(widths.values()))
    if require_integer("d_qk", d_qk, 1) not in widths:
        of = next(iter(widths.values())).name
        raise ValueError(f"d_qk of a {of} cache must be {' or '.join(map(str, widths))}, got {d_qk}")
    return widths[d_qk]
