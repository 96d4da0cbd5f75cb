"""A small call of every operation, run on the GPU and in NumPy: what `python -m cupy_mla` compares.

Without a GPU the NumPy reference is all there is; attention is then compared with float64 over the whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from . import layouts
from .arrays import to_numpy
from .layouts import BFLOAT16, Layout
from .ops.attention import sparse_decode, sparse_prefill
from .ops.cache import concat_and_cache_mla, quantize_and_insert_k_cache
from .ops.compressed import build_c128a_topk_metadata, compute_global_topk_indices_and_lens, get_compressed_slot_mapping
from .ops.gather import concat_mla_q, cp_gather_and_upconvert_fp8_kv_cache, dequantize_and_gather_k_cache
from .ops.indexer import cp_gather_indexer_k_quant_cache, indexer_k_quant_and_cache
from .ops.indices import convert_req_index_to_global_index
from .ops.quant import dynamic_per_batched_tensor_quant
from .ops.swa import combine_topk_swa_indices, compute_prefill_gather_lens, compute_swa_indices_and_lens
from .reference.cache import unpack_rows

BLOCKS, BLOCK_SIZE = 4, 32
TOKENS = BLOCKS * BLOCK_SIZE
REQUESTS, QUERY_TOKENS = 3, 20  # query tokens of each request
RATIO, WINDOW, TOPK = 4, 16, 64

# What two results of attention may differ by, absolutely or relatively: both sides' rounding.
BOUNDS = {BFLOAT16: (1e-3, 3.01 / 128), np.dtype(np.float32): (1e-5, 16.02 / 65536)}


class Case(NamedTuple):
    """One call: an operation, its arguments by name as NumPy arrays, which of them it writes, and how close it is."""

    operation: Callable[..., Any]
    detail: str
    arguments: dict[str, Any]
    written: tuple[str, ...] = ()
    exact: bool = True  # the same bits on the GPU and in NumPy

    @property
    def name(self) -> str:
        return f"{self.operation.__name__} {self.detail}".strip()

    def run(self, put: Callable[[np.ndarray], Any]) -> list[np.ndarray]:
        """Call it on copies of the arguments, made by `put`; returns all results."""
        arguments = {k: put(v.copy()) if isinstance(v, np.ndarray) else v for k, v in self.arguments.items()}
        returned = self.operation(**arguments)
        results = returned if isinstance(returned, tuple) else (returned,)
        written = [arguments[name] for name in self.written]
        return [to_numpy(array) for array in (*written, *results) if array is not None]

    def agrees(self, ours: list[np.ndarray], reference: list[np.ndarray]) -> bool:
        """Whether two runs' results are the same, up to what rounding explains where it is not `exact`."""
        if self.exact:
            return all(a.tobytes() == b.tobytes() for a, b in zip(ours, reference, strict=True))
        return all(_close(a, b) for a, b in zip(ours, reference, strict=True))


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    absolute, relative = BOUNDS[b.dtype]
    a, b = a.astype(np.float64), b.astype(np.float64)
    difference = np.abs(np.subtract(a, b, out=np.zeros(a.shape), where=a != b))  # equal infinities differ by nothing
    return bool(((difference <= absolute) | (difference <= relative * np.abs(b))).all())


def cases(
    rng: np.random.Generator, wanted: tuple[Layout, ...] = layouts.ATTENTION_LAYOUTS, many: int = 4
) -> Iterator[Case]:
    """The calls: of the layouts' own operations those of the `wanted` ones, and all others.

    Args:
        rng: draws the inputs.
        wanted: cache layouts.
        many: query tokens of the larger calls of attention. On a GPU other kernels may run from one for each SM on.
    """
    slots = rng.permutation(TOKENS)
    slots[::7] = -1
    for layout in wanted:
        yield from _cache_cases(rng, layout, slots)
        yield from _decode_cases(rng, layout, many)
    for d_qk in sorted({layout.d_qk for layout in wanted}):
        yield from _prefill_cases(rng, d_qk, many)
    yield from _index_cases(rng, slots)
    if layouts.V4_FP8 in wanted:
        yield from _v4_index_cases(rng)


def float64_error(rng: np.random.Generator) -> float:
    """‖out - ref‖ / ‖ref‖ of a decode in NumPy, ref being float64 over the rows that its cache holds."""
    case = next(_decode_cases(rng, layouts.V32_FP8, 1))
    out = case.run(np.asarray)[0].astype(np.float64)
    arguments = case.arguments
    rows = unpack_rows(arguments["k_cache"], layouts.V32_FP8, np.arange(TOKENS)).astype(np.float64)
    ref = np.zeros(out.shape)
    for b, s in np.ndindex(out.shape[:2]):
        entries = arguments["indices"][b, s]
        chosen = rows[entries[(entries >= 0) & (entries < TOKENS)]]
        p = np.exp(arguments["q"][b, s].astype(np.float64) @ chosen.T * rows.shape[1] ** -0.5)
        ref[b, s] = (p / p.sum(-1, keepdims=True)) @ chosen[:, : layouts.D_V]
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))


