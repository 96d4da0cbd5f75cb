"""The V4 metadata builders against loops written from the specification, over every kind of array."""

from __future__ import annotations

from dataclasses import replace

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
    requests, images = batch.num_reqs, built.config.max_image_tokens
    replay = np.zeros(requests, int) if batch.replay_start is None else batch.replay_start
    visible = [np.zeros(len(valid), int) if v is None else v for v in (batch.left_visible, batch.right_visible)]
    slots, lens = oracle_v4.swa_indices_and_lens(
        starts, seq_lens, request[:decode_tokens], valid, table, built.block_size, WINDOW, replay, *visible, images
    )
    gather_lens = oracle_v4.prefill_gather_lens(seq_lens, starts, num_decodes, WINDOW, replay)
    want = {
        "block_table": (table, np.int32), "slot_mapping": (batch.slot_mapping, np.int64),
        "seq_lens": (seq_lens, np.int32), "query_start_loc": (starts, np.int32), "is_valid_token": (valid, np.bool_),
        "token_to_req_indices": (request, np.int32), "decode_swa_indices": (slots[:, None], np.int32),
        "decode_swa_lens": (lens, np.int32), "prefill_seq_lens": (seq_lens[num_decodes:], np.int32),
        "prefill_gather_lens": (gather_lens, np.int32), "replay_start": (replay, np.int32),
    }  # fmt: skip
    if images:
        want |= {"left_visible": (visible[0], np.int32), "right_visible": (visible[1], np.int32)}
    else:
        assert built.left_visible is None
        assert built.right_visible is None
    for name, (values, dtype) in want.items():
        array = getattr(built, name)
        assert kind.is_mine(array), name
        assert describe(name, array).dtype == dtype
        np.testing.assert_array_equal(kind.take(array), values, err_msg=name)
    np.testing.assert_array_equal(built.query_start_loc_cpu, starts)
    np.testing.assert_array_equal(built.prefill_seq_lens_cpu, seq_lens[num_decodes:])
    np.testing.assert_array_equal(built.prefill_gather_lens_cpu, gather_lens)


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


def test_images_and_replayed_prefixes(kind, rng) -> None:
    """Of V4.1: batches with and without them; what one batch had is gone in the next."""
    settings = config(model="v41", compress_ratio=0, max_image_tokens=30, num_speculative_tokens=1)
    builder = SparseSWAMetadataBuilder(settings, place_of(kind), num_blocks=10**6)
    for i in range(9):
        batch, counts = random_batch(rng, 1, 4)
        given = batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping, batch.positions
        images = {} if i % 3 == 0 else {
            side: rng.integers(0, 15, batch.num_actual_tokens) for side in ("left_visible", "right_visible")
        }  # fmt: skip
        start = None if i % 3 == 1 else rng.integers(0, batch.seq_lens + 1)
        batch = BatchMetadata(*given, replay_start=start, **images)
        check_swa(kind, builder.build(batch), batch, counts)
    plain = SparseSWAMetadataBuilder(config(), place_of(kind))
    with pytest.raises(ValueError, match="batch: has tokens of images, the config's max_image_tokens is 0"):
        plain.build(batch)


def image_batch(left: int, right: int, table: list[int], query_len: int = 1, start: int = 0) -> BatchMetadata:
    """The last tokens of a sequence of 20, of which the first one is of an image."""
    visible = np.zeros((2, query_len), int)
    visible[:, 0] = left, right
    positions = np.arange(20 - query_len, 20)
    return BatchMetadata(
        [0, query_len], [20], [table], positions, positions, replay_start=[start], left_visible=visible[0],
        right_visible=visible[1],
    )  # fmt: skip


@pytest.mark.parametrize(("left", "right"), [(19, 0), (12, 0), (0, 12), (6, 6), (2**31 - 1, 2**31 - 1)])
def test_images_larger_than_the_lists_allow_are_refused(left: int, right: int) -> None:
    """Their lists would lack the last positions, those of the token itself among them."""
    builder = SparseSWAMetadataBuilder(config(model="v41", compress_ratio=0, max_image_tokens=12))
    for query_len in (1, 5):
        with pytest.raises(ValueError, match=f"batch: token 0 is of an image of {left + right + 1} tokens, the config"):
            builder.build(image_batch(left, right, [0, 1, 2, 3, 4], query_len))
    built = builder.build(image_batch(11, 0, [0, 1, 2, 3, 4]))
    np.testing.assert_array_equal(built.decode_swa_indices[0, 0, :12], np.arange(8, 20))


