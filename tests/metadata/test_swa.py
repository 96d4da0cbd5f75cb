"""The V4 metadata builders against loops written from the specification, over every kind of array."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import SparseMLAConfig
from cupy_mla.bridges import describe
from cupy_mla.metadata.batch import BatchMetadata
from cupy_mla.metadata.sparse_mla import FP8KernelMetadata, SparseMLAMetadataBuilder
from cupy_mla.metadata.swa import SparseSWAMetadata, SparseSWAMetadataBuilder
from tests import oracle_v4
from tests.batches import queries, table_for
from tests.metadata.test_sparse_mla import place_of

MAX_MODEL_LEN, WINDOW = 403, 9


def config(**changes) -> SparseMLAConfig:
    fields = {
        "num_heads": 8, "d_qk": 512, "cache_layout": "v4_fp8", "topk": 16, "block_size": 4, "max_num_seqs": 12,
        "max_num_batched_tokens": 90, "max_model_len": MAX_MODEL_LEN, "window": WINDOW,
    }  # fmt: skip
    return SparseMLAConfig(**{**fields, **changes})


def batch_of(rng, query_lens: list[int], seq_lens: list[int], block_size: int, padding: float = 0.2) -> BatchMetadata:
    batch = queries(query_lens, seq_lens)
    table = table_for(rng, len(query_lens), MAX_MODEL_LEN + block_size, block_size)
    slots = np.where(rng.random(batch.tokens) < padding, -1, rng.integers(0, 10**6, batch.tokens))
    return BatchMetadata(batch.query_start_loc, batch.seq_lens, table, slots, batch.positions)


def random_batch(rng, speculative: int, block_size: int) -> tuple[BatchMetadata, tuple[int, int, int, int]]:
    """Decodes of uneven query lengths, prefills after them, and how they are split."""
    decodes, prefills = (int(n) for n in rng.integers(0, 7, 2))
    query_lens = rng.integers(0, 2 + speculative, decodes).tolist()
    if prefills:
        query_lens += [2 + speculative, *rng.integers(1, 9, prefills - 1).tolist()]
    seq_lens = [min(n + int(rng.choice([0, 3, 127, 128, 300])), MAX_MODEL_LEN) for n in query_lens]
    tokens = sum(query_lens[:decodes])
    return batch_of(rng, query_lens, seq_lens, block_size), (decodes, prefills, tokens, sum(query_lens) - tokens)


def check_swa(kind, built: SparseSWAMetadata, batch: BatchMetadata, counts: tuple[int, int, int, int]) -> None:
    num_decodes, _, decode_tokens, _ = counts
    assert counts == (built.num_decodes, built.num_prefills, built.num_decode_tokens, built.num_prefill_tokens)
    width = -(-MAX_MODEL_LEN // built.block_size)
    table, valid = batch.block_table[:, :width], batch.slot_mapping >= 0
    request = np.array([r for r, n in enumerate(batch.query_lens) for _ in range(n)], np.int32)
    starts, seq_lens = batch.query_start_loc, batch.seq_lens
    slots, lens = oracle_v4.swa_indices_and_lens(
        starts, seq_lens, request[:decode_tokens], valid, table, built.block_size, WINDOW
    )
    want = {
        "block_table": (table, np.int32), "slot_mapping": (batch.slot_mapping, np.int64),
        "seq_lens": (seq_lens, np.int32), "query_start_loc": (starts, np.int32), "is_valid_token": (valid, np.bool_),
        "token_to_req_indices": (request, np.int32), "decode_swa_indices": (slots[:, None], np.int32),
        "decode_swa_lens": (lens, np.int32), "prefill_seq_lens": (seq_lens[num_decodes:], np.int32),
        "prefill_gather_lens": (oracle_v4.prefill_gather_lens(seq_lens, starts, num_decodes, WINDOW), np.int32),
    }  # fmt: skip
    for name, (values, dtype) in want.items():
        array = getattr(built, name)
        assert kind.is_mine(array), name
        assert describe(name, array).dtype == dtype
        np.testing.assert_array_equal(kind.take(array), values, err_msg=name)
    np.testing.assert_array_equal(built.query_start_loc_cpu, starts)


@pytest.mark.parametrize("speculative", [0, 2])
@pytest.mark.parametrize("block_size", [1, 4, 64])
def test_swa(kind, rng, speculative: int, block_size: int) -> None:
    """Batches one after the other: mixed, of decodes alone, of prefills alone, with padding."""
    builder = SparseSWAMetadataBuilder(
        config(num_speculative_tokens=speculative, block_size=block_size), place_of(kind), num_blocks=10**6
    )
    for _ in range(8):
        batch, counts = random_batch(rng, speculative, block_size)
        check_swa(kind, builder.build(batch), batch, counts)


def test_no_requests(kind, rng) -> None:
    builder = SparseSWAMetadataBuilder(config(), place_of(kind))
    check_swa(kind, builder.build(batch_of(rng, [], [], 4)), batch_of(rng, [], [], 4), (0, 0, 0, 0))


def test_one_schedule_a_kind_of_layer_and_step(rng) -> None:
    builder = SparseSWAMetadataBuilder(config(), compress_ratios=[128, 1, 128])
    batch = batch_of(rng, [1, 1], [9, 9], 4)
    first, second = builder.build(batch).schedules, builder.build(batch).schedules
    assert first == {128: FP8KernelMetadata(), 1: FP8KernelMetadata()}
    assert len({id(s) for s in (*first.values(), *second.values())}) == 4
    assert set(SparseSWAMetadataBuilder(config()).build(batch).schedules) == {1, 4, 128}


def test_buffers_stay_where_they_are(kind, rng) -> None:
    """A smaller batch after a larger one: the same addresses, and no lengths of the larger one past the smaller."""
    builder = SparseSWAMetadataBuilder(config(), place_of(kind))
    names = ("decode_swa_indices", "decode_swa_lens", "prefill_gather_lens", "is_valid_token", "block_table")
    first = builder.build(batch_of(rng, [1] * 8 + [7] * 4, [30] * 12, 4))
    second = builder.build(batch_of(rng, [1, 3], [9, 12], 4))
    for name in names:
        assert describe(name, getattr(first, name)).ptr == describe(name, getattr(second, name)).ptr
    assert (kind.take(builder._decode_lens)[1:] == 0).all()
    assert not kind.take(builder._buffers.arrays["is_valid_token"])[4:].any()


def test_hostile_batches(rng) -> None:
    builder = SparseSWAMetadataBuilder(config(), num_blocks=1000)
    beyond = batch_of(rng, [1, 3], [9, 12], 4, padding=0)
    beyond.slot_mapping[2] = 4000
    narrow = BatchMetadata([0, 1], [9], np.zeros((1, 2), int), [3], [8])
    for batch, message in (
        (batch_of(rng, [1] * 13, [1] * 13, 4), "batch: expected at most 12 requests"),
        (batch_of(rng, [91], [91], 4), "batch: expected at most 90 query tokens"),
        (batch_of(rng, [1], [404], 4), "batch: expected at most 403 tokens in a sequence"),
        (beyond, "slot_mapping: token .* the cache has 4000 slots"),
        (narrow, "block_table: request 0 has 9 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            builder.build(batch)
    table = np.full((1, 101), 1000)
    table[0, 2:5] = [1, 2, 3]  # position 19 and its window of 9 take blocks 2 (positions 8..11), 3 and 4
    builder.build(BatchMetadata([0, 1], [20], table, [15], [19]))
    with pytest.raises(ValueError, match="block_table: block 1 of request 0 is 1000, the cache has 1000 blocks"):
        builder.build(BatchMetadata([0, 1], [16], table, [15], [15]))


def test_configs_of_other_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"config: expected V4 layers"):
        SparseSWAMetadataBuilder(SparseMLAConfig(8))
    with pytest.raises(ValueError, match=r"compress_ratios must be among \(1, 4, 128\), got \(1, 2\)"):
        SparseSWAMetadataBuilder(config(), compress_ratios=[1, 2])


# --- the compressed caches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculative", [0, 2])
@pytest.mark.parametrize(("ratio", "block_size"), [(4, 4), (4, 256), (128, 128), (128, 256)])
def test_compressed(kind, rng, ratio: int, block_size: int, speculative: int) -> None:
    settings = config(compress_ratio=ratio, block_size=block_size, num_speculative_tokens=speculative)
    builder = SparseMLAMetadataBuilder(settings, place_of(kind))
    for _ in range(6):
        batch, (_, _, decode_tokens, _) = random_batch(rng, speculative, block_size)
        built = builder.build(batch)
        tokens, rows = batch.num_actual_tokens, block_size // ratio
        table = batch.block_table[:, : -(-MAX_MODEL_LEN // block_size)]
        request = np.array([r for r, n in enumerate(batch.query_lens) for _ in range(n)], np.int32)
        np.testing.assert_array_equal(kind.take(built.block_table), table)
        np.testing.assert_array_equal(kind.take(built.req_id_per_token), request)
        slots = oracle_v4.compressed_slot_mapping(
            tokens, batch.query_start_loc, batch.seq_lens, table, rows, ratio, tokens
        )
        np.testing.assert_array_equal(kind.take(built.slot_mapping), slots)
        np.testing.assert_array_equal(kind.take(built.compressed_seq_lens), [n // ratio for n in batch.seq_lens])
        assert built.fp8_extra_metadata is None
        assert not built.fp8_use_mixed_batch
        lists = ("global_decode_topk_indices", "decode_topk_lens", "prefill_topk_indices")
        got = [getattr(built, f"c128a_{name}") for name in lists]
        if ratio == 4:
            assert got == [None, None, None]
            continue
        decode, lens, prefill = oracle_v4.c128a_lists(
            batch.positions, ratio, decode_tokens, request, table, rows, batch.slot_mapping, (128, 128), 4
        )
        for array, want in zip(got, (decode[:, None], lens, prefill), strict=True):
            assert kind.is_mine(array)
            np.testing.assert_array_equal(kind.take(array), want)


def test_the_width_of_c128a_lists(rng) -> None:
    """The rows of the longest sequence, a begun one included, rounded up to a multiple of 128."""
    for longest, width in ((1, 128), (128 * 128, 128), (128 * 128 + 1, 256)):
        builder = SparseMLAMetadataBuilder(config(compress_ratio=128, block_size=128, max_model_len=longest))
        built = builder.build(BatchMetadata([0, 1], [1], np.zeros((1, 200), int), [0], [0]))
        assert built.c128a_global_decode_topk_indices.shape == (1, 1, width)


def test_compressed_buffers_stay_where_they_are(kind, rng) -> None:
    builder = SparseMLAMetadataBuilder(config(compress_ratio=128, block_size=128), place_of(kind))
    first = builder.build(batch_of(rng, [1] * 8 + [7] * 4, [300] * 12, 128))
    second = builder.build(batch_of(rng, [1, 3], [9, 12], 128))
    for name in ("slot_mapping", "compressed_seq_lens", "c128a_decode_topk_lens", "c128a_prefill_topk_indices",
                 "c128a_global_decode_topk_indices"):  # fmt: skip
        assert describe(name, getattr(first, name)).ptr == describe(name, getattr(second, name)).ptr
    assert (kind.take(builder._compressed._lens)[1:] == 0).all()
    assert (kind.take(builder._compressed._slots)[4:] == -1).all()
