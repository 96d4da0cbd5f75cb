"""Operations on the index lists of DeepSeek V4's and V4.1's sliding-window attention, with and without compressed rows.

A query token at position p of its sequence attends over the last `window` positions up to p. In a decode their rows are
in the sliding-window cache, so lists have slots. In a prefill their rows are gathered into a workspace, behind
compressed rows of the sequence, so lists have rows of the workspace.

Two things change the positions of a window:

- Tokens of an image see one another in both directions. `left_visible` and `right_visible` say for each query token how
  many positions of its image stand before it and behind it, 0 for tokens of text. A token sees positions from
  `p - (window - 1) - max(left - (window - 1), 0)` on, and `right` positions behind p, up to the end of the sequence.
- A sequence whose prefix was cached without rows of the window has none before position `replay_start`.

The query tokens of a request are the last ones of its sequence. So `query_start_loc` and `seq_lens` give the position
of each token.

Source: DeepSeek-V4 and V4.1; the contracts are those of vLLM's backends.
"""

from __future__ import annotations

from typing import Any

from .. import arrays
from ..arguments import CombinedLists, SwaWindows
from ..arrays import Array
from ..bridges import Place, bind
from ..calls.operation import operation
from ..checks.options import LARGEST_INT, require_integer, require_together
from ..checks.values import check_images, check_lengths, check_offsets, check_requests
from ..cuda import swa as cuda
from ..dtypes import BOOL, INT32
from ..reference import swa as reference
from ..typing import A, AnyArray

__all__ = ["combine_topk_swa_indices", "compute_prefill_gather_lens", "compute_swa_indices_and_lens"]

LIST_ALIGN = 128  # entries: the width of combined lists is a multiple


@operation
def compute_swa_indices_and_lens(
    query_start_loc: AnyArray,
    seq_lens: AnyArray,
    token_to_req: A,
    is_valid_token: AnyArray,
    block_table: AnyArray,
    block_size: int,
    window_size: int,
    *,
    replay_start: AnyArray | None = None,
    left_visible: AnyArray | None = None,
    right_visible: AnyArray | None = None,
    max_image_tokens: int = 0,
    out: A | None = None,
    lens: AnyArray | None = None,
) -> tuple[A, A]:
    """Slots of the sliding window of each decode token: those of positions `max(p - window_size + 1, 0) .. p`, in
    order.

    An entry is -1 where the position has no block, or its slot would not fit int32. With `replay_start` and visible
    tokens of images the window is of positions
    `max(p - (window_size - 1) - max(left - (window_size - 1), 0), 0, replay_start) .. min(p + right, seq_len - 1)`.

    Args:
        query_start_loc: [R + 1] int32 first token of each request.
        seq_lens: [R] int32 tokens of each sequence, those of this step included.
        token_to_req: [T] int32 request of each token.
        is_valid_token: [T] bool; a token that is not valid, or whose request does not exist, gets no entries.
        block_table: [R, M] int32 blocks of each request in the sliding-window cache.
        block_size: tokens a block.
        window_size: tokens of the window.
        replay_start: [R] int32 first position of each sequence of which the cache has a row; None: 0.
        left_visible, right_visible: [T] int32 positions of each token's image before it and behind it; both or none.
        max_image_tokens: tokens of the largest image. The width of lists is W = `window_size + max_image_tokens`;
            positions of a window beyond W are left out.
        out: [T, W] int32, written in place when given.
        lens: [T] int32, written in place when given.

    Returns:
        [T, W] int32 slots, -1 behind each token's window, and [T] int32 lengths of the windows: `min(p + 1,
        window_size)` for a token of text whose sequence has all rows.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: `query_start_loc` goes down, a length or a number of visible positions
            is negative, an image is larger than the largest, or a valid token names a request that does not exist.

    Example:
        >>> starts, lengths = np.array([0, 1], np.int32), np.array([18], np.int32)  # a decode at position 17
        >>> request, valid = np.array([0], np.int32), np.array([True])
        >>> block_table = np.array([[3, 7]], np.int32)
        >>> slots, lens = cupy_mla.compute_swa_indices_and_lens(starts, lengths, request, valid, block_table, 16, 4)
        >>> slots.tolist(), lens.tolist()  # positions 14 to 17
        ([[62, 63, 112, 113]], [4])
    """
    block_size = require_integer("block_size", block_size, 1)
    window_size = require_integer("window_size", window_size, 1)
    place, (starts, seq, req, valid, table) = bind(
        query_start_loc=query_start_loc, seq_lens=seq_lens, token_to_req=token_to_req, is_valid_token=is_valid_token,
        block_table=block_table,
    )  # fmt: skip
    replay, out_, lens_ = place.optional(replay_start=replay_start, out=out, lens=lens)
    requests = table.require(INT32, "R", "M").shape[0]
    seq.require(INT32, requests)
    starts.require(INT32, requests + 1)
    tokens = req.require(INT32, "T").shape[0]
    valid.require(BOOL, tokens)
    if replay is not None:
        replay.require(INT32, requests)
    width = window_width(window_size, max_image_tokens)
    left, right = _visible(place, tokens, left_visible, right_visible, max_image_tokens)
    out_ = place.output("out", out_, (tokens, width), INT32)
    lens_ = place.output("lens", lens_, (tokens,), INT32)
    if arrays.CHECK_VALUES:
        check_offsets(starts)
        check_lengths(seq)
        check_requests(req, requests, valid)
    place.call(
        cuda.compute_swa_indices_and_lens, reference.compute_swa_indices_and_lens,
        SwaWindows(starts, seq, req, valid, table, block_size, window_size, replay, left, right, out_, lens_),
    )  # fmt: skip
    return out_.obj, lens_.obj


