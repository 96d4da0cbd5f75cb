"""The V3.2 metadata builder against loops written from the specification, over every kind of array."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_mla
from cupy_mla import SparseMLAConfig
from cupy_mla.bridges import Place, describe
from cupy_mla.metadata import sparse_mla
from cupy_mla.metadata.batch import BatchMetadata, split_decodes_and_prefills
from cupy_mla.metadata.sparse_mla import (
    FP8KernelMetadata,
    FP8SeparatePrefillDecode,
    SparseMLAMetadata,
    SparseMLAMetadataBuilder,
)

SIZES = {"max_num_seqs": 12, "max_num_batched_tokens": 60, "max_model_len": 40, "block_size": 8, "topk": 16}


def config(**changes) -> SparseMLAConfig:
    return SparseMLAConfig(**{"num_heads": 64, "cache_layout": "v32_fp8", **SIZES, **changes})


def place_of(kind) -> Place:
    return Place.of(kind.put(np.zeros(1, np.float32)))


def batch_of(rng: np.random.Generator, query_lens: list[int], seq_lens: list[int], width: int = 5) -> BatchMetadata:
    tokens = sum(query_lens)
    return BatchMetadata(
        np.concatenate([[0], np.cumsum(query_lens)]).astype(int),
        seq_lens,
        rng.integers(0, 1000, (len(query_lens), width)),
        rng.integers(-1, 8000, tokens),
        rng.integers(0, 40, tokens),
    )


def random_batch(rng: np.random.Generator, speculative: int = 0) -> BatchMetadata:
    decodes, prefills = int(rng.integers(0, 6)), int(rng.integers(0, 7))
    query_lens = [1 + speculative] * decodes + rng.integers(1, 9, prefills).tolist()
    seq_lens = [int(rng.integers(n, 41)) for n in query_lens]
    return batch_of(rng, query_lens, seq_lens, int(rng.integers(5, 8)))


def check_common(kind, built: SparseMLAMetadata, batch: BatchMetadata) -> None:
    assert (built.num_reqs, built.num_actual_tokens) == (batch.num_reqs, batch.num_actual_tokens)
    assert (built.max_query_len, built.max_seq_len) == (batch.max_query_len, batch.max_seq_len)
    assert (built.block_size, built.topk_tokens) == (8, 16)
    request = [r for r, n in enumerate(batch.query_lens) for _ in range(n)]
    np.testing.assert_array_equal(kind.take(built.req_id_per_token), request)
    np.testing.assert_array_equal(kind.take(built.query_start_loc), batch.query_start_loc)
    np.testing.assert_array_equal(kind.take(built.slot_mapping), batch.slot_mapping)
    table = kind.take(built.block_table)
    assert table.shape == (batch.num_reqs, 5)  # 40 tokens in blocks of 8
    np.testing.assert_array_equal(table, batch.block_table[:, :5])
    types = {"query_start_loc": "int32", "slot_mapping": "int64", "block_table": "int32", "req_id_per_token": "int32"}
    for name, dtype in types.items():
        assert kind.is_mine(getattr(built, name))
        assert describe(name, getattr(built, name)).dtype == dtype


def check_separate(kind, separate: FP8SeparatePrefillDecode, batch: BatchMetadata, threshold: int) -> None:
    counts = split_decodes_and_prefills(batch, threshold, require_uniform=True)
    num_decodes, num_prefills, decode_tokens, prefill_tokens = counts
    assert (separate.num_decodes, separate.num_prefills) == (num_decodes, num_prefills)
    assert (separate.num_decode_tokens, separate.num_prefill_tokens) == (decode_tokens, prefill_tokens)
    if decode_tokens == 0:
        assert separate.decode is None
    else:
        np.testing.assert_array_equal(kind.take(separate.decode.seq_lens), batch.seq_lens[:num_decodes])
        assert separate.decode.decode_query_len == batch.query_lens[:num_decodes].max()
        assert separate.decode.kernel_metadata == FP8KernelMetadata()
    if num_prefills == 0:
        assert separate.prefill is None
        return
    prefill = separate.prefill
    np.testing.assert_array_equal(kind.take(prefill.seq_lens), batch.seq_lens[num_decodes:])
    request = [max(r - num_decodes, -1) for r, n in enumerate(batch.query_lens) for _ in range(n)]
    np.testing.assert_array_equal(kind.take(prefill.request_ids), request)
    at, starts = num_decodes, []
    for chunk in prefill.chunks:
        assert chunk.req_start_idx == at
        end = at + len(kind.take(chunk.seq_lens))
        lens = batch.seq_lens[at:end].tolist()
        assert sum(lens) == chunk.chunk_tot_seqlen <= 200
        assert end == batch.num_reqs or sum(lens) + batch.seq_lens[end] > 200
        np.testing.assert_array_equal(kind.take(chunk.seq_lens), lens)
        np.testing.assert_array_equal(kind.take(chunk.block_table), batch.block_table[at:end, :5])
        assert chunk.tokens_slice == slice(int(batch.query_start_loc[at]), int(batch.query_start_loc[end]))
        own = [sum(lens[:i]) for i in range(len(lens))]
        np.testing.assert_array_equal(kind.take(chunk.workspace_starts), own)
        starts += own
        at = end
    assert at == batch.num_reqs
    np.testing.assert_array_equal(kind.take(prefill.workspace_starts), starts)


@pytest.mark.parametrize("speculative", [0, 2])
def test_separate_mode(kind, rng, speculative: int) -> None:
    builder = SparseMLAMetadataBuilder(config(num_speculative_tokens=speculative), place_of(kind))
    for _ in range(8):
        batch = random_batch(rng, speculative)
        built = builder.build(batch)
        check_common(kind, built, batch)
        assert not built.fp8_use_mixed_batch
        check_separate(kind, built.fp8_extra_metadata, batch, 1 + speculative)


def test_workspace_starts_are_those_of_the_specification(kind, rng, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_mla, "prefill_workspace_size", lambda max_model_len: 25)
    builder = SparseMLAMetadataBuilder(config(max_model_len=20), place_of(kind))
    prefill = builder.build(batch_of(rng, [2] * 4, [10, 15, 20, 5])).fp8_extra_metadata.prefill
    assert [c.req_start_idx for c in prefill.chunks] == [0, 2]
    np.testing.assert_array_equal(kind.take(prefill.workspace_starts), [0, 10, 0, 20])


def test_mixed_mode(kind, rng) -> None:
    builder = SparseMLAMetadataBuilder(config(num_heads=16), place_of(kind))
    for _ in range(3):
        batch = random_batch(rng)
        built = builder.build(batch)
        check_common(kind, built, batch)
        assert built.fp8_use_mixed_batch
        assert built.fp8_extra_metadata == FP8KernelMetadata()


def test_bf16(kind, rng) -> None:
    builder = SparseMLAMetadataBuilder(config(num_heads=16, cache_layout="bf16"), place_of(kind))
    batch = random_batch(rng)
    built = builder.build(batch)
    check_common(kind, built, batch)
    assert not built.fp8_use_mixed_batch
    assert built.fp8_extra_metadata is None


@pytest.mark.parametrize(("heads", "below", "mixed"), [(31, 32, True), (32, 32, False), (64, 65, True), (1, 0, False)])
def test_the_threshold_is_a_setting(rng, heads: int, below: int, mixed: bool) -> None:
    for layout in ("v32_fp8", "bf16"):
        setup = config(num_heads=heads, mixed_below_heads=below, cache_layout=layout)
        assert setup.use_mixed_batch == (mixed and layout == "v32_fp8")
        assert SparseMLAMetadataBuilder(setup).build(random_batch(rng)).fp8_use_mixed_batch == setup.use_mixed_batch


def test_buffers_stay_where_they_are(kind, rng) -> None:
    """A smaller batch after a larger one: same addresses, and nothing of the larger one is left past the smaller."""
    builder = SparseMLAMetadataBuilder(config(), place_of(kind))
    large = batch_of(rng, [1] * 4 + [7] * 8, [30] * 12, 5)
    small = batch_of(rng, [1, 3], [9, 12], 2)
    first, addresses = builder.build(large), []
    for built in (first, builder.build(small)):
        arrays = [built.query_start_loc, built.slot_mapping, built.block_table, built.req_id_per_token]
        decode, prefill = built.fp8_extra_metadata.decode, built.fp8_extra_metadata.prefill
        arrays += [decode.seq_lens, prefill.request_ids, prefill.chunks[0].workspace_starts]
        addresses.append([describe("array", array).ptr for array in arrays])
    assert addresses[0] == addresses[1]
    decode, prefill = first.fp8_extra_metadata.decode, first.fp8_extra_metadata.prefill  # where the second's lie now
    np.testing.assert_array_equal(kind.take(first.req_id_per_token), [0, 1, 1, 1] + [0] * 56)
    assert (kind.take(first.slot_mapping)[4:] == -1).all()
    np.testing.assert_array_equal(kind.take(first.query_start_loc), [0, 1] + [4] * 11)
    np.testing.assert_array_equal(kind.take(decode.seq_lens), [9, 12, 0, 0])
    assert not kind.take(prefill.seq_lens).any()
    np.testing.assert_array_equal(kind.take(prefill.request_ids), [-1, 0, 0, 0] + [-1] * 56)
    assert (kind.take(first.block_table)[:2, 2:] == -1).all()


def test_padding_requests_without_tokens(kind, rng) -> None:
    builder = SparseMLAMetadataBuilder(config(num_speculative_tokens=1), place_of(kind))
    built = builder.build(batch_of(rng, [2, 2, 0, 0], [9, 7, 0, 0])).fp8_extra_metadata
    assert (built.num_decodes, built.num_prefills, built.num_decode_tokens) == (4, 0, 4)
    assert built.decode.decode_query_len == 2


def test_tokens_that_pad_the_batch(kind, rng) -> None:
    builder = SparseMLAMetadataBuilder(config(num_speculative_tokens=1), place_of(kind))
    given = batch_of(rng, [2, 2, 0], [9, 7, 0])
    for padding, query_len in ((4, 2), (3, 1)):
        tokens = 4 + padding
        slots, positions = (np.append(a, [-1] * padding) for a in (given.slot_mapping, given.positions))
        batch = BatchMetadata(given.query_start_loc, given.seq_lens, given.block_table, slots, positions)
        built = builder.build(batch)
        assert (built.num_actual_tokens, built.fp8_extra_metadata.num_decode_tokens) == (tokens, tokens)
        assert built.fp8_extra_metadata.decode.decode_query_len == query_len
        np.testing.assert_array_equal(kind.take(built.req_id_per_token), [0, 0, 1, 1] + [0] * padding)
        np.testing.assert_array_equal(kind.take(built.slot_mapping)[4:], -1)


def test_lengths_that_the_device_has(kind, rng) -> None:
    """They are what the metadata hold; chunks have room for what the host says at most."""
    builder = SparseMLAMetadataBuilder(config(), place_of(kind))
    batch = batch_of(rng, [1, 5, 6], [20, 30, 40])
    lens = np.array([9, 5, 33], np.int32)
    built = builder.build(batch, seq_lens=kind.put(lens)).fp8_extra_metadata
    np.testing.assert_array_equal(kind.take(built.decode.seq_lens), [9])
    np.testing.assert_array_equal(kind.take(built.prefill.seq_lens), [5, 33])
    (chunk,) = built.prefill.chunks
    np.testing.assert_array_equal(kind.take(chunk.workspace_starts), [0, 30])
    assert chunk.chunk_tot_seqlen == 70
    again = builder.build(batch).fp8_extra_metadata
    np.testing.assert_array_equal(kind.take(again.prefill.seq_lens), [30, 40])
    for wrong, error, message in (
        (lens[:2], ValueError, r"seq_lens: expected shape \[3\]"),
        (lens.astype(np.int64), TypeError, "seq_lens: expected dtype int32"),
    ):
        with pytest.raises(error, match=message):
            builder.build(batch, seq_lens=kind.put(wrong))
    batch.slot_mapping[:] = -1
    with cupy_mla.set_checks(True), pytest.raises(IndexError, match=r"seq_lens\[1\] is 31, the batch says at most 30"):
        builder.build(batch, seq_lens=kind.put(np.array([9, 31, 5], np.int32)))


def test_compressed_lengths_that_the_device_has(kind, rng) -> None:
    v4 = {"d_qk": 512, "cache_layout": "v4_fp8", "compress_ratio": 4}
    builder = SparseMLAMetadataBuilder(config(**v4), place_of(kind))
    built = builder.build(batch_of(rng, [1, 5], [20, 30]), seq_lens=kind.put(np.array([7, 29], np.int32)))
    np.testing.assert_array_equal(kind.take(built.compressed_seq_lens), [1, 7])


def test_no_requests(kind, rng) -> None:
    builder = SparseMLAMetadataBuilder(config(), place_of(kind))
    built = builder.build(batch_of(rng, [], []))
    assert (built.num_reqs, built.num_actual_tokens) == (0, 0)
    assert built.fp8_extra_metadata == FP8SeparatePrefillDecode(0, 0, 0, 0)


def test_hostile_batches_change_nothing(kind, rng) -> None:
    builder = SparseMLAMetadataBuilder(config(), place_of(kind), num_blocks=1000)
    built = builder.build(batch_of(rng, [1, 3], [9, 12]))
    extra = built.fp8_extra_metadata
    arrays = [built.query_start_loc, built.slot_mapping, built.block_table, built.req_id_per_token,
              extra.decode.seq_lens, extra.prefill.seq_lens, extra.prefill.request_ids]  # fmt: skip
    before = [kind.take(array).tobytes() for array in arrays]
    beyond = batch_of(rng, [1, 3], [9, 12])
    beyond.slot_mapping[2] = 8000
    for batch, message in (
        (batch_of(rng, [1] * 13, [1] * 13), "batch: expected at most 12 requests"),
        (batch_of(rng, [31, 30], [31, 30]), "batch: expected at most 60 query tokens"),
        (batch_of(rng, [1], [41], width=6), "batch: expected at most 40 tokens in a sequence"),
        (batch_of(rng, [1], [33], width=4), "block_table: request 0 has 33 tokens"),
        (beyond, "slot_mapping: token 2 goes to slot 8000, the cache has 8000 slots"),
    ):
        with pytest.raises(ValueError, match=message):
            builder.build(batch)
    assert [kind.take(array).tobytes() for array in arrays] == before


@pytest.mark.gpu
def test_build_does_not_wait_for_the_device(kind, rng) -> None:
    """Builds return while the stream is held up by a kernel that waits for the host, and arrive in order after it."""
    if not kind.on_gpu:
        pytest.skip("a matter of streams")
    import cupy

    place = place_of(kind)
    builder = SparseMLAMetadataBuilder(config(), place)
    hold = cupy.RawKernel(
        """extern "C" __global__ void hold(volatile int* go, long long most) {
            const long long start = clock64();
            while (*go == 0 && clock64() - start < most) {}
        }""",
        "hold",
    )  # fmt: skip
    go = np.frombuffer(cupy.cuda.alloc_pinned_memory(4), np.int32, 1)
    go[0] = 1
    stream = cupy.cuda.ExternalStream(place.stream())
    with stream:
        hold((1,), (1,), (go.ctypes.data, np.int64(1)))  # compiled and loaded
    first, second = random_batch(rng), random_batch(rng)
    builder.build(first)
    stream.synchronize()
    go[0] = 0
    with stream:
        hold((1,), (1,), (go.ctypes.data, np.int64(20_000_000_000)))  # some ten seconds, if nobody lets it go
    builder.build(first)
    built = builder.build(second)
    held = not stream.done
    go[0] = 1
    stream.synchronize()
    assert held, "a build waited for the stream"
    check_common(kind, built, second)
    check_separate(kind, built.fp8_extra_metadata, second, 1)
