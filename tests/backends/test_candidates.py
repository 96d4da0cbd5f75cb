"""Candidate blocks in the indexer's backend: a layer chooses blocks, the layers after it choose rows among their keys.

Against float64 logits, plain loops and a stable sort. Sums are exact and ties abound, so chosen rows and blocks must be
equal.
"""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import IndexerImpl, IndexerMetadataBuilder, SparseMLAConfig, Workspace, indexer_k_quant_and_cache
from cupy_mla.bridges import Place
from cupy_mla.metadata.batch import BatchMetadata
from tests import indexers, oracle_indexer, oracle_indices, oracle_mxfp4
from tests.batches import queries
from tests.kinds import BF16, E4M3, poisoned

LONGEST, TOPK, BLOCKS, HEADS, BLOCK = 170, 12, 4, 8, 16


def config(ratio: int = 1, model: str = "v41") -> SparseMLAConfig:
    kind = {} if model == "v32" else {"d_qk": 512, "cache_layout": "v4_fp8"}
    return SparseMLAConfig(
        8, topk=TOPK, block_size=BLOCK, max_num_seqs=12, max_num_batched_tokens=120, max_model_len=LONGEST,
        num_speculative_tokens=2, compress_ratio=ratio, max_workspace_bytes=6000, model=model, **kind,
    )  # fmt: skip


class Layers:
    """Two layers over one kind of array, after a warm-up: the first chooses blocks, the second uses them."""

    def __init__(self, kind, of: SparseMLAConfig, token_bytes: int) -> None:
        self.kind, self.config, self.token_bytes = kind, of, token_bytes
        place = Place.of(kind.put(np.zeros(1, np.float32)))
        self.builder, workspace = IndexerMetadataBuilder(of, place), Workspace(place)
        self.impl = IndexerImpl(of, workspace)
        arrays = (
            poisoned((5, HEADS, 128), np.uint8), poisoned((5, HEADS), np.float32),
            np.zeros((1, of.rows_per_block, token_bytes), np.uint8),
        )  # fmt: skip
        rows, blocks = (kind.put(np.zeros((6, n), np.int32)) for n in (TOPK, BLOCKS))
        self.impl.forward(None, *map(kind.put, arrays), None, rows, candidate_block_buffer=blocks)
        workspace.lock()

    def run(self, batch: BatchMetadata, cache: np.ndarray, q8s: np.ndarray, ws: np.ndarray, seq_lens=None) -> list:
        """What the first layer chooses, its blocks, and what the second one chooses."""
        kind, tokens = self.kind, q8s.shape[1]
        metadata = self.builder.build(batch, seq_lens=kind.put(seq_lens))
        there = kind.put(cache)
        blocks = kind.put(poisoned((tokens + 2, BLOCKS), np.int32))
        found = []
        for layer in range(2):
            rows = kind.put(poisoned((tokens + 2, TOPK), np.int32))
            got = self.impl.forward(
                None, kind.put(q8s[layer]), kind.put(ws[layer]), there, metadata, rows,
                candidate_block_buffer=blocks, among_candidates=layer == 1,
            )  # fmt: skip
            found.append(kind.take(got))
            assert (kind.take(rows)[tokens:] == poisoned((1,), np.int32)).all()
        assert (kind.take(blocks)[tokens:] == poisoned((1,), np.int32)).all()
        return [found[0], kind.take(blocks)[:tokens], found[1]]


