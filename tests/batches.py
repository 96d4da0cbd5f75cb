"""Random batches for tests of operations on query tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Queries:
    """Query tokens of requests, each the end of its sequence; T of them."""

    query_start_loc: np.ndarray  # [R + 1]
    seq_lens: np.ndarray  # [R]
    token_to_req: np.ndarray  # [T]
    positions: np.ndarray  # [T] int64

    @property
    def tokens(self) -> int:
        return len(self.token_to_req)


def queries(query_lens: list[int], seq_lens: list[int]) -> Queries:
    starts = np.concatenate([[0], np.cumsum(query_lens, dtype=np.int64)]).astype(np.int32)
    token_to_req = np.repeat(np.arange(len(query_lens)), query_lens).astype(np.int32)
    places = [np.arange(seq - n, seq) for n, seq in zip(query_lens, seq_lens, strict=True)]
    positions = np.concatenate([*places, []]).astype(np.int64)
    return Queries(starts, np.array(seq_lens, np.int32), token_to_req, positions)


def random_queries(rng: np.random.Generator, requests: int, most: int, longest: int) -> Queries:
    """Requests of 0 to `most` query tokens in sequences of up to `longest`, some of them new."""
    query_lens = rng.integers(0, most + 1, requests).tolist()
    seq_lens = [n + int(rng.integers(0, longest - n + 1)) * int(rng.random() < 0.8) for n in query_lens]
    return queries(query_lens, seq_lens)


def table_for(rng: np.random.Generator, requests: int, rows: int, block_size: int) -> np.ndarray:
    """A block table [requests, M] with blocks of their own for `rows` rows of each request."""
    width = -(-rows // block_size)
    return rng.permutation(requests * width + 3)[: requests * width].reshape(requests, width).astype(np.int32)
