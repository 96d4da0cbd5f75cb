"""Context parallelism: the rows of every request are distributed over ranks, and each rank attends over its own.

Token i of a request lies on rank `(i // interleave) % world_size`. A rank keeps its tokens in their order, numbered
from 0, in a cache of its own. `cupy_mla.integrations.distributed` exchanges data between ranks.

Source: the decode context parallelism of vLLM; the merge of partial results by lse is that of FlashAttention's splits.
"""

from __future__ import annotations

from .. import arrays
from ..bridges import bind
from ..calls.operation import operation
from ..checks.options import require_integer
from ..checks.values import check_lengths
from ..cuda import context_parallel as cuda
from ..dtypes import BFLOAT16, FLOAT32, INT32
from ..layouts import D_V
from ..reference import context_parallel as reference
from ..typing import A, AnyArray
from .topk import MAX_K

__all__ = ["globalize_topk", "local_seq_lens", "localize_topk", "merge_attention", "merge_topk"]

MAX_RANKS, MAX_INTERLEAVE = 1 << 10, 1 << 20  # their product fits int32


def _require_ranks(world_size: int, rank: int, interleave: int) -> tuple[int, int, int]:
    """Check how tokens are distributed over ranks."""
    world_size = require_integer("world_size", world_size, 1, MAX_RANKS)
    rank = require_integer("rank", rank, 0, world_size - 1, "below world_size")
    return world_size, rank, require_integer("interleave", interleave, 1, MAX_INTERLEAVE)


@operation
def local_seq_lens(seq_lens: A, world_size: int, rank: int, interleave: int = 1, *, out: A | None = None) -> A:
    """How many tokens of each request lie on a rank.

    Args:
        seq_lens: [R] int32 tokens of each request.
        world_size: number of ranks, 1 to 1024.
        rank: 0 to `world_size - 1`.
        interleave: consecutive tokens that lie on one rank, 1 to 2**20.
        out: [R] int32, written in place when given; may be `seq_lens` itself.

    Returns:
        [R] int32; 0 where a length is negative.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a negative length.

    Example:
        >>> lens = np.array([7, 2, 0], np.int32)
        >>> [cupy_mla.local_seq_lens(lens, 2, rank).tolist() for rank in range(2)]
        [[4, 1, 0], [3, 1, 0]]
        >>> [cupy_mla.local_seq_lens(lens, 2, rank, interleave=4).tolist() for rank in range(2)]
        [[4, 2, 0], [3, 0, 0]]
    """
    world_size, rank, interleave = _require_ranks(world_size, rank, interleave)
    place, (lens,) = bind(seq_lens=seq_lens)
    (out_,) = place.optional(out=out)
    (requests,) = lens.require(INT32, "R").shape
    out_ = place.output("out", out_, (requests,), INT32, may_be=lens)
    if arrays.CHECK_VALUES:
        check_lengths(lens)
    place.call(cuda.local_seq_lens, reference.local_seq_lens, lens, world_size, rank, interleave, out_)
    return out_.obj


@operation
def localize_topk(
    topk_indices: A,
    world_size: int,
    rank: int,
    interleave: int = 1,
    *,
    out: A | None = None,
    topk_length: A | None = None,
) -> tuple[A, A]:
    """The chosen positions of each query token that lie on a rank, as positions in the rank's own cache.

    Position i of rank `(i // interleave) % world_size` becomes
    `i // (interleave * world_size) * interleave + i % interleave`. The order of positions does not change.

    Args:
        topk_indices: [T, K] int32 positions in the token's request; negative entries are ignored.
        world_size, rank, interleave: as for `local_seq_lens`.
        out: [T, K] int32, written in place when given; may be `topk_indices` itself.
        topk_length: [T] int32, written in place when given.

    Returns:
        [T, K] int32 positions on the rank, -1 behind the last; and [T] int32 how many there are.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.

    Example:
        >>> positions = np.array([[0, 3, 4, 9], [5, 6, -1, -1]], np.int32)
        >>> local, length = cupy_mla.localize_topk(positions, world_size=2, rank=1)
        >>> local.tolist(), length.tolist()  # 3 and 9 are the rank's, its tokens 1 and 4; then 5, its token 2
        ([[1, 4, -1, -1], [2, -1, -1, -1]], [2, 1])
    """
    world_size, rank, interleave = _require_ranks(world_size, rank, interleave)
    place, (positions,) = bind(topk_indices=topk_indices)
    out_, length = place.optional(out=out, topk_length=topk_length)
    tokens, width = positions.require(INT32, "T", "K").shape
    out_ = place.output("out", out_, (tokens, width), INT32, may_be=positions)
    length = place.output("topk_length", length, (tokens,), INT32)
    place.call(cuda.localize_topk, reference.localize_topk, positions, world_size, rank, interleave, out_, length)
    return out_.obj, length.obj


