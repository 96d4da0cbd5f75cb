"""Drives the plug-in with the Python classes of SGLang's wheel, on the CPU: `python -m tests.integrations.wheel_sglang
FOLDER SEED`, where FOLDER has the wheel's Python files. Prints what was compared.

The hooks, the backends, their metadata, the indexer and the pools are the wheel's. What is no Python of theirs has a
stand-in: packages that are not installed are empty, kernels of a step's path are torch or NumPy, others are empty.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from inspect import get_annotations
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests import oracle
from tests.backends.test_sparse_mla import SCALE, assert_result
from tests.integrations import wheel_sglang_v4
from tests.integrations.steps import INDEX_HEADS, Asked, Caches
from tests.integrations.test_vllm import as_torch
from tests.integrations.wheel_vllm import _EmptyModule, import_from
from tests.kinds import E4M3

LACKING = (
    "IPython", "aiohttp", "compressed_tensors", "deep_gemm", "einops", "flash_mla", "gguf", "msgspec", "openai",
    "orjson", "partial_json_parser", "psutil", "pybase64", "pynvml", "sentencepiece", "sgl_kernel", "starlette",
    "torchvision", "triton", "tvm_ffi", "zmq",
)  # fmt: skip
K, TIMES, PAGE, LAYER = 128, 20, 64, 0
ATTENTION = "sglang.srt.layers.attention"
# Steps as those of `steps.ORDER`, and how SGLang runs them: as a decode, as a prefill, and as the check of 3 drafts.
STEPS: dict[str, tuple[str, list[tuple[int, int, int]]]] = {
    "decodes": ("DECODE", [(0, 1, 30), (1, 1, 24), (2, 1, 29)]),
    "a prefill after decodes": ("EXTEND", [(3, 9, 26)]),
    "decodes after a prefill": ("DECODE", [(3, 1, 27), (0, 1, 31)]),
    "prefills with prefixes": ("EXTEND", [(3, 1, 28), (1, 2, 25), (2, 6, 31)]),
    "checked drafts": ("TARGET_VERIFY", [(0, 3, 32), (3, 3, 29)]),
    "short decodes": ("DECODE", [(4, 1, 0), (0, 1, 0)]),
    "prefills after short decodes": ("EXTEND", [(1, 7, 32), (2, 3, 5)]),
    "other requests' decodes": ("DECODE", [(4, 1, 23), (2, 1, 32)]),
}  # fmt: skip
DRAFTS = 3


class Struct:
    """msgspec's classes with fields."""

    def __init_subclass__(cls, kw_only: bool = False, frozen: bool = False, **_: Any) -> None:
        for name in get_annotations(cls):
            default = vars(cls).get(name)
            if isinstance(default, list | dict | set):
                setattr(cls, name, dataclasses.field(default_factory=type(default)))
        dataclasses.dataclass(kw_only=kw_only, unsafe_hash=frozen)(cls)
        cls.__struct_fields__ = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[attr-defined]


class Constant:
    """Triton's numbers that are known when a kernel is compiled."""

    def __init__(self, value: Any) -> None:
        self.value = value


class NoJit:
    """Finds nothing of SGLang's compiler of kernels, whose C++ sources are not among the Python files."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("sglang.kernels.jit") else None  # type: ignore

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def as_written(function: Any = None, **_: Any) -> Any:
    """In place of torch.compile."""
    return as_written if function is None else function


def without_packages(folder: str) -> None:
    """Let SGLang come from a folder, on a CPU that claims to be an H100."""
    structs, msgspec, dill = (_EmptyModule(name) for name in ("msgspec.structs", "msgspec", "dill"))
    vars(structs).update(
        fields=dataclasses.fields, replace=dataclasses.replace, asdict=dataclasses.asdict,
        force_setattr=object.__setattr__,
    )  # fmt: skip
    vars(msgspec).update(Struct=Struct, field=dataclasses.field, NODEFAULT=dataclasses.MISSING, structs=structs)
    vars(dill)["dumps"] = lambda _: b""
    sys.modules.update({"msgspec": msgspec, "msgspec.structs": structs, "dill": dill})
    for name in ("processing_auto", "image_processing_auto", "modeling_auto", "tokenization_auto"):
        importlib.import_module(f"transformers.models.auto.{name}")  # as long as torchvision is not found
    sys.meta_path.insert(0, NoJit())  # type: ignore[arg-type]
    import_from(folder, LACKING)
    vars(importlib.import_module("triton.language"))["constexpr"] = Constant
    torch.compile = as_written  # type: ignore[assignment]
    vars(torch.version)["cuda"] = "12.9"
    h100 = SimpleNamespace(name="NVIDIA H100", multi_processor_count=132, total_memory=80 << 30, major=9, minor=0)
    vars(torch.cuda).update(
        is_available=lambda: True, get_device_capability=lambda *_: (9, 0), device_count=lambda: 1,
        current_device=lambda: 0, get_device_properties=lambda *_: h100, mem_get_info=lambda *_: (40 << 30, 80 << 30),
    )  # fmt: skip


def hooked() -> None:
    """Register the plug-in's hooks, and let SGLang apply them."""
    from cupy_mla.integrations import sglang as plugin

    os.environ["CUPY_MLA_SGLANG"] = "override"
    plugin.register()
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    registry.apply_hooks()
    assert len(registry._hooks) == 6
    assert registry._patched == set(registry._hooks)
    print("6 hooks registered and applied")


