"""Host time of a call, from arrays to the last launch, for sizes that were seen before and for sizes never seen.

python benchmarks/host_overhead.py [--quick] [--only REGEX]

Microseconds. Rounds go through all cases again and again; a figure is the median over a round's calls, and the least of
the rounds: a virtual machine's CPU is slower by a third for seconds at a time, whatever it runs. Waiting for the GPU
between batches of calls, so that its queue never fills, is not timed, nor is freeing the results: their owner does
that, not the call. Beside ours stand FlashMLA's Python functions, and alone the C++ operators that these call.

The columns `new` are of calls whose sizes the process has not seen. Each call is made once, after WARM_UP others of the
same operation, with other numbers of requests or tokens and other lengths of lists; attention has a schedule of its own
each time, as a serving step does. These calls go in rounds as well, of NEW_SIZES calls each: a figure is the least of
the rounds' means, so that one slow second does not decide. The sizes are drawn at random; the seed is in the record.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import cache_ops
import torch
from harness import Call, Options, Record, flash_mla_peer, load_kernels
from inputs import normal, random_slots, v32_cache
from rows import padded

import cupy_mla
from cupy_mla import flash_mla

BATCH = 32  # calls between waits
BATCHES = 4  # of a case in a round
ROUNDS = 30
WARM_UP = 48  # calls of other sizes before those that are timed
NEW_ROUNDS, NEW_SIZES = 3, 64  # rounds of calls that are made once, and how many are a round
SEED = 20261122
NEW_TARGETS = {"decode": 120.0, "prefill": 120.0}
NEW_TARGET = 80.0
TARGET = 12.0


class Case(NamedTuple):
    """A call of ours, given a way to turn torch arrays into others', and the peer's two ways to do the same.

    Attributes:
        new, peer_new: the calls of sizes that were not seen before.
    """

    name: str
    call: Callable[[Callable[[torch.Tensor], Any]], Call] | None
    peer: Call | None = None
    operator: Call | None = None
    new: Callable[[Callable[[torch.Tensor], Any]], Iterator[Call]] | None = None
    peer_new: Callable[[], Iterator[Call]] | None = None


def host_us(call: Call) -> float:
    """Median over the calls of one round."""
    taken = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        for _ in range(BATCH):
            started = time.perf_counter_ns()
            result = call()
            taken.append(time.perf_counter_ns() - started)
            del result
    torch.cuda.synchronize()
    return statistics.median(taken) / 1e3


def new_us(calls: Iterator[Call], count: int) -> float:
    """Mean over the next calls, which are made once each."""
    taken = []
    for call in islice(calls, count):
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        result = call()
        taken.append(time.perf_counter_ns() - started)
        del result
    torch.cuda.synchronize()
    return statistics.mean(taken) / 1e3


def least_new_us(calls: Sequence[Iterator[Call]]) -> list[float]:
    """Of each of several columns, the least of its rounds' means; a round goes through all columns."""
    for of_column in calls:
        new_us(of_column, WARM_UP)
    rounds = [[new_us(of_column, NEW_SIZES) for of_column in calls] for _ in range(NEW_ROUNDS)]
    return list(map(min, zip(*rounds, strict=True)))


def drawn_sizes(name: str, *ranges: tuple[int, int]) -> list[tuple[int, ...]]:
    """Sizes from these ranges, no two alike."""
    rng = random.Random(f"{SEED} {name}")
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < WARM_UP + NEW_ROUNDS * NEW_SIZES:
        drawn[tuple(rng.randint(*bounds) for bounds in ranges)] = None
    return list(drawn)


def part(whole: torch.Tensor, *shape: int) -> torch.Tensor:
    """An array without gaps over the first items of a flat one."""
    return whole[: math.prod(shape)].view(shape)


