"""Launches the attention kernels and says which of them serves a call."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from ..arrays import Array, Place
from ..layouts import ATTENTION_LAYOUTS, D_V, Layout, by_name
from ..recording import Params
from . import few_heads_sm90, lists, prefill_sm90, sparse_decode_sm90
from .jit import MAX_CLUSTER, Kernel, compute_capability, num_sms
from .schedule import Shape, best_splits

STEP_ROWS = 32  # rows of one main-loop step; kernels_cu/attention/portable.cu
VALID_RING = 4

# Heads a block is built for, to (mma row tiles, groups of warps that share a step's rows, blocks an SM).
SHAPES = {16: (1, 2, 2), 32: (2, 2, 1), 64: (4, 1, 1)}

# Q and O fill the registers; some compilers put a few words of softmax state into local memory, once a step.
SPILL_BYTES = 96

ALIGNED_ROWS, ALIGNED_Q, ALIGNED_OUT, WIDE_OUT, SOME_DONE, PAIRED_PARTS = 1, 2, 4, 8, 16, 32

# In calls whose bits must not depend on the batch: rows of a split, and queries that a launch is cut up as if for.
INVARIANT_ROWS, INVARIANT_QUERIES = 512, 32

# Queries of 9 to 16 heads up to which V32_FP8 decode is faster by the kernel for 32 heads, half of them padding.
PADDED_QUERIES = 8
FEW_ITEMS = 28  # pieces of work up to which the kernel for few heads is the faster one for prefill of many heads, too

# struct Source and struct Params of kernels_cu/attention/params.cuh and layout/paged.cuh.
_SOURCE = "3Q5q2i"
_PARAMS = Params("=" + _SOURCE + _SOURCE + "Q3qQ3q2Q3q4QQf5iQ")


class _Source(NamedTuple):
    """struct Source: see its fields there."""

    cache: int
    indices: int
    lengths: int
    block_stride: int
    row_stride: int
    index_stride_b: int
    index_stride_s: int
    num_slots: int
    topk: int
    block_size: int


_NO_SOURCE = _Source(*(0,) * 9, 1)


def block_heads(h_q: int) -> int:
    """Heads that one block works on, for a call with `h_q` heads."""
    return next((heads for heads in SHAPES if h_q <= heads), max(SHAPES))


@cache
def attention_kernel(layout: Layout, heads: int) -> Kernel:
    """The kernel for one cache layout and one block size."""
    m_tiles, groups, blocks_per_sm = SHAPES[heads]
    warps = 2 * m_tiles * groups
    rows = STEP_ROWS * 2 * layout.d_qk
    staged = STEP_ROWS * (layout.row_stride + (16 if layout.scales_apart else 0))
    shared = 2 * staged + rows if layout.quantized else 2 * rows
    shared += warps * (STEP_ROWS // groups // 8) * 512 + VALID_RING * STEP_ROWS * 4
    if layout.scale_kind == "fp32":
        shared += layout.num_scales * STEP_ROWS * 4  # kept apart and folded into S and P
    defines = {"D_V": D_V, "HEADS": heads, "TILE_ROWS": STEP_ROWS, "BLOCKS_PER_SM": blocks_per_sm}
    return Kernel(
        "attention/portable.cu",
        "portable",
        {**layout.defines(), **defines},
        threads=32 * warps,
        shared_bytes=shared,
        spill_bytes=SPILL_BYTES,
    )


@lru_cache(maxsize=1)
def combine_kernel() -> Kernel:
    """The kernel that merges split results; it does not depend on the layout."""
    return Kernel("attention/combine.cu", "combine", {"D_V": D_V}, threads=128, overlaps=True)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for layout in ATTENTION_LAYOUTS:
        for heads in SHAPES:
            yield attention_kernel(layout, heads)
    yield combine_kernel()
    yield from few_heads_sm90.kernels()
    yield from sparse_decode_sm90.kernels()
    yield from prefill_sm90.kernels()
    yield from lists.kernels()


def family(
    device: int, h_q: int, num_queries: int, aligned: bool, layout: Layout, *, prefill: bool, flat: bool = True
) -> str:
    """Which kernel runs: the first row of this table whose claim holds. The numbers are where it was measured faster.

    | family    | claim                                                                                      |
    | grouped   | a Hopper GPU, prefill, rows and q aligned to 16 bytes, at most 32 heads, queries enough    |
    |           | for groups that make a tile of 64 heads to fill half of the GPU                            |
    | sm90      | a Hopper GPU, rows and q aligned to 16 bytes, and a V4_FP8 cache, or a V32_FP8 one, 9 to   |
    |           | 16 heads and at most 8 queries                                                             |
    | few_heads | a Hopper GPU, rows and q aligned to 16 bytes, and at most 16 heads, or prefill of at most  |
    |           | 28 pieces of work, each a query and a tile of up to 32 heads                               |
    | sm90      | a Hopper GPU, rows and q aligned to 16 bytes, and an FP8 cache, or flat bf16 rows with     |
    |           | 4 pieces of work, each a query and a tile of up to 64 heads, 8 with up to 32 heads         |
    | few_heads | a Hopper GPU, rows and q aligned to 16 bytes, decode                                       |
    | portable  | any GPU, anything                                                                          |

    The environment variable CUPY_MLA_KERNELS names the one to take where it can run, for testing.

    Args:
        aligned: rows and q are, to 16 bytes.
        flat: one stride leads from every bf16 row to the next, also from block to block, and there is one cache.
    """
    if compute_capability(device) != 90 or not aligned:
        return "portable"
    asked = os.environ.get("CUPY_MLA_KERNELS", "")
    groupable = prefill and num_queries > 0 and h_q <= prefill_sm90.MOST_GROUPED_HEADS
    if asked:
        can = {"few_heads": not layout.scales_apart, "sm90": prefill or layout.quantized or flat, "grouped": groupable}
        return asked if can.get(asked, False) else "portable"
    if groupable and prefill_sm90.full(h_q, num_queries, num_sms(device)) >= 0.5:
        return "grouped"
    if layout.scales_apart or (layout.quantized and 8 < h_q <= 16 and num_queries <= PADDED_QUERIES):
        return "sm90"
    few_items = num_queries * -(-h_q // few_heads_sm90.block_heads(h_q)) <= FEW_ITEMS
    if h_q <= 16 or (prefill and few_items):
        return "few_heads"
    least = prefill_sm90.LEAST_HALF_PIECES if h_q <= 32 else prefill_sm90.LEAST_PIECES
    if layout.quantized or (flat and prefill_sm90.pieces(h_q, num_queries) >= least):
        return "sm90"
    return "portable" if prefill else "few_heads"


def plan_splits(
    place: Place,
    num_queries: int,
    h_q: int,
    rows: int,
    layout: Layout,
    *,
    flat: bool,
    batch_invariant: bool = False,
) -> int:
    """Parts that each query's `rows` of a decode are split into, so that `num_queries` of them fill the GPU.

    Args:
        layout: the cache's.
        flat: as for `family`; `flat_rows` finds out.
        batch_invariant: go by `rows` alone.
    """
    if batch_invariant:
        return max(1, min(-(-rows // INVARIANT_ROWS), MAX_CLUSTER))
    chosen = family(place.device, h_q, num_queries, True, layout, prefill=False, flat=flat)
    return _splits(chosen, place, num_queries, h_q, rows, layout)


def _splits(chosen: str, place: Place, num_queries: int, h_q: int, rows: int, layout: Layout) -> int:
    """`plan_splits` for kernels of a family."""
    if chosen == "few_heads":
        return few_heads_sm90.shape_of(place, h_q, num_queries, rows, None).splits
    if chosen == "sm90" and layout.quantized:
        return sparse_decode_sm90.shape_of(place, h_q, num_queries, rows, None).splits
    if chosen == "sm90":
        return prefill_sm90.best_splits(place, h_q, num_queries, rows)
    if chosen == "grouped":
        return 1
    heads = block_heads(h_q)
    slots = num_sms(place.device) * SHAPES[heads][2]
    return best_splits(num_queries * -(-h_q // heads), -(-rows // STEP_ROWS), slots)


def sparse_prefill(
    place: Place,
    q: Array,
    kv: Array,
    indices: Array,
    sm_scale: float,
    sink: Array | None,
    length: Array | None,
    out: Array,
    max_logits: Array,
    lse: Array,
) -> None:
    """Twin of `reference.attention.sparse_prefill`: flat rows are a cache of one block, queries a batch of s_q = 1."""
    s_q, h_q, d_qk = q.shape
    layout = by_name("bf16", d_qk)
    chosen = family(place.device, h_q, s_q, kv.aligned(16) and q.aligned(16), layout, prefill=True)
    if chosen == "grouped" and sm_scale < prefill_sm90.LEAST_SCALE:
        chosen = "few_heads"
    s_kv, topk, row_stride = kv.shape[0], indices.shape[1], 2 * kv.strides[0]
    left = Array("left", place.empty((s_q,), np.dtype(np.int32))) if chosen == "grouped" else None
    lengths = left or length
    source = _Source(
        kv.ptr,
        indices.ptr,
        lengths.ptr if lengths else 0,
        0,
        row_stride,
        indices.strides[0],
        0,
        s_kv,
        topk,
        max(s_kv, 1),
    )
    call = _Call(
        place, layout, (s_q, 1, h_q), source, _NO_SOURCE, kv.aligned(16),
        q, (q.strides[0], 0, q.strides[1]), out, (out.strides[0], 0, out.strides[1]),
        lse, max_logits, (lse.strides[0], 0, lse.strides[1]), sink, sm_scale,
        _splits(chosen, place, s_q, h_q, topk, layout), chosen,
    )  # fmt: skip
    if left is not None:
        forced = "CUPY_MLA_KERNELS" in os.environ
        prefill_sm90.launch_grouped(place, layout, h_q, s_q, topk, s_kv, length, left, forced, call.params)
    elif s_q > 0:
        call.launch(length is not None)


def sparse_decode(
    place: Place,
    layout: Layout,
    q: Array,
    cache: Array,
    indices: Array,
    sm_scale: float,
    sink: Array | None,
    length: Array | None,
    extra: Array | None,
    extra_indices: Array | None,
    extra_length: Array | None,
    batch_invariant: bool,
    num_splits: int,
    out: Array,
    lse: Array,
) -> None:
    """Twin of `reference.attention.sparse_decode`."""
    b, s_q, h_q, _ = q.shape
    main = _paged(cache, indices, length)
    second = _NO_SOURCE if extra is None or extra_indices is None else _paged(extra, extra_indices, extra_length)
    aligned = _aligned_rows(layout, cache) and (extra is None or _aligned_rows(layout, extra))
    chosen = family(
        place.device, h_q, _cut_up_for(b * s_q, batch_invariant), aligned and q.aligned(16), layout, prefill=False,
        flat=flat_rows(cache, extra) and not batch_invariant,
    )  # fmt: skip
    call = _Call(
        place, layout, (b, s_q, h_q), main, second, aligned,
        q, q.strides[:3], out, out.strides[:3],
        lse, None, (lse.strides[0], lse.strides[2], lse.strides[1]), sink, sm_scale, num_splits, chosen,
        batch_invariant,
    )  # fmt: skip
    if b * s_q > 0:
        call.launch(length is not None or extra_length is not None)


def _paged(cache: Array, indices: Array, length: Array | None) -> _Source:
    """A paged cache and its index lists."""
    size = cache.dtype.itemsize
    num_blocks, block_size, _ = cache.shape
    return _Source(
        cache.ptr, indices.ptr, length.ptr if length else 0, cache.strides[0] * size, cache.strides[1] * size,
        indices.strides[0], indices.strides[1], num_blocks * block_size, indices.shape[2], block_size,
    )  # fmt: skip


def _cut_up_for(num_queries: int, batch_invariant: bool) -> int:
    """The queries that a launch is cut up as if for."""
    return INVARIANT_QUERIES if batch_invariant else max(1, num_queries)


def _aligned_rows(layout: Layout, cache: Array) -> bool:
    """True when every row of a paged cache starts at a multiple of 16 bytes. FP8 rows stand where the layout says."""
    if not layout.quantized:
        return cache.aligned(16)
    return cache.ptr % 16 == 0 and layout.row_stride % 16 == 0 and (cache.shape[0] <= 1 or cache.strides[0] % 16 == 0)


def flat_rows(cache: Array, extra: Array | None) -> bool:
    """True when one stride leads from each row to the next, also from block to block, and there is one cache."""
    num_blocks, block_size, _ = cache.shape
    return extra is None and (num_blocks <= 1 or cache.strides[0] == block_size * cache.strides[1])


class _Call:
    """One call's parameters, packed, and the memory for partial results that they point to."""

    def __init__(
        self,
        place: Place,
        layout: Layout,
        batch: tuple[int, int, int],
        main: _Source,
        extra: _Source,
        aligned_rows: bool,
        q: Array,
        q_strides: tuple[int, ...],
        out: Array,
        out_strides: tuple[int, ...],
        lse: Array,
        max_logits: Array | None,
        lse_strides: tuple[int, ...],
        sink: Array | None,
        sm_scale: float,
        num_splits: int,
        chosen: str,
        batch_invariant: bool = False,
    ) -> None:
        b, s_q, self.h_q = batch
        self.place, self.layout, self.queries, self.family = place, layout, b * s_q, chosen
        self.batch_invariant = batch_invariant  # a decode's kernel goes by heads and layout alone
        self.shape = Shape(1, num_splits, 1)
        if chosen == "few_heads" or (chosen == "sm90" and layout.quantized):
            kernels = few_heads_sm90 if chosen == "few_heads" else sparse_decode_sm90
            queries = _cut_up_for(self.queries, batch_invariant)
            self.shape = kernels.shape_of(place, self.h_q, queries, main.topk + extra.topk, num_splits)
        elif chosen == "sm90":
            splits = min(num_splits, MAX_CLUSTER)
            self.shape = Shape(prefill_sm90.HEADS, splits, splits)
        merged = self.shape.merge_bytes(self.h_q, self.queries)  # bytes in which clusters merge
        num_splits = self.shape.parts
        cluster_parts = part_lse = part_max = part_out = 0
        rows = num_splits * self.queries * self.h_q if num_splits > 1 else 0
        if merged or rows:
            self._parts = Array("parts", place.empty((merged // 4 + rows * (D_V + 2),), np.dtype(np.float32)))
            cluster_parts = self._parts.ptr
            part_out = cluster_parts + merged
            part_lse, part_max = part_out + 4 * rows * D_V, part_out + 4 * rows * (D_V + 1)
        flags = ALIGNED_ROWS * aligned_rows | ALIGNED_Q * q.aligned(4) | ALIGNED_OUT * out.aligned(4)
        flags |= WIDE_OUT * out.aligned(16) | SOME_DONE * (chosen == "grouped") | PAIRED_PARTS * (chosen == "sm90")
        self.params = _PARAMS.pack(
            *main, *extra, q.ptr, *q_strides, out.ptr, *out_strides,
            lse.ptr, max_logits.ptr if max_logits else 0, *lse_strides,
            part_out, part_lse, part_max if max_logits else 0, cluster_parts,
            sink.ptr if sink else 0, sm_scale * math.log2(math.e), s_q, self.h_q, self.queries, num_splits, flags, 0,
        )  # fmt: skip

    def launch(self, uneven: bool) -> None:
        """Launch the kernel of the call's family, and the one that merges splits where there are any left.

        Args:
            uneven: queries have lengths of their own.
        """
        place, layout, shape = self.place, self.layout, self.shape
        if self.family == "few_heads":
            few_heads_sm90.launch(
                place, layout, shape, self.h_q, self.queries, uneven, self.params, self.batch_invariant
            )
        elif self.family == "sm90" and layout.quantized:
            sparse_decode_sm90.launch(place, layout, shape, self.h_q, self.queries, uneven, self.params)
        elif self.family == "sm90":
            prefill_sm90.launch(place, layout, shape, self.h_q, self.queries, uneven, self.params)
        else:
            heads = block_heads(self.h_q)
            blocks = self.queries * -(-self.h_q // heads)
            attention_kernel(layout, heads).launch(place, (blocks, shape.parts, 1), self.params)
        if shape.parts > 1:
            combine_kernel().launch(place, (self.queries, self.h_q, 1), self.params)
