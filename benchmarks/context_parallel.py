"""Decode of long requests on one GPU and on two that divide the rows, with the time of each part.

    python benchmarks/context_parallel.py [--quick] [--only REGEX]

Needs two GPUs. One DeepSeek-V3.2 layer with 128 heads: the indexer's logits and top-k, then attention over FP8 rows.

- `one_us`: one GPU with all rows and all heads.
- `replicated_us`: tensor parallelism alone: each GPU with all rows and half of the heads, the indexer on both.
- `two_us`: context parallelism: each GPU with half of the rows. It selects among its keys, the GPUs merge what they
  selected, each attends over its own chosen rows with all heads, and gets the parts of its own heads.

Times are microseconds a step, CUDA-graph replay over input sets in rotation, the median of replays, of the slower GPU.
Parts are timed alone, so their sum differs from the whole, which gathers queries beside the indexer. `same`: share of
the positions chosen by two GPUs that one GPU chooses; `difference`: of the attention's results over them, norm,
relative.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import NO_PEER, Options, Record

import cupy_mla
from cupy_mla.integrations.distributed import ContextParallel

LENGTH, HEADS, INDEX_HEADS, TOPK, BLOCK_SIZE = 131072, 128, 64, 2048, 64
SCALE = 192**-0.5
BATCHES = (1, 2, 4, 8, 16, 32, 64)
QUICK = (1, 8, 64)
SETS_BYTES = 24 << 30  # of caches of a rank
REPEATS = 11
DIFFERENCE = 2**-6
Part = Callable[[int], Any]  # of a set of inputs


class Caches:
    """The rows and keys of a batch on a GPU, blocks one after the other."""

    def __init__(self, requests: int, tokens: int) -> None:
        blocks = -(-tokens // BLOCK_SIZE)
        self.tokens = tokens
        self.table = torch.arange(requests * blocks, device="cuda", dtype=torch.int32).view(requests, blocks)
        self.rows = torch.empty(requests * blocks, BLOCK_SIZE, 656, device="cuda", dtype=torch.uint8)
        self.keys = torch.empty(requests * blocks, BLOCK_SIZE, 132, device="cuda", dtype=torch.uint8)
        self.lens = torch.full((requests,), tokens, device="cuda", dtype=torch.int32)

    def write(self, request: int, rows: torch.Tensor, keys: torch.Tensor) -> None:
        slots = torch.arange(len(rows), device="cuda") + int(self.table[request, 0]) * BLOCK_SIZE
        cupy_mla.concat_and_cache_mla(rows[:, :512], rows[:, 512:], self.rows, slots)
        cupy_mla.indexer_k_quant_and_cache(keys, self.keys, slots)


class Inputs:
    """A set of inputs: what all GPUs hold, and what this one holds of it.

    Attributes:
        positions: that the ranks chose together, and slots and lengths of this one's.
    """

    def __init__(self, ranks: ContextParallel, requests: int, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int, size: float = 1) -> torch.Tensor:
            return size * torch.randn(shape, device="cuda", generator=generator)

        n, me = ranks.world_size, ranks.rank
        self.whole, self.mine = Caches(requests, LENGTH), Caches(requests, LENGTH // n)
        for request in range(requests):
            rows, keys = normal(LENGTH, 576).bfloat16(), normal(LENGTH, 128).bfloat16()
            self.whole.write(request, rows, keys)
            self.mine.write(request, rows[me::n], keys[me::n])
        self.q = normal(requests, HEADS, 576).bfloat16()
        q8, self.w = cupy_mla.quantize_indexer_q(
            normal(requests, INDEX_HEADS, 128).bfloat16(), normal(requests, INDEX_HEADS)
        )
        self.q8 = q8[:, None]
        half = HEADS // n
        self.own = self.q[:, me * half : (me + 1) * half]
        self.head_first = self.own.transpose(0, 1).contiguous().transpose(0, 1)  # as weight absorption leaves them


class Work:
    """What is timed, on sets of inputs."""

    def __init__(self, ranks: ContextParallel, requests: int) -> None:
        of_set = requests * LENGTH * (656 + 132) * 3 // 2
        self.ranks = ranks
        self.sets = [Inputs(ranks, requests, seed) for seed in range(max(1, min(3, SETS_BYTES // of_set)))]
        self.requests = torch.arange(requests, device="cuda", dtype=torch.int32)
        self.logits = [self.local_logits(i) for i in range(len(self.sets))]
        self.candidates = [self.local_topk(i) for i in range(len(self.sets))]
        self.positions = [self.merged(i) for i in range(len(self.sets))]
        self.local = [self.localized(i) for i in range(len(self.sets))]
        self.slots = [self.select_one(i) for i in range(len(self.sets))]
        self.everyones = [ranks.gather_heads(s.head_first) for s in self.sets]
        self.partial = [self.local_attention(i) for i in range(len(self.sets))]

    # one GPU with all rows

    def select_one(self, i: int) -> torch.Tensor:
        s, c = self.sets[i], self.sets[i].whole
        return cupy_mla.select_rows_paged(s.q8, c.keys, s.w, c.lens, c.table, c.tokens, TOPK, slots=True)

    def attend_one(self, i: int) -> torch.Tensor:
        s = self.sets[i]
        return cupy_mla.sparse_decode(s.q[:, None], s.whole.rows, self.slots[i][:, None], SCALE)[0]

    def attend_own_heads(self, i: int) -> torch.Tensor:
        s = self.sets[i]
        return cupy_mla.sparse_decode(s.own[:, None], s.whole.rows, self.slots[i][:, None], SCALE)[0]

    # a part of the rows

    def local_logits(self, i: int) -> torch.Tensor:
        s, c = self.sets[i], self.sets[i].mine
        return cupy_mla.paged_indexer_logits(s.q8, c.keys, s.w, c.lens, c.table, c.tokens, clean=False)

    def local_topk(self, i: int) -> torch.Tensor:
        return cupy_mla.topk_indices(self.logits[i], TOPK, None, self.sets[i].mine.lens)

    def merged(self, i: int) -> torch.Tensor:
        return self.ranks.select(self.logits[i], self.candidates[i], TOPK)

    def localized(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        local, length = self.ranks.localize_topk(self.positions[i])
        table = self.sets[i].mine.table
        return cupy_mla.convert_req_index_to_global_index(self.requests, table, local, BLOCK_SIZE), length

    def gathered(self, i: int) -> torch.Tensor:
        return self.ranks.gather_heads(self.sets[i].head_first)

    def local_attention(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots, length = self.local[i]
        q, rows = self.everyones[i][:, None], self.sets[i].mine.rows
        out, lse = cupy_mla.sparse_decode(q, rows, slots[:, None], SCALE, topk_length=length)
        return out[:, 0], lse[:, :, 0]

    def merged_attention(self, i: int) -> torch.Tensor:
        return self.ranks.merge(*self.partial[i])[0]

    def two(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All of it."""
        s = self.sets[i]
        gathering = self.ranks.start_gathering(s.head_first)
        logits = self.local_logits(i)
        positions = self.ranks.select(logits, cupy_mla.topk_indices(logits, TOPK, None, s.mine.lens), TOPK)
        local, length = self.ranks.localize_topk(positions)
        slots = cupy_mla.convert_req_index_to_global_index(self.requests, s.mine.table, local, BLOCK_SIZE)
        return positions, self.ranks.attend(gathering, s.mine.rows, slots, SCALE, topk_length=length)[0]

    def one(self, i: int) -> torch.Tensor:
        self.slots[i].copy_(self.select_one(i))
        return self.attend_one(i)

    def replicated(self, i: int) -> torch.Tensor:
        self.slots[i].copy_(self.select_one(i))
        return self.attend_own_heads(i)

    def accuracy(self) -> tuple[float, float]:
        """The share of positions chosen alike, and the difference of results over the same positions."""
        s = self.sets[0]
        positions, out = self.two(0)
        slots = cupy_mla.convert_req_index_to_global_index(self.requests, s.whole.table, positions, BLOCK_SIZE)
        want = cupy_mla.sparse_decode(s.own[:, None], s.whole.rows, slots[:, None], SCALE)[0][:, 0].float()
        same = (slots == self.select_one(0)).float().mean()
        return same.item(), ((out.float() - want).norm() / want.norm()).item()