def make_step(rng, of: SparseMLAConfig, query_lens: list[int], token_bytes: int):
    """A batch, a cache of the keys of its sequences, and two layers' queries."""
    rows, requests = of.rows_per_block, len(query_lens)
    seq_lens = [n + int(rng.integers(0, LONGEST + 1 - n)) for n in query_lens]
    batch = queries(query_lens, seq_lens)
    width = -(-LONGEST // BLOCK)
    table = rng.permutation(requests * width).reshape(requests, width).astype(np.int32)
    cache = np.zeros((requests * width + 1, rows, token_bytes), np.uint8)
    for r, seq_len in enumerate(seq_lens):
        slots = [oracle_indices.slot(table, r, p, rows) for p in range(seq_len // of.compress_ratio)]
        keys = indexers.exact_codes(rng, len(slots), 128).view(E4M3).astype(BF16)
        indexer_k_quant_and_cache(keys, cache, np.array(slots, np.int64), "ue8m0")
    slots = [oracle_indices.slot(table, r, p, BLOCK) for r, n in enumerate(query_lens)
             for p in range(seq_lens[r] - n, seq_lens[r])]  # fmt: skip
    whole = BatchMetadata(batch.query_start_loc, batch.seq_lens, table, np.array(slots, np.int64), batch.positions)
    shape = 2, batch.tokens, HEADS
    q8s = indexers.made(True, token_bytes == 68)(rng, *shape, 128)
    return whole, cache, q8s, indexers.exact_weights(rng, *shape)


def expected(of: SparseMLAConfig, batch: BatchMetadata, cache: np.ndarray, q8s: np.ndarray, ws: np.ndarray) -> list:
    chosen: list[list] = [[], [], []]
    t = 0
    for r, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        keys = [oracle_mxfp4.key(cache, oracle_indices.slot(batch.block_table, r, p, of.rows_per_block))
                for p in range(seq_len // of.compress_ratio)]  # fmt: skip
        for p in range(seq_len - query_len, seq_len):
            seen = (p + 1) // of.compress_ratio
            first, second = (
                np.array([oracle_mxfp4.logit(q8s[i, t], key, ws[i, t]) for key in keys[:seen]]) for i in range(2)
            )
            blocks = oracle_mxfp4.best_blocks(first, BLOCKS, 0, seen)
            inside = np.flatnonzero(np.isin(np.arange(seen) // 8, blocks))
            of_second = oracle_indexer.topk(second[inside], TOPK, 0, seen)
            chosen[0].append(oracle_indexer.topk(first, TOPK, 0, seen))
            chosen[1].append(blocks)
            chosen[2].append(np.where(of_second < 0, -1, np.append(inside, -1)[of_second]))
            t += 1
    return [np.array(rows).reshape(t, width) for rows, width in zip(chosen, (TOPK, BLOCKS, TOPK), strict=True)]


@pytest.mark.long(sample=10)
@pytest.mark.parametrize("token_bytes", [132, 68])
@pytest.mark.parametrize(("model", "ratio"), [("v41", 1), ("v41", 2), ("v32", 1), ("v4", 4)])
@pytest.mark.parametrize("query_lens", [[1] * 5, [3] * 4, [2, 1, 3, 0, 1], [1, 2, 6, 4, 20], [40]], ids=str)
def test_two_layers(kind, rng, query_lens: list[int], model: str, ratio: int, token_bytes: int) -> None:
    """Decodes, uneven ones, prefills in several chunks, and both."""
    of = config(ratio, model)
    step = make_step(rng, of, query_lens, token_bytes)
    for got, want in zip(Layers(kind, of, token_bytes).run(*step), expected(of, *step), strict=True):
        np.testing.assert_array_equal(got, want)


def test_lengths_that_only_the_device_knows(kind, rng) -> None:
    of, query_lens = config(), [3] * 4
    batch, cache, q8s, ws = make_step(rng, of, query_lens, 68)
    shorter = np.maximum(batch.seq_lens - [1, 0, 20, 3], 3).astype(np.int32)
    starts = batch.query_start_loc
    known = BatchMetadata(starts, shorter, batch.block_table, batch.slot_mapping, batch.positions)
    got = Layers(kind, of, 68).run(batch, cache, q8s, ws, shorter)
    for one, want in zip(got, expected(of, known, cache, q8s, ws), strict=True):
        np.testing.assert_array_equal(one, want)


def test_padded_batches(kind, rng) -> None:
    """Tokens behind the last request's choose nothing."""
    of = config()
    batch, cache, q8s, ws = make_step(rng, of, [1, 3, 20], 68)
    slots, positions = np.append(batch.slot_mapping, [-1] * 5), np.append(batch.positions, [0] * 5)
    longer = BatchMetadata(batch.query_start_loc, batch.seq_lens, batch.block_table, slots, positions)
    pad = [(0, 0), (0, 5)]
    got = Layers(kind, of, 68).run(longer, cache, np.pad(q8s, [*pad, (0, 0), (0, 0)]), np.pad(ws, [*pad, (0, 0)]))
    for one, want in zip(got, expected(of, batch, cache, q8s, ws), strict=True):
        np.testing.assert_array_equal(one[:24], want)
        assert (one[24:] == -1).all()


def test_errors(rng) -> None:
    of = config()
    batch, cache, q8s, ws = make_step(rng, of, [1] * 5, 68)
    impl = IndexerImpl(of, Workspace(Place("numpy", -1)))
    metadata = IndexerMetadataBuilder(of).build(batch)
    rows, blocks = np.zeros((5, TOPK), np.int32), np.zeros((5, BLOCKS), np.int32)
    good = {"k": None, "q8": q8s[0], "w": ws[0], "kv_cache": cache, "metadata": metadata, "topk_indices_buffer": rows}
    for given, error, message in (
        ({"among_candidates": True}, ValueError, "candidate_block_buffer: expected the one of the layer"),
        ({"among_candidates": 1}, TypeError, "among_candidates"),
        ({"candidate_block_buffer": blocks[:4]}, ValueError, "candidate_block_buffer: expected room for 5 tokens"),
        ({"candidate_block_buffer": blocks[:, :1]}, ValueError, "candidate_block_buffer: expected at most 4096 blocks"),
        (
            {"candidate_block_buffer": blocks.astype(np.int64)},
            TypeError,
            "candidate_block_buffer: expected dtype int32",
        ),
    ):
        with pytest.raises(error, match=message):
            impl.forward(**good, **given)
    pooled = IndexerImpl(SparseMLAConfig(8, topk=12, kpool=4), Workspace(Place("numpy", -1)))
    wide = np.zeros((5, 15), np.int32)
    with pytest.raises(ValueError, match=r"candidate_block_buffer: keys of pools \(config's kpool\) have no candidate"):
        pooled.forward(**{**good, "topk_indices_buffer": wide}, candidate_block_buffer=blocks)