@operation
def compute_prefill_gather_lens(
    seq_lens: A,
    query_start_loc: AnyArray,
    num_decodes: int,
    window_size: int,
    *,
    replay_start: AnyArray | None = None,
    out: A | None = None,
) -> A:
    """How many tokens at the end of each prefill's sequence are in the windows of its query tokens.

    That is `query_len + min(max(seq_len - query_len - replay_start, 0), window_size - 1)`: the query tokens, and the
    tokens before them in the window of the first one.

    Args:
        seq_lens: [R] int32; the first `num_decodes` requests are decodes.
        query_start_loc: [R + 1] int32.
        num_decodes: requests to leave out at the start.
        window_size: tokens of the window.
        replay_start: [R] int32 first position of each sequence of which the cache has a row; None: 0.
        out: [R - num_decodes] int32, written in place when given.

    Returns:
        [R - num_decodes] int32.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: `query_start_loc` goes down or a length is negative.

    Example:
        >>> lengths, starts = np.array([100, 9], np.int32), np.array([0, 10, 19], np.int32)  # 10 and 9 query tokens
        >>> cupy_mla.compute_prefill_gather_lens(lengths, starts, num_decodes=0, window_size=64).tolist()
        [73, 9]
    """
    window_size = require_integer("window_size", window_size, 1)
    place, (seq, starts) = bind(seq_lens=seq_lens, query_start_loc=query_start_loc)
    replay, out_ = place.optional(replay_start=replay_start, out=out)
    requests = seq.require(INT32, "R").shape[0]
    starts.require(INT32, requests + 1)
    if replay is not None:
        replay.require(INT32, requests)
    num_decodes = require_integer("num_decodes", num_decodes, 0, requests, "the requests there are")
    out_ = place.output("out", out_, (requests - num_decodes,), INT32)
    if arrays.CHECK_VALUES:
        check_offsets(starts)
        check_lengths(seq)
    place.call(
        cuda.compute_prefill_gather_lens, reference.compute_prefill_gather_lens,
        seq, starts, num_decodes, window_size, replay, out_,
    )  # fmt: skip
    return out_.obj


def window_width(window_size: int, max_image_tokens: int = 0) -> int:
    """The width of the lists of `compute_swa_indices_and_lens`: positions that a window may have."""
    return window_size + require_integer("max_image_tokens", max_image_tokens, 0)


