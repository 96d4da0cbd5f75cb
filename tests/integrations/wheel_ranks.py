"""Two ranks that share rows (decode context parallelism), a process each, through DeepSeek-V3.2's layer of vLLM's wheel
on the CPU: `python -m torch.distributed.run --standalone --nproc-per-node=2 -m tests.integrations.wheel_ranks FOLDER
SEED`. Each compares its heads with float64 over all rows. Prints what was compared.

The layer, its indexer, builders, the merge of the ranks' parts and the collectives are the wheel's, as they are where
NCCL is too old for it; gloo moves the bytes. DeepGEMM, the kernels of top-k and the conversion of lists have stand-ins.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cupy_mla import convert_req_index_to_global_index, cp_gather_indexer_k_quant_cache, deep_gemm, topk_indices
from tests import indexers
from tests.backends.test_sparse_mla import assert_result
from tests.integrations import triton_stand_in
from tests.integrations.steps import ORDER, Caches
from tests.integrations.test_vllm import HOSTILE, as_torch
from tests.integrations.wheel_vllm import (
    BLOCK_SIZE,
    CPU,
    TIMES,
    K,
    batch_of,
    engine,
    impl_of,
    import_from,
    padded,
    without_gpu,
)
from tests.kinds import E4M3

HEADS, LAYER, KEYS = 8, "layer.attn", "layer.indexer.k_cache"  # heads of both ranks together


def group_of_ranks() -> Any:
    """vLLM's group and communicator over gloo, with the PyNccl that it has where it cannot load NCCL."""
    at = "vllm.distributed.device_communicators"
    communicators = importlib.import_module(f"{at}.cuda_communicator")
    pynccl = importlib.import_module(f"{at}.pynccl").PyNcclCommunicator
    groups = importlib.import_module("vllm.distributed.parallel_state").GroupCoordinator
    group, communicator, off = (of.__new__(of) for of in (groups, communicators.CudaCommunicator, pynccl))
    off.disabled = True
    vars(communicator).update(world_size=2, device_group=dist.group.WORLD, pynccl_comm=off)
    vars(group).update(
        world_size=2, rank_in_group=dist.get_rank(), use_custom_op_call=False, device_communicator=communicator,
        device_group=dist.group.WORLD, cpu_group=dist.group.WORLD, unique_name="dcp",
    )  # fmt: skip
    return group


