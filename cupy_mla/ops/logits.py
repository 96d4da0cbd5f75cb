"""The lightning indexer's logits, by which the KV rows are chosen over which a query token attends.

For query token i with H index heads and key j, both of width 128, e4m3 or, of MXFP4, e5m2:

    logit[i, j] = ks[j] * sum_h relu(dot(q8[i, h], k8[j])) * w[i, h]

with one float32 scale `ks` a key. The scales of q are part of `w`, because relu commutes with a positive factor:

    w[i, h] = weights[i, h] * H**-0.5 * 128**-0.5 * q_scale[i, h]

A NaN in a query or a key makes the logits of that query or key NaN, and no others. Kernels sum in float32; on Hopper
`wgmma` adds the products of a dot product with fewer bits (1e-8 in all). The bits of a logit depend only on its
own query and key.

Source: DeepSeek-V3.2 (the indexer of DeepSeek Sparse Attention); the logits' contracts are DeepGEMM's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import arrays
from ..arguments import PagedKeys, QuantizeQ, RaggedKeys
from ..arrays import Array
from ..bridges import bind
from ..calls.operation import operation
from ..checks.options import require_bool, require_choice, require_integer, require_together
from ..checks.validate import INDEXER_ALIGNMENT, MULTIPLIED
from ..checks.values import check_contexts, check_ranges, check_rotations
from ..cuda import logits as cuda
from ..cuda import mxfp4 as cuda_mxfp4
from ..dtypes import BFLOAT16, E4M3, E5M2, FLOAT32, INT32, INT64, UINT8
from ..layouts import INDEXER_FP8, INDEXER_MXFP4
from ..reference import logits as reference
from ..reference import mxfp4 as reference_mxfp4
from ..typing import A, AnyArray, QueryScaleFormat
from .cache import SCALE_FORMATS
from .indexer import indexer_layout

__all__ = [
    "indexer_logits",
    "paged_indexer_logits",
    "paged_indexer_schedule",
    "quantize_indexer_q",
    "quantize_indexer_q_mxfp4",
    "widen_mxfp4",
]

D = INDEXER_FP8.d_qk
ROPE = 64
SCALES = INDEXER_MXFP4.num_scales
MXFP4 = "mxfp4"  # another value of `scale_format`
HEADS = tuple(range(8, 65, 8))
ALIGNMENT = 16  # bytes, of rows of q8 and k8
SCHEDULE_WORDS = 32  # int32 words of a share
MAX_SHARES = 1024


@operation
def quantize_indexer_q(
    q: A,
    weights: AnyArray,
    *,
    positions: AnyArray | None = None,
    cos_sin_cache: AnyArray | None = None,
    rope_first: bool = True,
    interleaved: bool = False,
    scale_format: QueryScaleFormat = "fp32",
) -> tuple[A, A]:
    """Quantize the indexer's queries, after a rotation if that is asked for, and multiply the heads' weights by the
    scales.

    Each head of a token has its own scale::

        scale = max(amax, 1e-10) / 448
        w     = weights * scale * (H * 128) ** -0.5

    With `positions`, 64 of the 128 values are rotated first (rotary embedding), and rounded to bfloat16: DeepSeek V3.2
    rotates the first 64, half-split; V4 the last 64, interleaved.

    Args:
        q: [T, H, 128] bfloat16, H a multiple of 8 up to 64; any strides with a contiguous last axis.
        weights: [T, H] float32 or bfloat16.
        positions: [T] int64 places of the tokens in their sequences. A token whose position has no row in
            `cos_sin_cache` is not rotated.
        cos_sin_cache: [P, 64] float32 or bfloat16: 32 cosines and 32 sines of a position; goes with `positions`.
        rope_first: rotate the first 64 values, else the last.
        interleaved: rotate values 2i and 2i + 1 by angle i, else i and i + 32.
        scale_format: "fp32"; "ue8m0": the scale is rounded up to a power of two; or "mxfp4": values are rounded to
            MXFP4, as by `quantize_indexer_q_mxfp4`, and converted to e5m2, as by `widen_mxfp4`.

    Returns:
        q8 [T, H, 128] float8_e4m3fn (uint8 in CuPy, which has no e4m3), of "mxfp4" float8_e5m2, and w [T, H] float32.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides.
        IndexError: under `cupy_mla.set_checks`: a position at or beyond P.

    Example:
        >>> q = np.full((1, 8, 128), 2, bfloat16)  # 1 token, 8 heads
        >>> q8, w = cupy_mla.quantize_indexer_q(q, np.ones((1, 8), np.float32))
        >>> float(q8[0, 0, 0])  # the largest e4m3 number
        448.0
        >>> round(float(w[0, 0] * q8[0, 0, 0].astype(float) * (8 * 128) ** 0.5), 3)  # scale * q8 is q
        2.0
    """
    require_choice("scale_format", scale_format, (*SCALE_FORMATS, MXFP4))
    rotation = _Rotation(positions, cos_sin_cache, rope_first, interleaved)
    q8, _, w = _quantize_q(q, weights, rotation, scale_format, packed=False)
    return q8, w


@operation
def quantize_indexer_q_mxfp4(
    q: A,
    weights: AnyArray,
    *,
    positions: AnyArray | None = None,
    cos_sin_cache: AnyArray | None = None,
    rope_first: bool = True,
    interleaved: bool = False,
) -> tuple[A, A, A]:
    """Quantize the indexer's queries to MXFP4, after a rotation if that is asked for: two e2m1 values a byte, the first
    in its low bits, and a power of two as scale for each group of 32.

    Engines store this format, and DeepGEMM takes it. The logits here take FP8: `widen_mxfp4` converts to e5m2, or
    `quantize_indexer_q` with `scale_format="mxfp4"` makes that at once.

    For a group of 32 values::

        exponent = ceil(log2(max(amax, 6 * 2**-126) / 6))
        code     = e2m1(x * 2**-exponent)

    where e2m1 is the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6; of two that are equally near it is the one with an even
    code. A group with an infinity has the exponent 127. A group with a NaN has the scale NaN, and codes of zero.

    Args:
        q, weights, positions, cos_sin_cache, rope_first, interleaved: as for `quantize_indexer_q`.

    Returns:
        q4 [T, H, 64] uint8, scales [T, H, 4] uint8 (UE8M0, `exponent + 127`), and w [T, H] float32, which is
        `weights * (H * 128) ** -0.5`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides.
        IndexError: under `cupy_mla.set_checks`: a position at or beyond P.

    Example:
        >>> q = np.full((1, 8, 128), 12, bfloat16)
        >>> q4, scales, w = cupy_mla.quantize_indexer_q_mxfp4(q, np.ones((1, 8), np.float32))
        >>> hex(q4[0, 0, 0]), int(scales[0, 0, 0])  # twice the largest number, whose code is 7
        ('0x77', 128)
    """
    rotation = _Rotation(positions, cos_sin_cache, rope_first, interleaved)
    return _quantize_q(q, weights, rotation, MXFP4, packed=True)


class _Rotation(NamedTuple):
    """The arguments of `quantize_indexer_q` about the rotation, unchecked."""

    positions: AnyArray | None
    cos_sin_cache: AnyArray | None
    rope_first: bool
    interleaved: bool


def _quantize_q(q: Any, weights: Any, rotation: _Rotation, scale_format: str, packed: bool) -> tuple[Any, Any, Any]:
    """Check the arguments and quantize: codes of e4m3, None, and weights; if `packed`, codes of e2m1, scales and
    weights."""
    require_bool("rope_first", rotation.rope_first)
    require_bool("interleaved", rotation.interleaved)
    require_together(positions=rotation.positions, cos_sin_cache=rotation.cos_sin_cache)
    place, (q_, weights_) = bind(q=q, weights=weights)
    positions, cos_sin = place.optional(positions=rotation.positions, cos_sin_cache=rotation.cos_sin_cache)
    tokens, heads, _ = q_.require(BFLOAT16, "T", HEADS, D).shape
    weights_.require((FLOAT32, BFLOAT16), tokens, heads)
    if positions is not None and cos_sin is not None:
        positions.require(INT64, tokens)
        cos_sin.require((FLOAT32, BFLOAT16), "P", ROPE)
        if arrays.CHECK_VALUES:
            check_rotations(positions, cos_sin.shape[0])
    if packed:
        codes = place.new("q4", (tokens, heads, D // 2), UINT8)
    else:
        codes = place.new("q8", (tokens, heads, D), E5M2 if scale_format == MXFP4 else E4M3)
    scales = place.new("scales", (tokens, heads, SCALES), UINT8) if packed else None
    w = place.new("w", (tokens, heads), FLOAT32)
    place.call(
        cuda.quantize_indexer_q, reference.quantize_indexer_q,
        QuantizeQ(
            q_, weights_, positions, cos_sin, rotation.rope_first, rotation.interleaved, scale_format, codes, w, scales
        ),
    )  # fmt: skip
    return codes.obj, None if scales is None else scales.obj, w.obj


@operation
def widen_mxfp4(codes: A, scales: AnyArray, weights: AnyArray | None = None) -> tuple[A, A]:
    """Convert queries or keys from MXFP4 to e5m2, which the logits take, with one factor a row, a power of two.

    GPUs below sm_100 cannot multiply e2m1. The four scales of a row become one: `factor` is the largest of them times
    2**-13. A value becomes `e2m1 * 2**(13 - below)` if its group's scale is `2**-below` times the largest. That is
    exact up to `below = 28`. Values of groups further below are truncated to multiples of 2**-29 times the largest
    scale, and a factor below 2**-126 becomes 0.

    Args:
        codes: [N, 64] or [T, H, 64] uint8, two values a byte, rows at multiples of 4 bytes.
        scales: [N, 4] or [T, H, 4] uint8, UE8M0.
        weights: [N] or [T, H] float32; factors are multiplied by these, for queries the heads' weights.

    Returns:
        values [N, 128] or [T, H, 128] float8_e5m2, and factors [N] or [T, H] float32: for queries `q8` and `w`, for
        keys `k8` and `ks`. A row with a scale of NaN has the factor NaN.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides.

    Example:
        >>> codes, scales = np.full((1, 64), 0x21, np.uint8), np.array([[127, 127, 126, 127]], np.uint8)
        >>> values, factors = cupy_mla.widen_mxfp4(codes, scales)
        >>> (values.astype(np.float32) * factors[:, None])[0, [0, 1, 64, 65]].tolist()  # the third group's are half
        [0.5, 1.0, 0.25, 0.5]
    """
    place, (codes_, scales_) = bind(codes=codes, scales=scales)
    (weights_,) = place.optional(weights=weights)
    rows = codes_.require(UINT8, *("N", "H")[: max(len(codes_.shape) - 1, 1)], D // 2).shape[:-1]
    if not codes_.aligned(INDEXER_ALIGNMENT):
        raise ValueError(
            f"codes: rows must start at multiples of {INDEXER_ALIGNMENT} bytes, got strides {list(codes_.strides)}"
        )
    scales_.require(UINT8, *rows, SCALES)
    if weights_ is not None:
        weights_.require(FLOAT32, *rows, contiguous=False)
    values, factors = place.new("values", (*rows, D), E5M2), place.new("factors", rows, FLOAT32)
    place.call(cuda_mxfp4.widen_mxfp4, reference_mxfp4.widen_mxfp4, codes_, scales_, weights_, values, factors)
    return values.obj, factors.obj


@operation
def indexer_logits(
    q8: A,
    k8: AnyArray,
    ks: AnyArray,
    w: AnyArray,
    starts: AnyArray,
    ends: AnyArray,
    *,
    clean: bool = True,
    compact_width: int | None = None,
    out: A | None = None,
) -> A:
    """Logits of query tokens over keys in rows, each token over a range of them.

    For query token i and key j of its range::

        logit[i, j] = ks[j] * sum_h relu(dot(q8[i, h], k8[j])) * w[i, h]

    A NaN in a query or a key makes the logits of that query or key NaN, and no others. A logit's bits depend on its
    own query and key alone.

    Args:
        q8: [M, H, 128] uint8 or float8_e4m3fn, H a multiple of 8 up to 64; rows at multiples of 16 bytes.
            float8_e5m2 if they were rounded to MXFP4, by `quantize_indexer_q` or `widen_mxfp4`; without infinities.
        k8: [N, 128] uint8 or float8_e4m3fn, rows at multiples of 16 bytes. float8_e5m2 if widened from MXFP4, as q8.
            A Hopper GPU is slower where one of q8 and k8 is e5m2, the other e4m3.
        ks: [N] float32 scales of the keys.
        w: [M, H] float32 weights of the heads, as `quantize_indexer_q` returns them.
        starts, ends: [M] int32; token i sees keys `max(starts[i], 0) <= j < min(ends[i], N)`.
        clean: write -inf for keys that a token does not see; else these entries are left as they are, or overwritten
            with -inf.
        compact_width: if it is given, a row of the result has so many entries and starts at the first key of its range:
            entry j of row i belongs to key `max(starts[i], 0) + j`. Keys of the range beyond that are left out.
        out: [M, N] float32, or [M, compact_width], written in place when given.

    Returns:
        [M, N] float32, or [M, compact_width].

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a range that starts below 0 or ends beyond N.

    Example:
        >>> q8 = np.ones((2, 8, 128), float8_e4m3fn)  # 2 query tokens, 8 heads
        >>> k8 = np.repeat(np.array([[1], [-1], [2]], float8_e4m3fn), 128, axis=1)  # 3 keys
        >>> ks, w = np.full(3, 0.5, np.float32), np.ones((2, 8), np.float32)
        >>> starts, ends = np.array([0, 0], np.int32), np.array([2, 3], np.int32)  # the first token sees 2 keys
        >>> cupy_mla.indexer_logits(q8, k8, ks, w, starts, ends).tolist()
        [[512.0, 0.0, -inf], [512.0, 0.0, 1024.0]]
        >>> starts = np.array([1, 2], np.int32)
        >>> cupy_mla.indexer_logits(q8, k8, ks, w, starts, ends, compact_width=2).tolist()  # from keys 1 and 2 on
        [[0.0, -inf], [1024.0, -inf]]
    """
    require_bool("clean", clean)
    if compact_width is not None:
        compact_width = require_integer("compact_width", compact_width, 0)
    place, given = bind(q8=q8, k8=k8, ks=ks, w=w, starts=starts, ends=ends)
    (out_,) = place.optional(out=out)
    of = RaggedKeys(*given)
    queries, keys = require_ragged(of)
    out_ = place.output("out", out_, (queries, keys if compact_width is None else compact_width), FLOAT32)
    place.call(cuda.indexer_logits, reference.indexer_logits, of, clean, compact_width is not None, out_)
    return out_.obj


@operation
def paged_indexer_logits(
    q8: A,
    kv_cache: AnyArray,
    w: AnyArray,
    context_lens: AnyArray,
    block_table: AnyArray,
    max_context_len: int,
    *,
    clean: bool = True,
    schedule: AnyArray | None = None,
    out: A | None = None,
) -> A:
    """Logits of each request's query tokens over its keys in the paged cache, as `indexer_logits` defines them.

    A key whose block does not exist (beyond the block table's width, negative, or beyond the cache) is not read; its
    logit is -inf.

    Args:
        q8: [B, n, H, 128] uint8 or float8_e4m3fn, H a multiple of 8 up to 64; rows at multiples of 16 bytes.
            float8_e5m2 if they were rounded to MXFP4, as for `indexer_logits`.
        kv_cache: [num_blocks, block_size, (1,) 132] uint8 or float8_e4m3fn in layout INDEXER_FP8, or [..., 68] in
            layout INDEXER_MXFP4. A Hopper GPU is slower over MXFP4 keys with e4m3 queries, and over FP8 keys with e5m2.
        w: [B * n, H] float32 weights of the heads, as `quantize_indexer_q` returns them.
        context_lens: [B] int32, and token j of n sees the first `context_lens[b] - n + j + 1` keys; or [B, n] int32,
            the number of keys that each token sees, not one row expanded to B.
        block_table: [B, width] int32 blocks of each request.
        max_context_len: width of the result; keys beyond it are ignored.
        clean: write -inf for keys that a token does not see; else these entries are left as they are, or overwritten
            with -inf.
        schedule: from `paged_indexer_schedule`, for the same lengths, block table, `max_context_len` and block size. It
            makes a call faster. With a schedule for something else logits are wrong or missing.
        out: [B * n, max_context_len] float32, written in place when given.

    Returns:
        [B * n, max_context_len] float32.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a context length below 0 or beyond `max_context_len`, a block table
            too narrow for one, or a block of a context that does not exist.

    Example:
        >>> cache = np.zeros((2, 64, 132), np.uint8)
        >>> keys = np.repeat(np.array([[1], [-1], [2]], bfloat16), 128, axis=1)
        >>> cupy_mla.indexer_k_quant_and_cache(keys, cache, np.array([64, 65, 66]))  # block 1
        >>> q8, w = np.ones((1, 1, 8, 128), float8_e4m3fn), np.ones((1, 8), np.float32)
        >>> lens, table = np.array([3], np.int32), np.array([[1]], np.int32)
        >>> logits = cupy_mla.paged_indexer_logits(q8, cache, w, lens, table, max_context_len=4)
        >>> logits.round().tolist()
        [[1024.0, 0.0, 2048.0, -inf]]
    """
    max_context_len = require_integer("max_context_len", max_context_len, 0)
    require_bool("clean", clean)
    place, (q8_, cache, w_, lens, table) = bind(
        q8=q8, kv_cache=kv_cache, w=w, context_lens=context_lens, block_table=block_table
    )
    schedule_, out_ = place.optional(schedule=schedule, out=out)
    of = PagedKeys(q8_, cache, w_, lens, table, schedule_)
    queries = require_paged(of, max_context_len)
    out_ = place.output("out", out_, (queries, max_context_len), FLOAT32)
    place.call(cuda.paged_indexer_logits, reference.paged_indexer_logits, of, clean, out_)
    return out_.obj


@operation
def paged_indexer_schedule(
    context_lens: A,
    block_table: AnyArray,
    max_context_len: int,
    block_size: int,
    shares: int,
    *,
    out: A | None = None,
) -> A:
    """Divide the keys of a paged cache into shares, once a step, for the logits of all its layers.

    Without a schedule each call of `paged_indexer_logits` and `select_rows_paged` first reads the lengths. With one, a
    call on a Hopper GPU has a CTA for each share, which copies its first keys at once. The logits' bits are the same. A
    schedule changes nothing on other GPUs, for requests of more than 4 query tokens (up to 32 heads: 8), and for block
    sizes that are no multiple of 64.

    Up to 288 shares are equal, as far as units of 64 keys allow. Of more shares, the first third has 92 % of the units,
    the second 5.5 %, the last the rest. The CTAs of the last two thirds begin when others have ended, so that all SMs
    end at about the same time.

    A call reads its schedule while earlier launches still run. So nothing but this function may write it. If it is made
    in a CUDA graph, each replay makes it anew from the lengths of that replay.

    Args:
        context_lens: [B] or [B, n] int32 keys that a request's query tokens see.
        block_table: [B, width] int32 blocks of each request.
        max_context_len: keys beyond it are ignored.
        block_size: tokens a block.
        shares: 1 to 1024; usually as many as the GPU has SMs. For requests of one query token (up to 32 heads: two),
            two shares an SM are 1 % faster with more than 6400 keys an SM, and six shares, of which four begin late,
            are another 1 % faster with more than 38400. With fewer keys more shares are slower.
        out: [shares, 32] int32, written in place when given.

    Returns:
        [shares, 32] int32. A share has, in units of 64 keys: the request in which it begins, its first unit there, the
        number of its units, and the numbers of keys of that request and of the next one. Then come the blocks in which
        the first 27 units of these two requests begin, -1 where there is none.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.

    Example:
        >>> lens, table = np.array([100, 300], np.int32), np.array([[7, 8, 0, 0, 0], [4, 5, 6, 1, 2]], np.int32)
        >>> schedule = cupy_mla.paged_indexer_schedule(lens, table, 320, block_size=64, shares=2)
        >>> schedule[:, :9].tolist()  # from unit 0 of request 0 three units, then from unit 1 of request 1 four
        [[0, 0, 3, 100, 300, 7, 8, 4, 5], [1, 1, 4, 300, 0, 5, 6, 1, 2]]
    """
    max_context_len = require_integer("max_context_len", max_context_len, 0)
    block_size = require_integer("block_size", block_size, 1)
    shares = require_integer("shares", shares, 1, MAX_SHARES)
    place, (lens, table) = bind(context_lens=context_lens, block_table=block_table)
    (out_,) = place.optional(out=out)
    table.require(INT32, _require_lens(lens, "B", "n"), "width")
    out_ = place.output("out", out_, (shares, SCHEDULE_WORDS), INT32)
    place.call(
        cuda.paged_indexer_schedule, reference.paged_indexer_schedule, lens, table, max_context_len, block_size, out_
    )
    return out_.obj


def require_ragged(of: RaggedKeys) -> tuple[int, int]:
    """Check the arrays of logits over ranges of rows; returns the numbers of queries and keys."""
    cuda.require_known()
    queries, heads, _ = require_rows(of.q8.require(MULTIPLIED, "M", HEADS, D)).shape
    keys, _ = require_rows(of.k8.require(MULTIPLIED, "N", D)).shape
    of.ks.require(FLOAT32, keys)
    of.w.require(FLOAT32, queries, heads)
    of.starts.require(INT32, queries)
    of.ends.require(INT32, queries)
    if arrays.CHECK_VALUES:
        check_ranges(of.starts, of.ends, keys)
    return queries, keys


def _require_lens(lens: Array, requests: int | str, n: int | str) -> int:
    """Check context lengths, of requests or of each of their tokens; returns the number of requests."""
    requests = lens.require(INT32, *(requests, n)[: max(len(lens.shape), 1)]).shape[0]
    if len(lens.shape) == 2 and requests > 1 and lens.strides[0] == 0:  # to kernels that means one length a request
        raise ValueError(f"context_lens: requests share one row in memory, strides {list(lens.strides)}: pass a copy")
    return requests


def require_paged(of: PagedKeys, max_context_len: int) -> int:
    """Check the arrays of logits over a paged cache; returns the number of queries."""
    cuda.require_known()
    requests, n, heads, _ = require_rows(of.q8.require(MULTIPLIED, "B", "n", HEADS, D)).shape
    indexer_layout(of.cache)
    of.w.require(FLOAT32, requests * n, heads)
    _require_lens(of.lens, requests, n)
    of.table.require(INT32, requests, "width")
    if of.schedule is not None and of.schedule.require(INT32, "shares", SCHEDULE_WORDS).shape[0] == 0:
        raise ValueError("schedule: expected a share at least, got none")
    if arrays.CHECK_VALUES:
        check_contexts(of.lens, max_context_len, of.table, of.cache)
    return requests * n


def require_rows(rows: Array) -> Array:
    """Check that rows of queries or keys allow 16-byte loads; returns itself."""
    if not rows.aligned(ALIGNMENT):
        raise ValueError(
            f"{rows.name}: rows must start at multiples of {ALIGNMENT} bytes, got strides {list(rows.strides)}"
        )
    return rows
