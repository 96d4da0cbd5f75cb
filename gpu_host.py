"""Temporary: where the host's time of calls of new sizes goes on a GPU. python gpu_host.py

Microseconds, medians over 96 calls. `new`: of sizes never seen, behind a synchronisation. `again`: the same calls once
more, then once more with only the last call before it (`same`), each behind a synchronisation: what is left is what a
call takes with cold caches. `hot`: as `same`, without waiting. Then with timers inside, sums over a call: launches,
memory, and `find`: the function that finds a form.
"""

import statistics
import sys
import time
from functools import wraps

sys.path.insert(0, "benchmarks")
import host_overhead as ho
import torch
from harness import flash_mla_peer

import cupy_mla
from cupy_mla import private
from cupy_mla.calls import signature
from cupy_mla.cuda import driver
from cupy_mla.cuda.attention import choose

SUMS: dict[str, float] = {}
now = time.perf_counter_ns


def timed(name, function):
    @wraps(function)
    def call(*arguments):
        began = now()
        result = function(*arguments)
        SUMS[name] = SUMS.get(name, 0) + now() - began
        return result

    return call


def once(call, wait=True):
    if wait:
        torch.cuda.synchronize()
    SUMS.clear()
    began = now()
    result = call()
    taken = now() - began
    del result
    return taken


def middle(taken):
    return statistics.median(taken) / 1e3


def forget_sizes():
    for every in signature._every:
        for known in every.known.values():
            known._forget_sizes()


def timers():
    for name in ("plain_submitter", "attribute_submitter"):
        make = getattr(driver, name)
        setattr(driver, name, lambda *a, make=make: timed("launch", make(*a)))
    measure_of = signature.measure_of
    signature.measure_of = lambda *a: timed("find", measure_of(*a))
    torch_empty, cupy_empty = private.torch_empty, private.cupy_empty
    private.torch_empty = lambda: timed("memory", torch_empty())
    private.cupy_empty = lambda: timed("memory", cupy_empty())
    choose.Chooser.__call__ = timed("choice", choose.Chooser.__call__)


def rows(kind, of, peer):
    wanted = ("decode V32 h 128 b 1 to", "prefill h 64 s_q 1 to", "prefill h 16 s_q 1 to", "concat_and", "build_c128a")
    for cases in (ho.decode_cases(peer), ho.prefill_cases(peer), ho.operation_cases()):
        for case in cases:
            if case.new is not None and case.name.startswith(wanted):
                yield case.name, case.new(of)


def main():
    peer = flash_mla_peer()
    print(f"{'':38}{'':7}{'new':>7}{'again':>7}{'same':>7}{'hot':>7}")
    for kind, of in (("torch", lambda tensor: tensor), ("cupy", cupy_mla.to_cupy)):
        for name, calls in rows(kind, of, peer):
            calls = (
                list(calls)
                if not name.startswith(("concat", "build"))
                else [c for c, _ in zip(calls, range(96), strict=False)]
            )
            new = middle([once(call) for call in calls][48:])
            again = middle([once(call) for call in calls][48:])
            same, hot = [], []
            for call in calls[48:]:
                for _ in range(2):
                    once(call)
                same.append(once(call))
                hot.append(once(call, wait=False))
            print(f"{name:38}{kind:7}{new:7.1f}{again:7.1f}{middle(same):7.1f}{middle(hot):7.1f}", flush=True)
    for kernel in cupy_mla.cuda.all_kernels():
        kernel._loaded.clear()
    signature.forget_calls()
    timers()
    print(f"\n{'with timers':38}{'':7}{'new':>7}{'find':>7}{'choice':>7}{'memory':>7}{'launch':>7}")
    for kind, of in (("torch", lambda tensor: tensor), ("cupy", cupy_mla.to_cupy)):
        for name, calls in rows(kind, of, peer):
            taken, sums = [], []
            for call, _ in zip(calls, range(144), strict=False):
                taken.append(once(call))
                sums.append(dict(SUMS))
            parts = "".join(
                f"{middle([s.get(part, 0) for s in sums[48:]]):7.1f}" for part in ("find", "choice", "memory", "launch")
            )
            print(f"{name:38}{kind:7}{middle(taken[48:]):7.1f}{parts}", flush=True)


main()
