"""Launches the index kernels: `kernels_cu/indices/convert.cu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ..arrays import Array, Place
from ..recording import Params
from .jit import Kernel, num_sms
from .paging import BLOCK_TABLE, block_table_fields

THREADS = 256
MAX_ROWS = 8  # tokens a block
STAGES = (4096, 12000)  # widest block tables that fit the shared memory of a block, in entries; 48 KB is the limit
STAGE_FROM_ROWS = 3  # tokens a block from which copying the table row pays
BLOCKS_PER_SM = 6  # that run at a time

_PARAMS = Params("=" + BLOCK_TABLE + "7Q2q5i4x")  # struct Params of convert.cu


@cache
def convert_kernel(staged: int) -> Kernel:
    """The kernel that copies block table rows of at most `staged` entries to shared memory; 0: none."""
    return Kernel("indices/convert.cu", "convert", {"STAGED": staged, "MAX_TOKENS_PER_BLOCK": MAX_ROWS, "BLOCKS_PER_SM": BLOCKS_PER_SM}, threads=THREADS)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    for staged in (0, *STAGES):
        yield convert_kernel(staged)


def convert_req_index_to_global_index(
    place: Place,
    req_id: Array,
    block_table: Array,
    token_indices: Array,
    block_size: int,
    prefill_request_ids: Array | None,
    prefill_workspace_starts: Array | None,
    out: Array,
    valid_counts: Array | None,
    is_valid_token: Array | None = None,
) -> None:
    """Twin of `reference.indices.convert_req_index_to_global_index`; tokens that are not valid count 0."""
    tokens, k = token_indices.shape
    if tokens == 0:
        return
    rows = min(-(-tokens // (BLOCKS_PER_SM * num_sms(place.device))), MAX_ROWS)
    width = block_table.shape[1]
    staged = next((s for s in STAGES if width <= s), 0) if rows >= STAGE_FROM_ROWS else 0
    params = _PARAMS.pack(
        *block_table_fields(block_table, block_size),
        req_id.ptr, token_indices.ptr,
        prefill_request_ids.ptr if prefill_request_ids else 0,
        prefill_workspace_starts.ptr if prefill_workspace_starts else 0,
        out.ptr, valid_counts.ptr if valid_counts else 0, is_valid_token.ptr if is_valid_token else 0,
        token_indices.strides[0], out.strides[0],
        tokens, k, prefill_workspace_starts.shape[0] if prefill_workspace_starts else 0, rows,
        k % 4 == 0 and token_indices.aligned(16) and out.aligned(16),
    )  # fmt: skip
    convert_kernel(staged).launch(place, (-(-tokens // rows), 1, 1), params)
