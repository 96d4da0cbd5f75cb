"""Pooled keys of the indexer, and lists of chosen pools, against plain loops over every kind of array."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cupy_mla.ops.pools import expand_pools_and_append_tail, kpool_compress
from tests.batches import queries
from tests.cases import normal
from tests.kinds import BF16, gapped, poisoned
from tests.lists import check_lists, hostile

# The matrix of the transform: H[i, j] = (-1)^(bits that i and j share) / sqrt(128).
HADAMARD = np.array([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]) / np.sqrt(128)


def pooled(keys: np.ndarray, gates: np.ndarray, ape: np.ndarray) -> np.ndarray:
    """The key of a pool in float64, but for the rounding of the mean to bfloat16."""
    scores = gates.astype(np.float64) + ape.astype(np.float64)
    weights = np.exp(scores - scores.max(axis=0))
    mean = (weights * keys.astype(np.float64)).sum(axis=0) / weights.sum(axis=0)
    return HADAMARD @ mean.astype(BF16).astype(np.float64)


class Sequences:
    """Requests whose tokens come step by step: what each token's key and gate are, and the rings."""

    def __init__(self, rng, kind, requests: int, longest: int, kpool: int, ring: int) -> None:
        self.rng, self.kind, self.kpool = rng, kind, kpool
        self.keys, self.gates = normal(rng, requests, longest, 128), normal(rng, requests, longest, 128)
        self.ape = rng.standard_normal((kpool, 128)).astype(np.float32)
        self.rings = rng.permutation(requests + 2)[:requests].astype(np.int32)
        self.tail = kind.put(poisoned((requests + 2, 2, ring, 128), BF16))

    def step(self, spans: list[tuple[int, int, int]], padding: int = 0) -> None:
        """Tokens `first` to `end` of each request named, checked."""
        batch = queries([end - first for _, first, end in spans], [end for _, _, end in spans])
        own = [r for r, _, _ in spans]
        k, gate = poisoned((batch.tokens + padding, 128), BF16), poisoned((batch.tokens + padding, 128), BF16)
        want = np.zeros((batch.tokens + padding, 128))
        for t, (at, p) in enumerate(zip(batch.token_to_req.tolist(), batch.positions.tolist(), strict=True)):
            r = own[at]
            k[t], gate[t] = self.keys[r, p], self.gates[r, p]
            if (p + 1) % self.kpool == 0:
                pool = slice(p + 1 - self.kpool, p + 1)
                want[t] = pooled(self.keys[r, pool], self.gates[r, pool], self.ape)
        put, gap = self.kind.put, int(self.rng.choice([0, 3, 8]))
        arrays = (put(gapped(k, 0, gap)), put(gapped(gate, 0, gap)), put(self.ape), self.tail, put(self.rings[own]))
        out = put(gapped(poisoned(k.shape, BF16), 0, 5))
        got = kpool_compress(*arrays, put(batch.query_start_loc), put(batch.seq_lens), out=out)
        assert got is out
        result = self.kind.take(got).astype(np.float64)
        # An eighth bit of the mean may round the other way, which moves all values of its key a little.
        bound = (
            2.0**-8 * (1 + np.abs(want).max(axis=1, keepdims=True, initial=0)) * (want != 0).any(axis=1, keepdims=True)
        )
        assert (np.abs(result - want) <= bound).all()
        rings = self.kind.take(self.tail)
        for r, first, end in spans:  # the ring has what a later step may read: its last tokens, each at its place
            for p in range(max(first, end - rings.shape[2]), end):
                there = rings[self.rings[r], :, p % rings.shape[2]]
                np.testing.assert_array_equal(there, [self.keys[r, p], self.gates[r, p]])


@pytest.mark.parametrize(("kpool", "ring"), [(1, 1), (2, 2), (4, 4), (4, 8), (3, 5), (16, 32)])
def test_prompts_in_portions_and_decodes(kind, rng, kpool: int, ring: int) -> None:
    """Prompts that end within a pool or with one, go on, and decode; requests come in other orders, and some wait."""
    sequences, done = Sequences(rng, kind, 5, 120, kpool, ring), [0] * 5
    for _ in range(8):
        spans = []
        for r in rng.permutation(5)[: rng.integers(1, 6)].tolist():
            end = min(done[r] + int(rng.choice([0, 1, 1, 2, kpool, 17, 40])), 120)
            spans.append((r, done[r], end))
            done[r] = end
        sequences.step(spans, padding=int(rng.integers(0, 3)))


def test_drafted_tokens_that_are_dropped(kind, rng) -> None:
    """Two drafted tokens a step: those that were wrong are written over, and pools are of those that stayed."""
    kpool, drafted = 4, 2
    sequences, done = Sequences(rng, kind, 3, 90, kpool, 8), [5, 3, 8]
    sequences.step([(r, 0, n) for r, n in enumerate(done)])
    for _ in range(12):
        sequences.step([(r, n, n + 1 + drafted) for r, n in enumerate(done)])
        kept = rng.integers(1, 2 + drafted, 3)
        for r in range(3):  # what was wrong comes again with other keys
            stale = slice(done[r] + kept[r], done[r] + 1 + drafted)
            sequences.keys[r, stale] = normal(rng, *sequences.keys[r, stale].shape)
            sequences.gates[r, stale] = normal(rng, *sequences.gates[r, stale].shape)
            done[r] += int(kept[r])


