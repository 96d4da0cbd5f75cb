"""Context parallelism: decode with the rows of every request divided over ranks.

With two ranks, each holds every other token of each request, as KV row and as indexer key, and half of the heads. In a
step each rank

1. sends the queries of its heads to all ranks;
2. writes the new token if it belongs to this rank;
3. finds the keys with the largest logits among those of all ranks;
4. attends to its own part of these keys, with all heads;
5. merges the results of all ranks for its heads.

On GPUs a step is a CUDA graph.

    torchrun --nproc-per-node 2 examples/06_two_gpus.py [--requests N] [--length N] [--steps N]

Runs on GPUs with NCCL if there is one for each rank, else on the CPU with gloo at small sizes. Ends with an error if a
rank's result differs from that of one process that holds everything.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

try:
    import torch
    import torch.distributed as dist

    import cupy_mla
    from cupy_mla.integrations.distributed import ContextParallel
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in a checkout of cupy_mla, pip install -e '.[examples]'")

BLOCK_SIZE, SCALE = 64, 192**-0.5
BOUND = 2**-6  # relative norm of the difference: results of ranks are rounded to bfloat16 before they are merged


class Caches:
    """KV rows and indexer keys of all requests. The blocks of a request are neighbours.

    Attributes:
        lens: [requests] int32 number of cached tokens.
    """

    def __init__(self, requests: int, longest: int, place: torch.device) -> None:
        width = -(-longest // BLOCK_SIZE)
        self.width = width * BLOCK_SIZE
        self.table = torch.arange(requests * width, dtype=torch.int32, device=place).view(requests, width)
        self.rows, self.keys = (
            cupy_mla.empty_cache(layout, requests * width, BLOCK_SIZE, cupy_mla.Place.of(self.table))
            for layout in ("v32_fp8", "indexer_fp8")
        )
        self.lens = torch.zeros(requests, dtype=torch.int32, device=place)

    def write(self, rows: torch.Tensor, keys: torch.Tensor, request: torch.Tensor, at: torch.Tensor) -> None:
        """Writes tokens at positions of requests, except those at position -1."""
        slots = cupy_mla.slots_of(self.table, at, BLOCK_SIZE, request_ids=request)
        cupy_mla.concat_and_cache_mla(rows[:, :512], rows[:, 512:], self.rows, slots)
        cupy_mla.indexer_k_quant_and_cache(keys, self.keys, slots)

    def logits(self, q8: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Logits [requests, width] of every key, for one query token of each request."""
        return cupy_mla.paged_indexer_logits(q8[:, None], self.keys, w, self.lens, self.table, self.width)

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        requests = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        return cupy_mla.convert_req_index_to_global_index(requests, self.table, positions, BLOCK_SIZE)


