"""Gathering paged FP8 tokens into bf16 rows, and concatenating queries, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla.ops.gather import concat_mla_q, cp_gather_and_upconvert_fp8_kv_cache
from tests import oracle, oracle_indices
from tests.cases import block_bytes, normal, paged_rows
from tests.kinds import BF16, gapped, poisoned


def assert_rounded_once(got: np.ndarray, exact: np.ndarray) -> None:
    """bfloat16 values next to the exact ones: half a unit in the last place, float32's own rounding allowed for."""
    error = np.abs(got.astype(np.float64) - exact)
    worst = (error / np.maximum(np.abs(exact), 2.0**-126)).max()
    assert worst <= 2.0**-8 * (1 + 2.0**-12), f"relative error {worst}"


def gather_oracle(cache, rows: int, table, seq_lens, starts) -> dict[int, np.ndarray]:
    """What each written row of dst holds."""
    num_blocks, block_size, _ = cache.shape
    written = {}
    for r, (length, start) in enumerate(zip(seq_lens.tolist(), starts.tolist(), strict=True)):
        for t in range(min(length, rows - start) if 0 <= start < rows else 0):
            slot = oracle_indices.slot(table, r, t, block_size)
            row = np.zeros(576)
            if 0 <= slot < num_blocks * block_size:
                block, t_in_block = divmod(slot, block_size)
                row = oracle.unpack_row(oracle.V32, block_bytes(cache, block).tobytes(), block_size, t_in_block)
            written[start + t] = row
    return written


def check_gather(kind, cache, table, seq_lens, starts, rows: int, dst_gap: int = 0) -> None:
    want = gather_oracle(cache, rows, table, seq_lens, starts)
    dst, whole = kind.put_with_allocation(gapped(poisoned((rows, 576), BF16), 0, dst_gap))
    inputs = [kind.put(a) for a in (gapped(table, 0, 1), seq_lens, starts)]
    cp_gather_and_upconvert_fp8_kv_cache(kind.put(cache), dst, *inputs)
    got = kind.take(dst)
    for row in range(rows):
        if row in want:
            assert_rounded_once(got[row], want[row])
        else:
            assert (np.ascontiguousarray(got[row]).view(np.uint8) == 0xFF).all(), f"row {row} was written"
    if dst_gap and rows:
        assert (kind.take(whole).reshape(rows, -1)[:, 1152:] == 0xFF).all()


def place_requests(rng, seq_lens: np.ndarray) -> tuple[np.ndarray, int]:
    """Starts of requests that lie in random order with gaps between them, and the rows they take in all."""
    starts, at = np.zeros(len(seq_lens), np.int32), 0
    for r in rng.permutation(len(seq_lens)):
        at += int(rng.integers(0, 3))
        starts[r] = at
        at += int(seq_lens[r])
    return starts, at