def microseconds_of(part: Part, sets: int) -> float:
    """Microseconds of one call, of the slower GPU."""
    calls = [i for _ in range(max(1, 6 // sets)) for i in range(sets)]
    for i in range(sets):
        part(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in calls:
            part(i)
    times = []
    for _ in range(REPEATS + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        torch.cuda._sleep(400_000)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    slowest = torch.tensor(statistics.median(times[2:]), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(slowest.item(), 1)


PARTS: dict[str, str] = {
    "one_us": "one", "one_select_us": "select_one", "one_attention_us": "attend_one", "replicated_us": "replicated",
    "two_us": "two", "logits_us": "local_logits", "topk_us": "local_topk", "merge_topk_us": "merged",
    "localize_us": "localized", "gather_q_us": "gathered", "attention_us": "local_attention",
    "merge_attention_us": "merged_attention",
}  # fmt: skip


def measure(rank: int, world_size: int, address: str, options: Options) -> None:
    """What each process does."""
    torch.cuda.set_device(rank)
    place = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=world_size, device_id=place)
    ranks = ContextParallel()
    record = Record("context_parallel", options, columns="one,repl.,two") if rank == 0 else None
    for requests in QUICK if options.quick else BATCHES:
        case = f"b {requests} h {HEADS} context {LENGTH} topk {TOPK}"
        work = Work(ranks, requests)
        same, difference = work.accuracy()
        row = {name: microseconds_of(getattr(work, part), len(work.sets)) for name, part in PARTS.items()}
        bad = torch.tensor([1 - same, difference], device="cuda")
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        row |= {"same": round(1 - bad[0].item(), 6), "difference": round(bad[1].item(), 6)}
        if record is not None:
            if not bad[1].item() <= DIFFERENCE:
                record.wrong.append(f"{case}: differs by {bad[1].item():.1e}")
            shown = " ".join(f"{row[name]:9.1f}" for name in ("one_us", "replicated_us", "two_us"))
            record.add_row({"case": case, **row}, shown)
            print(f"  {row}", flush=True)
        del work
    if record is not None:
        record.note("gpus", world_size)
        record.write()
    dist.destroy_process_group()


def main() -> None:
    options = Options.parse(__doc__)
    if options.only or torch.cuda.device_count() < 2:
        print("left out: needs two GPUs, and takes no --only, as all GPUs have to take the same rows")
        sys.exit(NO_PEER)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    mp.spawn(measure, args=(2, f"tcp://localhost:{port}", options), nprocs=2)


if __name__ == "__main__":
    main()
