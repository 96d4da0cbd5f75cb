"""Launchers of the sliding window's index kernels: `swa_decode.cu`, `gather_lens.cu`, `combine_swa.cu` of
`kernels_cu/indices`."""

from __future__ import annotations

from collections.abc import Iterator

from ..arguments import CombinedLists, SwaWindows
from ..arrays import Array
from . import structs
from .driver import Gpu
from .kernel import Kernel
from .paging import block_table, ceil_div, pointer, queries
from .program import Launch, Program
from .structs import INT32, INT64, POINTER, Struct

SWA_DECODE = Struct(
    "SwaDecodeParams", table=structs.BLOCK_TABLE, queries=structs.QUERIES, token_to_req=POINTER, is_valid=POINTER,
    replay_start=POINTER, left=POINTER, right=POINTER, out=POINTER, lens=POINTER, out_stride=INT64, window=INT32,
    width=INT32,
)  # fmt: skip
GATHER_LENS = Struct(
    "GatherLensParams", queries=structs.QUERIES, replay_start=POINTER, out=POINTER, num_decodes=INT32, window=INT32
)
COMBINE_SWA = Struct(
    "CombineSwaParams", queries=structs.QUERIES, chosen=POINTER, gather_lens=POINTER, left=POINTER, right=POINTER,
    out=POINTER, lens=POINTER, chosen_stride=INT64, out_stride=INT64, window=INT32, most=INT32, ratio=INT32, topk=INT32,
    rows=INT32, compressed_rows=INT32, width=INT32,
)  # fmt: skip

DECODE_TOKENS_PER_BLOCK = 8
LENS_REQUESTS_PER_BLOCK = 128

# Lists the windows of decode tokens.
DECODE_KERNEL = Kernel("indices/swa_decode.cu", SWA_DECODE, {"TOKENS_PER_BLOCK": DECODE_TOKENS_PER_BLOCK})
# Counts the tokens that the windows of prefills reach.
LENS_KERNEL = Kernel("indices/gather_lens.cu", GATHER_LENS, {"REQUESTS_PER_BLOCK": LENS_REQUESTS_PER_BLOCK})
# Lists compressed rows and windows of prefill tokens, with a CTA for each token.
COMBINE_KERNEL = Kernel("indices/combine_swa.cu", COMBINE_SWA, {})


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield from (DECODE_KERNEL, LENS_KERNEL, COMBINE_KERNEL)


def compute_swa_indices_and_lens(gpu: Gpu, a: SwaWindows) -> Program:
    """Twin of `reference.swa.compute_swa_indices_and_lens`."""
    (tokens,) = a.token_to_req.shape
    if tokens == 0:
        return ()
    params = SWA_DECODE(
        table=block_table(a.block_table, a.block_size), queries=queries(a.query_start_loc, a.seq_lens, tokens),
        token_to_req=a.token_to_req.ptr, is_valid=a.is_valid_token.ptr, replay_start=pointer(a.replay_start),
        left=pointer(a.left_visible), right=pointer(a.right_visible), out=a.out.ptr, lens=a.lens.ptr,
        out_stride=a.out.strides[0], window=a.window_size, width=a.out.shape[1],
    )  # fmt: skip
    return [Launch(DECODE_KERNEL, (ceil_div(tokens, DECODE_TOKENS_PER_BLOCK), 1, 1), params)]


def compute_prefill_gather_lens(
    gpu: Gpu,
    seq_lens: Array,
    query_start_loc: Array,
    num_decodes: int,
    window_size: int,
    replay_start: Array | None,
    out: Array,
) -> Program:
    """Twin of `reference.swa.compute_prefill_gather_lens`."""
    (prefills,) = out.shape
    if prefills == 0:
        return ()
    params = GATHER_LENS(
        queries=queries(query_start_loc, seq_lens, 0), replay_start=pointer(replay_start), out=out.ptr,
        num_decodes=num_decodes, window=window_size,
    )  # fmt: skip
    return [Launch(LENS_KERNEL, (ceil_div(prefills, LENS_REQUESTS_PER_BLOCK), 1, 1), params)]


def combine_topk_swa_indices(gpu: Gpu, a: CombinedLists) -> Program:
    """Twin of `reference.swa.combine_topk_swa_indices`."""
    tokens, width = a.out.shape
    if tokens == 0:
        return ()
    params = COMBINE_SWA(
        queries=queries(a.query_start_loc, a.seq_lens, tokens), chosen=a.topk_indices.ptr,
        gather_lens=a.gather_lens.ptr, left=pointer(a.left_visible), right=pointer(a.right_visible), out=a.out.ptr,
        lens=a.lens.ptr, chosen_stride=a.topk_indices.strides[0], out_stride=a.out.strides[0], window=a.window_size,
        most=a.most, ratio=a.compress_ratio, topk=a.topk, rows=a.rows, compressed_rows=a.compressed_rows, width=width,
    )  # fmt: skip
    return [Launch(COMBINE_KERNEL, (tokens, 1, 1), params)]
