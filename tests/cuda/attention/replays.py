"""Captured graphs of decode that run again with other lengths or lists, which only the device knows: against the
oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cupy_mla

from ... import oracle
from ...cases import Paged, assert_decoded, decode_oracle, off_zero
from ...kinds import TorchCUDA, make

SCALE = 0.05


def captured(kind: TorchCUDA, call: Callable[[], Any], times: int = 1) -> tuple[Any, list[Any]]:
    """A graph of so many calls, after one that is not of it, and their results."""
    call()
    graph = kind.torch.cuda.CUDAGraph()
    with kind.torch.cuda.graph(graph):
        results = [call() for _ in range(times)]
    return graph, results


def check_replays_with_other_lengths(
    rng: np.random.Generator, fmt: oracle.Format, q: np.ndarray, main: Paged, extra: Paged | None = None, times: int = 1
) -> None:
    """Each replay works by the lengths that then lie in memory.

    Args:
        times: calls in the graph, which use the same memory for partial results, and replays for each set of lengths.
    """
    kind = make("torch_cuda")
    arrays = [kind.put(a) for a in (q, main.cache, main.indices)]
    caches = {"topk_length": main}
    more = {}
    if extra is not None:
        caches["extra_topk_length"] = extra
        more = {"extra_k_cache": kind.put(extra.cache), "extra_indices": kind.put(extra.indices)}
    lengths = {name: kind.put(cache.length) for name, cache in caches.items()}

    graph, results = captured(kind, lambda: cupy_mla.sparse_decode(*arrays, SCALE, **lengths, **more), times)
    for _ in range(4):
        for name, cache in caches.items():
            b, _, topk = cache.indices.shape
            cache.length[:] = rng.integers(0, topk + 1, b)
            lengths[name].copy_(kind.put(cache.length))
        queries = off_zero(fmt, q, main, extra, sm_scale=SCALE)  # lists of a few rows are among them
        arrays[0].copy_(kind.put(queries))
        for _ in range(times):
            graph.replay()
        kind.synchronize()
        wanted = decode_oracle(fmt, queries, main, extra, sm_scale=SCALE)
        for result in results:
            assert_decoded(kind, result, wanted)


def check_replays_with_other_lists(
    rng: np.random.Generator,
    fmt: oracle.Format,
    q: np.ndarray,
    main: Paged,
    change: Callable[[np.random.Generator, Paged], None],
) -> None:
    """Each replay works by the lists that then lie in memory: those of `main`, which `change` has changed."""
    kind = make("torch_cuda")
    lists, put = main.indices.copy(), [kind.put(a) for a in (q, main.cache, main.indices)]
    graph, [result] = captured(kind, lambda: cupy_mla.sparse_decode(*put, SCALE))
    for _ in range(5):
        main.indices[:] = lists
        change(rng, main)
        queries = off_zero(fmt, q, main, sm_scale=SCALE)
        put[0].copy_(kind.put(queries))
        put[2].copy_(kind.put(main.indices))
        graph.replay()
        kind.synchronize()
        assert_decoded(kind, result, decode_oracle(fmt, queries, main, sm_scale=SCALE))
