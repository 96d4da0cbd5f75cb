"""Steps of an engine on a layer of DeepSeek-V4: what its caches hold, what a step asks for, and what is right by
float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import cupy_mla
from tests import indexers, oracle, oracle_indexer, oracle_v4
from tests.cases import latent, queries

# As `steps.ORDER`: requests by numbers, with their query tokens and the tokens of their context, decodes first. A
# request without query tokens pads a batch of decodes. Behind decodes alone come batches with prefills and the other
# way round.
ORDER: dict[str, list[tuple[int, int, int]]] = {
    "decodes": [(0, 1, 300), (1, 1, 40)],
    "prefills after decodes": [(2, 9, 270), (3, 5, 5), (4, 2, 2)],
    "decodes after prefills": [(2, 1, 271), (0, 1, 301), (3, 1, 6)],
    "both": [(0, 1, 302), (1, 1, 41), (2, 7, 278), (4, 40, 130), (3, 3, 9)],
    "padded decodes": [(4, 1, 131), (2, 1, 279), (0, 0, 0), (0, 0, 0)],
    "a prefill after padded decodes": [(0, 6, 512)],
    "other requests' decodes": [(3, 1, 10), (0, 1, 513)],
}
GUESSED = [(1, 3, 420), (0, 1, 301), (2, 2, 81)]  # decodes with guessed tokens
REQUESTS, MAX_LEN, MAX_TOKENS = 5, 1024, 64
WINDOW, TOPK, BLOCK, WINDOW_BLOCK = 32, 32, 256, 64
INDEX_HEADS, KEY_GAP = 8, 48  # blocks of keys are multiples of 576 bytes, too: so many times 4 bytes behind one
SCALE = 512**-0.5
RATIOS = (1, 4, 128)


@dataclass
class Asked:
    """A step's arrays; T query tokens of r requests. Tokens behind those of the requests pad the batch.

    Attributes:
        query_lens, seq_lens: [r].
        starts: [r + 1] int32, where a request's query tokens begin.
        requests, positions, slots: int32 and int64 [T]; the last are -1 for tokens that pad.
        table, window_table: [r, blocks] int32.
        q: bf16 [T, h, 512].
        index_q, weights: e4m3 bytes [T, H, 128] and float32 [T, H], of the indexer.
        lists: int32 [T, k] rows that are to be chosen, -1 behind.
        want: float64 [T, h, 512]; 0 for tokens that pad.
    """

    query_lens: list[int]
    seq_lens: list[int]
    starts: np.ndarray
    requests: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    table: np.ndarray
    window_table: np.ndarray
    q: torch.Tensor
    index_q: np.ndarray
    weights: np.ndarray
    lists: np.ndarray
    want: np.ndarray

    @property
    def num_decodes(self) -> int:
        return sum(n <= 1 for n in self.query_lens)


def tokens_of(asked: list[tuple[int, int, int]]) -> tuple[list[int], list[int], list[int], np.ndarray, np.ndarray]:
    """Of requests as in ORDER: their numbers, query tokens and lengths, where their query tokens begin, and the request
    of each token. Tokens of request 0 behind them pad a batch of decodes to one for each request."""
    which, query_lens, seq_lens = (list(each) for each in zip(*asked, strict=True))
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    own = int(starts[-1])
    requests = np.zeros(max(own, len(which)) if max(query_lens) == 1 else own, np.int32)
    requests[:own] = np.repeat(np.arange(len(which)), query_lens)
    return which, query_lens, seq_lens, starts, requests


def random_cache(rng: np.random.Generator, blocks: int, size: int) -> torch.Tensor:
    """Random rows; blocks are multiples of 576 bytes, as vLLM's."""
    stride = -(-size * 584 // 576) * 576
    cache = torch.full((blocks * stride,), 0xFF, dtype=torch.uint8).as_strided((blocks, size, 584), (stride, 584, 1))
    k = torch.from_numpy(latent(rng, blocks * size, 512).astype(np.float32)).bfloat16()
    cupy_mla.quantize_and_insert_k_cache(k, cache, torch.arange(blocks * size))
    return cache


class Layer:
    """A layer's caches, with the rows of all requests, as long as they may become.

    Attributes:
        window, compressed: [blocks, block_size, 584] bytes; the latter None for a ratio of 1.
        keys: [blocks, rows of a block, 132] bytes, an indexer's; its sums are exact.
        sink: [heads] float32.
        chosen: [MAX_TOKENS, TOPK] int32, the buffer in which an indexer leaves its lists. Rows of tokens that pad keep
            what they had.
    """

    def __init__(self, rng: np.random.Generator, ratio: int, heads: int) -> None:
        self._rng, self.ratio, self.heads = rng, ratio, heads
        self._tables = [
            rng.permutation(REQUESTS * n).reshape(REQUESTS, n).astype(np.int32)
            for n in (MAX_LEN // WINDOW_BLOCK, MAX_LEN // BLOCK)
        ]
        self.window = random_cache(rng, self._tables[0].size, WINDOW_BLOCK)
        self.compressed = random_cache(rng, self._tables[1].size, BLOCK // ratio) if ratio > 1 else None
        codes = indexers.exact_codes(rng, self._tables[1].size, BLOCK // ratio, 128)
        self._codes = codes.reshape(-1, 128)
        self.keys = indexers.key_cache(codes, np.ones(codes.shape[:2], np.float32), KEY_GAP)
        self.sink = torch.from_numpy(rng.standard_normal(heads).astype(np.float32))
        self.chosen = torch.full((MAX_TOKENS, TOPK), 7, dtype=torch.int32)

    def step(self, name: str, visible: tuple[np.ndarray, np.ndarray] | None = None) -> Asked:
        """What a step of ORDER, or "guessed tokens", asks for; the indexer has chosen.

        Args:
            visible: [T] how many tokens of its image a token sees before and behind it.
        """
        which, query_lens, seq_lens, starts, requests = tokens_of(ORDER.get(name, GUESSED))
        own, tokens = int(starts[-1]), len(requests)
        positions = np.zeros(tokens, np.int64)
        slots, lists = np.full(tokens, -1, np.int64), np.full((tokens, TOPK), -1, np.int32)
        window_table, table = (each[which] for each in self._tables)
        q, want = queries(self._rng, tokens, self.heads, 512), np.zeros((tokens, self.heads, 512))
        index_q = indexers.exact_codes(self._rng, tokens, INDEX_HEADS, 128)
        weights = indexers.exact_weights(self._rng, tokens, INDEX_HEADS)
        sink, size = self.sink.numpy(), BLOCK // self.ratio
        gathered = oracle_v4.prefill_gather_lens(np.array(seq_lens), starts, 0, WINDOW)
        for t, r in enumerate(requests[:own]):
            p = positions[t] = oracle_v4.position(starts, np.array(seq_lens), r, t)
            seen = (0, 0) if visible is None else (int(visible[0][t]), int(visible[1][t]))
            at = np.array(oracle_v4.window_of(p, WINDOW, seen, seq_lens[r] - gathered[r], seq_lens[r], MAX_LEN))
            slots[t] = window_table[r, p // WINDOW_BLOCK] * WINDOW_BLOCK + p % WINDOW_BLOCK
            named = window_table[r, at // WINDOW_BLOCK] * WINDOW_BLOCK + at % WINDOW_BLOCK
            rows = [oracle.named_rows(oracle.V4, self.window.numpy(), named)]
            if self.compressed is not None:
                chosen = np.arange(int(p + 1) // self.ratio)
                if self.ratio == 4:
                    keys = self._codes[table[r, chosen // size] * size + chosen % size]
                    logits = oracle_indexer.logits(index_q[t], keys, np.ones(len(chosen)), weights[t])
                    lists[t] = oracle_indexer.topk(logits, TOPK, 0, len(chosen))
                    chosen = lists[t][lists[t] >= 0]
                named = table[r, chosen // size] * size + chosen % size
                rows.append(oracle.named_rows(oracle.V4, self.compressed.numpy(), named))
            want[t], _, _ = oracle.attend(q[t], np.concatenate(rows), SCALE, sink)
        self.chosen[:own] = torch.from_numpy(lists[:own])
        bf16 = torch.from_numpy(q.astype(np.float32)).bfloat16()
        return Asked(
            query_lens, seq_lens, starts, requests, positions, slots, table, window_table, bf16, index_q, weights,
            lists, want,
        )  # fmt: skip