def replace_kernels() -> None:
    """What runs on GPUs alone."""
    indexer = importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")
    metadata = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    ops = importlib.import_module("vllm._custom_ops")
    merging = importlib.import_module("vllm.v1.attention.ops.dcp")
    for module, kernels in (
        (metadata, metadata.BuildPrefillChunkMetadataKernel),
        (merging, merging.CorrectAttnCPOutKernel),
    ):
        triton_stand_in.install(module)
        kernels.kernel = triton_stand_in.Kernel(kernels.kernel)

    def gather(cache: Any, keys: Any, scales: Any, table: Any, starts: Any) -> None:
        cp_gather_indexer_k_quant_cache(cache, keys, scales.view(torch.float32)[:, 0], table, starts)

    def best(logits: Any, starts: Any, ends: Any, out: Any, rows: int, stride: int, column: int, k: int) -> None:
        topk_indices(logits, k, starts, ends, out=out)

    def best_of_decodes(logits: Any, lens: Any, next_n: int, out: Any, k: int, longest: int) -> None:
        assert next_n == lens.shape[1] == 1
        topk_indices(logits, k, None, lens[:, 0].contiguous(), out=out)

    def paged(*arguments: Any, max_model_len: int, indices: Any) -> Any:
        assert indices is None
        return deep_gemm.fp8_fp4_paged_mqa_logits(*arguments, max_model_len)

    def pack(tokens: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(lens), int(lens.max()), *tokens.shape[1:], dtype=tokens.dtype)
        for row, own in zip(out, tokens[: int(lens.sum())].split(lens.tolist()), strict=True):
            row[: len(own)] = own
        return out

    def unpack(rows: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        return torch.cat([row[:n] for row, n in zip(rows, lens.tolist(), strict=True)])

    vars(ops).update(cp_gather_indexer_k_quant_cache=gather, top_k_per_row_prefill=best)
    vars(indexer).update(
        fp8_fp4_mqa_logits=lambda *given: deep_gemm.fp8_fp4_mqa_logits(*given[:5], False, given[5]),
        fp8_fp4_paged_mqa_logits=paged, get_indexer_topk=lambda backend: best_of_decodes,
        pack_seq_triton=pack, unpack_seq_triton=unpack,
    )  # fmt: skip


def own(
    requests: torch.Tensor, table: torch.Tensor, chosen: torch.Tensor, *sizes: int, return_valid_counts: bool
) -> Any:
    """vLLM's Triton kernel: slots of a rank's rows in front, and how many."""
    ranks, rank, interleave, block_size, stride, width = sizes
    assert (ranks, rank, block_size, stride, width) == (2, dist.get_rank(), BLOCK_SIZE, BLOCK_SIZE, K)
    assert return_valid_counts
    mine = (chosen >= 0) & (chosen // interleave % ranks == rank)
    local = chosen // (ranks * interleave) * interleave + chosen % interleave
    local = local.where(mine, -1).sort(descending=True)[0].contiguous()
    return convert_req_index_to_global_index(requests, table, local, BLOCK_SIZE, return_valid_counts=True)


def own_rows(caches: Caches, layout: str, interleave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's caches of rows and keys; what it has no row for is hostile."""
    rank = dist.get_rank()
    whole, codes = as_torch(caches.rows[layout]), caches.codes
    rows, keys = torch.full_like(whole, 0x7F if whole.dtype == torch.uint8 else torch.nan), np.full_like(codes, 0x7F)
    flat = [each.reshape(-1, each.shape[-1]) for each in (whole, rows, codes, keys)]
    at = np.arange(caches.table.shape[1] * BLOCK_SIZE)
    at = at[at // interleave % 2 == rank]
    local = at // (2 * interleave) * interleave + at % interleave
    for blocks in caches.table:
        source, target = (blocks[each // BLOCK_SIZE] * BLOCK_SIZE + each % BLOCK_SIZE for each in (at, local))
        flat[1][target], flat[3][target] = flat[0][source], flat[2][source]
    return rows, as_torch(indexers.key_cache(keys, np.ones(keys.shape[:2], np.float32)))


def layer_of(config: Any, impl: Any, indexer: Any, rows: torch.Tensor, lists: torch.Tensor) -> Any:
    """DeepSeek-V3.2's attention layer behind its projections; the last one leaves the latents as they are."""
    layers = importlib.import_module("vllm.models.deepseek_v32.attention")
    manager = importlib.import_module("vllm.v1.attention.ops.dcp").MLADCPManager
    layer = layers.DeepseekV32Attention.__new__(layers.DeepseekV32Attention)
    torch.nn.Module.__init__(layer)
    vars(layer).update(
        impl=impl, kv_cache=rows, topk_indices_buffer=lists, skip_topk=False, use_pcp=False, hisparse_cache=None,
        pcp_shard_decode_requests=False, prefill_backend=None, layer_name=LAYER, num_local_heads=HEADS // 2,
        kv_lora_rank=512, v_head_dim=512, W_UV=torch.eye(512, dtype=torch.bfloat16).expand(HEADS // 2, -1, -1),
        _dense_mha_metadata_layer_name="", _fp8_query=False, _fp8_kv_needs_view=False, _vllm_config=config,
        dcp_manager=manager(
            vllm_config=config, device=CPU, num_heads=HEADS // 2, query_head_dim=576, output_head_dim=512,
            query_dtype=torch.bfloat16, output_dtype=torch.bfloat16, padded_num_heads=None,
            is_lse_base_on_e=impl.lse_base_on_e, use_pcp=False,
        ),
    )  # fmt: skip
    layer.indexer = indexer
    return layer


def indexer_of(lists: torch.Tensor, keys: torch.Tensor) -> Any:
    layers = importlib.import_module("vllm.models.deepseek_v32.attention")
    backend = importlib.import_module("vllm.v1.attention.backends.mla.indexer").DeepseekV32IndexerBackend
    indexer = layers.DeepseekV32Indexer.__new__(layers.DeepseekV32Indexer)
    torch.nn.Module.__init__(indexer)
    vars(indexer).update(
        topk_indices_buffer=lists, quant_block_size=128, scale_fmt="ue8m0", topk_tokens=K, head_dim=128,
        max_model_len=1024, max_total_seq_len=4096,
        k_cache=SimpleNamespace(prefix=KEYS, kv_cache=keys, get_attn_backend=lambda: backend),
        indexer_op=SimpleNamespace(
            use_pcp=False, dcp_world_size=2, use_fp4_cache=False, candidate_blocks=None, topk_backend="auto"
        ),
    )  # fmt: skip
    return indexer


def drive(rng: np.random.Generator, cache_type: str, layout: str, interleave: int) -> None:
    ours = importlib.import_module("cupy_mla.integrations.vllm.sparse_mla")
    context = vars(importlib.import_module("vllm.forward_context"))
    graphs = importlib.import_module("vllm.config").CUDAGraphMode
    utils = importlib.import_module("vllm.v1.attention.backends.utils")
    ours.triton_filter_and_convert_dcp_index = own
    rank, backend = dist.get_rank(), ours.CupyMLASparseBackend
    config = engine(
        HEADS // 2, cache_type, decode_context_parallel_size=2, tensor_parallel_size=2,
        cp_kv_cache_interleave_size=interleave, num_ubatches=0, dcp_comm_backend="ag_rs",
    )  # fmt: skip
    config.compilation_config.max_cudagraph_capture_size = 0
    caches = Caches(rng, BLOCK_SIZE, HEADS, K, TIMES)
    rows, keys = own_rows(caches, layout, interleave)
    lists = torch.full((64, K), HOSTILE, dtype=torch.int32)
    indexer = indexer_of(lists, keys)
    impl = impl_of(backend, HEADS // 2, cache_type, indexer=indexer, topk_indices_buffer=lists)
    layer = layer_of(config, impl, indexer, rows, lists)
    config.compilation_config.static_forward_context[LAYER] = layer
    spec = SimpleNamespace(block_size=BLOCK_SIZE, cache_dtype_str=cache_type, num_states=BLOCK_SIZE)
    builder = backend.get_builder_cls()(spec, [LAYER], config, CPU)
    key_builder = indexer.k_cache.get_attn_backend().get_builder_cls()(spec, [KEYS], config, CPU, block_table_width=64)
    mine = slice(rank * HEADS // 2, (rank + 1) * HEADS // 2)
    for name in ORDER:
        asked = caches.step(name)
        batch = batch_of(asked, as_torch(asked.table))
        batch.dcp_local_seq_lens = utils.get_dcp_local_seq_lens(batch.seq_lens, 2, rank, interleave)
        tokens = batch.num_actual_tokens
        context["_forward_context"] = SimpleNamespace(
            attn_metadata={KEYS: key_builder.build(0, batch), LAYER: builder.build(0, batch)},
            cudagraph_runtime_mode=graphs.NONE, no_compile_layers={LAYER: layer}, slot_mapping={},
        )  # fmt: skip
        lists.fill_(HOSTILE)
        lists[:tokens] = -1  # as the layer's fused kernel does
        q = padded(asked.q, tokens)[:, mine]
        out = torch.full((tokens, HEADS // 2 * 512), torch.nan, dtype=torch.bfloat16)
        layer._sparse_indexer_and_attn(
            None, torch.zeros(tokens, 4), None, None, padded(asked.index_q.view(E4M3), tokens), None,
            padded(asked.weights, tokens), None, None, q[..., :512], q[..., 512:], out,
        )  # fmt: skip
        assert torch.equal(lists[: len(asked.lists)].sort()[0], as_torch(asked.lists).sort()[0]), name
        assert (lists[tokens:] == HOSTILE).all()
        got = out.view(tokens, HEADS // 2, 512)[: len(asked.q)]
        assert_result(got.float().numpy(), asked.want[:, mine])
    print(f"rank {rank}: {len(ORDER)} steps over every other {interleave} rows, {cache_type}", flush=True)


def main(folder: str, seed: str) -> None:
    import_from(folder)
    dist.init_process_group("gloo")
    parallel = vars(importlib.import_module("vllm.distributed.parallel_state"))
    parallel["_DCP"] = parallel["_TP"] = group_of_ranks()
    without_gpu()
    replace_kernels()
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    os.environ["VLLM_STAND_INS"] = "1"
    importlib.import_module("vllm_stand_ins").register()
    rng = np.random.default_rng(int(seed))  # both ranks have the same steps
    for cache_type, layout in (("auto", "bf16"), ("fp8_ds_mla", "v32_fp8")):
        for interleave in (1, 4):
            drive(rng, cache_type, layout, interleave)


if __name__ == "__main__":
    main(*sys.argv[1:])
