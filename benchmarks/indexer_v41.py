"""V4.1's index: logits over MXFP4 keys, and over candidate blocks alone, packing and gathering of MXFP4 keys.

python benchmarks/indexer_v41.py [--quick] [--only REGEX] [--limit SECONDS] [--seed N]

- `mxfp4`: dense logits over MXFP4 keys beside ours over FP8 keys, of 32 heads. Beside fixed sizes, some of more than
  1 GB of MXFP4 keys are drawn at random; the seed is in the record.
- `candidates`: logits over 2048 blocks of 8 keys, beside DeepGEMM's dense logits over FP8 keys. DeepGEMM is taken from
  CUPY_MLA_INDEXER_PEERS as in `indexer.py`, the first folder; without it ours over FP8 keys is the peer: see `peer`.
- `blocks`: choosing the blocks of dense logits, beside a copy of the logits' bytes.
- `pack`, `gather`, `widen`: beside a copy of as many bytes as are read and written.

`max_abs_err`: of candidates, from the dense logits of the same keys; of MXFP4, calc_diff from float64 over the keys as
they are stored; of cache operations, from NumPy. Queries and lists rotate, so that keys are not in L2.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import INDEXER_V41, judge
from harness import ROOT, Options, Record, time_side_by_side
from indexer_peers import Peers, unpack

import cupy_mla

HEADS, BLOCK, BLOCKS, TOPK = 32, 64, 2048, 512
TOKEN_BYTES = {"fp8": 132, "mxfp4": 68}
SHAPES = ((64, 131072), (1, 1 << 20), (8, 1 << 20), (8, 131072), (32, 1 << 20), (1, 131072))  # requests, context
LARGE = 7  # sizes that are drawn
LARGE_GB, LARGE_CONTEXT = (1.02, 3), (15, 20)  # of MXFP4 keys; powers of two
ROTATED_BYTES, MOST_SETS = 128 << 20, 24
AT_ONCE = 1 << 20  # tokens that are packed
SAMPLE = 4
FOLDERS = os.environ.get("CUPY_MLA_INDEXER_PEERS", f"{ROOT}/.peer-indexer").split(":")


class Batch(NamedTuple):
    """Requests of one length, their keys in both layouts, block tables in random order."""

    caches: dict[str, torch.Tensor]
    lens: torch.Tensor
    table: torch.Tensor
    context: int


def large_shape(rng: random.Random) -> tuple[int, int]:
    """Requests and context of more than 1 GB of MXFP4 keys."""
    context = int(2 ** rng.uniform(*LARGE_CONTEXT)) // BLOCK * BLOCK
    return -(-int(rng.uniform(*LARGE_GB) * 1e9) // (TOKEN_BYTES["mxfp4"] * context)), context


@cache
def batch(requests: int, context: int) -> Batch:
    width = context // BLOCK
    blocks = requests * width
    caches = {
        name: torch.empty(blocks, BLOCK, size, device="cuda", dtype=torch.uint8) for name, size in TOKEN_BYTES.items()
    }
    for first in range(0, blocks * BLOCK, AT_ONCE):
        slots = torch.arange(first, min(first + AT_ONCE, blocks * BLOCK), device="cuda")
        keys = torch.randn(len(slots), 128, device="cuda", dtype=torch.bfloat16)
        for kv_cache in caches.values():
            cupy_mla.indexer_k_quant_and_cache(keys, kv_cache, slots)
    table = torch.randperm(blocks, device="cuda").view(requests, width).to(torch.int32)
    return Batch(caches, torch.full((requests,), context, device="cuda", dtype=torch.int32), table, context)


def queries(requests: int, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """q8 [requests, HEADS, 128] and w."""
    q = torch.randn(requests, HEADS, 128, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(requests, HEADS, device="cuda")
    q8, w = cupy_mla.quantize_indexer_q(q, weights, scale_format=scale_format)
    return q8, w


def candidates(requests: int, context: int) -> torch.Tensor:
    """Blocks at random, the last one among them."""
    blocks = context // 8
    drawn = torch.rand(requests, blocks - 1, device="cuda").topk(BLOCKS - 1).indices.sort().values
    last = torch.full((requests, 1), blocks - 1, device="cuda")
    return torch.cat([drawn, last], 1).to(torch.int32)


def sets_for(nbytes: int) -> int:
    return min(max(-(-ROTATED_BYTES // nbytes), 3), MOST_SETS)


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def mxfp4_keys(kv_cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The keys in some blocks as float64, [tokens, 128]."""
    raw = kv_cache.view(len(kv_cache), -1)[blocks.long()]
    codes = raw[:, : 64 * BLOCK].reshape(-1, 64)
    scales = raw[:, 64 * BLOCK :].reshape(-1, 4).double()
    numbers = torch.tensor([*E2M1, *(-x for x in E2M1)], device="cuda", dtype=torch.float64)
    values = numbers[torch.stack([codes & 15, codes >> 4], -1).long()].view(-1, 4, 32)
    return (values * torch.exp2(scales - 127)[..., None]).view(-1, 128)


