"""Drives the plug-in with the Python classes of vLLM's wheel, on the CPU: `python -m tests.integrations.wheel_vllm
FOLDER SEED`, where FOLDER has the wheel's Python files. Prints what was compared.

vLLM's builders, impl bases and indexer metadata are the wheel's. What is no Python of theirs has a stand-in: packages
that are not installed are empty, Triton kernels are NumPy or run on a Triton of torch's tensors, one process is every
group of ranks.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from importlib.machinery import ModuleSpec
from inspect import signature
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from cupy_mla import convert_req_index_to_global_index
from tests.backends.test_sparse_mla import SCALE, assert_result
from tests.integrations import triton_stand_in, wheel_v4, wheel_v41
from tests.integrations.steps import ORDER, Asked, Caches
from tests.integrations.test_vllm import HOSTILE, as_torch
from tests.kinds import E4M3

BLOCK_SIZE, K, TIMES = 64, 128, 20  # vLLM's index conversion takes multiples of 128 entries
LACKING = (
    "PIL", "aiohttp", "cachetools", "cbor2", "cloudpickle", "cpuinfo", "einops", "fastapi", "gguf", "llguidance",
    "msgspec", "openai", "openai_harmony", "partial_json_parser", "prometheus_client", "psutil", "pybase64", "uvloop",
    "xgrammar", "zmq",
)  # fmt: skip
CPU = torch.device("cpu")


class _Empty(type):
    """Classes of which every attribute is another. They can be called, subclassed, decorate and stand in unions."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name)

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


def _schema(cls: type, source: Any, handler: Any) -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


def _empty(name: str) -> Any:
    parts: dict[str, Any] = {
        "__init__": lambda self, *args, **kwargs: None,
        "__call__": lambda self, function=None, *args, **kwargs: function,
        "__init_subclass__": classmethod(lambda cls, **kwargs: None),
        "__get_pydantic_core_schema__": classmethod(_schema),
    }
    return _Empty(name, (), parts)


class _EmptyModule(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name)


class _Lacking:
    """Finds packages that are not installed, after all other finders."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._names else None  # type: ignore

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def engine(heads: int, cache_type: str, **parallel: int) -> SimpleNamespace:
    """What vLLM's classes read of a configuration, which becomes the current one."""
    text = SimpleNamespace(
        index_topk=K, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=None
    )
    model = SimpleNamespace(
        hf_text_config=text, hf_config=text, max_model_len=1024, dtype=torch.bfloat16,
        get_num_attention_heads=lambda parallel: heads,
        model_arch_config=SimpleNamespace(total_num_attention_heads=heads),
    )  # fmt: skip
    ranks = {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 1, "cp_kv_cache_interleave_size": 1}
    made = SimpleNamespace(
        model_config=model, scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
        parallel_config=SimpleNamespace(**{"tensor_parallel_size": 1, **ranks, **parallel}),
        cache_config=SimpleNamespace(block_size=BLOCK_SIZE, cache_dtype=cache_type), speculative_config=None,
        attention_config=SimpleNamespace(
            hisparse_config=None, sparse_mla_force_mqa=False, use_fp4_indexer_cache=False,
            sparse_mla_prefill_workspace_factor=4, resolve_indexer_kv_dtype=lambda default: default,
        ),
        num_speculative_tokens=0,
        compilation_config=SimpleNamespace(
            splitting_ops=[], cudagraph_mode=None, custom_ops=["none"], disabled_custom_ops=Counter(),
            static_forward_context={"layer": SimpleNamespace(prefill_backend=None)},
        ),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
    )  # fmt: skip
    vars(importlib.import_module("vllm.config.vllm"))["_current_vllm_config"] = made
    return made


def batch_of(asked: Asked, table: torch.Tensor) -> Any:
    """vLLM's description of a step."""
    metadata = importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata
    starts, lens = as_torch(asked.starts), torch.tensor(asked.seq_lens, dtype=torch.int32)
    tokens = max(int(starts[-1]), len(lens)) if max(asked.query_lens) == 1 else int(starts[-1])
    return metadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=len(lens),
        num_actual_tokens=tokens, max_query_len=max(asked.query_lens), max_seq_len=max(asked.seq_lens),
        block_table_tensor=table, slot_mapping=torch.zeros(tokens, dtype=torch.int64), seq_lens_cpu_upper_bound=lens,
    )  # fmt: skip