@pytest.mark.parametrize("block_size", [1, 3, 64, 256])
@pytest.mark.parametrize("lengths", [[1], [5, 0, 17], [3, 3, 3, 3, 3, 3], [130, 1]])
def test_gather(kind, rng, block_size: int, lengths: list[int]) -> None:
    seq_lens = np.array(lengths, np.int32)
    width = -(-max(lengths) // block_size) + int(rng.integers(0, 2))
    blocks = len(lengths) * width + 2
    table = rng.permutation(blocks)[: len(lengths) * width].reshape(len(lengths), width).astype(np.int32)
    live = np.concatenate([
        [oracle_indices.slot(table, r, t, block_size) for t in range(n)] for r, n in enumerate(lengths)
    ]).astype(np.int64)  # fmt: skip
    cache = paged_rows(rng, oracle.V32, blocks, block_size, live, gap=int(rng.integers(0, 2)))
    starts, rows = place_requests(rng, seq_lens)
    check_gather(kind, cache, table, seq_lens, starts, rows + 1, dst_gap=8 * int(rng.integers(0, 2)))


def test_gather_into_rows_that_are_not_aligned(kind, rng) -> None:
    cache = paged_rows(rng, oracle.V32, 4, 8, np.arange(32))
    table, seq_lens = np.array([[2, 1], [0, 3]], np.int32), np.array([11, 16], np.int32)
    check_gather(kind, cache, table, seq_lens, np.array([16, 0], np.int32), 27, dst_gap=3)


def test_gather_of_hostile_numbers(kind, rng) -> None:
    """Blocks, lengths and starts out of range: zeros where a token has no block, nothing outside dst."""
    cache = paged_rows(rng, oracle.V32, 4, 8, np.arange(32))
    table = np.array([[2, 4], [-1, 3], [1, 2**31 - 1], [0, 1], [0, 1], [0, 1]], np.int32)
    seq_lens = np.array([16, 16, 30, 2**31 - 1, -5, 10], np.int32)
    starts = np.array([0, 20, 40, 75, 3, -2], np.int32)
    check_gather(kind, cache, table, seq_lens, starts, 90)
    check_gather(kind, cache, table, seq_lens, np.array([-(2**31), 2**31 - 1, 90, 91, 0, -1], np.int32), 90)


@pytest.mark.parametrize(
    ("requests", "width", "rows", "blocks"), [(0, 2, 5, 3), (2, 0, 5, 3), (2, 2, 0, 3), (2, 2, 5, 0)]
)
def test_gather_nothing(kind, rng, requests: int, width: int, rows: int, blocks: int) -> None:
    cache = paged_rows(rng, oracle.V32, blocks, 4, np.arange(4 * blocks))
    seq_lens, starts = np.full(requests, 2, np.int32), 2 * np.arange(requests, dtype=np.int32)
    check_gather(kind, cache, np.zeros((requests, width), np.int32), seq_lens, starts, rows)


def test_gather_of_more_requests_than_a_block_has_threads(kind, rng) -> None:
    requests = 600
    cache = paged_rows(rng, oracle.V32, 5, 2, np.arange(10))
    table, seq_lens = rng.integers(0, 5, (requests, 2)).astype(np.int32), rng.integers(0, 4, requests).astype(np.int32)
    starts, rows = place_requests(rng, seq_lens)
    check_gather(kind, cache, table, seq_lens, starts, rows)


def test_gather_scales_of_every_size(kind, rng) -> None:
    """The dequantized value is rounded once: scales from 1e-30 to 1e30 and zero rows."""
    cache = paged_rows(rng, oracle.V32, 1, 16, np.arange(16))
    for t in range(16):
        scales = (10.0 ** rng.uniform(-30, 30, 4)).astype("<f4") if t else np.zeros(4, "<f4")
        cache[0, t, 512:528] = scales.view(np.uint8)
    check_gather(kind, cache, np.array([[0]], np.int32), np.array([16], np.int32), np.array([0], np.int32), 16)


def test_gather_copies_rope_bit_for_bit(kind, rng) -> None:
    """NaN of every kind keeps its bits, which a conversion to float32 and back would not."""
    cache = paged_rows(rng, oracle.V32, 2, 8, np.arange(16))
    bits = rng.integers(0, 2**16, (2, 8, 64), np.uint16)
    bits[:, :, ::2] |= 0x7F80
    bits[0, 0, :4] = 0x7F81, 0xFF81, 0x7FFF, 0xFFC1
    cache[..., 528:] = bits.view(np.uint8)
    dst, table = kind.put(poisoned((16, 576), BF16)), np.array([[1, 0]], np.int32)
    arrays = (cache, table, np.array([16], np.int32), np.array([0], np.int32))
    src, blocks, lens, starts = map(kind.put, arrays)
    cp_gather_and_upconvert_fp8_kv_cache(src, dst, blocks, lens, starts)
    got = kind.take(dst).view(np.uint16)[:, 512:]
    np.testing.assert_array_equal(got, bits[[1, 0]].reshape(16, 64))


@pytest.mark.usefixtures("checked")
def test_checks_find_more_tokens_than_a_row_of_the_table_holds() -> None:
    cache, dst, lens = np.zeros((4, 8, 656), np.uint8), np.zeros((20, 576), BF16), np.array([9, 10], np.int32)
    with pytest.raises(IndexError, match=r"^seq_lens: request 0 has 9 tokens, its row of the block table holds 8"):
        cp_gather_and_upconvert_fp8_kv_cache(cache, dst, np.zeros((2, 1), np.int32), lens, np.array([0, 10], np.int32))


# --- concat_mla_q ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "heads"), [(0, 4), (1, 1), (3, 5), (7, 16), (2, 128), (130, 3)])
@pytest.mark.parametrize("gaps", [(0, 0, 0), (8, 128, 16), (3, 1, 5)], ids=["dense", "strided", "unaligned"])
def test_concat(kind, rng, tokens: int, heads: int, gaps: tuple[int, int, int]) -> None:
    nope, rope = normal(rng, tokens, heads, 512), normal(rng, tokens, heads, 64)
    out, whole = kind.put_with_allocation(gapped(poisoned((tokens, heads, 576), BF16), 0, 1, gaps[2]))
    concat_mla_q(kind.put(gapped(nope, 0, 0, gaps[0])), kind.put(gapped(rope, 1, 1, gaps[1])), out)
    got = kind.take(out)
    np.testing.assert_array_equal(got[..., :512].view(np.uint16), nope.view(np.uint16))
    np.testing.assert_array_equal(got[..., 512:].view(np.uint16), rope.view(np.uint16))
    if tokens:
        behind = kind.take(whole).view(np.uint16).reshape(tokens, heads + 1, 576 + gaps[2])
        assert (behind[:, heads:] == 0xFFFF).all()
        assert (behind[..., 576:] == 0xFFFF).all()


def test_concat_of_transposed_heads(kind, rng) -> None:
    """The absorbed query comes out of a batched product as [h, T, 512]."""
    nope, rope = normal(rng, 5, 9, 512), normal(rng, 9, 5, 64)
    out = kind.put(poisoned((9, 5, 576), BF16))
    concat_mla_q(kind.put(nope).swapaxes(0, 1), kind.put(rope), out)
    want = np.concatenate([nope.swapaxes(0, 1), rope], axis=-1)
    np.testing.assert_array_equal(kind.take(out).view(np.uint16), want.view(np.uint16))
