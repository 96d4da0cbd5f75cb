# ruff: noqa
# fmt: off
"""Times variants of the indexer's kernels side by side. Removed once they are chosen."""

import numpy as np
import torch
from harness import time_side_by_side
from indexer import Case, ours, inputs, K

import cupy_mla
from cupy_mla.calls.signature import forget_calls
from cupy_mla.cuda import logits_sm90, topk
from cupy_mla.cuda.logits_sm90 import Tile
from cupy_mla.cuda.topk import Shape


def show(case, variants, apply):
    sets = inputs(case)
    expected, line = None, []
    for name, variant in variants:
        apply(variant)
        forget_calls()
        try:
            calls = ours(case, sets)
            got = calls[0]()
            if expected is None:
                expected = got.clone()
            if got.dtype == torch.int32:
                right = torch.equal(got, expected)
            else:
                right = torch.allclose(got.nan_to_num(0, 0, 0)[:, : case.shape[-1] // 2], expected.nan_to_num(0, 0, 0)[:, : case.shape[-1] // 2], rtol=1e-3, atol=1e-4)
            (us,) = time_side_by_side(calls)
            line.append(f"{name} {us:.1f}{'' if right else ' WRONG'}")
        except Exception as error:
            line.append(f"{name} {str(error)[:80]}")
    print(case.name, "|", "; ".join(line), flush=True)
    del sets
    torch.cuda.empty_cache()


short = topk.MANY_SHORT


def many(shape):
    topk.MANY_SHORT = shape


show(Case("topk_prefill", (4096, 8192)), [(f"{s.threads}x{s.items}/{s.per_sm}", s) for s in (short, Shape(512, 16, 2, False), Shape(512, 16, 3, False), Shape(1024, 8, 2, False), Shape(512, 32, 2, False), Shape(256, 32, 5, False))], many)
many(short)

launches = topk._launches


def clusters(n):
    def made(gpu, *a):
        return launches(gpu, *a) if n is None else forced(gpu, n, *a)

    def forced(gpu, n, logits, *rest):
        (launch,) = launches(gpu, logits, *rest)
        return [launch._replace(kernel=topk.kernel(topk.FEW_CLUSTERS if n > 1 else topk.FEW, False), grid=(int(logits.rows) * n, 1, 1), cluster=n)]

    topk._launches = made


for shape in ((1, 1, 4096), (1, 1, 32768), (1, 1, 131072), (8, 1, 32768), (64, 1, 8192), (64, 1, 32768), (64, 1, 131072), (128, 1, 65536)):
    show(Case("topk_decode", shape), [(str(n), n) for n in (1, 2, 4, 8) if n * shape[0] <= 132 or n == 2], clusters)
clusters(None)
show(Case("topk_decode", (1, 1, 1024)), [("all", None)], clusters)


def few(tile):
    logits_sm90.FEW = tile


def most(tile):
    logits_sm90.MANY = tile


show(Case("prefill_logits", (4096, 8192)), [(str(tuple(t)), t) for t in (Tile(256, 2, 2, 1), Tile(256, 2, 1, 1), Tile(128, 2, 2, 1), Tile(128, 3, 1, 1))], most)
most(Tile(256, 2, 2, 1))
old = logits_sm90.FEW
for shape in ((64, 1, 32768), (64, 1, 131072), (1, 1, 32768)):
    tiles = (Tile(64, 4, 1, 2), Tile(64, 4, 1, 1), Tile(64, 3, 1, 3), Tile(64, 3, 1, 4), Tile(64, 2, 1, 6), Tile(64, 2, 1, 3))
    show(Case("decode_logits", shape), [(str(tuple(t)), (t,)) for t in tiles], few)
show(Case("decode_logits", (64, 2, 32768)), [(str(tuple(t)), (t,)) for t in (Tile(128, 2, 1, 3), Tile(128, 3, 1, 1), Tile(128, 2, 1, 1), Tile(256, 2, 1, 1))], few)
few(old)