def padded(array: np.ndarray, tokens: int) -> torch.Tensor:
    """Zeros behind an array's tokens."""
    given = as_torch(array)
    whole = torch.zeros(tokens, *given.shape[1:], dtype=given.dtype)
    whole[: len(given)] = given
    return whole


def impl_of(backend: Any, heads: int, cache_type: str, **more: Any) -> Any:
    return backend.get_impl_cls()(
        num_heads=heads, head_size=576, scale=SCALE, num_kv_heads=1, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype=cache_type, logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None,
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, qk_head_dim=192, v_head_dim=128,
        kv_b_proj=None, **more,
    )  # fmt: skip


def convert(
    requests: torch.Tensor, table: torch.Tensor, lists: torch.Tensor, *, BLOCK_SIZE: int,
    BLOCK_STRIDE_ROWS: int | None = None, NUM_TOPK_TOKENS: int, return_valid_counts: bool, out: Any = None,
    valid_counts_out: Any = None, idx_mapping: Any = None,
) -> Any:  # fmt: skip
    """vLLM's Triton kernel of index conversion, for blocks without gaps."""
    assert BLOCK_STRIDE_ROWS in (None, BLOCK_SIZE)
    assert return_valid_counts
    found = convert_req_index_to_global_index(requests, table, lists, BLOCK_SIZE, return_valid_counts=True)
    for made, given in zip(found, (out, valid_counts_out), strict=True):
        if given is not None:
            given.copy_(made)
    return found


def request_of_token(starts: torch.Tensor, buffer: torch.Tensor, mapped: int, tokens: int) -> torch.Tensor:
    """vLLM's Triton kernel of that name."""
    found = torch.bucketize(torch.arange(tokens), starts[1:], right=True)
    buffer[:tokens] = found.clamp(max=len(starts) - 2)
    return buffer[:tokens]


class NoStream:
    """The CPU's stream and events: all is done in order."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


def without_gpu() -> None:
    """What vLLM's builders and impl bases ask a GPU for."""
    at = "vllm.v1.attention.backends.mla"
    stock, groups, keys = (
        importlib.import_module(f"{at}.{name}") for name in ("flashmla_sparse", "index_group", "indexer")
    )
    vars(importlib.import_module("vllm.v1.attention.ops.metadata"))["compute_token_to_req_indices"] = request_of_token
    for name in ("_create_side_stream", "_create_event", "current_stream"):
        vars(groups)[name] = lambda *_: NoStream()
    for module in (importlib.import_module("vllm.model_executor.layers.attention.sparse_mla_attention"), keys):
        module.PIN_MEMORY = False
    for module in (stock, keys):
        module.num_compute_units = lambda device: 132
    importlib.import_module("vllm.v1.worker.workspace").init_workspace_manager(CPU)


def key_ranges(
    starts: torch.Tensor, lens: torch.Tensor, key_starts: torch.Tensor, row_starts: torch.Tensor,
    requests: torch.Tensor, first: torch.Tensor, end: torch.Tensor, begin: int, stop: int, rank: int, ranks: int,
    interleave: int, *, num_reqs: int, COMPRESS_RATIO: int,
) -> None:  # fmt: skip
    """vLLM's Triton kernel of prefills' chunks, of one rank: which gathered keys each query token sees."""
    assert (rank, ranks, num_reqs) == (0, 1, len(lens))
    for r, (query, key) in enumerate(zip(starts[:-1].tolist(), key_starts[:-1].tolist(), strict=True)):
        requests[key : int(key_starts[r + 1])] = r
        for t in range(max(query, begin), min(int(starts[r + 1]), stop)):
            seen = int(lens[r]) - int(starts[r + 1]) + t + 1
            first[t - begin], end[t - begin] = key, key + seen // COMPRESS_RATIO