def combined_width(topk: int, window_size: int, max_image_tokens: int = 0) -> int:
    """The width of the lists of `combine_topk_swa_indices`."""
    return -(-(topk + window_width(window_size, max_image_tokens)) // LIST_ALIGN) * LIST_ALIGN


def _visible(
    place: Place, tokens: int, left_visible: Any, right_visible: Any, most: int
) -> tuple[Array | None, Array | None]:
    """Check `left_visible` and `right_visible` of images of at most so many tokens; both are None without images."""
    require_together(left_visible=left_visible, right_visible=right_visible)
    left, right = place.optional(left_visible=left_visible, right_visible=right_visible)
    if left is not None and right is not None:
        left.require(INT32, tokens)
        right.require(INT32, tokens)
        if arrays.CHECK_VALUES:
            check_images(left, right, most)
    return left, right


@operation
def combine_topk_swa_indices(
    topk_indices: A,
    query_start_loc: AnyArray,
    seq_lens: AnyArray,
    gather_lens: AnyArray,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    *,
    left_visible: AnyArray | None = None,
    right_visible: AnyArray | None = None,
    max_image_tokens: int = 0,
    out: A | None = None,
    lens: AnyArray | None = None,
) -> tuple[A, A]:
    """Index lists of a chunk of R prefills over their gathered workspace [R, M, 512], taken as R * M flat rows.

    Rows 0 .. N - 1 of a request hold its compressed rows, rows from N on the last `gather_lens[r]` tokens of its
    sequence. The list of a token at position p of request r is `n = min((p + 1) // compress_ratio, topk)` compressed
    rows (none for a compress ratio of 0), `topk_indices[t, :n] + M * r`, then the w rows of its window that were
    gathered, `M * r + N + (first .. last) - (seq_len - gather_len)`, then -1. A chosen row that is none of 0 .. N - 1
    becomes -1 and keeps its place, as does a position that the workspace has no row for. The window is of positions
    `max(p - (window_size - 1) - max(left - (window_size - 1), 0), 0, seq_len - gather_len) .. min(p + right,
    seq_len - 1)`, with the visible tokens of images `left` and `right`.

    Args:
        topk_indices: [T, K] int32 compressed positions of each token's request, K >= topk.
        query_start_loc: [R + 1] int32 first token of each request, counted from the first one's.
        seq_lens: [R] int32.
        gather_lens: [R] int32, from `compute_prefill_gather_lens`.
        window_size: tokens of the window.
        compress_ratio: tokens that a compressed row stands for; 0: a token attends over its window alone.
        topk: compressed rows over which a token attends at most; 0 in layers without them.
        M: workspace rows a request.
        N: workspace rows that are kept for compressed rows.
        left_visible, right_visible: [T] int32 positions of each token's image before it and behind it; both or none.
        max_image_tokens: tokens of the largest image, as of `compute_swa_indices_and_lens`.
        out: [T, W] int32 with W = topk + window_size + max_image_tokens rounded up to a multiple of 128, written in
            place when given.
        lens: [T] int32, written in place when given.

    Returns:
        [T, W] int32 rows, and [T] int32 lengths n + w; length 0 for a token that belongs to no request.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides, or the workspace has more
            than 2**31 - 1 rows; nothing is written.
        IndexError: under `cupy_mla.set_checks`: `query_start_loc` goes down, a length or a number of visible positions
            is negative, or an image is larger than the largest.

    Example:
        >>> chosen = np.array([[1, 0]], np.int32)  # compressed rows of a token at position 9
        >>> starts, lengths, gathered = np.array([0, 1], np.int32), np.array([10], np.int32), np.array([3], np.int32)
        >>> rows, lens = cupy_mla.combine_topk_swa_indices(chosen, starts, lengths, gathered, 3, 4, 2, M=8, N=2)
        >>> rows[0, :6].tolist(), lens.tolist()  # the compressed rows, then the window from row N on
        ([1, 0, 2, 3, 4, -1], [5])
    """
    window_size = require_integer("window_size", window_size, 1)
    compress_ratio = require_integer("compress_ratio", compress_ratio, 0)
    topk, N = require_integer("topk", topk, 0), require_integer("N", N, 0)
    M = require_integer("M", M, N)
    place, (chosen, starts, seq, gather) = bind(
        topk_indices=topk_indices, query_start_loc=query_start_loc, seq_lens=seq_lens, gather_lens=gather_lens
    )
    out_, lens_ = place.optional(out=out, lens=lens)
    tokens, k = chosen.require(INT32, "T", "K").shape
    if k < topk:
        raise ValueError(f"topk_indices: expected at least topk = {topk} columns, got {k}")
    requests = seq.require(INT32, "R").shape[0]
    starts.require(INT32, requests + 1)
    gather.require(INT32, requests)
    if requests * M > LARGEST_INT:
        raise ValueError(f"M: {requests} requests of {M} workspace rows are more than int32 can count")
    width = combined_width(topk, window_size, max_image_tokens)
    left, right = _visible(place, tokens, left_visible, right_visible, max_image_tokens)
    out_ = place.output("out", out_, (tokens, width), INT32)
    lens_ = place.output("lens", lens_, (tokens,), INT32)
    if arrays.CHECK_VALUES:
        check_offsets(starts)
        check_lengths(seq)
        check_lengths(gather)
    place.call(
        cuda.combine_topk_swa_indices, reference.combine_topk_swa_indices,
        CombinedLists(
            chosen, starts, seq, gather, window_size, compress_ratio, topk, M, N, left, right,
            window_width(window_size, max_image_tokens), out_, lens_,
        ),
    )  # fmt: skip
    return out_.obj, lens_.obj