@pytest.mark.parametrize("block", [-1, 5])
def test_blocks_that_only_an_image_reaches(block: int) -> None:
    """They must exist, if the request is a decode: a prefill sees no rows before the window of its first token."""
    settings = config(model="v41", compress_ratio=0, max_image_tokens=16)
    builder, table = SparseSWAMetadataBuilder(settings, num_blocks=5), [block, block, 2, 3, 4]
    builder.build(image_batch(11, 0, table))  # positions 8 to 19
    builder.build(image_batch(12, 0, table, start=8))
    builder.build(image_batch(12, 0, table, query_len=2))
    with pytest.raises(ValueError, match=f"block_table: block 1 of request 0 is {block}, the cache has 5 blocks"):
        builder.build(image_batch(12, 0, table))  # positions 7 to 19


def test_blocks_before_a_replayed_prefix_are_not_looked_at(rng) -> None:
    """Sequences may have no blocks of the window's cache there."""
    builder = SparseSWAMetadataBuilder(config(), num_blocks=9)
    table = np.array([[-1, -1, 3, 4]])
    good = BatchMetadata([0, 1], [13], table, [13], [12], replay_start=[8])
    built = builder.build(good)
    np.testing.assert_array_equal(built.decode_swa_indices[0, 0], [12, 13, 14, 15, 16, *[-1] * 4])
    with pytest.raises(ValueError, match="block_table: block 1 of request 0 is -1"):
        builder.build(BatchMetadata([0, 1], [13], table, [13], [12], replay_start=[7]))


def chunks_of(lens: list[tuple[int, int]], most: int) -> list[tuple[int, int, int, int]]:
    """Requests go into a chunk while its workspace, all of them as wide as the widest, has at most so many rows."""
    plan, start = [], 0
    while start < len(lens):
        end = start + 1
        while end < len(lens) and (end + 1 - start) * sum(map(max, zip(*lens[start : end + 1], strict=True))) <= most:
            end += 1
        n, gathered = map(max, zip(*lens[start:end], strict=True))
        plan.append((start, end, n, n + gathered))
        start = end
    return plan