def indexer_of(lists: torch.Tensor, keys: torch.Tensor) -> Any:
    """A layer's indexer, with what the adapter reads of it."""
    layers = importlib.import_module("vllm.models.deepseek_v32.attention")
    indexer = layers.DeepseekV32Indexer.__new__(layers.DeepseekV32Indexer)
    torch.nn.Module.__init__(indexer)
    indexer.topk_indices_buffer = lists
    indexer.k_cache = SimpleNamespace(prefix="layer.indexer.k_cache", kv_cache=keys)
    indexer.indexer_op = SimpleNamespace(
        use_pcp=False, dcp_world_size=1, use_fp4_cache=False, candidate_blocks=None, topk_tokens=K
    )
    return indexer


def choose(indexer: Any, q8: torch.Tensor, weights: torch.Tensor, lists: torch.Tensor, **more: Any) -> None:
    """The call of DeepSeek-V3.2's layers, by the name in their module."""
    layers = importlib.import_module("vllm.models.deepseek_v32.attention")
    layers.sparse_attn_indexer(
        torch.zeros(len(q8), 4), indexer.k_cache.prefix, indexer.k_cache.kv_cache, q8, None, None, weights, 128,
        "ue8m0", K, 128, 1024, 4096, lists, skip_k_cache_insert=True, use_pcp=False, pcp_shard_decode_requests=False,
        **more,
    )  # fmt: skip


def names() -> None:
    """What vLLM's own registry has under the names that each mode registers, twice."""
    from cupy_mla.integrations import vllm as plugin

    for mode, known in (("custom", ("CUSTOM", "CUPY_MLA")), ("override", ("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"))):
        os.environ["CUPY_MLA_VLLM"] = mode
        engine(8, "auto").model_config.hf_text_config.index_topk = K
        plugin.register()
        plugin.register()
        registry = importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum
        found = {registry[name].get_class().__name__ for name in known}
        assert found == {"CupyMLASparseBackend"}, found
        models = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry.models
        ours = {name for name, model in models.items() if "cupy_mla" in getattr(model, "module_name", "")}
        assert ours == ({"DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"} if mode == "override" else set()), ours
        print(f"registered by CUPY_MLA_VLLM={mode}")


def drive(rng: np.random.Generator) -> None:
    ours = importlib.import_module("cupy_mla.integrations.vllm.sparse_mla")
    stock = importlib.import_module("vllm.v1.attention.backends.mla.flashmla_sparse")
    groups = importlib.import_module("vllm.v1.attention.backends.mla.index_group")
    keys_of = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    without_gpu()
    for module in (ours.common, groups):
        vars(module)["triton_convert_req_index_to_global_index"] = convert
    keys_of._BUILD_PREFILL_CHUNK_METADATA_KERNEL = key_ranges
    context = vars(importlib.import_module("vllm.forward_context"))
    graphs = importlib.import_module("vllm.config").CUDAGraphMode
    spec = SimpleNamespace(block_size=BLOCK_SIZE, cache_dtype_str=None)
    backend = ours.CupyMLASparseBackend
    names()
    for heads in (8, 16, 32, 64, 128):
        config = engine(heads, "auto")
        built = [
            made(spec, ["layer"], config, CPU).reorder_batch_threshold
            for made in (backend.get_builder_cls(), stock.FlashMLASparseMetadataBuilder)
        ]
        assert built[0] == built[1], (heads, built)
    print("as many query tokens of a decode as vLLM's own builder has")
    refusals(backend)
    for cache_type, layout, heads in (("auto", "bf16", 8), ("fp8_ds_mla", "v32_fp8", 8), ("fp8_ds_mla", "v32_fp8", 64)):
        config, lists = engine(heads, cache_type), torch.full((64, K), HOSTILE, dtype=torch.int32)
        spec.cache_dtype_str = cache_type
        builder = backend.get_builder_cls()(spec, ["layer"], config, CPU)
        # A layer with an indexer, and one that takes its choice.
        group = groups.SparseMLAIndexGroupBuilder(lists)
        caches = Caches(rng, BLOCK_SIZE, heads, K, TIMES)
        indexer = indexer_of(lists, as_torch(caches.keys))
        layers = [
            impl_of(backend, heads, cache_type, indexer=indexer, topk_indices_buffer=lists, index_group_builder=group)
            for indexer in (indexer, None)
        ]
        cache = indexer.k_cache
        key_builder = cache.get_attn_backend().get_builder_cls()(
            spec, [cache.prefix], config, CPU, block_table_width=64
        )
        for each in layers:
            each.process_weights_after_loading(torch.bfloat16)
        rows = as_torch(caches.rows[layout])
        for name in ORDER:
            asked = caches.step(name)
            batch = batch_of(asked, as_torch(asked.table))
            tokens = batch.num_actual_tokens
            metadata = builder.build(0, batch)
            context["_forward_context"] = SimpleNamespace(
                attn_metadata={cache.prefix: key_builder.build(0, batch), "layer.attn": metadata},
                cudagraph_runtime_mode=graphs.NONE,
            )
            lists.fill_(HOSTILE)
            lists[:tokens] = -1  # as the layer's fused kernel does
            choose(
                indexer, padded(asked.index_q.view(E4M3), tokens), padded(asked.weights, tokens), lists,
                dense_mha_metadata_layer_name="layer.attn",
            )  # fmt: skip
            dense = ours.short.dense_decodes_of(metadata) is not None
            assert dense == (name == "short decodes")
            assert dense or torch.equal(lists[: len(asked.lists)], as_torch(asked.lists))
            assert (lists[tokens:] == HOSTILE).all()
            q = padded(asked.q, tokens)
            for each in layers:
                each.record_logical_topk_ready()
                each.prepare_for_batch(metadata)
                got, lse = each.forward_mqa((q[..., :512], q[..., 512:].clone()), rows, metadata, None)
                assert lse is None
                assert_result(got[: len(asked.q)].float().numpy(), asked.want)
        print(f"{len(ORDER)} steps of two layers and their indexer, {cache_type}, {heads} heads")
    for cache_type, layout in (("auto", "bf16"), ("fp8_ds_mla", "v32_fp8")):
        parts_of_ranks(rng, ours, spec, cache_type, layout)