def dense(of: Batch, layout: str, sets: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], torch.Tensor]]:
    return [
        partial(
            cupy_mla.paged_indexer_logits, q8[:, None], of.caches[layout], w, of.lens, of.table, of.context, clean=False
        )
        for q8, w in sets
    ]


def mxfp4(record: Record, requests: int, context: int) -> None:
    case = f"mxfp4 b {requests} context {context}"
    if not record.wants(case):
        return
    of = batch(requests, context)
    number = min(sets_for(68 * requests * context), 4)
    sets = {name: [queries(requests, kind) for _ in range(number)] for name, kind in FORMATS.items()}
    calls = {name: dense(of, name, sets[name]) for name in FORMATS}
    got, exact = calls["mxfp4"][0](), []
    for row in range(min(requests, SAMPLE)):
        q8, w = sets["mxfp4"][0]
        keys = mxfp4_keys(of.caches["mxfp4"], of.table[row])
        exact.append((torch.relu(keys @ q8[row].double().T) * w[row].double()).sum(1))
    error = calc_diff(got[: len(exact)], torch.stack(exact))
    if not error < 5e-6:
        record.wrong.append(f"{case}: calc_diff {error}")
    times = time_side_by_side(calls["mxfp4"], calls["fp8"])
    more = {"b": requests, "context": context, "peer": "ours, FP8 keys"}
    record.add(case, *times, error, **more, keys_gb=round(68e-9 * requests * context, 3))


FORMATS = {"mxfp4": "mxfp4", "fp8": "fp32"}  # of keys, and of their queries


