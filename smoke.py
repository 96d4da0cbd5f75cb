import os, sys, time, subprocess, statistics, random, json
from concurrent.futures import ProcessPoolExecutor
import multiprocessing as mp
def load(i):
    from cupy_mla.cuda import all_kernels
    k = all_kernels()[i]
    if k.suits(90):
        try: l = k.load(0); return repr(k), l.threads, l.shared_bytes
        except Exception as e: return repr(k), repr(e), 0
def main():
    import numpy as np
    from cupy_mla.cuda import all_kernels
    n = len(all_kernels()); t = time.time()
    with ProcessPoolExecutor(12, mp_context=mp.get_context("spawn")) as p: r = list(p.map(load, range(n)))
    bad = [x for x in r if x and isinstance(x[1], str)]
    print("compiled", n, "in", round(time.time() - t), "bad", bad[:3])
    import torch, cupy
    import cupy_mla
    from cupy_mla.ops.table import TABLE, Wanted
    from cupy_mla.bridges import to_numpy
    from cupy_mla.selfcheck.cases import cases
    ok = wrong = 0
    for put_name, put in (("cupy", cupy_mla.to_cupy), ("torch", lambda a: cupy_mla.to_torch(a).cuda())):
        for case in cases(np.random.default_rng(0), Wanted(many=136)):
            for rep in range(2):
                try:
                    good = case.agrees(case.run(put), case.run(np.asarray))
                except Exception as e:
                    import traceback; traceback.print_exc(limit=-4); good = False
                ok += good; wrong += not good
                if not good: print("WRONG", put_name, rep, case.name)
    print("cases ok", ok, "wrong", wrong)
    torch.cuda.synchronize()
    # host time
    rng = random.Random(0)
    big = torch.randn(264 * 128 * 576, device="cuda", dtype=torch.bfloat16); idx = torch.randint(0, 4096, (5000 * 2048,), device="cuda", dtype=torch.int32)
    cache = torch.zeros(512, 64, 656, dtype=torch.uint8, device="cuda"); kv = torch.zeros(8192, 1, 576, dtype=torch.bfloat16, device="cuda")
    def measure(name, make, sizes):
        new = []
        for b in sizes:
            f = make(b); torch.cuda.synchronize()
            s = time.perf_counter_ns(); x = f(); new.append((time.perf_counter_ns() - s) / 1e3); del x
        seen = []
        f = make(sizes[0]); 
        for _ in range(20):
            torch.cuda.synchronize()
            for _ in range(16):
                s = time.perf_counter_ns(); x = f(); seen.append((time.perf_counter_ns() - s) / 1e3); del x
        print(f"{name:14s} new median {statistics.median(new[20:]):.1f} p90 {sorted(new[20:])[int(.9*len(new[20:]))]:.1f}  seen {statistics.median(seen):.1f}")
    sizes = rng.sample(range(1, 265), 200)
    for h in (128, 64, 16):
        measure(f"decode h {h}", lambda b: (lambda q=big[:b*h*576].view(b,1,h,576), i=idx[:b*2048].view(b,1,2048): cupy_mla.sparse_decode(q, cache, i)), sizes)
        measure(f"prefill h {h}", lambda b: (lambda q=big[:b*h*576].view(b,h,576), i=idx[:b*1024].view(b,1,1024): cupy_mla.sparse_prefill(q, kv, i, 0.1)), sizes)
    measure("decode h128 b1", lambda b: (lambda q=big[:128*576].view(1,1,128,576), i=idx[:2048].view(1,1,2048): cupy_mla.sparse_decode(q, cache, i)), [1]*60)
    big_idx = idx[:5000*2048].view(5000, 2048)
    kvc = torch.zeros(5000, 512, dtype=torch.bfloat16, device="cuda"); kpe = torch.zeros(5000, 64, dtype=torch.bfloat16, device="cuda"); slots = torch.arange(5000, device="cuda")
    s2 = rng.sample(range(1, 5000), 200)
    measure("pack", lambda n: (lambda a=(kvc[:n], kpe[:n], cache, slots[:n]): cupy_mla.concat_and_cache_mla(*a)), s2)
    req = torch.zeros(5000, dtype=torch.int32, device="cuda"); table = torch.zeros(64, 512, dtype=torch.int32, device="cuda")
    measure("convert", lambda n: (lambda a=(req[:n], table, big_idx[:n], 64): cupy_mla.convert_req_index_to_global_index(*a)), s2)
    # launch costs
    from cupy_mla.cuda import driver
    from cupy_mla import private
    def t(f, n=3000):
        s = time.perf_counter_ns()
        for _ in range(n): f()
        return round((time.perf_counter_ns() - s) / n / 1e3, 2)
    print("env", t(private.environment_reader("X")), t(private.public_environment_reader("X")), "stream", t(private.torch_stream_reader(0)), t(private.public_torch_stream_reader(0)),
          "empty", t(lambda: private.torch_empty()((4,), (1,), torch.uint8)), t(lambda: private.public_torch_empty()((4,), (1,), torch.uint8)),
          "cupy empty", t(lambda: private.cupy_empty()((4,), "B")), t(lambda: private.public_cupy_empty()((4,), "B")))
if __name__ == "__main__": main()
