"""Temporary: variants of logits_sm90 side by side. python gpu_idx_kernels.py [prefill|decode] [--peer]"""
import os, re, sys, time, subprocess
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, "benchmarks")
import numpy as np, torch
import indexer as bench
from harness import Options, time_side_by_side
import cupy_mla
from cupy_mla.cuda import logits_sm90 as m, structs
from cupy_mla.cuda.kernel import Kernel
from cupy_mla.layouts import INDEXER_FP8
from cupy_mla.sizes import least
from cupy_mla.cuda.paging import ceil_div
from cupy_mla.cuda.program import Launch
from cupy_mla.calls.signature import forget_calls

def kernel(paged, heads=64, queries=4, wgs=2, together=1, stages=10, ctas=1, one=0, **kw):
    return Kernel("indexer/logits_sm90.cu", structs.LOGITS, {**INDEXER_FP8.defines(), "HEADS": heads, "QUERIES": queries,
        "WARPGROUPS": wgs, "TOGETHER": together, "STAGES": stages, "CTAS_PER_SM": ctas, "PAGED": paged, "ALIGNED": 1, **kw},
        archs=("90a",), target="90a", overlaps=True)

U = dict(UNDERWAY=2)
P = {  # prefill
    "fp32": dict(U, SUMS=0), "fp32 parts": dict(U, SUMS=0, PARTS=2), "mma": U, "mma parts": dict(U, PARTS=2),
    "mma parts U0": dict(PARTS=2), "mma 4x128": dict(U, wgs=4, queries=2), "mma 3x128": dict(U, wgs=3, queries=2, stages=12),
    "few parts": dict(U, PARTS=2, DIAG=1), "few fp32": dict(U, SUMS=0, DIAG=1),
    "2|fp32": dict(U, SUMS=0), "2|fp32 t1": dict(U, SUMS=0, TURNS=1), "2|fp32 t2": dict(U, SUMS=0, TURNS=2),
    "2|mma t1": dict(U, TURNS=1), "2|mma t2": dict(U, TURNS=2), "2|few fp32 t2": dict(U, SUMS=0, TURNS=2, DIAG=1),
}
S, C, G = dict(stages=20), dict(stages=10, ctas=2), dict(stages=10, ctas=2, one=1)
D = {
    "fp32": dict(S, SUMS=0, PREFETCH=0), "mma": dict(S, PREFETCH=0), "pf": S, "pf U4": dict(S, UNDERWAY=4),
    "pf 256B": dict(S, CPHINT=1), "pf w3": dict(S, wgs=3), "c2": dict(C, PREFETCH=0), "c2 pf": C,
    "c2g1": dict(G, PREFETCH=0), "c2g1 pf": G, "c2g1 pf U2": dict(G, UNDERWAY=2), "c2g1 pf 256B": dict(G, CPHINT=1),
    "bulk pf": dict(S, BULK=1), "bulk c2 pf": dict(C, BULK=1), "bulk c2g1 pf": dict(G, BULK=1), "bulk s12 pf": dict(stages=12, BULK=1),
}
PRE = ((4096, 8192), (256, 131072))
DEC = ((1, 1, 4096), (1, 1, 32768), (8, 1, 131072), (64, 1, 8192), (64, 1, 32768), (64, 1, 131072), (64, 2, 32768),
       (256, 1, 4096))

bench.SAMPLE = 6
chosen = None
def patched(gpu, heads, paged, requests, queries, width, params):
    c = chosen
    per = c["config"].get("queries", 4) * (c["config"].get("wgs", 2) if c["config"].get("together", 1) else 1)
    units = requests * ceil_div(queries, per) * ceil_div(width, 64)
    return Launch(c["kernel"], (least((1 if c["config"].get("one") else c["config"].get("ctas", 1)) * gpu.sms, units), 1, 1), params)
m.launch = patched

def main():
    global chosen
    work = []
    which = sys.argv[1:]
    if not which or "prefill" in which: work += [("prefill_logits", s) for s in PRE]
    if not which or "decode" in which: work += [("decode_logits", s) for s in DEC]
    peers = {}
    if "--peer" in which:
        names = "|".join(f"{w} {' x '.join(map(str, s))}" for w, s in work)
        bench.FOLDERS = [f for f in bench.FOLDERS if f.endswith(".peer-indexer")]
        peers = bench.peer_times(1, Options(False, f"^({names})$"))
    made = {}
    def config_of(w, s, name):
        if w == "prefill_logits": return dict(paged=0, **P[name])
        return dict(paged=1, together=0, queries=s[1], **D[name])
    for w, s in work:
        for name in P if w == "prefill_logits" else D:
            c = config_of(w, s, name); made.setdefault(repr(c), dict(config=c, kernel=kernel(**c)))
    torch.zeros(1, device="cuda"); start = time.time()
    def load(x):
        try: x["kernel"].load(0)
        except Exception as e: x["error"] = str(e)[-300:]; print("no", x["config"])
    with ThreadPoolExecutor(12) as pool: list(pool.map(load, made.values()))
    print(f"compiled {len(made)} in {time.time() - start:.0f} s", flush=True)
    if "--one" in which:
        case = bench.Case(*work[0]); chosen = made[repr(config_of(*work[0], which[-1]))]
        calls = bench.ours(case, bench.inputs(case)[:1])
        for _ in range(3):
            calls[0]()
        torch.cuda.synchronize()
        return
    for w, s in work:
        case = bench.Case(w, s); sets = bench.inputs(case); first = None
        peer = min(peers.get(case.name, {"": float("nan")}).values(), default=float("nan"))
        every = P if w == "prefill_logits" else D
        for group in ("", "2|"):
            candidates, names = [], []
            for name in every:
                chosen = made[repr(config_of(w, s, name))]
                if "error" in chosen or name.startswith("2|") != bool(group): continue
                calls = [lambda c=chosen, f=f: run(c, f) for f in bench.ours(case, sets)]
                got = calls[0]()
                torch.cuda.synchronize()
                d = bench.check_logits(case, sets[0], got)
                ends = (sets[0][5] if "prefill" in w else sets[0][3]).view(-1, 1)
                seen = torch.arange(got.shape[1], device="cuda") < ends
                got = torch.where(seen, got, 0)
                names.append(name + (f" DIFF {d:.1e}" if d > 1e-7 else "")); candidates.append(calls)
            if not names: continue
            del got, seen
            times = time_side_by_side(*candidates)
            print(f"{case.name}: peer {peer:.1f}; " + "; ".join(f"{n} {t:.1f}" for n, t in zip(names, times)), flush=True)
        del sets, candidates; torch.cuda.empty_cache()

def run(c, f):
    global chosen
    chosen = c
    forget_calls()
    return f()

if __name__ == "__main__":
    main()
