"""Operations that prepare rows for the attention kernels: gathers from a paged cache, and concatenation of queries."""

from __future__ import annotations

import numpy as np

from .. import arrays
from ..bridges import bind
from ..calls.operation import operation
from ..checks.options import require_integer
from ..checks.validate import cache_layout, require_cache
from ..checks.values import check_blocks, check_lengths, check_workspace
from ..cuda import gather as cuda
from ..dtypes import BFLOAT16, INT32
from ..layouts import BF16_576, INDEXER_LAYOUTS, QUANTIZED_OF_V4, QUANTIZED_OF_V32
from ..reference import gather as reference
from ..typing import AnyArray, CallScale, PagedLayout
from .scales import scale_of_rows

__all__ = ["concat_mla_q", "cp_gather_and_upconvert_fp8_kv_cache", "dequantize_and_gather_k_cache"]

# The operation that gathers each layout, for messages.
GATHERERS = {
    **dict.fromkeys(QUANTIZED_OF_V32, "cp_gather_and_upconvert_fp8_kv_cache"),
    **dict.fromkeys(QUANTIZED_OF_V4, "dequantize_and_gather_k_cache"),
    **dict.fromkeys(INDEXER_LAYOUTS, "cp_gather_indexer_k_quant_cache"),
}  # fmt: skip


@operation
def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: AnyArray,
    dst: AnyArray,
    block_table: AnyArray,
    seq_lens: AnyArray,
    workspace_starts: AnyArray,
    *,
    k_scale: CallScale | None = None,
    layout: PagedLayout | None = None,
) -> None:
    """Copy requests out of a paged FP8 or NVFP4 cache of V3.2's kind into consecutive rows, dequantized to bfloat16.

    The first `seq_lens[r]` tokens of request r go to `dst[workspace_starts[r]]` and the rows after it.

    Args:
        src_cache: [num_blocks, block_size, (1,) 656 | 576 | 512 | 528 | 352] uint8 or float8_e4m3fn.
        dst: [S, 576] bfloat16, or [S, 512] for rows of 512 values; written in place. A request that starts outside of
            it is left out, rows beyond it are not written, and rows of tokens whose block does not exist become zeros.
        block_table: [R, M] int32 blocks of each request.
        seq_lens: [R] int32.
        workspace_starts: [R] int32; the requests' rows must not overlap.
        k_scale: of PLAIN_FP8, as of `concat_and_cache_mla`.
        layout: its name, as of `empty_cache`; default: told by `src_cache`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError, ValueError: under `cupy_mla.set_checks`: a request's rows lie outside `dst`, a length is
            negative, the block table is too narrow for a length, or a block of a sequence does not exist; the rows of
            two requests overlap.

    Example:
        >>> cache = np.zeros((3, 16, 656), np.uint8)
        >>> kv_c, k_pe = np.ones((2, 512), bfloat16), np.zeros((2, 64), bfloat16)
        >>> cupy_mla.concat_and_cache_mla(kv_c, k_pe, cache, np.array([32, 33]))  # block 2
        >>> rows = np.zeros((5, 576), bfloat16)
        >>> block_table, lengths = np.array([[2]], np.int32), np.array([2], np.int32)
        >>> cupy_mla.cp_gather_and_upconvert_fp8_kv_cache(cache, rows, block_table, lengths, np.array([1], np.int32))
        >>> rows[:, 0].astype(int).tolist()  # from row 1 on
        [0, 1, 1, 0, 0]
    """
    place, (cache, dst_, table, lens, starts) = bind(
        src_cache=src_cache, dst=dst, block_table=block_table, seq_lens=seq_lens, workspace_starts=workspace_starts
    )
    told = cache_layout(cache, QUANTIZED_OF_V32, GATHERERS, asked=layout)
    require_cache(cache, told)
    dst_.require(BFLOAT16, "S", told.d_qk).require_writable()
    requests = table.require(INT32, "R", "M").shape[0]
    lens.require(INT32, requests)
    starts.require(INT32, requests)
    scale = scale_of_rows(place, told, k_scale)
    if arrays.CHECK_VALUES:
        counts = check_lengths(lens)
        check_workspace(starts, counts, dst_.shape[0])
        check_blocks(table, np.zeros_like(counts), counts, cache)
    place.call(
        cuda.cp_gather_and_upconvert_fp8_kv_cache, reference.cp_gather_and_upconvert_fp8_kv_cache,
        told, cache, dst_, table, lens, starts, scale,
    )  # fmt: skip