def peers_dense(
    peers: Peers | None, of: Batch, sets: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[str, list[Callable[[], torch.Tensor]]]:
    """Dense logits over FP8 keys."""
    if peers is None:
        return "ours, FP8 keys", dense(of, "fp8", sets)
    lens = of.lens[:, None]
    schedule = peers.schedule(lens)
    return "DeepGEMM", [
        partial(peers.paged_logits, q8[:, None], of.caches["fp8"], w, lens, of.table, schedule, of.context)
        for q8, w in sets
    ]


def over_candidates(record: Record, peers: Peers | None, requests: int, context: int) -> None:
    for layout, scale_format in FORMATS.items():
        case = f"candidates {layout} b {requests} context {context}"
        if not record.wants(case):
            continue
        of = batch(requests, context)
        number = sets_for(8 * BLOCKS * TOKEN_BYTES[layout] * requests)
        sets = [queries(requests, scale_format) for _ in range(number)]
        lists = [candidates(requests, context) for _ in range(number)]
        request = torch.arange(requests, device="cuda", dtype=torch.int32)
        calls = [
            partial(cupy_mla.candidate_logits, q8, of.caches[layout], w, blocks, of.lens, request, of.table)
            for (q8, w), blocks in zip(sets, lists, strict=True)
        ]
        columns = (lists[0].long()[..., None] * 8 + torch.arange(8, device="cuda")).flatten(1)
        error = (calls[0]() - dense(of, layout, sets)[0]().gather(1, columns)).abs().max().item()
        if error != 0:
            record.wrong.append(f"{case}: differs from dense logits by {error}")
        few = sets if scale_format == FORMATS["fp8"] else [queries(requests, FORMATS["fp8"]) for _ in sets]
        name, theirs = peers_dense(peers, of, few[: min(number, 4)])
        (ours_us,), (peer_us,) = time_side_by_side(calls), time_side_by_side(theirs)
        record.add(case, ours_us, peer_us, error, b=requests, context=context, peer=name)


def blocks_of_logits(record: Record, requests: int, context: int) -> None:
    case = f"blocks b {requests} context {context}"
    if not record.wants(case):
        return
    logits = [torch.randn(requests, context, device="cuda") for _ in range(3)]
    ends = torch.full((requests,), context, device="cuda", dtype=torch.int32)
    got = cupy_mla.candidate_blocks(logits[0], BLOCKS, ends=ends)
    scores = logits[0].view(requests, -1, 8).amax(-1)
    scores[:, -1] = torch.inf
    wanted = scores.topk(BLOCKS).indices.sort().values
    error = float((got != wanted).sum())
    if error:
        record.wrong.append(f"{case}: other blocks than a sort's")
    out = torch.empty_like(logits[0])
    ours = [partial(cupy_mla.candidate_blocks, one, BLOCKS, ends=ends) for one in logits]
    copies = [partial(out.copy_, one) for one in logits]
    record.add(case, *time_side_by_side(ours, copies), error, b=requests, context=context, peer="copy")


def cache_operations(quick: bool) -> Iterator[tuple[str, Callable[[], tuple[list, int, float]]]]:
    """Name, and what makes calls, bytes that a call reads and writes, and an error."""
    tokens = 1 << (18 if quick else 20)

    def make(work: str) -> tuple[list, int, float]:
        keys = [torch.randn(tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        kv_cache = torch.zeros(tokens // BLOCK, BLOCK, 68, device="cuda", dtype=torch.uint8)
        slots = torch.randperm(tokens // BLOCK, device="cuda").repeat_interleave(BLOCK) * BLOCK
        slots += torch.arange(BLOCK, device="cuda").repeat(tokens // BLOCK)
        few = keys[0][:4096].float().cpu().numpy().astype(BF16)
        packed = np.zeros((64, BLOCK, 68), np.uint8)
        cupy_mla.indexer_k_quant_and_cache(few, packed, np.arange(4096))
        if work == "pack":
            cupy_mla.indexer_k_quant_and_cache(keys[0][:4096], kv_cache, torch.arange(4096, device="cuda"))
            error = float((kv_cache[:64].cpu().numpy() != packed).sum())
            calls = [partial(cupy_mla.indexer_k_quant_and_cache, k, kv_cache, slots) for k in keys]
            return calls, tokens * (256 + 68 + 8), error
        cupy_mla.indexer_k_quant_and_cache(keys[0], kv_cache, torch.arange(tokens, device="cuda"))
        width = 64 if work == "gather" else 128
        table = torch.randperm(tokens // BLOCK, device="cuda").to(torch.int32)[None]
        starts = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
        dtype = torch.uint8 if work == "gather" else torch.float8_e5m2
        outs = [
            (torch.empty(tokens, width, device="cuda", dtype=dtype), torch.empty(tokens, device="cuda"))
            for _ in range(3)
        ]
        calls = [partial(cupy_mla.cp_gather_indexer_k_quant_cache, kv_cache, *out, table, starts) for out in outs]
        calls[0]()
        host = cupy_mla.to_numpy(torch.zeros(4096, width, dtype=dtype)), np.zeros(4096, np.float32)
        first = kv_cache[table[0, :64].long()].cpu().numpy()
        cupy_mla.cp_gather_indexer_k_quant_cache(
            first, *host, np.arange(64, dtype=np.int32)[None], np.array([0, 4096], np.int32)
        )
        error = float((outs[0][0][:4096].view(torch.uint8).cpu().numpy() != host[0].view(np.uint8)).sum())
        return calls, tokens * (68 + width + 4), error

    for work in ("pack", "gather", "widen"):
        yield f"{work} tokens {tokens}", partial(make, work)


BF16 = cupy_mla.dtypes.BFLOAT16


def measure_cache(record: Record, quick: bool) -> None:
    for case, make in cache_operations(quick):
        if not record.wants(case):
            continue
        calls, nbytes, error = make()
        if error:
            record.wrong.append(f"{case}: {error} bytes differ")
        memory = [torch.empty(2, nbytes // 2, device="cuda", dtype=torch.uint8) for _ in calls]
        copies = [partial(one[1].copy_, one[0]) for one in memory]
        ours_us, copy_us = time_side_by_side(calls, copies)
        record.add(case, ours_us, copy_us, error, peer="copy", tb_s=round(nbytes / ours_us * 1e-6, 2))


def forget_batch() -> None:
    batch.cache_clear()
    torch.cuda.empty_cache()


def find_peers() -> Peers | None:
    folder = next((Path(name) for name in FOLDERS if Path(name).is_dir()), None)
    if folder is None:
        print("no DeepGEMM: CUPY_MLA_INDEXER_PEERS names no folder; our own dense logits are the peer", file=sys.stderr)
        return None
    return Peers(unpack(folder), topk=False)


def main() -> None:
    options, seed = Options.parse_with_seed(__doc__)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    record = Record("indexer_v41", options)
    record.note("seed", seed)
    peers: Any = find_peers()
    measure_cache(record, options.quick)
    for requests, context in SHAPES[: 2 if options.quick else None]:
        over_candidates(record, peers, requests, context)
        mxfp4(record, requests, context)
        blocks_of_logits(record, requests, context)
        forget_batch()
    for _ in range(1 if options.quick else LARGE):
        mxfp4(record, *large_shape(rng))
        forget_batch()
    judge(INDEXER_V41, record.rows)
    print(record.write())


if __name__ == "__main__":
    main()
