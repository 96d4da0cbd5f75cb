"""The batch description: its checks, and how it is split. Loops written from the specification are the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cupy_mla
from cupy_mla.metadata.batch import (
    BatchMetadata,
    prefill_workspace_size,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
    split_decodes_and_prefills,
    split_prefill_chunks,
)

GOOD = {
    "query_start_loc": [0, 1, 2, 7],
    "seq_lens": [9, 4, 5],
    "block_table": [[3, 1, 0], [2, 0, 0], [4, 5, 0]],
    "slot_mapping": [8, 11, 16, 17, 18, 19, -1],
    "positions": [8, 3, 0, 1, 2, 3, 4],
}


def batch_of(query_lens: list[int], padding: int = 0) -> BatchMetadata:
    starts = np.concatenate([[0], np.cumsum(query_lens, dtype=np.int64)])
    table, per_token = np.zeros((len(query_lens), 1), int), np.full(int(starts[-1]) + padding, -1)
    return BatchMetadata(starts, query_lens, table, per_token, per_token)


def test_derived_numbers_and_types() -> None:
    batch = BatchMetadata(**GOOD)
    assert (batch.num_reqs, batch.num_actual_tokens, batch.max_query_len, batch.max_seq_len) == (3, 7, 5, 9)
    assert batch.query_lens.tolist() == [1, 1, 5]
    for name, dtype in (("query_start_loc", "int32"), ("seq_lens", "int32"), ("block_table", "int32"),
                        ("slot_mapping", "int64"), ("positions", "int64")):  # fmt: skip
        assert getattr(batch, name).dtype == dtype
    batch.check_cache(block_size=4, num_blocks=6)


def test_a_batch_without_requests() -> None:
    batch = BatchMetadata([0], [], np.zeros((0, 4), int), [], [])
    assert (batch.num_reqs, batch.num_actual_tokens, batch.max_query_len, batch.max_seq_len) == (0, 0, 0, 0)
    batch.check_cache(64, 1)
    assert split_decodes_and_prefills(batch) == (0, 0, 0, 0)
    assert split_prefill_chunks([], 10) == []


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query_start_loc": []}, ValueError, "query_start_loc: expected R . 1 offsets"),
        ({"query_start_loc": [1, 2, 3, 7]}, ValueError, "query_start_loc: expected R . 1 offsets from 0 on, got 1"),
        ({"query_start_loc": [0, 2, 1, 7]}, ValueError, "query_start_loc: offsets must not go down, .* at request 1"),
        ({"query_start_loc": [0.0, 1.0, 2.0, 7.0]}, TypeError, "query_start_loc: expected integers, got dtype float64"),
        ({"query_start_loc": [0, 1, 2, 2**31]}, ValueError, "query_start_loc: expected values that fit int32"),
        ({"query_start_loc": [[0, 1, 2, 7]]}, ValueError, "query_start_loc: expected 1 axes"),
        ({"seq_lens": [9, 4]}, ValueError, "seq_lens: query_start_loc gives 3 entries, one a request, got 2"),
        ({"block_table": [[3, 1, 0], [2, 0, 0]]}, ValueError, "block_table: query_start_loc gives 3 .*got 2"),
        ({"block_table": [3, 1, 0]}, ValueError, "block_table: expected 2 axes"),
        ({"slot_mapping": [8, 11, 16]}, ValueError, "slot_mapping: query_start_loc gives 7 .*got 3"),
        ({"positions": [0] * 8}, ValueError, "positions: slot_mapping gives 7 entries.*got 8"),
        ({"slot_mapping": [0] * 6, "positions": [0] * 6}, ValueError, "slot_mapping: query_start_loc gives 7 .*got 6"),
        ({"slot_mapping": [-1] * 8 + [5], "positions": [0] * 9}, ValueError,
         "slot_mapping: token 8 goes to slot 5, but tokens from 7 on pad the batch"),
        ({"seq_lens": [9, 4, 4]}, ValueError, "seq_lens: request 2 has 5 query tokens in a sequence of 4"),
    ],
)  # fmt: skip
def test_each_defect_has_its_error(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BatchMetadata(**{**GOOD, **change})


def test_a_table_too_narrow_and_a_slot_beyond_the_cache() -> None:
    batch = BatchMetadata(**GOOD)
    batch.check_cache(3)
    with pytest.raises(ValueError, match=r"block_table: request 0 has 9 tokens, which take 5 blocks of 2; .* 3 wide"):
        batch.check_cache(2)
    batch.check_cache(4, 6)
    small = BatchMetadata(**{**GOOD, "block_table": [[3, 1, 0], [2, 0, 0], [2, 1, 0]]})
    with pytest.raises(ValueError, match="slot_mapping: token 5 goes to slot 19, the cache has 16 slots"):
        small.check_cache(4, 4)


def test_blocks_outside_the_cache_are_an_error() -> None:
    """Always: the table is on the host. What stands past a sequence's last block is not looked at."""
    batch = BatchMetadata(**GOOD)
    batch.check_cache(4, 6)
    with pytest.raises(ValueError, match="block_table: block 1 of request 2 is 5, the cache has 5 blocks"):
        batch.check_cache(4, 5)
    for last, wrong in ((-1, False), (10**6, False), (-1, True), (10**6, True)):
        table = np.array(GOOD["block_table"])
        table[1, 0 if wrong else 1] = last
        batch = BatchMetadata(**{**GOOD, "block_table": table})
        batch.check_cache(4)  # the cache's size is not known
        if wrong:
            with pytest.raises(ValueError, match=f"block_table: block 0 of request 1 is {last}"):
                batch.check_cache(4, 6)
        else:
            batch.check_cache(4, 6)


