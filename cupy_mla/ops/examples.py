"""Example calls of the operations, on which tests, self-check and sanitizer cases run.

Each function here yields the example calls of an operation, or of several operations that take the same arguments. It
draws the arrays from a random generator. The operation's row in `ops/table.py` names the function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import layouts
from ..arguments import Prefill, RowScales, Target
from ..dtypes import BFLOAT16, E4M3, E5M2, FLOAT32, INT32, UINT8
from ..layouts import (
    ATTENTION_LAYOUTS,
    CACHE_LAYOUTS,
    D_V,
    DENSE_LAYOUTS,
    EXTRA_LAYOUTS,
    EXTRA_OF,
    INDEXER_FP8,
    INDEXER_LAYOUTS,
    INDEXER_MXFP4,
    LEAST_SCALE,
    QUANTIZED_OF_V4,
    QUANTIZED_OF_V32,
    Layout,
)
from ..reference import attention as reference_attention
from ..reference import cache as reference_cache
from ..reference import indexer as reference_indexer
from ..reference import logits as reference_logits
from ..reference import training as reference_training
from . import cache, logits


class Wanted(NamedTuple):
    """What the example calls shall cover.

    Attributes:
        layouts: cache layouts. Calls that need another one are left out.
        many: number of query tokens in the larger calls of attention.
        strays: whether some slots, entries, requests, blocks and rows lie beyond the arrays, which checks of values
            (`cupy_mla.set_checks`) refuse.
    """

    layouts: tuple[Layout, ...] = (*DENSE_LAYOUTS, *EXTRA_LAYOUTS)
    many: int = 4
    strays: bool = False


ALL = Wanted()


class Call(NamedTuple):
    """An example call.

    Attributes:
        detail: name of the call, different from those of the operation's other calls.
        arguments: by name; arrays are NumPy arrays.
        unaligned: the arrays whose rows `Operation.run` starts one item after an aligned address.
    """

    detail: str
    arguments: dict[str, Any]
    unaligned: tuple[str, ...] = ()


# --- cache layouts ---------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """What the example calls do with a cache layout.

    Attributes:
        scale_formats: the scale formats of calls that pack tokens whose RoPE values are an argument of their own.
        two_caches: whether there are calls that decode over two caches; one of them sets every argument.
    """

    layout: Layout
    scale_formats: tuple[str, ...] = ("fp32",)
    two_caches: bool = False


# New rows go to the end: the calls of the first row are an operation's first, and give every array.
FORMATS = (
    Format(layouts.PLAIN_FP8_576, two_caches=True),
    Format(layouts.V4_FP8, two_caches=True),
    Format(layouts.V32_FP8, scale_formats=("ue8m0", "fp32")),
    Format(layouts.BF16_576),
    Format(layouts.BF16_512),
    Format(layouts.PLAIN_FP8_512),
    Format(layouts.V32_NOPE_FP8),
    Format(layouts.V41_FP8),
    Format(layouts.V41_FP8_SPLIT),
    Format(layouts.V32_NVFP4),
    Format(layouts.V4_NVFP4),
    Format(layouts.V41_FP4),
    Format(layouts.V41_FP4_SPLIT),
    Format(layouts.FP16_576),
    Format(layouts.FP16_512),
)


def _formats(wanted: Wanted, among: Iterable[Layout] = ATTENTION_LAYOUTS) -> list[Format]:
    """The rows of the wanted layouts."""
    return [row for row in FORMATS if row.layout in wanted.layouts and row.layout in among]


# --- inputs ---------------------------------------------------------------------------------------------------

BLOCKS, BLOCK_SIZE = 4, 32
TOKENS = BLOCKS * BLOCK_SIZE
TOPK, WINDOW, RATIO = 64, 16, 4
K_SCALE = 0.001  # of rows of size 0.1
SM_SCALES = {576: 192**-0.5, 512: 512**-0.5}  # DeepSeek-V3.2's and V4's, by d_qk


def _normal(rng: np.random.Generator, *shape: int, size: float = 1) -> np.ndarray:
    return (size * rng.standard_normal(shape, np.float32)).astype(BFLOAT16)


def _rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Rows to be packed, one of them zero."""
    rows = _normal(rng, *shape)
    rows[5] = 0
    return rows


