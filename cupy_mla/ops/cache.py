"""Operations on the paged KV cache: making one, packing new tokens into it, and unpacking them."""

from __future__ import annotations

from math import frexp
from typing import Any, Literal

from .. import arrays, layouts
from ..arguments import RowScales
from ..arrays import HOST, Array
from ..bridges import Place, bind
from ..calls.operation import operation
from ..checks.options import require_choice, require_integer, require_scale
from ..checks.validate import ALIGNMENT, INDEXER_ALIGNMENT, cache_layout, require_cache, require_slots, tokens_of
from ..checks.values import check_slots
from ..cuda import cache as cuda
from ..dtypes import BFLOAT16, FLOAT32, INT32, INT64
from ..layouts import ATTENTION_LAYOUTS, CACHE_LAYOUTS, D_V, INDEXER_LAYOUTS, QUANTIZED_OF_V4
from ..reference import cache as reference
from ..typing import A, AnyArray, CallScale, DenseLayout, PagedLayout, ScaleFormat, ScaleRounding, WritableLayout
from .scales import scale_of_rows

__all__ = ["concat_and_cache_mla", "empty_cache", "quantize_and_insert_k_cache", "unpack_rows"]

SCALE_FORMATS = ("fp32", "ue8m0")
SCALE_ROUNDINGS = ("up", "nearest")
LAYOUTS = tuple(layout for layout in ATTENTION_LAYOUTS if not layout.of_v4)  # `concat_and_cache_mla` writes these
# The operation that writes each layout, for messages.
WRITERS = {
    **dict.fromkeys(LAYOUTS, "concat_and_cache_mla"), **dict.fromkeys(QUANTIZED_OF_V4, "quantize_and_insert_k_cache"),
    **dict.fromkeys(INDEXER_LAYOUTS, "indexer_k_quant_and_cache"),
}  # fmt: skip


@operation
def concat_and_cache_mla(
    kv_c: AnyArray,
    k_pe: AnyArray,
    kv_cache: AnyArray,
    slot_mapping: AnyArray,
    *,
    layout: WritableLayout | None = None,
    scale_format: ScaleFormat = "fp32",
    scale_rounding: ScaleRounding = "up",
    k_scale: CallScale | None = None,
    scale_floor: float = layouts.LEAST_NORMAL,
) -> None:
    """Write tokens into a paged cache of layout BF16, V32_FP8, PLAIN_FP8 or V32_NVFP4: latent row, then RoPE part.

    Args:
        kv_c: [T, (1,) 512] bfloat16, normalised latent rows.
        k_pe: [T, (1,) 64] bfloat16, RoPE parts; [T, 0] of a model without RoPE.
        kv_cache: [num_blocks, block_size, (1,) 576] bfloat16 or, of PLAIN_FP8, uint8 / float8_e4m3fn, without RoPE
            512; or [num_blocks, block_size, (1,) 656] uint8 / float8_e4m3fn (V32_FP8) or [..., 352] (V32_NVFP4), whose
            RoPE part is zeros without RoPE; written in place.
        slot_mapping: [T'] int64 with T' <= T (a padded batch: its length counts). A token whose slot is negative is
            skipped; a slot beyond the cache is never written.
        layout: "bf16" ("bfloat16", "auto"), "v32_fp8" (vLLM: "fp8_ds_mla"), "plain_fp8" (vLLM: "fp8", "fp8_e4m3") or
            "v32_nvfp4" (vLLM: "nvfp4_ds_mla"); default: told by `kv_cache`. "v32_nope_fp8", [num_blocks, block_size,
            (1,) 528] uint8 / float8_e4m3fn of models without RoPE, must be named.
        scale_format: "fp32" (`max(amax / 448, FLT_MIN)`, what vLLM writes) or "ue8m0" (rounded up to a power of
            two); of V32_FP8 and V32_NOPE_FP8.
        scale_rounding: of V32_NVFP4, from `max(amax / 6, 2**-9)` to e4m3: "up", which saturates no value and is what
            vLLM's operation of this name writes, or "nearest", as its fused kernel does.
        k_scale: of PLAIN_FP8, whose values are `e4m3(x / k_scale)`, rounded to nearest even and saturated at 448: a
            positive number, or [1] or [] float32 on the device; default 1.
        scale_floor: the least float32 scale of V32_FP8 and V32_NOPE_FP8 with scale_format "fp32", a power of two up to
            1, or 0. `2**-126`, FLT_MIN, is that of vLLM's writers. SGLang's have none, 0: tiles whose largest magnitude
            is below `448 * 2**-126` get a scale of 0 and codes of 0, and read as zeros, NaN too.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError, ValueError: under `cupy_mla.set_checks`: a slot beyond the cache; two tokens in one slot.

    Example:
        >>> cache = np.zeros((2, 64, 576), bfloat16)  # 2 blocks of 64 tokens in layout BF16
        >>> kv_c, k_pe = np.ones((3, 512), bfloat16), np.ones((3, 64), bfloat16)
        >>> cupy_mla.concat_and_cache_mla(kv_c, k_pe, cache, np.array([5, -1, 64]))  # the second token is skipped
        >>> np.argwhere(cache.any(axis=-1)).tolist()  # block, offset
        [[0, 5], [1, 0]]
    """
    require_choice("scale_format", scale_format, SCALE_FORMATS)
    require_choice("scale_rounding", scale_rounding, SCALE_ROUNDINGS)
    floor = require_floor(scale_floor, zero=True)
    place, (kv_c_, k_pe_, cache, slots) = bind(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slot_mapping)
    told = cache_layout(cache, LAYOUTS, WRITERS, asked=layout)
    tokens = tokens_of(kv_c_).require(BFLOAT16, "T", D_V).shape[0]
    tokens_of(k_pe_).require(BFLOAT16, tokens, _rope_widths(told))
    _require_target(cache, told, slots, tokens)
    scale = scale_of_rows(place, told, k_scale)
    if arrays.CHECK_VALUES:
        check_slots(slots, cache)
    round_up = scale_rounding == "up" if told.scale_kind == "e4m3" else scale_format == "ue8m0"
    place.call(
        cuda.concat_and_cache_mla, reference.concat_and_cache_mla,
        told, kv_c_, k_pe_, cache, slots, RowScales(round_up, floor, scale),
    )  # fmt: skip