def test_slots_written_twice_and_positions_outside_a_sequence_are_found_when_asked() -> None:
    for change, message in (
        ({"slot_mapping": [8, 11, 16, 17, 18, 8, -1]}, "slot_mapping: tokens 0 and 5 both go to slot 8"),
        ({"positions": [8, 4, 0, 1, 2, 3, 4]}, "positions: token 1 has position 4, its sequence 4 tokens"),
        ({"positions": [8, 3, -1, 1, 2, 3, 4]}, "positions: token 2 has position -1, its sequence 5 tokens"),
    ):
        batch = BatchMetadata(**{**GOOD, **change})
        batch.check_cache(4, 6)
        with cupy_mla.set_checks(True), pytest.raises(ValueError, match=message):
            batch.check_cache(4, 6)


def split_oracle(query_lens: list[int], threshold: int, uniform: bool, padding: int) -> tuple[int, int, int, int]:
    """What vLLM 0.22's `split_decodes_and_prefills` does with such a batch, request by request."""
    tokens = sum(query_lens) + padding
    everything = (len(query_lens), 0, tokens, 0)
    if max(query_lens, default=0) <= threshold and (not uniform or threshold == 1):
        return everything
    if uniform and query_lens and query_lens[0] <= threshold and set(query_lens) <= {query_lens[0], 0}:
        return everything
    decodes = 0
    for n in query_lens:
        if n > threshold or (uniform and n != query_lens[0]):
            break
        decodes += 1
    if decodes == len(query_lens):
        return everything
    of_decodes = sum(query_lens[:decodes])
    return decodes, len(query_lens) - decodes, of_decodes, tokens - of_decodes


@given(st.lists(st.integers(0, 5), max_size=9), st.integers(1, 4), st.booleans(), st.integers(0, 3))
@example([1, 1, 1], 1, False, 0)
@example([1, 1, 5, 6], 1, False, 2)
@example([2, 1, 2, 4, 5, 6], 4, False, 0)
@example([2, 2, 2, 4, 5, 6], 5, True, 0)
@example([2, 2, 0, 0], 3, True, 4)
@example([2, 2, 0, 5], 3, True, 0)
@example([0, 2, 2], 3, True, 0)
@example([0, 1, 1], 1, True, 0)
@example([1, 0, 5], 1, True, 0)
@example([5, 1, 1], 1, False, 0)
@example([4, 4], 3, True, 0)
def test_split_decodes_and_prefills(query_lens: list[int], threshold: int, uniform: bool, padding: int) -> None:
    got = split_decodes_and_prefills(batch_of(query_lens, padding), threshold, uniform)
    assert got == split_oracle(query_lens, threshold, uniform, padding)


def test_lengths_that_are_none() -> None:
    for lens, error in (([1.5], TypeError), ([-4, 3], ValueError), (np.ma.masked_equal([3], 3), TypeError)):
        with pytest.raises(error, match=r"^seq_lens: "):
            split_prefill_chunks(lens, 10)
    with pytest.raises(TypeError, match=r"^decode_threshold: expected an integer"):
        split_decodes_and_prefills(batch_of([1]), 1.5)
    with pytest.raises(
        ValueError, match=r"^max_model_len must be in 1\.\.429496729, so that int32 counts them, got -1"
    ):
        prefill_workspace_size(-1)
    for size in (1.0, "1", None):
        with pytest.raises(TypeError, match=r"^batch_size: expected an integer"):
            reshape_query_for_spec_decode(np.zeros((4, 2, 8)), size)
    with pytest.raises(TypeError, match=r"^q: expected a NumPy"):
        reshape_query_for_spec_decode([1, 2], 2)


