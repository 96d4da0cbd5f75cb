"""Stand-ins for the parts of vLLM 0.32 and 0.33 that our plug-in builds on: a package on disk with the same names.

They do as little as the plug-in needs: build metadata of one batch, reserve buffers, and note what they are told.
`tests/integrations/test_engine_contracts.py` holds the real package to the same names and parameters.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from textwrap import dedent
from types import ModuleType, SimpleNamespace
from typing import Any

FLASHMLA_LAYER = """
    from vllm.models.{}.attention import DeepseekV4Attention

    class DeepseekV4FlashMLAAttention(DeepseekV4Attention):
        @classmethod
        def get_padded_num_q_heads(cls, num_heads):
            return 64 if num_heads <= 64 else 128

        def forward_mqa(self, q, kv, positions, output):
            output.zero_()
    """

SOURCES = {
    "__init__": "",
    "envs": "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB = 1\n",
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
            prefill_context_parallel_size: int
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
    "platforms/__init__": """
        from vllm.platforms.interface import Platform

        current_platform: Platform = Platform()
        """,
    "platforms/interface": """
        class DeviceCapability:
            major: int
            minor: int

        class Platform:
            def get_device_capability(cls):
                return None
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
    "v1/attention/ops/__init__": "",
    "v1/attention/ops/common": """
        class PackSeqTritonKernel:
            def get_warmup_keys(self, *, dtype, pad_value):
                return ["does not compile below 8.9"]

        _PACK_SEQ_TRITON_KERNEL = PackSeqTritonKernel()
        """,
    "v1/attention/backends/__init__": "",
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
    "v1/attention/backends/mla/__init__": "",
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
            def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
                if has_deep_gemm():
                    get_paged_mqa_logits_metadata()
                return DeepseekV32IndexerMetadata(None, 0, None, 0, 0, 0, 0)

            def update_draft_decode_metadata(self, metadata):
                return get_paged_mqa_logits_metadata() if has_deep_gemm() else "updated"

        class DeepseekV32IndexerBackend:
            @staticmethod
            def get_builder_cls():
                return DeepseekV32IndexerMetadataBuilder
        """,
    "model_executor/__init__": "",
    "model_executor/layers/__init__": "",
    "model_executor/layers/attention/__init__": "",
    "model_executor/models/__init__": "",
    "model_executor/models/registry": """
        class _ModelRegistry:
            def __init__(self):
                self.models = {}

            def register_model(self, model_arch, model_cls):
                self.models[model_arch] = model_cls

        ModelRegistry = _ModelRegistry()
        """,
    "model_executor/models/deepseek_v2": """
        class DeepseekV32IndexerCache:
            def get_attn_backend(self):
                raise NotImplementedError
        """,
    "models/__init__": "",
    "models/deepseek_v4/__init__": """
        from vllm.models.deepseek_v4.nvidia.model import DeepseekV4ForCausalLM
        """,
    "models/deepseek_v4/nvidia/__init__": "",
    "models/deepseek_v4/nvidia/model": """
        from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

        class DeepseekV4FlashInferMLAAttention:
            def __init__(self, vllm_config, prefix):
                pass

        def _select_dsv4_attn_cls(vllm_config):
            of = vllm_config.attention_config.backend
            return DeepseekV4FlashInferMLAAttention if of == "FLASHINFER" else DeepseekV4FlashMLAAttention

        class DeepseekV4DecoderLayer:
            def __init__(self, vllm_config, prefix):
                self.attn = _select_dsv4_attn_cls(vllm_config)(vllm_config, prefix=prefix)

        class DeepseekV4ForCausalLM:
            def __init__(self, *, vllm_config, prefix=""):
                names = vllm_config.model_config.hf_config.ratios
                self.layers = [DeepseekV4DecoderLayer(vllm_config, prefix + name) for name in names]
        """,
    "models/deepseek_v4/nvidia/flashmla": FLASHMLA_LAYER.format("deepseek_v4"),
    "models/deepseek_v4/attention": """
        import torch

        from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
        from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

        class DeepseekV4Indexer:
            def __init__(self):
                self.indexer_op = SparseAttnIndexer()

        class DeepseekV4Attention:
            PREFILL_CHUNK_SIZE = 4

            def __init__(self, vllm_config, prefix):
                model, text = vllm_config.model_config, vllm_config.model_config.hf_config
                self.prefix, self.compress_ratio = prefix, text.ratios[prefix]
                self.padded_heads = self.get_padded_num_q_heads(model.get_num_attention_heads(None))
                self.attn_sink = torch.full((self.padded_heads,), -torch.inf)
                self.max_image_tokens = getattr(text, "vision_max_n_token", 0)
                self.scale, self.window_size = 512**-0.5, text.sliding_window
                self.max_num_batched_tokens = vllm_config.scheduler_config.max_num_batched_tokens
                self.kv_cache = self.topk_indices_buffer = None
                self.swa_cache_layer = DeepseekV4SWACache(prefix + ".swa_cache")
                self.indexer = DeepseekV4Indexer() if self.compress_ratio == 4 else None
        """,
    "models/deepseek_v4/sparse_mla": """
        from dataclasses import dataclass
        from typing import Any

        @dataclass
        class DeepseekV4FlashMLAMetadata:
            block_table: Any
            block_size: int
            c128a_global_decode_topk_indices: Any = None
            c128a_decode_topk_lens: Any = None
            c128a_prefill_topk_indices: Any = None
        """,
    "models/deepseek_v41/__init__": """
        from vllm.models.deepseek_v41.nvidia.model import DeepseekV41ForCausalLM
        """,
    "models/deepseek_v41/nvidia/__init__": "",
    "models/deepseek_v41/nvidia/model": """
        import torch

        from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

        class DeepseekV4FlashInferMLAAttention:
            def __init__(self, vllm_config, prefix, **more):
                pass

        def _select_dsv4_attn_cls(vllm_config):
            of = vllm_config.attention_config.backend
            return DeepseekV4FlashInferMLAAttention if of == "FLASHINFER" else DeepseekV4FlashMLAAttention

        class DeepseekV4DecoderLayer:
            def __init__(self, vllm_config, prefix, **more):
                self.attn = _select_dsv4_attn_cls(vllm_config)(vllm_config, prefix=prefix, **more)

        class DeepseekV41ForCausalLM:
            def __init__(self, *, vllm_config, prefix=""):
                text, tokens = vllm_config.model_config.hf_config, vllm_config.scheduler_config.max_num_batched_tokens
                shared = {
                    "topk_indices_buffer": torch.empty(tokens, text.index_topk, dtype=torch.int32),
                    "candidate_block_buffer": torch.empty(tokens, text.candidate_topk_blocks, dtype=torch.int32),
                    "others": [],
                }
                names = range(len(text.compress_ratios))
                self.layers = [DeepseekV4DecoderLayer(vllm_config, f"{prefix}{name}", **shared) for name in names]
        """,
    "models/deepseek_v41/nvidia/flashmla": FLASHMLA_LAYER.format("deepseek_v41"),
    "models/deepseek_v41/attention": """
        from types import SimpleNamespace

        import torch

        from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
        from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

        def _use_v41_mxfp8_kv_record():
            return False

        class DeepseekV4Indexer:
            def __init__(self, layer, text, k_cache, candidates):
                number = int(layer.prefix)
                self.k_cache, self.indexer_op = k_cache, SparseAttnIndexer(
                    candidate_blocks=candidates if number >= text.candidate_source_layer_id else None,
                    candidate_block_size=text.candidate_block_size,
                    candidate_write=number == text.candidate_source_layer_id,
                )
                self.indexer_op.k_cache, self.indexer_op.topk_indices_buffer = k_cache, layer.topk_indices_buffer
                self.indexer_op.compress_ratio, self.indexer_op.topk_tokens = layer.compress_ratio, text.index_topk

        class DeepseekV4Attention:
            PREFILL_CHUNK_SIZE = 4

            def __init__(self, vllm_config, prefix, topk_indices_buffer, candidate_block_buffer, others):
                model, text, number = vllm_config.model_config, vllm_config.model_config.hf_config, len(others)
                others.append(self)
                self.prefix, self.compress_ratio, self.others = prefix, text.compress_ratios[number], others
                self.padded_heads = self.get_padded_num_q_heads(model.get_num_attention_heads(None))
                self.attn_sink = torch.full((self.padded_heads,), -torch.inf)
                self.scale, self.window_size = 512**-0.5, text.sliding_window
                self.max_num_batched_tokens = vllm_config.scheduler_config.max_num_batched_tokens
                self.kv_cache, self.topk_indices_buffer = None, topk_indices_buffer
                self.swa_cache_layer = DeepseekV4SWACache(prefix + ".swa_cache")
                self.indexer = self.compressed_cache_prefix = None
                if self.compress_ratio:
                    source = max(layer for layer in text.kv_source_layer_ids if layer <= number)
                    self.compressed_cache_prefix = others[source].prefix
                if number in text.index_source_layer_ids:
                    own = source == number
                    keys = SimpleNamespace(prefix=prefix + ".keys") if own else others[source].indexer.k_cache
                    self.indexer = DeepseekV4Indexer(self, text, keys, candidate_block_buffer)
                    self.indexer.indexer_op.max_model_len = model.max_model_len // self.compress_ratio
                    self.indexer.indexer_op.max_total_seq_len = 4 * model.max_model_len // self.compress_ratio

            def _compressed_kv_cache(self):
                return self.others[int(self.compressed_cache_prefix)].kv_cache
        """,
    "models/deepseek_v41/sparse_mla": """
        from dataclasses import dataclass
        from typing import Any

        @dataclass
        class DeepseekV4FlashMLAMetadata:
            block_table: Any
            block_size: int
        """,
    "v1/attention/backends/mla/sparse_swa": """
        from dataclasses import dataclass
        from typing import Any

        class DeepseekV4SWACache:
            def __init__(self, prefix):
                self.prefix, self.kv_cache = prefix, None

        @dataclass
        class DeepseekSparseSWAMetadata:
            block_table: Any
            block_size: int
            query_start_loc: Any
            query_start_loc_cpu: Any
            is_valid_token: Any
            token_to_req_indices: Any
            decode_swa_indices: Any
            decode_swa_lens: Any
            num_decodes: int
            num_decode_tokens: int
            num_prefills: int
            prefill_seq_lens: Any
            prefill_gather_lens: Any
            prefill_left_visible: Any = None
            prefill_right_visible: Any = None

            def get_prefill_chunk_plan(self, compress_ratio, prefill_chunk_size, has_compressed=None):
                "Two requests at a time."
                assert prefill_chunk_size == 4
                compressed = compress_ratio > 1 if has_compressed is None else has_compressed
                plan = []
                for start in range(0, self.num_prefills, 2):
                    lens = self.prefill_seq_lens[start : start + 2]
                    rows = int(lens.max()) // compress_ratio if compressed else 0
                    most = int(self.prefill_gather_lens[start : start + 2].max())
                    plan.append((start, start + len(lens), rows, rows + most))
                return plan
        """,
    "v1/kv_cache_interface": """
        class KVCacheSpec:
            block_size: int

        class AttentionSpec(KVCacheSpec):
            dtype: object

        class MLAAttentionSpec(AttentionSpec):
            cache_dtype_str = None
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
                use_per_head_quant_scales, device_capability, attn_type, has_sliding_window=False,
                use_non_causal=False, use_batch_invariant=False, use_kv_connector=False, use_pcp=False,
                use_adaptive_verification=False, use_dcp=False,
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
            dcp_rank: int = 0
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
                self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale
            ):
                raise NotImplementedError
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
    "model_executor/layers/attention/mla_attention": """
        from dataclasses import dataclass
        from enum import Enum
        from typing import Any

        from vllm.v1.attention.backend import AttentionBackend, AttentionImplBase, MLAAttentionImpl

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

        class MLACommonPrefillMetadata:
            use_dense_mha: bool = False

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

        class MLAAttention:
            def process_weights_after_loading(self, act_dtype):
                self.impl.process_weights_after_loading(act_dtype)

        class MLACommonBaseImpl(MLAAttentionImpl):
            def __init__(self, scale, kv_cache_dtype, qk_rope_head_dim, num_heads):
                self.num_heads, self.qk_head_dim = num_heads, 128 + qk_rope_head_dim
                self.scale, self.kv_cache_dtype, self.qk_rope_head_dim = scale, kv_cache_dtype, qk_rope_head_dim
        """,
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

            half = decodes = None

            @classmethod
            def from_metadata(cls, prefill_metadata, num_decode_tokens):
                cls.decodes = num_decode_tokens
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
            def __init__(
                self, use_pcp=False, dcp_world_size=1, use_fp4_cache=False, candidate_blocks=None,
                candidate_block_size=0, candidate_write=False, topk_tokens=0,
            ):
                self.topk_tokens = topk_tokens
                self.use_pcp, self.dcp_world_size, self.use_fp4_cache = use_pcp, dcp_world_size, use_fp4_cache
                self.candidate_blocks, self.candidate_block_size = candidate_blocks, candidate_block_size
                self.candidate_write = candidate_write
                self.k_cache = self.topk_indices_buffer = None
                self.compress_ratio = self.max_model_len = self.max_total_seq_len = 0

            def forward(self, hidden_states, q_quant, k, weights):
                return "stock"

            def __call__(self, *step):
                return self.forward(*step)
        """,
    "models/deepseek_v32/__init__": "",
    "models/deepseek_v32/common/__init__": "",
    "models/deepseek_v32/common/kernels": """
        def fused_norm_rope(
            positions, q_c, q_rms_norm_w, q_rms_eps, kv_c, kv_rms_norm_w, kv_rms_eps, k_pe, k_rope_cos_sin_cache,
            index_k, index_k_layer_norm_w, index_k_layer_norm_bias, index_k_layer_norm_eps,
            index_k_rope_cos_sin_cache, topk_indices_buffer, slot_mapping=None, indexer_slot_mapping=None,
            indexer_k_cache=None, indexer_cache_shuffled=False, mla_kv_cache=None, mla_kv_cache_dtype="auto",
            mla_k_scale=None, has_indexer=True, index_rope_interleave=False, q_c_out=None, kv_c_out=None,
            k_pe_out=None, index_k_out=None,
        ):
            raise NotImplementedError

        def fused_q(
            positions, q_pe, q_pe_cos_sin_cache, index_q, index_q_cos_sin_cache, ql_nope, q_scale, index_weights,
            index_weights_softmax_scale, index_weights_head_scale, has_indexer=True, index_rope_interleave=False,
            quantize_mqa=True,
        ):
            raise NotImplementedError
        """,
    "models/deepseek_v32/attention": """
        from types import SimpleNamespace

        from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer, sparse_attn_indexer
        from vllm.models.deepseek_v32.common.kernels import fused_norm_rope, fused_q

        class DeepseekV32Indexer:
            def __init__(self, prefix, topk_indices_buffer, **more):
                self.topk_indices_buffer = topk_indices_buffer
                self.k_cache = SimpleNamespace(prefix=prefix + ".k_cache", kv_cache=None, get_attn_backend=None)
                self.indexer_op = SparseAttnIndexer(**more)

        class DeepseekV32Attention:
            def _sparse_indexer_and_attn(self):
                raise NotImplementedError
        """,
    "v1/attention/backends/mla/sparse_utils": """
        import torch

        def flat_kv_row_view(kv_cache, block_size):
            blocks, _, width = kv_cache.shape
            stride = kv_cache.stride(0) // width
            return kv_cache.as_strided(((blocks - 1) * stride + block_size, width), (width, 1)), stride

        def triton_filter_and_convert_dcp_index(
            req_id, block_table, token_indices, dcp_size, dcp_rank, cp_kv_cache_interleave_size=1, BLOCK_SIZE=64,
            BLOCK_STRIDE_ROWS=None, NUM_TOPK_TOKENS=2048, BLOCK_N=128, return_valid_counts=False,
        ):
            "Rows of this rank's tokens counted over gaps between blocks, moved to the front; behind stand others."
            assert return_valid_counts and NUM_TOPK_TOKENS == token_indices.shape[1]
            rows = torch.zeros(token_indices.shape, dtype=torch.int32)
            counts = torch.zeros(len(rows), dtype=torch.int32)
            for t, chosen in enumerate(token_indices.tolist()):
                table = block_table[req_id[t]]
                own = [p for p in chosen if p >= 0 and p // cp_kv_cache_interleave_size % dcp_size == dcp_rank]
                rows[t, : len(own)] = torch.tensor(
                    [int(table[p // BLOCK_SIZE]) * BLOCK_STRIDE_ROWS + p % BLOCK_SIZE for p in own]
                )
                counts[t] = len(own)
            return rows, counts
        """,
    "model_executor/layers/attention/sparse_mla_attention": """
        from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl
        from vllm.v1.attention.backend import max_decode_query_len
        from vllm.v1.attention.backends.mla.sparse_utils import triton_filter_and_convert_dcp_index

        class SparseMLACommonMetadata:
            block_size = block_table = cp_kv_cache_interleave_size = num_decode_tokens = req_id_per_token = None
            prefill = None

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

            def prepare_for_batch(self, attn_metadata):
                self.prepared = attn_metadata

            def _convert_logical_to_physical_topk(
                self, logical_topk_indices, attn_metadata, *, block_stride_rows, return_valid_counts
            ):
                assert self.dcp_world_size == 1 and return_valid_counts
                meta = attn_metadata
                return triton_filter_and_convert_dcp_index(
                    meta.req_id_per_token, meta.block_table, logical_topk_indices, 1, 0, 1, meta.block_size,
                    block_stride_rows, logical_topk_indices.shape[1], return_valid_counts=True,
                )
        """,
}


def write(folder: Path) -> Path:
    """Put the package `vllm` into a folder; returns the package's own."""
    return write_package(folder / "vllm", SOURCES)


def write_package(package: Path, sources: dict[str, str]) -> Path:
    """Write modules, by their paths without ".py", into a package's folder; returns it."""
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
