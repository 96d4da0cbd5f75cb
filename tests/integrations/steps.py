"""Steps of an engine on one layer: what its caches hold, what a step asks for, and what is right by float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests import indexers, oracle, oracle_indexer
from tests.backends.test_sparse_mla import SCALE, exact_rows
from tests.cases import queries

# Requests of each step, by numbers, with their query tokens and the tokens of their context; 0 stands for at most as
# many as are chosen. A request that does not come again was aborted or is done; one without query tokens pads the
# batch. Behind decodes alone come batches with prefills and the other way round.
ORDER: dict[str, list[tuple[int, int, int]]] = {
    "decodes": [(0, 1, 30), (1, 1, 24), (2, 1, 29)],
    "a prefill after decodes": [(3, 9, 26)],
    "decodes after a prefill": [(3, 1, 27), (0, 1, 31)],
    "both": [(3, 1, 28), (1, 1, 25), (2, 6, 31)],
    "short decodes": [(4, 1, 0), (0, 1, 0)],
    "prefills after short decodes": [(1, 7, 32), (2, 3, 5)],
    "padded decodes": [(1, 1, 30), (3, 1, 29), (0, 0, 1), (0, 0, 1)],
    "both after padded decodes": [(3, 1, 30), (4, 5, 22)],
    "other requests' decodes": [(4, 1, 23), (2, 1, 32)],
}
REQUESTS, MAX_LEN, INDEX_HEADS = 5, 32, 8


@dataclass
class Asked:
    """A step's arrays, in NumPy; T query tokens of r requests.

    Attributes:
        query_lens, seq_lens: [r].
        starts: [r + 1] where a request's query tokens begin.
        table: [r, blocks] int32.
        q: bf16 [T, h, 576].
        index_q, weights: e4m3 bytes [T, H, 128] and float32 [T, H], of the indexer.
        lists: int32 [T, k] positions that are to be chosen, -1 behind.
        want: float64 [T, h, 512].
    """

    query_lens: list[int]
    seq_lens: list[int]
    starts: np.ndarray
    table: np.ndarray
    q: np.ndarray
    index_q: np.ndarray
    weights: np.ndarray
    lists: np.ndarray
    want: np.ndarray

    def listed(self, form: str, block_size: int) -> np.ndarray:
        """The lists as "positions", as "slots" of the cache, or as rows of the "gathered" keys of all requests."""
        lists, begins = self.lists.copy(), np.cumsum([0, *self.seq_lens])
        for row, r in zip(lists, np.repeat(np.arange(len(self.query_lens)), self.query_lens), strict=True):
            chosen = row[row >= 0]
            if form == "slots":
                row[: len(chosen)] = self.table[r, chosen // block_size] * block_size + chosen % block_size
            elif form == "gathered":
                row[: len(chosen)] = chosen + begins[r]
        return lists


class Caches:
    """Rows and keys of all requests, as long as they may become. Sums of the indexer are exact, and FP8 rows as well.

    Attributes:
        rows: by layout, bf16 [blocks, block_size, 576] and bytes [blocks, block_size, 656].
        keys: bytes [blocks, block_size, 132], of codes [blocks, block_size, 128].
        table: of all requests, as wide as they may become.
    """

    def __init__(self, rng: np.random.Generator, block_size: int, heads: int, k: int, times: int = 1) -> None:
        self._rng, self._block_size, self._heads, self._k, self._times = rng, block_size, heads, k, times
        width = -(-MAX_LEN * times // block_size)
        blocks = REQUESTS * width + 1
        self.table = rng.permutation(blocks)[: REQUESTS * width].reshape(REQUESTS, width).astype(np.int32)
        rows, packed = exact_rows(rng, blocks * block_size)
        self._values = rows.astype(np.float64)
        self.codes = indexers.exact_codes(rng, blocks, block_size, 128)
        self.rows = {"bf16": rows.reshape(blocks, block_size, 576), "v32_fp8": packed.reshape(blocks, block_size, 656)}
        self.keys = indexers.key_cache(self.codes, np.ones(self.codes.shape[:2], np.float32))

    def step(self, name: str) -> Asked:
        """What a step of ORDER asks for. Contexts are `times` as long as there."""
        return self.of(ORDER[name])

    def of(self, requests: list[tuple[int, int, int]]) -> Asked:
        """What a step of these requests asks for, which are as those of ORDER."""
        which, query_lens, lens = zip(*requests, strict=True)
        seq_lens = [
            n * self._times if n else int(self._rng.integers(2, self._k + 1)) if query_len else 1
            for n, query_len in zip(lens, query_lens, strict=True)
        ]
        tokens, table = sum(query_lens), self.table[list(which)]
        q = queries(self._rng, tokens, self._heads, 576)
        index_q = indexers.exact_codes(self._rng, tokens, INDEX_HEADS, 128)
        weights = indexers.exact_weights(self._rng, tokens, INDEX_HEADS)
        lists, want = np.full((tokens, self._k), -1, np.int32), np.empty((tokens, self._heads, 512))
        t = 0
        for r, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            at = np.arange(seq_len)
            slots = table[r, at // self._block_size] * self._block_size + at % self._block_size
            for seen in range(seq_len - query_len + 1, seq_len + 1):
                keys = self.codes.reshape(-1, 128)[slots[:seen]]
                logits = oracle_indexer.logits(index_q[t], keys, np.ones(seen), weights[t])
                lists[t] = oracle_indexer.topk(logits, self._k, 0, seen)
                want[t], _, _ = oracle.attend(q[t], self._values[slots[lists[t][lists[t] >= 0]]], SCALE, None)
                t += 1
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        return Asked(list(query_lens), seq_lens, starts, table, q, index_q, weights, lists, want)