def test_split_examples_worked_by_hand() -> None:
    assert split_decodes_and_prefills(batch_of([1, 1, 7, 1])) == (2, 2, 2, 8)
    assert split_decodes_and_prefills(batch_of([2, 1, 2, 4, 5, 6]), 4) == (4, 2, 9, 11)
    assert split_decodes_and_prefills(batch_of([2, 1, 2, 4]), 4, require_uniform=True) == (1, 3, 2, 7)
    assert split_decodes_and_prefills(batch_of([2, 2, 0, 0]), 2, require_uniform=True) == (4, 0, 4, 0)
    assert split_decodes_and_prefills(batch_of([2, 2, 0, 9]), 2, require_uniform=True) == (2, 2, 4, 9)


@pytest.mark.parametrize(
    ("lens", "size", "offset", "chunks"),
    [
        ([2, 3, 4, 2], 5, 0, [(0, 2), (2, 3), (3, 4)]),
        ([5, 5, 5], 5, 0, [(0, 1), (1, 2), (2, 3)]),
        ([1, 1, 1], 10, 0, [(0, 3)]),
        ([10, 15, 20, 5], 25, 3, [(3, 5), (5, 7)]),
        ([0, 0], 1, 0, [(0, 2)]),
    ],
)
def test_split_prefill_chunks(lens: list[int], size: int, offset: int, chunks: list[tuple[int, int]]) -> None:
    assert split_prefill_chunks(np.array(lens), size, offset) == chunks


@given(st.lists(st.integers(0, 7), max_size=12), st.integers(7, 20), st.integers(0, 3))
def test_chunks_are_greedy(lens: list[int], size: int, offset: int) -> None:
    chunks = [(a - offset, b - offset) for a, b in split_prefill_chunks(lens, size, offset)]
    assert [r for a, b in chunks for r in range(a, b)] == list(range(len(lens)))
    for a, b in chunks:
        assert a < b
        assert sum(lens[a:b]) <= size
        assert b == len(lens) or sum(lens[a : b + 1]) > size


def test_a_sequence_longer_than_the_workspace() -> None:
    with pytest.raises(ValueError, match="seq_lens: request 6 has 9 tokens, the prefill workspace has 8 rows"):
        split_prefill_chunks([3, 9], 8, request_offset=5)


def test_workspace_size() -> None:
    assert prefill_workspace_size(163840) == 819200


def test_spec_decode_reshapes_are_views(kind) -> None:
    values = np.arange(6 * 2 * 3, dtype=np.float32).reshape(6, 2, 3)
    q = kind.put(values)
    split = reshape_query_for_spec_decode(q[:, :1], 3)
    assert tuple(split.shape) == (3, 2, 1, 3)
    joined = reshape_attn_output_for_spec_decode(split)
    assert tuple(joined.shape) == (6, 1, 3)
    joined[...] = 7
    values[:, :1] = 7
    np.testing.assert_array_equal(kind.take(q), values)


def test_spec_decode_reshapes_refuse() -> None:
    with pytest.raises(ValueError, match="q: 7 tokens cannot be shared out evenly among 2 decodes"):
        reshape_query_for_spec_decode(np.zeros((7, 1, 4)), 2)
    with pytest.raises(ValueError, match="attn_output: expected shape"):
        reshape_attn_output_for_spec_decode(np.zeros((7, 1, 4)))
    with pytest.raises(ValueError, match="attn_output: the first two axes cannot be viewed as one"):
        reshape_attn_output_for_spec_decode(np.zeros((4, 3, 1, 2))[:, :2])


BUILDERS = {
    cupy_mla.SparseMLAMetadataBuilder: {},
    cupy_mla.IndexerMetadataBuilder: {},
    cupy_mla.SparseSWAMetadataBuilder: {"d_qk": 512, "cache_layout": "v4_fp8", "window": 128},
}


@pytest.mark.parametrize("batch", [None, 3, {"num_reqs": 1}])
@pytest.mark.parametrize("builder", BUILDERS)
def test_every_builder_says_what_is_no_batch(builder, batch) -> None:
    config = cupy_mla.SparseMLAConfig(16, **BUILDERS[builder])
    with pytest.raises(TypeError, match="batch: expected a BatchMetadata, got"):
        builder(config).build(batch)