@pytest.mark.parametrize(("model", "ratio"), [("v4", 1), ("v4", 4), ("v4", 128), ("v41", 0), ("v41", 1), ("v41", 2)])
def test_chunks_of_prefills_follow_from_their_lengths(rng, model: str, ratio: int) -> None:
    swa_alone = ratio == {"v4": 1, "v41": 0}[model]
    settings = config(model=model, compress_ratio=ratio, block_size=128)
    builder = SparseSWAMetadataBuilder(settings)
    for chunk_size in (1, 2, 4):
        for _ in range(6):
            batch, (decodes, _, _, _) = random_batch(rng, 0, 128)
            built = builder.build(batch)
            gathered = oracle_v4.prefill_gather_lens(batch.seq_lens, batch.query_start_loc, decodes, WINDOW)
            rows = [0 if swa_alone else int(n) // ratio for n in batch.seq_lens[decodes:]]
            most = (0 if swa_alone else -(-MAX_MODEL_LEN // ratio)) + WINDOW + 90
            want = chunks_of(list(zip(rows, gathered.tolist(), strict=True)), chunk_size * most)
            assert built.get_prefill_chunk_plan(ratio, chunk_size) == want
            assert built.get_prefill_chunk_plan(ratio, chunk_size, not swa_alone) == want


def test_a_chunk_plan_by_hand() -> None:
    """Five short sequences go into one chunk of a workspace for four long ones; without compressed rows N is 0."""
    settings = SparseMLAConfig(
        8, 512, cache_layout="v4_fp8", model="v41", compress_ratio=2, window=64, max_num_batched_tokens=128,
        max_model_len=1024,
    )  # fmt: skip
    lens = np.array([80, 96, 112, 128, 144])
    positions = np.concatenate([np.arange(n - 4, n) for n in lens])
    table = np.arange(5 * 16).reshape(5, 16)
    built = SparseSWAMetadataBuilder(settings).build(BatchMetadata(4 * np.arange(6), lens, table, positions, positions))
    assert built.get_prefill_chunk_plan(2, 4) == [(0, 5, 72, 139)]
    assert built.get_prefill_chunk_plan(1, 4) == [(0, 5, 144, 211)]
    assert built.get_prefill_chunk_plan(0, 4) == [(0, 5, 0, 67)]
    assert built.get_prefill_chunk_plan(2, 4, has_compressed=False) == [(0, 5, 0, 67)]
    with pytest.raises(ValueError, match=r"compress_ratio must be among \(0, 1, 2\), got 4"):
        built.get_prefill_chunk_plan(4, 4)
    with pytest.raises(ValueError, match="prefill_chunk_size must be >= 1"):
        built.get_prefill_chunk_plan(2, 0)
    with pytest.raises(ValueError, match=r"^has_compressed: layers of compress_ratio 0 have no compressed rows"):
        built.get_prefill_chunk_plan(0, 4, has_compressed=True)
    with pytest.raises(TypeError, match=r"^has_compressed: expected True or False, got 1 "):
        built.get_prefill_chunk_plan(1, 4, has_compressed=1)
    with pytest.raises(TypeError, match=r"^compress_ratio: expected an integer, got 1\.0 "):
        built.get_prefill_chunk_plan(1.0, 4)


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
    v41 = SparseSWAMetadataBuilder(config(model="v41")).build(batch).schedules
    assert v41 == {0: FP8KernelMetadata(), 1: FP8KernelMetadata(), 2: FP8KernelMetadata()}


def test_buffers_stay_where_they_are(kind, rng) -> None:
    """A smaller batch after a larger one: the same addresses, and no lengths of the larger one past the smaller."""
    builder = SparseSWAMetadataBuilder(config(), place_of(kind))
    names = ("decode_swa_indices", "decode_swa_lens", "prefill_gather_lens", "is_valid_token", "block_table")
    first = builder.build(batch_of(rng, [1] * 8 + [7] * 4, [30] * 12, 4))
    second = builder.build(batch_of(rng, [1, 3], [9, 12], 4))
    for name in names:
        assert describe(name, getattr(first, name)).ptr == describe(name, getattr(second, name)).ptr
    assert (kind.take(first.decode_swa_lens)[1:] == 0).all()  # where the second's lie now
    assert not kind.take(first.is_valid_token)[4:].any()


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
    with pytest.raises(ValueError, match=r"compress_ratios must be among \(0, 1, 2\), got \(0, 4\)"):
        SparseSWAMetadataBuilder(config(model="v41"), compress_ratios=[0, 4])


# --- the compressed caches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculative", [0, 2])
@pytest.mark.parametrize(
    ("model", "ratio", "block_size"),
    [("v4", 4, 4), ("v4", 4, 256), ("v4", 128, 128), ("v4", 128, 256), ("v41", 1, 3), ("v41", 2, 64)],
)
def test_compressed(kind, rng, model: str, ratio: int, block_size: int, speculative: int) -> None:
    settings = config(model=model, compress_ratio=ratio, block_size=block_size, num_speculative_tokens=speculative)
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
            tokens, batch.query_start_loc, batch.seq_lens, table, rows, ratio, tokens, batch.slot_mapping
        )
        np.testing.assert_array_equal(kind.take(built.slot_mapping), slots)
        np.testing.assert_array_equal(kind.take(built.compressed_seq_lens), [n // ratio for n in batch.seq_lens])
        assert built.fp8_extra_metadata is None
        assert not built.fp8_use_mixed_batch
        lists = ("global_decode_topk_indices", "decode_topk_lens", "prefill_topk_indices")
        got = [getattr(built, f"c128a_{name}") for name in lists]
        if ratio != 128:
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
    assert (kind.take(first.c128a_decode_topk_lens)[1:] == 0).all()  # where the second's lie now
    assert (kind.take(first.slot_mapping)[4:] == -1).all()


def test_c128a_lists_of_positions_that_the_device_has(kind, rng) -> None:
    given, settings = batch_of(rng, [1, 7], [299, 260], 128), config(compress_ratio=128, block_size=128)
    want = SparseMLAMetadataBuilder(settings).build(given)
    others = replace(given, positions=np.zeros_like(given.positions))
    built = SparseMLAMetadataBuilder(settings, place_of(kind)).build(others, positions=kind.put(given.positions))
    for name in ("c128a_global_decode_topk_indices", "c128a_decode_topk_lens", "c128a_prefill_topk_indices"):
        np.testing.assert_array_equal(kind.take(getattr(built, name)), getattr(want, name))
