"""Index operations against plain loops, over every kind of array."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla.cuda.paging import divisor
from cupy_mla.ops.indices import (
    convert_req_index_to_global_index,
    convert_to_front,
    convert_to_slots_and_ends,
    slots_of,
)
from tests import oracle_indices
from tests.kinds import gapped
from tests.lists import hostile


def case(rng: np.random.Generator, tokens: int, k: int, requests: int, width: int, block_size: int, share: float = 0.1):
    """req_id, block_table, token_indices, prefill_ids and prefill_starts; a part of each out of range."""
    prefills = int(rng.integers(0, 4))
    positions = rng.integers(-1, block_size * (width + 1) + 1, (tokens, k))
    return (
        hostile(rng, np.sort(rng.integers(0, max(requests, 1), tokens)), share),
        hostile(rng, rng.integers(0, 1000, (requests, width)), share),
        hostile(rng, positions, share),
        hostile(rng, rng.integers(-1, prefills + 1, tokens), share),
        hostile(rng, rng.integers(0, 5000, prefills), share),
    )


def check(kind, req_id, table, positions, block_size, prefill_ids=None, starts=None, gap=0, stride=None) -> None:
    want, counts = oracle_indices.convert_req_index_to_global_index(
        req_id, table, positions, block_size, prefill_ids, starts, stride
    )
    in_front, counts_in_front = oracle_indices.to_front(want)
    np.testing.assert_array_equal(counts_in_front, counts)
    more = {} if stride is None else {"block_stride_rows": stride}
    inputs = [kind.put(a) for a in (req_id, gapped(table, 0, gap), gapped(positions, 0, gap), prefill_ids, starts)]
    out, whole = kind.put_with_allocation(gapped(np.full_like(positions, 77), 0, gap))
    before = kind.take(whole).copy()
    got = convert_req_index_to_global_index(
        inputs[0], inputs[1], inputs[2], block_size, *inputs[3:], True, **more, out=out
    )
    assert got[0] is out
    np.testing.assert_array_equal(kind.take(out), in_front)
    np.testing.assert_array_equal(kind.take(got[1]), counts)
    if gap and len(positions):
        behind = (slice(None), slice(positions.shape[1], None))
        shape = (len(positions), positions.shape[1] + gap)
        was, now = (raw.view(np.int32).reshape(shape)[behind] for raw in (before, kind.take(whole)))
        np.testing.assert_array_equal(now, was)
    if stride is None:
        check_most(kind, inputs, block_size, want, out)
    fresh = convert_req_index_to_global_index(inputs[0], inputs[1], inputs[2], block_size, *inputs[3:], **more)
    assert kind.is_mine(fresh)
    np.testing.assert_array_equal(kind.take(fresh), want)
    ends = kind.put(np.full(len(positions), 77, np.int32))
    slots, returned = convert_to_slots_and_ends(
        inputs[0], inputs[1], inputs[2], block_size, *inputs[3:], **more, ends=ends
    )
    assert returned is ends
    np.testing.assert_array_equal(kind.take(slots), want)
    np.testing.assert_array_equal(kind.take(ends), [max(np.flatnonzero(row >= 0), default=-1) + 1 for row in want])


def check_most(kind, inputs, block_size: int, slots: np.ndarray, out) -> None:
    """No more entries of a row than the caller says: none, a part, just all, or a number beyond the row's."""
    tokens, k = slots.shape
    valid, given = (slots >= 0).sum(axis=1), np.arange(tokens)
    most = np.select(
        [given % 5 == i for i in range(4)], [valid, valid // 2, np.maximum(valid - 1, 0), np.full(tokens, -7)], k + 9
    ).astype(np.int32)  # fmt: skip
    want, counts = oracle_indices.to_front(slots, most)
    found = kind.put(np.full(tokens, 77, np.int32))
    convert_to_front(inputs[0], inputs[1], inputs[2], block_size, *inputs[3:], kind.put(most), out=out, counts=found)
    np.testing.assert_array_equal(kind.take(out), want)
    np.testing.assert_array_equal(kind.take(found), counts)


@pytest.mark.parametrize("block_size", [1, 2, 3, 64, 100, 256])
@pytest.mark.parametrize(
    ("tokens", "k", "requests", "width"),
    [(1, 1, 1, 1), (5, 7, 3, 4), (9, 32, 2, 300), (33, 20, 5, 17), (3, 2049, 2, 9)],
)
def test_convert(kind, rng, block_size: int, tokens: int, k: int, requests: int, width: int) -> None:
    req_id, table, positions, prefill_ids, starts = case(rng, tokens, k, requests, width, block_size)
    check(kind, req_id, table, positions, block_size, gap=int(rng.integers(0, 3)))
    check(kind, req_id, table, positions, block_size, prefill_ids, starts, gap=int(rng.integers(0, 3)))


def test_blocks_that_are_further_apart_than_their_rows(kind, rng) -> None:
    """As where other layers' blocks lie between: of decodes, and of prefills, whose workspace has no gaps."""
    for block_size, stride in ((1, 3), (64, 64), (64, 4096), (3, 2**31 - 1)):
        req_id, table, positions, prefill_ids, starts = case(rng, 33, 20, 5, 17, block_size)
        check(kind, req_id, table, positions, block_size, stride=stride)
        check(kind, req_id, table, positions, block_size, prefill_ids, starts, stride=stride)


@pytest.mark.parametrize(("tokens", "k", "requests", "width"), [(0, 8, 2, 3), (4, 0, 2, 3), (4, 8, 0, 3), (4, 8, 2, 0)])
def test_convert_nothing(kind, rng, tokens: int, k: int, requests: int, width: int) -> None:
    req_id, table, positions, prefill_ids, starts = case(rng, tokens, k, requests, width, 16)
    check(kind, req_id, table, positions, 16)
    check(kind, req_id, table, positions, 16, prefill_ids, starts)


def test_the_specification_by_hand(kind) -> None:
    table = np.array([[7, 2, 5], [4, 9, 1]], np.int32)
    positions = np.array([[0, 3, 4, 11, 12, -1], [5, 6, 7, 8, 9, -1]], np.int32)
    req_id = np.array([0, 1], np.int32)
    args = [kind.put(a) for a in (req_id, table, positions)]
    slots, counts = convert_req_index_to_global_index(*args, 4, return_valid_counts=True)
    np.testing.assert_array_equal(kind.take(slots), [[28, 31, 8, 23, -1, -1], [37, 38, 39, 4, 5, -1]])
    np.testing.assert_array_equal(kind.take(counts), [4, 5])
    slots, ends = convert_to_slots_and_ends(*args, 4)
    np.testing.assert_array_equal(kind.take(slots), [[28, 31, 8, 23, -1, -1], [37, 38, 39, 4, 5, -1]])
    np.testing.assert_array_equal(kind.take(ends), [4, 5])
    prefill = [kind.put(np.array(a, np.int32)) for a in ([-1, 1], [0, 100])]
    rows = convert_req_index_to_global_index(*args, 4, *prefill)
    np.testing.assert_array_equal(kind.take(rows), [[28, 31, 8, 23, -1, -1], [105, 106, 107, 108, 109, -1]])


def test_a_count_bounds_its_list(kind) -> None:
    """Whatever gaps the list had: what is no position, no block or too far away leaves none. Duplicates stay."""
    table = kind.put(np.array([[3, 7, -1, 2**31 - 1]], np.int32))
    positions = kind.put(np.array([[0, -1, 17, -1, 5], [64, -1, 32, 48, -9], [17, 33, 17, 17, 0]], np.int32))
    slots, counts = convert_req_index_to_global_index(
        kind.put(np.zeros(3, np.int32)), table, positions, 16, return_valid_counts=True
    )
    assert kind.take(slots).tolist() == [[48, 113, 53, -1, -1], [-1] * 5, [113, 113, 113, 48, -1]]
    assert kind.take(counts).tolist() == [3, 0, 4]


def test_slots_beyond_int32_are_no_slots(kind) -> None:
    table = np.array([[2**25 - 1, 2**25, 2**31 - 1]], np.int32)
    positions = np.array([[63, 64, 128]], np.int32)
    got = convert_req_index_to_global_index(*(kind.put(a) for a in (np.zeros(1, np.int32), table, positions)), 64)
    np.testing.assert_array_equal(kind.take(got), [[2**31 - 1, -1, -1]])


def test_in_place(kind, rng) -> None:
    req_id, table, positions, _, _ = case(rng, 40, 24, 3, 8, 16)
    want, _ = oracle_indices.convert_req_index_to_global_index(req_id, table, positions, 16)
    req_id, table, positions = (kind.put(a) for a in (req_id, table, positions))
    convert_req_index_to_global_index(req_id, table, positions, 16, out=positions)
    np.testing.assert_array_equal(kind.take(positions), want)


@pytest.mark.parametrize(("k", "gap"), [(24, 0), (5001, 3)])
def test_to_the_front_in_place(kind, rng, k: int, gap: int) -> None:
    """Of rows that a CTA takes in one turn, and in several."""
    req_id, table, positions, _, _ = case(rng, 9, k, 3, 8, 16)
    want, _ = oracle_indices.convert_req_index_to_global_index(req_id, table, positions, 16)
    want, want_counts = oracle_indices.to_front(want)
    req_id, table, positions = (kind.put(a) for a in (req_id, table, gapped(positions, 0, gap)))
    _, counts = convert_req_index_to_global_index(req_id, table, positions, 16, return_valid_counts=True, out=positions)
    np.testing.assert_array_equal(kind.take(positions), want)
    np.testing.assert_array_equal(kind.take(counts), want_counts)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [100, 5000, 13000])
