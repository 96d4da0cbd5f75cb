"""Temporary: versions of the bf16 pipeline and divisions of bf16 decode, side by side."""

import random, sys, time

T0 = time.time()
LIMIT = float(sys.argv[1]) if len(sys.argv) > 1 else 40
DRY = "--dry" in sys.argv
sys.path.insert(0, "benchmarks")
from concurrent.futures import ThreadPoolExecutor
from cupy_mla.cuda.attention import bf16_cluster_sm90, bf16_few_heads_sm90, bf16_shares_sm90, bf16_sm90, choose
from cupy_mla.cuda.attention.choose import Choice
from cupy_mla.layouts import BF16_512, BF16_576

MODULES = (bf16_sm90, bf16_shares_sm90, bf16_cluster_sm90)
V = {
    "now": {},
    "soft": dict(X_SOFT=1),
    "stm": dict(X_SOFT=1, X_STM=1),
    "one": dict(X_SOFT=1, X_STM=1, X_ONE=1),
    "parts": dict(X_SOFT=1, X_STM=1, X_ONE=1, X_PARTS=2),
    "swap": dict(X_SOFT=1, X_STM=1, X_ONE=1, X_SWAP=1),
    "rows": dict(X_SOFT=1, X_STM=1, X_ONE=1, X_ROWS=2),
    "p+s": dict(X_SOFT=1, X_STM=1, X_ONE=1, X_PARTS=2, X_SWAP=1),
    "p+r+s": dict(X_SOFT=1, X_STM=1, X_ONE=1, X_PARTS=2, X_SWAP=1, X_ROWS=2),
    "k9": dict(X_SOFT=1, X_STM=1, X_ONE=1, X_KEPT=9),
    "k9+s": dict(X_SOFT=1, X_STM=1, X_ONE=1, X_SWAP=1, X_KEPT=9),
    "pdl": dict(X_SOFT=1, X_STM=1, X_ONE=1, X_PDL=1),
}
KERNELS = {}
for name, d in V.items():
    for m in MODULES:
        for layout in (BF16_576, BF16_512):
            if layout is BF16_512 and m is not bf16_sm90:
                continue
            k = m.kernel.__wrapped__(layout)
            k.defines.update(d)
            k.overlaps |= "X_PDL" in d
            KERNELS[name, m, layout] = k
real_choose = choose.choose
if DRY:
    for (n, m, l), k in KERNELS.items():
        r = k.compile("90a")[1]
        print(n, k.name, l.name, [x for x in r.splitlines() if "spill" in x][0][-60:], "C75" in r)
    sys.exit()
import torch
import harness

harness.REPEATS = 9
from harness import SETS, flash_mla_peer, time_side_by_side
from inputs import normal, random_slots
from rows import decode_sets
from fa3_peer import fa3_calls, fa3_peer
from cupy_mla import flash_mla, sparse_decode
from cupy_mla.calls.signature import forget_calls

torch.cuda.init()
torch.manual_seed(0)
fa3 = ThreadPoolExecutor(1).submit(fa3_peer)
with ThreadPoolExecutor(14) as pool:
    list(pool.map(lambda k: k.load(0), KERNELS.values()))
peer = flash_mla_peer()
fa3.result()
print(f"compiled {time.time() - T0:.1f} s", flush=True)


def use(variant="now", choice=None):
    for m in MODULES:
        m.kernel = lambda layout, m=m: KERNELS[variant, m, layout]
    choose.choose = real_choose if choice is None else lambda *a: choice
    choose.chooser.cache_clear()
    forget_calls()


def with_(f, variant="now", choice=None):
    def call():
        use(variant, choice)
        return f()

    return call