def decode_cases(peer: Any) -> Iterator[Case]:
    """Split over the CTAs of clusters, and unsplit."""
    cache = v32_cache(1 << 15)
    for b, h in ((1, 128), (128, 128)):
        q, indices = normal(b, 1, h, 576), random_slots(b, 1, 2048, slots=1 << 15)

        def call(of: Callable, q: torch.Tensor = q, indices: torch.Tensor = indices) -> Call:
            schedule, arrays = flash_mla.get_mla_metadata()[0], (of(q), of(cache))
            chosen = of(indices)
            return lambda: flash_mla.flash_mla_with_kvcache(
                *arrays, None, None, 512, schedule, is_fp8_kvcache=True, indices=chosen
            )

        schedule, _ = peer.get_mla_metadata()

        def theirs(q: torch.Tensor = q, indices: torch.Tensor = indices, schedule: Any = schedule) -> Any:
            return peer.flash_mla_with_kvcache(
                q, cache, None, None, 512, schedule, is_fp8_kvcache=True, indices=indices
            )

        theirs()
        planned = schedule.tile_scheduler_metadata, schedule.num_splits
        yield Case(
            f"decode V32 h {h} b {b} topk 2048", call, theirs,
            lambda q=q, i=indices, planned=planned: torch.ops._flashmla_C.sparse_decode_fwd(
                q, cache, i, None, None, *planned, None, None, None, 512, 576**-0.5, None
            ),
        )  # fmt: skip
    qs, lists = normal(264 * 128 * 576), random_slots(264 * 2048, slots=1 << 15)

    def decodes(door: Any, of: Callable, h: int) -> Iterator[Call]:
        ours = of(cache)
        for b, blocks in drawn_sizes(f"decode {h}", (1, 264), (1, 32)):
            arrays = of(part(qs, b, 1, h, 576)), ours, of(part(lists, b, 1, 64 * blocks))
            yield lambda arrays=arrays: door.flash_mla_with_kvcache(
                arrays[0], arrays[1], None, None, 512, door.get_mla_metadata()[0], is_fp8_kvcache=True,
                indices=arrays[2],
            )  # fmt: skip

    for h in (128, 16):
        yield Case(
            f"decode V32 h {h} b 1 to 264 topk 64 to 2048", None, new=lambda of, h=h: decodes(flash_mla, of, h),
            peer_new=lambda h=h: decodes(peer, lambda tensor: tensor, max(h, 64)),
        )  # fmt: skip


def prefill_cases(peer: Any) -> Iterator[Case]:
    """Split over the CTAs of clusters, unsplit, and in groups of queries, which are three launches.

    A graph makes these (`cupy_mla.calls.graph`), for which it matters whether a call has the last one's arrays.
    """
    for s_q, h, turns in ((4, 64, 1), (256, 128, 1), (512, 16, 1), (512, 16, 2)):
        kv, indices = normal(8192, 1, 576), random_slots(s_q, 1, 1024, slots=8192)
        qs, arguments = [normal(s_q, h, 576) for _ in range(turns)], (kv, indices, 576**-0.5)

        def call(of: Callable, qs: list[torch.Tensor] = qs, arguments: tuple[Any, ...] = arguments) -> Call:
            q, arrays = cycle([of(q) for q in qs]), [of(a) for a in arguments[:2]]
            return lambda: flash_mla.flash_mla_sparse_fwd(next(q), *arrays, arguments[2])

        theirs = (padded(qs[0]), *arguments)
        yield Case(
            f"prefill h {h} s_q {s_q} topk 1024" + (" two q in turn" if turns > 1 else ""), call,
            lambda theirs=theirs: peer.flash_mla_sparse_fwd(*theirs),
            lambda theirs=theirs: torch.ops._flashmla_C.sparse_prefill_fwd(*theirs, 512, None, None, None),
        )  # fmt: skip

    kv, qs, lists = normal(8192, 1, 576), normal(1024 * 64 * 576), random_slots(1024 * 2048, slots=8192)

    def prefills(door: Any, of: Callable, h: int) -> Iterator[Call]:
        rows = of(kv)
        for s_q, blocks in drawn_sizes(f"prefill {h}", (1, 1024), (1, 16)):
            q, chosen = of(part(qs, s_q, h, 576)), of(part(lists, s_q, 1, 128 * blocks))
            yield lambda q=q, chosen=chosen: door.flash_mla_sparse_fwd(q, rows, chosen, 576**-0.5)

    for h in (64, 16):
        yield Case(
            f"prefill h {h} s_q 1 to 1024 topk 128 to 2048", None, new=lambda of, h=h: prefills(flash_mla, of, h),
            peer_new=lambda h=h: prefills(peer, lambda tensor: tensor, max(h, 64)),
        )  # fmt: skip