def test_many_tokens(kind, rng, width: int) -> None:
    """Enough tokens for blocks of several tokens each, through shared memory and, for a wide table, without."""
    if not kind.on_gpu:
        pytest.skip("a launch shape of the kernel")
    req_id, table, positions, _, _ = case(rng, 9001, 36, 7, width, 64, share=0.01)
    column, offset = np.divmod(positions.astype(np.int64), 64)
    known = (req_id[:, None] >= 0) & (req_id[:, None] < 7) & (positions >= 0) & (column < width)
    block = table[np.where(known, req_id[:, None], 0), np.where(known, column, 0)].astype(np.int64)
    slots = block * 64 + offset
    want = np.where(known & (block >= 0) & (slots < 2**31), slots, -1)
    arrays = [kind.put(a) for a in (req_id, table, positions)]
    got = convert_req_index_to_global_index(*arrays, 64)
    np.testing.assert_array_equal(kind.take(got), want)
    got, counts = convert_req_index_to_global_index(*arrays, 64, return_valid_counts=True)
    want, want_counts = oracle_indices.to_front(want)
    np.testing.assert_array_equal(kind.take(got), want)
    np.testing.assert_array_equal(kind.take(counts), want_counts)


def test_divisor(rng) -> None:
    """The kernels' division is exact, at the edges of every quotient above all."""
    for value in [*range(1, 130), 255, 256, 1000, 2**30, 2**31 - 1, *rng.integers(1, 2**31, 50).tolist()]:
        same, multiplier, shift = divisor(value).values
        assert same == value
        assert 0 < multiplier < 2**32
        multiples = rng.integers(0, (2**31 - 1) // value + 1, 200).tolist()
        for n in {m * value + d for m in multiples for d in (-1, 0, 1)} | {0, 2**31 - 1}:
            if 0 <= n < 2**31:
                assert n * multiplier >> shift == n // value


# --- slots of positions ---------------------------------------------------------------------------------------


def check_slots(kind, rng, tokens: int, k: int, requests: int, width: int) -> None:
    """Of rows of requests in any order, and of one row a request; k 0: positions [T]."""
    block_size = int(rng.choice([1, 3, 64]))
    shape = (tokens, k) if k else (tokens,)
    for dtype in (np.int32, np.int64):
        table = gapped(hostile(rng, rng.integers(0, 1000, (requests, width)), 0.1), 0, int(rng.integers(0, 3)))
        ids = hostile(rng, rng.integers(0, max(requests, 1), tokens), 0.1)
        positions = hostile(rng, rng.integers(-1, block_size * (width + 1) + 1, shape), 0.1).astype(dtype)
        if dtype is np.int64 and tokens:
            positions.reshape(-1)[0] = rng.choice([2**40, 2**62, -(2**62), 2**32])
        rows = positions if k else positions[:, None]
        want = np.array(
            [[slot(table, int(r), int(i), block_size) for i in row] for r, row in zip(ids, rows, strict=True)]
        )
        want = want.reshape(shape).astype(np.int64)
        if k:
            positions = gapped(positions, 0, int(rng.integers(0, 3)))
        got = slots_of(kind.put(table), kind.put(positions), block_size, request_ids=kind.put(ids))
        assert kind.is_mine(got)
        assert kind.take(got).dtype == np.int64
        np.testing.assert_array_equal(kind.take(got), want)
        out = kind.put(gapped(np.full(shape, 77), *(0, 2)[: len(shape)]))
        assert slots_of(kind.put(table), kind.put(positions), block_size, request_ids=kind.put(ids), out=out) is out
        np.testing.assert_array_equal(kind.take(out), want)
        exists = (ids >= 0) & (ids < requests)
        own = np.where(exists[:, None], table[np.where(exists, ids, 0)] if requests else -1, -1).astype(np.int32)
        np.testing.assert_array_equal(kind.take(slots_of(kind.put(own), kind.put(positions), block_size)), want)


def slot(table: np.ndarray, request: int, position: int, block_size: int) -> int:
    """As of the oracle, without its end at int32."""
    column, offset = divmod(position, block_size)
    if not (0 <= request < len(table) and 0 <= column < table.shape[1]) or table[request, column] < 0:
        return -1
    return int(table[request, column]) * block_size + offset


@pytest.mark.parametrize(
    ("tokens", "k", "requests", "width"),
    [(1, 0, 1, 1), (5, 0, 3, 4), (5, 7, 3, 4), (9, 32, 2, 300), (300, 0, 5, 17), (3, 2049, 2, 9), (0, 0, 2, 3),
     (4, 1, 2, 0)],
)  # fmt: skip
def test_slots(kind, rng, tokens: int, k: int, requests: int, width: int) -> None:
    check_slots(kind, rng, tokens, k, requests, width)


def test_slots_are_those_of_the_conversion(kind, rng) -> None:
    """Where they fit int32, in which index lists are."""
    table, positions = (
        kind.put(rng.integers(0, 9, (3, 4), dtype=np.int32)),
        kind.put(np.arange(-3, 9, dtype=np.int32).reshape(3, 4)),
    )
    ids = kind.put(np.arange(3, dtype=np.int32))
    want = convert_req_index_to_global_index(ids, table, positions, 2)
    np.testing.assert_array_equal(kind.take(slots_of(table, positions, 2)), kind.take(want))


def test_slots_beyond_int32(kind) -> None:
    table = kind.put(np.array([[2**31 - 1]], np.int32))
    assert kind.take(slots_of(table, kind.put(np.array([[255]])), 256)).tolist() == [[2**39 - 1]]
