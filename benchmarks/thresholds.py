"""Mixed or separate batches of the FP8 backend of V3.2 layers: which is faster, by heads and kind of batch.

python benchmarks/thresholds.py [--quick] [--only REGEX]

Mixed: the whole batch goes to the FP8 decode kernel, one query a token. Separate: decodes go there, prefills to the
bf16 prefill kernel over gathered rows. `SparseMLAConfig.mixed_below_heads` chooses by heads. Both are timed under
CUDA-graph replay of the whole `SparseMLAImpl.forward_mqa`, and their outputs compared. Writes thresholds.json with
ratio = separate / mixed, so above 1 mixed is faster.
"""

from __future__ import annotations

import torch
from cases import geometric_mean
from harness import SETS, Options, Record, time_side_by_side
from inputs import normal, v32_cache

from cupy_mla import BatchMetadata, SparseMLAConfig, SparseMLAImpl, SparseMLAMetadataBuilder, Workspace

HEADS = (8, 16, 32, 64, 128)
BLOCK_SIZE, TOPK = 64, 2048
PLACE = ("torch", 0)
MODES = {"mixed": 129, "separate": 1}  # mixed_below_heads

# Kinds of batches: decodes, prefills, query tokens of a prefill, tokens of every sequence.
BATCHES = {
    "64 decodes": (64, 0, 0, 16384),
    "4 prefills of 512": (0, 4, 512, 16384),
    "1 prefill of 2048": (0, 1, 2048, 16384),
    "1 prefill of 4096, new": (0, 1, 4096, 4096),
    "60 decodes, 1 prefill of 512": (60, 1, 512, 16384),
    "60 decodes, 4 prefills of 512": (60, 4, 512, 16384),
}


def batch_of(decodes: int, prefills: int, tokens: int, length: int) -> BatchMetadata:
    """Requests of `length` tokens each, their blocks shuffled over the cache."""
    query_lens = torch.tensor([1] * decodes + [tokens] * prefills)
    requests, total = len(query_lens), int(query_lens.sum())
    table = torch.randperm(requests * length // BLOCK_SIZE).view(requests, -1)
    req = torch.repeat_interleave(torch.arange(requests), query_lens)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), query_lens.cumsum(0)])
    positions = torch.arange(total) - starts[req] + length - query_lens[req]
    slots = table[req, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return BatchMetadata(*(a.numpy() for a in (starts, torch.full((requests,), length), table, slots, positions)))


def chosen(batch: BatchMetadata) -> torch.Tensor:
    """Token positions [T, topk] as an indexer gives them: any before the query's own, -1 where there are fewer."""
    seen = torch.from_numpy(batch.positions + 1).cuda()[:, None]
    picks = (torch.rand(len(seen), TOPK, device="cuda") * seen).int()
    return picks.where(torch.arange(TOPK, device="cuda") < seen, -1).to(torch.int32)


def measure(record: Record, heads: int, kind: str, cache: torch.Tensor, workspace: Workspace) -> None:
    case = f"h {heads}, {kind}"
    if not record.wants(case):
        return
    batch = batch_of(*BATCHES[kind])
    tokens, longest = batch.num_actual_tokens, batch.max_seq_len
    sets = [(normal(tokens, heads, 576), chosen(batch)) for _ in range(SETS)]
    calls, outputs = [], []
    for below in MODES.values():
        config = SparseMLAConfig(
            heads, topk=TOPK, cache_layout="v32_fp8", max_num_seqs=batch.num_reqs, max_num_batched_tokens=tokens,
            max_model_len=longest, mixed_below_heads=below,
        )  # fmt: skip
        impl = SparseMLAImpl(config, 576**-0.5, workspace)
        metadata = SparseMLAMetadataBuilder(config, PLACE).build(batch)
        calls.append([lambda q=q, topk=t, i=impl, m=metadata: i.forward_mqa(q, cache, m, topk) for q, t in sets])
        outputs.append(calls[-1][0]())
    error = record.compare(case, *outputs)
    record.add_ways(case, dict(zip(MODES, time_side_by_side(*calls), strict=True)), error)


def main() -> None:
    options = Options.parse(__doc__)
    torch.manual_seed(0)
    record = Record("thresholds", options, "mixed us,separ. us,ratio,max diff")
    cache = v32_cache(64 * 16384, BLOCK_SIZE)
    workspace = Workspace(PLACE)
    for heads in HEADS[1::2] if options.quick else HEADS:
        for kind in BATCHES:
            measure(record, heads, kind, cache, workspace)
    for heads in HEADS:
        ratios = [r["ratio"] for r in record.rows if r["case"].startswith(f"h {heads},") and "prefill" in r["case"]]
        if ratios:
            faster = "mixed" if geometric_mean(ratios) > 1 else "separate"
            print(f"h {heads}: batches with prefills, geometric mean {geometric_mean(ratios):.2f}: {faster}")
    print(record.write())


if __name__ == "__main__":
    main()