def _unwritten(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array to be written: NaN, and -2 of signed integers, for -1 is a result."""
    if np.issubdtype(dtype, np.signedinteger):
        return np.full(shape, -2, dtype)
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8).fill(0xFF)
    return array


def _empty_cache(layout: Layout, blocks: int = BLOCKS, block_size: int = BLOCK_SIZE) -> np.ndarray:
    """A cache to be written, with the block stride of the layout's writers."""
    whole = _unwritten((blocks, layout.block_bytes(block_size) // layout.dtype.itemsize), layout.dtype)
    return whole[:, : block_size * layout.last_axis].reshape(blocks, block_size, layout.last_axis)


def _full_cache(
    rng: np.random.Generator, layout: Layout, blocks: int = BLOCKS, block_size: int = BLOCK_SIZE
) -> np.ndarray:
    """A cache full of rows of size 0.1."""
    paged, slots = _empty_cache(layout, blocks, block_size), np.arange(blocks * block_size)
    rows = _normal(rng, len(slots), layout.d_qk, size=0.1)
    if layout in INDEXER_LAYOUTS:
        reference_indexer.indexer_k_quant_and_cache(layout, rows, paged, slots, "fp32")
    else:
        reference_cache.pack_rows(layout, rows, paged, slots, RowScales(False, LEAST_SCALE, K_SCALE))
    return paged


def _slots(rng: np.random.Generator, wanted: Wanted, tokens: int = TOKENS) -> np.ndarray:
    """A slot for each token, some -1, and with strays one beyond the cache."""
    slots = rng.permutation(tokens)
    slots[::7] = -1
    if wanted.strays:
        slots[3] = tokens
    return slots


def _block_table(rng: np.random.Generator, wanted: Wanted, width: int) -> np.ndarray:
    """Blocks of three requests. With strays some do not exist."""
    first, end = (-1, BLOCKS + 1) if wanted.strays else (0, BLOCKS)
    return rng.integers(first, end, (3, width), dtype=np.int32)


# --- attention ------------------------------------------------------------------------------------------------


def _named(layout: Layout) -> dict[str, Any]:
    """The scale and the layout of a cache of `_full_cache`, as arguments of a call that needs them."""
    scale = {"k_scale": np.full(1, K_SCALE, np.float32)} if layout.scale_of_call else {}
    return scale if layout.told else scale | {"layout": layout.name}


def _e4m3_queries(rng: np.random.Generator, *shape: int) -> dict[str, np.ndarray]:
    """E4m3 queries whose products with their scale are as large as the bfloat16 queries of other calls."""
    return {"q": (32 * rng.standard_normal(shape, np.float32)).astype(E4M3), "q_scale": np.full(1, 0.3, np.float32)}


def _lists(rng: np.random.Generator, wanted: Wanted, *shape: int) -> np.ndarray:
    """Index lists of which some entries are negative and, with strays, others beyond the rows."""
    return rng.integers(-5, TOKENS + 5 * wanted.strays, shape, dtype=np.int32)


def _lengths(rng: np.random.Generator, wanted: Wanted, least: int, most: int, count: int) -> np.ndarray:
    """Lengths of lists of `most` entries; with strays some are longer."""
    return rng.integers(least, most + 1 + 2 * wanted.strays, count, dtype=np.int32)


def _prefill_arguments(
    rng: np.random.Generator, wanted: Wanted, kv: np.ndarray, heads: int, s_q: int
) -> dict[str, Any]:
    d_qk = kv.shape[-1]
    q, lists = _normal(rng, s_q, heads, d_qk, size=10), _lists(rng, wanted, s_q, 1, TOPK)
    return {"q": q, "kv": kv, "indices": lists, "sm_scale": SM_SCALES[d_qk]}


def prefill_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    rows = [_normal(rng, TOKENS, 1, d_qk, size=0.1) for d_qk in sorted({layout.d_qk for layout in wanted.layouts})]
    sink, length = rng.standard_normal(5, np.float32), _lengths(rng, wanted, TOPK // 2, TOPK, 3)
    more = {"attn_sink": sink, "topk_length": length}
    for layout, _, _ in _formats(wanted):
        if layout.scale_of_call:
            kv = _full_cache(rng, layout, TOKENS, 1).view(E4M3)
            of = {**_prefill_arguments(rng, wanted, kv, 5, 3), **more, **_named(layout)}
            scaled = _e4m3_queries(rng, 3, 5, layout.d_qk)
            yield Call(f"5 heads of {layout.d_qk} in e4m3, 3 queries, every argument", of | scaled)
            yield Call(f"5 heads over {layout.name} of {layout.d_qk}, 3 queries", of)
    arguments = {**_prefill_arguments(rng, wanted, rows[0], 5, 3), **more}
    yield Call(f"5 heads of {rows[0].shape[-1]}, 3 queries, with sink and lengths", arguments)
    for kv in rows:
        for heads, s_q in ((16, 3), (64, wanted.many), (128, wanted.many // 2)):
            detail = f"{heads} heads of {kv.shape[-1]}, {s_q} queries"
            yield Call(detail, _prefill_arguments(rng, wanted, kv, heads, s_q))


def backward_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    """Backward calls of those `prefill_calls` that read bf16 rows; out and lse come from the reference."""
    over_bf16 = (call for call in prefill_calls(rng, wanted) if call.arguments["kv"].dtype == BFLOAT16)
    for number, call in enumerate(over_bf16):
        arguments = dict(call.arguments)
        s_q, heads, _ = arguments["q"].shape
        out, lse = _unwritten((s_q, heads, D_V), BFLOAT16), np.empty((s_q, heads), np.float32)
        reference_attention.sparse_prefill(
            Prefill(
                layouts.by_name("bf16", arguments["kv"].shape[-1]), arguments["q"], arguments["kv"][:, 0],
                arguments["indices"][:, 0], arguments["sm_scale"], 1.0, 1.0, arguments.get("attn_sink"),
                arguments.get("topk_length"), out, np.empty_like(lse), lse,
            )
        )  # fmt: skip
        arguments |= {"out": out, "lse": lse, "dout": _normal(rng, s_q, heads, D_V)}
        if number == 0:
            arguments["d_lse"] = rng.standard_normal((s_q, heads), np.float32)
        yield Call(call.detail, arguments)
        if number == 1:
            yield Call(f"{call.detail}, float32", arguments | {"dq_dtype": "float32", "dkv_dtype": "float32"})


def target_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    """The inputs and lse of `backward_calls`, also with half of their 64 heads."""
    names = ("q", "kv", "indices", "lse", "sm_scale", "attn_sink", "topk_length")
    for call in backward_calls(rng, wanted):
        arguments = {name: call.arguments[name] for name in names if name in call.arguments}
        if "dq_dtype" not in call.arguments:
            yield Call(call.detail, arguments)
        if arguments["q"].shape[1] == 64:
            few = {name: np.ascontiguousarray(arguments[name][:, :32]) for name in ("q", "lse")}
            yield Call(f"32 heads of {call.detail}", arguments | few)


def dense_lse_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for heads, d_qk, tokens in (
        (5, 576, 3),
        (100, 576, 2),
        (32, 512, wanted.many),
        (9, 512, 2),
        (20, 576, 2),
        (64, 512, 2),
    ):
        q, kv = _normal(rng, tokens, heads, d_qk, size=10), _normal(rng, TOKENS, 1, d_qk, size=0.1)
        of = {"q": q, "kv": kv, "sm_scale": SM_SCALES[d_qk], **_ranges(rng, wanted, tokens, TOKENS)}
        yield Call(f"{heads} heads of {d_qk}, {tokens} tokens", of)


def dense_target_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    """The inputs of `dense_lse_calls`; lse comes from the reference."""
    for number, call in enumerate(dense_lse_calls(rng, wanted)):
        arguments = dict(call.arguments)
        arguments["lse"] = np.empty(arguments["q"].shape[:2], np.float32)
        reference_training.dense_lse(
            Target(
                arguments["q"], arguments["kv"][:, 0], arguments["sm_scale"], None, None, None, None,
                arguments["starts"], arguments["ends"], arguments["lse"],
            )
        )  # fmt: skip
        if number == 0:
            arguments["attn_sink"] = rng.standard_normal(arguments["q"].shape[1], np.float32)
        yield Call(call.detail, arguments)


def dense_loss_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    """`loss_calls`, over ranges of keys instead of lists."""
    for call in loss_calls(rng, wanted):
        arguments = {name: value for name, value in call.arguments.items() if name not in ("indices", "topk_length")}
        tokens = len(arguments["w"])
        arguments |= {"target": rng.random((tokens, TOKENS), np.float32), **_ranges(rng, wanted, tokens, TOKENS)}
        yield Call(call.detail, arguments)


def loss_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    more = {"topk_length": _lengths(rng, wanted, TOPK // 2, TOPK, 3), "counted": np.array([True, False, True])}
    for heads, tokens, given in (
        (5, 3, more), (16, 2, {"relu": False, "per_token": True, "gradient_dtype": "float32"}), (32, 2, {}),
        (64, wanted.many, {"loss_coeff": 0.5}), (64, 2, {"gradients": False}), (128, 2, {}),
        (9, 3, {"quantized": True, **more}), (64, 2, {"quantized": True, "scale_format": "ue8m0", "relu": False}),
        (32, 2, {"quantized": True}), (128, 2, {"quantized": True}),
    ):  # fmt: skip
        arguments = {
            "q_index": _normal(rng, tokens, heads, logits.D), "k_index": _normal(rng, TOKENS, logits.D),
            "w": (0.02 * rng.standard_normal((tokens, heads), np.float32)),
            "target": rng.random((tokens, TOPK), np.float32), "indices": _lists(rng, wanted, tokens, 1, TOPK),
        }  # fmt: skip
        said = ", ".join(["every array" if name == "counted" else name for name in given if name != "topk_length"])
        yield Call(f"{heads} heads, {tokens} tokens{said and ', '}{said}", arguments | given)


def decode_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    """Few query tokens and many, few heads and many."""
    many = wanted.many
    for layout, _, two_caches in _formats(wanted):
        of_layout, main = f"{layout.name} of {layout.d_qk}", _full_cache(rng, layout)
        extra = _full_cache(rng, layout, TOKENS // 2, 2)
        if two_caches:
            arguments = {
                "q": _normal(rng, 2, 2, 3, layout.d_qk, size=10), "k_cache": main,
                "indices": _lists(rng, wanted, 2, 2, 70),
                "sm_scale": 0.04, "attn_sink": rng.standard_normal(3, np.float32),
                "topk_length": _lengths(rng, wanted, 35, 70, 2), "extra_k_cache": extra,
                "extra_indices": _lists(rng, wanted, 2, 2, 33), "extra_topk_length": _lengths(rng, wanted, 0, 33, 2),
                "num_splits": 3, **_named(layout),
            }  # fmt: skip
            if layout.scale_of_call:
                arguments |= _e4m3_queries(rng, 2, 2, 3, layout.d_qk)
            yield Call(f"{of_layout}, 3 heads, 2 x 2 queries, every argument", arguments)
        shapes = ((16, 2, 1), (64, 2, 2), (128, 1, 1), (8, many, 1), (32, many // 2, 2), (128, many // 2, 1))
        for heads, b, s_q in shapes:
            q, lists = _normal(rng, b, s_q, heads, layout.d_qk, size=10), _lists(rng, wanted, 2, b, s_q, TOPK)
            detail = f"{of_layout}, {heads} heads, {b} x {s_q} queries"
            arguments = {"q": q, "k_cache": main, "indices": lists[0], "sm_scale": SM_SCALES[layout.d_qk]}
            arguments |= _named(layout)
            yield Call(detail, arguments)
            if two_caches:
                sink = rng.standard_normal(heads, np.float32)
                more = {"extra_k_cache": extra, "extra_indices": lists[1], "attn_sink": sink}
                yield Call(f"{detail}, two caches", arguments | more)
        for other in (other for other in EXTRA_OF.get(layout, ()) if other in wanted.layouts):
            more = {"extra_k_cache": _full_cache(rng, other, TOKENS // 2, 2), "extra_layout": other.name}
            more["extra_indices"] = _lists(rng, wanted, *arguments["indices"].shape)
            yield Call(f"{detail}, beside {other.name}", arguments | more)


def dense_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    """Few requests and many, of all lengths that their blocks hold, short and long. With strays some lengths are
    negative or longer, and some blocks do not exist."""
    every = True
    for layout, _, _ in _formats(wanted, DENSE_LAYOUTS):
        of_layout, cache_ = f"{layout.name} of {layout.d_qk}", _full_cache(rng, layout)
        for heads, b, s_q in ((16, 3, 2), (64, 2, 1), (128, 2, 3), (8, wanted.many, 1), (32, wanted.many // 2, 4)):
            width = 1 if s_q == 4 else 5
            first, end = (-1, BLOCKS + 1) if wanted.strays else (0, BLOCKS)
            most, stray = width * BLOCK_SIZE, 3 * wanted.strays
            arguments = {
                "q": _normal(rng, b, s_q, heads, layout.d_qk, size=10).astype(layout.values), "k_cache": cache_,
                "block_table": rng.integers(first, end, (b, width), dtype=np.int32),
                "seq_lens": rng.integers(-stray, most + 1 + stray, b, dtype=np.int32),
                "sm_scale": SM_SCALES[layout.d_qk], **_named(layout),
            }  # fmt: skip
            detail = f"{of_layout}, {heads} heads, {b} x {s_q} queries"
            if every:
                more = {"attn_sink": rng.standard_normal(heads, np.float32), "window": 40, "num_splits": 3}
                if layout.scale_of_call:
                    more |= _e4m3_queries(rng, b, s_q, heads, layout.d_qk)
                yield Call(f"{detail}, every argument", arguments | more)
                every = False
            yield Call(detail, arguments)
            if s_q > 1:
                yield Call(f"{detail}, not causal, a window", arguments | {"causal": False, "window": 40})


# --- packing --------------------------------------------------------------------------------------------------


def mla_packing_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    row = {"kv_c": _rows(rng, TOKENS, D_V), "k_pe": _rows(rng, TOKENS, 64), "slot_mapping": _slots(rng, wanted)}
    no_rope = {"k_pe": _unwritten((TOKENS, 0), BFLOAT16)}
    for layout, scale_formats, _ in _formats(wanted, cache.LAYOUTS):
        for scale_format in scale_formats if layout.rope_apart else ():
            arguments = {**row, "kv_cache": _empty_cache(layout), "scale_format": scale_format, **_named(layout)}
            detail = f"{layout.name} {scale_format}" if layout.quantized else layout.name
            yield Call(detail, arguments)
            yield Call(f"{detail}, unaligned rows", arguments, unaligned=("kv_c", "k_pe"))
            if layout.scale_kind == "fp32" and scale_format == "fp32":
                kv_c = np.where(np.arange(TOKENS)[:, None] % 3 == 0, BFLOAT16.type(0), row["kv_c"])
                yield Call(f"{detail}, no floor", {**arguments, "kv_c": kv_c, "scale_floor": 0.0})
        if layout.quantized or not layout.rope_apart:
            arguments = {**row, **no_rope, "kv_cache": _empty_cache(layout), **_named(layout)}
            detail = f"{layout.name} of {layout.d_qk} without RoPE"
            yield Call(detail, arguments)
            if not layout.rope_apart:
                yield Call(f"{detail}, unaligned rows", arguments, unaligned=("kv_c",))


def v4_packing_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    row = {"k": _rows(rng, TOKENS, D_V), "slot_mapping": _slots(rng, wanted)}
    for layout, _, _ in _formats(wanted, QUANTIZED_OF_V4):
        arguments = {**row, "k_cache": _empty_cache(layout), **_named(layout)}
        yield Call(layout.name, arguments)
        yield Call(f"{layout.name}, unaligned rows", arguments, unaligned=("k",))
        if layout.scale_kind == "ue8m0":
            yield Call(f"{layout.name}, a scale of 1 at least", {**arguments, "scale_floor": 1.0})


def indexer_packing_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for block_size in (32, 15):  # blocks of 15 tokens allow 4-byte stores only
        tokens = BLOCKS * block_size
        for layout, scale_format in ((INDEXER_FP8, "fp32"), (INDEXER_FP8, "ue8m0"), (INDEXER_MXFP4, "ue8m0")):
            arguments = {
                "k": _rows(rng, tokens, 128), "kv_cache": _empty_cache(layout, BLOCKS, block_size),
                "slot_mapping": _slots(rng, wanted, tokens), "scale_format": scale_format,
            }  # fmt: skip
            yield Call(f"{layout.name}, {scale_format}, blocks of {block_size}", arguments)
        floored = {**arguments, "scale_floor": 1.0}
        yield Call(f"{layout.name}, a scale of 1 at least, blocks of {block_size}", floored)


def unpacking_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    """Slots of every second call are int64."""
    for i, layout in enumerate((*(row.layout for row in _formats(wanted, CACHE_LAYOUTS)), *INDEXER_LAYOUTS)):
        slots = _slots(rng, wanted).astype(np.int64 if i % 2 else np.int32)
        arguments = {"cache": _full_cache(rng, layout), "slots": slots, **_named(layout)}
        yield Call(f"{layout.name} of {layout.d_qk}", arguments)


# --- gathering ------------------------------------------------------------------------------------------------


def _lens(rng: np.random.Generator, wanted: Wanted) -> np.ndarray:
    """Lengths of three requests, 59 tokens at most; with strays the last request has more than its blocks hold."""
    return np.array([9, 0, 70 if wanted.strays else rng.integers(30, 51)], np.int32)


def mla_gather_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for layout, _, _ in _formats(wanted, QUANTIZED_OF_V32):
        arguments = {
            "src_cache": _full_cache(rng, layout), "dst": _unwritten((60, layout.d_qk), BFLOAT16),
            "block_table": _block_table(rng, wanted, 2), "seq_lens": _lens(rng, wanted),
            "workspace_starts": np.array([0, 9, 9], np.int32), **_named(layout),
        }  # fmt: skip
        yield Call(f"{layout.name} of {layout.d_qk}", arguments)
        yield Call(f"{layout.name} of {layout.d_qk}, unaligned rows", arguments, unaligned=("dst",))


def v4_gather_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for layout, _, _ in _formats(wanted, QUANTIZED_OF_V4):
        lens = _lens(rng, wanted)
        for block_size, gather_lens in ((32, lens * 2 // 3), (15, None)):
            arguments = {
                "out": _unwritten((3, 40 if wanted.strays else 60, layout.d_qk), BFLOAT16),
                "k_cache": _full_cache(rng, layout, BLOCKS, block_size), "seq_lens": lens, "gather_lens": gather_lens,
                "block_table": _block_table(rng, wanted, 64 // block_size), "block_size": block_size, "offset": 5,
                **_named(layout),
            }  # fmt: skip
            yield Call(f"{layout.name}, blocks of {block_size}", arguments)


def indexer_gather_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for layout, width, dtype in ((INDEXER_FP8, 128, UINT8), (INDEXER_MXFP4, 64, UINT8), (INDEXER_MXFP4, 128, E5M2)):
        for block_size in (32, 15):
            starts = np.append(0, _lens(rng, wanted).cumsum()).astype(np.int32)
            arguments = {
                "kv_cache": _full_cache(rng, layout, BLOCKS, block_size), "dst_k": _unwritten((60, width), dtype),
                "dst_scale": _unwritten((60,), np.float32), "block_table": _block_table(rng, wanted, 4),
                "cu_seq_lens": starts,
            }  # fmt: skip
            yield Call(f"{layout.name} to {width} bytes, blocks of {block_size}", arguments)


# --- the indexer's selection ----------------------------------------------------------------------------------


def quantize_q_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    tokens = 11
    angles = rng.uniform(0, 7, (40, 32))
    for heads, rope_first, interleaved, scale_format in ((64, True, False, "fp32"), (24, False, True, "ue8m0")):
        arguments = {
            "q": _normal(rng, tokens, heads, 128), "weights": rng.standard_normal((tokens, heads), np.float32),
            "positions": rng.integers(-1, 41 if wanted.strays else 40, tokens),
            "cos_sin_cache": np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32),
            "rope_first": rope_first, "interleaved": interleaved, "scale_format": scale_format,
        }  # fmt: skip
        yield Call(f"{heads} heads, {scale_format}", arguments)
        yield Call(f"{heads} heads, {scale_format}, unaligned rows", arguments, unaligned=("q",))
    plain = {"q": _rows(rng, tokens, 8, 128), "weights": _normal(rng, tokens, 8)}
    yield Call("without RoPE", plain)
    yield Call("mxfp4", {**plain, "scale_format": logits.MXFP4})
    yield Call("mxfp4, unaligned rows", {**plain, "scale_format": logits.MXFP4}, unaligned=("q",))


def quantize_q_mxfp4_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for call in quantize_q_calls(rng, wanted):
        arguments = {name: value for name, value in call.arguments.items() if name != "scale_format"}
        yield call._replace(arguments=arguments)


def widen_mxfp4_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    """Scales of a row lie up to 2^25 apart."""
    for rows in ((40,), (7, 24)):
        arguments = {
            "codes": rng.integers(0, 256, (*rows, 64), dtype=np.uint8),
            "scales": rng.integers(110, 136, (*rows, 4), dtype=np.uint8),
        }  # fmt: skip
        yield Call(f"{len(rows)} axes, weighted", {**arguments, "weights": rng.standard_normal(rows, np.float32)})
        yield Call(f"{len(rows)} axes", arguments)


def _few_ones(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """E4m3 bytes, mostly of 0, some of 1 and -1: sums of their products are exact in any order, and many are equal."""
    return rng.choice(np.array([0] * 14 + [1, -1], E4M3).view(np.uint8), shape)


def _as_e5m2(codes: np.ndarray) -> np.ndarray:
    return codes.view(E4M3).astype(E5M2)


def _simple(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.choice(np.array([-1, -0.5, 0.5, 1], np.float32), shape)


def _ranges(rng: np.random.Generator, wanted: Wanted, rows: int, width: int) -> dict[str, np.ndarray]:
    """Ranges of columns, some of them empty; with strays some begin below 0 or end beyond the rows."""
    starts = rng.integers(-2 if wanted.strays else 0, width // 2, rows, dtype=np.int32)
    ends = starts + rng.integers(-1, width, rows, dtype=np.int32)
    return {"starts": starts, "ends": ends if wanted.strays else np.minimum(ends, width)}


def _ragged(rng: np.random.Generator, wanted: Wanted, queries: int, keys: int, heads: int) -> dict[str, Any]:
    return {
        "q8": _few_ones(rng, queries, heads, 128), "k8": _few_ones(rng, keys, 128),
        "ks": np.exp2(rng.integers(-4, 4, keys)).astype(np.float32), "w": _simple(rng, queries, heads),
        **_ranges(rng, wanted, queries, keys),
    }  # fmt: skip


RAGGED = ((7, 300, 64), (21, 90, 32), (3, 40, 8))  # queries, keys, heads


def logits_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for queries, keys, heads in RAGGED:
        yield Call(f"{queries} x {keys}, {heads} heads", _ragged(rng, wanted, queries, keys, heads))
        arguments = {**_ragged(rng, wanted, queries, keys, heads), "compact_width": keys // 2}
        yield Call(f"{queries} x {keys}, {heads} heads, compact", arguments)
        arguments = {**arguments, **{name: _as_e5m2(arguments[name]) for name in ("q8", "k8")}}
        yield Call(f"{queries} x {keys}, {heads} heads, compact, e5m2", arguments)
        arguments = {name: value for name, value in arguments.items() if name != "compact_width"}
        yield Call(f"{queries} x {keys}, {heads} heads, e5m2", arguments)
        yield Call(f"{queries} x {keys}, {heads} heads, e5m2 queries", {**arguments, "k8": _few_ones(rng, keys, 128)})


def select_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for queries, keys, heads in RAGGED:
        table = {
            "req_id": rng.integers(-1 if wanted.strays else 0, 3, queries, dtype=np.int32),
            "block_table": _block_table(rng, wanted, 5), "block_size": 64,
        }  # fmt: skip
        for limit in (512 << 20, 4 * 5 * keys):
            arguments = {**_ragged(rng, wanted, queries, keys, heads), "k": 50, **table, "max_workspace_bytes": limit}
            arguments["blocks"] = _unwritten((queries, 8), np.int32)
            yield Call(f"{queries} x {keys}, {heads} heads, slots, {limit} bytes", arguments)
        yield Call(f"{queries} x {keys}, {heads} heads", {**_ragged(rng, wanted, queries, keys, heads), "k": 50})


def _simple_keys(rng: np.random.Generator, layout: Layout, block_size: int) -> np.ndarray:
    """A cache of keys as `_few_ones` draws them, whose scales are powers of two."""
    keys = _few_ones(rng, BLOCKS * block_size, 4, 32).view(E4M3)
    sizes = np.exp2(rng.integers(-4, 4, (BLOCKS * block_size, 4 if layout is INDEXER_MXFP4 else 1, 1)))
    rows = (keys * sizes).astype(BFLOAT16).reshape(-1, 128)
    cache = _empty_cache(layout, BLOCKS, block_size)
    reference_indexer.indexer_k_quant_and_cache(layout, rows, cache, np.arange(len(rows)), "ue8m0")
    return cache


def _paged(
    rng: np.random.Generator, wanted: Wanted, n: int, heads: int, block_size: int, layout: Layout = INDEXER_FP8
) -> dict[str, Any]:
    """Three requests, of at most 95 keys; with strays of at most 100, of which their blocks hold 90 or so."""
    longest, held = (100, 90) if wanted.strays else (95, 95)
    q8 = _few_ones(rng, 3, n, heads, 128)
    return {
        "q8": _as_e5m2(q8) if layout is INDEXER_MXFP4 else q8, "kv_cache": _simple_keys(rng, layout, block_size),
        "w": _simple(rng, 3 * n, heads), "context_lens": rng.integers(0, longest + 1, 3, dtype=np.int32),
        "block_table": _block_table(rng, wanted, -(-held // block_size)), "max_context_len": 95,
    }  # fmt: skip


PAGED = ((1, 64, 64), (2, 32, 64), (5, 64, 15), (3, 24, 16))  # queries a request, heads, block size


def _scheduled(arguments: dict[str, Any], shares: int) -> dict[str, Any]:
    """The arguments with a schedule for as many shares."""
    lens, table, longest = (arguments[name] for name in ("context_lens", "block_table", "max_context_len"))
    schedule = np.empty((shares, logits.SCHEDULE_WORDS), INT32)
    reference_logits.paged_indexer_schedule(lens, table, longest, arguments["kv_cache"].shape[1], schedule)
    return {**arguments, "schedule": schedule}


def paged_logits_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for n, heads, block_size in PAGED:
        detail = f"{n} queries of {heads} heads, blocks of {block_size}"
        arguments = _paged(rng, wanted, n, heads, block_size)
        yield Call(f"{detail}, scheduled", _scheduled(arguments, 4))
        yield Call(detail, arguments)
        mxfp4 = _paged(rng, wanted, n, heads, block_size, INDEXER_MXFP4)
        yield Call(f"{detail}, MXFP4", mxfp4)
        yield Call(f"{detail}, MXFP4, e4m3 queries", {**mxfp4, "q8": arguments["q8"]})
        yield Call(f"{detail}, e5m2 queries", {**arguments, "q8": mxfp4["q8"]})


def schedule_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    """Calls with more shares than units of keys, and with fewer."""
    for n, block_size, shares in ((0, 64, 5), (2, 15, 3), (1, 256, 1)):
        requests, width = 300, -(-4000 // block_size)
        arguments = {
            "context_lens": rng.integers(0, 4200, (requests, n) if n else requests, dtype=np.int32),
            "block_table": rng.integers(-1 if wanted.strays else 0, 9000, (requests, width), dtype=np.int32),
            "max_context_len": 4100 if wanted.strays else 4000, "block_size": block_size, "shares": shares,
        }  # fmt: skip
        yield Call(f"{requests} requests of {n or 'some'} tokens, {shares} shares", arguments)
    few = {"context_lens": rng.integers(0, 200, 3, dtype=np.int32), "block_table": _block_table(rng, wanted, 4)}
    yield Call("more shares than keys", {**few, "max_context_len": 200, "block_size": 64, "shares": 132})


def paged_select_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for n, heads, block_size in PAGED:
        arguments = {**_scheduled(_paged(rng, wanted, n, heads, block_size), 4), "k": 40}
        arguments["blocks"] = _unwritten((3 * n, 9), np.int32)
        yield Call(f"{n} queries of {heads} heads, blocks of {block_size}, scheduled", arguments)
        for slots in (True, False):
            arguments = {
                **_paged(rng, wanted, n, heads, block_size),
                "k": 40,
                "slots": slots,
                "max_workspace_bytes": 4 * 95 * n,
            }
            detail = f"{n} queries of {heads} heads, blocks of {block_size}{', slots' * slots}"
            yield Call(detail, arguments)


def candidate_blocks_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    """Rows with many equal logits, with NaN, and with ranges that begin anywhere."""
    for rows, width, count in ((3, 5000, 128), (150, 900, 60), (2, 41, 1)):
        logits = np.maximum(rng.standard_normal((rows, width), np.float32), 0.5)
        logits[1, width // 3] = np.nan
        yield Call(
            f"{rows} x {width}, {count}", {"logits": logits, "count": count, **_ranges(rng, wanted, rows, width)}
        )
        yield Call(f"{rows} x {width}, {count}, whole rows", {"logits": logits, "count": count})


def _candidates(
    rng: np.random.Generator, wanted: Wanted, heads: int, block_size: int, layout: Layout
) -> dict[str, Any]:
    """Nine tokens of three requests; some have more blocks than the 7 candidates, some fewer."""
    of_requests = _paged(rng, wanted, 3, heads, block_size, layout)
    lens = rng.integers(0, 96, 9, dtype=np.int32)
    lens[:2] = 0, 41
    candidates = np.full((9, 7), -1, np.int32)
    for row, blocks in enumerate((-(-lens // 8)).tolist()):
        some = np.sort(rng.permutation(max(blocks - 1, 0))[:6])
        candidates[row, : min(blocks, 7)] = np.append(some, blocks - 1)[: min(blocks, 7)]
    first, end = (-1, 4) if wanted.strays else (0, 3)
    return {
        "q8": of_requests["q8"].reshape(9, heads, 128), "kv_cache": of_requests["kv_cache"], "w": of_requests["w"],
        "candidates": candidates, "lens": lens, "req_id": rng.integers(first, end, 9, dtype=np.int32),
        "block_table": of_requests["block_table"],
    }  # fmt: skip


def candidate_logits_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for layout in INDEXER_LAYOUTS:
        for _, heads, block_size in PAGED:
            detail = f"{layout.name}, {heads} heads, blocks of {block_size}"
            yield Call(detail, _candidates(rng, wanted, heads, block_size, layout))


def candidate_select_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for call in candidate_logits_calls(rng, wanted):
        yield call._replace(arguments={**call.arguments, "k": 20})
        arguments = {**call.arguments, "k": 60, "max_workspace_bytes": 4 * 56 * 2}
        yield Call(f"{call.detail}, chunks", arguments)


def topk_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    """Rows of one tile and of several, few and many, random ones and ones with many equal logits."""
    for rows, width, k in ((3, 5000, 2048), (150, 9000, 512), (2, 70000, 1024)):
        logits = rng.standard_normal((rows, width), np.float32)
        logits[1] = np.maximum(logits[1], 0)
        ranges = _ranges(rng, wanted, rows, width)
        yield Call(f"{rows} x {width}, {k}", {"logits": logits, "k": k, **ranges})
        yield Call(f"{rows} x {width}, {k}, bfloat16", {"logits": logits.astype(BFLOAT16), "k": k})


def concat_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    arguments = {
        "ql_nope": _normal(rng, 7, 5, 512).swapaxes(0, 1),  # as a batched product leaves it
        "q_pe": _normal(rng, 5, 7, 64), "out": _unwritten((5, 7, 576), BFLOAT16),
    }  # fmt: skip
    yield Call("", arguments)
    yield Call("unaligned rows", arguments, unaligned=("q_pe",))


# --- index lists ----------------------------------------------------------------------------------------------


def convert_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    tokens = 60
    first, end = (-1, 4) if wanted.strays else (0, 3)
    prefills = {
        "prefill_request_ids": rng.integers(-1, end, tokens, dtype=np.int32),
        "prefill_workspace_starts": np.array([0, 50, first], np.int32), "return_valid_counts": True,
    }  # fmt: skip
    # A CTA takes 2051 entries in two turns, between which its warps must not race.
    calls: tuple[tuple[str, int, dict[str, Any]], ...] = (("of prefills", 2051, prefills), ("", 64, {}))
    for detail, width, more in calls:
        arguments = {
            "req_id": rng.integers(first, end, tokens, dtype=np.int32), "block_table": _block_table(rng, wanted, 2),
            "token_indices": rng.integers(-3, 2 * BLOCK_SIZE + 3 * wanted.strays, (tokens, width), dtype=np.int32),
            "block_size": BLOCK_SIZE,
        }  # fmt: skip
        yield Call(detail, {**arguments, **more})


def slots_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    first, end = (-1, 4) if wanted.strays else (0, 3)
    reach = 2 * BLOCK_SIZE + 3 * wanted.strays
    table = _block_table(rng, wanted, 2)
    of_tokens = {"positions": rng.integers(-3, reach, 60), "request_ids": rng.integers(first, end, 60, dtype=np.int32)}
    of_requests = {"positions": rng.integers(-3, reach, (3, 7), dtype=np.int32)}
    for detail, arguments in (("of tokens", of_tokens), ("of requests", of_requests)):
        yield Call(detail, {"block_table": table, "block_size": BLOCK_SIZE, **arguments})


def slots_and_ends_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for call in convert_calls(rng, wanted):
        lists = call.arguments["token_indices"]
        lists[np.arange(lists.shape[1]) >= rng.integers(0, lists.shape[1] + 1, (len(lists), 1))] = -1
        yield Call(call.detail, {n: v for n, v in call.arguments.items() if n != "return_valid_counts"})


def quant_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    yield Call("bfloat16", {"x": _normal(rng, 5, 7, 577)})
    yield Call("float32", {"x": rng.standard_normal((30, 500), np.float32)})


class _Batch(NamedTuple):
    """Three requests of 3, 0 and 57 query tokens; with strays one token names a request that does not exist."""

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    token_to_req: np.ndarray
    positions: np.ndarray
    is_valid_token: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, wanted: Wanted) -> _Batch:
        query_lens = np.array([3, 0, 57], np.int32)
        starts = np.append(0, query_lens.cumsum()).astype(np.int32)
        tokens, lens = int(starts[-1]), query_lens + rng.integers(1, 70, 3, dtype=np.int32)
        requests = np.repeat(np.arange(3, dtype=np.int32), query_lens)
        positions = (np.arange(tokens) + (lens - starts[1:])[requests]).astype(np.int64)
        if wanted.strays:
            requests[5] = 9
        return cls(starts, lens, requests, positions, rng.random(tokens) < 0.8)

    def take(self, *names: str) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in names}


BLOCKS_OF_V4 = ((32, 4), (1, 120))  # block size, and blocks that a request has


def swa_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    batch = _Batch.draw(rng, wanted).take("query_start_loc", "seq_lens", "token_to_req", "is_valid_token")
    for block_size, width in BLOCKS_OF_V4:
        table = _block_table(rng, wanted, width)
        arguments = {**batch, "block_table": table, "block_size": block_size, "window_size": WINDOW}
        images = {**_images(rng), "replay_start": np.array([30, 0, 7], np.int32)}
        yield Call(f"blocks of {block_size}, images", {**arguments, **images})
        yield Call(f"blocks of {block_size}", arguments)


def _images(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments for image tokens among the 60 tokens of a batch."""
    visible = {side: rng.integers(0, 25, 60, dtype=np.int32) for side in ("left_visible", "right_visible")}
    return {**visible, "max_image_tokens": 50}


def gather_lens_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    batch = _Batch.draw(rng, wanted).take("query_start_loc", "seq_lens")
    for decodes, more in ((1, {"replay_start": np.array([30, 0, 7], np.int32)}), (0, {})):
        yield Call(f"{decodes} decodes", {**batch, "num_decodes": decodes, "window_size": WINDOW, **more})


def combine_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    batch = _Batch.draw(rng, wanted).take("query_start_loc", "seq_lens")
    query_lens = np.diff(batch["query_start_loc"])
    arguments = {
        **batch, "topk_indices": rng.integers(-3, 70, (60, TOPK + 1), dtype=np.int32),
        "gather_lens": query_lens + np.minimum(batch["seq_lens"] - query_lens, WINDOW - 1),
        "window_size": WINDOW, "compress_ratio": RATIO, "topk": TOPK, "M": 200, "N": 64,
    }  # fmt: skip
    yield Call("images", {**arguments, **_images(rng)})
    yield Call("", arguments)


def global_topk_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    batch = _Batch.draw(rng, wanted).take("token_to_req", "is_valid_token")
    for block_size, width in BLOCKS_OF_V4:
        arguments = {
            **batch, "topk_indices": rng.integers(-3, 130 if wanted.strays else 120, (60, TOPK + 1), dtype=np.int32),
            "block_table": _block_table(rng, wanted, width), "block_size": block_size,
        }  # fmt: skip
        yield Call(f"blocks of {block_size}", arguments)


def slot_mapping_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    batch = _Batch.draw(rng, wanted).take("query_start_loc", "seq_lens")
    for block_size, width in BLOCKS_OF_V4:
        table = {"block_table": _block_table(rng, wanted, width), "block_size": block_size}
        own = {"slot_mapping": np.where(rng.random(70) < 0.8, 7, -1)}
        arguments = {**batch, **table, "num_tokens": 63, "compress_ratio": RATIO}
        yield Call(f"blocks of {block_size}, of a rank", {**arguments, **own, "dcp_world_size": 2, "dcp_rank": 1})
        yield Call(f"blocks of {block_size}", arguments)


def c128a_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    batch = _Batch.draw(rng, wanted)
    for block_size, width in BLOCKS_OF_V4:
        arguments = {
            **batch.take("positions", "token_to_req"), "block_table": _block_table(rng, wanted, width),
            "block_size": block_size, "compress_ratio": RATIO, "num_decode_tokens": 20, "max_compressed_tokens": 66,
            "slot_mapping": np.where(batch.is_valid_token, 7, -1), "decode_indices": _unwritten((22, 70), np.int32),
            "decode_lens": _unwritten((22,), np.int32), "prefill_indices": _unwritten((43, 70), np.int32),
        }  # fmt: skip
        yield Call(f"blocks of {block_size}", arguments)


# --- pooled keys ----------------------------------------------------------------------------------------------


def pool_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    batch = _Batch.draw(rng, wanted).take("query_start_loc", "seq_lens")
    for kpool, ring in ((4, 8), (3, 5)):
        arguments = {
            **batch, "k": _normal(rng, 62, 128), "gate": _normal(rng, 62, 128),
            "ape": rng.standard_normal((kpool, 128), np.float32), "tail": _normal(rng, 4, 2, ring, 128),
            "tail_blocks": np.array([3, 0, 9 if wanted.strays else 2], np.int32),
        }  # fmt: skip
        yield Call(f"pools of {kpool}", arguments)


def expand_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for kpool, n in ((4, 300), (3, 7)):
        seen = rng.integers(-3 if wanted.strays else 0, 2 * n * kpool, 20, dtype=np.int32)
        pools = np.stack([rng.permutation(2 * n)[:n] for _ in seen]).astype(np.int32)
        pools[rng.random(pools.shape) < 0.2] = -1
        yield Call(f"pools of {kpool}", {"pool_ids": pools, "seq_lens": seen, "kpool": kpool})


# --- context parallelism --------------------------------------------------------------------------------------

RANKS = ((2, 0, 1), (3, 2, 4))  # world size, rank, interleave


def local_lens_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for world_size, rank, interleave in RANKS:
        arguments = {"world_size": world_size, "rank": rank, "interleave": interleave}
        lens = rng.integers(-3 if wanted.strays else 0, 1000, 50, dtype=np.int32)
        yield Call(f"rank {rank} of {world_size}, interleave {interleave}", {"seq_lens": lens, **arguments})


def localize_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for (world_size, rank, interleave), width in zip(RANKS, (2048, 77), strict=True):
        arguments = {"world_size": world_size, "rank": rank, "interleave": interleave}
        positions = rng.integers(-3, 5000, (7, width), dtype=np.int32)
        yield Call(f"rank {rank} of {world_size}, {width} entries", {"topk_indices": positions, **arguments})


def globalize_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for (world_size, rank, interleave), width in zip(RANKS, (2048, 77), strict=True):
        arguments = {
            "logits": rng.standard_normal((7, 3000), np.float32),
            "topk_indices": rng.integers(-3, 3000, (7, width), dtype=np.int32),
            "world_size": world_size, "rank": rank, "interleave": interleave,
        }  # fmt: skip
        yield Call(f"rank {rank} of {world_size}, {width} entries", arguments)


def merge_topk_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    for ranks, width, k in ((2, 2048, 2048), (3, 77, 100), (1, 50, 60)):
        positions = np.stack([rng.permutation(ranks * width).astype(np.int32) for _ in range(5)]).reshape(5, ranks, -1)
        positions[rng.random(positions.shape) < 0.1] = -1
        values = np.maximum(rng.standard_normal((ranks, 5, width), np.float32), 0)
        arguments = {"values": values, "positions": np.ascontiguousarray(positions.swapaxes(0, 1)), "k": k}
        yield Call(f"{k} of {ranks} x {width}", arguments)


def merge_attention_calls(rng: np.random.Generator, wanted: Wanted) -> Iterator[Call]:
    sink = rng.standard_normal(6, np.float32)
    for detail, ranks, dtype, more in (
        ("bfloat16, sink", 2, BFLOAT16, {"attn_sink": sink}),
        ("float32", 3, FLOAT32, {}),
    ):
        outs, lses = rng.standard_normal((ranks, 5, 6, D_V), np.float32), rng.standard_normal((ranks, 5, 6), np.float32)
        lses[rng.random(lses.shape) < 0.3] = np.inf
        arguments = {"outs": outs.astype(dtype), "lses": lses, **more}
        yield Call(detail, arguments)
        yield Call(f"{detail}, unaligned rows", arguments, unaligned=("outs",))