def parts_of_ranks(rng: np.random.Generator, ours: ModuleType, spec: Any, cache_type: str, layout: str) -> None:
    """Two ranks that have every second row each: their parts, merged as vLLM does it."""
    backend, lists = ours.CupyMLASparseBackend, torch.full((64, K), -1, dtype=torch.int32)
    config = engine(8, cache_type)
    builder = backend.get_builder_cls()(spec, ["layer"], config, CPU)
    config.parallel_config.decode_context_parallel_size = 2
    assert backend.supports_dcp()
    groups, layers = vars(importlib.import_module("vllm.distributed.parallel_state")), []
    for rank in range(2):
        groups["_DCP"] = SimpleNamespace(world_size=2, rank_in_group=rank)
        layers.append(impl_of(backend, 8, cache_type, topk_indices_buffer=lists))
    groups["_DCP"] = None

    def own(requests: torch.Tensor, table: torch.Tensor, chosen: torch.Tensor, *sizes: int, **more: Any) -> Any:
        """vLLM's Triton kernel; each rank keeps its rows where one rank alone has all."""
        ranks, rank, interleave, block_size, stride, width = sizes
        assert (ranks, interleave, block_size, stride, width) == (2, 1, BLOCK_SIZE, BLOCK_SIZE, K)
        mine = torch.where(chosen % ranks == rank, chosen, -1)
        mine = mine.sort(descending=True)[0].contiguous()
        return convert_req_index_to_global_index(requests, table, mine, BLOCK_SIZE, return_valid_counts=True)

    vars(ours)["triton_filter_and_convert_dcp_index"] = own
    caches = Caches(rng, BLOCK_SIZE, 8, K, TIMES)
    rows = as_torch(caches.rows[layout])
    for name in ("decodes", "both", "a prefill after decodes"):
        asked = caches.step(name)
        metadata = builder.build(0, batch_of(asked, as_torch(asked.table)))
        lists[: len(asked.lists)] = as_torch(asked.lists)
        parts = [each.forward_mqa(as_torch(asked.q), rows, metadata, None) for each in layers]
        outs, lses = zip(*((out.double(), lse.double()) for out, lse in parts), strict=True)
        whole = torch.logaddexp(*lses)
        merged = sum((lse - whole).exp()[..., None] * out for out, lse in zip(outs, lses, strict=True))
        assert_result(merged.numpy(), asked.want)
    print(f"two ranks that share rows, {cache_type}")