@operation
def quantize_and_insert_k_cache(
    k: AnyArray,
    k_cache: AnyArray,
    slot_mapping: AnyArray,
    *,
    layout: PagedLayout | None = None,
    scale_floor: float = layouts.LEAST_SCALE,
) -> None:
    """Write tokens into a paged cache in layout V4_FP8, V41_FP8, V4_NVFP4 or V41_FP4.

    Args:
        k: [T, (1,) 512] bfloat16. V4_FP8: 448 NoPE values, which are quantized in tiles of 64, and 64 RoPE values.
            V41_FP8: all values are quantized, in tiles of 32. V4_NVFP4: as V4_FP8, in tiles of 16.
            V41_FP4: all values, in tiles of 16.
        k_cache: [num_blocks, block_size, 584] (V4_FP8), [..., 528] (V41_FP8), [..., 384] (V4_NVFP4) or
            [..., 288] (V41_FP4) uint8 / float8_e4m3fn, block stride a multiple of 16 bytes (V4_FP8's usual writers
            round it up to a multiple of 576); written in place.
        slot_mapping: [T'] int64 with T' <= T; see `concat_and_cache_mla`.
        layout: its name, as of `empty_cache`; default: told by `k_cache`, but for V41_FP8 and V41_FP4, which must be
            named.
        scale_floor: the least UE8M0 scale, a power of two: 2**-22 is that of vLLM's writers, 2**-13 that of FlashMLA's
            and SGLang's for V41_FP8. Only rows of tiny values differ.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError, ValueError: under `cupy_mla.set_checks`: a slot beyond the cache; two tokens in one slot.

    Example:
        >>> cache = np.zeros((2, 64, 584), np.uint8)  # 2 blocks of 64 tokens in layout V4_FP8
        >>> cupy_mla.quantize_and_insert_k_cache(np.ones((1, 512), bfloat16), cache, np.array([65]))
        >>> cache.any(axis=(1, 2)).tolist()  # which blocks hold something
        [False, True]
    """
    place, (k_, cache, slots) = bind(k=k, k_cache=k_cache, slot_mapping=slot_mapping)
    told = cache_layout(cache, QUANTIZED_OF_V4, WRITERS, asked=layout)
    floor = require_floor(scale_floor)
    tokens = tokens_of(k_).require(BFLOAT16, "T", told.d_qk).shape[0]
    _require_target(cache, told, slots, tokens)
    if arrays.CHECK_VALUES:
        check_slots(slots, cache)
    place.call(cuda.quantize_and_insert_k_cache, reference.quantize_and_insert_k_cache, told, k_, cache, slots, floor)


