"""A small continuous-batching loop with the metadata builders, the indexer and the backend of DeepSeek-V3.2 layers.

Requests of different lengths arrive over time. A request is admitted when the cache has room for all of its tokens. Its
prompt is prefilled in chunks, in the same steps as the decodes of other requests. Then it decodes one token in each
step, and at the end it frees its blocks. One layer is computed: new latent rows and indexer keys are written to their
paged caches, the indexer chooses tokens, the queries are absorbed and attend, and the results are projected up. There
is no model: rows, keys, queries and weights are random.

If CuPy finds a GPU, it runs there at DeepSeek-V3.2's sizes, else on the CPU at small sizes.

    python examples/03_serve_batch.py [--cache fp8_ds_mla|bf16] [--requests N] [--seed N]

Needs rich (pip install '.[examples]' in the checkout). Ends with an error if the attention of a sampled token is out of
tolerance, or if its chosen tokens are not those with the largest logits in float64.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

try:
    import ml_dtypes
    import numpy as np
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    import cupy_mla
    from cupy_mla import (
        BatchMetadata,
        IndexerImpl,
        IndexerMetadataBuilder,
        Place,
        SparseMLABackend,
        SparseMLAConfig,
        SparseMLAMetadataBuilder,
        Workspace,
    )
    from cupy_mla.typing import CacheLayout
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in a checkout of cupy_mla, pip install -e '.[examples]'")

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
ON_GPU = cupy_mla.cuda_available()
LATENT, ROPE, D_NOPE, D_V = 512, 64, 128, 128
SCALE = (D_NOPE + ROPE) ** -0.5  # DeepSeek-V3.2's, without its yarn factor
ABSOLUTE, RELATIVE = 1e-3, 3.01 / 128  # the error of each element must be below one of the two
INDEX_D = 128
LOGIT_TOLERANCE = 1e-4  # of the largest logit: by so much the choice may differ from the order in float64


@dataclass(frozen=True)
class Sizes:
    heads: int
    index_heads: int
    topk: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    tokens_a_step: int
    requests: int
    prompt: tuple[int, int]  # shortest, longest
    output: tuple[int, int]
    check_every: int  # steps


SMALL = Sizes(32, 8, 32, 16, 48, 8, 48, 24, (5, 150), (3, 25), 1)
DEEPSEEK = Sizes(128, 64, 2048, 64, 4096, 64, 4096, 64, (500, 16000), (16, 128), 8)


@dataclass
class Request:
    prompt: int
    output: int
    arrival: int  # step
    cached: int = 0  # tokens in the cache
    blocks: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.prompt + self.output


class BlockAllocator:
    """Hands out the cache's blocks and takes them back."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks, or None if fewer are free."""
        return [self._free.popleft() for _ in range(count)] if count <= len(self._free) else None

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(blocks)


@dataclass(frozen=True)
class Checked:
    """What the checks need of a step: queries in two parts, the indexer's queries, weights and choice, results."""

    q: tuple[Any, Any]
    q8: Any
    w: Any
    topk_indices: Any
    out: Any