@operation
def dequantize_and_gather_k_cache(
    out: AnyArray,
    k_cache: AnyArray,
    seq_lens: AnyArray,
    gather_lens: AnyArray | None,
    block_table: AnyArray,
    block_size: int,
    offset: int,
    *,
    layout: PagedLayout | None = None,
) -> None:
    """Copy the last tokens of requests out of a paged FP8 or FP4 cache of V4's kind, dequantized to bfloat16.

    The last `gather_lens[r]` of request r's `seq_lens[r]` tokens go to `out[r, offset]` and the rows after it.

    Args:
        out: [R, M, 512] bfloat16, written in place. Tokens beyond its M rows are not written, and rows of tokens whose
            block does not exist become zeros.
        k_cache: [num_blocks, block_size, (1,) 584 | 528 | 384 | 288] uint8 or float8_e4m3fn, block stride a multiple of
            16 bytes.
        seq_lens: [R] int32.
        gather_lens: [R] int32. A value above the sequence's length means the whole sequence; None: all whole.
        block_table: [R, M'] int32 blocks of each request.
        block_size: tokens a block of `k_cache`.
        offset: first row to write, 0 to M.
        layout: its name, as of `empty_cache`; default: told by `k_cache`, but for V41_FP8 and V41_FP4, which must be
            named.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: tokens lie beyond the rows of `out`, a length is negative,
            the block table is too narrow for a sequence, or a block of a gathered token does not exist.

    Example:
        >>> cache = np.zeros((3, 16, 584), np.uint8)
        >>> k = np.repeat(np.arange(1, 5), 512).reshape(4, 512).astype(bfloat16)  # token t holds t + 1
        >>> cupy_mla.quantize_and_insert_k_cache(k, cache, np.arange(32, 36))  # block 2
        >>> rows, lengths = np.zeros((1, 5, 512), bfloat16), np.array([4], np.int32)
        >>> last_two, block_table = np.array([2], np.int32), np.array([[2]], np.int32)
        >>> cupy_mla.dequantize_and_gather_k_cache(rows, cache, lengths, last_two, block_table, 16, 1)
        >>> rows[0, :, 0].astype(int).tolist()  # from row 1 on
        [0, 3, 4, 0, 0]
    """
    place, (out_, cache, lens, table) = bind(out=out, k_cache=k_cache, seq_lens=seq_lens, block_table=block_table)
    (gather,) = place.optional(gather_lens=gather_lens)
    told = cache_layout(cache, QUANTIZED_OF_V4, GATHERERS, asked=layout)
    require_cache(cache, told)
    block_size = require_integer("block_size", block_size, 1)
    if block_size != cache.shape[1]:
        raise ValueError(f"block_size: k_cache has {cache.shape[1]} tokens a block, got {block_size}")
    requests = table.require(INT32, "R", "M").shape[0]
    rows = out_.require(BFLOAT16, requests, "M", told.d_qk).require_writable().shape[1]
    lens.require(INT32, requests)
    if gather is not None:
        gather.require(INT32, requests)
    offset = require_integer("offset", offset, 0, rows, "the rows of out")
    if arrays.CHECK_VALUES:
        ends = check_lengths(lens)
        counts = ends if gather is None else np.minimum(check_lengths(gather), ends)
        for r in np.flatnonzero(counts > rows - offset):
            raise IndexError(
                f"gather_lens: {counts[r]} tokens of request {r} are asked for, out has room for {rows - offset}"
            )
        check_blocks(table, ends - counts, ends, cache)
    place.call(
        cuda.dequantize_and_gather_k_cache, reference.dequantize_and_gather_k_cache,
        told, out_, cache, lens, gather, table, offset,
    )  # fmt: skip


@operation
def concat_mla_q(ql_nope: AnyArray, q_pe: AnyArray, out: AnyArray) -> None:
    """Put the two parts of every query head side by side: the absorbed query and its RoPE part.

    Args:
        ql_nope: [T, h, 512] bfloat16, any strides with a contiguous last axis; from `absorb_q`.
        q_pe: [T, h, 64] bfloat16, any strides with a contiguous last axis.
        out: [T, h, 576] bfloat16, written in place.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.

    Example:
        >>> out = np.zeros((2, 16, 576), bfloat16)
        >>> cupy_mla.concat_mla_q(np.ones((2, 16, 512), bfloat16), np.zeros((2, 16, 64), bfloat16), out)
        >>> int(out[0, 0].sum(dtype=np.float32))
        512
    """
    place, (nope, rope, out_) = bind(ql_nope=ql_nope, q_pe=q_pe, out=out)
    tokens, heads, _ = nope.require(BFLOAT16, "T", "h", BF16_576.d_nope).shape
    rope.require(BFLOAT16, tokens, heads, BF16_576.d_rope)
    out_.require(BFLOAT16, tokens, heads, BF16_576.d_qk).require_writable()
    place.call(cuda.concat_mla_q, reference.concat_mla_q, nope, rope, out_)
