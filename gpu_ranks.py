# ruff: noqa
"""Temporary: merge_topk old and new; parts of a step of two GPUs; orders of the gather of q."""

import itertools, os, shutil, socket, statistics, subprocess, sys, threading, time

sys.path.insert(0, "benchmarks")
sys.path.insert(0, ".")
import torch, torch.distributed as dist, torch.multiprocessing as mp
import cupy_mla
from cupy_mla.calls.signature import forget_calls
from cupy_mla.cuda import context_parallel as cp, structs
from cupy_mla.cuda.kernel import Kernel, kernels_root

T0 = time.time()


def graph_us(part, n=12, repeats=9, barrier=None):
    part()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n):
            keep = part()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if barrier:
            barrier()
        torch.cuda._sleep(400_000)
        a.record()
        g.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / n)
    del g
    return statistics.median(times[2:])


def one():
    shutil.copy("gpu_merge_topk_old.txt", kernels_root() / "indexer/merge_topk_old.cu")
    old = Kernel("indexer/merge_topk_old.cu", structs.MERGE_TOPK, {})
    new = cp.merge_topk_kernel
    for ranks, k in ((2, 2048), (2, 4096), (8, 2048)):
        line = f"merge_topk {ranks} x {k}:"
        for tokens in (1, 64, 512, 4096):
            gap = 65536 // k
            local = torch.arange(k, device="cuda") * gap + torch.randint(0, gap, (ranks, tokens, k), device="cuda")
            p = (local * ranks + torch.arange(ranks, device="cuda")[:, None, None]).int()
            v = torch.randn(ranks, tokens, k, device="cuda").abs() / 2 + 2
            out, us = [], []
            for kernel in (lambda: old, new):
                cp.merge_topk_kernel = kernel
                forget_calls()
                o = torch.empty(tokens, k, device="cuda", dtype=torch.int32)
                us.append(graph_us(lambda: cupy_mla.merge_topk(v, p, k, out=o), 6, 7))
                out.append(o)
            q = p[:, :, torch.randperm(k, device="cuda")].contiguous()
            un = graph_us(lambda: cupy_mla.merge_topk(v, q, k, out=o), 6, 7) if tokens < 100 else 0
            line += f" T{tokens} {us[0]:.1f}>{us[1]:.1f} (unordered {un:.1f}) {'' if torch.equal(*out) else 'WRONG'}"
        print(line, flush=True)
    x = torch.randn(64, 65536, device="cuda")
    c = torch.randint(0, 65536, (64, 2048), device="cuda", dtype=torch.int32)
    print(
        "globalize",
        *(f"T{t} {graph_us(lambda: cupy_mla.globalize_topk(x[:t], c[:t], 2, 1)):.1f}" for t in (1, 8, 64)),
        flush=True,
    )


