"""A decode step of one V3.2 layer behind its projections, as one CUDA graph, beside the chain that vLLM runs.

python benchmarks/layer.py [--quick] [--only REGEX] [--limit SECONDS] [--seed SEED]

The chain: the token's row into the latent cache, its key into the indexer's, the indexer's queries quantized, logits,
top-k, positions to slots, attention. What a step makes once for all layers is outside of what is timed: the schedules
of the logits, ours and DeepGEMM's; the attention's schedule is planned by the first layer of a replay. A replay has
four layers, or fewer where their caches are large, each with caches of its own. Both chains are captured for contexts
of up to 131072 tokens, as an engine does. `ours_us`, `peer_us` and both numbers of launches are of a layer.

The peer's parts, of vLLM's wheel (CUPY_MLA_INDEXER_PEERS, see `indexer.py`; each version in a process of its own, which
draws the same inputs):

    rows, keys      concat_and_cache_mla, indexer_k_quant_and_cache
    queries         per_token_group_fp8_quant; one multiplication of torch's puts scales into weights, which have all
                    constant factors before
    logits          DeepGEMM's
    top-k           each of vLLM's kernels; the best chain is the peer
    slots           ours stands in for vLLM's, which Triton compiles
    attention       FlashMLA (CUPY_MLA_PEER)

`chosen_equal` is the share of slots that both chose, `max_abs_err` the largest difference of the attention's results.
Three windows of both in turn, whose median counts. Writes layer.json.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import LAYER, judge
from harness import (
    SETS,
    Options,
    Record,
    difference,
    find_peer,
    flash_mla_peer,
    kernels_of,
    largest_difference,
    load_kernels,
    peer_name,
    time_side_by_side,
)
from indexer import e4m3
from indexer_peers import PeerProcess, Peers, answer_each, complaining, ready, unpacked
from inputs import normal, v32_cache

import cupy_mla
from cupy_mla import flash_mla
from cupy_mla.cuda import driver, logits_sm90

HEADS, INDEX_HEADS, K, BLOCK = 128, 64, 2048, 64
BATCHES, CONTEXTS = (1, 8, 64), (2048, 32768, 131072)
DRAWN = 4  # sizes between these
LONGEST = 131072
LARGEST_SETS = 14 << 30  # bytes of the caches of all sets, in each process
TOKEN_BYTES = 656 + 132
WINDOWS = 3
ANSWER_SECONDS = 300  # of a peer, whose first answer compiles
EQUAL, APART = 0.99, 0.1  # of slots that both choose at least, of results at most: ties are told by rounding
E4M3_MAX = 448.0
KERNELS = (
    r"^attention/fp8_sm90.* DENSE=0 .*TOKEN_BYTES=656|^cache/pack.*TOKEN_BYTES=656|^indices/convert"
    r"|^indexer/(pack_keys|quantize_q|schedule|short_rows|topk\.cu BF16=0|logits_sm90.* HEADS=64 .*PAGED=1)"
)


class Layer(NamedTuple):
    """What a step brings a layer, and the layer's caches."""

    latent: torch.Tensor  # [b, 512]
    rope: torch.Tensor  # [b, 64]
    key: torch.Tensor  # [b, 128]
    index_q: torch.Tensor  # [b, INDEX_HEADS, 128]
    weights: torch.Tensor  # [b, INDEX_HEADS] float32
    q: torch.Tensor  # [b, 1, HEADS, 576]
    rows: torch.Tensor  # the cache of rows
    keys: torch.Tensor  # the cache of keys
    table: torch.Tensor
    lens: torch.Tensor  # [b, 1]
    slots: torch.Tensor  # [b] int64, of the step's tokens


def sizes(rng: random.Random, quick: bool) -> list[dict[str, Any]]:
    """What the rows are of: the sizes that the target names, and some between them."""
    shapes = [(b, context) for b in BATCHES for context in CONTEXTS]
    for _ in range(DRAWN):
        b, context = (math.exp(rng.uniform(math.log(x[0]), math.log(x[-1]))) for x in (BATCHES, CONTEXTS))
        shapes.append((round(b), round(context)))
    return [
        {"b": b, "context": context, "h": HEADS, "seed": rng.randrange(1 << 31)}
        for b, context in (shapes[:: len(CONTEXTS) + 1] if quick else dict.fromkeys(shapes))
    ]


