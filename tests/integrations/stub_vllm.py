"""Stand-ins for the parts of vLLM 0.22 that our plug-in builds on: a package on disk with the same names.

They do as little as the plug-in needs: build metadata of one batch, reserve buffers, and note what they are told.
`tests/integrations/test_engine_contracts.py` holds the real package to the same names and parameters.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from textwrap import dedent
from types import ModuleType, SimpleNamespace
from typing import Any

# What dense MLA backends share, which is the same in 0.22 and 0.33.
DENSE_MLA = """
        from dataclasses import dataclass
        from enum import Enum
        from typing import Any

        from vllm.v1.attention.backend import AttentionBackend, AttentionImplBase

        class QueryLenSupport(Enum):
            SINGLE_ONLY = 1
            UNIFORM = 2

        class MLACommonBackend(AttentionBackend):
            @staticmethod
            def get_name():
                return "TRITON_MLA"

            @staticmethod
            def get_builder_cls():
                return MLACommonMetadataBuilder

            @classmethod
            def get_supported_head_sizes(cls):
                return [320, 576]

            @classmethod
            def is_mla(cls):
                return True

        @dataclass
        class MLACommonDecodeMetadata:
            block_table: Any
            seq_lens: Any
            dcp_tot_seq_lens: Any = None

        @dataclass
        class MLACommonMetadata:
            num_decodes: int
            num_decode_tokens: int
            decode: Any = None

        @dataclass
        class MLADims:
            qk_rope_head_dim: int

        class MLACommonMetadataBuilder:
            query_len_support = QueryLenSupport.SINGLE_ONLY
            reorder_batch_threshold = 1
            dcp_world_size = 1

            def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
                self.kv_cache_spec, self.vllm_config, self.device = kv_cache_spec, vllm_config, device
                self.num_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)

        class MLACommonImpl(AttentionImplBase):
            def __init__(self, scale):
                self.scale = scale

            def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
                raise NotImplementedError
        """

SPEC = """
        class AttentionSpec:
            dtype: object
        """

SOURCES = {
    "__init__": "",
    "envs": "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB = 1\n",
    "v1/kv_cache_interface": SPEC,
    "compilation/__init__": "",
    "compilation/breakable_cudagraph": """
        def eager_break_during_capture(function):
            return function
        """,
    "config/__init__": """
        current = None

        def get_current_vllm_config():
            return current

        def get_current_vllm_config_or_none():
            return current

        class CUDAGraphMode:
            NONE, FULL = 0, 2
        """,
    "config/attention": """
        class AttentionConfig:
            hisparse_config = None
        """,
    "config/device": """
        class DeviceConfig:
            device_type: str
        """,
    "config/parallel": """
        class ParallelConfig:
            cp_kv_cache_interleave_size: int
        """,
    "config/scheduler": """
        class SchedulerConfig:
            max_num_batched_tokens: int
            max_num_seqs: int
        """,
    "config/speculative": """
        class SpeculativeConfig:
            num_speculative_tokens: int
        """,
    "config/vllm": """
        class VllmConfig:
            attention_config: object
            device_config: object
            model_config: object
            parallel_config: object
            scheduler_config: object
            speculative_config: object
        """,
    "config/model": """
        class ModelConfig:
            hf_config: object
            hf_text_config: object
            max_model_len: int

            def get_num_attention_heads(self, parallel_config):
                raise NotImplementedError
        """,
    "forward_context": """
        class ForwardContext:
            attn_metadata = None
            cudagraph_runtime_mode = 0

        context = ForwardContext()

        def get_forward_context():
            return context
        """,
    "utils/__init__": "",
    "utils/torch_utils": """
        import torch

        LayerNameType = str

        def _encode_layer_name(layer_name):
            return layer_name

        def _resolve_layer_name(layer_name):
            return layer_name

        def direct_register_custom_op(op_name, op_func, mutates_args=None, fake_impl=None, target_lib=None):
            schema = torch.library.infer_schema(op_func, mutates_args=mutates_args)
            target_lib.define(op_name + schema)
            target_lib.impl(op_name, op_func, dispatch_key="CPU")
            target_lib._register_fake(op_name, fake_impl)
        """,
    "utils/import_utils": """
        deep_gemm = True

        def has_deep_gemm():
            return deep_gemm
        """,
    "v1/__init__": "",
    "v1/worker/__init__": "",
    "v1/worker/workspace": """
        import torch

        class WorkspaceManager:
            def get_simultaneous(self, *shapes_and_dtypes):
                return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes_and_dtypes]

        def current_workspace_manager():
            return WorkspaceManager()
        """,
    "v1/attention/__init__": "",
    "v1/attention/backend": """
        from dataclasses import dataclass
        from enum import Enum
        from typing import Any

        class AttentionCGSupport(Enum):
            UNIFORM_BATCH = 2

        class AttentionBackend:
            supported_dtypes = []
            supported_kv_cache_dtypes = []

            @staticmethod
            def get_impl_cls():
                raise NotImplementedError

            @classmethod
            def supports_compute_capability(cls, capability):
                return True

        class AttentionLayer:
            _q_scale: Any
            _k_scale: Any

        class AttentionImplBase:
            can_return_lse_for_decode = False
            need_to_return_lse_for_decode = False
            scale: float

        @dataclass
        class CommonAttentionMetadata:
            query_start_loc: Any
            query_start_loc_cpu: Any
            seq_lens: Any
            num_reqs: int
            num_actual_tokens: int
            max_query_len: int
            max_seq_len: int
            block_table_tensor: Any
            slot_mapping: Any
            causal: bool = True

        class AttentionMetadataBuilder:
            device: Any
            vllm_config: Any
            reorder_batch_threshold = None

        class SparseMLAAttentionImpl:
            def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale):
                raise NotImplementedError
        """,
    "v1/attention/backends/__init__": "",
    "v1/attention/backends/registry": """
        from enum import Enum

        class AttentionBackendEnum(Enum):
            FLASHMLA_SPARSE = "stock"
            CUSTOM = None

        registered = {}

        def register_backend(backend, class_path=None):
            registered[backend.name] = class_path
        """,
    "v1/attention/backends/mla/__init__": "",
    "v1/attention/backends/mla/flashmla_sparse": """
        from dataclasses import dataclass
        from types import SimpleNamespace
        from typing import Any

        import torch

        from vllm.config import get_current_vllm_config
        from vllm.v1.attention.backend import AttentionMetadataBuilder, SparseMLAAttentionImpl
        from vllm.v1.worker.workspace import current_workspace_manager

        MIN_HEADS_FOR_BF16_PREFILL = 32

        def get_mla_metadata(*args, **kwargs):
            raise RuntimeError("FlashMLA is not there")

        class FlashMLASparseBackend:
            @staticmethod
            def get_name():
                return "FLASHMLA_SPARSE"

            @staticmethod
            def get_builder_cls():
                return FlashMLASparseMetadataBuilder

            @staticmethod
            def get_impl_cls():
                return FlashMLASparseImpl

            @classmethod
            def supports_compute_capability(cls, capability):
                return capability.major in (9, 10)

        @dataclass
        class FlashMLASparseMetadata:
            @dataclass
            class FP8KernelMetadata:
                scheduler_metadata: Any
                dummy_block_table: Any
                cache_lens: Any

            @dataclass
            class FP8SeparatePrefillDecode:
                @dataclass
                class Prefill:
                    @dataclass
                    class Chunk:
                        seq_lens: Any
                        tokens_slice: slice
                        block_table: Any
                        workspace_starts: Any
                        chunk_tot_seqlen: Any

                    request_ids: Any
                    workspace_starts: Any
                    chunks: list

                num_decodes: int
                num_decode_tokens: int
                prefill: Any

            num_reqs: int
            max_query_len: int
            max_seq_len: int
            num_actual_tokens: int
            query_start_loc: Any
            slot_mapping: Any
            block_table: Any
            req_id_per_token: Any
            block_size: int = 64
            topk_tokens: int = 2048
            fp8_extra_metadata: Any = None
            fp8_use_mixed_batch: bool = False

        class FlashMLASparseMetadataBuilder(AttentionMetadataBuilder):
            def __init__(self, num_heads, block_size, fp8, decode_len=1, vllm_config=None, device="cpu", topk=20):
                self.vllm_config = get_current_vllm_config() if vllm_config is None else vllm_config
                self.device = torch.device(device)
                self.num_heads, self.use_fp8_kv_cache, self.topk_tokens = num_heads, fp8, topk
                self.kv_cache_spec = SimpleNamespace(block_size=block_size)
                self.req_id_per_token_buffer = torch.full((64,), -1, dtype=torch.int32)
                self.reorder_batch_threshold = decode_len

            def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
                batch = common_attn_metadata
                query_lens = batch.query_start_loc.diff()
                extra = None
                mixed = self.num_heads < MIN_HEADS_FOR_BF16_PREFILL
                if self.use_fp8_kv_cache and mixed:
                    extra = self._build_fp8_mixed_decode_prefill(batch)
                elif self.use_fp8_kv_cache:
                    extra = self._build_fp8_separate_prefill_decode(batch)
                requests = self.req_id_per_token_buffer.zero_()[: batch.num_actual_tokens]
                requests[: int(query_lens.sum())] = torch.arange(len(query_lens)).repeat_interleave(query_lens).int()
                return FlashMLASparseMetadata(
                    batch.num_reqs, batch.max_query_len, batch.max_seq_len, batch.num_actual_tokens,
                    batch.query_start_loc, batch.slot_mapping, batch.block_table_tensor, requests,
                    self.kv_cache_spec.block_size, self.topk_tokens, extra, mixed,
                )

            def _build_fp8_mixed_decode_prefill(self, common_attn_metadata):
                return FlashMLASparseMetadata.FP8KernelMetadata(get_mla_metadata()[0], None, None)

            def _build_fp8_separate_prefill_decode(self, common_attn_metadata):
                batch = common_attn_metadata
                get_mla_metadata()
                query_lens = batch.query_start_loc.diff()
                decodes = int((query_lens == 1).cumprod(0).sum())
                separate = FlashMLASparseMetadata.FP8SeparatePrefillDecode
                starts, lens = batch.query_start_loc, batch.seq_lens
                prefill = None
                if decodes < len(lens):
                    request_ids = torch.full((batch.num_actual_tokens,), -1, dtype=torch.int32)
                    chunks = []
                    for i, r in enumerate(range(decodes, len(lens))):  # a chunk a request
                        part = slice(int(starts[r]), int(starts[r + 1]))
                        request_ids[part] = i
                        chunks.append(
                            separate.Prefill.Chunk(
                                lens[r : r + 1], part, batch.block_table_tensor[r : r + 1],
                                torch.zeros(1, dtype=torch.int32), lens[r],
                            )
                        )
                    prefill = separate.Prefill(request_ids, torch.zeros(len(chunks), dtype=torch.int32), chunks)
                return separate(decodes, int(starts[decodes]), prefill)

        class FlashMLASparseImpl(SparseMLAAttentionImpl):
            def __init__(self, num_heads, head_size, scale, kv_cache_dtype, indexer=None, kv_lora_rank=512):
                self.num_heads, self.softmax_scale, self.kv_lora_rank = num_heads, scale, kv_lora_rank
                self.kv_cache_dtype = kv_cache_dtype
                self.topk_indices_buffer = indexer.topk_indices_buffer
                self.q_concat_buffer, self.prefill_bf16_workspace = current_workspace_manager().get_simultaneous(
                    ((64, num_heads, head_size), torch.bfloat16), ((512, head_size), torch.bfloat16)
                )

            def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
                raise NotImplementedError
        """,
    "v1/attention/backends/mla/indexer": """
        from dataclasses import dataclass
        from typing import Any

        import torch

        def has_deep_gemm():
            return True

        def get_paged_mqa_logits_metadata(*args):
            raise RuntimeError("DeepGEMM is not there")

        @dataclass
        class DeepseekV32IndexerPrefillChunkMetadata:
            block_table: Any
            cu_seqlen_ks: Any
            cu_seqlen_ke: Any
            cu_seq_lens: Any
            total_seq_lens: int
            token_start: int
            token_end: int
            skip_kv_gather: bool = False

        @dataclass
        class DeepseekV32IndexerPrefillMetadata:
            chunks: list

        @dataclass
        class DeepSeekV32IndexerDecodeMetadata:
            block_table: Any
            seq_lens: Any
            decode_lens: Any
            requires_padding: bool
            schedule_metadata: Any

        @dataclass
        class DeepseekV32IndexerMetadata:
            seq_lens: Any
            max_seq_len: int
            slot_mapping: Any
            num_decodes: int
            num_decode_tokens: int
            num_prefills: int
            num_prefill_tokens: int
            decode: Any = None
            prefill: Any = None

        class DeepseekV32IndexerMetadataBuilder:
            reorder_batch_threshold = 1

            def __init__(self, decode_len=1, compress_ratio=1):
                self.reorder_batch_threshold, self.compress_ratio = decode_len, compress_ratio

            def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
                return get_paged_mqa_logits_metadata() if has_deep_gemm() else "built"

            def update_draft_decode_metadata(self, metadata):
                return get_paged_mqa_logits_metadata() if has_deep_gemm() else "updated"

        class DeepseekV32IndexerBackend:
            @staticmethod
            def get_builder_cls():
                return DeepseekV32IndexerMetadataBuilder
        """,
    "model_executor/__init__": "",
    "model_executor/custom_op": """
        import torch

        op_registry_oot = {}

        class CustomOp(torch.nn.Module):
            def __new__(cls, *args, **kwargs):
                return super().__new__(op_registry_oot.get(cls.__name__, cls))

            @classmethod
            def register_oot(cls, op):
                assert cls.__name__ not in op_registry_oot
                op_registry_oot[cls.__name__] = op

            def __init__(self):
                super().__init__()
                self._forward_method = self.forward_cuda

            def forward(self, *args, **kwargs):
                return self._forward_method(*args, **kwargs)
        """,
    "model_executor/layers/__init__": "",
    "model_executor/layers/attention/__init__": "",
    "model_executor/layers/attention/mla_attention": DENSE_MLA,
    "model_executor/layers/sparse_attn_indexer": """
        from vllm.model_executor.custom_op import CustomOp
        from vllm.utils.import_utils import has_deep_gemm

        class SparseAttnIndexer(CustomOp):
            def __init__(
                self, k_cache, quant_block_size, scale_fmt, topk_tokens, head_dim, max_model_len, max_total_seq_len,
                topk_indices_buffer, skip_k_cache_insert=False, use_fp4_cache=False,
            ):
                super().__init__()
                if not has_deep_gemm():
                    raise RuntimeError("DeepGEMM is not there")
                self.k_cache, self.scale_fmt, self.topk_tokens = k_cache, scale_fmt, topk_tokens
                self.max_model_len, self.max_total_seq_len = max_model_len, max_total_seq_len
                self.topk_indices_buffer = topk_indices_buffer
                self.skip_k_cache_insert, self.use_fp4_cache = skip_k_cache_insert, use_fp4_cache

            def forward_cuda(self, hidden_states, q_quant, k, weights):
                raise NotImplementedError
        """,
    "model_executor/models/__init__": "",
    "model_executor/models/deepseek_v2": """
        class Indexer:
            def __init__(self, indexer_op, k_cache, topk_indices_buffer):
                self.indexer_op, self.k_cache, self.topk_indices_buffer = indexer_op, k_cache, topk_indices_buffer
        """,
    "model_executor/models/registry": """
        class _ModelRegistry:
            def __init__(self):
                self.models = {}

            def register_model(self, model_arch, model_cls):
                self.models[model_arch] = model_cls

        ModelRegistry = _ModelRegistry()
        """,
    "models/__init__": "",
    "models/deepseek_v4/__init__": """
        from vllm.models.deepseek_v4.nvidia.model import DeepseekV4ForCausalLM
        """,
    "models/deepseek_v4/nvidia/__init__": "",
    "models/deepseek_v4/nvidia/model": """
        class DeepseekV4ForCausalLM:
            def __init__(self, *, vllm_config, prefix=""):
                self.made_of = vllm_config, prefix
        """,
    "models/deepseek_v4/nvidia/flashmla": """
        def stock(*args, **kwargs):
            return "stock", kwargs

        flash_mla_sparse_fwd = flash_mla_with_kvcache = combine_topk_swa_indices = stock
        compute_global_topk_indices_and_lens = dequantize_and_gather_k_cache = stock
        """,
}


# vLLM 0.33, where sparse MLA backends share all but the attention itself.
SOURCES_33 = {
    name: source
    for name, source in SOURCES.items()
    if name.startswith(("model_executor/models", "models", "utils", "config"))
    or name.endswith(
        ("__init__", "envs", "config", "registry", "custom_op", "forward_context", "workspace", "mla/indexer")
    )
} | {
    "model_executor/layers/sparse_attn_indexer": """
        def mqa_logits_use_mx_scales():
            return False

        def sparse_attn_indexer(
            hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, quant_block_size, scale_fmt,
            topk_tokens, head_dim, max_model_len, total_seq_lens, topk_indices_buffer, skip_k_cache_insert, use_pcp,
            pcp_shard_decode_requests, dense_mha_metadata_layer_name, use_fp4_cache=False,
        ):
            return "stock"

        class PrefillRowShard:
            "Of two ranks the second, which has the tokens from `half` on."

            half = None

            @classmethod
            def from_metadata(cls, prefill_metadata, num_decode_tokens):
                return None if cls.half is None else cls()

            def narrow(self, chunk):
                start = max(chunk.token_start, self.half)
                skipped = start - chunk.token_start
                if start >= chunk.token_end:
                    return None
                return start, chunk.token_end, chunk.cu_seqlen_ks[skipped:], chunk.cu_seqlen_ke[skipped:]

            def exchange_topk(self, topk_buffer, width):
                topk_buffer[: self.half, :width] = 7

        class SparseAttnIndexer:
            def __init__(self, use_pcp=False, dcp_world_size=1, use_fp4_cache=False, candidate_blocks=None):
                self.use_pcp, self.dcp_world_size, self.use_fp4_cache = use_pcp, dcp_world_size, use_fp4_cache
                self.candidate_blocks = candidate_blocks
        """,
    "v1/attention/backends/registry": """
        from enum import Enum
        from types import SimpleNamespace

        class AttentionBackendEnum(Enum):
            FLASHMLA_SPARSE = "stock"
            FLASH_ATTN_MLA_SPARSE = "FA3"
            CUSTOM = None

            @classmethod
            def register(cls, name, value):
                if name in cls._member_map_:
                    raise ValueError(f"Backend {name} already exists")
                cls._member_map_[name] = SimpleNamespace(name=name)
                return cls._member_map_[name]

        registered = {}

        def register_backend(backend, class_path=None):
            if isinstance(backend, str):
                backend = AttentionBackendEnum.register(backend, class_path)
            registered[backend.name] = class_path
        """,
    "models/deepseek_v32/__init__": "",
    "models/deepseek_v32/attention": """
        from types import SimpleNamespace

        from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer, sparse_attn_indexer

        class DeepseekV32Indexer:
            def __init__(self, prefix, topk_indices_buffer, **more):
                self.topk_indices_buffer = topk_indices_buffer
                self.k_cache = SimpleNamespace(prefix=prefix + ".k_cache", kv_cache=None, get_attn_backend=None)
                self.indexer_op = SparseAttnIndexer(**more)

        class DeepseekV32Attention:
            def _sparse_indexer_and_attn(self):
                raise NotImplementedError
        """,
    "v1/attention/backend": """
        from dataclasses import dataclass
        from enum import Enum
        from typing import Any

        @dataclass
        class CommonAttentionMetadata:
            query_start_loc: Any
            query_start_loc_cpu: Any
            seq_lens: Any
            num_reqs: int
            num_actual_tokens: int
            max_query_len: int
            max_seq_len: int
            block_table_tensor: Any
            slot_mapping: Any
            causal: bool = True

        class AttentionCGSupport(Enum):
            UNIFORM_BATCH = 2

        class AttentionMetadataBuilder:
            kv_cache_spec: Any

        class AttentionBackend:
            supported_dtypes = []
            supported_kv_cache_dtypes = []

            @staticmethod
            def get_impl_cls():
                raise NotImplementedError

            @classmethod
            def supports_compute_capability(cls, capability):
                return True

            @classmethod
            def validate_configuration(
                cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix,
                device_capability, use_pcp=False, use_dcp=False,
            ):
                reasons = [] if cls.supports_compute_capability(device_capability) else ["compute capability"]
                if use_pcp and not cls.get_impl_cls().supports_pcp:
                    reasons.append("PCP not supported")
                if use_dcp and not cls.get_impl_cls().supports_dcp:
                    reasons.append("DCP not supported")
                reason = cls.supports_combination(
                    head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix,
                    device_capability,
                )
                return reasons + ([] if reason is None else [reason])

        def max_decode_query_len(vllm_config):
            speculative = vllm_config.speculative_config
            return 1 if speculative is None else 1 + speculative.num_speculative_tokens

        class AttentionLayer:
            _q_scale: Any
            _k_scale: Any

        class AttentionImplBase:
            scale: float
            can_return_lse_for_decode: bool = False
            dcp_world_size: int = 1
            lse_base_on_e: bool = True
            need_to_return_lse_for_decode: bool = False
            supports_dcp: bool = False
            supports_dense_mha_prefill: bool = True

            def __new__(cls, *args, **kwargs):
                self = super().__new__(cls)
                self.dcp_world_size = ranks
                self.need_to_return_lse_for_decode = ranks > 1 and self.can_return_lse_for_decode
                return self

            def process_weights_after_loading(self, act_dtype):
                pass

        ranks = 1  # that share rows, of the process group

        class MLAAttentionImpl(AttentionImplBase):
            supports_pcp = True

            def do_kv_cache_update(
                self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale=False
            ):
                raise NotImplementedError
        """,
    "v1/kv_cache_interface": SPEC
    + """
        class MLAAttentionSpec(AttentionSpec):
            cache_dtype_str = None
        """,
    "v1/attention/backends/mla/sparse_utils": """
        def flat_kv_row_view(kv_cache, block_size):
            blocks, _, width = kv_cache.shape
            stride = kv_cache.stride(0) // width
            return kv_cache.as_strided(((blocks - 1) * stride + block_size, width), (width, 1)), stride
        """,
    "v1/attention/backends/mla/flashmla_sparse": """
        from vllm.v1.attention.backend import AttentionBackend

        class FlashMLASparseBackend(AttentionBackend):
            supported_kv_cache_dtypes = ["auto", "bfloat16", "fp8_ds_mla", "fp8", "nvfp4_ds_mla"]

            @classmethod
            def customize_spec(cls, spec):
                return spec

            @staticmethod
            def get_name():
                return "FLASHMLA_SPARSE"

            @staticmethod
            def get_builder_cls():
                raise NotImplementedError

            @staticmethod
            def get_impl_cls():
                raise NotImplementedError

            @classmethod
            def supports_compute_capability(cls, capability):
                return capability.major in (9, 10)

            @classmethod
            def supports_combination(
                cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix,
                device_capability,
            ):
                return "head size 512 on 9.x" if head_size == 512 and device_capability.major != 9 else None
        """,
    "model_executor/layers/attention/mla_attention": DENSE_MLA
    + """
        from vllm.v1.attention.backend import MLAAttentionImpl

        class MLAAttention:
            def process_weights_after_loading(self, act_dtype):
                self.impl.process_weights_after_loading(act_dtype)

        class MLACommonBaseImpl(MLAAttentionImpl):
            def __init__(self, scale, kv_cache_dtype, qk_rope_head_dim, num_heads):
                self.num_heads = num_heads
                self.scale, self.kv_cache_dtype, self.qk_rope_head_dim = scale, kv_cache_dtype, qk_rope_head_dim
        """,
    "model_executor/layers/attention/sparse_mla_attention": """
        import torch

        from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl
        from vllm.v1.attention.backend import max_decode_query_len
        from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

        class SparseMLACommonMetadata:
            pass

        class SparseMLACommonMetadataBuilder:
            metadata_cls: type

            def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
                self.kv_cache_spec, self.vllm_config, self.topk_tokens = kv_cache_spec, vllm_config, 20
                self.model_config = self.mla_dims = vllm_config.model_config
                self.dcp_world_size, self.use_pcp = 1, False

            def _init_reorder_batch_threshold(
                self, reorder_batch_threshold=1, supports_spec_as_decode=False, supports_dcp_with_varlen=False
            ):
                least = max_decode_query_len(self.vllm_config) if supports_spec_as_decode else 1
                apart = self.vllm_config.parallel_config.decode_context_parallel_size > 1
                one = apart and not supports_dcp_with_varlen
                self.reorder_batch_threshold = 1 if one else max(reorder_batch_threshold, least)

            def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
                return SparseMLACommonMetadata()

        class SharedTopkIndicesBuffer:
            topk_indices_buffer = None

        class SparseMLACommonImpl(MLACommonBaseImpl, SharedTopkIndicesBuffer):
            def __init__(
                self, scale, kv_cache_dtype, qk_rope_head_dim, topk_indices_buffer, num_heads=12, indexer=None
            ):
                super().__init__(scale, kv_cache_dtype, qk_rope_head_dim, num_heads)
                self.topk_indices_buffer = topk_indices_buffer

            def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
                "Rows of this rank's tokens counted over gaps between blocks, moved to the front of each list."
                block, meta = attn_metadata.block_size, attn_metadata
                tokens = len(q[0] if isinstance(q, tuple) else q)
                stride = flat_kv_row_view(kv_c_and_k_pe_cache, block)[1]
                rows = torch.full((tokens, self.topk_indices_buffer.shape[1]), -1, dtype=torch.int32)
                counts = torch.zeros(tokens, dtype=torch.int32)
                for t in range(tokens):
                    table = meta.block_table[meta.req_id_per_token[t]]
                    own = [int(p) for p in self.topk_indices_buffer[t] if p >= 0 and meta.is_own(p)]
                    rows[t, : len(own)] = torch.tensor([int(table[p // block]) * stride + p % block for p in own])
                    counts[t] = len(own)
                return self._forward_mqa_kernel(
                    q, kv_c_and_k_pe_cache, rows, counts, layer=layer, block_size=block,
                    is_decode=meta.num_decode_tokens >= tokens,
                )

            def _forward_mqa_kernel(self, q, kv_cache, topk_indices, valid_counts, *, layer, block_size, is_decode):
                raise NotImplementedError
        """,
}


def write(folder: Path, sources: dict[str, str] = SOURCES) -> Path:
    """Put the package `vllm` into a folder; returns the package's own."""
    package = folder / "vllm"
    for name, source in sources.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
    return package


def loaded(name: str) -> ModuleType:
    return importlib.import_module(name)


def engine(**more: Any) -> SimpleNamespace:
    """vLLM's configuration of a small engine."""
    sizes = SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=40)
    parts = {"scheduler_config": sizes, "model_config": SimpleNamespace(max_model_len=700), "speculative_config": None}
    return SimpleNamespace(**{**parts, **more})