def operation_cases() -> Iterator[Case]:
    """The cache and index operations, on the inputs of their own benchmark."""
    makers = (
        (lambda n: cache_ops.pack_cases(64 * n), 64), (lambda n: cache_ops.indexer_pack_cases(64 * n), 64),
        (lambda n: cache_ops.gather_cases(64 * n, 4), 64), (lambda n: cache_ops.indexer_gather_cases(64 * n, 4), 64),
        (lambda n: cache_ops.v4_gather_cases(64 * n, 4), 64), (lambda n: cache_ops.concat_cases(n, 128), 16),
        (lambda n: cache_ops.convert_cases(n, 2048), 16), (lambda n: cache_ops.v4_index_cases(n), 16),
        (lambda n: cache_ops.quant_cases(n, 128), 16),
    )  # fmt: skip
    seen = set()
    for make, usual in makers:
        for case in make(usual):
            if case.operation in seen:
                continue
            seen.add(case.operation)

            def call(of: Callable, case: cache_ops.Case = case) -> Call:
                arguments = {name: of(a) for name, a in case.arrays.items()} | case.settings
                return lambda: case.operation(**arguments)

            def new(of: Callable, make: Callable = make, operation: Callable = case.operation) -> Iterator[Call]:
                for (n,) in drawn_sizes(operation.__name__, (2, 300)):
                    other = next(case for case in make(n) if case.operation is operation)
                    arguments = {name: of(a) for name, a in other.arrays.items()} | other.settings
                    yield lambda other=other, arguments=arguments: other.operation(**arguments)

            yield Case(case.operation.__name__, call, new=new)


def main() -> None:
    options = Options.parse(__doc__)
    record = Record("host_overhead", options, "torch us,CuPy us,peer us,its C++,torch new,CuPy new,peer new,target")
    record.note("seed", SEED)
    peer = flash_mla_peer()
    load_kernels("^(attention|cache|indices)/|indexer/(pack|gather)_keys")
    cases = [
        case for case in (*decode_cases(peer), *prefill_cases(peer), *operation_cases()) if record.wants(case.name)
    ]
    fresh: dict[tuple[str, str], Iterator[Call]] = {}  # by case and column
    for case in cases:
        if case.new is not None:
            fresh[case.name, "torch_new_us"] = case.new(lambda tensor: tensor)
            fresh[case.name, "cupy_new_us"] = case.new(cupy_mla.to_cupy)
        if case.peer_new is not None:
            fresh[case.name, "peer_new_us"] = case.peer_new()
    new = dict(zip(fresh, least_new_us(list(fresh.values())), strict=True))
    seen = [
        {
            "torch_us": case.call and case.call(lambda tensor: tensor),
            "cupy_us": case.call and case.call(cupy_mla.to_cupy), "peer_us": case.peer,
            "peer_operator_us": case.operator,
        }
        for case in cases
    ]  # fmt: skip
    rounds = [
        [{name: host_us(call) for name, call in calls.items() if call is not None} for calls in seen]
        for _ in range(6 if options.quick else ROUNDS)
    ]
    for case, calls, taken in zip(cases, seen, zip(*rounds, strict=True), strict=True):
        times = {name: round(min(round_[name] for round_ in taken), 2) for name in taken[0]}
        times |= {column: round(us, 2) for (name, column), us in new.items() if name == case.name}
        wanted_new = next((us for name, us in NEW_TARGETS.items() if case.name.startswith(name)), NEW_TARGET)
        targets = {} if case.call is None else {"target_us": TARGET}
        targets |= {} if case.new is None else {"target_new_us": wanted_new}
        columns = (*calls, "torch_new_us", "cupy_new_us", "peer_new_us")
        shown = [f"{times[name]:9.2f}" if name in times else f"{'-':>9}" for name in columns]
        shown += map(str, targets.values())
        record.add_row({"case": case.name, **times, **targets}, " ".join(shown))
    print(record.write())


if __name__ == "__main__":
    main()
