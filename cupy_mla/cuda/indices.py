"""Launches the index conversion: `kernels_cu/indices/convert.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ..arrays import Array
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import block_table, ceil_div, pointer
from .program import Launch, Program

MAX_TOKENS_PER_BLOCK = 8
STAGES = (4096, 12000)  # widest block tables that fit the shared memory of a CTA, in entries; 48 KB is the limit
STAGE_FROM_TOKENS = 3  # tokens a CTA from which copying the table row pays
BLOCKS_PER_SM = 6  # that run at a time


@cache
def convert_kernel(staged: int) -> Kernel:
    """The kernel that copies block table rows of at most `staged` entries to shared memory; 0: none."""
    defines = {"STAGED": staged, "MAX_TOKENS_PER_BLOCK": MAX_TOKENS_PER_BLOCK, "BLOCKS_PER_SM": BLOCKS_PER_SM}
    return Kernel("indices/convert.cu", structs.CONVERT, defines)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for staged in (0, *STAGES):
        yield convert_kernel(staged)


def convert_req_index_to_global_index(
    gpu: Gpu,
    req_id: Array,
    table: Array,
    token_indices: Array,
    block_size: int,
    prefill_request_ids: Array | None,
    prefill_workspace_starts: Array | None,
    out: Array,
    valid_counts: Array | None,
    ends: Array | None = None,
    is_valid_token: Array | None = None,
) -> Program:
    """Twin of `reference.indices.convert_req_index_to_global_index`; tokens that are not valid count 0."""
    tokens, k = token_indices.shape
    if tokens == 0:
        return ()
    tokens_per_block = min(ceil_div(tokens, BLOCKS_PER_SM * gpu.sms), MAX_TOKENS_PER_BLOCK)
    width = table.shape[1]
    staged = next((s for s in STAGES if width <= s), 0) if tokens_per_block >= STAGE_FROM_TOKENS else 0
    aligned = k % 4 == 0 and token_indices.aligned(16) and out.aligned(16)
    params = structs.CONVERT(
        table=block_table(table, block_size), req_id=req_id.ptr, positions=token_indices.ptr,
        prefill_ids=pointer(prefill_request_ids), prefill_starts=pointer(prefill_workspace_starts), out=out.ptr,
        counts=pointer(valid_counts), ends=pointer(ends), is_valid=pointer(is_valid_token),
        positions_stride=token_indices.strides[0], out_stride=out.strides[0], num_tokens=tokens, k=k,
        num_prefills=prefill_workspace_starts.shape[0] if prefill_workspace_starts else 0, rows=tokens_per_block,
        aligned=int(aligned),
    )  # fmt: skip
    return [Launch(convert_kernel(staged), (ceil_div(tokens, tokens_per_block), 1, 1), params)]