def refusals(backend: Any) -> None:
    """What vLLM's own check of a backend says of ours."""
    gpu = importlib.import_module("vllm.platforms.interface").DeviceCapability

    def reasons(capability: tuple[int, int] = (9, 0), head_size: int = 576, **more: bool) -> list[str]:
        found: list[str] = backend.validate_configuration(
            head_size=head_size, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=BLOCK_SIZE, use_mla=True,
            has_sink=False, use_sparse=True, use_mm_prefix=False, use_per_head_quant_scales=False,
            device_capability=gpu(*capability), attn_type="decoder", **more,
        )  # fmt: skip
        return found

    config = engine(8, "auto")
    assert reasons() == reasons(use_pcp=True) == reasons(use_dcp=True) == []
    assert len(reasons(use_pcp=True, use_dcp=True)) == 1
    assert reasons((8, 0)) == reasons((8, 9)) == []
    assert "DeepGEMM" in reasons((8, 9), 512)[0]
    config.model_config.hf_text_config.qk_rope_head_dim = 0
    assert reasons((10, 0), 512) == reasons((9, 0), 512) == []
    print("vLLM's own check of a backend")


def fused_kernels(rng: np.random.Generator) -> None:
    """The kernels of norms, RoPE, quantization and cache writes, and ours, which stand in for them below 8.9: bytes."""
    kernels = importlib.import_module("vllm.models.deepseek_v32.common.kernels")
    ours = importlib.import_module("cupy_mla.integrations.vllm.fused")
    triton_stand_in.install(kernels, "_fused_norm_rope_kernel", "_fused_q_kernel")
    kernels.current_platform = SimpleNamespace(is_cuda=lambda: False, is_arch_support_pdl=lambda: False)

    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.tensor(rng.standard_normal(shape), dtype=dtype)

    def same(made: list[Any], wanted: list[Any]) -> None:
        """But for one number in 4,000, where the order of a float32 sum may decide."""
        for got, want in zip(made, wanted, strict=True):
            assert got.dtype == want.dtype
            differ = (got.contiguous().view(torch.uint8) != want.contiguous().view(torch.uint8)).sum()
            assert differ <= got.numel() // 4000, (differ, got.shape)

    tokens, positions = 19, torch.tensor(rng.integers(0, 99, 19))
    for fp8, interleaved, indexer, bf16_angles in product((False, True), repeat=4):
        angles = of(99, 64, dtype=torch.bfloat16 if bf16_angles else torch.float32)
        parts = of(tokens, 1536 + 512 + 64 + 128 + 64).split([1536, 512, 64, 128, 64], -1)
        weights = of(1536), of(512), of(128, dtype=torch.float32), of(128, dtype=torch.float32)
        slots = torch.tensor(rng.permutation(4 * BLOCK_SIZE)[: tokens + 2])
        slots[:tokens][rng.random(tokens) < 0.3] = -1
        width = 656 if fp8 else 1152
        bytes_of = [torch.tensor(rng.integers(0, 256, (4, BLOCK_SIZE, n), dtype=np.uint8)) for n in (width, 132)]
        results = []
        for module in (ours, kernels):
            latent, keys = (each.clone() for each in bytes_of)
            outs = [torch.zeros(tokens, n, dtype=torch.bfloat16) for n in (512, 64)]
            lists = torch.full((tokens + 1, K), HOSTILE, dtype=torch.int32)
            query = module.fused_norm_rope(
                positions, parts[0], weights[0], 1e-6, parts[1], weights[1], 1e-6, parts[2], angles,
                parts[3] if indexer else None, *(weights[2:] if indexer else (None, None)), 1e-6,
                angles if indexer else None, lists, slot_mapping=slots, indexer_slot_mapping=slots if indexer else None,
                indexer_k_cache=keys if indexer else None, indexer_cache_shuffled=False,
                mla_kv_cache=latent if fp8 else latent.view(torch.bfloat16),
                mla_kv_cache_dtype="fp8_ds_mla" if fp8 else "auto", mla_k_scale=torch.ones(1),
                has_indexer=indexer, index_rope_interleave=interleaved, kv_c_out=outs[0], k_pe_out=outs[1],
                index_k_out=None,
            )  # fmt: skip
            results.append([query, latent, keys, *outs, lists])
        same(*results)
        q, index_q = of(tokens, 3, 192), of(tokens, 8, 128)
        made, wanted = (
            module.fused_q(
                positions, q[..., 128:], angles, index_q if indexer else None, angles if indexer else None,
                q[..., :128], torch.ones(1), parts[4][:, :8] if indexer else None, 0.3, 0.7, has_indexer=indexer,
                index_rope_interleave=interleaved, quantize_mqa=False,
            )
            for module in (ours, kernels)
        )  # fmt: skip
        same([*made][0 if indexer else 2 :], [*wanted][0 if indexer else 2 :])
    print("bytes of the fused kernels below 8.9")