@operation
def unpack_rows(
    cache: A,
    slots: AnyArray,
    *,
    out: A | None = None,
    k_scale: CallScale | None = None,
    layout: PagedLayout | None = None,
) -> A:
    """Rows of a paged cache of any layout as numbers, as attention or the indexer reads them.

    Args:
        cache: [num_blocks, block_size, (1,) last axis] in any layout, told by dtype and last axis: bfloat16 of 576 or
            512 values, uint8 or float8_e4m3fn of 656 bytes (V32_FP8), 584 (V4_FP8), 576 or 512 (PLAIN_FP8), 352
            (V32_NVFP4), 384 (V4_NVFP4), 132 (INDEXER_FP8) or 68 (INDEXER_MXFP4).
        slots: [n] int32 or int64. The row of a slot that is negative or beyond the cache is zeros.
        out: [n, d_qk] float32, written in place when given.
        k_scale: of PLAIN_FP8, as of `concat_and_cache_mla`.
        layout: its name, as of `empty_cache`; default: told by `cache`.

    Returns:
        [n, d_qk] float32: 576 or 512 values, or 128 for keys of the indexer; quantized ones are `float(code) * scale`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a slot beyond the cache.

    Example:
        >>> cache = cupy_mla.empty_cache("v4_fp8", num_blocks=2, block_size=64)
        >>> cupy_mla.quantize_and_insert_k_cache(np.full((1, 512), 3, bfloat16), cache, np.array([65]))
        >>> rows = cupy_mla.unpack_rows(cache, np.array([65, -1]))
        >>> rows.shape, rows[:, 0].tolist()
        ((2, 512), [3.0, 0.0])
    """
    place, (cache_, slots_) = bind(cache=cache, slots=slots)
    (out_,) = place.optional(out=out)
    told = cache_layout(cache_, (*CACHE_LAYOUTS, *INDEXER_LAYOUTS), asked=layout)
    require_cache(cache_, told, INDEXER_ALIGNMENT if told in INDEXER_LAYOUTS else ALIGNMENT)
    (count,) = slots_.require((INT32, INT64), "n").shape
    out_ = place.output("out", out_, (count, told.d_qk), FLOAT32)
    if arrays.CHECK_VALUES:
        check_slots(slots_, cache_, written=False)
    scale = scale_of_rows(place, told, k_scale)
    place.call(cuda.unpack_rows, reference.unpack_rows, told, cache_, slots_, scale, out_)
    return out_.obj


def empty_cache(
    layout: DenseLayout | PagedLayout | Literal["indexer_fp8", "indexer_mxfp4"] | layouts.Layout,
    num_blocks: int,
    block_size: int,
    place: tuple[str, int] = ("numpy", HOST),
    *,
    d_qk: int = 576,
) -> Any:
    """A paged cache of zeros, with the block stride that the layout's writers use.

    Blocks of V4_FP8 begin at multiples of 576 bytes from the first one, as FlashMLA requires, so there are gaps between
    them. Blocks of V41_FP8_SPLIT and V41_FP4_SPLIT begin at multiples of 512 bytes. Blocks of all other layouts follow
    one another.

    Args:
        layout: one of `cupy_mla.layouts`, or its name: "bf16", "v32_fp8" (vLLM: "fp8_ds_mla"), "v4_fp8", "plain_fp8"
            (vLLM: "fp8", "fp8_e4m3"), "fp16", "v32_nope_fp8", "v41_fp8", "v41_fp8_split", "v32_nvfp4" (vLLM:
            "nvfp4_ds_mla"), "v4_nvfp4", "v41_fp4", "v41_fp4_split", and "indexer_fp8" or "indexer_mxfp4" for
            keys of the indexer.
        num_blocks: blocks of the cache.
        block_size: rows a block: tokens, or in a compressed cache `block_size // compress_ratio` of the config.
        place: where it lives: (kind of array, device), for instance ("torch", 0); `Place.of(array)` gives that of an
            array.
        d_qk: width of rows in layouts "bf16", "fp16" and "plain_fp8": 576, or 512 of models without RoPE.

    Returns:
        [num_blocks, block_size, last axis] bfloat16, float16, or in quantized layouts uint8.

    Raises:
        TypeError, ValueError: there is no such layout or place, or a number has the wrong type or is too small.
        RuntimeError: the library, or the GPU, is missing.

    Example:
        >>> cache = cupy_mla.empty_cache("v4_fp8", num_blocks=10, block_size=2)
        >>> cache.shape, cache.strides  # 2 * 584 bytes, rounded up to a multiple of 576
        ((10, 2, 584), (1728, 584, 1))
    """
    of = layouts.by_name(layout, d_qk)
    num_blocks = require_integer("num_blocks", num_blocks, 0)
    block_size = require_integer("block_size", block_size, 1)
    items, used = of.block_bytes(block_size) // of.dtype.itemsize, block_size * of.last_axis
    whole = Place.from_pair(place).empty((num_blocks, items), of.dtype)
    whole[...] = 0
    return whole[:, :used].reshape(num_blocks, block_size, of.last_axis)


def require_floor(scale_floor: Any, zero: bool = False) -> float:
    """Check `scale_floor`: a power of two, or where `zero` allows it 0; returns it as a float."""
    floor = require_scale("scale_floor", scale_floor)
    if zero and floor == 0:
        return 0.0
    if not layouts.LEAST_NORMAL <= floor <= 1 or frexp(floor)[0] != 0.5:
        or_zero = "0 or " if zero else ""
        raise ValueError(f"scale_floor: expected {or_zero}a power of two from 2**-126 to 1, got {scale_floor}")
    return floor


def _rope_widths(layout: layouts.Layout) -> int | tuple[int, ...]:
    """The numbers of RoPE values that tokens may have. Rows of D_V values have no room for them; FP8 rows need none."""
    if not layout.rope_apart:
        return 0
    rope = layout.d_qk - D_V
    return (rope, 0) if layout.quantized else rope


def _require_target(cache: Array, layout: layouts.Layout, slots: Array, tokens: int) -> None:
    require_cache(cache, layout).require_writable()
    require_slots(slots, tokens)
