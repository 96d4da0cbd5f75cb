"""Captured graphs of decode that run again with other lengths, which only the device knows, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_mla

from ... import oracle
from ...cases import Paged, assert_decoded, decode_oracle
from ...kinds import make

SCALE = 0.05


def check_replays_with_other_lengths(
    rng: np.random.Generator, fmt: oracle.Format, q: np.ndarray, main: Paged, extra: Paged | None = None, times: int = 1
) -> None:
    """Each replay works by the lengths that then lie in memory.

    Args:
        times: calls in the graph, which use the same memory for partial results, and replays for each set of lengths.
    """
    torch = pytest.importorskip("torch")
    kind = make("torch_cuda")
    arrays = [kind.put(a) for a in (q, main.cache, main.indices)]
    caches = {"topk_length": main}
    more = {}
    if extra is not None:
        caches["extra_topk_length"] = extra
        more = {"extra_k_cache": kind.put(extra.cache), "extra_indices": kind.put(extra.indices)}
    lengths = {name: kind.put(cache.length) for name, cache in caches.items()}

    def decode() -> tuple:
        return cupy_mla.sparse_decode(*arrays, SCALE, **lengths, **more)

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [decode() for _ in range(times)]
    for _ in range(4):
        for name, cache in caches.items():
            b, _, topk = cache.indices.shape
            cache.length[:] = rng.integers(0, topk + 1, b)
            lengths[name].copy_(kind.put(cache.length))
        for _ in range(times):
            graph.replay()
        kind.synchronize()
        wanted = decode_oracle(fmt, q, main, extra, sm_scale=SCALE)
        for result in results:
            assert_decoded(kind, result, wanted)
