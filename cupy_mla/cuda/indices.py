"""Launchers of the index conversions: `convert.cu` and `slots.cu` of `kernels_cu/indices`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

from ..arguments import Conversion
from ..arrays import Array
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import block_table, ceil_div, integers, pointer
from .program import Launch, Program
from .structs import INT32, INT64, POINTER, Struct

CONVERT = Struct(
    "ConvertParams", table=structs.BLOCK_TABLE, req_id=POINTER, positions=POINTER, prefill_ids=POINTER,
    prefill_starts=POINTER, out=POINTER, counts=POINTER, ends=POINTER, is_valid=POINTER, positions_stride=INT64,
    out_stride=INT64, num_tokens=INT32, k=INT32, num_prefills=INT32, rows=INT32, aligned=INT32, most=POINTER,
)  # fmt: skip
SLOTS = Struct(
    "SlotsParams", table=structs.BLOCK_TABLE, positions=structs.INTEGERS, request_ids=POINTER, out=POINTER,
    positions_stride=INT64, out_stride=INT64, total=INT64, k=INT64,
)  # fmt: skip

MAX_TOKENS_PER_BLOCK = 8
STAGES = (4096, 12000)  # entries of block table rows for which a CTA has shared memory, of which there are 48 KB
STAGE_FROM_TOKENS = 3  # with so many tokens a CTA it pays to copy the table row
BLOCKS_PER_SM = 6  # CTAs that run at a time
POSITIONS_PER_BLOCK = 256


@cache
def convert_kernel(staged: int, to_front: bool) -> Kernel:
    """The kernel that copies block table rows of at most `staged` entries to shared memory; 0: it copies none.

    `to_front`: it moves each row's slots to the front. Else they keep their places.
    """
    defines = {
        "STAGED": staged, "MAX_TOKENS_PER_BLOCK": MAX_TOKENS_PER_BLOCK, "BLOCKS_PER_SM": BLOCKS_PER_SM,
        "TO_FRONT": int(to_front),
    }  # fmt: skip
    return Kernel("indices/convert.cu", CONVERT, defines)


SLOTS_KERNEL = Kernel("indices/slots.cu", SLOTS, {"POSITIONS_PER_BLOCK": POSITIONS_PER_BLOCK})


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for staged in (0, *STAGES):
        for to_front in (False, True):
            yield convert_kernel(staged, to_front)
    yield SLOTS_KERNEL


def tokens_of_block(gpu: Gpu, tokens: int) -> int:
    """The tokens of a CTA where so many are converted."""
    return min(ceil_div(tokens, BLOCKS_PER_SM * gpu.sms), MAX_TOKENS_PER_BLOCK)


def convert_req_index_to_global_index(gpu: Gpu, a: Conversion) -> Program:
    """Twin of `reference.indices.convert_req_index_to_global_index`."""
    table, positions, starts, out = a.block_table, a.token_indices, a.prefill_workspace_starts, a.out
    tokens, k = positions.shape
    if tokens == 0:
        return ()
    tokens_per_block = tokens_of_block(gpu, tokens)
    width = table.shape[1]
    staged = next((s for s in STAGES if width <= s), 0) if tokens_per_block >= STAGE_FROM_TOKENS else 0
    aligned = k % 4 == 0 and positions.aligned(16) and out.aligned(16)
    params = CONVERT(
        table=block_table(table, a.block_size, block_stride=a.block_stride_rows), req_id=a.req_id.ptr,
        positions=positions.ptr, prefill_ids=pointer(a.prefill_request_ids), prefill_starts=pointer(starts),
        out=out.ptr, counts=pointer(a.valid_counts), ends=pointer(a.ends), is_valid=pointer(a.is_valid_token),
        positions_stride=positions.strides[0], out_stride=out.strides[0], num_tokens=tokens, k=k,
        num_prefills=starts.shape[0] if starts else 0, rows=tokens_per_block, aligned=int(aligned),
        most=pointer(a.most),
    )  # fmt: skip
    return [Launch(convert_kernel(staged, a.to_front), (ceil_div(tokens, tokens_per_block), 1, 1), params)]


def slots_of(
    gpu: Gpu, table: Array, positions: Array, block_size: int, request_ids: Array | None, out: Array
) -> Program:
    """Twin of `reference.indices.slots_of`."""
    total = math.prod(positions.shape)
    if total == 0:
        return ()
    params = SLOTS(
        table=block_table(table, block_size), positions=integers(positions), request_ids=pointer(request_ids),
        out=out.ptr, positions_stride=positions.strides[0], out_stride=out.strides[0], total=total,
        k=total // positions.shape[0],
    )  # fmt: skip
    return [Launch(SLOTS_KERNEL, (ceil_div(total, POSITIONS_PER_BLOCK), 1, 1), params)]