@operation
def globalize_topk(
    logits: A,
    topk_indices: AnyArray,
    world_size: int,
    rank: int,
    interleave: int = 1,
    *,
    values: A | None = None,
    out: A | None = None,
) -> tuple[A, A]:
    """What a rank sends to `merge_topk`: the logits of its chosen keys, and their positions in the request.

    The rank's token i has position `(i // interleave * world_size + rank) * interleave + i % interleave`.

    Args:
        logits: [T, width] float32 logits of the rank's keys.
        topk_indices: [T, K] int32 keys that `topk_indices` chose; entries outside of 0 to `width - 1` are ignored.
        world_size, rank, interleave: as for `local_seq_lens`.
        values: [T, K] float32, written in place when given.
        out: [T, K] int32, written in place when given.

    Returns:
        [T, K] float32 logits and [T, K] int32 positions, which must fit int32; -inf and -1 for entries that are
        ignored.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.

    Example:
        >>> logits = np.array([[5, 8, 6]], np.float32)  # of tokens 1, 3 and 5 of a request
        >>> chosen = cupy_mla.topk_indices(logits, 2)
        >>> values, positions = cupy_mla.globalize_topk(logits, chosen, world_size=2, rank=1)
        >>> values.tolist(), positions.tolist()
        ([[8.0, 6.0]], [[3, 5]])
    """
    world_size, rank, interleave = _require_ranks(world_size, rank, interleave)
    place, (logits_, chosen) = bind(logits=logits, topk_indices=topk_indices)
    values_, out_ = place.optional(values=values, out=out)
    tokens, _ = logits_.require(FLOAT32, "T", "width").shape
    _, width = chosen.require(INT32, tokens, "K").shape
    values_ = place.output("values", values_, (tokens, width), FLOAT32)
    out_ = place.output("out", out_, (tokens, width), INT32)
    place.call(
        cuda.globalize_topk, reference.globalize_topk, logits_, chosen, world_size, rank, interleave, values_, out_
    )
    return values_.obj, out_.obj


@operation
def merge_topk(values: A, positions: AnyArray, k: int, *, out: A | None = None) -> A:
    """Choose each query token's k largest logits of all ranks, which are those that one rank with all keys would
    choose.

    Each rank sends the keys that it chose (`globalize_topk`). The choice is exact and deterministic: of equal logits
    those at lower positions are chosen (+0 and -0 are equal), and NaN is less than every number.

    Args:
        values: [N, T, K] float32 logits from N ranks, in any order; any strides with a contiguous last axis.
        positions: [N, T, K] int32 their positions in the request, each at most once; negative entries are ignored.
        k: 1 to 4096.
        out: [T, k] int32, written in place when given.

    Returns:
        [T, k] int32 positions, ascending; -1 behind the last if the ranks sent fewer than k.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.

    Example:
        >>> values = np.array([[[9, 3, 2]], [[7, 3, 0]]], np.float32)  # of 2 ranks, for 1 query token
        >>> positions = np.array([[[4, 8, 0]], [[1, 5, -1]]], np.int32)
        >>> cupy_mla.merge_topk(values, positions, 3).tolist()  # of the two 3, that at position 5
        [[1, 4, 5]]
    """
    k = require_integer("k", k, 1, MAX_K)
    place, (values_, positions_) = bind(values=values, positions=positions)
    (out_,) = place.optional(out=out)
    ranks, tokens, width = values_.require(FLOAT32, "N", "T", "K").shape
    positions_.require(INT32, ranks, tokens, width)
    out_ = place.output("out", out_, (tokens, k), INT32)
    place.call(cuda.merge_topk, reference.merge_topk, values_, positions_, k, out_)
    return out_.obj


@operation
def merge_attention(
    outs: A, lses: AnyArray, attn_sink: AnyArray | None = None, *, out: A | None = None, lse: A | None = None
) -> tuple[A, A]:
    """Merge the attention of each rank over its own rows into the attention over all rows::

        lse = log(sum_r exp(lse_r))
        out = sum_r exp(lse_r - lse) * out_r

    A rank whose lse is infinite, of either sign, had no valid row: it adds nothing, whatever its out holds. Ranks
    attend without a sink, which is applied here: it multiplies `out` by `1 / (1 + exp(sink - lse))`. Sums are made in
    float32, in the ranks' order.

    Args:
        outs: [N, T, h, 512] bfloat16 or float32 of N ranks; any strides with a contiguous last axis.
        lses: [N, T, h] float32, natural logarithms; any strides.
        attn_sink: [h] float32, natural-log units; -inf has no effect, +inf gives zero output.
        out: [T, h, 512] bfloat16, written in place when given.
        lse: [T, h] float32, written in place when given.

    Returns:
        out [T, h, 512] bfloat16 and lse [T, h] float32; 0 and +inf where no rank had a valid row.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.

    Example:
        >>> outs = np.zeros((2, 1, 1, 512), np.float32)  # 2 ranks, 1 query token, 1 head
        >>> outs[0], outs[1] = 4, 8
        >>> lses = np.log(np.array([3, 1], np.float32)).reshape(2, 1, 1)  # the first weighs three times as much
        >>> out, lse = cupy_mla.merge_attention(outs, lses)
        >>> float(out[0, 0, 0]), float(np.exp(lse[0, 0]).round(3))
        (5.0, 4.0)
    """
    place, (outs_, lses_) = bind(outs=outs, lses=lses)
    sink, out_, lse_ = place.optional(attn_sink=attn_sink, out=out, lse=lse)
    ranks, tokens, heads, _ = outs_.require((BFLOAT16, FLOAT32), "N", "T", "h", D_V).shape
    lses_.require(FLOAT32, ranks, tokens, heads, contiguous=False)
    if sink is not None:
        sink.require(FLOAT32, heads)
    out_ = place.output("out", out_, (tokens, heads, D_V), BFLOAT16)
    lse_ = place.output("lse", lse_, (tokens, heads), FLOAT32)
    place.call(cuda.merge_attention, reference.merge_attention, outs_, lses_, sink, out_, lse_)
    return out_.obj, lse_.obj
