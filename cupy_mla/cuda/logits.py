"""Launchers of the indexer's quantization, logits and schedule: `kernels_cu/indexer/quantize_q.cu`, `logits.cu`,
`logits_sm90.cu` and `schedule.cu`.

`choose` decides which kernel makes the logits. For tests the environment variable CUPY_MLA_INDEXER_KERNELS forces one,
which must be able to serve the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from .. import private
from ..arguments import CandidateKeys, PagedKeys, QuantizeQ, RaggedKeys
from ..arrays import Array
from ..dtypes import E5M2
from ..layouts import INDEXER_FP8, INDEXER_MXFP4
from . import logits_sm90, structs
from .driver import Gpu
from .indexer import blocks_aligned, defines_of
from .kernel import Kernel
from .logits_sm90 import E5M2_ROWS, HEADS, PAGED_FP8, PAGED_MXFP4, ROWS, Keys, Work, padded_heads
from .paging import NO_TABLE, block_table, ceil_div, lens_stride, pointer
from .program import Launch, Pointer, Program
from .structs import FLOAT, INT32, INT64, POINTER, Packed, Struct

QUANTIZE_Q = Struct(
    "QuantizeQParams", q=POINTER, weights=POINTER, positions=POINTER, cos_sin=POINTER, codes=POINTER, scales=POINTER,
    w=POINTER, q_t=INT64, q_h=INT64, weights_stride=INT64, positions_end=INT64, cos_sin_stride=INT64, tokens=INT32,
    heads=INT32, bf16_weights=INT32, bf16_cos_sin=INT32, rope_first=INT32, interleaved=INT32, power_of_two=INT32,
    factor=FLOAT,
)  # fmt: skip
SCHEDULE = Struct("ScheduleParams", structs.LOGITS_WORK, out=POINTER, out_stride=INT64)

D = INDEXER_FP8.d_qk
HEADS_PER_WARP, WARPS = 8, 8  # of `quantize_q.cu`
CANDIDATE_BLOCK = 8  # keys
NO_CANDIDATES = {"candidates": 0, "req_id": 0, "candidates_stride": 0}

VARIABLE = "CUPY_MLA_INDEXER_KERNELS"
asked_kernel: Callable[[], str | None] = private.environment_reader(VARIABLE)
PORTABLE, SM90 = NAMES = ("logits", "logits_sm90")

# Of `logits.cu`.
TILE_ROWS = 256  # queries times heads that a CTA has in shared memory
FEW_ROWS = 64  # the same in a decode with few queries a request
UNIT = 256  # keys that a CTA works on at a time
CTAS_PER_SM = 2  # that run at a time
SPILL_BYTES = 16  # keys fill the registers, so some compilers spill what is needed once a unit


@cache
def quantize_kernel(aligned: bool, mxfp4: bool, widen: bool) -> Kernel:
    """The kernel that quantizes queries.

    Args:
        aligned: rows of q allow 16-byte loads.
        mxfp4: to MXFP4, else to e4m3.
        widen: the e2m1 numbers of MXFP4 are written as e5m2, under one scale a head instead of one a group.
    """
    defines = {"ALIGNED": int(aligned), "MXFP4": int(mxfp4), "WIDEN": int(widen)}
    return Kernel("indexer/quantize_q.cu", QUANTIZE_Q, defines)


@cache
def logits_kernel(heads: int, rows: int, keys: Keys, aligned: bool, compact: bool) -> Kernel:
    """The kernel for so many heads, and query rows (queries times heads) of a tile. Its parameters say whether queries
    are e4m3 or e5m2.

    Args:
        aligned: keys allow 16-byte loads.
        compact: results start at the first key that a query sees.
    """
    defines = {
        **keys.defines(), "HEADS": heads, "QUERIES": rows // heads, "ALIGNED": int(aligned), "COMPACT": int(compact),
    }  # fmt: skip
    return Kernel("indexer/logits.cu", structs.LOGITS, defines, spill_bytes=SPILL_BYTES)


# Makes a schedule. It does not let the next launch overlap, which reads the schedule before it waits.
SCHEDULE_KERNEL = Kernel(
    "indexer/schedule.cu", SCHEDULE, {**defines_of(INDEXER_FP8), "PAGED": 1, "ALIGNED": 1, "CANDIDATES": 0}
)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield SCHEDULE_KERNEL
    for aligned in (True, False):
        for mxfp4, widen in ((False, False), (True, False), (True, True)):
            yield quantize_kernel(aligned, mxfp4, widen)
    for heads in HEADS:
        for keys, compact in product((ROWS, E5M2_ROWS), (False, True)):
            yield logits_kernel(heads, TILE_ROWS, keys, True, compact)
        for keys in (PAGED_FP8, PAGED_MXFP4):
            yield logits_kernel(heads, TILE_ROWS, keys, False, False)
            for rows in (FEW_ROWS, TILE_ROWS):
                yield logits_kernel(heads, rows, keys, True, False)
            for aligned in (False, True):
                yield logits_kernel(heads, FEW_ROWS, keys._replace(candidates=True), aligned, False)


def quantize_indexer_q(gpu: Gpu, a: QuantizeQ) -> Program:
    """Twin of `reference.logits.quantize_indexer_q`."""
    q, weights, cos_sin = a.q, a.weights, a.cos_sin_cache
    tokens, heads, _ = q.shape
    if tokens == 0:
        return ()
    params = QUANTIZE_Q(
        q=q.ptr, weights=weights.ptr, positions=pointer(a.positions), cos_sin=pointer(cos_sin), codes=a.codes.ptr,
        scales=pointer(a.scales), w=a.w.ptr, q_t=q.strides[0], q_h=q.strides[1], weights_stride=weights.strides[0],
        positions_end=cos_sin.shape[0] if cos_sin else 0, cos_sin_stride=cos_sin.strides[0] if cos_sin else 0,
        tokens=tokens, heads=heads, bf16_weights=int(weights.dtype.itemsize == 2),
        bf16_cos_sin=int(cos_sin is not None and cos_sin.dtype.itemsize == 2), rope_first=int(a.rope_first),
        interleaved=int(a.interleaved), power_of_two=int(a.scale_format == "ue8m0"), factor=(int(heads) * D) ** -0.5,
    )  # fmt: skip
    mxfp4 = a.scale_format == "mxfp4"
    kernel = quantize_kernel(q.aligned(16), mxfp4, mxfp4 and a.scales is None)
    return [Launch(kernel, (ceil_div(tokens * (heads // HEADS_PER_WARP), WARPS), 1, 1), params)]


class Part(NamedTuple):
    """Some queries of a call, or requests over a paged cache, and how their logits are written.

    Attributes:
        first, size: the number of the first one, and how many there are.
        out: the address of the logits, float32.
        stride: items from row to row of the logits.
        clean: write -inf for keys that a query does not see.
        all_chosen: queries with at most so many keys get no logits.
    """

    first: int
    size: int
    out: Pointer | int
    stride: int
    clean: bool
    all_chosen: int = 0


def indexer_logits(gpu: Gpu, of: RaggedKeys, clean: bool, compact: bool, out: Array) -> Program:
    """Twin of `reference.logits.indexer_logits`."""
    whole = Part(0, of.q8.shape[0], out.ptr, out.strides[0], clean)
    return ragged_logits(gpu, of, whole, out.shape[1] if compact else None)


def paged_indexer_logits(gpu: Gpu, of: PagedKeys, clean: bool, out: Array) -> Program:
    """Twin of `reference.logits.paged_indexer_logits`."""
    return paged_logits(gpu, of, Part(0, of.q8.shape[0], out.ptr, out.strides[0], clean), out.shape[1])


def paged_indexer_schedule(
    gpu: Gpu, lens: Array, table: Array, max_context_len: int, block_size: int, out: Array
) -> Program:
    """Twin of `reference.logits.paged_indexer_schedule`."""
    params = SCHEDULE(
        **NO_CANDIDATES, table=block_table(table, block_size), starts=0, ends=lens.ptr, lens_stride=lens_stride(lens),
        requests=lens.shape[0], queries=lens.shape[1] if len(lens.shape) == 2 else 1, width=max_context_len,
        all_chosen=0, out=out.ptr, out_stride=out.strides[0],
    )  # fmt: skip
    return [Launch(SCHEDULE_KERNEL, (out.shape[0], 1, 1), params)]


def ragged_logits(gpu: Gpu, of: RaggedKeys, part: Part, compact_width: int | None = None) -> Program:
    """Logits of some queries. With `compact_width` a row of results starts at the first key that its query sees."""
    q8, k8, ks, w, starts, ends = of
    first, queries = part.first, part.size
    _, heads, _ = q8.shape
    keys = k8.shape[0]
    if queries == 0 or (keys == 0 if compact_width is None else compact_width == 0):
        return ()
    params = structs.LOGITS(
        **NO_CANDIDATES, table=NO_TABLE, q8=pointer(q8, first), keys=k8.ptr, scales=ks.ptr, w=pointer(w, first),
        out=part.out, starts=pointer(starts, first), ends=pointer(ends, first), schedule=0, q_request=0,
        q_query=q8.strides[0], q_head=q8.strides[1], w_stride=w.strides[0], out_stride=part.stride,
        key_stride=k8.strides[0], lens_stride=0, schedule_stride=0, requests=1, queries=queries, heads=heads,
        width=keys, num_blocks=0, clean=int(part.clean), compact_width=0 if compact_width is None else compact_width,
        all_chosen=part.all_chosen, e5m2_queries=int(_is_e5m2(q8)),
    )  # fmt: skip
    work = Work(heads, E5M2_ROWS if _is_e5m2(k8) else ROWS, 1, queries, keys, compact_width is not None)
    return [_launch(gpu, work, True, q8, params)]


def paged_logits(gpu: Gpu, of: PagedKeys, part: Part, width: int) -> Program:
    """Logits of some requests over at most `width` keys.

    A schedule divides all keys, so with one `part.all_chosen` is ignored.
    """
    q8, kv_cache, w, lens, table, schedule = of
    first, requests = part.first, part.size
    _, n, heads, _ = q8.shape
    num_blocks, block_size, _ = kv_cache.shape
    if requests == 0 or n == 0 or width == 0:
        return ()
    aligned, keys = blocks_aligned(kv_cache, 16), _keys(kv_cache)
    fp8 = not (keys.e5m2 or _is_e5m2(q8))
    if not (fp8 and _by_sm90(gpu, aligned, True) and logits_sm90.scheduled(heads, n, block_size)):
        schedule = None
    params = structs.LOGITS(
        **NO_CANDIDATES, table=block_table(table, block_size, first, requests), q8=pointer(q8, first),
        keys=kv_cache.ptr, scales=0, w=pointer(w, first * n), out=part.out, starts=0, ends=pointer(lens, first),
        schedule=pointer(schedule), q_request=q8.strides[0], q_query=q8.strides[1], q_head=q8.strides[2],
        w_stride=w.strides[0], out_stride=part.stride, key_stride=kv_cache.strides[0], lens_stride=lens_stride(lens),
        schedule_stride=0 if schedule is None else schedule.strides[0], requests=requests, queries=n, heads=heads,
        width=width, num_blocks=num_blocks, clean=int(part.clean), compact_width=0,
        all_chosen=part.all_chosen if schedule is None else 0, e5m2_queries=int(_is_e5m2(q8)),
    )  # fmt: skip
    shares = None if schedule is None else schedule.shape[0]
    return [_launch(gpu, Work(heads, keys, requests, n, width, shares=shares), aligned, q8, params)]


def candidate_logits(gpu: Gpu, of: CandidateKeys, out: Array) -> Program:
    """Twin of `reference.logits.candidate_logits`."""
    return logits_of_candidates(gpu, of, Part(0, of.q8.shape[0], out.ptr, out.strides[0], True))


def logits_of_candidates(gpu: Gpu, of: CandidateKeys, part: Part) -> Program:
    """Logits of some query tokens over their candidate blocks."""
    q8, kv_cache, w, candidates, lens, req_id, table = of
    first, tokens = part.first, part.size
    _, heads, _ = q8.shape
    num_blocks, block_size, _ = kv_cache.shape
    width = candidates.shape[1] * CANDIDATE_BLOCK
    if tokens == 0 or width == 0:
        return ()
    params = structs.LOGITS(
        table=block_table(table, block_size), q8=pointer(q8, first), keys=kv_cache.ptr, scales=0, w=pointer(w, first),
        out=part.out, starts=0, ends=pointer(lens, first), schedule=0, q_request=q8.strides[0], q_query=0,
        q_head=q8.strides[1], w_stride=w.strides[0], out_stride=part.stride, key_stride=kv_cache.strides[0],
        lens_stride=0, schedule_stride=0, requests=tokens, queries=1, heads=heads, width=width, num_blocks=num_blocks,
        clean=int(part.clean), compact_width=0, all_chosen=0, candidates=pointer(candidates, first),
        req_id=pointer(req_id, first), candidates_stride=candidates.strides[0], e5m2_queries=int(_is_e5m2(q8)),
    )  # fmt: skip
    work = Work(heads, _keys(kv_cache)._replace(candidates=True), tokens, 1, width)
    return [_launch(gpu, work, blocks_aligned(kv_cache, 16), q8, params)]


def _is_e5m2(array: Array) -> bool:
    return array.dtype == E5M2


def _keys(kv_cache: Array) -> Keys:
    return PAGED_MXFP4 if kv_cache.shape[2] == INDEXER_MXFP4.last_axis else PAGED_FP8


def require_known() -> None:
    """Check the kernel that the environment asks for, also where NumPy serves a call and no kernel is chosen.

    Raises:
        ValueError: no kernel has that name.
    """
    _require_name(asked_kernel())


def _require_name(asked: str | None) -> None:
    if asked and asked not in NAMES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(NAMES)}, got {asked!r}")


def choose(capability: int, aligned: bool, asked: str | None, alike: bool = True) -> str:
    """The name of the kernel that makes logits: the one that is asked for, else the fastest that can serve the call.

    Args:
        capability: as of `Gpu`.
        aligned: keys allow 16-byte loads.
        asked: what CUPY_MLA_INDEXER_KERNELS says.
        alike: queries and keys are multiplied as the same type, e4m3 or e5m2.

    Raises:
        ValueError: no kernel has that name, or it cannot serve this call.
    """
    hopper = capability == 90 and aligned and alike
    if not asked:
        return SM90 if hopper else PORTABLE
    _require_name(asked)
    if asked == SM90 and not hopper:
        raise ValueError(
            f"{VARIABLE} is {asked}, which cannot serve this call: compute capability {capability / 10}"
            + ("" if aligned else ", keys not aligned to 16 bytes")
            + ("" if alike else ", one of queries and keys is e5m2, the other e4m3")
        )
    return asked


def _by_sm90(gpu: Gpu, aligned: bool, alike: bool) -> bool:
    return choose(gpu.capability, aligned, asked_kernel(), alike) == SM90


def _launch(gpu: Gpu, work: Work, aligned: bool, q8: Array, params: Packed) -> Launch:
    """The launch of the kernel that `choose` names. `aligned`: keys allow 16-byte loads."""
    heads, keys, requests, queries, width, compact, _ = work
    if _by_sm90(gpu, aligned, keys.e5m2 == _is_e5m2(q8)):
        return logits_sm90.launch(gpu, work, params)
    padded = padded_heads(heads)
    few = keys.candidates or (keys.paged and aligned and queries * padded <= FEW_ROWS)
    rows = FEW_ROWS if few else TILE_ROWS
    tiles = requests * ceil_div(queries, rows // padded)
    ctas = min(CTAS_PER_SM * gpu.sms, tiles * max(ceil_div(width, UNIT), 1))
    return Launch(logits_kernel(padded, rows, keys, aligned, compact), (ctas, 1, 1), params)
