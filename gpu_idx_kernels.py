# ruff: noqa
"""Temporary: variants of logits_sm90, each in a process of its own; a row a process, printed at once.

python gpu_idx_kernels.py: starts all, waits until they have loaded, then lets one after the other measure; a process
that takes more than 4 s is killed.
"""

import os, select, subprocess, sys, time

U = dict(UNDERWAY=2, PREFETCH=0)
F, T = dict(U, SUMS=0), dict(U, SUMS=0, TURNS=2)
P = {  # prefill, most promising first
    "fp32": F,
    "mma": U,
    "mma parts": dict(U, PARTS=2),
    "fp32 t2": T,
    "mma t2": dict(U, TURNS=2),
    "fp32 parts": dict(F, PARTS=2),
    "fp32 t1": dict(F, TURNS=1),
    "mma t1": dict(U, TURNS=1),
    "mma U0": dict(U, UNDERWAY=0),
    "fp32 U0": dict(F, UNDERWAY=0),
    "mma parts U0": dict(U, PARTS=2, UNDERWAY=0),
    "few t2": dict(T, DIAG=1),
    "mma 4x128": dict(U, wgs=4, queries=2),
    "mma 3x128": dict(U, wgs=3, queries=2, stages=12),
}
C = dict(together=0, paged=1, PREFETCH=0)
D = {  # decode, without risk: one process
    1: {"c2 fp32": dict(C, stages=10, ctas=2, queries=1, SUMS=0), "c2 mma": dict(C, stages=10, ctas=2, queries=1)},
    2: {"w3 fp32": dict(C, stages=20, wgs=3, queries=2, SUMS=0), "w3 mma": dict(C, stages=20, wgs=3, queries=2)},
}
PRE = ((4096, 8192), (256, 131072))
DEC = ((1, 1, 4096), (64, 1, 8192), (64, 1, 32768), (64, 1, 131072), (64, 2, 32768))


def child(name):
    sys.path.insert(0, "benchmarks")
    import torch
    import indexer as bench
    from harness import time_side_by_side
    from cupy_mla.calls.signature import forget_calls
    from cupy_mla.cuda import logits_sm90 as m, structs
    from cupy_mla.cuda.kernel import Kernel
    from cupy_mla.cuda.paging import ceil_div
    from cupy_mla.cuda.program import Launch
    from cupy_mla.layouts import INDEXER_FP8
    from cupy_mla.sizes import least

    bench.SAMPLE = 4

    def kernel(paged=0, heads=64, queries=4, wgs=2, together=1, stages=10, ctas=1, **kw):
        defines = {
            **INDEXER_FP8.defines(),
            "HEADS": heads,
            "QUERIES": queries,
            "WARPGROUPS": wgs,
            "TOGETHER": together,
            "STAGES": stages,
            "CTAS_PER_SM": ctas,
            "PAGED": paged,
            "ALIGNED": 1,
            **kw,
        }
        return Kernel("indexer/logits_sm90.cu", structs.LOGITS, defines, archs=("90a",), target="90a", overlaps=True)

    now = {}

    def patched(gpu, heads, paged, requests, queries, width, params):
        c = now["config"]
        per = c.get("queries", 4) * (c.get("wgs", 2) if c.get("together", 1) else 1)
        units = requests * ceil_div(queries, per) * ceil_div(width, 64)
        return Launch(now["kernel"], (least(c.get("ctas", 1) * gpu.sms, units), 1, 1), params)

    m.launch = patched
    shapes = DEC if name == "decode" else PRE
    rows = []
    for shape in shapes:
        case = bench.Case("decode_logits" if name == "decode" else "prefill_logits", shape)
        for label, c in (D[shape[1]] if name == "decode" else {name: P[name]}).items():
            k = kernel(**c)
            k.load(0)
            rows.append((case, label, c, k))
    sets = {case: bench.inputs(case) for case, label, c, k in rows if name != "decode"}
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    found = []
    for case, label, c, k in rows:
        if case not in sets:
            sets = {case: bench.inputs(case)}
        now.update(config=c, kernel=k)
        forget_calls()
        calls = bench.ours(case, sets[case])
        diff = bench.check_logits(case, sets[case][0], calls[0]())
        (us,) = time_side_by_side(calls)
        found.append(f"{label} {'x'.join(map(str, case.shape))} {us:.1f} ({diff:.0e})")
    print("; ".join(found), flush=True)
    os._exit(0)


def line_of(process, deadline):
    ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.time(), 0))
    return process.stdout.readline().strip() if ready else None


def main():
    start = time.time()
    names = [*list(P)[:6], "decode", *list(P)[6:]]
    errors = {n: open(f"/tmp/idx_{i}.err", "w+") for i, n in enumerate(names)}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    every = {
        n: subprocess.Popen([sys.executable, __file__, n], stdin=-1, stdout=-1, stderr=errors[n], text=True, env=env)
        for n in names
    }
    loaded = {n: line_of(p, start + 25) for n, p in every.items()}
    print(
        f"loaded {sum(v == 'ready' for v in loaded.values())} of {len(names)} in {time.time() - start:.1f} s",
        flush=True,
    )
    for n, p in every.items():
        if loaded[n] == "ready" and time.time() - start < 42:
            p.stdin.write("go\n")
            p.stdin.flush()
            row = line_of(p, time.time() + (8 if n == "decode" else 4))
        else:
            row = "not loaded, or no time"
        if not row:
            errors[n].seek(0)
            row = "TIMEOUT or error " + errors[n].read()[-300:]
        p.kill()
        print(f"{n:<13}{row}", flush=True)
    print(f"{time.time() - start:.1f} s")


if __name__ == "__main__":
    child(sys.argv[1]) if len(sys.argv) > 1 else main()
