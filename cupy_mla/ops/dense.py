"""Dense attention of a decode: `dense_decode`, over all rows of each request in a paged cache.

Source: DeepSeek-V3 (Multi-head Latent Attention with absorbed weights); which rows a query sees is FlashMLA's contract.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from ..arguments import DenseDecode
from ..arrays import Array
from ..bridges import Place, bind
from ..calls.operation import operation
from ..checks.options import require_bool, require_integer, require_scale
from ..checks.values import check_blocks, check_lengths
from ..cuda import driver
from ..cuda.attention import dense as cuda
from ..cuda.attention.choose import asked
from ..cuda.attention.divide import MAX_SPLITS
from ..cuda.attention.problem import DenseProblem
from ..cuda.program import Plan
from ..dtypes import FLOAT32, INT32
from ..layouts import D_V, DENSE_LAYOUTS, Layout
from ..reference import dense as reference
from ..typing import A, AnyArray, CallScale, DenseLayout
from .attention import NO_DOOR, Door
from .scales import scale_of_q, scale_of_rows

__all__ = ["dense_decode"]


@operation
def dense_decode(
    q: A,
    k_cache: AnyArray,
    block_table: AnyArray,
    seq_lens: AnyArray,
    sm_scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
    attn_sink: AnyArray | None = None,
    out: A | None = None,
    lse: A | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    q_scale: CallScale | None = None,
    k_scale: CallScale | None = None,
    layout: DenseLayout | None = None,
) -> tuple[A, A]:
    """Attention of query tokens over all rows of their requests in a paged KV cache, split-KV.

    The cache holds rows in layout V32_FP8, V4_FP8, V32_NOPE_FP8, V41_FP8, V41_FP8_SPLIT, PLAIN_FP8, V32_NVFP4,
    V4_NVFP4, bf16 or fp16.

    Query i of a request's s_q sees rows 0 to n_i - 1 of the request; with `window` only the last `window` of these::

        n_i = seq_len - s_q + 1 + i    if causal: the s_q queries are the request's last tokens
        n_i = seq_len                  otherwise

    For each query token and head, over the rows j that it sees, row_j being the cache's row as numbers
    (`float(e4m3) * scale`, bf16 values as they are), and q times `q_scale` where it is e4m3::

        logit[j] = sm_scale * dot(q, row_j)
        lse      = log(sum_j exp(logit[j]))
        out      = sum_j exp(logit[j] - lse) * row_j[:512]

    - Row j of a request is row `j % block_size` of block `block_table[request, j // block_size]`.
    - Rows beyond the block table (j >= width * block_size), and rows of a block that the cache has not (negative, or
      num_blocks and more), are never read and contribute nothing.
    - With a sink s the head's out is multiplied by `1 / (1 + exp(s - lse))`, as if the softmax had one more row
      of logit s and value 0. The sink does not change lse.
    - A query that sees no row (n_i <= 0) has out 0 and lse +inf, whatever the sink.
    - NaN and infinity in rows that a query sees reach its results. They may reach those of the request's other queries,
      which share its rows, but no other request's; those in rows that no query of the request sees reach none.

    Lengths are read only on the device: a captured CUDA graph uses those that are in `seq_lens` when it is replayed.
    Each call divides its rows over the GPU by itself. The layers of a step can share the division: see
    `get_mla_metadata`. Products are summed in float32; weights are rounded to 16 bits before they meet the values.

    Args:
        q: [b, s_q, h_q, d_qk] bfloat16, h_q 1 to 128; s_q > 1 serves speculative decoding. Over PLAIN_FP8 rows it may
            be float8_e4m3fn (or uint8 of the same bytes), over float16 rows it is float16.
        k_cache: [num_blocks, block_size, (1,) 656 | 584 | 528 | 384 | 352] uint8 or float8_e4m3fn, or [..., 576 | 512]
            bfloat16, or float8_e4m3fn or uint8 (PLAIN_FP8), or float16. Rows of 528 and 384 bytes need `layout`.
            The block stride may exceed the block; for FP8 rows it must be a multiple of 16 bytes.
        block_table: [b, width] int32 blocks of each request.
        seq_lens: [b] int32 rows of each request, those of its s_q query tokens included.
        sm_scale: factor on the dot products before the softmax, the model's: see `sparse_prefill`.
        causal: whether a query sees no row behind its own.
        window: rows that a query sees at most, at least 1; None: all.
        attn_sink: [h_q] float32, natural-log units.
        out: [b, s_q, h_q, 512] bfloat16, over float16 rows float16, written in place when given.
        lse: [b, h_q, s_q] float32, written in place when given.
        num_splits: splits of each request's rows, 1 to 1024, whose partial results are merged by lse; default: chosen
            from shapes, on a GPU also from lengths.
        batch_invariant: choose kernel and splits by heads, layout and a request's own length alone, so that the bits of
            a request do not depend on what else is in the batch.
        q_scale: of an e4m3 q: a positive number, or [1] or [] float32 on the device; default 1.
        k_scale: the same of PLAIN_FP8 rows.
        layout: the name of the cache's layout, as of `empty_cache`; default: told by `k_cache`.

    Returns:
        out [b, s_q, h_q, 512] bfloat16 (or float16) and lse [b, h_q, s_q] float32 (natural logarithm).

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a length below 0 or beyond the block table, or a block that a query
            sees rows of and the cache has not.
        RuntimeError: CUDA arrays, and CuPy, a driver or NVRTC is missing.

    Example:
        >>> cache = np.zeros((4, 64, 576), bfloat16)  # 4 blocks of 64 rows
        >>> cache[2] = 1
        >>> cache[3] = 2
        >>> q = np.zeros((1, 1, 16, 576), bfloat16)  # 1 request, 1 query token, 16 heads, for which rows weigh the same
        >>> table, lens = np.array([[2, 3]], np.int32), np.array([128], np.int32)
        >>> out, lse = cupy_mla.dense_decode(q, cache, table, lens, sm_scale=192**-0.5)
        >>> out.shape, float(out[0, 0, 0, 0])  # the mean of both blocks
        ((1, 1, 16, 512), 1.5)
        >>> lse.shape, round(float(lse[0, 0, 0]), 4)  # log 128
        ((1, 16, 1), 4.852)
        >>> out, lse = cupy_mla.dense_decode(q, cache, table, lens, sm_scale=192**-0.5, window=32)
        >>> float(out[0, 0, 0, 0])
        2.0
    """
    scale = require_scale("sm_scale", sm_scale)
    given = Given(q, k_cache, block_table, seq_lens, attn_sink, out, lse, q_scale, k_scale)
    return decode(given, scale, causal, window, num_splits, batch_invariant, Door(layout=layout))


@operation
def planned_dense_decode(
    q: A, k_cache: AnyArray, block_table: AnyArray, seq_lens: AnyArray, sm_scale: float, plan: Plan, **others: Any
) -> tuple[A, A]:
    """`dense_decode` for the layers of a step, called by the backends. Calls with the same plan divide their rows in
    the same way.

    Args:
        others: `layout`, as for `dense_decode`, and arrays and `k_scale` under their names in `Given`.
    """
    scale = require_scale("sm_scale", sm_scale)
    door = Door(layout=others.pop("layout", None))
    return decode(Given(q, k_cache, block_table, seq_lens, **others), scale, plan=plan, door=door)


class Given(NamedTuple):
    """The arrays of a dense decode as a front door gets them."""

    q: Any
    k_cache: Any
    block_table: Any
    seq_lens: Any
    attn_sink: Any = None
    out: Any = None
    lse: Any = None
    q_scale: Any = None
    k_scale: Any = None


def decode(
    given: Given,
    scale: float | None,
    causal: bool = True,
    window: int | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    door: Door = NO_DOOR,
    plan: Plan | None = None,
) -> tuple[Any, Any]:
    """The body of `dense_decode`, for the front doors, too.

    Args:
        scale: `sm_scale`, checked; None: FlashMLA's default, `d_qk ** -0.5`.
        plan: calls with the same lengths of requests may share it.
    """
    q, k_cache, block_table, seq_lens, attn_sink, out, lse, q_scale, k_scale = given
    place, (q_, cache, table, lens) = bind(
        **{"q": q, "k_cache": k_cache, "block_table": block_table, door.name("seq_lens"): seq_lens}
    )
    sink, out_, lse_ = place.optional(attn_sink=attn_sink, out=out, lse=lse)
    layout, (b, s_q, h_q) = door.check_cache(cache, q_, DENSE_LAYOUTS)
    table.require(INT32, b, "width")
    lens.require(INT32, b)
    if sink is not None:
        sink.require(FLOAT32, h_q)
    q_scale = scale_of_q(place, q_, q_scale, door.name("q_scale"))
    k_scale = scale_of_rows(place, layout, k_scale, door.name("k_scale"))
    causal = require_bool("causal", causal)
    window = 0 if window is None else require_integer("window", window, 1)
    batch_invariant = require_bool("batch_invariant", batch_invariant)
    if num_splits is not None:
        num_splits = require_integer("num_splits", num_splits, 1, MAX_SPLITS)
    if arrays.CHECK_VALUES:
        _check_rows(table, lens, cache, window, s_q if causal else 1)
    out_ = place.output("out", out_, (b, s_q, h_q, D_V), layout.values)
    lse_ = place.output("lse", lse_, (b, h_q, s_q), FLOAT32)
    scale = layout.d_qk**-0.5 if scale is None else scale
    arguments = DenseDecode(
        layout, q_, cache, table, lens, scale, q_scale, k_scale, causal, window, sink, num_splits, out_, lse_,
        batch_invariant, plan,
    )  # fmt: skip
    place.call(cuda.dense_decode, reference.dense_decode, arguments)
    return out_.obj, lse_.obj


def faster_than_lists(place: Place, layout: Layout, shape: tuple[int, int, int], width: int, block_size: int) -> bool:
    """Whether decodes over all rows should take less time as `dense_decode` than with index lists of all rows.

    On a GPU their times say so, or that the portable kernel serves both; it is False if a kernel or a division is
    forced. On the CPU it is True.

    Args:
        place: where the arrays are.
        layout: of the cache.
        shape: requests, query tokens of each, and heads.
        width, block_size: blocks that a request may have, and rows of a block.
    """
    if not place.on_gpu:
        return True
    requests, tokens, heads = shape
    rows = width * block_size
    problem = DenseProblem(driver.gpu(place.device), layout, heads, tokens, requests, rows, rows, block_size)
    return asked() == ("", "") and cuda.faster_than_lists(problem)


def _check_rows(table: Array, lens: Array, cache: Array, window: int, tokens: int) -> None:
    """Check that the cache has every row that the queries of a request see. The first of its `tokens` queries sees
    `tokens` - 1 rows fewer than the last."""
    end = check_lengths(lens)
    first = np.maximum(end - (tokens - 1) - window, 0) if window else np.zeros_like(end)
    check_blocks(table, first, end, cache, lens.name)
