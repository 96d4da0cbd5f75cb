"""Temporary: where the time of a decode step goes, vLLM's own and ours. usage: gpu_engines_host.py PACK [--limit S]

Runs A as the benchmark does, B with each engine's main thread on one CPU and its other threads on others.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import vllm_engine as bench  # noqa: E402

TOKENS = 64
STARTING = 80  # seconds at most
SPENT, COUNT = {}, {}


class Event:
    """An event whose synchronisation is timed."""

    def __init__(self, event, name):
        self.event, self.record, self.synchronize = event, event.record, timed(event.synchronize, name)


def timed(function, name):
    def call(*args, **kwargs):
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            SPENT[name] = SPENT.get(name, 0) + time.perf_counter() - began
            COUNT[name] = COUNT.get(name, 0) + 1

    return call


def instrument(engine):
    core = engine.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    places = [
        (core.scheduler, ["schedule", "update_from_output"]),
        (runner, ["execute_model", "_update_states", "_prepare_inputs", "_build_attention_metadata", "_model_forward",
                  "sample_tokens", "_sample", "_bookkeeping_sync", "_preprocess"]),
        (engine.llm_engine.output_processor, ["process_outputs"]),
    ]  # fmt: skip
    for groups in runner.attn_groups:
        for group in groups:
            for builder in group.metadata_builders:
                short = type(builder).__name__.replace("MetadataBuilder", "").replace("Builder", "")
                builder.build = timed(builder.build, "build " + ("indexer" if "Indexer" in short else "attention"))
    for owner, names in places:
        for name in names:
            setattr(owner, name, timed(getattr(owner, name), name))
    if runner.prepare_inputs_event is not None:
        runner.prepare_inputs_event = Event(runner.prepare_inputs_event, "wait for inputs")
    from vllm.v1.worker import gpu_model_runner as module

    output = module.AsyncGPUModelRunnerOutput
    output.get_output = timed(output.get_output, "get_output")
    engine.instrumented = True


def loop_us():
    """A piece of Python: how fast this process runs at all."""
    times = []
    for _ in range(9):
        began = time.perf_counter()
        sum(i * i for i in range(4000))
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def threads_ms():
    """CPU time of this process's other threads so far."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            name = (task / "comm").read_text().strip()
            if int(task.name) != os.getpid():
                found[f"{name} {task.name}"] = 10 * (int(fields[11]) + int(fields[12]))
    return found


def host(engine, requests):
    """Median step in us, mean us of each part, the loop before and behind, other threads' CPU ms, CPUs, switches."""
    import resource

    if not hasattr(engine, "instrumented"):
        instrument(engine)
    SPENT.clear()
    COUNT.clear()
    first, others = loop_us(), threads_ms()
    used = resource.getrusage(resource.RUSAGE_THREAD)
    began, cpu = time.perf_counter(), time.thread_time()
    stops = []
    for end in bench.decoding(engine, requests, TOKENS):
        if not stops:
            first_tokens = end - began
            SPENT.clear()
            COUNT.clear()
            began, cpu = time.perf_counter(), time.thread_time()
        stops.append(end)
    wall, spent = time.perf_counter() - began, time.thread_time() - cpu
    after = resource.getrusage(resource.RUSAGE_THREAD)
    busy = {name: ms - others.get(name, 0) for name, ms in threads_ms().items() if ms - others.get(name, 0) >= 20}
    step = statistics.median(b - a for a, b in itertools.pairwise(stops))
    return {
        "step": 1e6 * step, "first": 1e6 * first_tokens, "loop": first, "loop behind": loop_us(),
        "cpu share": spent / wall, "switched off": after.ru_nivcsw - used.ru_nivcsw,
        "slept": after.ru_nvcsw - used.ru_nvcsw, "threads": busy, "python threads": threading.active_count(),
        "cpu": Path("/proc/self/stat").read_text().rpartition(")")[2].split()[36],
        "parts": {name: 1e6 * s / (len(stops) - 1) for name, s in SPENT.items()},
        "calls": {name: round(n / (len(stops) - 1), 2) for name, n in COUNT.items()},
    }  # fmt: skip


def gpu(engine, requests):
    """Of a decode step: us of kernels and of all from the first to the last, and the runtime's calls with their us."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    steps = bench.decoding(engine, requests, 16 + requests // 2)
    for _ in range(4):
        next(steps)
    import torch

    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        began = time.perf_counter()
        for _ in range(8):
            next(steps)
        wall = time.perf_counter() - began
    for _ in steps:
        pass
    averages = profiler.key_averages()
    kernels = [(e.key, e.self_device_time_total / 8, e.count / 8) for e in averages if e.device_type == DeviceType.CUDA]
    calls = [(e.key, e.self_cpu_time_total / 8, e.count / 8) for e in averages if e.device_type == DeviceType.CPU]
    spans = [e.time_range for e in profiler.events() if e.device_type == DeviceType.CUDA]
    span = (max(s.end for s in spans) - min(s.start for s in spans)) / 8 if spans else 0
    by_time = sorted(kernels, key=lambda k: -k[1])
    return {
        "wall": 1e6 * wall / 8, "busy": sum(us for _, us, _ in kernels), "span": span,
        "nodes": sum(n for _, _, n in kernels), "kernels": by_time, "calls": sorted(calls, key=lambda c: -c[1]),
    }  # fmt: skip


def pin(engine, main, others):
    """The main thread on some CPUs, all others on others."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.name), main if int(task.name) == os.getpid() else others)
    return True


