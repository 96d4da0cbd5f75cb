"""Calls of `fp8_sm90` that share a schedule: the first one divides its lists, and the others divide theirs as it did.
Against the oracle. Needs a Hopper GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_mla import flash_mla

from ... import oracle
from ...cases import Paged, assert_decoded, decode_oracle, paged, poisoned_outputs, queries
from ...kinds import make
from . import evenly as divided

pytestmark = pytest.mark.gpu

FORMATS = pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4], ids=lambda fmt: fmt.name)
KERNEL = "fp8_sm90"
SCALE = divided.SCALE


@pytest.fixture(autouse=True)
def evenly(force) -> None:
    """Every call's rows are divided evenly over 132 CTAs, into splits of a pair of tiles and more."""
    force(division=divided.shares(64))


class Layers:
    """Calls that differ in where -1 begins in their lists."""

    def __init__(
        self, kind: Any, rng: np.random.Generator, fmt: oracle.Format, b: int, s_q: int, h_q: int, topk: int
    ) -> None:
        self.kind, self.fmt = kind, fmt
        self.main = paged(rng, fmt, b, s_q, topk, 64, invalid=0, lengths=False)
        self.q = queries(rng, b, s_q, h_q, fmt.d_qk)
        self._q, self._cache = kind.put(self.q), kind.put(self.main.cache)

    def ends(self, ends: Any) -> Paged:
        """Lists that end there, in turn."""
        return Paged(self.main.cache, divided.ending(self.main.indices, ends), dead=self.main.dead)

    def attend(self, schedule: flash_mla.FlashMLASchedMeta, indices: Any) -> tuple[Any, Any]:
        return flash_mla.flash_mla_with_kvcache(
            self._q, self._cache, None, None, 512, schedule, softmax_scale=SCALE, is_fp8_kvcache=True, indices=indices
        )

    def check(self, results: tuple[Any, Any], main: Paged) -> None:
        assert_decoded(self.kind, results, decode_oracle(self.fmt, self.q, main, sm_scale=SCALE))

    def bits(self, results: tuple[Any, Any]) -> list[bytes]:
        return [self.kind.take(r).tobytes() for r in results]


SIZES = pytest.mark.parametrize(
    ("b", "s_q", "h_q", "topk"), [(1, 1, 64, 3000), (7, 2, 128, 700), (133, 1, 32, 300), (45, 1, 100, 390)]
)
# Of the first call, and of the others.
ENDS = pytest.mark.parametrize(
    ("first", "others"),
    [
        ([5000], [[60], [0, 200], [5000]]),
        ([60], [[5000], [0], [5000, 61, 0]]),
        ([0], [[5000], [128, 129, 64]]),
        ([0, 5000], [[5000, 0], [5000]]),
    ],
    ids=str,
)


@FORMATS
@SIZES
@ENDS
def test_layers_with_other_lists(hopper, rng, fmt, b, s_q, h_q, topk, first, others):
    """A plan need not fit: shares are unequal then. The same bits every time."""
    layers = Layers(hopper, rng, fmt, b, s_q, h_q, topk)
    bits = []
    for _ in range(2):
        schedule, _ = flash_mla.get_mla_metadata()
        lists = [layers.ends(ends) for ends in (first, *others, first)]
        with poisoned_outputs():
            results = [layers.attend(schedule, hopper.put(main.indices)) for main in lists]
        assert schedule.plan.made
        bits.append([layers.bits(r) for r in results])
        if len(bits) == 1:
            for main, result in zip(lists, results, strict=True):
                layers.check(result, main)
    assert bits[0] == bits[1]
    assert bits[0][0] == bits[0][-1]


@FORMATS
def test_layers_whose_lists_end(hopper, rng, fmt):
    divided.check_plans_of_lists_with_ends(hopper, rng, fmt, 64)


@FORMATS
def test_layers_of_one_kind_in_a_step(hopper, rng, fmt):
    """Lists with lengths in two caches, which a backend says are alike."""
    divided.check_plans_of_lists_with_lengths(hopper, rng, fmt, 64, [(1, 300, 3000), (7, 128, 700), (133, 128, 512)])


