"""Gathering the last tokens of requests out of a V4_FP8 cache, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from cupy_mla.ops.gather import dequantize_and_gather_k_cache
from tests import oracle, oracle_indices
from tests.batches import table_for
from tests.cases import block_bytes, paged_rows
from tests.kinds import BF16, gapped, poisoned
from tests.ops.test_gather import assert_rounded_once


def gather_oracle(cache, shape, seq_lens, gather_lens, table, offset: int) -> dict[tuple[int, int], np.ndarray]:
    """What each written row of out holds, by request and row."""
    num_blocks, block_size, _ = cache.shape
    written = {}
    for r, seq_len in enumerate(seq_lens.tolist()):
        count = max(min(seq_len, seq_len if gather_lens is None else int(gather_lens[r])), 0)
        for i in range(min(count, shape[1] - offset)):
            slot = oracle_indices.slot(table, r, seq_len - count + i, block_size)
            row = np.zeros(512)
            if 0 <= slot < num_blocks * block_size:
                block, t = divmod(slot, block_size)
                row = oracle.unpack_row(oracle.V4, block_bytes(cache, block).tobytes(), block_size, t)
            written[r, offset + i] = row
    return written


def check(kind, cache, shape, seq_lens, gather_lens, table, offset: int, gaps: tuple[int, int] = (0, 0)) -> None:
    want = gather_oracle(cache, shape, seq_lens, gather_lens, table, offset)
    out, whole = kind.put_with_allocation(gapped(poisoned((*shape, 512), BF16), 0, *gaps))
    inputs = [kind.put(a) for a in (seq_lens, gather_lens, gapped(table, 0, 1))]
    dequantize_and_gather_k_cache(out, kind.put(cache), *inputs, cache.shape[1], offset)
    got = kind.take(out)
    for at in np.ndindex(shape):
        if at in want:
            assert_rounded_once(got[at], want[at])
        else:
            assert (np.ascontiguousarray(got[at]).view(np.uint8) == 0xFF).all(), f"row {at} was written"
    if all(shape):
        between = kind.take(whole).view(np.uint16).reshape(shape[0], shape[1] + gaps[0], 512 + gaps[1])
        assert (between[:, shape[1] :] == 0xFFFF).all()
        assert (between[..., 512:] == 0xFFFF).all()


@pytest.mark.parametrize("block_size", [1, 2, 61, 64, 256])
@pytest.mark.parametrize("lengths", [[1], [5, 0, 17], [130, 1, 64, 63]])
def test_gather(kind, rng, block_size: int, lengths: list[int]) -> None:
    """Whole sequences and tails; block strides padded to 576 and beyond, NaN in every row that nobody asks for."""
    requests, seq_lens = len(lengths), np.array(lengths, np.int32)
    table = table_for(rng, requests, max(lengths) + 3, block_size)
    for gather_lens in (None, np.minimum(rng.integers(0, 9, requests), seq_lens).astype(np.int32)):
        asked = seq_lens if gather_lens is None else gather_lens
        live = [oracle_indices.slot(table, r, p, block_size)
                for r, n in enumerate(lengths) for p in range(n - int(asked[r]), n)]  # fmt: skip
        cache = paged_rows(rng, oracle.V4, table.size + 3, block_size, np.array(live), gap=int(rng.integers(0, 2)))
        offset = int(rng.integers(0, 5))
        shape = (requests, offset + int(asked.max(initial=0)) + 2)
        check(kind, cache, shape, seq_lens, gather_lens, table, offset, (int(rng.integers(0, 3)), 8))


def test_gather_into_rows_that_are_not_aligned(kind, rng) -> None:
    table = table_for(rng, 3, 30, 4)
    cache = paged_rows(rng, oracle.V4, table.size + 3, 4, np.arange(4 * (table.size + 3)))
    seq_lens, gather_lens = np.array([30, 7, 12], np.int32), np.array([9, 7, 1], np.int32)
    check(kind, cache, (3, 15), seq_lens, gather_lens, table, 3, (1, 3))


def test_gather_of_hostile_numbers(kind, rng) -> None:
    """Blocks, lengths and tails out of range: zeros where a token has no block, nothing outside a request's rows."""
    cache = paged_rows(rng, oracle.V4, 4, 8, np.arange(32))
    table = np.array([[2, 4], [-1, 3], [1, 2**31 - 1], [0, 1], [0, 1], [0, 1]], np.int32)
    seq_lens = np.array([16, 16, 30, 2**31 - 1, -5, 10], np.int32)
    check(kind, cache, (6, 20), seq_lens, None, table, 2)
    check(kind, cache, (6, 20), seq_lens, np.array([3, 99, 30, 7, 4, -2], np.int32), table, 2)
    check(kind, cache, (6, 20), seq_lens, np.array([-(2**31), 2**31 - 1, 9, 2**31 - 1, 5, 0], np.int32), table, 19)


@pytest.mark.parametrize(
    ("requests", "width", "rows", "offset", "blocks"),
    [(0, 2, 5, 0, 3), (2, 0, 5, 0, 3), (2, 2, 0, 0, 3), (2, 2, 5, 5, 3), (2, 2, 5, 0, 0)],
)
def test_gather_nothing(kind, rng, requests: int, width: int, rows: int, offset: int, blocks: int) -> None:
    cache = paged_rows(rng, oracle.V4, blocks, 4, np.arange(4 * blocks))
    table, seq_lens = np.zeros((requests, width), np.int32), np.full(requests, 3, np.int32)
    check(kind, cache, (requests, rows), seq_lens, None, table, offset)


def test_gather_of_more_requests_than_a_block_has_threads(kind, rng) -> None:
    cache = paged_rows(rng, oracle.V4, 5, 2, np.arange(10))
    table, seq_lens = rng.integers(0, 5, (600, 2)).astype(np.int32), rng.integers(0, 5, 600).astype(np.int32)
    check(kind, cache, (600, 4), seq_lens, rng.integers(0, 4, 600).astype(np.int32), table, 1)


def test_gather_scales_of_every_size(kind, rng) -> None:
    """The dequantized value is exact in bfloat16: exponents from -100 to 100."""
    cache = paged_rows(rng, oracle.V4, 1, 16, np.arange(16))
    block_bytes(cache, 0)[576 * 16 : 584 * 16].reshape(16, 8)[:, :7] = rng.integers(27, 228, (16, 7))
    check(kind, cache, (1, 16), np.array([16], np.int32), None, np.array([[0]], np.int32), 0)


def test_rope_is_copied_bit_for_bit(kind, rng) -> None:
    cache = paged_rows(rng, oracle.V4, 2, 8, np.arange(16))
    bits = rng.integers(0, 2**16, (2, 8, 64), np.uint16) | 0x7F80
    for b in range(2):
        flat = as_strided(cache[b], (8 * 584,), (1,))
        as_strided(flat[448:], (8, 128), (576, 1))[...] = bits[b].view(np.uint8)
    out, table = kind.put(poisoned((1, 16, 512), BF16)), np.array([[1, 0]], np.int32)
    lens = kind.put(np.array([16], np.int32))
    dequantize_and_gather_k_cache(out, kind.put(cache), lens, None, kind.put(table), 8, 0)
    np.testing.assert_array_equal(kind.take(out).view(np.uint16)[0, :, 448:], bits[[1, 0]].reshape(16, 64))
