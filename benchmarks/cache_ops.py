"""Cache and index operations beside a copy of as many bytes: what they read and write, half of it read, half written.

python benchmarks/cache_ops.py [--quick] [--only REGEX]

`--quick` takes an eighth of the sizes. The ratio of a row is the share of the copy bandwidth, measured in the same
run. `max_abs_err` is the largest difference to the NumPy reference on the same inputs, of bytes where the output is
packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from harness import SETS, Options, Record, copy_of, largest_difference, time_side_by_side
from inputs import normal

import cupy_mla
from cupy_mla import layouts

BLOCK_SIZE = 64
Arrays = dict[str, torch.Tensor]


class Case(NamedTuple):
    """An operation, its arguments in the operation's own names, and the outputs among them.

    An operation without an output argument returns its outputs.
    """

    name: str
    operation: Callable
    arrays: Arrays
    settings: dict[str, object]
    outputs: tuple[str, ...]
    moved: int  # bytes read and written


def empty_cache(tokens: int, token_bytes: int) -> torch.Tensor:
    return torch.zeros(tokens // BLOCK_SIZE, BLOCK_SIZE, token_bytes, device="cuda", dtype=torch.uint8)


def filling_slots(tokens: int) -> torch.Tensor:
    """Slots as requests fill them: blocks in any order, the tokens of a block one after the other."""
    blocks = torch.randperm(tokens // BLOCK_SIZE, device="cuda")
    return (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device="cuda")).flatten()


def pack_cases(tokens: int) -> Iterator[Case]:
    scattered, slots = torch.randperm(tokens, device="cuda"), filling_slots(tokens)
    latent, rope = normal(tokens, 512), normal(tokens, 64)
    for scale_format, where in (("fp32", scattered), ("fp32", slots), ("ue8m0", slots)):
        arrays = {"kv_c": latent, "k_pe": rope, "kv_cache": empty_cache(tokens, 656), "slot_mapping": where}
        name = f"pack V32 {scale_format} tokens {tokens}" + (" scattered" if where is scattered else "")
        yield Case(
            name, cupy_mla.concat_and_cache_mla, arrays,
            {"scale_format": scale_format}, ("kv_cache",), tokens * (1152 + 656 + 8),
        )  # fmt: skip
    arrays |= {"kv_cache": empty_cache(tokens, 1152).view(torch.bfloat16)}
    yield Case(
        f"pack bf16 tokens {tokens}", cupy_mla.concat_and_cache_mla, arrays, {}, ("kv_cache",),
        tokens * (1152 + 1152 + 8),
    )  # fmt: skip
    yield Case(
        f"pack V4 tokens {tokens}", cupy_mla.quantize_and_insert_k_cache,
        {"k": latent, "k_cache": v4_target(tokens), "slot_mapping": slots}, {}, ("k_cache",), tokens * (1024 + 584 + 8),
    )  # fmt: skip


def v4_target(tokens: int) -> torch.Tensor:
    stride = layouts.V4_FP8.block_bytes(BLOCK_SIZE)
    whole = torch.zeros(tokens // BLOCK_SIZE, stride, device="cuda", dtype=torch.uint8)
    return whole.as_strided((tokens // BLOCK_SIZE, BLOCK_SIZE, 584), (stride, 584, 1))


def indexer_pack_cases(tokens: int) -> Iterator[Case]:
    scattered, slots = torch.randperm(tokens, device="cuda"), filling_slots(tokens)
    keys = normal(tokens, 128)
    for scale_format, where in (("fp32", scattered), ("fp32", slots), ("ue8m0", slots)):
        cache = empty_cache(tokens, layouts.INDEXER_FP8.token_bytes)
        name = f"pack indexer {scale_format} tokens {tokens}" + (" scattered" if where is scattered else "")
        yield Case(
            name, cupy_mla.indexer_k_quant_and_cache, {"k": keys, "kv_cache": cache, "slot_mapping": where},
            {"scale_format": scale_format}, ("kv_cache",), tokens * (256 + 132 + 8),
        )  # fmt: skip


def uneven_lengths(requests: int, tokens: int) -> torch.Tensor:
    """Lengths from a few tokens to several times the average, `tokens` in all."""
    shares = torch.rand(requests).pow(3)
    lengths = (shares / shares.sum() * tokens).int()
    lengths[-1] += tokens - lengths.sum()
    return lengths


def paged(requests: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Lengths, their running sum and a shuffled block table on the GPU, and how many blocks there are."""
    lengths = uneven_lengths(requests, tokens)
    counts = (lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
    blocks = int(counts.sum())
    table = torch.zeros(requests, int(counts.max()), dtype=torch.int32)
    for row, own in zip(table, torch.randperm(blocks, dtype=torch.int32).split(counts.tolist()), strict=True):
        row[: len(own)] = own
    starts = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    return lengths.cuda(), starts.cuda(), table.cuda(), blocks


def gather_cases(tokens: int, requests: int) -> Iterator[Case]:
    lengths, starts, table, blocks = paged(requests, tokens)
    cache = empty_cache(blocks * BLOCK_SIZE, 656)
    slots = torch.arange(blocks * BLOCK_SIZE, device="cuda")
    cupy_mla.concat_and_cache_mla(normal(len(slots), 512), normal(len(slots), 64), cache, slots)
    arrays = {
        "src_cache": cache, "dst": torch.zeros(tokens, 576, device="cuda", dtype=torch.bfloat16),
        "block_table": table, "seq_lens": lengths, "workspace_starts": starts[:-1].contiguous(),
    }  # fmt: skip
    yield Case(
        f"gather V32 tokens {tokens} requests {requests}", cupy_mla.cp_gather_and_upconvert_fp8_kv_cache, arrays, {},
        ("dst",), tokens * (656 + 1152),
    )  # fmt: skip


def indexer_gather_cases(tokens: int, requests: int) -> Iterator[Case]:
    _, starts, table, blocks = paged(requests, tokens)
    keys = empty_cache(blocks * BLOCK_SIZE, 132)
    keys.random_()
    arrays = {
        "kv_cache": keys, "dst_k": torch.zeros(tokens, 128, device="cuda", dtype=torch.uint8),
        "dst_scale": torch.zeros(tokens, device="cuda"), "block_table": table, "cu_seq_lens": starts,
    }  # fmt: skip
    yield Case(
        f"gather indexer tokens {tokens} requests {requests}", cupy_mla.cp_gather_indexer_k_quant_cache, arrays, {},
        ("dst_k",), tokens * 2 * 132,
    )  # fmt: skip


def v4_gather_cases(tokens: int, requests: int) -> Iterator[Case]:
    lengths, _, table, blocks = paged(requests, tokens)
    cache = v4_target(blocks * BLOCK_SIZE)
    slots = torch.arange(blocks * BLOCK_SIZE, device="cuda")
    cupy_mla.quantize_and_insert_k_cache(normal(len(slots), 512), cache, slots)
    out = torch.zeros(requests, int(lengths.max()), 512, device="cuda", dtype=torch.bfloat16)
    yield Case(
        f"gather V4 tokens {tokens} requests {requests}", cupy_mla.dequantize_and_gather_k_cache,
        {"out": out, "k_cache": cache, "seq_lens": lengths, "block_table": table},
        {"gather_lens": None, "block_size": BLOCK_SIZE, "offset": 0}, ("out",), tokens * (584 + 1024),
    )  # fmt: skip


def v4_index_cases(tokens: int) -> Iterator[Case]:
    """Lists of a prefill chunk of C4A, and of decodes of the sliding window and of C128A, at 160K tokens a sequence."""
    longest, window, topk, requests = 163840, 128, 512, 4
    starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * (tokens // requests)
    seq_lens = torch.full((requests,), longest, device="cuda", dtype=torch.int32)
    rows = longest // 4
    arrays = {
        "topk_indices": torch.randint(0, rows, (tokens, topk), device="cuda", dtype=torch.int32),
        "query_start_loc": starts, "seq_lens": seq_lens,
        "gather_lens": cupy_mla.compute_prefill_gather_lens(seq_lens, starts, 0, window),
        "out": torch.zeros(tokens, topk + window, device="cuda", dtype=torch.int32),
    }  # fmt: skip
    yield Case(
        f"combine topk and window {tokens} x {topk} + {window}", cupy_mla.combine_topk_swa_indices, arrays,
        {"window_size": window, "compress_ratio": 4, "topk": topk, "M": rows + window + tokens, "N": rows}, ("out",),
        4 * tokens * (topk + topk + window),
    )  # fmt: skip
    requests, width = tokens // 4, longest // BLOCK_SIZE
    arrays = {
        "query_start_loc": torch.arange(requests + 1, device="cuda", dtype=torch.int32) * 4,
        "seq_lens": torch.randint(4, longest, (requests,), device="cuda", dtype=torch.int32),
        "token_to_req": torch.arange(tokens, device="cuda", dtype=torch.int32) // 4,
        "is_valid_token": torch.ones(tokens, device="cuda", dtype=torch.bool),
        "block_table": torch.randint(0, 1 << 16, (requests, width), device="cuda", dtype=torch.int32),
        "out": torch.zeros(tokens, window, device="cuda", dtype=torch.int32),
    }
    yield Case(
        f"window slots {tokens} x {window}", cupy_mla.compute_swa_indices_and_lens, arrays,
        {"block_size": BLOCK_SIZE, "window_size": window}, ("out",), 4 * tokens * window,
    )  # fmt: skip
    most = longest // 128
    arrays = {
        "positions": torch.randint(0, longest, (tokens,), device="cuda"),
        "token_to_req": arrays["token_to_req"],
        "block_table": arrays["block_table"],
        "slot_mapping": torch.zeros(tokens, device="cuda", dtype=torch.int64),
        "decode_indices": torch.zeros(tokens, most, device="cuda", dtype=torch.int32),
        "decode_lens": torch.zeros(tokens, device="cuda", dtype=torch.int32),
        "prefill_indices": torch.zeros(0, most, device="cuda", dtype=torch.int32),
    }
    yield Case(
        f"C128A slots {tokens} x {most}", cupy_mla.build_c128a_topk_metadata, arrays,
        {"compress_ratio": 128, "num_decode_tokens": tokens, "block_size": 2, "max_compressed_tokens": most},
        ("decode_indices",), 4 * tokens * most,
    )  # fmt: skip


def concat_cases(tokens: int, heads: int) -> Iterator[Case]:
    arrays = {
        "ql_nope": normal(heads, tokens, 512).transpose(0, 1),  # as a batched product leaves it
        "q_pe": normal(tokens, heads, 192)[..., 128:],
        "out": torch.zeros(tokens, heads, 576, device="cuda", dtype=torch.bfloat16),
    }
    yield Case(
        f"concat q tokens {tokens} h {heads}", cupy_mla.concat_mla_q, arrays, {}, ("out",), tokens * heads * 2 * 1152
    )


def convert_cases(tokens: int, topk: int) -> Iterator[Case]:
    requests, width = 16, 163840 // BLOCK_SIZE
    arrays = {
        "req_id": torch.randint(0, requests, (tokens,), device="cuda", dtype=torch.int32).sort().values,
        "block_table": torch.randint(0, 1 << 16, (requests, width), device="cuda", dtype=torch.int32),
        "token_indices": torch.randint(-1, width * BLOCK_SIZE, (tokens, topk), device="cuda", dtype=torch.int32),
        "out": torch.zeros(tokens, topk, device="cuda", dtype=torch.int32),
    }
    yield Case(
        f"convert indices {tokens} x {topk}", cupy_mla.convert_req_index_to_global_index, arrays,
        {"block_size": BLOCK_SIZE}, ("out",), 2 * 4 * tokens * topk,
    )  # fmt: skip
    # To the front: full lists; and lists of pools of 4 tokens, of which the chosen ones and the tail take a half.
    gap = torch.randint(0, width * BLOCK_SIZE, (tokens, topk + 3), device="cuda", dtype=torch.int32)
    gap[:, topk // 2 : topk] = -1
    for detail, lists in (("", arrays["token_indices"]), (" with gaps", gap)):
        yield Case(
            f"convert indices {tokens} x {lists.shape[1]} to the front{detail}",
            cupy_mla.convert_req_index_to_global_index,
            {**arrays, "token_indices": lists, "out": torch.zeros_like(lists)},
            {"block_size": BLOCK_SIZE, "return_valid_counts": True}, ("out",), 2 * 4 * lists.numel(),
        )  # fmt: skip


def pool_cases(tokens: int) -> Iterator[Case]:
    """Pools of 4 tokens: keys of eight prompts, and lists of 512 chosen pools at 160K tokens a sequence."""
    kpool, requests, n, longest = 4, 8, 512, 163840
    arrays = {
        "k": normal(tokens, 128), "gate": normal(tokens, 128), "ape": normal(kpool, 128).float(),
        "tail": torch.zeros(requests, 2, 2 * kpool, 128, device="cuda", dtype=torch.bfloat16),
        "tail_blocks": torch.arange(requests, device="cuda", dtype=torch.int32),
        "query_start_loc": torch.arange(requests + 1, device="cuda", dtype=torch.int32) * (tokens // requests),
        "seq_lens": torch.full((requests,), tokens // requests, device="cuda", dtype=torch.int32),
        "out": torch.zeros(tokens, 128, device="cuda", dtype=torch.bfloat16),
    }  # fmt: skip
    yield Case(f"pool keys tokens {tokens}", cupy_mla.kpool_compress, arrays, {}, ("out",), 3 * 256 * tokens)
    tokens //= 16
    arrays = {
        "pool_ids": torch.rand(tokens, longest // kpool, device="cuda").topk(n).indices.int(),
        "seq_lens": torch.randint(longest - kpool, longest, (tokens,), device="cuda", dtype=torch.int32),
        "out": torch.zeros(tokens, n * kpool + kpool - 1, device="cuda", dtype=torch.int32),
    }
    yield Case(
        f"expand pools {tokens} x {n}", cupy_mla.expand_pools_and_append_tail, arrays, {"kpool": kpool}, ("out",),
        4 * tokens * (n + n * kpool + kpool - 1),
    )  # fmt: skip


def rank_cases(tokens: int, heads: int) -> Iterator[Case]:
    """Context parallelism over two ranks with 160K tokens a request: lists of 2048, and what both found for them."""
    ranks, topk, longest = 2, 2048, 163840
    arrays = {
        "topk_indices": torch.randint(0, longest, (8 * tokens, topk), device="cuda", dtype=torch.int32),
        "out": torch.zeros(8 * tokens, topk, device="cuda", dtype=torch.int32),
        "topk_length": torch.zeros(8 * tokens, device="cuda", dtype=torch.int32),
    }
    yield Case(
        f"localize topk {8 * tokens} x {topk}", cupy_mla.localize_topk, arrays, {"world_size": ranks, "rank": 1},
        ("out", "topk_length"), 2 * 4 * 8 * tokens * topk,
    )  # fmt: skip
    gap = longest // ranks // topk  # each rank's choices: one position in each of its ranges of so many tokens
    local = torch.arange(topk, device="cuda") * gap + torch.randint(0, gap, (ranks, tokens, topk), device="cuda")
    arrays = {
        "logits": torch.randn(tokens, longest // ranks, device="cuda"), "topk_indices": local[1].int(),
        "values": torch.zeros(tokens, topk, device="cuda"),
        "out": torch.zeros(tokens, topk, device="cuda", dtype=torch.int32),
    }  # fmt: skip
    yield Case(
        f"globalize topk {tokens} x {topk}", cupy_mla.globalize_topk, arrays, {"world_size": ranks, "rank": 1},
        ("values", "out"), 4 * 4 * tokens * topk,
    )  # fmt: skip
    arrays = {
        "values": torch.randn(ranks, tokens, topk, device="cuda"),
        "positions": (local * ranks + torch.arange(ranks, device="cuda")[:, None, None]).int(),
        "out": torch.zeros(tokens, topk, device="cuda", dtype=torch.int32),
    }
    yield Case(
        f"merge topk {tokens} x {ranks} x {topk}", cupy_mla.merge_topk, arrays, {"k": topk}, ("out",),
        4 * tokens * topk * (2 * ranks + 1),
    )  # fmt: skip
    arrays = {
        "outs": normal(ranks, tokens, heads, 512), "lses": torch.randn(ranks, tokens, heads, device="cuda"),
        "out": torch.zeros(tokens, heads, 512, device="cuda", dtype=torch.bfloat16),
        "lse": torch.zeros(tokens, heads, device="cuda"),
    }  # fmt: skip
    yield Case(
        f"merge attention {tokens} x {ranks} h {heads}", cupy_mla.merge_attention, arrays, {}, ("out", "lse"),
        tokens * heads * (ranks + 1) * (1024 + 4),
    )  # fmt: skip


def quant_cases(tokens: int, heads: int) -> Iterator[Case]:
    yield Case(
        f"quantize tensor tokens {tokens} h {heads}", cupy_mla.dynamic_per_batched_tensor_quant,
        {"x": normal(tokens, heads, 576)}, {}, (), 3 * tokens * heads * 576,
    )  # fmt: skip


def call(case: Case) -> tuple[torch.Tensor, ...]:
    """Run a case once and return its outputs."""
    returned = case.operation(**case.arrays, **case.settings)
    return tuple(case.arrays[name] for name in case.outputs) if case.outputs else returned


def error_of(case: Case) -> float:
    host = case._replace(arrays={name: a.cpu() for name, a in case.arrays.items()})
    return max(largest_difference(a.cpu(), b) for a, b in zip(call(case), call(host), strict=True))


def beside_copy(cases: Sequence[Case]) -> list[float]:
    """Microseconds of an operation, each case an input set, and of copies of as many bytes."""
    return time_side_by_side([lambda c=c: call(c) for c in cases], [copy_of(case.moved) for case in cases])


def measure(record: Record, make: Callable[[], Iterator[Case]]) -> None:
    """All cases of a kind, each on its own input sets, beside the copies of as many bytes."""
    for cases in zip(*(make() for _ in range(SETS)), strict=True):
        if not record.wants(cases[0].name):
            continue
        error = error_of(cases[0])
        record.add(cases[0].name, *beside_copy(cases), error)


def main() -> None:
    options = Options.parse(__doc__)
    small = 8 if options.quick else 1
    record = Record("cache_ops", options)
    measure(record, lambda: pack_cases(262144 // small))
    measure(record, lambda: indexer_pack_cases(1048576 // small))
    measure(record, lambda: gather_cases(524288 // small, 24))
    measure(record, lambda: indexer_gather_cases(1048576 // small, 24))
    measure(record, lambda: v4_gather_cases(524288 // small, 4))
    measure(record, lambda: concat_cases(2048 // small, 128))
    measure(record, lambda: convert_cases(4096 // small, 2048))
    measure(record, lambda: v4_index_cases(4096 // small))
    measure(record, lambda: pool_cases(65536 // small))
    measure(record, lambda: rank_cases(512 // small, 128))
    measure(record, lambda: quant_cases(1024 // small, 128))
    print(record.write())


if __name__ == "__main__":
    main()