bench.QUESTIONS |= {"host": host, "gpu": gpu, "pin": pin}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("pack", type=Path)
    parser.add_argument("--limit", type=float, default=98)
    options = parser.parse_args()
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="vllm_host"))
    os.environ["ENGINE_CACHES"] = str(folder / "caches")
    out = Path(os.environ["OUT"])
    bench.restore_caches(options.pack)
    bench.prepare(options.pack, folder)
    sys.path.insert(0, str(options.pack.resolve()))
    import tiny_v32

    settings = [s for s in bench.SETTINGS if s.mode == "graphs" and (s.cache == "auto" or s.layers > 1)]
    for s in settings:
        tiny_v32.write(folder / s.model, heads=s.heads, topk=s.topk, layers=s.layers)
    engines, one = {}, settings[0]
    for s in settings:
        for variant in ("ours", "stock"):
            engines[s, variant] = bench.Engine(folder, s, variant, 1)
    for kernel in ("bf16_sm90", "bf16_shares_sm90"):
        (folder / kernel).mkdir()
        (folder / kernel / one.model).symlink_to(folder / one.model)
        os.environ["CUPY_MLA_KERNELS"] = kernel
        engines[one, kernel] = bench.Engine(folder / kernel, one, "ours", 1)
        del os.environ["CUPY_MLA_KERNELS"]
    print(f"engines begin after {time.monotonic() - start:.0f} s", flush=True)
    up = set(bench.started(list(engines.values()), start + STARTING))
    print(f"{len(up)} of {len(engines)} up after {time.monotonic() - start:.0f} s", flush=True)
    print("took:", *(e.seconds for e in engines.values()), flush=True)
    wait_for(Path("/tmp/go_engines"), 40)
    print(f"measuring begins after {time.monotonic() - start:.0f} s", flush=True)
    cpus = sorted(os.sched_getaffinity(0))
    print("cpus", len(cpus), "siblings", *siblings(cpus), "load", *os.getloadavg(), flush=True)
    details = []
    try:
        for s in settings:
            pair = {v: engines[s, v] for v in ("ours", "stock") if engines[s, v] in up}
            extra = {v: e for (of, v), e in engines.items() if of == s and v not in pair and e in up}
            if len(pair) < 2:
                print("left out:", s)
                continue
            with bench.alone(list(up), [*pair.values(), *extra.values()]):
                for requests in (1, 64):
                    if time.monotonic() - start > options.limit:
                        print("left out:", s, requests)
                        continue
                    details.append(measure(s, requests, pair, extra, cpus))
                    (out / "host.json").write_text(json.dumps(details, indent=1))
    finally:
        for engine in engines.values():
            engine.process.kill()
    bench.keep(out)
    print(f"done after {time.monotonic() - start:.0f} s", flush=True)


def wait_for(file, seconds):
    """Until another program on this machine has ended and made the file, or so many seconds."""
    end = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.2)


def siblings(cpus):
    with contextlib.suppress(OSError):
        for cpu in cpus[:3]:
            yield Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()


def measure(s, requests, pair, extra, cpus):
    for e in pair.values():
        e.ask("pin", cpus, cpus)
        e.ask("speed", requests, 32)
    found = {"setting": str(s), "requests": requests}
    for run in "AB":
        for e in pair.values():
            if run == "B":
                e.ask("pin", cpus[2:3], cpus[4:7])
        for i in range(2 if requests == 64 else 3):
            for v in list(pair)[:: 1 if i % 2 == 0 else -1]:
                found.setdefault(f"{v} {run}", []).append(pair[v].ask("host", requests))
    for v, e in list((pair | extra if requests == 64 else pair).items()):
        try:
            found[f"gpu {v}"] = e.ask("gpu", requests)
        except (RuntimeError, EOFError, OSError) as error:
            print(v, error)
            extra.pop(v, None)
    show(found, list(pair), [v for v in extra if f"gpu {v}" in found])
    return found


def show(found, pair, extra):
    print(f"--- {found['setting']}, {found['requests']}: us a step (us of the loop)")
    for run in "AB":
        print(
            run, *(f"{v} " + " ".join(f"{r['step']:.0f}({r['loop']:.0f})" for r in found[f"{v} {run}"]) for v in pair)
        )
    every = {v: sorted(found[f"{v} A"] + found[f"{v} B"], key=lambda r: r["step"]) for v in pair}
    parts = {
        name: [f"{r['parts'].get(name, 0):.0f}" for v in pair for r in (every[v][0], every[v][-1])]
        for name in every["ours"][0]["parts"]
    }
    wanted = {name: us for name, us in parts.items() if max(map(float, us)) >= 60}
    print("best worst of ours, of stock:", "; ".join(f"{n.strip('_')[:16]} {' '.join(us)}" for n, us in wanted.items()))
    for v in pair:
        r = every[v][-1]
        shown = f"first {r['first']:.0f} share {r['cpu share']:.2f} off {r['switched off']} slept {r['slept']}"
        print(f"worst {v}: {shown} threads {r['threads']}")
    for v in [*pair, *extra]:
        g = found[f"gpu {v}"]
        calls = " ".join(f"{n.removeprefix('cuda')[:12]} {us:.0f}/{c:.0f}" for n, us, c in g["calls"][:3])
        top = " ".join(f"{n.split('<')[0].split('::')[-1][:12]} {us:.1f}" for n, us, _ in g["kernels"][:3])
        print(f"gpu {v}: busy {g['busy']:.0f} span {g['span']:.0f} nodes {g['nodes']:.0f}; {calls}; {top}", flush=True)


if __name__ == "__main__":
    main()