def options(prefill: str, decode: str, drafts: int | None = DRAFTS) -> None:
    """SGLang's options, of which its classes read these."""
    context = importlib.import_module("sglang.srt.runtime_context")
    kernel = SimpleNamespace(
        dsa_prefill_backend=prefill, dsa_decode_backend=decode, dsa_triton_union=1, dsa_topk_backend="sgl-kernel",
        enable_deepseek_v4_fp4_indexer=False, dsv4_prefill_backend="auto",
    )  # fmt: skip
    context.get_context()._config_bags = {
        "exec": SimpleNamespace(
            kernel=kernel, deterministic=SimpleNamespace(enable_deterministic_inference=False),
            features=SimpleNamespace(enable_memory_saver=False, enable_decoder_swa_bounded_replay=False),
            overlap=SimpleNamespace(enable_two_batch_overlap=False),
        ),
        "spec": SimpleNamespace(speculative_eagle_topk=1, speculative_num_draft_tokens=drafts),
        "schedule": SimpleNamespace(mem_fraction_static=0.8, enable_mixed_chunk=False),
        "disagg": SimpleNamespace(disaggregation_mode="null"),
        "memory": SimpleNamespace(enable_hisparse=False),
    }  # fmt: skip


def gather(
    pool: Any, buf: torch.Tensor, page_indices: torch.Tensor, seq_len_tensor: torch.Tensor, seq_len_sum: int,
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """SGLang's Triton kernel that gathers keys and their scales."""
    assert (seq_len_sum, max_seq_len) == (int(seq_len_tensor.sum()), int(seq_len_tensor.max()))
    keys, scales = [], []
    for length, table in zip(seq_len_tensor.tolist(), page_indices, strict=True):
        pages = buf[table[: -(-length // PAGE)].long()]
        keys.append(pages[:, : PAGE * 128].reshape(-1, 128)[:length])
        scales.append(pages[:, PAGE * 128 :].reshape(-1, 4)[:length])
    return torch.cat(keys), torch.cat(scales)


def expand(extend_seq_lens: torch.Tensor, seq_lens: torch.Tensor, total_len: int, max_q_len: int) -> torch.Tensor:
    """SGLang's Triton kernel of the tokens that each token sees."""
    assert total_len == int(extend_seq_lens.sum())
    pairs = zip(extend_seq_lens.tolist(), seq_lens.tolist(), strict=True)
    return torch.cat([torch.arange(n - m + 1, n + 1) for m, n in pairs]).clamp(min=0).int()


def slots_of_lists(page_table: torch.Tensor, topk_indices: torch.Tensor, **_: Any) -> torch.Tensor:
    """SGLang's Triton kernel that takes positions to slots, by a row of slots for each token."""
    found = page_table.gather(1, topk_indices.clamp(min=0).long())
    return torch.where(topk_indices < 0, -1, found).int()


def slots_of_requests(
    page_table: torch.Tensor, topk_indices: torch.Tensor, extend_lens_cpu: list[int], page_table_is_expanded: bool,
    **_: Any,
) -> torch.Tensor:  # fmt: skip
    """The same by a row of slots for each request."""
    if not page_table_is_expanded:
        page_table = page_table.repeat_interleave(torch.tensor(extend_lens_cpu), 0)
    return slots_of_lists(page_table, topk_indices)


def dequantize(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """SGLang's Triton kernel that gathers V3.2's FP8 rows as bf16."""
    bytes_ = cache.view(torch.uint8).view(-1, 656)[slots.long()].contiguous()
    values = bytes_[:, :512].contiguous().view(torch.float8_e4m3fn).float().view(-1, 4, 128)
    values = values * bytes_[:, 512:528].contiguous().view(torch.float32)[..., None]
    return torch.cat([values.view(-1, 512).bfloat16(), bytes_[:, 528:].contiguous().view(torch.bfloat16)], -1)[:, None]


def without_kernels() -> None:
    """What stands in for kernels of a step."""
    ops = "sglang.kernels.ops"
    vars(importlib.import_module("deep_gemm"))["get_paged_mqa_logits_metadata"] = lambda *_: torch.zeros(133, 2)
    importlib.import_module(f"{ops}.kvcache.dsa_index_k_cache").GetKAndS.execute = staticmethod(gather)
    vars(importlib.import_module(f"{ops}.attention.dsv4.topk"))["plan_topk_v2"] = lambda lens: lens.new_zeros(len(lens))
    vars(importlib.import_module(f"{ops}.attention.flash_mla_interface"))["get_mla_metadata"] = lambda **_: (None, None)
    vars(importlib.import_module(f"{ATTENTION}.dsa_backend")).update(
        seqlens_expand_triton=expand, transform_index_page_table_decode=slots_of_lists,
        transform_index_page_table_prefill=slots_of_requests, dequantize_k_cache_paged_dsa=dequantize,
        concat_mla_absorb_q_general=lambda nope, rope: torch.cat([nope, rope], -1),
    )  # fmt: skip


def pool_of(caches: Caches, layout: str) -> Any:
    """SGLang's pool of a layer, with rows and keys in it. Its first page is not used."""
    pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    rows, width = {"bf16": ("bf16", 576), "v32_fp8": ("v32_fp8", 656), "v32_nope_fp8": ("v32_fp8", 528)}[layout]
    given = as_torch(caches.rows[rows])[..., :width].reshape(-1, 1, width)
    pool = pools.DSATokenToKVPool(
        size=len(given) - PAGE, page_size=PAGE, kv_lora_rank=512, qk_rope_head_dim=0 if width == 528 else 64,
        dtype=torch.bfloat16 if layout == "bf16" else torch.float8_e4m3fn, layer_num=1, device="cpu",
        index_head_dim=128, enable_memory_saver=False, kv_cache_dim=width,
    )  # fmt: skip
    assert pool.dsa_kv_cache_store_fp8 == (layout != "bf16")
    pool.kv_buffer[0].view(given.dtype).copy_(given)
    keys = as_torch(caches.keys)
    pool.index_key_cache.buffer[0].copy_(keys.view(len(keys), -1))
    return pool


def backend_of(caches: Caches, layout: str, heads: int) -> Any:
    """SGLang's attention backend, over requests' slots as in the caches' block table."""
    slots = torch.from_numpy(caches.table * PAGE)[..., None] + torch.arange(PAGE)
    rope = 0 if layout == "v32_nope_fp8" else 64
    pool = pool_of(caches, layout)
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=K), context_len=1024,
        num_attention_heads=heads, qk_nope_head_dim=128, qk_rope_head_dim=rope, kv_lora_rank=512,
    )  # fmt: skip
    runner = SimpleNamespace(
        device="cpu", page_size=PAGE, model_config=model, token_to_kv_pool=pool, is_draft_worker=False,
        req_to_token_pool=SimpleNamespace(req_to_token=slots.flatten(1).int(), size=8), hisparse_coordinator=None,
        kv_cache_dtype=pool.dtype, max_running_requests=8,
    )  # fmt: skip
    return importlib.import_module(f"{ATTENTION}.dsa_backend").DeepseekSparseAttnBackend(runner)


def batch_of(name: str, asked: Asked) -> SimpleNamespace:
    """SGLang's description of a step."""
    modes = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    mode, requests = STEPS[name]
    lens = torch.tensor(asked.seq_lens) - (DRAFTS if mode == "TARGET_VERIFY" else 0)
    of_extend: dict[str, Any] = {}
    if mode == "EXTEND":
        of_extend = {
            "extend_seq_lens": torch.tensor(asked.query_lens), "extend_seq_lens_cpu": asked.query_lens,
            "extend_prefix_lens_cpu": [n - m for m, n in zip(asked.query_lens, asked.seq_lens, strict=True)],
        }  # fmt: skip
    return SimpleNamespace(
        forward_mode=modes[mode], batch_size=len(lens), seq_lens=lens, seq_lens_cpu=lens, seq_lens_sum=int(lens.sum()),
        req_pool_indices=torch.tensor([request for request, _, _ in requests]), spec_info=None, attn_cp_metadata=None,
        global_num_tokens_cpu=None, extend_num_tokens=sum(asked.query_lens), get_max_chunk_capacity=lambda: 1 << 20,
        out_cache_loc=torch.zeros(len(asked.q), dtype=torch.int64), **of_extend,
    )  # fmt: skip


def indexer_of() -> Any:
    """SGLang's indexer of a layer, which has quantized its queries and written its keys."""
    made = importlib.import_module(f"{ATTENTION}.dsa.dsa_indexer").Indexer
    indexer = made.__new__(made)
    torch.nn.Module.__init__(indexer)
    vars(indexer).update(
        alt_stream=None, use_dsa_indexer_fusion=True, use_gfx950_fused_indexer=False, dsa_enable_prefill_cp=False,
        use_aiter_fused_fp8_writer=False, index_topk=K, n_heads=INDEX_HEADS, head_dim=128, num_init_tokens=0,
        num_local_tokens=0, layer_id=LAYER,
    )  # fmt: skip
    return indexer


def without_rope(caches: Caches, asked: Asked) -> np.ndarray:
    """Attention of the queries' first 512 values, float64 [T, h, 512]."""
    slots = asked.listed("slots", PAGE)
    pages = caches.rows["v32_fp8"][..., :528]
    rows = [oracle.named_rows(oracle.V32_NOPE, pages, each[each >= 0]) for each in slots]
    q = asked.q[..., :512].astype(np.float64)
    return np.stack([oracle.attend(each, of, SCALE, None)[0] for each, of in zip(q, rows, strict=True)])


def drive(rng: np.random.Generator, layout: str, heads: int, prefill: str, decode: str, fused: bool) -> None:
    """Steps of one layer and its indexer, in order, over the same caches."""
    context = importlib.import_module("sglang.srt.model_executor.forward_context")
    envs = importlib.import_module("sglang.srt.environ").envs
    envs.SGLANG_DSA_FUSE_TOPK.set(fused)
    envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD.set(0)
    options(prefill, decode)
    caches = Caches(rng, PAGE, heads, K, TIMES)
    backend, indexer, d = backend_of(caches, layout, heads), indexer_of(), 512 if layout == "v32_nope_fp8" else 576
    context.set_forward_context(context.ForwardContext(backend))
    layer = SimpleNamespace(
        is_cross_attention=False, layer_id=LAYER, tp_q_head_num=heads, v_head_dim=512, head_dim=d, scaling=SCALE
    )
    buffer = torch.empty(64, K, dtype=torch.int32)  # of a graph's prefills
    for name, (mode, requests) in STEPS.items():
        asked = caches.of(requests)
        batch, tokens = batch_of(name, asked), len(asked.q)
        padding = 2 if mode == "DECODE" and fused else 0  # which SGLang's conversion of positions does not take
        q8 = torch.zeros(tokens + padding, INDEX_HEADS, 128, dtype=torch.float8_e4m3fn)
        q8[:tokens] = as_torch(asked.index_q.view(E4M3))
        weights = torch.full((tokens + padding, INDEX_HEADS, 1), torch.nan)
        weights[:tokens, :, 0] = as_torch(asked.weights)
        vars(indexer)["_fused_q_prepare_and_store"] = lambda *_, made=(q8, weights): made
        backend.init_forward_metadata(batch)
        x = torch.zeros(len(q8), 4)
        lists = indexer.forward_cuda(x, x, torch.zeros(len(q8)), batch, LAYER)
        gathered = mode == "EXTEND" and layout == "v32_fp8" and prefill == "flashmla_sparse"
        want = asked.listed("positions" if not fused else "gathered" if gathered else "slots", PAGE)
        np.testing.assert_array_equal(lists[:tokens].numpy(), want)
        assert (lists[tokens:] == -1).all()
        if mode == "EXTEND":
            buffer.fill_(-1)
            metadata = backend.get_indexer_metadata(LAYER, batch)
            found = indexer._get_topk_ragged(False, batch, LAYER, q8, weights, metadata, buffer)
            assert found is buffer
            assert torch.equal(buffer[:tokens], lists)
            assert (buffer[tokens:] == -1).all()
        q = torch.zeros(tokens + padding, heads, d, dtype=torch.bfloat16)
        q[:tokens] = as_torch(asked.q)[..., :d]
        attend = backend.forward_decode if mode == "DECODE" else backend.forward_extend
        got = attend(q.flatten(1), None, None, layer, batch, save_kv_cache=False, topk_indices=lists)
        want = without_rope(caches, asked) if d == 512 else asked.want
        assert_result(got.view(-1, heads, 512)[:tokens].float().numpy(), want)
        assert (got.view(-1, heads, 512)[tokens:] == 0).all()
    forms = "slots" if fused else "positions"
    print(f"{len(STEPS)} steps of a layer and its indexer: {layout}, {heads} heads, {prefill}, {decode}, {forms}")


def fused_metadata(
    seq_lens: torch.Tensor, req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, cache_seqlens: torch.Tensor,
    page_table_1: torch.Tensor | None, dsa_cache_seqlens: torch.Tensor, real_page_table: torch.Tensor, **_: Any,
) -> None:  # fmt: skip
    """SGLang's Triton kernel that writes what decodes of a graph read. Entries behind a request's tokens stay."""
    cache_seqlens.copy_(seq_lens)
    dsa_cache_seqlens.copy_(seq_lens.clamp(max=K))
    for r, (request, n) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        real_page_table[r, : -(-n // PAGE)] = req_to_token[request, :n:PAGE] // PAGE
        if page_table_1 is not None:
            page_table_1[r, :n] = req_to_token[request, :n]


def replays(rng: np.random.Generator, drafts: int | None) -> None:
    """Decodes with the metadata of a graph, which is captured with contexts of one token and replayed with longer and
    shorter ones. Without drafts SGLang keeps no table of slots."""
    context = importlib.import_module("sglang.srt.model_executor.forward_context")
    importlib.import_module("sglang.srt.environ").envs.SGLANG_DSA_FUSE_TOPK.set(True)
    options("flashmla_sparse", "flashmla_sparse", drafts)
    caches, heads = Caches(rng, PAGE, 8, K, TIMES), 8
    backend, indexer = backend_of(caches, "bf16", heads), indexer_of()
    backend._fused_decode_metadata = fused_metadata
    context.set_forward_context(context.ForwardContext(backend))
    backend.init_cuda_graph_state(4, 12)
    assert backend.dsa_drop_wide_page_table == (drafts is None)
    layer = SimpleNamespace(
        is_cross_attention=False, layer_id=LAYER, tp_q_head_num=heads, v_head_dim=512, head_dim=576, scaling=SCALE
    )
    steps = "decodes after a prefill", "other requests' decodes", "short decodes", "decodes after a prefill"
    addresses = set()
    for number, name in enumerate(steps):
        asked = caches.of(STEPS[name][1])
        batch = batch_of(name, asked)
        if number == 0:
            lens, batch.seq_lens = batch.seq_lens, torch.ones_like(batch.seq_lens)
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            batch.seq_lens = lens
        backend.init_forward_metadata_out_graph(batch)
        metadata = backend.get_indexer_metadata(LAYER, batch)
        addresses.add((metadata.get_page_table_64().data_ptr(), metadata.get_seqlens_expanded().data_ptr()))
        weights = as_torch(asked.weights)[..., None]
        lists = indexer._get_topk_paged(batch, LAYER, as_torch(asked.index_q.view(E4M3)), weights, metadata)
        np.testing.assert_array_equal(lists.numpy(), asked.listed("slots", PAGE))
        q = as_torch(asked.q).flatten(1)
        got = backend.forward_decode(q, None, None, layer, batch, save_kv_cache=False, topk_indices=lists)
        assert_result(got.float().numpy(), asked.want)
    assert len(addresses) == 1
    print(f"{len(steps)} steps with a graph's metadata, drafts: {drafts}")


def main(folder: str, seed: str) -> None:
    without_packages(folder)
    hooked()
    without_kernels()
    rng = np.random.default_rng(int(seed))
    parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    parallel._stamp.update(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0, attn_cp_size=1)
    drive(rng, "bf16", 8, "flashmla_sparse", "flashmla_sparse", True)
    drive(rng, "bf16", 8, "flashmla_sparse", "flashmla_kv", False)
    drive(rng, "v32_fp8", 8, "flashmla_kv", "flashmla_kv", True)
    drive(rng, "v32_fp8", 64, "flashmla_sparse", "flashmla_kv", True)
    drive(rng, "v32_fp8", 8, "flashmla_sparse", "flashmla_kv", False)
    drive(rng, "v32_nope_fp8", 8, "flashmla_kv", "flashmla_kv", True)
    replays(rng, None)
    replays(rng, DRAFTS)
    options("flashmla_kv", "flashmla_kv")
    wheel_sglang_v4.drive(rng)


if __name__ == "__main__":
    main(*sys.argv[1:])