def name_of(row: dict[str, Any]) -> str:
    return f"layer h {row['h']} b {row['b']} context {row['context']}"


def layers_of(row: dict[str, Any]) -> list[Layer]:
    """The layers of a replay, the same in every process."""
    torch.manual_seed(row["seed"])
    b, context = row["b"], row["context"]
    width = -(-context // BLOCK)
    number = max(min(SETS, LARGEST_SETS // (b * context * TOKEN_BYTES)), 1)
    table = torch.zeros(b, LONGEST // BLOCK, device="cuda", dtype=torch.int32)
    table[:, :width] = torch.randperm(b * width, device="cuda").view(b, width)
    last = context - 1
    slots = table[:, last // BLOCK].long() * BLOCK + last % BLOCK
    lens = torch.full((b, 1), context, device="cuda", dtype=torch.int32)
    layers = []
    for _ in range(number):
        keys = torch.empty(b * width, BLOCK * 132, device="cuda", dtype=torch.uint8)
        keys[:, : BLOCK * 128] = e4m3(b * width * BLOCK).view(torch.uint8).view(b * width, -1)
        keys[:, BLOCK * 128 :] = (torch.rand(b * width, BLOCK, device="cuda") * 0.01 + 0.002).view(torch.uint8)
        step = normal(b, 512), normal(b, 64), normal(b, 128), normal(b, INDEX_HEADS, 128)
        weights, rows = torch.randn(b, INDEX_HEADS, device="cuda"), v32_cache(b * width * BLOCK)
        q, keys = normal(b, 1, HEADS, 576), keys.view(-1, BLOCK, 132)
        layers.append(Layer(*step, weights, q, rows, keys, table, lens, slots))
    return layers


Chain = Callable[[], tuple[torch.Tensor, torch.Tensor]]  # of a layer: its slots [b, K] and its result


def attention(module: Any, layer: Layer, meta: Any, slots: torch.Tensor) -> torch.Tensor:
    return module.flash_mla_with_kvcache(
        layer.q, layer.rows, None, None, 512, meta, is_fp8_kvcache=True, indices=slots[:, None]
    )[0]


def in_steps(module: Any, layers: list[Layer], chain: Callable[[Layer, Any], Any]) -> list[Chain]:
    """The chain of each layer. The first one's attention plans anew for all, each time that all are run."""
    meta: list[Any] = []

    def run(number: int, layer: Layer) -> Any:
        if number == 0:
            meta[:] = [module.get_mla_metadata()[0]]
        return chain(layer, meta[0])

    return [partial(run, number, layer) for number, layer in enumerate(layers)]


def our_chains(layers: list[Layer]) -> list[Chain]:
    table, lens = layers[0].table, layers[0].lens
    shares = logits_sm90.shares_of_schedule(driver.gpu(0), INDEX_HEADS, len(lens), 1, LONGEST)
    schedule = cupy_mla.paged_indexer_schedule(lens, table, LONGEST, BLOCK, shares)

    def chain(of: Layer, meta: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cupy_mla.concat_and_cache_mla(of.latent, of.rope, of.rows, of.slots, layout="v32_fp8", scale_format="fp32")
        cupy_mla.indexer_k_quant_and_cache(of.key, of.keys, of.slots, "ue8m0")
        q8, w = cupy_mla.quantize_indexer_q(of.index_q, of.weights, scale_format="ue8m0")
        slots = cupy_mla.select_rows_paged(
            q8[:, None], of.keys, w, of.lens, of.table, LONGEST, K, slots=True, schedule=schedule
        )
        return slots, attention(flash_mla, of, meta, slots)

    return in_steps(flash_mla, layers, chain)


def peer_chains(peers: Peers, name: str, module: Any, layers: list[Layer]) -> list[Chain]:
    """Of vLLM's operations, with one of its kernels for top-k."""
    cache_ops, quantize = torch.ops._C_cache_ops, torch.ops._C.per_token_group_fp8_quant
    # Versions differ in how many flags about the layout of scales come last; all are false.
    flags = [False] * (len(quantize.default._schema.arguments) - 8)
    lens = layers[0].lens
    b, schedule, one = len(lens), peers.schedule(lens), torch.ones(1, device="cuda")
    factor = (INDEX_HEADS * 128) ** -0.5
    scaled = {id(of): of.weights * factor for of in layers}
    requests = torch.arange(b, device="cuda", dtype=torch.int32)

    def chain(of: Layer, meta: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cache_ops.concat_and_cache_mla(of.latent, of.rope, of.rows[:, :, 0], of.slots, "fp8_ds_mla", one)
        cache_ops.indexer_k_quant_and_cache(of.key, of.keys, of.slots, 128, "ue8m0")
        q8 = torch.empty(b, INDEX_HEADS, 128, device="cuda", dtype=torch.float8_e4m3fn)
        scales = torch.empty(b * INDEX_HEADS, 1, device="cuda")
        quantize(of.index_q.view(-1, 128), q8.view(-1, 128), scales, 128, 1e-10, -E4M3_MAX, E4M3_MAX, True, *flags)
        w = scaled[id(of)] * scales.view(b, INDEX_HEADS)
        logits = peers.paged_logits(q8[:, None], of.keys, w, of.lens, of.table, schedule, LONGEST)
        chosen = peers.topk_decode(name, logits, of.lens, torch.empty(b, K, device="cuda", dtype=torch.int32))
        slots = cupy_mla.convert_req_index_to_global_index(requests, of.table, chosen, BLOCK)
        return slots, attention(module, of, meta, slots)

    return in_steps(module, layers, chain)


class Measured(NamedTuple):
    """Of a peer's chains: microseconds and launches of a layer, and the first layer's slots and result."""

    us: float
    launches: float
    slots: np.ndarray
    result: torch.Tensor


def serve(pipe: Connection, folder: Path) -> None:
    """What is `Measured` of the chain with each top-k, for each row that is asked for."""
    peers, module = Peers(folder), find_peer()
    answer_each(pipe, lambda row: measured(peers, module, row, folder.name))


def measured(peers: Peers, module: Any, row: dict[str, Any], version: str) -> dict[str, Measured]:
    layers, found = layers_of(row), {}
    for name in peers.names:
        with complaining(f"{version} {name_of(row)} {name}"):
            chains = peer_chains(peers, name, module, layers)
            slots, result = chains[0]()
            (us,) = time_side_by_side(chains)
            launches = kernels_of(chains) / len(chains)
            found[name] = Measured(us, launches, slots.cpu().numpy(), result.cpu())
    return found


def share_of_equal(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Of the slots [b, K] of each request the share that both chose."""
    both = sum(len(np.intersect1d(x[x >= 0], y[y >= 0])) for x, y in zip(ours, theirs, strict=True))
    return both / max(int((ours >= 0).sum()), 1)


def measure(record: Record, processes: list[PeerProcess], case: str, row: dict[str, Any]) -> None:
    chains = our_chains(layers_of(row))
    slots, result = chains[0]()
    chosen, ours = slots.cpu().numpy(), result.cpu()
    times, windows = [], []
    for _ in range(WINDOWS):
        times += time_side_by_side(chains)
        window: dict[str, Measured] = {}
        for process in processes:
            window |= process.ask(row, time.monotonic() + 300)
        windows.append(window)
    launches = kernels_of(chains) / len(chains)
    us = {name: statistics.median(w[name].us for w in windows if name in w) for name in windows[0]}
    if not us:
        record.left_out.append(case)
        return
    best = min(us, key=lambda name: us[name])
    theirs = windows[0][best]
    equal, apart = share_of_equal(chosen, theirs.slots), difference(ours, theirs.result)
    if not (equal >= EQUAL and apart <= APART):
        record.wrong.append(f"{case}: {equal:.4f} of the slots are the same, results differ by {apart:.1e}")
    record.add(
        case, statistics.median(times), us[best], largest_difference(ours, theirs.result),
        peer=f"{best}, {peer_name()}", launches=launches, peer_launches=theirs.launches, chosen_equal=round(equal, 5),
        layers=len(chains), us={name: round(value, 2) for name, value in us.items()}, **row,
    )  # fmt: skip


def main() -> None:
    options, seed = Options.parse_with_seed(__doc__)
    record = Record("layer", options)
    record.note("seed", seed)
    flash_mla_peer()
    processes = ready([PeerProcess(folder, serve) for folder in unpacked()], time.monotonic() + 120)
    load_kernels(KERNELS)
    for row in sizes(random.Random(seed), options.quick):
        if record.wants(case := name_of(row)):
            measure(record, processes, case, row)
            torch.cuda.empty_cache()
    for process in processes:
        process.process.kill()
    judge(LAYER, record.rows)
    print(record.write())


if __name__ == "__main__":
    main()
