"""Launchers of the indexer's training: `attention_target.cu`, `dense_lse.cu`, and `indexer_loss.cu` with its helpers. A
range of rows is a list without indices: an entry is a number of a row.

The loss is computed in chunks of tokens, see `row_sums.py`. Before them `loss_tokens` counts the tokens that count,
because gradients are divided by their number. Behind them `loss_sum` adds up the divergences that `indexer_loss` has
written for each token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache

from ..arguments import IndexerLoss, Target
from ..dtypes import BFLOAT16, FLOAT32, UINT8
from ..dtypes import INT32 as INTEGERS
from .driver import Gpu
from .kernel import Kernel
from .paging import ceil_div, fitting, pointer
from .program import Buffer, Clear, Launch, Program, Step
from .row_sums import Lists, RowSums, lists_kernel, ranges_kernel, rows_kernel
from .structs import FLOAT, INT32, INT64, POINTER, Packed, Struct

HEAD_SCORES = Struct(
    "HeadScoresParams", q=POINTER, kv=POINTER, indices=POINTER, starts=POINTER, ends=POINTER, q_token=INT64,
    q_head=INT64, kv_row=INT64, index_stride=INT64, h_q=INT32, topk=INT32, s_kv=INT32, scale_log2=FLOAT, aligned=INT32,
)  # fmt: skip
TARGET = Struct(
    "AttentionTargetParams", HEAD_SCORES, lse=POINTER, sink=POINTER, out=POINTER, lse_token=INT64, lse_head=INT64,
    sink_stride=INT64, out_token=INT64,
)  # fmt: skip
LSE = Struct("DenseLseParams", HEAD_SCORES, out=POINTER, out_token=INT64, out_head=INT64)
TOKENS = Struct(
    "LossTokensParams", indices=POINTER, starts=POINTER, ends=POINTER, counted=POINTER, number=POINTER,
    index_stride=INT64, tokens=INT32, topk=INT32, keys=INT32,
)  # fmt: skip
LOSS = Struct(
    "IndexerLossParams", q=POINTER, k=POINTER, w=POINTER, target=POINTER, rows=POINTER, places=POINTER, counts=POINTER,
    number=POINTER, q_scales=POINTER, k_scales=POINTER, scores=POINTER, bits=POINTER, divergences=POINTER,
    contributions=POINTER, dq=POINTER, dw=POINTER, q_token=INT64, q_head=INT64, k_row=INT64, w_token=INT64,
    target_token=INT64, dq_token=INT64, dq_head=INT64, dw_token=INT64, heads=INT32, topk=INT32, padded=INT32,
    coeff=FLOAT, relu=INT32, wide=INT32, aligned=INT32, aligned_dq=INT32,
)  # fmt: skip
ROUND = Struct(
    "RoundRowsParams", source=POINTER, values=POINTER, scales=POINTER, outer=INT64, inner=INT64, rows=INT32,
    of_outer=INT32, aligned=INT32, power_of_two=INT32, least=FLOAT,
)  # fmt: skip
SUM = Struct("LossSumParams", divergences=POINTER, number=POINTER, out=POINTER, coeff=FLOAT, tokens=INT32)

WIDTHS, D = (576, 512), 128  # values of a row; of an indexer's key
# Heads that a CTA may have: a call uses the fewest that hold all of its heads, or the most.
TARGET_HEADS, LOSS_HEADS = (16, 32, 64), (16, 32, 64, 128)
SPILL_BYTES = 24  # of `attention_target` over rows of 512 on sm_100 and sm_120, whose 128 registers make two CTAs an SM
RANGE_KEYS = 8  # a CTA adds up the gradients of so many keys
TILE_KEYS = 64  # of `indexer_loss`
WARPS = 8  # of a CTA of `loss_tokens`, with a token each
ROUND_ROWS = 32  # of a CTA of `round_rows`
QUERY_FLOOR, KEY_FLOOR = 1e-10, 1e-4  # scales are made of the largest magnitude, or of this if it is greater
ROUNDED_BYTES = 2 * 128 + 4  # a rounded query or key, and its scale


@cache
def target_kernel(d_qk: int, heads: int) -> Kernel:
    """The kernel for one width of rows, and so many heads at a time."""
    spills = SPILL_BYTES if (d_qk, heads) == (512, 64) else 0
    return Kernel("attention/attention_target.cu", TARGET, {"D_QK": d_qk, "HEADS": heads}, spill_bytes=spills)


@cache
def lse_kernel(d_qk: int, heads: int) -> Kernel:
    """The kernel for one width of rows, and so many heads at a time."""
    return Kernel("attention/dense_lse.cu", LSE, {"D_QK": d_qk, "HEADS": heads})


TOKENS_KERNEL = Kernel("indexer/loss_tokens.cu", TOKENS, {})
ROUND_KERNEL = Kernel("indexer/round_rows.cu", ROUND, {})


@cache
def loss_kernel(heads: int, quantized: bool) -> Kernel:
    """The kernel for up to so many heads; `quantized`: of queries and keys that are rounded to e4m3."""
    return Kernel("indexer/indexer_loss.cu", LOSS, {"HEADS": heads, "QUANTIZED": int(quantized)})


SUM_KERNEL = Kernel("indexer/loss_sum.cu", SUM, {})


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for d_qk in WIDTHS:
        for heads in TARGET_HEADS:
            yield target_kernel(d_qk, heads)
            yield lse_kernel(d_qk, heads)
    yield TOKENS_KERNEL
    yield lists_kernel(RANGE_KEYS, True)
    yield ranges_kernel(RANGE_KEYS)
    yield ROUND_KERNEL
    for heads in LOSS_HEADS:
        for quantized in (False, True):
            yield loss_kernel(heads, quantized)
    yield rows_kernel(D, RANGE_KEYS)
    yield SUM_KERNEL


def attention_target(gpu: Gpu, a: Target) -> Program:
    """Twin of `reference.training.attention_target`."""
    (tokens, h_q, d_qk), width = a.q.shape, a.out.shape[1]
    if tokens == 0 or width == 0:
        return []
    params = TARGET(
        _head_scores(a, width), lse=a.lse.ptr, sink=pointer(a.sink), out=a.out.ptr, lse_token=a.lse.strides[0],
        lse_head=a.lse.strides[1], sink_stride=0 if a.sink is None else a.sink.strides[0], out_token=a.out.strides[0],
    )  # fmt: skip
    return [Launch(target_kernel(d_qk, fitting(TARGET_HEADS, h_q)), (tokens, 1, 1), params)]


def dense_lse(gpu: Gpu, a: Target) -> Program:
    """Twin of `reference.training.dense_lse`."""
    tokens, h_q, d_qk = a.q.shape
    if tokens == 0:
        return []
    params = LSE(
        _head_scores(a, a.kv.shape[0]), out=a.out.ptr, out_token=a.out.strides[0], out_head=a.out.strides[1]
    )  # fmt: skip
    heads = fitting(TARGET_HEADS, h_q)
    return [Launch(lse_kernel(d_qk, heads), (tokens, ceil_div(h_q, heads), 1), params)]


def _head_scores(a: Target, width: int) -> Packed:
    """`struct HeadScoresParams`; lists or ranges have at most `width` entries."""
    return HEAD_SCORES(
        **_entries(a, width), q=a.q.ptr, kv=a.kv.ptr, q_token=a.q.strides[0], q_head=a.q.strides[1],
        kv_row=a.kv.strides[0], h_q=a.q.shape[1], s_kv=a.kv.shape[0], scale_log2=a.sm_scale * math.log2(math.e),
        aligned=int(a.q.aligned(16) and a.kv.aligned(16)),
    )  # fmt: skip


def _entries(a: Target | IndexerLoss, width: int) -> dict[str, object]:
    """Fields for the entries of each token, at most `width`: its list and its length, or its range of rows."""
    lists = a.indices is not None
    return {
        "indices": pointer(a.indices), "index_stride": a.indices.strides[0] if lists else 0, "topk": width,
        "starts": pointer(a.starts), "ends": pointer(a.length if lists else a.ends),
    }  # fmt: skip


def indexer_loss(gpu: Gpu, a: IndexerLoss) -> Program:
    """Twin of `reference.training.indexer_loss`."""
    (tokens, heads, _), topk, keys = a.q_index.shape, a.target.shape[1], a.k_index.shape[0]
    kernel, padded = fitting(LOSS_HEADS, heads), ceil_div(topk, TILE_KEYS) * TILE_KEYS
    divergences = Buffer("divergences", shape=(tokens,), dtype=FLOAT32)
    number = Buffer("tokens that count", shape=(1,), dtype=INTEGERS)
    lists = Lists(tokens, keys, RANGE_KEYS, True, a.indices, a.length, a.starts, a.ends, a.counted)
    quantized = int(a.scale_format is not None)
    left = a.max_workspace_bytes - divergences.nbytes - number.nbytes - quantized * keys * ROUNDED_BYTES
    of_token = padded * (4 + 4 * quantized + kernel // 8) + quantized * heads * ROUNDED_BYTES
    sums = RowSums(lists, a.dk_index, a.accumulate, 1, left, of_token)
    scored = _Scored(a, sums.step)
    scores = Buffer("scores", shape=(sums.step, 1 + quantized, padded), dtype=FLOAT32)
    bits = Buffer("signs", shape=(sums.step, padded, kernel // 8), dtype=UINT8)
    divisor = 0 if a.per_token else number.ptr
    program: list[Step] = []
    if not a.per_token:
        program.append(Clear(number.ptr, number.nbytes))
        if tokens > 0:
            params = TOKENS(
                **_entries(a, topk), counted=pointer(a.counted), number=divisor, tokens=tokens, keys=keys
            )  # fmt: skip
            program.append(Launch(TOKENS_KERNEL, (ceil_div(tokens, WARPS), 1, 1), params))
    program += scored.keys()
    for first in range(0, max(tokens, 1), sums.step):
        count = min(sums.step, tokens - first)
        if count > 0:
            memory = {"number": divisor, "scores": scores.ptr, "bits": bits.ptr, **scored.fields(first)}
            memory["divergences"] = divergences.ptr + FLOAT32.itemsize * first
            params = _params(a, sums, first, padded, memory)
            program += [*scored.queries(first, count), sums.sort(first, count)]
            program.append(Launch(loss_kernel(kernel, bool(quantized)), (count, 1, 1), params))
        program += sums.add(first, count)
    params = SUM(divergences=divergences.ptr, number=divisor, out=a.loss.ptr, coeff=a.loss_coeff, tokens=tokens)
    return [*program, Launch(SUM_KERNEL, (1, 1, 1), params)]


class _Scored:
    """The queries and keys of the logits: the caller's, or copies in scratch memory that are rounded to e4m3. Of
    queries there is a copy of one chunk at a time.

    Args:
        a: the call's arguments.
        step: tokens of a chunk.
    """

    def __init__(self, a: IndexerLoss, step: int) -> None:
        self._a, self._heads = a, a.q_index.shape[1]
        rows = {"queries": step * self._heads, "keys": a.k_index.shape[0]}
        self._values = {name: Buffer(f"rounded {name}", shape=(n, D), dtype=BFLOAT16) for name, n in rows.items()}
        self._scales = {name: Buffer(f"scales of {name}", shape=(n,), dtype=FLOAT32) for name, n in rows.items()}

    def keys(self) -> list[Launch]:
        """The launch that rounds the keys; none if they are not rounded."""
        k = self._a.k_index
        source = {"source": k.ptr, "outer": k.strides[0], "inner": 0, "of_outer": 1, "aligned": int(k.aligned(16))}
        return self._round("keys", k.shape[0], KEY_FLOOR, source)

    def queries(self, first: int, count: int) -> list[Launch]:
        """The launch that rounds the queries of a chunk; none if they are not rounded."""
        q = self._a.q_index
        source = {
            "source": pointer(q, first), "outer": q.strides[0], "inner": q.strides[1], "of_outer": self._heads,
            "aligned": int(q.aligned(16)),
        }  # fmt: skip
        return self._round("queries", count * self._heads, QUERY_FLOOR, source)

    def _round(self, name: str, rows: int, floor: float, source: Mapping[str, object]) -> list[Launch]:
        if self._a.scale_format is None or rows == 0:
            return []
        params = ROUND(
            **source, values=self._values[name].ptr, scales=self._scales[name].ptr, rows=rows, least=floor,
            power_of_two=int(self._a.scale_format == "ue8m0"),
        )  # fmt: skip
        return [Launch(ROUND_KERNEL, (ceil_div(rows, ROUND_ROWS), 1, 1), params)]

    def fields(self, first: int) -> dict[str, object]:
        """Fields of `struct IndexerLossParams` for the chunk that begins with token `first`."""
        q, k = self._a.q_index, self._a.k_index
        if self._a.scale_format is None:
            return {
                "q": pointer(q, first), "k": k.ptr, "q_scales": 0, "k_scales": 0, "q_token": q.strides[0],
                "q_head": q.strides[1], "k_row": k.strides[0], "aligned": int(q.aligned(16) and k.aligned(16)),
            }  # fmt: skip
        return {
            "q": self._values["queries"].ptr, "k": self._values["keys"].ptr, "q_scales": self._scales["queries"].ptr,
            "k_scales": self._scales["keys"].ptr, "q_token": self._heads * D, "q_head": D, "k_row": D, "aligned": 1,
        }  # fmt: skip


def _params(a: IndexerLoss, sums: RowSums, first: int, padded: int, memory: Mapping[str, object]) -> Packed:
    """`struct IndexerLossParams` for a chunk's divergences and gradients."""
    dq, dw = a.dq_index, a.dw
    return LOSS(
        w=pointer(a.w, first), target=pointer(a.target, first), rows=sums.sorted.rows.ptr,
        places=sums.places.ptr, counts=sums.sorted.counts.ptr,
        contributions=sums.contributions.ptr if a.gradients else 0, dq=pointer(dq, first), dw=pointer(dw, first),
        w_token=a.w.strides[0], target_token=a.target.strides[0], dq_token=dq.strides[0] if a.gradients else 0,
        dq_head=dq.strides[1] if a.gradients else 0, dw_token=dw.strides[0] if a.gradients else 0,
        heads=a.q_index.shape[1], topk=a.target.shape[1], padded=padded, coeff=a.loss_coeff, relu=int(a.relu),
        wide=int(a.gradients and dq.dtype == FLOAT32),
        aligned_dq=int(a.gradients and dq.aligned(2 * dq.dtype.itemsize)), **memory,
    )  # fmt: skip
