"""Temporary: host time of calls, main's (old_main.tar.gz) beside this tree's. python gpu_host.py

A table `old>new` for torch and CuPy, sizes seen before and new, least of the runs; then, of this tree, where the time
of new sizes goes, with timers inside: the function that finds a form, launches, memory.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import wraps
from pathlib import Path

HERE = Path(__file__).resolve().parent
ONLY = "decode|prefill|gather|concat_and|combine|compute|build|dynamic"
PARTS = (
    "decode.*h 128",
    "decode.*h 16",
    "prefill h 64",
    "prefill h 16",
    "prefill h 128",
    "concat_and|dynamic",
    "gather",
)
PARTS += ("combine|compute|build",)
COLUMNS = ("torch_us", "cupy_us", "torch_new_us", "cupy_new_us")
SUMS: dict[str, float] = {}
now = time.perf_counter_ns


def started(tree: Path, out: str, only: str) -> subprocess.Popen:
    Path(out).mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(tree), "OUT": out, "CUPY_MLA_PEER": str(HERE / ".peer")}
    command = [sys.executable, f"{tree}/benchmarks/host_overhead.py", "--quick", "--only", only]
    return subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def timed(name, function):
    @wraps(function)
    def call(*arguments):
        began = now()
        result = function(*arguments)
        SUMS[name] = SUMS.get(name, 0) + now() - began
        return result

    return call


def parts():
    sys.path[:0] = [str(HERE), str(HERE / "benchmarks")]
    import cupy
    import host_overhead as ho
    import torch
    from harness import flash_mla_peer

    import cupy_mla
    from cupy_mla import private
    from cupy_mla.calls import signature
    from cupy_mla.cuda import driver

    for name in ("plain_submitter", "attribute_submitter"):
        make = getattr(driver, name)
        setattr(driver, name, lambda *a, make=make: timed("launch", make(*a)))
    measure_of = signature.measure_of
    signature.measure_of = lambda *a: timed("find", measure_of(*a))
    torch_empty, cupy_empty = private.torch_empty, private.cupy_empty
    private.torch_empty = lambda: timed("memory", torch_empty())
    private.cupy_empty = lambda: timed("memory", cupy_empty())
    cupy.cuda.alloc = timed("memory", cupy.cuda.alloc)
    peer = flash_mla_peer()
    wanted = ("decode V32 h 16 b 1 to", "prefill h 16 s_q 1 to", "cp_gather_indexer", "compute_swa")
    for kind, of in (("torch", lambda tensor: tensor), ("cupy", cupy_mla.to_cupy)):
        for cases in (ho.decode_cases(peer), ho.prefill_cases(peer), ho.operation_cases()):
            for case in cases:
                if case.new is None or not case.name.startswith(wanted):
                    continue
                sums = []
                for call in list(case.new(of)):
                    torch.cuda.synchronize()
                    SUMS.clear()
                    began = now()
                    result = call()
                    SUMS["all"] = now() - began
                    sums.append(dict(SUMS))
                    del result
                middle = {n: statistics.median(s.get(n, 0) for s in sums[48:]) / 1e3 for n in sums[-1]}
                print(f"{kind:5} {case.name[:32]:32}", *(f"{n} {us:5.1f}" for n, us in middle.items()), flush=True)


def main():
    began = time.monotonic()
    folder = tempfile.mkdtemp()
    old = Path(folder) / "old"
    old.mkdir()
    subprocess.run(["tar", "xzf", str(HERE / "old_main.tar.gz"), "-C", str(old)], check=True)
    warm = [started(HERE, f"{folder}/warm{i}", only) for i, only in enumerate(PARTS)]
    for process in warm:
        text = process.communicate()[0]
        if process.returncode:
            print(text[-1500:])
    print(f"warm after {time.monotonic() - began:.0f} s", flush=True)
    rows: dict[str, dict] = {}
    for turn, (name, tree) in enumerate((("new", HERE), ("old", old), ("new", HERE))):
        process = started(tree, f"{folder}/{turn}", ONLY)
        text = process.communicate()[0]
        if process.returncode:
            print(text[-1500:])
            continue
        for row in json.loads(Path(f"{folder}/{turn}/host_overhead.part.json").read_text())["rows"]:
            of = rows.setdefault(row["case"], {})
            for column in (*COLUMNS, "peer_us", "peer_new_us"):
                if column in row:
                    key = column if column.startswith("peer") else (name, column)
                    of[key] = min(of.get(key, 1e9), row[column])
    print(f"{'case':44} {'peer':>5}", *(f"{column[:-3]:>12}" for column in COLUMNS), "(old>new, us)")
    for case, of in rows.items():
        peer = of.get("peer_us", of.get("peer_new_us", 0))
        cells = (f"{of.get(('old', c), 0):5.1f}>{of[('new', c)]:5.1f}" if ("new", c) in of else "-" for c in COLUMNS)
        print(f"{case[:44]:44} {peer:5.1f}", *(f"{cell:>12}" for cell in cells))
    print(f"measured after {time.monotonic() - began:.0f} s", flush=True)
    subprocess.run([sys.executable, __file__, "--parts"], check=False)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    parts() if "--parts" in sys.argv else main()