def rel(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def sets_p(h, d, n, kv):
    return [(normal(n, h, d), random_slots(n, 1, 2048, slots=32768)) for _ in range(SETS)]


def pre(q, kv, i):
    return flash_mla.flash_mla_sparse_fwd(q, kv, i, q.shape[-1] ** -0.5)


KV = {d: normal(32768, 1, d) for d in (576, 512)}
# correctness
for d in (576, 512):
    q, idx = 2 * normal(5, 64, d), random_slots(5, 1, 2048, slots=32768)
    idx[1, :, 700:] = -1
    idx[2, :, 128:640] = -1
    idx[3] = -1
    idx[4, :, ::3] = 1 << 20
    ok = (idx >= 0) & (idx < 32768)
    rows = KV[d][torch.where(ok, idx, 0).long()[:, 0], 0].double()
    l = torch.einsum("shd,std->sht", q.double(), rows) * d**-0.5
    l.masked_fill_(~ok, -float("inf"))
    lse = l.logsumexp(-1, keepdim=True)
    lse[lse == -float("inf")] = 0
    ref = torch.einsum("sht,std->shd", (l - lse).exp(), rows[..., :512])
    for m in MODULES if d == 576 else MODULES[:1]:
        c = Choice(
            m.__name__.split(".")[-1],
            64,
            *{bf16_sm90: (), bf16_cluster_sm90: (4, 4), bf16_shares_sm90: (0, 1, 7, 2)}[m],
        )
        for v in V:
            o = [with_(lambda: pre(q, KV[d], idx), v, c)() for _ in range(3)]
            e, top = rel(o[0][0], ref), (o[0][1].double() - l.amax(-1)).abs()
            bad = e > 2.5e-3 or not torch.equal(o[0][0], o[2][0]) or top[torch.isfinite(top)].max().item() > 1e-3
            if v == "now" or bad:
                print("WRONG" if bad else "ok", d, c.kernel, v, f"{e:.2e}", flush=True)
use()


def row(label, candidates):
    if time.time() - T0 > LIMIT:
        return
    try:
        ts = time_side_by_side(*candidates.values())
        print(f"{label}: " + " ".join(f"{n} {t:.1f}" for n, t in zip(candidates, ts)), flush=True)
    except Exception as e:
        print(label, type(e).__name__, str(e)[:200], flush=True)


def prefill(h, d, n, ways, theirs=True, few=SETS):
    s = sets_p(h, d, n, KV[d])[:few]
    c = {k: [with_(lambda q=q, i=i: pre(q, KV[d], i), *w) for q, i in s] for k, w in ways.items()}
    if theirs:
        c["peer"] = [lambda q=q, i=i: peer.flash_mla_sparse_fwd(q, KV[d], i, d**-0.5) for q, i in s]
    row(f"prefill h {h} d {d} n {n}", c)


ALL = {v: (v,) for v in V}
for h, d, n in (
    (128, 576, 51),
    (128, 576, 190),
    (128, 512, 50),
    (64, 576, 121),
    (64, 576, 242),
    (128, 576, 92),
    (64, 576, 145),
    (64, 576, 48),
):
    prefill(h, d, n, ALL)
prefill(64, 576, 2048, ALL, few=1)
SLOTS = 1 << 20
cache = torch.empty(SLOTS // 64, 64, 1, 576, device="cuda", dtype=torch.bfloat16)
for i in range(0, len(cache), 1024):
    cache[i : i + 1024] = normal(*cache[i : i + 1024].shape)


def decode(h, b, ways):
    if time.time() - T0 > LIMIT:
        return
    s = decode_sets(h, b, 1, cache, 2048, slots=SLOTS)
    c = {
        k: [with_(lambda x=x: sparse_decode(x["q"], x["k_cache"], x["indices"], 576**-0.5), *w) for x in s]
        for k, w in ways.items()
    }
    fa = fa3_calls(s)
    for k in ways:
        e = rel(c[k][0]()[0], fa[0]())
        if not e < 5e-3:
            print("WRONG", h, b, k, e)
    use()
    c["fa3"] = fa
    row(f"decode h {h} b {b}", c)


for h, b in ((64, 128), (64, 140), (64, 200), (32, 44), (64, 64), (128, 70)):
    decode(h, b, ALL)
few = lambda h, s, c=1, q=1: ("now", Choice("bf16_few_heads_sm90", h, s, c, queries=q))
old = lambda h, s, c=1: ("now", Choice("few_heads_sm90", h, s, c))
even = ("now", Choice("bf16_shares_sm90", 64, 0, 1, 132, 2))
whole = ("now", Choice("bf16_sm90", 64))


def alike(items, n):
    return ("now", Choice("bf16_shares_sm90", 64, n, 1, items * n))


def clu(n):
    return ("now", Choice("bf16_cluster_sm90", 64, n, n))


D = ("now",)
for h, b, ways in (
    (32, 44, {"few3": few(32, 3), "few2c": few(32, 2, 2), "old3": old(32, 3), "even": even, "alike3": alike(44, 3)}),
    (32, 59, {"few2c": few(32, 2, 2), "few2": few(32, 2), "even": even, "alike2": alike(59, 2)}),
    (32, 28, {"few4c": few(32, 4, 4), "old4c": old(32, 4, 4), "even": even, "alike4": alike(28, 4)}),
    (32, 123, {"few1": few(32, 1), "even": even}),
    (8, 44, {"few3": few(8, 3), "few2c": few(8, 2, 2), "even": even, "alike3": alike(44, 3)}),
    (8, 64, {"few2": few(8, 2), "even": even}),
    (8, 33, {"few4": few(8, 4), "few3c": few(8, 3, 3), "even": even}),
    (16, 42, {"few3": few(16, 3), "few2c": few(16, 2, 2), "even": even}),
    (64, 21, {"even": even, "clu6": clu(6), "few6": few(32, 3), "alike6": alike(21, 6)}),
    (64, 29, {"even": even, "alike4": alike(29, 4)}),
    (128, 13, {"even": even, "alike5": alike(26, 5)}),
    (128, 32, {"even": even, "alike2": alike(64, 2)}),
    (64, 132, {"even": even}),
    (64, 66, {"even": even, "alike2": alike(66, 2)}),
    (64, 198, {"even": even}),
):
    decode(h, b, {"now": D, **ways})
for n in (132, 66, 198, 88):
    prefill(64, 576, n, {"whole": whole, "even": even}, theirs=False)
print("done", time.time() - T0)