class Layer:
    """One attention layer with its caches, on the GPU or the CPU."""

    def __init__(self, sizes: Sizes, cache_dtype: CacheLayout, seed: int | None) -> None:
        place = Place("cupy", 0) if ON_GPU else Place("numpy", -1)
        if ON_GPU:
            import cupy as xp
        else:
            xp = np
        self.xp = xp
        self.rng = xp.random.default_rng(seed)
        self.config = SparseMLAConfig(
            sizes.heads, topk=sizes.topk, block_size=sizes.block_size, cache_layout=cache_dtype,
            max_num_seqs=sizes.max_num_seqs, max_num_batched_tokens=sizes.tokens_a_step,
            max_model_len=sizes.prompt[1] + sizes.output[1],
        )  # fmt: skip
        self.cache, self.keys = (
            cupy_mla.empty_cache(layout, sizes.num_blocks, sizes.block_size, place)
            for layout in (self.config.layout, "indexer_fp8")
        )
        workspace = Workspace(place)
        self.builder = SparseMLAMetadataBuilder(self.config, place, num_blocks=sizes.num_blocks)
        self.index_builder = IndexerMetadataBuilder(self.config, place, num_blocks=sizes.num_blocks)
        self.indexer = IndexerImpl(self.config, workspace)
        self.attention = SparseMLABackend.get_impl_cls()(self.config, SCALE, workspace)
        self.index_heads = sizes.index_heads
        self.topk_indices = xp.zeros((sizes.tokens_a_step, sizes.topk), np.int32)
        weight = self.random(LATENT, sizes.heads * (D_NOPE + D_V), size=LATENT**-0.5)
        self.w_uk, self.w_uv = cupy_mla.split_kv_b_proj(weight, sizes.heads, D_NOPE)

    def random(self, *shape: int, size: float = 1.0) -> Any:
        return (size * self.rng.standard_normal(shape, dtype=np.float32)).astype(BF16)

    def choose_tokens(self, batch: BatchMetadata) -> tuple[Any, Any, Any]:
        """Tokens that each query token attends to, [T, topk], and the quantized queries and weights that chose them."""
        tokens = batch.num_actual_tokens
        q8, w = cupy_mla.quantize_indexer_q(
            self.random(tokens, self.index_heads, INDEX_D), self.random(tokens, self.index_heads)
        )
        keys, metadata = self.random(tokens, INDEX_D), self.index_builder.build(batch)
        return self.indexer.forward(keys, q8, w, self.keys, metadata, self.topk_indices), q8, w

    def forward(self, batch: BatchMetadata) -> tuple[Any, Checked]:
        """One step: returns the layer's output and what the checks need."""
        tokens, heads = batch.num_actual_tokens, self.config.num_heads
        metadata = self.builder.build(batch)
        rows = self.random(tokens, LATENT), self.random(tokens, ROPE)
        # With power-of-two scales, FP8 values are exact in bf16, so every path reads the same values.
        cupy_mla.concat_and_cache_mla(*rows, self.cache, metadata.slot_mapping, scale_format="ue8m0")
        topk_indices, q8, w = self.choose_tokens(batch)
        ql_nope = cupy_mla.absorb_q(self.random(tokens, heads, D_NOPE), self.w_uk)
        q_pe = self.random(tokens, heads, ROPE)
        out = self.attention.forward_mqa((ql_nope, q_pe), self.cache, metadata, topk_indices)
        return cupy_mla.v_up_proj(out, self.w_uv), Checked((ql_nope, q_pe), q8, w, topk_indices, out)

    def wait(self) -> None:
        if ON_GPU:
            self.xp.cuda.get_current_stream().synchronize()

    def error_of(self, t: int, position: int, request: Request, step: Checked) -> tuple[float, bool]:
        """A token's largest error to float64 over its chosen rows, and whether that and the choice are in tolerance."""
        chosen = cupy_mla.to_numpy(step.topk_indices[t])
        chosen = chosen[chosen >= 0]
        rows = self.rows_of(self.cache, request, chosen)
        query = np.concatenate([cupy_mla.to_numpy(part[t]) for part in step.q], axis=-1).astype(np.float64)
        logits = SCALE * query @ rows.T
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        want = weights / weights.sum(axis=1, keepdims=True) @ rows[:, :LATENT]
        error = np.abs(cupy_mla.to_numpy(step.out[t]).astype(np.float64) - want)
        in_tolerance = bool(((error < ABSOLUTE) | (error < RELATIVE * np.abs(want))).all())
        return float(error.max()), in_tolerance and self.best_chosen(t, position, request, chosen, step)

    def rows_of(self, cache: Any, request: Request, positions: np.ndarray) -> np.ndarray:
        """The cached rows at some positions of a request, in float64."""
        table = np.array([request.blocks], np.int32)
        slots = cupy_mla.slots_of(table, positions[None], self.config.block_size)[0]
        return cupy_mla.to_numpy(cupy_mla.unpack_rows(cache, self.xp.asarray(slots))).astype(np.float64)

    def best_chosen(self, t: int, position: int, request: Request, chosen: np.ndarray, step: Checked) -> bool:
        """Whether a token's chosen tokens have the largest logits, computed in float64 from the cached keys."""
        seen = np.arange(position + 1)
        count = min(len(seen), self.config.topk)
        if len(set(chosen.tolist())) != count or not np.isin(chosen, seen).all():
            return False
        keys = self.rows_of(self.keys, request, seen)
        query = cupy_mla.to_numpy(step.q8[t]).view(E4M3).astype(np.float64)
        logits = np.maximum(keys @ query.T, 0) @ cupy_mla.to_numpy(step.w[t]).astype(np.float64)
        left_out = np.setdiff1d(seen, chosen)
        slack = LOGIT_TOLERANCE * np.abs(logits).max()
        return len(left_out) == 0 or logits[chosen].min() >= logits[left_out].max() - slack


