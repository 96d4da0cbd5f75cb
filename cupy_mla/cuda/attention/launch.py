"""The attention operations as launchers: parameters, memory for partial results, and the chosen kernel's launches."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ...arrays import Array
from ...layouts import D_V, Layout, by_name
from .. import structs
from ..driver import Gpu
from ..paging import ceil_div, pointer
from ..program import Nonce, Plan, PlanField, Program, Slot
from ..structs import Packed
from . import (
    bf16_cluster_sm90,
    bf16_few_heads_sm90,
    bf16_grouped_sm90,
    bf16_shares_sm90,
    bf16_sm90,
    combine,
    few_heads_sm90,
    fp8_sm90,
    portable,
)
from .call import ALIGNED_OUT, ALIGNED_Q, ALIGNED_ROWS, ALIKE, DECODE, SOME_DONE, WIDE_OUT, Call, no_source
from .choose import Choice, Facts, asked_kernel, chooser
from .cost import EVENLY

# Of a head, in what CTAs leave to others, as float32 and float16; kernels_cu/attention/division/merge.cuh
PARTIAL_BYTES, HALF_PARTIAL_BYTES = 4 * D_V + 16, 2 * D_V + 16
MERGES_ITSELF = ("fp8_sm90", "bf16_cluster_sm90", "bf16_shares_sm90")  # these leave nothing to `combine.cu`
PLANNED = ("fp8_sm90", "few_heads_sm90")  # whose equal shares are those of a plan


def sparse_prefill(
    gpu: Gpu,
    q: Array,
    kv: Array,
    indices: Array,
    sm_scale: float,
    sink: Array | None,
    length: Array | None,
    out: Array,
    max_logits: Array,
    lse: Array,
) -> Program:
    """Twin of `reference.attention.sparse_prefill`: flat rows are a cache of one block, queries a batch of s_q = 1."""
    s_q, h_q, d_qk = q.shape
    if s_q == 0:
        return ()
    layout = by_name("bf16", int(d_qk))
    s_kv, topk = kv.shape[0], indices.shape[1]
    aligned = kv.aligned(16)
    facts = Facts(
        gpu, layout, prefill=True, aligned=aligned and q.aligned(16), uneven=length is not None,
        groupable=sm_scale >= bf16_grouped_sm90.LEAST_SCALE,
    )  # fmt: skip
    choice = chooser(facts)[asked_kernel(), h_q, s_q, topk, None]
    main = structs.SOURCE(
        cache=kv.ptr, indices=indices.ptr, lengths=pointer(length), block_stride=0, row_stride=2 * kv.strides[0],
        index_stride_b=indices.strides[0], index_stride_s=0, num_slots=s_kv, topk=topk, block_size=max(s_kv, 1),
    )  # fmt: skip
    rows = _Rows(main, no_source(), aligned, topk, s_kv, length, alike=False)
    q_, out_, lse_ = (_View(a, a.strides[0], 0, a.strides[1]) for a in (q, out, lse))
    return _launches(gpu, layout, choice, (s_q, 1, h_q), rows, q_, out_, lse_, max_logits, sink, sm_scale)


def decode_choice(
    gpu: Gpu,
    layout: Layout,
    q: Array,
    cache: Array,
    indices: Array,
    length: Array | None,
    extra: Array | None,
    extra_indices: Array | None,
    extra_length: Array | None,
    batch_invariant: bool,
    num_splits: int | None,
) -> Choice:
    """Which kernel serves a decode, and how it is divided; `num_splits` None: to be chosen."""
    b, s_q, h_q, _ = q.shape
    aligned = _aligned_caches(layout, cache, extra)
    facts = Facts(
        gpu, layout, prefill=False, aligned=aligned and q.aligned(16), flat=flat_rows(cache, extra),
        uneven=length is not None or extra_length is not None, batch_invariant=bool(batch_invariant),
    )  # fmt: skip
    rows = indices.shape[2] + (0 if extra_indices is None else extra_indices.shape[2])
    return chooser(facts)[asked_kernel(), h_q, b * s_q, rows, num_splits]


def sparse_decode(
    gpu: Gpu,
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
    plan: Plan | None,
    alike: bool,
    choice: Choice,
    out: Array,
    lse: Array,
) -> Program:
    """Twin of `reference.attention.sparse_decode`, whose splits are those of the choice.

    `alike`: as for `ops.attention.decode`. Lengths are then for whole items and a plan's shares: other divisions find
    out where lists end while they wait for Q, and would wait for lengths.
    """
    b, s_q, h_q, _ = q.shape
    if b == 0 or s_q == 0:
        return ()
    second = no_source()
    if extra is not None and extra_indices is not None:
        second = _paged(extra, extra_indices, extra_length)
    aligned = _aligned_caches(layout, cache, extra)
    if alike and not (_planned(choice) or (choice.kernel == "fp8_sm90" and choice.splits == 1)):
        length = None
    uneven = not alike and (length is not None or extra_length is not None)
    num_slots = cache.shape[0] * cache.shape[1]
    rows = _Rows(_paged(cache, indices, length), second, aligned, indices.shape[2], num_slots, length, alike)
    if uneven or extra is not None:
        plan = None
    views = _View(q, *q.strides[:3]), _View(out, *out.strides[:3]), _View(lse, *(lse.strides[i] for i in (0, 2, 1)))
    return _launches(gpu, layout, choice, (b, s_q, h_q), rows, *views, None, sink, sm_scale, plan)


def _planned(choice: Choice) -> bool:
    """Whether a plan keeps how the choice's rows are divided."""
    return choice.kernel in PLANNED and choice.splits == EVENLY