def measure(rank, address, what):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    if rank:
        sys.stdout = open(os.devnull, "w")

    def slow(part, n=12):
        t = torch.tensor(graph_us(part, n, 9, dist.barrier), device="cuda")
        dist.all_reduce(t, dist.ReduceOp.MAX)
        return t.item()

    def byte(n):
        return torch.zeros(n, device="cuda", dtype=torch.uint8)

    def primitives(name, byte=byte):
        for b in (1, 8, 64):
            row = []
            for what, n in (("gather topk", 16384), ("gather q", 64 * 1152)):
                s, r = byte(n * b), byte(2 * n * b)
                mine = r[rank * n * b : (rank + 1) * n * b]
                row.append((what, slow(lambda: dist.all_gather_into_tensor(r, s))))
                row.append(("in place", slow(lambda: dist.all_gather_into_tensor(r, mine))))
            n = 64 * 1040 * b
            s, r = byte(2 * n), byte(2 * n)
            none = [0, 0]
            none[1 - rank] = n
            row.append(("a2a", slow(lambda: dist.all_to_all_single(r, s))))

            def other():
                r[rank * n : (rank + 1) * n].copy_(s[rank * n : (rank + 1) * n])
                o = 1 - rank
                dist.all_to_all_single(r[o * n : (o + 1) * n], s[o * n : (o + 1) * n], none, none)

            row.append(("a2a other", slow(other)))
            print(f"{name} b{b}", *(f"{w} {t:.1f}," for w, t in row), flush=True)

    primitives(what or "nccl")
    if not what:
        import context_parallel as bench
        from cupy_mla.integrations.distributed import ContextParallel

        class Variants(bench.Work):
            def order(self, i, at):
                s = self.sets[i]
                r = self.ranks
                q = s.head_first
                if at == "logits":
                    q = r.start_gathering(s.head_first)
                logits = self.local_logits(i)
                if at == "topk":
                    q = r.start_gathering(s.head_first)
                chosen = cupy_mla.topk_indices(logits, bench.TOPK, None, s.mine.lens)
                positions = r.select(logits, chosen, bench.TOPK)
                if at == "localize":
                    q = r.start_gathering(s.head_first)
                local, length = r.localize_topk(positions)
                slots = cupy_mla.convert_req_index_to_global_index(self.requests, s.mine.table, local, bench.BLOCK_SIZE)
                return r.attend(q, s.mine.rows, slots, bench.SCALE, topk_length=length)[0]

        ranks = ContextParallel()
        for b in (1, 8, 64):
            work = Variants(ranks, b)
            acc = work.accuracy()
            n = len(work.sets)
            parts = {p: bench.microseconds_of(getattr(work, m), n) for p, m in bench.PARTS.items() if "_s" not in p}
            print(f"b{b} {time.time() - T0:.0f}s same {acc[0]:.6f} diff {acc[1]:.2e}", parts, flush=True)
            sent = torch.empty(128, b, 520, device="cuda", dtype=torch.bfloat16)
            print("  _merge", round(slow(lambda: ranks._merge(sent, None)), 1), flush=True)
            want = work.order(0, "")
            for at in ("", "localize", "topk", "logits"):
                us = bench.microseconds_of(lambda i: work.order(i, at), n)
                print(
                    f"  q gathered before {at or 'attention'}: {us}",
                    "" if torch.equal(want, work.order(0, at)) else "OTHER BITS",
                    flush=True,
                )
            del work
        try:
            backend = dist.group.WORLD._get_backend(torch.device("cuda"))
            pool = torch.cuda.MemPool(backend.mem_allocator)
            kept = {}
            with torch.cuda.use_mem_pool(pool):
                for n in [x * b * y for b in (1, 8, 64) for x in (16384, 64 * 1152, 64 * 1040) for y in (1, 2)]:
                    kept[n] = itertools.cycle([torch.zeros(n, device="cuda", dtype=torch.uint8) for _ in range(2)])
            try:
                backend.register_mem_pool(pool, symm=True)
                name = "windows"
            except TypeError:
                backend.register_mem_pool(pool)
                name = "registered"
            primitives(name, lambda n: next(kept[n]))
        except Exception as e:
            print("pool:", repr(e)[:300], flush=True)
    dist.destroy_process_group()


def spawn(what, env):
    os.environ.update(env)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    mp.spawn(measure, args=(f"tcp://localhost:{port}", what), nprocs=2)
    for k in env:
        del os.environ[k]


if __name__ == "__main__":
    if sys.argv[1] == "one":
        one()
    else:
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        print("torch", torch.__version__, "nccl", torch.cuda.nccl.version())
        for what, env in (
            ("", {}),
            ("32 ctas", {"NCCL_MIN_CTAS": "32", "NCCL_MIN_P2P_NCHANNELS": "32"}),
            ("LL128", {"NCCL_PROTO": "LL128"}),
        ):
            try:
                spawn(what, env)
            except Exception as e:
                print(what, "failed", repr(e)[:1500], flush=True)
            print(f"-- {time.time() - T0:.0f} s", flush=True)