def test_requests_without_a_ring_and_tokens_of_none(kind, rng) -> None:
    """No key for a pool whose earlier tokens are nowhere; nothing of other rings is read or written."""
    k, gate = normal(rng, 9, 128), normal(rng, 9, 128)
    ape = np.zeros((4, 128), np.float32)
    tail = normal(rng, 2, 2, 4, 128)
    for blocks in ([-1, 2], [2**31 - 1, -(2**31)]):
        there = kind.put(tail.copy())
        starts, lens = np.array([0, 5, 8], np.int32), np.array([8, 8], np.int32)  # positions 3 to 7, and 5 to 7
        arrays = (k, gate, ape, None, np.array(blocks, np.int32), starts, lens)
        got = kind.take(kpool_compress(*(there if a is None else kind.put(a) for a in arrays))).astype(np.float64)
        want = np.zeros((9, 128))
        want[4] = pooled(k[1:5], gate[1:5], ape)  # its four tokens are of this step
        np.testing.assert_allclose(got, want, atol=2.0**-6)
        np.testing.assert_array_equal(kind.take(there).view(np.uint16), tail.view(np.uint16))


def test_a_mean_is_rounded_before_its_transform(kind, rng) -> None:
    """To the bit, where all sums are exact: of whole numbers, of which all have the same weight."""
    k, gate = rng.integers(-256, 257, (4, 128)).astype(BF16), np.zeros((4, 128), BF16)
    i32 = [np.array(a, np.int32) for a in ([0], [0, 4], [4])]  # ring, query_start_loc, seq_lens
    arrays = (k, gate, np.zeros((4, 128), np.float32), np.zeros((1, 2, 4, 128), BF16), *i32)
    mean = k.astype(np.float32).mean(axis=0).astype(BF16).astype(np.float64)
    sums = (np.sign(HADAMARD) @ mean).astype(np.float32)
    want = (sums * np.float32(128**-0.5)).astype(BF16)
    np.testing.assert_array_equal(kind.take(kpool_compress(*map(kind.put, arrays)))[3], want)


def test_no_tokens(kind) -> None:
    none, i32 = np.zeros((0, 128), BF16), np.zeros(0, np.int32)
    arrays = (
        none,
        none,
        np.zeros((4, 128), np.float32),
        np.zeros((1, 2, 4, 128), BF16),
        i32,
        np.zeros(1, np.int32),
        i32,
    )
    assert kind.take(kpool_compress(*map(kind.put, arrays))).shape == (0, 128)


# --- expand_pools_and_append_tail -----------------------------------------------------------------------------


def expanded(pool_ids: np.ndarray, seq_lens: np.ndarray, kpool: int) -> tuple[np.ndarray, np.ndarray]:
    tokens, n = pool_ids.shape
    out, lens = np.full((tokens, n * kpool + kpool - 1), -1, np.int32), np.zeros(tokens, np.int32)
    for t in range(tokens):
        seen = max(int(seq_lens[t]), 0)
        row = [int(i) * kpool + j for i in pool_ids[t] if 0 <= i < seen // kpool for j in range(kpool)]
        row += [i for i in range(seen) if i >= seen // kpool * kpool]
        out[t, : len(row)], lens[t] = row, len(row)
    return out, lens


def check_expanded(kind, pool_ids: np.ndarray, seq_lens: np.ndarray, kpool: int, gap: int = 3) -> None:
    want, want_lens = expanded(pool_ids, seq_lens, kpool)
    arrays = kind.put(gapped(pool_ids, 0, gap)), kind.put(seq_lens)
    check_lists(kind, partial(expand_pools_and_append_tail, *arrays, kpool), want, want_lens, gap)


@pytest.mark.parametrize(("kpool", "n"), [(1, 5), (2, 3), (4, 300), (4, 512), (16, 8), (3, 0)])
def test_expand(kind, rng, kpool: int, n: int) -> None:
    """Contexts with fewer pools than are asked for, and with more; -1 anywhere; tails of every length."""
    seq_lens = rng.integers(0, 3 * n * kpool + 9, 20).astype(np.int32)
    pool_ids = np.full((20, n), -1, np.int32)
    for t, seen in enumerate(seq_lens.tolist()):
        chosen = rng.permutation(seen // kpool)[:n]
        pool_ids[t, np.sort(rng.permutation(n)[: len(chosen)])] = chosen
    check_expanded(kind, pool_ids, seq_lens, kpool)


def test_expand_hostile_numbers(kind, rng) -> None:
    pool_ids = hostile(rng, rng.integers(-2, 9, (12, 7)), 0.3)
    check_expanded(kind, pool_ids, hostile(rng, rng.integers(0, 30, 12), 0.2).clip(None, 40), 4)


def test_expand_by_hand(kind) -> None:
    """The specification's: ctx below topk is all positions; beyond it topk and the tail."""
    pools, seen = kind.put(np.array([[0, 1], [5, 2]], np.int32)), kind.put(np.array([11, 27], np.int32))
    positions, lens = expand_pools_and_append_tail(pools, seen, 4)
    np.testing.assert_array_equal(kind.take(lens), [11, 11])
    np.testing.assert_array_equal(
        kind.take(positions), [[*range(11)], [20, 21, 22, 23, 8, 9, 10, 11, 24, 25, 26]]
    )  # fmt: skip
