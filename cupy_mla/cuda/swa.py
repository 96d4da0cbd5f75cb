"""Launches the index kernels of the sliding window: `swa_decode.cu`, `gather_lens.cu` and `combine_swa.cu` of
`kernels_cu/indices`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ..arrays import Array, Place
from ..recording import Params
from .jit import Kernel
from .paging import BLOCK_TABLE, QUERIES, block_table_fields, query_fields

THREADS = 256
LENS_THREADS = 128

_DECODE = Params("=" + BLOCK_TABLE + QUERIES + "4Qqi4x")  # struct Params of swa_decode.cu
_LENS = Params("=" + QUERIES + "Q2i")  # struct Params of gather_lens.cu
_COMBINE = Params("=" + QUERIES + "4Q2q6i")  # struct Params of combine_swa.cu


@cache
def decode_kernel() -> Kernel:
    """The kernel that lists decode tokens' windows."""
    return Kernel("indices/swa_decode.cu", "swa_decode", {"TOKENS_PER_BLOCK": THREADS // 32}, threads=THREADS)


@cache
def lens_kernel() -> Kernel:
    """The kernel that counts the tokens prefills' windows reach."""
    return Kernel("indices/gather_lens.cu", "gather_lens", {"REQUESTS_PER_BLOCK": LENS_THREADS}, threads=LENS_THREADS)


@cache
def combine_kernel() -> Kernel:
    """The kernel that lists prefill tokens' compressed rows and windows."""
    return Kernel("indices/combine_swa.cu", "combine_swa", {}, threads=THREADS)


def kernels() -> Iterator[Kernel]:
    """Every kernel variant of this module, for the compile tests and for warming up."""
    yield decode_kernel()
    yield lens_kernel()
    yield combine_kernel()


def compute_swa_indices_and_lens(
    place: Place,
    query_start_loc: Array,
    seq_lens: Array,
    token_to_req: Array,
    is_valid_token: Array,
    block_table: Array,
    block_size: int,
    window_size: int,
    out: Array,
    lens: Array,
) -> None:
    """Twin of `reference.swa.compute_swa_indices_and_lens`."""
    tokens = token_to_req.shape[0]
    if tokens == 0:
        return
    params = _DECODE.pack(
        *block_table_fields(block_table, block_size), *query_fields(query_start_loc, seq_lens, tokens),
        token_to_req.ptr, is_valid_token.ptr, out.ptr, lens.ptr, out.strides[0], window_size,
    )  # fmt: skip
    decode_kernel().launch(place, (-(-tokens // (THREADS // 32)), 1, 1), params)


def compute_prefill_gather_lens(
    place: Place, seq_lens: Array, query_start_loc: Array, num_decodes: int, window_size: int, out: Array
) -> None:
    """Twin of `reference.swa.compute_prefill_gather_lens`."""
    prefills = out.shape[0]
    if prefills == 0:
        return
    params = _LENS.pack(*query_fields(query_start_loc, seq_lens, 0), out.ptr, num_decodes, window_size)
    lens_kernel().launch(place, (-(-prefills // LENS_THREADS), 1, 1), params)


def combine_topk_swa_indices(
    place: Place,
    topk_indices: Array,
    query_start_loc: Array,
    seq_lens: Array,
    gather_lens: Array,
    window_size: int,
    compress_ratio: int,
    topk: int,
    rows: int,
    compressed_rows: int,
    out: Array,
    lens: Array,
) -> None:
    """Twin of `reference.swa.combine_topk_swa_indices`."""
    tokens, width = out.shape
    if tokens == 0:
        return
    params = _COMBINE.pack(
        *query_fields(query_start_loc, seq_lens, tokens),
        topk_indices.ptr, gather_lens.ptr, out.ptr, lens.ptr, topk_indices.strides[0], out.strides[0],
        window_size, compress_ratio, topk, rows, compressed_rows, width,
    )  # fmt: skip
    combine_kernel().launch(place, (tokens, 1, 1), params)
