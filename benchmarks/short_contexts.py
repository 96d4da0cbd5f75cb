"""Decodes of contexts of at most topk tokens: attention over all rows, without lists, beside index lists.

python benchmarks/short_contexts.py [--quick] [--only REGEX] [--limit SECONDS] [--seed N]

Sizes are drawn at random; the seed is in the record. For each layout and number of heads: batches of 1 to 264 requests
of 1 to 4 query tokens, contexts of 64 to 2048 tokens, equal or drawn for each request from 64 up to that. Lists hold
all positions that a query token sees, in order, and the backend is told where they end.

Both ways are timed under CUDA-graph replay of the whole `SparseMLAImpl.forward_mqa`, so lists are converted to slots in
each call; their outputs are compared. The indexer, which has nothing to do in the dense way, is not timed. Calls of a
replay are of as many layers of a step: they share block table and metadata, and each has a cache of its own. Writes
short_contexts.json with ratio = lists / dense, so above 1 the dense way is faster, and `taken`, the way that the
backend takes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from cases import SHORT_CONTEXTS, judge
from harness import SETS, Options, Record, time_side_by_side
from inputs import PLACE, bf16_cache, normal, v32_cache

from cupy_mla import BatchMetadata, SparseMLAConfig, SparseMLAImpl, SparseMLAMetadataBuilder, Workspace
from cupy_mla.metadata.sparse_mla import DenseDecodes, SparseMLAMetadata

HEADS = (16, 32, 64, 128)
LARGEST, SHORTEST, TOPK, BLOCK = 264, 64, 2048, 64
DRAWN, DRAWN_SMALL = 8, 2  # batches for each layout and number of heads, and of them with 1 to 4 requests

CACHES: dict[str, Callable[[int], torch.Tensor]] = {"v32_fp8": v32_cache, "bf16": bf16_cache}


def rows(rng: random.Random, quick: bool) -> Iterator[dict[str, Any]]:
    """What the rows are of, in the fields that the record gives them."""
    for layout in CACHES:
        for h in HEADS:
            for n in range(2 if quick else DRAWN):
                yield {
                    "layout": layout, "h": h, "b": rng.randint(1, 4 if n < (1 if quick else DRAWN_SMALL) else LARGEST),
                    "s_q": rng.randint(1, 4) if rng.random() < 0.5 else 1,
                    "context": round(math.exp(rng.uniform(math.log(SHORTEST), math.log(TOPK)))),
                    "lengths": rng.choice(("equal", "drawn")),
                }  # fmt: skip


def name_of(row: dict[str, Any]) -> str:
    return f"short {row['layout']} h {row['h']} b {row['b']} s_q {row['s_q']} context {row['context']} {row['lengths']}"


def batch_of(row: dict[str, Any]) -> BatchMetadata:
    """Decodes, their blocks at random places of a layer's cache."""
    b, s_q = row["b"], row["s_q"]
    lens = torch.full((b,), row["context"])
    if row["lengths"] == "drawn":
        lens = torch.randint(SHORTEST, row["context"] + 1, (b,))
    width = -(-row["context"] // BLOCK)
    table = torch.randperm(LARGEST * TOPK // BLOCK)[: b * width].view(b, width)
    starts = torch.arange(b + 1) * s_q
    positions = (lens[:, None] - s_q + torch.arange(s_q)).view(-1)
    requests = torch.arange(b).repeat_interleave(s_q)
    slots = table[requests, positions // BLOCK] * BLOCK + positions % BLOCK
    return BatchMetadata(*(a.numpy() for a in (starts, lens, table, slots, positions)))


def metadata_of(config: SparseMLAConfig, batch: BatchMetadata) -> tuple[dict[str, SparseMLAMetadata], str]:
    """The metadata of a batch by way, and the way that the backend takes."""
    built = SparseMLAMetadataBuilder(config, PLACE).build(batch)
    dense = DenseDecodes(torch.from_numpy(batch.seq_lens).cuda(), built.block_table, batch.max_query_len)
    ways = {"dense": replace(built, dense_decodes=dense), "lists": replace(built, dense_decodes=None)}
    return ways, "lists" if built.dense_decodes is None else "dense"


def measure(record: Record, row: dict[str, Any], caches: tuple[torch.Tensor, ...], workspace: Workspace) -> None:
    case, h, b, s_q = name_of(row), row["h"], row["b"], row["s_q"]
    batch = batch_of(row)
    # A graph may take the dense way if no sequence of the config can be longer than a list.
    config = SparseMLAConfig(
        h, topk=TOPK, cache_layout=row["layout"], max_num_seqs=b, max_num_batched_tokens=b * s_q, max_model_len=TOPK,
        num_speculative_tokens=s_q - 1, dense_when_short=True,
    )  # fmt: skip
    impl = SparseMLAImpl(config, 576**-0.5, workspace)
    ways, taken = metadata_of(config, batch)
    ends = torch.from_numpy(batch.positions).cuda().to(torch.int32) + 1
    columns = torch.arange(TOPK, device="cuda", dtype=torch.int32)
    lists = [columns.where(columns < ends[:, None], -1) for _ in caches]
    queries = [normal(b * s_q, h, 576) for _ in caches]
    layers = [*zip(queries, caches, lists, strict=True)]
    calls = [
        [lambda q=q, c=c, x=x, m=m: impl.forward_mqa(q, c, m, x, valid_counts=ends) for q, c, x in layers]
        for m in ways.values()
    ]
    error = record.compare(case, calls[0][0](), calls[1][0]())
    times = dict(zip(ways, time_side_by_side(*calls), strict=True))
    record.add_ways(case, times, error, taken=taken, **row)


def main() -> None:
    options, seed = Options.parse_with_seed(__doc__)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    record = Record("short_contexts", options, "dense us,lists us,ratio,max diff")
    record.note("seed", seed)
    workspace = Workspace(PLACE)
    caches: dict[str, tuple[torch.Tensor, ...]] = {}
    for row in rows(rng, options.quick):
        if not record.wants(name_of(row)):
            continue
        layout = row["layout"]
        if layout not in caches:
            caches = {layout: CACHES[layout](SETS * LARGEST * TOPK).chunk(SETS)}
        measure(record, row, caches[layout], workspace)
    judge(SHORT_CONTEXTS, record.rows)
    print(record.write())


if __name__ == "__main__":
    main()
