"""The indexer's metadata builder against loops written from the specification, over every kind of array."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import IndexerMetadata, IndexerMetadataBuilder, SparseMLAConfig
from cupy_mla.bridges import describe
from cupy_mla.cuda.driver import gpu
from cupy_mla.metadata.batch import BatchMetadata
from cupy_mla.metadata.indexer import split_indexer_chunks
from tests import oracle_indexer, oracle_v4
from tests.batches import queries, table_for
from tests.metadata.test_sparse_mla import place_of

MAX_MODEL_LEN = 203
V41 = {"d_qk": 512, "cache_layout": "v4_fp8", "model": "v41"}
MODELS = {
    1: {"model": "v32"}, 4: {"d_qk": 512, "cache_layout": "v4_fp8", "compress_ratio": 4},
    "C1A": {**V41, "compress_ratio": 1}, "C2A": {**V41, "compress_ratio": 2},
}  # fmt: skip


def config(ratio: int | str = 1, **changes) -> SparseMLAConfig:
    fields = {
        "num_heads": 8, "topk": 16, "block_size": 8, "max_num_seqs": 12, "max_num_batched_tokens": 150,
        "max_model_len": MAX_MODEL_LEN, **MODELS[ratio],
    }  # fmt: skip
    return SparseMLAConfig(**{**fields, **changes})


def batch_of(rng, query_lens: list[int], seq_lens: list[int], block_size: int = 8) -> BatchMetadata:
    batch = queries(query_lens, seq_lens)
    table = table_for(rng, len(query_lens), MAX_MODEL_LEN + block_size, block_size)
    slots = rng.integers(-1, 10**6, batch.tokens)
    return BatchMetadata(batch.query_start_loc, batch.seq_lens, table, slots, batch.positions)


def random_batch(rng, speculative: int, block_size: int) -> tuple[BatchMetadata, int]:
    """Decodes of uneven query lengths, prefills after them; and how many decodes there are."""
    decodes, prefills = (int(n) for n in rng.integers(0, 7, 2))
    query_lens = rng.integers(0, 2 + speculative, decodes).tolist()
    if prefills:
        query_lens += [2 + speculative, *rng.integers(0, 26, prefills - 1).tolist()]
    seq_lens = [min(n + int(rng.choice([0, 1, 14, 60, 180])), MAX_MODEL_LEN) for n in query_lens]
    return batch_of(rng, query_lens, seq_lens, block_size), decodes


def tokens_of(batch: BatchMetadata, ratio: int) -> list[tuple[int, int]]:
    """The request of each query token, and how many keys of it the token sees."""
    found = []
    for r, (n, length) in enumerate(zip(batch.query_lens.tolist(), batch.seq_lens.tolist(), strict=True)):
        found += [(r, (p + 1) // ratio) for p in range(length - n, length)]
    return found


def check(kind, built: IndexerMetadata, batch: BatchMetadata, decodes: int, settings: SparseMLAConfig) -> None:
    ratio, rows = settings.compress_ratio, settings.rows_per_block
    tokens = tokens_of(batch, ratio)
    decode_tokens = int(batch.query_start_loc[decodes])
    counts = (decodes, batch.num_reqs - decodes, decode_tokens, len(tokens) - decode_tokens)
    assert counts == (built.num_decodes, built.num_prefills, built.num_decode_tokens, built.num_prefill_tokens)
    assert (built.num_actual_tokens, built.block_size, built.topk_tokens) == (len(tokens), settings.block_size, 16)
    slots = batch.slot_mapping
    if settings.is_v4:
        slots = oracle_v4.compressed_slot_mapping(
            len(tokens), batch.query_start_loc, batch.seq_lens, batch.block_table, rows, ratio, len(tokens),
            batch.slot_mapping,
        )  # fmt: skip
    check_array(kind, built.slot_mapping, slots, np.int64)
    table = batch.block_table[:, : -(-MAX_MODEL_LEN // settings.block_size)]
    check_decodes(kind, built, tokens[:decode_tokens], table, settings)
    check_prefills(kind, built, tokens, decode_tokens, batch, table, settings)


def check_array(kind, array, want, dtype) -> None:
    assert kind.is_mine(array)
    assert describe("array", array).dtype == dtype
    np.testing.assert_array_equal(kind.take(array), want)


def check_decodes(kind, built: IndexerMetadata, tokens: list[tuple[int, int]], table, settings) -> None:
    decode = built.decode
    if not tokens:
        assert decode is None
        return
    requests = tokens[-1][0] + 1  # those without tokens behind the last are left out
    of_request = [[(t, seen) for t, (r, seen) in enumerate(tokens) if r == b] for b in range(requests)]
    n = max(map(len, of_request))
    lens, sources, places = np.zeros((requests, n), int), np.zeros((requests, n), int), []
    for b, own in enumerate(of_request):
        for j, (t, seen) in enumerate(own):
            lens[b, j], sources[b, j] = seen, t
            places.append(b * n + j)
    assert decode.query_len == n
    assert decode.requires_padding == any(len(own) != n for own in of_request)
    check_array(kind, decode.block_table, table[:requests], np.int32)
    check_array(kind, decode.context_lens, lens[:, 0] if n == 1 else lens, np.int32)
    check_array(kind, decode.padded_rows, sources.reshape(-1), np.int64)
    check_array(kind, decode.token_rows, places, np.int64)
    assert decode.max_context_len == MAX_MODEL_LEN // settings.compress_ratio
    check_schedule(kind, decode, lens, table[:requests], settings)
    assert not decode.choose_all


def check_schedule(kind, decode, lens, table, settings) -> None:
    """One where a kernel takes it: on Hopper, for blocks that hold a multiple of 64 keys."""
    device = gpu(0) if kind.on_gpu else None
    if device is None or device.capability != 90 or settings.rows_per_block % 64:
        assert decode.schedule is None
        return
    width, rows = decode.max_context_len, settings.rows_per_block
    check_array(kind, decode.schedule, oracle_indexer.schedule(lens, table, width, rows, device.sms), np.int32)


def check_prefills(kind, built, tokens, decode_tokens: int, batch, table, settings) -> None:
    at, in_workspace = decode_tokens, None
    for chunk in built.prefill_chunks:
        assert chunk.tokens_slice.start == at < chunk.tokens_slice.stop
        at = chunk.tokens_slice.stop
        cu = kind.take(chunk.cu_seq_lens).tolist()
        own = tokens[chunk.tokens_slice]
        # Which requests the chunk has, by its block table: they must be those of its tokens.
        blocks = kind.take(chunk.block_table)
        first = next(r for r in range(len(table)) if (table[r] == blocks[0]).all())
        np.testing.assert_array_equal(blocks, table[first : first + len(blocks)])
        assert {r for r, _ in own} <= set(range(first, first + len(blocks)))
        keys = [
            n // settings.compress_ratio if q else 0
            for q, n in zip(batch.query_lens[first:].tolist(), batch.seq_lens[first:].tolist(), strict=True)
        ][: len(blocks)]  # fmt: skip
        assert cu == [sum(keys[:i]) for i in range(len(keys) + 1)]
        assert chunk.num_keys == sum(keys) <= 5 * (MAX_MODEL_LEN // settings.compress_ratio)
        check_array(kind, chunk.starts, [cu[r - first] for r, _ in own], np.int32)
        check_array(kind, chunk.ends, [cu[r - first] + seen for r, seen in own], np.int32)
        assert chunk.choose_all == all(seen <= 16 for _, seen in own)
        width = max(-(-chunk.num_keys // 4) * 4, 4)
        assert len(own) == 1 or 4 * len(own) * width <= settings.max_workspace_bytes
        # Keys are gathered once for the chunks of a request, by the first that is scored.
        if chunk.choose_all:
            assert not chunk.gathers
        else:
            assert chunk.gathers == (in_workspace != (first, len(blocks)))
            in_workspace = (first, len(blocks))
    assert at == len(tokens)


@pytest.mark.parametrize("max_workspace_bytes", [1, 3000, 9000, 1 << 20])
@pytest.mark.parametrize("speculative", [0, 2])
@pytest.mark.parametrize("ratio", [1, 4, "C1A", "C2A"])
def test_batches(kind, rng, ratio: int | str, speculative: int, max_workspace_bytes: int) -> None:
    """Batches one after the other: mixed, of decodes alone, of prefills alone."""
    block_size = int(rng.choice([4, 8, 64, 64 * MODELS[ratio].get("compress_ratio", 1)]))
    settings = config(
        ratio, num_speculative_tokens=speculative, max_workspace_bytes=max_workspace_bytes, block_size=block_size
    )
    builder = IndexerMetadataBuilder(settings, place_of(kind), num_blocks=10**6)
    assert builder.decode_threshold == 1 + speculative
    for _ in range(8):
        batch, decodes = random_batch(rng, speculative, block_size)
        check(kind, builder.build(batch), batch, decodes, settings)


def test_requests_are_joined_while_they_fit() -> None:
    """Keys and logits that fit exactly, and by one too many; a request that is too large alone is cut."""
    lens = np.array([3, 3, 3])
    for keys, rows, nbytes, want in (
        ([8, 8, 8], 24, 4 * 24 * 9, [(0, 3, 0, 9)]),
        ([8, 8, 8], 23, 4 * 24 * 9, [(0, 2, 0, 6), (2, 3, 0, 3)]),
        ([8, 8, 8], 24, 4 * 24 * 9 - 1, [(0, 2, 0, 6), (2, 3, 0, 3)]),
        ([8, 8, 8], 24, 4 * 8 * 2, [(r, r + 1, q, min(q + 2, 3)) for r in range(3) for q in (0, 2)]),
        ([7, 0, 1], 8, 4 * 8 * 9, [(0, 3, 0, 9)]),
        ([5, 0, 0], 8, 4 * 8 * 6, [(0, 2, 0, 6), (2, 3, 0, 3)]),
        ([8, 8, 8], 8, 1, [(r, r + 1, q, q + 1) for r in range(3) for q in range(3)]),
    ):
        assert split_indexer_chunks(lens, np.array(keys), rows, nbytes) == want
    assert split_indexer_chunks(np.array([0, 2, 0]), np.array([0, 6, 0]), 8, 999) == [(0, 3, 0, 2)]
    assert split_indexer_chunks(np.array([0]), np.array([0]), 8, 999) == []


def test_padding_requests_without_tokens(kind, rng) -> None:
    """Behind the last decode with tokens they need no padding; before it they do."""
    builder = IndexerMetadataBuilder(config(num_speculative_tokens=1), place_of(kind))
    for query_lens, padded, requests in (([2, 2, 0, 0], False, 2), ([2, 0, 2], True, 3), ([0, 0], None, 0)):
        batch = batch_of(rng, query_lens, [n and 9 for n in query_lens])
        decode = builder.build(batch).decode
        assert (decode is None) == (requests == 0)
        if decode is not None:
            assert (decode.requires_padding, len(decode.block_table)) == (padded, requests)


def test_sequences_that_are_never_longer_than_topk(rng) -> None:
    """Only then are decodes not scored: a captured step must hold for any lengths."""
    batch = batch_of(rng, [1, 1], [3, 5])
    for longest, want in ((16, True), (17, False)):
        built = IndexerMetadataBuilder(config(max_model_len=longest)).build(batch)
        assert built.decode.choose_all == want


def test_no_requests(kind, rng) -> None:
    settings = config()
    check(kind, IndexerMetadataBuilder(settings, place_of(kind)).build(batch_of(rng, [], [])),
          batch_of(rng, [], []), 0, settings)  # fmt: skip


def test_buffers_stay_where_they_are(kind, rng) -> None:
    """A smaller batch after a larger one: the same addresses, and nothing of the larger one past the smaller."""
    builder = IndexerMetadataBuilder(config(num_speculative_tokens=1), place_of(kind))
    first = builder.build(batch_of(rng, [2] * 8 + [7] * 4, [30] * 12))
    narrow = batch_of(rng, [2, 3], [9, 12])
    second = builder.build(BatchMetadata(
        narrow.query_start_loc, narrow.seq_lens, narrow.block_table[:, :2], narrow.slot_mapping, narrow.positions
    ))  # fmt: skip

    def addresses(built: IndexerMetadata) -> list[int]:
        decode, chunk = built.decode, built.prefill_chunks[0]
        arrays = (built.slot_mapping, decode.block_table, decode.context_lens, decode.padded_rows, decode.token_rows,
                  chunk.cu_seq_lens)  # fmt: skip
        return [describe("array", array).ptr for array in arrays]

    assert addresses(first) == addresses(second)
    assert (kind.take(first.slot_mapping)[5:] == -1).all()  # where the second's lie now
    assert not kind.take(first.decode.context_lens)[1:].any()
    assert not kind.take(first.decode.padded_rows).reshape(-1)[2:].any()
    assert not kind.take(first.prefill_chunks[0].ends)[3:].any()
    assert (kind.take(second.prefill_chunks[0].block_table)[:, 2:] == -1).all()


def test_hostile_batches(rng) -> None:
    builder = IndexerMetadataBuilder(config(), num_blocks=1000)
    beyond = batch_of(rng, [1, 3], [9, 12])
    beyond.slot_mapping[...] = [-1, 3, 8000, -1]
    narrow = BatchMetadata([0, 1], [9], np.zeros((1, 1), int), [3], [8])
    for batch, message in (
        (batch_of(rng, [1] * 13, [1] * 13), "batch: expected at most 12 requests"),
        (batch_of(rng, [151], [151]), "batch: expected at most 150 query tokens"),
        (batch_of(rng, [1], [204]), "batch: expected at most 203 tokens in a sequence"),
        (beyond, "slot_mapping: token 2 goes to slot 8000, the cache has 8000 slots"),
        (narrow, "block_table: request 0 has 9 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            builder.build(batch)


def test_configs_of_layers_without_an_indexer_are_refused() -> None:
    for ratio in (1, 128):
        with pytest.raises(ValueError, match=rf"config: layers .* kind 'v4' have compress_ratio 4, got {ratio}"):
            IndexerMetadataBuilder(config(4, compress_ratio=ratio, block_size=128))
    with pytest.raises(ValueError, match=r"config: layers .* kind 'v41' have compress_ratio 1 or 2, got 0"):
        IndexerMetadataBuilder(config("C1A", compress_ratio=0))
    with pytest.raises(TypeError, match="config: expected"):
        IndexerMetadataBuilder("v32")