def decode_splits(
    gpu: Gpu, layout: Layout, h_q: int, queries: int, rows: int, *, flat: bool, batch_invariant: bool
) -> int:
    """Splits of a query in a decode of these sizes, with rows and q aligned to 16 bytes."""
    facts = Facts(gpu, layout, prefill=False, flat=flat, batch_invariant=batch_invariant)
    return chooser(facts)[asked_kernel(), h_q, queries, rows, None].splits


def flat_rows(cache: Array, extra: Array | None) -> bool:
    """True when one stride leads from each row to the next, also from block to block, and there is one cache."""
    num_blocks, block_size, _ = cache.shape
    return extra is None and (num_blocks <= 1 or cache.strides[0] == block_size * cache.strides[1])


def _paged(cache: Array, indices: Array, length: Array | None) -> Packed:
    """`struct Source` of a paged cache and its index lists."""
    size = cache.dtype.itemsize
    num_blocks, block_size, _ = cache.shape
    return structs.SOURCE(
        cache=cache.ptr, indices=indices.ptr, lengths=pointer(length), block_stride=cache.strides[0] * size,
        row_stride=cache.strides[1] * size, index_stride_b=indices.strides[0], index_stride_s=indices.strides[1],
        num_slots=num_blocks * block_size, topk=indices.shape[2], block_size=block_size,
    )  # fmt: skip


def _aligned_caches(layout: Layout, cache: Array, extra: Array | None) -> bool:
    return _aligned_rows(layout, cache) and (extra is None or _aligned_rows(layout, extra))


def _aligned_rows(layout: Layout, cache: Array) -> bool:
    """True when every row of a paged cache starts at a multiple of 16 bytes. FP8 rows stand where the layout says."""
    if not layout.quantized:
        return cache.aligned(16)
    return cache.ptr % 16 == 0 and layout.row_stride % 16 == 0 and (cache.shape[0] <= 1 or cache.strides[0] % 16 == 0)


class _Rows(NamedTuple):
    """The rows that queries attend to.

    Attributes:
        main, extra: struct Source of the caches and their lists.
        aligned: every row starts at a multiple of 16 bytes.
        topk, num_slots: entries of a main list, and the rows that they may name.
        length: the call's topk_length.
        alike: as for `ops.attention.decode`.
    """

    main: Packed
    extra: Packed
    aligned: bool
    topk: int
    num_slots: int
    length: Array | None
    alike: bool


class _View(NamedTuple):
    """An array over requests, queries of a request, and heads: its strides along these."""

    array: Array
    b: int
    s: int
    h: int


