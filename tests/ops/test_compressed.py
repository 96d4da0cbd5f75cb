"""Index lists of compressed rows against plain loops, over every kind of array."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cupy_mla.ops.compressed import (
    build_c128a_topk_metadata,
    compute_global_topk_indices_and_lens,
    get_compressed_slot_mapping,
)
from tests import oracle_indices, oracle_v4
from tests.batches import queries, random_queries, table_for
from tests.kinds import gapped
from tests.lists import BLOCK_SIZES, behind, check_lists, hostile, lists_for

# --- compute_global_topk_indices_and_lens ---------------------------------------------------------------------


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (7, 20), (40, 512), (0, 8), (3, 0)])
def test_global_topk(kind, rng, block_size: int, tokens: int, k: int) -> None:
    requests, width = 3, 5
    token_to_req = np.sort(hostile(rng, rng.integers(0, requests, tokens), 0.1))
    table = hostile(rng, rng.integers(0, 1000, (requests, width)), 0.1)
    chosen = hostile(rng, rng.integers(-1, block_size * (width + 1), (tokens, k)), 0.1)
    valid = rng.random(tokens) < 0.7
    stride = block_size + int(rng.integers(0, 9))
    want, counts = oracle_indices.convert_req_index_to_global_index(
        token_to_req, table, chosen, block_size, stride=stride
    )
    inputs = [kind.put(a) for a in (gapped(chosen, 0, 1), token_to_req, gapped(table, 0, 1))]
    call = partial(compute_global_topk_indices_and_lens, *inputs, block_size, kind.put(valid), block_stride_rows=stride)
    check_lists(kind, call, want, np.where(valid, counts, 0), 4)


# --- get_compressed_slot_mapping ------------------------------------------------------------------------------


def check_slots(
    kind, batch, table, block_size: int, ratio: int, num_tokens: int, extra: int = 5, own=None, ranks=(1, 0, 1)
) -> None:
    size = num_tokens + extra
    arguments = (num_tokens, batch.query_start_loc, batch.seq_lens, table, block_size, ratio)
    want = oracle_v4.compressed_slot_mapping(*arguments, size, own, ranks)
    more = dict(zip(("dcp_world_size", "dcp_rank", "cp_interleave"), ranks, strict=True))
    if own is not None:
        more["slot_mapping"] = kind.put(own)
    inputs = [kind.put(a) for a in (batch.query_start_loc, batch.seq_lens, gapped(table, 0, 1))]
    out, whole = kind.put_with_allocation(gapped(np.full(size, 77, np.int64), 2))
    got = get_compressed_slot_mapping(num_tokens, *inputs, block_size, ratio, out, **more)
    np.testing.assert_array_equal(kind.take(got), want[:num_tokens])
    np.testing.assert_array_equal(kind.take(out), want)
    assert (kind.take(whole).view(np.int64)[size:] == -1).all(), "memory past out was written"
    fresh = get_compressed_slot_mapping(num_tokens, *inputs, block_size, ratio, **more)
    assert kind.is_mine(fresh)
    np.testing.assert_array_equal(kind.take(fresh), want[:num_tokens])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_slots(kind, rng, block_size: int, ratio: int) -> None:
    """Requests without tokens, new and continued sequences, padding past the last request's tokens."""
    batch = random_queries(rng, 7, 300, 700)
    table = table_for(rng, 7, -(-1000 // ratio), block_size)
    check_slots(kind, batch, table, block_size, ratio, batch.tokens)
    check_slots(kind, batch, table, block_size, ratio, batch.tokens + 9)
    check_slots(kind, batch, table, block_size, ratio, batch.tokens // 2)


@pytest.mark.parametrize("ratio", [1, 2])
def test_slots_of_padding_tokens(kind, rng, ratio: int) -> None:
    """A token that goes nowhere itself completes no row, whatever its place."""
    batch = random_queries(rng, 7, 30, 100)
    own = np.where(rng.random(batch.tokens + 3) < 0.4, rng.choice([-1, -(2**63)], batch.tokens + 3), 2**40)
    check_slots(kind, batch, table_for(rng, 7, 140, 16), 16, ratio, batch.tokens, own=own)


@pytest.mark.parametrize(("world", "interleave", "block_size"), [(2, 1, 16), (3, 4, 8), (4, 16, 16), (1, 5, 8)])
def test_slots_of_ranks(kind, rng, world: int, interleave: int, block_size: int) -> None:
    """Each row is one rank's; the ranks' rows lie in blocks that stand for as many rows of each of them."""
    batch = random_queries(rng, 6, 60, 400)
    table = table_for(rng, 6, 230, block_size)
    owners = np.zeros(batch.tokens, int)
    for rank in range(world):
        ranks = (world, rank, interleave)
        check_slots(kind, batch, table, block_size, 2, batch.tokens, ranks=ranks)
        owners += oracle_v4.compressed_slot_mapping(
            batch.tokens, batch.query_start_loc, batch.seq_lens, table, block_size, 2, batch.tokens, ranks=ranks
        ) >= 0  # fmt: skip
    np.testing.assert_array_equal(owners, (batch.positions + 1) % 2 == 0)


def test_slots_at_the_boundary(kind, rng) -> None:
    """A decode that completes a row, its neighbours that do not, a prefill that ends exactly on a row, or one short."""
    batch = queries([1, 1, 1, 8, 7, 2], [8, 7, 9, 8, 7, 5])
    check_slots(kind, batch, table_for(rng, 6, 3, 2), 2, 4, batch.tokens)


def test_slots_of_hostile_numbers(kind, rng) -> None:
    """Blocks that do not exist and a table too narrow give -1; slots beyond int32 are slots, the mapping is int64."""
    batch = queries([8, 300, 4, 4], [8, 300, 40, 2**31 - 1])
    table = np.array([[2**31 - 1, -1], [5, 6], [-(2**31), 3], [0, 1]], np.int32)
    check_slots(kind, batch, table, 64, 4, batch.tokens)
    check_slots(kind, batch, table, 1, 4, batch.tokens)


def test_slots_nothing(kind, rng) -> None:
    none = queries([], [])
    check_slots(kind, none, np.zeros((0, 3), np.int32), 4, 4, 0)
    check_slots(kind, none, np.zeros((0, 3), np.int32), 4, 4, 6)
    check_slots(kind, queries([8, 4], [8, 8]), np.zeros((2, 0), np.int32), 4, 4, 12)


# --- build_c128a_topk_metadata --------------------------------------------------------------------------------


def check_c128a(
    kind, positions, ratio: int, decodes: int, token_to_req, table, block_size: int, slots, widths, most: int
) -> None:
    want = oracle_v4.c128a_lists(positions, ratio, decodes, token_to_req, table, block_size, slots, widths, most)
    rows = (decodes + 2, len(positions) - decodes + 3)
    decode, lens, decode_whole = lists_for(kind, rows[0], widths[0], 3)
    prefill, _, prefill_whole = lists_for(kind, rows[1], widths[1], 1)
    inputs = [kind.put(a) for a in (positions, token_to_req, gapped(table, 0, 1), slots)]
    got = build_c128a_topk_metadata(
        inputs[0], ratio, decodes, inputs[1], inputs[2], block_size, inputs[3], decode, lens, prefill, most
    )
    for array, expected in zip(got, want, strict=True):
        assert kind.is_mine(array)
        np.testing.assert_array_equal(kind.take(array), expected)
    for buffer, written in ((decode, decodes), (lens, decodes), (prefill, len(positions) - decodes)):
        assert (kind.take(buffer)[written:] == 77).all(), "rows of no token were written"
    assert (behind(kind, decode_whole, (rows[0], widths[0]), 3) == -1).all(), "memory between the rows was written"
    assert (behind(kind, prefill_whole, (rows[1], widths[1]), 1) == -1).all(), "memory between the rows was written"


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("most", [0, 1, 7, 300])
def test_c128a(kind, rng, block_size: int, ratio: int, most: int) -> None:
    batch = random_queries(rng, 6, 5, most * ratio + 90)
    table = table_for(rng, 6, most + 30, block_size)
    slots = np.where(rng.random(batch.tokens) < 0.2, -1, rng.integers(0, 2**40, batch.tokens))
    for decodes in (0, batch.tokens // 2, batch.tokens):
        check_c128a(
            kind, batch.positions, ratio, decodes, batch.token_to_req, table, block_size, slots,
            (most + int(rng.integers(0, 70)), most + int(rng.integers(0, 70))), most,
        )  # fmt: skip


def test_c128a_at_the_boundary(kind, rng) -> None:
    """One short of a row, exactly a row, the first token of all, and sequences beyond the longest."""
    positions = np.array([126, 127, 128, 0, 255, 10**12] * 2, np.int64)
    table = table_for(rng, 12, 4, 2)
    slots = np.zeros(12, np.int64)
    check_c128a(kind, positions, 128, 6, np.arange(12, dtype=np.int32), table, 2, slots, (128, 128), 3)


def test_c128a_of_hostile_numbers(kind, rng) -> None:
    positions = rng.choice(np.array([-1, -(2**63), 500, 2**63 - 2, 127]), 10)
    token_to_req = hostile(rng, rng.integers(0, 3, 10), 0.4)
    table = hostile(rng, rng.integers(0, 2**31 - 1, (3, 2)), 0.4)
    slots = rng.choice(np.array([0, -1, -(2**63), 2**63 - 1]), 10)
    check_c128a(kind, positions, 128, 5, token_to_req, table, 2, slots, (9, 9), 9)


def test_c128a_nothing(kind, rng) -> None:
    none = np.zeros(0, np.int64)
    table = np.zeros((2, 3), np.int32)
    check_c128a(kind, none, 128, 0, none.astype(np.int32), table, 2, none, (4, 4), 4)