@FORMATS
def test_lengths(hopper, rng, fmt):
    """They differ from call to call, and each call divides its own lists."""
    main, extra = paged(rng, fmt, 70, 2, 300, 64, lengths=True), paged(rng, fmt, 70, 2, 130, 2, lengths=True)
    q, schedule = queries(rng, 70, 2, 72, fmt.d_qk), flash_mla.get_mla_metadata()[0]
    for ends in ([300], [0, 64], [300, 0, 65], [0]):
        main.length[:] = np.resize(ends, 70)
        extra.length[:] = np.resize(ends[::-1], 70)
        results = flash_mla.flash_mla_with_kvcache(
            hopper.put(q), hopper.put(main.cache), None, None, 512, schedule, softmax_scale=SCALE, is_fp8_kvcache=True,
            indices=hopper.put(main.indices), topk_length=hopper.put(main.length),
            extra_k_cache=hopper.put(extra.cache), extra_indices_in_kvcache=hopper.put(extra.indices),
            extra_topk_length=hopper.put(extra.length),
        )  # fmt: skip
        assert_decoded(hopper, results, decode_oracle(fmt, q, main, extra, sm_scale=SCALE))


@pytest.mark.parametrize("hopper", [KERNEL], indirect=True)
def test_replays(hopper, rng):
    """The first call of a captured step plans anew at each replay; the others follow it, whatever their lists are."""
    torch = pytest.importorskip("torch")
    kind = make("torch_cuda")
    layers = Layers(kind, rng, oracle.V32, 40, 1, 128, 700)
    steps = [[layers.ends(rng.integers(60, 701, (40, 1, 1))) for _ in range(4)] for _ in range(4)]
    places = [kind.put(main.indices) for main in steps[0]]
    eager = flash_mla.get_mla_metadata()[0]
    for place in places:
        layers.attend(eager, place)
    schedule = flash_mla.get_mla_metadata()[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [layers.attend(schedule, place) for place in places]
    del schedule
    taken = [torch.full((1024,), -1, device="cuda", dtype=torch.int32) for _ in range(64)]  # what was given back
    for step in steps:
        for place, main in zip(places, step, strict=True):
            place.copy_(kind.put(main.indices))
        graph.replay()
        for result, place, main in zip(results, places, step, strict=True):
            layers.check(result, main)
            layers.check(layers.attend(eager, place), main)
    assert all(bool((t == -1).all()) for t in taken)


@pytest.mark.parametrize("hopper", [KERNEL], indirect=True)
def test_back_to_back(hopper, rng):
    """Launches that overlap: of a plan of many calls, and of one plan after the other in the same memory."""
    layers = Layers(hopper, rng, oracle.V32, 70, 1, 64, 700)
    cases = [layers.ends(rng.integers(60, 701, (70, 1, 1))) for _ in range(3)]
    lists = [hopper.put(main.indices) for main in cases]
    results = []
    for calls in (5, 3, 2, 1, 4):
        schedule, _ = flash_mla.get_mla_metadata()
        results += [layers.attend(schedule, lists[call % 3]) for call in range(calls)]
        del schedule
    for turn, call in enumerate(call for calls in (5, 3, 2, 1, 4) for call in range(calls)):
        layers.check(results[turn], cases[call % 3])


@pytest.mark.parametrize("hopper", [KERNEL], indirect=True)
def test_two_streams(hopper, rng):
    """Each stream has a plan of its own."""
    torch = pytest.importorskip("torch")
    kind = make("torch_cuda")
    layers = Layers(kind, rng, oracle.V32, 70, 1, 64, 700)
    cases = [layers.ends(rng.integers(60, 701, (70, 1, 1))) for _ in range(4)]
    lists = [kind.put(main.indices) for main in cases]
    schedule, streams = flash_mla.get_mla_metadata()[0], [torch.cuda.Stream() for _ in range(2)]
    kind.synchronize()
    results = []
    for turn in range(12):
        with torch.cuda.stream(streams[turn // 3 % 2]):
            results.append(layers.attend(schedule, lists[turn % 4]))
    kind.synchronize()
    for turn, result in enumerate(results):
        layers.check(result, cases[turn % 4])