def stand_ins(rng: np.random.Generator) -> None:
    """What the engine benchmark puts in the place of TileLang's and CuTe DSL's kernels takes what those take."""
    mhc = importlib.import_module("vllm.model_executor.kernels.mhc.tilelang")
    indexer = importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")
    compressor = importlib.import_module("vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache")
    names = ("mhc_pre", "mhc_pre_broadcast", "mhc_fused_post_pre", "mhc_post", "hc_head_fused_kernel")
    stock = {name: signature(vars(mhc)[f"{name}_tilelang"]).parameters.values() for name in names}
    merge = signature(indexer._merge_dcp_topk_global)
    triton = [*signature(compressor.compress_norm_rope_store_triton).parameters]
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    ours = importlib.import_module("vllm_stand_ins")
    os.environ["VLLM_STAND_INS"] = "1"
    ours.register()
    for name, parameters in stock.items():
        given = [each.name for each in parameters if each.default is each.empty]
        more = {each.name: each.default for each in parameters if each.default is not each.empty}
        replaced = vars(mhc)[f"{name}_tilelang"]
        assert replaced.__module__ in ("vllm_stand_ins", "vllm.model_executor.kernels.mhc.torch")
        signature(replaced).bind(*given, **more)
    assert [*signature(indexer._merge_dcp_topk_global).parameters] == [*merge.parameters]
    flags = {"store_full_kv": False, "store_full_fp8": False, "fp8_scale": None}
    taken: dict[str, Any] = {}
    vars(compressor)["compress_norm_rope_store_triton"] = lambda **step: taken.update(step)
    at = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"
    importlib.import_module(at)._SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL(**dict.fromkeys(triton), **flags)
    assert [*taken] == triton

    def of(*shape: int) -> torch.Tensor:
        return torch.tensor(rng.standard_normal(shape), dtype=torch.float32)

    x, weight = of(5, 64).bfloat16(), torch.ones(64, dtype=torch.bfloat16)
    numbers, norm = (of(24, 256) / 16, of(3), of(24), 1e-6, 1e-6, 1e-6, 2.0, 2), {"norm_weight": weight}
    streams, post, comb, out = mhc.mhc_pre_broadcast_tilelang(x, *numbers, **norm, fn_broadcast=None)
    assert torch.equal(streams, torch.stack([x] * 4, 1))
    assert abs(float(out.float().square().mean()) - 1) < 0.01
    found = mhc.mhc_fused_post_pre_tilelang(out, streams, post, comb, *numbers, n_splits=1, tile_n=1, **norm)
    assert [each.shape for each in found] == [(5, 4, 64), (5, 4, 1), (5, 4, 4), (5, 64)]
    assert torch.equal(found[0], mhc.mhc_post_tilelang(out, streams, post, comb))
    assert [each.dtype for each in found] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    print("what stands in for TileLang and CuTe DSL")


def import_from(folder: str, lacking: tuple[str, ...] = LACKING) -> None:
    """Let an engine come from a folder, where packages that it imports may lack."""
    sys.path.insert(0, folder)
    sys.meta_path.append(_Lacking(lacking))  # type: ignore[arg-type]
    torch.accelerator.empty_cache = lambda: None  # which needs a GPU


def main(folder: str, seed: str) -> None:
    import_from(folder)
    parallel = importlib.import_module("vllm.distributed.parallel_state")
    vars(parallel)["_TP"] = SimpleNamespace(world_size=1, rank_in_group=0)
    rng = np.random.default_rng(int(seed))
    drive(rng)
    fused_kernels(rng)
    stand_ins(rng)
    wheel_v4.drive(rng, engine)
    wheel_v41.drive(rng, engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
