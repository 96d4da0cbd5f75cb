# ruff: noqa
"""Temporary: GPU tests of both shapes, first times, splits. python gpu_portable.py [compile I N | time]"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache

sys.path.insert(0, "benchmarks")
from cupy_mla.calls.signature import forget_calls
from cupy_mla.cuda.attention import choose, portable
from cupy_mla.cuda.attention.portable import LARGE, SMALL, Shape
from cupy_mla.cuda.kernel import Kernel
from cupy_mla.layouts import BF16_576, V32_FP8

NO_WAIT = """
#define copy_to_stage(...) ((void)0)
#define mbarrier_arrive_after_copies(x) ((void)(x))
#define mbarrier_arrive_for_warp(x, y) ((void)(x))
#define mbarrier_wait(x, y) ((void)(x), (void)(y))
#define named_barrier_sync(x, y) ((void)(x))
#define named_barrier_arrive(x, y) ((void)(x))
"""
WHO = "// --- who a thread is"


class Bare(Kernel):
    @property
    def source(self):
        before, after = super().source.split(WHO, 1)
        return before + NO_WAIT + WHO + after


plain = portable.kernel


@cache
def made(layout, heads, limit, shape=None, bare=False):
    old = portable.shape
    if shape:
        portable.shape = lambda *_: shape
    k = plain.__wrapped__(layout, heads, limit)
    portable.shape = old
    return Bare(k.file, k.params, k.defines, archs=k.archs) if bare else k


VARIANTS = {"160": (LARGE,), "99": (SMALL,)}
BARE = {"bare": (LARGE, None, True)}


def all_kernels():
    for layout in (BF16_576, V32_FP8):
        yield made(layout, 64, LARGE, None, True)
    yield from portable.kernels()


def times():
    import harness
    import torch
    from harness import flash_mla_peer, time_side_by_side
    from inputs import normal, random_slots, v4_cache, v32_cache
    from rows import decode_calls, decode_sets, padded
    from cupy_mla import flash_mla

    torch.manual_seed(0)
    peer = flash_mla_peer()
    os.environ["CUPY_MLA_KERNELS"] = "portable"
    choose_splits = choose.portable_splits

    def force(splits=None):
        choose.portable_splits = choose_splits if splits is None else lambda *_: splits
        choose.chooser.cache_clear()
        forget_calls()

    def head(x):
        return x[0] if isinstance(x, (tuple, list)) else x

    def run(case, ours, theirs, h, bare):
        peer_us = time_side_by_side(theirs)[0]
        line = [f"{case:<20} peer {peer_us:7.1f}"]
        want = head(theirs[0]()).flatten(0, -3)[:, :h].float()
        for name, variant in (VARIANTS | (BARE if bare else {})).items():
            for splits in (None, 1) if name != "bare" else (1,):
                portable.kernel = lambda layout, heads, _: made(layout, heads, *variant)
                force(splits)
                calls = ours()
                err = ((head(calls[0]()).flatten(0, -3).float() - want).norm() / want.norm()).item()
                us = time_side_by_side(calls)[0]
                wrong = "" if name == "bare" or err < 0.01 else f" WRONG {err:.1e}"
                line.append(f"{name}{'' if splits is None else ' s1'} {us:.0f} r {peer_us / us:.2f}{wrong}")
        print(" | ".join(line), flush=True)

    harness.REPEATS = 7
    for h, d in ((64, 576), (128, 512)):
        kv = normal(32768, 1, d)
        sets = [(normal(2048, h, d), random_slots(2048, 1, 2048, slots=32768)) for _ in range(4)]
        calls = lambda m: [lambda q=q, i=i: m.flash_mla_sparse_fwd(q, kv, i, d**-0.5) for q, i in sets]
        run(f"prefill h {h} d {d}", lambda: calls(flash_mla), calls(peer), h, h == 64)
    cache = v32_cache(128 * 16384)
    for h, b, s in ((16, 128, 2), (64, 128, 2), (128, 128, 2)):
        sets = decode_sets(h, b, s, cache, 2048, slots=b * 16384)
        theirs = decode_calls(peer, [{**x, "q": padded(x["q"])} for x in sets])
        run(f"V32 h {h} b {b} s {s}", lambda: decode_calls(flash_mla, sets), theirs, h, h == 128)
    window, extra = v4_cache(1 << 20, 256), v4_cache(1 << 20, 64)
    for h, b, topk in ((64, 256, 512), (128, 100, 1024)):
        sets = decode_sets(h, b, 1, window, 128, slots=1 << 20, extra=extra, extra_topk=topk)
        run(f"V4 h {h} b {b}", lambda: decode_calls(flash_mla, sets), decode_calls(peer, sets), h, False)
    harness.REPEATS = 4
    portable.kernel = plain
    for h in (64, 16, 128):
        for b in (1, 5, 9, 20, 40, 67, 100, 140, 200):
            sets = decode_sets(h, b, 1, cache, 2048, slots=b * 8192)
            theirs = decode_calls(peer, [{**x, "q": padded(x["q"])} for x in sets])
            line = [f"V32 h {h} b {b} peer {time_side_by_side(theirs)[0]:.1f}"]
            items = b * max(1, h // 64)
            force()
            line.append(f"(chosen {choose.portable_splits(items, 64, 132)})")
            for n in [n for n in (0, 1, 2, 3, 4, 6, 8, 13, 16, 22, 32) if items * n <= 300 or n <= 1]:
                if n == 1 and items < 60 or 1 < n < 60 // items or n == 0 and items < 5:
                    continue
                force(n)
                line.append(f"{n}: {time_side_by_side(decode_calls(flash_mla, sets))[0]:.1f}")
            print(" ".join(line), flush=True)


TESTS = (
    "test_prefill_sizes", "test_prefill_with", "test_rows_that_are_not", "test_decode_sizes and None",
    "test_decode_sizes and 17", "test_decode_sizes and 3-", "test_two_caches", "test_all_invalid", "test_float32",
    "test_any_scale", "test_logits_that", "test_rows_of_unequal", "test_shares_leave", "test_same_bits",
)  # fmt: skip


def tests(seconds):
    jobs = [
        (t, k, subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/cuda/attention/test_portable.py",
             "-k", f"({t}) and {k}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for t in TESTS for k in ("portable and not 99kb", "portable_99kb")
    ]  # fmt: skip
    end = time.time() + seconds
    for t, k, job in jobs:
        try:
            out, _ = job.communicate(timeout=max(0.1, end - time.time()))
        except subprocess.TimeoutExpired:
            job.kill()
            out, _ = job.communicate()
            print("TIMEOUT", t, k, out[-100:])
            continue
        last = out.strip().splitlines()[-1]
        if job.returncode:
            errors = [l for l in out.splitlines() if l.startswith("E ") or "Error" in l][:5]
            print("FAILED", t, k, last[:80], " / ".join(e[:110] for e in errors))
        else:
            print(t[5:22], "99" if "99kb" in k and "not" not in k else "160", last.split(" in ")[0][:30], end="; ")
    print(flush=True)


what = sys.argv[1] if len(sys.argv) > 1 else ""
if what == "compile":
    i, n = map(int, sys.argv[2:])
    for number, kernel in enumerate(all_kernels()):
        if number % n == i:
            try:
                kernel.load(0)
            except Exception as e:
                print(kernel, str(e)[-400:])
elif what == "time":
    times()
else:
    start = time.time()
    jobs = [subprocess.Popen([sys.executable, __file__, "compile", str(i), "16"]) for i in range(16)]
    [j.wait() for j in jobs]
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    tests(15)
    print(f"at {time.time() - start:.0f} s", flush=True)
    try:
        subprocess.run([sys.executable, __file__, "time"], timeout=18)
    except subprocess.TimeoutExpired:
        print("time is over", flush=True)
    print(f"at {time.time() - start:.0f} s", flush=True)