def _normal(rng: np.random.Generator, *shape: int, size: float = 1) -> np.ndarray:
    return (size * rng.standard_normal(shape, np.float32)).astype(BFLOAT16)


def _cache(layout: Layout, fill: np.random.Generator | None = None) -> np.ndarray:
    """An empty cache, or with `fill` one full of rows of size 0.1."""
    cache = np.zeros((BLOCKS, BLOCK_SIZE, layout.last_axis), layout.dtype)
    if fill is not None:
        rows, slots = _normal(fill, TOKENS, layout.d_qk, size=0.1), np.arange(TOKENS)
        if layout is layouts.V4_FP8:
            quantize_and_insert_k_cache(rows, cache, slots)
        elif layout is layouts.INDEXER_FP8:
            indexer_k_quant_and_cache(rows, cache, slots)
        elif layout is layouts.V32_FP8:
            concat_and_cache_mla(rows[:, :-64], rows[:, -64:], cache, slots)
        else:
            cache[...] = rows.reshape(cache.shape)
    return cache


def _cache_cases(rng: np.random.Generator, layout: Layout, slots: np.ndarray) -> Iterator[Case]:
    """Packing and gathering rows of one layout."""
    lens, starts = np.array([9, 0, 50], np.int32), np.array([0, 9, 9], np.int32)
    table = rng.integers(0, BLOCKS, (3, 2), dtype=np.int32)
    if layout is layouts.V4_FP8:
        new = {"k": _normal(rng, TOKENS, 512), "k_cache": _cache(layout), "slot_mapping": slots}
        yield Case(quantize_and_insert_k_cache, "", new, ("k_cache",))
        arguments = {
            "out": np.zeros((3, 60, 512), BFLOAT16), "k_cache": _cache(layout, rng), "seq_lens": lens,
            "gather_lens": lens, "block_table": table, "block_size": BLOCK_SIZE, "offset": 5,
        }  # fmt: skip
        yield Case(dequantize_and_gather_k_cache, "", arguments, ("out",))
    elif layout.d_qk == 576:
        new = {"kv_c": _normal(rng, TOKENS, 512), "k_pe": _normal(rng, TOKENS, 64), "slot_mapping": slots}
        for scale_format in ("fp32", "ue8m0") if layout.quantized else ("fp32",):
            arguments = {**new, "kv_cache": _cache(layout), "scale_format": scale_format}
            detail = f"{layout.name} {scale_format}" if layout.quantized else layout.name
            yield Case(concat_and_cache_mla, detail, arguments, ("kv_cache",))
    if layout is layouts.V32_FP8:
        arguments = {
            "src_cache": _cache(layout, rng), "dst": np.zeros((60, 576), BFLOAT16), "block_table": table,
            "seq_lens": lens, "workspace_starts": starts,
        }  # fmt: skip
        yield Case(cp_gather_and_upconvert_fp8_kv_cache, "", arguments, ("dst",))