def _launches(
    gpu: Gpu,
    layout: Layout,
    choice: Choice,
    batch: tuple[int, int, int],
    rows: _Rows,
    q: _View,
    out: _View,
    lse: _View,
    max_logits: Array | None,
    sink: Array | None,
    sm_scale: float,
    plan: Plan | None = None,
) -> Program:
    """The program of a choice: parameters, the kernel's launches, and the one that merges partial results.

    Args:
        batch: requests, queries of each, heads.
        plan: of calls that divide their lists alike.
    """
    b, s_q, h_q = batch
    queries, heads = b * s_q, int(choice.heads)
    unsplit = choice.splits == 1 and choice.cluster == 1
    partials = 1 if unsplit else max(1, choice.splits // choice.cluster)
    items = queries * ceil_div(h_q, heads)
    memory: _Partials | _SharePartials
    if choice.kernel in MERGES_ITSELF:
        memory = _SharePartials(choice, items, heads * HALF_PARTIAL_BYTES)
    elif choice.splits == EVENLY:
        places = 1 if choice.kernel == "few_heads_sm90" else portable.PLACES
        memory = _SharePartials(choice, items, places * heads * PARTIAL_BYTES)
    else:
        memory = _Partials(queries, h_q, heads, choice.splits, choice.cluster)
    flags = ALIGNED_ROWS * rows.aligned | ALIGNED_Q * q.array.aligned(4) | ALIGNED_OUT * out.array.aligned(4)
    flags |= WIDE_OUT * out.array.aligned(16) | SOME_DONE * (choice.kernel == "bf16_grouped_sm90")
    flags |= DECODE * (max_logits is None) | ALIKE * rows.alike
    plan_address: Any = 0
    plan_filled: Any = 0
    if plan is not None and _planned(choice):
        key = choice.ctas, heads, h_q, queries, rows.topk
        plan_address, plan_filled = PlanField(plan, key, "address"), PlanField(plan, key, "filled")
    params = structs.ATTENTION(
        main=rows.main, extra=rows.extra, q=q.array.ptr, q_b=q.b, q_s=q.s, q_h=q.h, out=out.array.ptr, out_b=out.b,
        out_s=out.s, out_h=out.h, lse=lse.array.ptr, max_logits=pointer(max_logits), lse_b=lse.b, lse_s=lse.s,
        lse_h=lse.h, part_out=memory.out, part_lse=memory.lse, part_max=memory.max_logits if max_logits else 0,
        cluster_parts=memory.clusters, sink=pointer(sink), scale_log2=sm_scale * math.log2(math.e), s_q=s_q, h_q=h_q,
        num_queries=queries, num_splits=partials, flags=flags, order=0, ready=memory.ready,
        nonce=Nonce() if memory.ready else 0, least_split=choice.least_split,
        item_cost=choice.item_cost, cut_cost=choice.ctas * choice.cut_cost,
        whole_items=ceil_div(items, max(1, choice.ctas)) * choice.ctas, plan_filled=plan_filled, plan=plan_address,
    )  # fmt: skip
    call = Call(gpu, layout, h_q, queries, rows.topk, rows.num_slots, params)
    if choice.kernel == "bf16_grouped_sm90":
        assert choice.rest is not None
        return bf16_grouped_sm90.launches(
            call, int(choice.queries), choice.most_rows, choice.rest, rows.length, choice.longest_first
        )
    steps = list(_of_kernel(call, choice, heads, partials))
    return [*steps, combine.launch(call)] if choice.kernel not in MERGES_ITSELF and partials > 1 else steps


def _of_kernel(call: Call, choice: Choice, heads: int, partials: int) -> Program:
    """The launches of a kernel for single queries."""
    if choice.kernel == "fp8_sm90":
        return fp8_sm90.launches(call, heads, choice.splits, choice.cluster, choice.ctas, choice.teams)
    if choice.kernel == "few_heads_sm90":
        return few_heads_sm90.launches(call, heads, choice.cluster, partials, choice.ctas)
    if choice.kernel == "bf16_few_heads_sm90":
        queries = int(choice.queries)
        return bf16_few_heads_sm90.launches(call, heads, queries, choice.cluster, partials, choice.longest_first)
    if choice.kernel == "bf16_cluster_sm90":
        return bf16_cluster_sm90.launches(call, heads, choice.cluster)
    if choice.kernel == "bf16_shares_sm90":
        return bf16_shares_sm90.launches(call, choice.ctas)
    if choice.kernel == "bf16_sm90":
        return bf16_sm90.launches(call, choice.longest_first, bool(choice.counted))
    limit = portable.LARGE if choice.kernel == "portable" else portable.SMALL
    return portable.launches(call, heads, partials, int(choice.ctas), limit)


class _Partials:
    """Memory for partial results: those that clusters merge, and those for `combine.cu`; pointers, or 0 for none."""

    ready = 0

    def __init__(self, queries: int, h_q: int, heads: int, splits: int, cluster: int) -> None:
        self.clusters = self.out = self.lse = self.max_logits = 0
        nbytes = rows = 0
        if cluster > 1:
            nbytes = queries * splits * (ceil_div(h_q, heads) * heads) * PARTIAL_BYTES
        if splits // cluster > 1:
            rows = splits // cluster * queries * h_q
        if cluster > 1 or splits // cluster > 1:
            memory = Slot("partial results", shape=(nbytes + 4 * rows * (D_V + 2),)).ptr
            self.clusters = memory  # type: ignore[assignment]
            self.out = memory + nbytes  # type: ignore[assignment]
            self.lse = memory + (nbytes + 4 * rows * D_V)  # type: ignore[assignment]
            self.max_logits = memory + (nbytes + 4 * rows * (D_V + 1))  # type: ignore[assignment]


class _SharePartials:
    """Memory for what clusters merge, or CTAs leave to others and say that it is there; pointers, or 0 for none.

    Args:
        each: bytes of a CTA's partial results.
    """

    out = lse = max_logits = 0

    def __init__(self, choice: Choice, items: int, each: int) -> None:
        self.clusters = self.ready = 0
        division = fp8_sm90.division_of(choice.splits, choice.ctas, choice.teams)
        if choice.cluster > 1:
            self.clusters = Slot("partial results", shape=(items * choice.cluster * each,)).ptr  # type: ignore[assignment]
        elif choice.kernel == "fp8_sm90" and division == fp8_sm90.SEGMENTS:
            nbytes = choice.ctas * choice.splits * each
            self.clusters = Slot("partial results", shape=(nbytes,)).ptr  # type: ignore[assignment]
        elif choice.splits != 1:
            memory = Slot("partial results", shape=(choice.ctas * (each + 16),)).ptr
            self.clusters, self.ready = memory, memory + choice.ctas * each  # type: ignore[assignment]
