"""What a call costs the host, from arrays to the last launch, for shapes that were seen before.

python benchmarks/host_overhead.py [--quick] [--only REGEX]

Microseconds, median over the calls of a round, and of the rounds, which go through all cases again and again, the
least: a virtual machine's CPU is slower by a third for seconds at a time, whatever it runs. The GPU is waited for
between batches of calls, untimed, so that its queue never fills, and results are freed untimed, too: their owner does
that, not the call. Beside ours stand FlashMLA's Python functions and, alone, the C++ operators these call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, NamedTuple

import cache_ops
import torch
from harness import Call, Options, Record, flash_mla_peer
from inputs import normal, random_slots, v32_cache
from rows import padded

import cupy_mla
from cupy_mla import flash_mla

BATCH = 32  # calls between waits
BATCHES = 4  # of a case in a round
ROUNDS = 30
TARGETS = {"decode": 15.0, "prefill": 12.0, "dynamic_per_batched_tensor_quant": None}
TARGET = 10.0  # of the cache and index operations
TOKENS = 4096


class Case(NamedTuple):
    """A call of ours, given a way to turn torch arrays into others', and the peer's two ways to do the same."""

    name: str
    call: Callable[[Callable[[torch.Tensor], Any]], Call]
    peer: Call | None = None
    operator: Call | None = None


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


def decode_cases(peer: Any) -> Iterator[Case]:
    """Split over the blocks of clusters, and unsplit."""
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


def prefill_cases(peer: Any) -> Iterator[Case]:
    """Split over the blocks of clusters, unsplit, and in groups of queries, which are three launches.

    A graph makes these (`cupy_mla.cuda.launch_graph`), for which it matters whether a call has the last one's arrays.
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


def operation_cases() -> Iterator[Case]:
    """The cache and index operations, on the inputs of their own benchmark."""
    makers = (
        lambda: cache_ops.pack_cases(TOKENS), lambda: cache_ops.indexer_pack_cases(TOKENS),
        lambda: cache_ops.gather_cases(TOKENS, 4), lambda: cache_ops.indexer_gather_cases(TOKENS, 4),
        lambda: cache_ops.v4_gather_cases(TOKENS, 4), lambda: cache_ops.concat_cases(16, 128),
        lambda: cache_ops.convert_cases(16, 2048), lambda: cache_ops.v4_index_cases(16),
        lambda: cache_ops.quant_cases(16, 128),
    )  # fmt: skip
    seen = set()
    for make in makers:
        for case in make():
            if case.operation in seen:
                continue
            seen.add(case.operation)

            def call(of: Callable, case: cache_ops.Case = case) -> Call:
                arguments = {name: of(a) for name, a in case.arrays.items()} | case.settings
                return lambda: case.operation(**arguments)

            yield Case(case.operation.__name__, call)


def main() -> None:
    options = Options.parse(__doc__)
    record = Record("host_overhead", options, "torch us,CuPy us,peer us,its C++,target")
    peer = flash_mla_peer()
    cases = [
        (case, {
            "torch_us": case.call(lambda tensor: tensor), "cupy_us": case.call(cupy_mla.to_cupy),
            "peer_us": case.peer, "peer_operator_us": case.operator,
        })
        for case in (*decode_cases(peer), *prefill_cases(peer), *operation_cases()) if record.wants(case.name)
    ]  # fmt: skip
    rounds = [
        [{name: host_us(call) for name, call in calls.items() if call is not None} for _, calls in cases]
        for _ in range(6 if options.quick else ROUNDS)
    ]
    for (case, calls), taken in zip(cases, zip(*rounds, strict=True), strict=True):
        least = {name: round(min(times[name] for times in taken), 2) for name in taken[0]}
        target = next((us for name, us in TARGETS.items() if case.name.startswith(name)), TARGET)
        shown = [f"{least[name]:9.2f}" if name in least else f"{'-':>9}" for name in calls]
        row = {"case": case.name, **least, **({} if target is None else {"target_us": target})}
        record.add_row(row, " ".join([*shown, f"{'-' if target is None else target:>9}"]))
    print(record.write())


if __name__ == "__main__":
    main()