class Step:
    """One decode step: the arrays that it reads, and `run`.

    Attributes:
        position: [requests] int32 position of the new token.
    """

    def __init__(self, ranks: ContextParallel, mine: Caches, heads: int, index_heads: int, topk: int) -> None:
        requests, place = len(mine.lens), mine.lens.device
        self.ranks, self.mine, self.topk = ranks, mine, topk
        self.requests = torch.arange(requests, dtype=torch.int32, device=place)
        self.row = torch.zeros(requests, 576, dtype=torch.bfloat16, device=place)
        self.key = torch.zeros(requests, 128, dtype=torch.bfloat16, device=place)
        self.q = torch.zeros(requests, heads, 576, dtype=torch.bfloat16, device=place)
        self.q_index = torch.zeros(requests, index_heads, 128, dtype=torch.bfloat16, device=place)
        self.weights = torch.zeros(requests, index_heads, dtype=torch.float32, device=place)
        self.position = torch.zeros(requests, dtype=torch.int32, device=place)

    def draw(self, generator: torch.Generator) -> None:
        """Draws the next token of each request, the same on all ranks."""
        for array in (self.row, self.key, self.q, self.q_index, self.weights):
            array.copy_(torch.randn(array.shape, generator=generator))

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the step: chosen positions [requests, topk], and attention [requests, heads of this rank, 512]."""
        ranks, mine = self.ranks, self.mine
        heads = self.q.shape[1] // ranks.world_size
        q = ranks.start_gathering(self.q[:, ranks.rank * heads : (ranks.rank + 1) * heads])
        at, _ = ranks.localize_topk(self.position[:, None])
        mine.write(self.row, self.key, self.requests, at[:, 0])
        mine.lens.copy_(ranks.local_seq_lens(self.position + 1))
        logits = mine.logits(*cupy_mla.quantize_indexer_q(self.q_index, self.weights))
        chosen = ranks.select(logits, cupy_mla.topk_indices(logits, self.topk, None, mine.lens), self.topk)
        local, length = ranks.localize_topk(chosen)
        out, _ = ranks.attend(q, mine.rows, mine.slots(local), SCALE, topk_length=length)
        return chosen, out


def captured(run: Callable[[], tuple[torch.Tensor, ...]]) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A step as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay() -> tuple[torch.Tensor, ...]:
        graph.replay()
        return results

    return replay


def main() -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpus = cupy_mla.cuda_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8 if on_gpus else 2, help="decoded at once")
    parser.add_argument("--length", type=int, default=32768 if on_gpus else 700, help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=20 if on_gpus else 3, help="tokens that are decoded of each")
    options = parser.parse_args()
    heads, index_heads, topk = (128, 64, 2048) if on_gpus else (8, 8, 128)
    place = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    ranks = ContextParallel()
    heads -= heads % ranks.world_size

    longest = options.length + options.steps + 1
    mine = Caches(options.requests, -(-longest // ranks.world_size), place)
    whole = Caches(options.requests, longest, place)  # what one process would hold, to compare with
    generator = torch.Generator().manual_seed(1)
    for request in range(options.requests):
        rows, keys = (torch.randn(options.length, n, generator=generator).to(place, torch.bfloat16) for n in (576, 128))
        at = torch.arange(options.length, dtype=torch.int32, device=place)
        number = torch.full_like(at, request)
        whole.write(rows, keys, number, at)
        mine.write(rows, keys, number, ranks.localize_topk(at[:, None])[0][:, 0])

    step = Step(ranks, mine, heads, index_heads, topk)
    step.position.fill_(options.length)
    run = captured(step.run) if on_gpus else step.run
    seconds, worst, same = 0.0, 0.0, 1.0
    own = slice(ranks.rank * heads // ranks.world_size, (ranks.rank + 1) * heads // ranks.world_size)
    for number in range(options.steps):
        step.draw(generator)
        step.position.fill_(options.length + number)
        began = time.perf_counter()
        chosen, out = run()
        if on_gpus:
            torch.cuda.synchronize()
        seconds += time.perf_counter() - began
        whole.write(step.row, step.key, step.requests, step.position)
        whole.lens.copy_(step.position + 1)
        logits = whole.logits(*cupy_mla.quantize_indexer_q(step.q_index, step.weights))
        best = cupy_mla.topk_indices(logits, topk, None, whole.lens)
        same = min(same, (best == chosen).float().mean().item())
        want, _ = cupy_mla.sparse_decode(step.q[:, None, own], whole.rows, whole.slots(chosen)[:, None], SCALE)
        difference = (out.float() - want[:, 0].float()).norm() / want.float().norm()
        worst = max(worst, difference.item())
    held = mine.rows.numel() + mine.keys.numel()
    own_report = (
        f"rank {ranks.rank} of {ranks.world_size} on {place}: {held / 1e6:.1f} MB of caches, one process would hold "
        f"{(whole.rows.numel() + whole.keys.numel()) / 1e6:.1f}\n"
        f"  {options.steps} steps of {options.requests} requests, {1e3 * seconds / options.steps:.2f} ms each; "
        f"{100 * same:.1f} % of the chosen positions are those of one process\n"
        f"  attention differs by {worst:.1e} from that of one process (at most {BOUND:.1e})"
    )
    reports = [own_report] * ranks.world_size
    dist.all_gather_object(reports, own_report)
    if ranks.rank == 0:  # if all ranks printed, their lines could mix
        print(*reports, sep="\n", flush=True)
    del run  # a graph that holds NCCL calls would block the end of the process group
    dist.destroy_process_group()
    if not (worst <= BOUND and same > 0.99):
        raise SystemExit("DIFFERS from one process")


if __name__ == "__main__":
    main()
