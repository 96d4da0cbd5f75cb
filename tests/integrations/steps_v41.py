"""Steps of an engine on the layers of a small DeepSeek-V4.1, which share compressed rows, keys, lists and candidate
blocks: what their caches hold, what a step asks for, and what is right by float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests import indexers, oracle, oracle_indexer, oracle_mxfp4, oracle_v4
from tests.cases import queries
from tests.integrations import steps_v4
from tests.integrations.steps_v4 import INDEX_HEADS, KEY_GAP, MAX_LEN, MAX_TOKENS, REQUESTS, SCALE, TOPK, WINDOW

# As in `steps_v4`. A request without query tokens may also stand before prefills or between them, as where vLLM trims.
ORDER = {
    **steps_v4.ORDER,
    "both": [(0, 1, 302), (1, 1, 41), (2, 7, 278), (4, 20, 130), (3, 3, 9)],
    "short contexts": [(3, 1, 11), (4, 12, 60)],  # all pairs are chosen, but not all tokens
    "trimmed prefills": [(1, 0, 42), (4, 6, 137)],
    "a trimmed prefill between others": [(0, 1, 514), (2, 5, 290), (3, 0, 0), (1, 4, 47)],
    "replayed windows": [(0, 1, 515), (2, 9, 299), (1, 3, 50)],
}
REPLAYED = {"replayed windows": [490, 285, 45]}  # requests' first positions with a row of the window
GUESSED = {
    "guessed tokens": steps_v4.GUESSED,
    "as many guessed tokens": [(1, 3, 421), (2, 3, 284)],
    "guessed tokens and a prefill": [(0, 3, 304), (1, 2, 422), (4, 9, 146)],
}

RATIOS = (0, 2, 2, 1, 1, 1, 1)  # of each layer; 0: a sliding window alone
OTHER_RATIOS = (0, 1, 1, 2, 2, 2, 2)  # candidate blocks of pairs, which the released model does not have
KV_SOURCES, INDEX_SOURCES, CANDIDATE_SOURCE = (1, 3), (1, 3, 5), 3
BLOCK, WINDOW_BLOCK = 64, 32
CANDIDATES = 6  # blocks of 8 keys


@dataclass
class Choice:
    """What an indexer is asked, and what it is to choose.

    Attributes:
        q, weights: e4m3 bytes [T, H, 128] and float32 [T, H].
        short: whether every token sees at most TOPK keys: the indexer is not called.
        lists: int32 [T, TOPK], -1 behind.
        blocks: int32 [T, CANDIDATES], of the candidate source.
    """

    q: torch.Tensor
    weights: torch.Tensor
    short: bool
    lists: torch.Tensor
    blocks: torch.Tensor | None


@dataclass
class Asked:
    """A step's arrays; T query tokens of r requests, with those that pad the batch.

    Attributes:
        query_lens, seq_lens: [r].
        starts: [r + 1] int32.
        requests, positions, slots: int32 and int64 [T]; slots of window rows, -1 for tokens that pad.
        table, window_table: [r, blocks] int32, of compressed caches and keys, and of windows.
        replay: [r] int32 first positions with a row of the window.
        q: bf16 [T, h, 512], of each layer.
        choices: by index source.
        want: float64 [T, h, 512], of each layer; 0 for tokens that pad.
        most: query tokens of a decode at most.
    """

    query_lens: list[int]
    seq_lens: list[int]
    starts: np.ndarray
    requests: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    table: np.ndarray
    window_table: np.ndarray
    replay: np.ndarray
    q: list[torch.Tensor]
    choices: dict[int, Choice]
    want: list[np.ndarray]
    most: int

    @property
    def num_decodes(self) -> int:
        return next((r for r, n in enumerate(self.query_lens) if n > self.most), len(self.query_lens))


def source(layer: int, sources: tuple[int, ...]) -> int:
    """The last source up to a layer, which has one."""
    return max(each for each in sources if each <= layer)


class Model:
    """The layers' caches, with the rows of all requests, as long as they may become.

    Attributes:
        windows: of each layer, [blocks, WINDOW_BLOCK, 584] bytes.
        compressed, keys: by kv source, [blocks, BLOCK / ratio, 584] and [..., 132] bytes; a key's sums are exact.
        sinks: [h] float32 of each layer.
        chosen, candidates: [MAX_TOKENS, TOPK] and [MAX_TOKENS, CANDIDATES] int32 buffers that layers share.
    """

    def __init__(self, rng: np.random.Generator, heads: int, ratios: tuple[int, ...] = RATIOS) -> None:
        self._rng, self.heads, self.ratios = rng, heads, ratios
        self._tables = [
            rng.permutation(REQUESTS * n).reshape(REQUESTS, n).astype(np.int32)
            for n in (MAX_LEN // WINDOW_BLOCK, MAX_LEN // BLOCK)
        ]
        window_blocks, blocks = (table.size for table in self._tables)
        self.windows = [steps_v4.random_cache(rng, window_blocks, WINDOW_BLOCK) for _ in ratios]
        self.compressed = {s: steps_v4.random_cache(rng, blocks, BLOCK // ratios[s]) for s in KV_SOURCES}
        codes = {s: indexers.exact_codes(rng, blocks, BLOCK // ratios[s], 128) for s in KV_SOURCES}
        self._codes = {s: each.reshape(-1, 128) for s, each in codes.items()}
        self.keys = {
            s: torch.from_numpy(indexers.key_cache(each, np.ones(each.shape[:2], np.float32), KEY_GAP))
            for s, each in codes.items()
        }
        self.sinks = [torch.from_numpy(rng.standard_normal(heads).astype(np.float32)) for _ in ratios]
        self.chosen = torch.full((MAX_TOKENS, TOPK), 7, dtype=torch.int32)
        self.candidates = torch.full((MAX_TOKENS, CANDIDATES), 7, dtype=torch.int32)

    def step(self, name: str) -> Asked:
        """What a step of ORDER or GUESSED asks for."""
        which, query_lens, seq_lens, starts, requests = steps_v4.tokens_of({**ORDER, **GUESSED}[name])
        own, tokens = int(starts[-1]), len(requests)
        window_table, table = (each[which] for each in self._tables)
        positions, slots = np.zeros(tokens, np.int64), np.full(tokens, -1, np.int64)
        for t, r in enumerate(requests[:own]):
            p = positions[t] = oracle_v4.position(starts, np.array(seq_lens), r, t)
            slots[t] = window_table[r, p // WINDOW_BLOCK] * WINDOW_BLOCK + p % WINDOW_BLOCK
        replay = np.array(REPLAYED.get(name, [0] * len(which)), np.int32)
        asked = Asked(
            query_lens, seq_lens, starts, requests, positions, slots, table, window_table, replay, [], {}, [],
            3 if name in GUESSED else 1,
        )  # fmt: skip
        for layer in range(len(self.ratios)):
            if layer in INDEX_SOURCES:
                asked.choices[layer] = self._choice(layer, asked)
            q = queries(self._rng, tokens, self.heads, 512)
            asked.want.append(np.stack([self._attended(layer, asked, q[t], t) for t in range(tokens)]))
            asked.q.append(torch.from_numpy(q.astype(np.float32)).bfloat16())
        return asked

    def _choice(self, layer: int, asked: Asked) -> Choice:
        ratio, tokens, own = self.ratios[layer], len(asked.requests), int(asked.starts[-1])
        keys_of, size = source(layer, KV_SOURCES), BLOCK // ratio
        q = indexers.exact_codes(self._rng, tokens, INDEX_HEADS, 128)
        weights = indexers.exact_weights(self._rng, tokens, INDEX_HEADS)
        lists = np.full((tokens, TOPK), -1, np.int32)
        blocks = np.full((tokens, CANDIDATES), -1, np.int32) if layer == CANDIDATE_SOURCE else None
        before = asked.choices[CANDIDATE_SOURCE].blocks if layer > CANDIDATE_SOURCE else None
        for t, r in enumerate(asked.requests[:own]):
            at = np.arange((asked.positions[t] + 1) // ratio)
            if before is not None:
                at = at[np.isin(at // 8, before[t].numpy())]
            keys = self._codes[keys_of][asked.table[r, at // size] * size + at % size]
            logits = oracle_indexer.logits(q[t], keys, np.ones(len(at)), weights[t])
            best = oracle_indexer.topk(logits, TOPK, 0, len(at))
            lists[t, : (best >= 0).sum()] = at[best[best >= 0]]
            if blocks is not None:
                blocks[t] = oracle_mxfp4.best_blocks(logits, CANDIDATES, 0, len(at))
        short = max(asked.seq_lens) // ratio <= TOPK
        if short:
            for t in range(own):
                some = np.arange((asked.positions[t] + 1) // ratio)
                lists[t] = np.pad(some, (0, TOPK - len(some)), constant_values=-1)
        return Choice(
            torch.from_numpy(q).view(torch.float8_e4m3fn), torch.from_numpy(weights), short, torch.from_numpy(lists),
            None if blocks is None else torch.from_numpy(blocks),
        )  # fmt: skip

    def _attended(self, layer: int, asked: Asked, q: np.ndarray, t: int) -> np.ndarray:
        if asked.slots[t] < 0:
            return np.zeros((self.heads, 512))
        r, p, rows = asked.requests[t], int(asked.positions[t]), []
        at = np.array(oracle_v4.window_of(p, WINDOW, (0, 0), int(asked.replay[r]), asked.seq_lens[r], MAX_LEN))
        named = asked.window_table[r, at // WINDOW_BLOCK] * WINDOW_BLOCK + at % WINDOW_BLOCK
        rows.append(oracle.named_rows(oracle.V4, self.windows[layer].numpy(), named))
        if self.ratios[layer]:
            lists = asked.choices[source(layer, INDEX_SOURCES)].lists[t].numpy()
            at, size = lists[lists >= 0], BLOCK // self.ratios[layer]
            named = asked.table[r, at // size] * size + at % size
            rows.append(oracle.named_rows(oracle.V4, self.compressed[source(layer, KV_SOURCES)].numpy(), named))
        return oracle.attend(q, np.concatenate(rows), SCALE, self.sinks[layer].numpy())[0]
