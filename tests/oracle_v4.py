"""DeepSeek V4's index operations as plain loops, written from the specification's table alone."""

from __future__ import annotations

import numpy as np

from .oracle_indices import INT32_MAX, slot


def position(query_start_loc: np.ndarray, seq_lens: np.ndarray, request: int, token: int) -> int:
    """Place in its sequence of a token of a request: the query is the sequence's end."""
    start, end = int(query_start_loc[request]), int(query_start_loc[request + 1])
    return int(seq_lens[request]) - (end - start) + (token - start)


def request_of(query_start_loc: np.ndarray, token: int) -> int | None:
    for r in range(len(query_start_loc) - 1):
        if query_start_loc[r] <= token < query_start_loc[r + 1]:
            return r
    return None


def window_of(p: int, window: int, visible: tuple[int, int], floor: int, seq_len: int, most: int) -> range:
    """Positions that a token at position p sees of those that have rows, `most` of them: spec/8, 8.7.

    `visible`: how many positions of the token's image stand before and behind it.
    """
    left, right = visible
    start = max(p - (window - 1) - max(left - (window - 1), 0), 0, floor)
    return range(start, max(start, min(p + right + 1, seq_len)))[:most]


def swa_indices_and_lens(
    query_start_loc, seq_lens, token_to_req, is_valid, block_table, block_size, window,
    replay_start=None, left=None, right=None, max_image_tokens=0,
):  # fmt: skip
    tokens, width = len(token_to_req), window + max_image_tokens
    out, lens = np.full((tokens, width), -1, np.int32), np.zeros(tokens, np.int32)
    for t in range(tokens):
        r = int(token_to_req[t])
        if not is_valid[t] or not 0 <= r < len(seq_lens):
            continue
        p = position(query_start_loc, seq_lens, r, t)
        if not 0 <= p <= INT32_MAX:
            continue
        visible = (0, 0) if left is None else (int(left[t]), int(right[t]))
        first = 0 if replay_start is None else int(replay_start[r])
        attended = window_of(p, window, visible, first, int(seq_lens[r]), width)
        out[t, : len(attended)] = [slot(block_table, r, i, block_size) for i in attended]
        lens[t] = len(attended)
    return out, lens


def prefill_gather_lens(seq_lens, query_start_loc, num_decodes, window, replay_start=None):
    lens = []
    for r in range(num_decodes, len(seq_lens)):
        query_len = int(query_start_loc[r + 1]) - int(query_start_loc[r])
        prefix = int(seq_lens[r]) - query_len - (0 if replay_start is None else int(replay_start[r]))
        lens.append(query_len + min(max(prefix, 0), window - 1))
    return np.array(lens, np.int32)


def combined_indices(
    topk_indices, query_start_loc, seq_lens, gather_lens, window, ratio, topk, M, N,
    left=None, right=None, max_image_tokens=0,
):  # fmt: skip
    tokens = len(topk_indices)
    width = topk + window + max_image_tokens
    while width % 128:
        width += 1
    out, lens = np.full((tokens, width), -1, np.int32), np.zeros(tokens, np.int32)
    rebased = query_start_loc - query_start_loc[0]
    for t in range(tokens):
        r = request_of(rebased, t)
        if r is None:
            continue
        p = position(rebased, seq_lens, r, t)
        n = min((p + 1) // ratio, topk) if ratio else 0
        visible = (0, 0) if left is None else (int(left[t]), int(right[t]))
        gather_start = int(seq_lens[r]) - int(gather_lens[r])
        seen = window_of(p, window, visible, gather_start, int(seq_lens[r]), window + max_image_tokens)
        row = [M * r + int(i) if 0 <= i < N else -1 for i in topk_indices[t, :n]]
        for i in seen:
            gathered = i - gather_start
            row.append(M * r + N + gathered if gathered < M - N else -1)
        out[t, : len(row)] = row
        lens[t] = len(row)
    return out, lens


def compressed_slot_mapping(
    num_tokens, query_start_loc, seq_lens, block_table, block_size, ratio, size, slot_mapping=None, ranks=(1, 0, 1)
):
    """`ranks`: how many share the rows out, this one's number, and how many neighbouring rows a rank has."""
    world, rank, interleave = ranks
    out = np.full(size, -1, np.int64)
    for t in range(num_tokens):
        r = request_of(query_start_loc, t)
        if r is None:
            continue
        p = position(query_start_loc, seq_lens, r, t)
        row = p // ratio
        if row // interleave % world != rank or (slot_mapping is not None and slot_mapping[t] < 0):
            continue
        virtual_block, in_block = divmod(row, block_size * world)
        column, offset = virtual_block, in_block // (world * interleave) * interleave + in_block % interleave
        if (p + 1) % ratio == 0 and column < block_table.shape[1] and block_table[r, column] >= 0:
            out[t] = int(block_table[r, column]) * block_size + offset
    return out


def c128a_lists(positions, ratio, num_decode_tokens, token_to_req, block_table, block_size, slot_mapping, widths, most):
    """(decode slots, decode lengths, prefill rows) for buffers of the two widths."""
    tokens = len(positions)
    decode = np.full((num_decode_tokens, widths[0]), -1, np.int32)
    lens = np.zeros(num_decode_tokens, np.int32)
    prefill = np.full((tokens - num_decode_tokens, widths[1]), -1, np.int32)
    for t in range(tokens):
        n = max(min((int(positions[t]) + 1) // ratio, most), 0)
        if t >= num_decode_tokens:
            prefill[t - num_decode_tokens, :n] = range(n)
        elif slot_mapping[t] >= 0:
            decode[t, :n] = [slot(block_table, int(token_to_req[t]), i, block_size) for i in range(n)]
            lens[t] = n
    return decode, lens, prefill