def _decode_cases(rng: np.random.Generator, layout: Layout, many: int) -> Iterator[Case]:
    """Few queries and many, few heads and many; entries of which some are invalid."""
    cache, extra = _cache(layout, rng), _cache(layout, rng)
    for heads, b, s_q in ((16, 2, 1), (64, 2, 2), (128, 1, 1), (8, many, 1), (32, many // 2, 2), (128, many // 2, 1)):
        lists = rng.integers(-5, TOKENS + 5, (2, b, s_q, TOPK), dtype=np.int32)
        arguments: dict[str, Any] = {
            "q": _normal(rng, b, s_q, heads, layout.d_qk, size=10),
            "k_cache": cache,
            "indices": lists[0],
        }
        detail = f"{layout.name} of {layout.d_qk}, {heads} heads, {b} x {s_q} queries"
        yield Case(sparse_decode, detail, arguments, exact=False)
        if layout is layouts.V4_FP8:
            sink = rng.standard_normal(heads, np.float32)
            more = {**arguments, "extra_k_cache": extra, "extra_indices": lists[1], "attn_sink": sink}
            yield Case(sparse_decode, f"{detail}, two caches", more, exact=False)


def _prefill_cases(rng: np.random.Generator, d_qk: int, many: int) -> Iterator[Case]:
    kv = _normal(rng, TOKENS, 1, d_qk, size=0.1)
    for heads, s_q in ((16, 3), (64, many), (128, many // 2)):
        arguments = {
            "q": _normal(rng, s_q, heads, d_qk, size=10), "kv": kv,
            "indices": rng.integers(-5, TOKENS + 5, (s_q, 1, TOPK), dtype=np.int32), "sm_scale": d_qk**-0.5,
        }  # fmt: skip
        yield Case(sparse_prefill, f"{heads} heads of {d_qk}, {s_q} queries", arguments, exact=False)


def _index_cases(rng: np.random.Generator, slots: np.ndarray) -> Iterator[Case]:
    """The indexer's cache, slots of chosen positions, queries, whole tensors."""
    cu_seq_lens = np.array([0, 9, 9, 59], np.int32)
    table = rng.integers(0, BLOCKS, (REQUESTS, 2), dtype=np.int32)
    indexer = layouts.INDEXER_FP8
    new = {"k": _normal(rng, TOKENS, 128), "kv_cache": _cache(indexer), "slot_mapping": slots}
    yield Case(indexer_k_quant_and_cache, "", new, ("kv_cache",))
    arguments: dict[str, Any] = {
        "kv_cache": _cache(indexer, rng), "dst_k": np.zeros((60, 128), np.uint8),
        "dst_scale": np.zeros(60, np.float32), "block_table": table, "cu_seq_lens": cu_seq_lens,
    }  # fmt: skip
    yield Case(cp_gather_indexer_k_quant_cache, "", arguments, ("dst_k", "dst_scale"))
    arguments = {
        "req_id": np.repeat(np.arange(REQUESTS, dtype=np.int32), QUERY_TOKENS), "block_table": table,
        "token_indices": rng.integers(-1, 2 * BLOCK_SIZE, (REQUESTS * QUERY_TOKENS, TOPK), dtype=np.int32),
        "block_size": BLOCK_SIZE,
    }  # fmt: skip
    yield Case(convert_req_index_to_global_index, "", arguments)
    arguments = {"ql_nope": _normal(rng, 5, 7, 512), "q_pe": _normal(rng, 5, 7, 64)}
    yield Case(concat_mla_q, "", {**arguments, "out": np.zeros((5, 7, 576), BFLOAT16)}, ("out",))
    yield Case(dynamic_per_batched_tensor_quant, "", {"x": _normal(rng, 5, 7, 576)})


def _v4_index_cases(rng: np.random.Generator) -> Iterator[Case]:
    tokens = REQUESTS * QUERY_TOKENS
    starts = np.arange(REQUESTS + 1, dtype=np.int32) * QUERY_TOKENS
    seq_lens = np.array([QUERY_TOKENS, 4 * BLOCK_SIZE, 61], np.int32)
    batch = {"query_start_loc": starts, "seq_lens": seq_lens}
    request = np.repeat(np.arange(REQUESTS, dtype=np.int32), QUERY_TOKENS)
    positions = (np.arange(tokens) - starts[request] + seq_lens[request] - QUERY_TOKENS).astype(np.int64)
    table = rng.integers(0, BLOCKS, (REQUESTS, 4), dtype=np.int32)
    tokens_of = {"token_to_req": request, "block_table": table, "block_size": BLOCK_SIZE}
    valid = rng.random(tokens) < 0.8
    chosen = rng.integers(-1, seq_lens.max() // RATIO, (tokens, TOPK), dtype=np.int32)
    swa = {**batch, **tokens_of, "is_valid_token": valid, "window_size": WINDOW}
    yield Case(compute_swa_indices_and_lens, "", swa)
    lens = {**batch, "num_decodes": 1, "window_size": WINDOW}
    yield Case(compute_prefill_gather_lens, "", lens)
    yield Case(compute_global_topk_indices_and_lens, "", {**tokens_of, "topk_indices": chosen, "is_valid_token": valid})
    slots = {**batch, "num_tokens": tokens, "block_table": table, "block_size": BLOCK_SIZE, "compress_ratio": RATIO}
    yield Case(get_compressed_slot_mapping, "", slots)
    lists = np.zeros((tokens, 70), np.int32)
    arguments = {
        **tokens_of, "positions": positions, "compress_ratio": RATIO, "num_decode_tokens": tokens,
        "slot_mapping": np.where(valid, 7, -1).astype(np.int64), "decode_indices": lists,
        "decode_lens": lists[:, 0].copy(), "prefill_indices": lists, "max_compressed_tokens": 64,
    }  # fmt: skip
    yield Case(build_c128a_topk_metadata, "", arguments)
    arguments = {
        **batch, "topk_indices": chosen, "gather_lens": compute_prefill_gather_lens(seq_lens, starts, 0, WINDOW),
        "window_size": WINDOW, "compress_ratio": RATIO, "topk": TOPK, "M": 200, "N": 64,
    }  # fmt: skip
    yield Case(combine_topk_swa_indices, "", arguments)