@dataclass
class Totals:
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    blocks: list[int] = field(default_factory=list)  # in use in each step
    errors: list[float] = field(default_factory=list)
    in_tolerance: bool = True


class Server:
    """Admits, schedules and finishes requests."""

    def __init__(self, sizes: Sizes, layer: Layer, rng: np.random.Generator) -> None:
        self.sizes = sizes
        self.layer = layer
        self.rng = rng
        self.allocator = BlockAllocator(sizes.num_blocks)

    def serve(self, requests: list[Request], progress: Progress) -> Totals:
        totals, running, waiting = Totals(), [], deque(sorted(requests, key=lambda r: r.arrival))
        prompts = progress.add_task("prompt", total=sum(r.prompt for r in requests), state="")
        outputs = progress.add_task("output", total=sum(r.output for r in requests), state="")
        while running or waiting:
            self.admit(running, waiting, totals.steps)
            totals.steps += 1
            work = self.schedule(running)
            if not work:
                continue  # nobody has arrived yet
            state = f"running {len(running)}, cache {self.allocator.used / self.sizes.num_blocks:4.0%}"
            totals.blocks.append(self.allocator.used)
            batch = self.batch_of(work)
            self.layer.wait()
            start = time.perf_counter()
            _, step = self.layer.forward(batch)
            self.layer.wait()
            totals.seconds += time.perf_counter() - start

            if (len(totals.blocks) - 1) % self.sizes.check_every == 0:
                t = int(self.rng.integers(batch.num_actual_tokens))
                request = work[np.searchsorted(batch.query_start_loc, t, side="right") - 1][0]
                error, fine = self.layer.error_of(t, int(batch.positions[t]), request, step)
                totals.errors.append(error)
                totals.in_tolerance &= fine
            for request, count in work:
                of_prompt = max(min(request.prompt - request.cached, count), 0)
                request.cached += count
                totals.prompt_tokens += of_prompt
                totals.output_tokens += count - of_prompt
                if request.cached == request.length:
                    self.allocator.give_back(request.blocks)
                    running.remove(request)
            progress.update(prompts, completed=totals.prompt_tokens, state=state)
            progress.update(outputs, completed=totals.output_tokens, state=f"waiting {len(waiting)}")
        return totals

    def admit(self, running: list[Request], waiting: deque[Request], step: int) -> None:
        """Admits requests that have arrived, in order, while there are blocks for all of their tokens."""
        while waiting and waiting[0].arrival <= step and len(running) < self.sizes.max_num_seqs:
            blocks = self.allocator.take(-(-waiting[0].length // self.sizes.block_size))
            if blocks is None:
                return
            waiting[0].blocks = blocks
            running.append(waiting.popleft())

    def schedule(self, running: list[Request]) -> list[tuple[Request, int]]:
        """Query tokens of each request in this step: first one for each decode, then prompts while there is room."""
        room, work = self.sizes.tokens_a_step, []
        for request in sorted(running, key=lambda r: r.cached < r.prompt):
            count = min(max(request.prompt - request.cached, 1), room)
            if count:
                work.append((request, count))
                room -= count
        return sorted(work, key=lambda item: item[1] > 1)  # one token of a prompt counts as a decode

    def batch_of(self, work: list[tuple[Request, int]]) -> BatchMetadata:
        table = np.zeros((len(work), max(len(request.blocks) for request, _ in work)), np.int32)
        positions, slots = [], []
        for row, (request, count) in zip(table, work, strict=True):
            row[: len(request.blocks)] = request.blocks
            own = np.arange(request.cached, request.cached + count)
            positions.append(own)
            slots.append(cupy_mla.slots_of(row[None], own[None], self.sizes.block_size)[0])
        counts = [count for _, count in work]
        return BatchMetadata(
            query_start_loc=np.concatenate([[0], np.cumsum(counts)]),
            seq_lens=np.array([request.cached + count for request, count in work]),
            block_table=table,
            slot_mapping=np.concatenate(slots),
            positions=np.concatenate(positions),
        )


def some_requests(rng: np.random.Generator, sizes: Sizes, count: int) -> list[Request]:
    prompts, outputs = (rng.integers(*limits, count, endpoint=True) for limits in (sizes.prompt, sizes.output))
    arrivals = np.cumsum(rng.integers(0, 4, count))
    return [Request(*numbers) for numbers in zip(prompts.tolist(), outputs.tolist(), arrivals.tolist(), strict=True)]


def report(console: Console, sizes: Sizes, layer: Layer, totals: Totals, count: int) -> None:
    tokens = totals.prompt_tokens + totals.output_tokens
    used = np.array(totals.blocks) / sizes.num_blocks
    table = Table(show_header=False)
    table.add_row("layer", f"{sizes.heads} heads, {layer.config.layout.name} cache")
    table.add_row("indexer", f"{sizes.index_heads} heads, {sizes.topk} tokens chosen, indexer_fp8 cache")
    table.add_row("backend", "CUDA" if ON_GPU else "NumPy")
    table.add_row("served", f"{count} requests in {totals.steps} steps")
    table.add_row("tokens", f"{totals.prompt_tokens} of prompts, {totals.output_tokens} decoded")
    table.add_row("speed", f"{tokens / totals.seconds:.0f} tokens/s, {1e3 * totals.seconds / len(used):.2f} ms a step")
    table.add_row("cache use", f"{used.max():.0%} at most, {used.mean():.0%} on average, {sizes.num_blocks} blocks")
    sampled = len(totals.errors)
    table.add_row(
        "largest difference", f"{max(totals.errors):.2e} to float64, {sampled} tokens sampled, their choice as well"
    )
    table.add_row("", "within the tolerances" if totals.in_tolerance else "OUT OF THE TOLERANCES")
    console.print(table)


def main() -> int:
    sizes = DEEPSEEK if ON_GPU else SMALL
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    caches = ("fp8_ds_mla", "bf16")
    parser.add_argument("--cache", choices=caches, default=caches[0], help="its layout (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=sizes.requests, help="served in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of weights, values and requests (default: a new one)")
    args = parser.parse_args()
    if args.requests < 1:
        parser.error("--requests must be at least 1")

    console = Console(highlight=False, width=100)
    layer = Layer(sizes, "bfloat16" if args.cache == "bf16" else args.cache, args.seed)
    rng = np.random.default_rng(args.seed)
    server = Server(sizes, layer, rng)
    if ON_GPU:  # compile the kernels first
        server.serve([Request(2 * sizes.topk, 2, 0)], Progress(disable=True))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:
        totals = server.serve(some_requests(rng, sizes, args.requests), progress)
    assert server.allocator.used == 0, "every request gives its blocks back"
    report(console, sizes, layer, totals, args.requests)
    return 0 if totals.in_tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
