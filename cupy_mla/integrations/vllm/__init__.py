"""The plug-in for vLLM: MLA models use this package's attention, sparse ones also its cache, index and indexer
operations.

vLLM calls `register` in each of its processes: setup.cfg names it in the entry-point group `vllm.general_plugins`. The
environment variable `CUPY_MLA_VLLM` says what it does:

- unset or `custom`: the backend is registered as CUSTOM and as CUPY_MLA. Nothing changes until `--attention-backend`
  names it. In models without an indexer that is the dense backend (`custom.py`).
- `override`: the backend replaces those that vLLM chooses by itself for sparse MLA models, FLASHMLA_SPARSE and, on
  Hopper, FLASH_ATTN_MLA_SPARSE. DeepSeek-V4 and V4.1, which have no backend to select, run on our operations.
- `off`: nothing is registered.

If a vLLM lacks something that the plug-in needs, nothing is registered, and one warning names the versions served and
what is missing. To find that out, vLLM's sources are read, not imported.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ...checks.options import require_choice
from ..contract import Needs, meets, missing, sources

# The names under which a mode registers the backend. vLLM adds a name that it does not have.
PLACES: dict[str, tuple[str, ...]] = {
    "custom": ("CUSTOM", "CUPY_MLA"),
    "override": ("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"),
}
MODES = (*PLACES, "off")
SERVED = "0.32 and 0.33"
NAMED = 3  # a warning names so many of the missing things

# What `sparse_mla`, `indexer` and `fused` need of vLLM.
SPARSE_MLA: Needs = {
    "v1.attention.backends.registry": (
        "AttentionBackendEnum.CUSTOM",
        "AttentionBackendEnum.FLASHMLA_SPARSE",
        "AttentionBackendEnum.FLASH_ATTN_MLA_SPARSE",
        "AttentionBackendEnum.register(cls, name, value)",
        "register_backend(backend, class_path)",
    ),
    "v1.attention.backends.mla.flashmla_sparse": (
        "FlashMLASparseBackend.supported_kv_cache_dtypes",
        "FlashMLASparseBackend.customize_spec(cls, spec)",
        "FlashMLASparseBackend.get_builder_cls()",
        "FlashMLASparseBackend.get_impl_cls()",
        "FlashMLASparseBackend.supports_combination"
        "(cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, "
        "device_capability)",
        "FlashMLASparseBackend.supports_compute_capability(cls, capability)",
    ),
    "v1.attention.backends.mla.sparse_utils": (
        "flat_kv_row_view(kv_cache, block_size)",
        "triton_filter_and_convert_dcp_index"
        "(req_id, block_table, token_indices, dcp_size, dcp_rank, cp_kv_cache_interleave_size, BLOCK_SIZE, "
        "BLOCK_STRIDE_ROWS, NUM_TOPK_TOKENS, BLOCK_N, return_valid_counts)",
    ),
    "model_executor.layers.attention.sparse_mla_attention": (
        "SparseMLACommonMetadata.block_size",
        "SparseMLACommonMetadata.block_table",
        "SparseMLACommonMetadata.cp_kv_cache_interleave_size",
        "SparseMLACommonMetadata.num_decode_tokens",
        "SparseMLACommonMetadata.prefill",
        "SparseMLACommonMetadata.req_id_per_token",
        "SparseMLACommonMetadataBuilder.metadata_cls",
        "SparseMLACommonMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)",
        "SparseMLACommonMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, fast_build)",
        "SparseMLACommonMetadataBuilder.dcp_world_size",
        "SparseMLACommonMetadataBuilder.mla_dims",
        "SparseMLACommonMetadataBuilder.model_config",
        "SparseMLACommonMetadataBuilder.topk_tokens",
        "SparseMLACommonMetadataBuilder.use_pcp",
        "SparseMLACommonMetadataBuilder.vllm_config",
        "SparseMLACommonMetadataBuilder._init_reorder_batch_threshold"
        "(self, reorder_batch_threshold, supports_spec_as_decode, supports_dcp_with_varlen)",
        "SharedTopkIndicesBuffer.topk_indices_buffer",
        "SparseMLACommonImpl._convert_logical_to_physical_topk"
        "(self, logical_topk_indices, attn_metadata, block_stride_rows, return_valid_counts)",
        "SparseMLACommonImpl.prepare_for_batch(self, attn_metadata)",
    ),
    "v1.kv_cache_interface": ("KVCacheSpec.block_size", "MLAAttentionSpec.cache_dtype_str"),
    "config": ("CUDAGraphMode", "get_current_vllm_config", "get_current_vllm_config_or_none"),
    "config.attention": ("AttentionConfig.hisparse_config",),
    "config.parallel": ("ParallelConfig.cp_kv_cache_interleave_size",),
    # What `warm` reads, and the heads of a rank.
    "config.model": (
        "ModelConfig.get_num_attention_heads(self, parallel_config)",
        "ModelConfig.hf_text_config",
        "ModelConfig.max_model_len",
    ),
    "config.scheduler": ("SchedulerConfig.max_num_batched_tokens", "SchedulerConfig.max_num_seqs"),
    "config.speculative": ("SpeculativeConfig.num_speculative_tokens",),
    "config.vllm": (
        "VllmConfig.attention_config",
        "VllmConfig.model_config",
        "VllmConfig.parallel_config",
        "VllmConfig.scheduler_config",
        "VllmConfig.speculative_config",
    ),
    "model_executor.layers.attention.mla_attention": (
        "MLADims.qk_rope_head_dim",
        "MLACommonBaseImpl.kv_cache_dtype",
        "MLACommonBaseImpl.num_heads",
        "MLACommonPrefillMetadata.use_dense_mha",
        "MLAAttention.process_weights_after_loading(self, act_dtype)",
        "MLACommonBaseImpl.qk_head_dim",
        "MLACommonBaseImpl.qk_rope_head_dim",
        "MLACommonBaseImpl.scale",
    ),
    "v1.attention.backend": (
        # What `short` reads of a batch.
        "CommonAttentionMetadata.num_reqs",
        "CommonAttentionMetadata.num_actual_tokens",
        "CommonAttentionMetadata.max_query_len",
        "CommonAttentionMetadata.max_seq_len",
        "CommonAttentionMetadata.query_start_loc_cpu",
        "CommonAttentionMetadata.seq_lens",
        "CommonAttentionMetadata.block_table_tensor",
        "CommonAttentionMetadata.causal",
        "AttentionBackend.validate_configuration"
        "(cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, "
        "use_per_head_quant_scales, device_capability, attn_type, has_sliding_window, use_non_causal, "
        "use_batch_invariant, use_kv_connector, use_pcp, use_adaptive_verification, use_dcp)",
        "AttentionMetadataBuilder.kv_cache_spec",
        "AttentionCGSupport.UNIFORM_BATCH",
        "max_decode_query_len(vllm_config)",
        "AttentionImplBase.dcp_rank",
        "AttentionImplBase.dcp_world_size",
        "AttentionImplBase.process_weights_after_loading(self, act_dtype)",
        "AttentionImplBase.can_return_lse_for_decode",
        "AttentionImplBase.lse_base_on_e",
        "AttentionImplBase.need_to_return_lse_for_decode",
        "AttentionImplBase.supports_dcp",
        "AttentionImplBase.supports_dense_mha_prefill",
        "MLAAttentionImpl.do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)",
    ),
    # What `indexer` needs.
    "envs": ("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB",),
    "model_executor.models.deepseek_v2": ("DeepseekV32IndexerCache.get_attn_backend(self)",),
    "forward_context": (
        "ForwardContext.attn_metadata",
        "ForwardContext.cudagraph_runtime_mode",
        "get_forward_context()",
    ),
    "models.deepseek_v32.attention": (
        "sparse_attn_indexer",
        "DeepseekV32Indexer.indexer_op",
        "DeepseekV32Indexer.k_cache",
        "DeepseekV32Attention._sparse_indexer_and_attn(self)",
        "fused_norm_rope",
        "fused_q",
    ),
    "platforms": ("current_platform",),
    "platforms.interface": ("DeviceCapability.major", "Platform.get_device_capability(cls)"),
    # What `fused` replaces.
    "models.deepseek_v32.common.kernels": (
        "fused_norm_rope"
        "(positions, q_c, q_rms_norm_w, q_rms_eps, kv_c, kv_rms_norm_w, kv_rms_eps, k_pe, k_rope_cos_sin_cache, "
        "index_k, index_k_layer_norm_w, index_k_layer_norm_bias, index_k_layer_norm_eps, index_k_rope_cos_sin_cache, "
        "topk_indices_buffer, slot_mapping, indexer_slot_mapping, indexer_k_cache, indexer_cache_shuffled, "
        "mla_kv_cache, mla_kv_cache_dtype, mla_k_scale, has_indexer, index_rope_interleave, q_c_out, kv_c_out, "
        "k_pe_out, index_k_out)",
        "fused_q"
        "(positions, q_pe, q_pe_cos_sin_cache, index_q, index_q_cos_sin_cache, ql_nope, q_scale, index_weights, "
        "index_weights_softmax_scale, index_weights_head_scale, has_indexer, index_rope_interleave, quantize_mqa)",
    ),
    "v1.attention.ops.common": (
        "_PACK_SEQ_TRITON_KERNEL",
        "PackSeqTritonKernel.get_warmup_keys(self, dtype, pad_value)",
    ),
    "model_executor.layers.sparse_attn_indexer": (
        "PrefillRowShard.from_metadata(cls, prefill_metadata, num_decode_tokens)",
        "PrefillRowShard.narrow(self, chunk)",
        "PrefillRowShard.exchange_topk(self, topk_buffer, width)",
        "SparseAttnIndexer.candidate_block_size",
        "SparseAttnIndexer.candidate_blocks",
        "SparseAttnIndexer.dcp_world_size",
        "SparseAttnIndexer.topk_tokens",
        "SparseAttnIndexer.use_fp4_cache",
        "SparseAttnIndexer.use_pcp",
        "sparse_attn_indexer"
        "(hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, quant_block_size, scale_fmt, "
        "topk_tokens, head_dim, max_model_len, total_seq_lens, topk_indices_buffer, skip_k_cache_insert, use_pcp, "
        "pcp_shard_decode_requests, dense_mha_metadata_layer_name)",
    ),
    "v1.attention.backends.mla.indexer": (
        "has_deep_gemm",
        "DeepseekV32IndexerBackend.get_builder_cls()",
        "DeepseekV32IndexerMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, fast_build)",
        "DeepseekV32IndexerMetadataBuilder.update_draft_decode_metadata(self, metadata)",
        "DeepseekV32IndexerMetadata(seq_lens, max_seq_len, slot_mapping, num_decodes, num_decode_tokens, num_prefills, "
        "num_prefill_tokens)",
        "DeepseekV32IndexerMetadata.decode",
        "DeepseekV32IndexerMetadata.prefill",
        "DeepSeekV32IndexerDecodeMetadata(block_table, seq_lens, decode_lens, requires_padding, schedule_metadata)",
        "DeepseekV32IndexerPrefillMetadata.chunks",
        "DeepseekV32IndexerPrefillChunkMetadata.block_table",
        "DeepseekV32IndexerPrefillChunkMetadata.cu_seqlen_ks",
        "DeepseekV32IndexerPrefillChunkMetadata.cu_seqlen_ke",
        "DeepseekV32IndexerPrefillChunkMetadata.cu_seq_lens",
        "DeepseekV32IndexerPrefillChunkMetadata.total_seq_lens",
        "DeepseekV32IndexerPrefillChunkMetadata.token_start",
        "DeepseekV32IndexerPrefillChunkMetadata.token_end",
        "DeepseekV32IndexerPrefillChunkMetadata.skip_kv_gather",
    ),
    "v1.worker.workspace": ("current_workspace_manager()", "WorkspaceManager.get_simultaneous(self)"),
}
# What `dense_mla` and `custom` need beyond that.
DENSE_MLA: Needs = {
    "v1.kv_cache_interface": ("AttentionSpec.dtype",),
    "model_executor.layers.attention.mla_attention": (
        "MLACommonBackend.get_name()",
        "MLACommonBackend.get_builder_cls()",
        "MLACommonBackend.get_supported_head_sizes(cls)",
        "MLACommonBackend.is_mla(cls)",
        "MLACommonMetadata.num_decodes",
        "MLACommonMetadata.decode",
        "MLACommonDecodeMetadata.block_table",
        "MLACommonDecodeMetadata.seq_lens",
        "MLACommonMetadataBuilder.dcp_world_size",
        "MLACommonMetadataBuilder.device",
        "MLACommonMetadataBuilder.kv_cache_spec",
        "MLACommonMetadataBuilder.num_heads",
        "MLACommonMetadataBuilder.query_len_support",
        "MLACommonMetadataBuilder.vllm_config",
        "MLACommonImpl.forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer)",
        "QueryLenSupport.UNIFORM",
    ),
    "v1.attention.backend": (
        "AttentionBackend.get_impl_cls()",
        "AttentionBackend.supported_dtypes",
        "AttentionBackend.supported_kv_cache_dtypes",
        "AttentionBackend.supports_compute_capability(cls, capability)",
        "AttentionCGSupport.UNIFORM_BATCH",
        "AttentionImplBase.can_return_lse_for_decode",
        "AttentionImplBase.need_to_return_lse_for_decode",
        "AttentionImplBase.scale",
        "AttentionLayer._k_scale",
        "AttentionLayer._q_scale",
    ),
}
# What `v4_layers` needs of vLLM beyond that.
V4_LAYERS: Needs = {
    "model_executor.layers.sparse_attn_indexer": (
        "SparseAttnIndexer.compress_ratio",
        "SparseAttnIndexer.k_cache",
        "SparseAttnIndexer.max_model_len",
        "SparseAttnIndexer.max_total_seq_len",
        "SparseAttnIndexer.topk_indices_buffer",
    ),
    "config.device": ("DeviceConfig.device_type",),
    "config.model": ("ModelConfig.hf_config",),
    "config.vllm": ("VllmConfig.device_config",),
    "model_executor.models.registry": ("ModelRegistry", "_ModelRegistry.register_model(self, model_arch, model_cls)"),
    "v1.attention.backends.mla.sparse_swa": (
        "DeepseekV4SWACache.kv_cache",
        "DeepseekV4SWACache.prefix",
        "DeepseekSparseSWAMetadata.block_size",
        "DeepseekSparseSWAMetadata.block_table",
        "DeepseekSparseSWAMetadata.decode_swa_indices",
        "DeepseekSparseSWAMetadata.decode_swa_lens",
        "DeepseekSparseSWAMetadata.get_prefill_chunk_plan(self, compress_ratio, prefill_chunk_size, has_compressed)",
        "DeepseekSparseSWAMetadata.is_valid_token",
        "DeepseekSparseSWAMetadata.num_decode_tokens",
        "DeepseekSparseSWAMetadata.num_decodes",
        "DeepseekSparseSWAMetadata.num_prefills",
        "DeepseekSparseSWAMetadata.prefill_gather_lens",
        "DeepseekSparseSWAMetadata.prefill_left_visible",
        "DeepseekSparseSWAMetadata.prefill_right_visible",
        "DeepseekSparseSWAMetadata.prefill_seq_lens",
        "DeepseekSparseSWAMetadata.query_start_loc",
        "DeepseekSparseSWAMetadata.query_start_loc_cpu",
        "DeepseekSparseSWAMetadata.token_to_req_indices",
    ),
}
# What `deepseek_v4` needs beyond that.
DEEPSEEK_V4: Needs = {
    **V4_LAYERS,
    "models.deepseek_v4": ("DeepseekV4ForCausalLM",),
    "models.deepseek_v4.attention": (
        "DeepseekV4Attention.PREFILL_CHUNK_SIZE",
        "DeepseekV4Attention.__init__(self, vllm_config)",
        "DeepseekV4Attention.attn_sink",
        "DeepseekV4Attention.compress_ratio",
        "DeepseekV4Attention.indexer",
        "DeepseekV4Attention.kv_cache",
        "DeepseekV4Attention.max_image_tokens",
        "DeepseekV4Attention.max_num_batched_tokens",
        "DeepseekV4Attention.padded_heads",
        "DeepseekV4Attention.prefix",
        "DeepseekV4Attention.scale",
        "DeepseekV4Attention.swa_cache_layer",
        "DeepseekV4Attention.topk_indices_buffer",
        "DeepseekV4Attention.window_size",
        "DeepseekV4Indexer.indexer_op",
    ),
    "models.deepseek_v4.nvidia.flashmla": (
        "DeepseekV4FlashMLAAttention.forward_mqa(self, q, kv, positions, output)",
        "DeepseekV4FlashMLAAttention.get_padded_num_q_heads(cls, num_heads)",
    ),
    "models.deepseek_v4.nvidia.model": (
        "DeepseekV4DecoderLayer",
        "DeepseekV4FlashMLAAttention",
        "_select_dsv4_attn_cls(vllm_config)",
    ),
    "models.deepseek_v4.sparse_mla": (
        "DeepseekV4FlashMLAMetadata.block_size",
        "DeepseekV4FlashMLAMetadata.block_table",
        "DeepseekV4FlashMLAMetadata.c128a_decode_topk_lens",
        "DeepseekV4FlashMLAMetadata.c128a_global_decode_topk_indices",
        "DeepseekV4FlashMLAMetadata.c128a_prefill_topk_indices",
    ),
}
# What `deepseek_v41` needs beyond that.
DEEPSEEK_V41: Needs = {
    **V4_LAYERS,
    "model_executor.layers.sparse_attn_indexer": (
        *V4_LAYERS["model_executor.layers.sparse_attn_indexer"],
        "SparseAttnIndexer.candidate_write",
    ),
    "config.parallel": ("ParallelConfig.prefill_context_parallel_size",),
    "models.deepseek_v41": ("DeepseekV41ForCausalLM",),
    "models.deepseek_v41.attention": (
        "_use_v41_mxfp8_kv_record()",
        "DeepseekV4Attention.PREFILL_CHUNK_SIZE",
        "DeepseekV4Attention.__init__(self, vllm_config)",
        "DeepseekV4Attention._compressed_kv_cache(self)",
        "DeepseekV4Attention.attn_sink",
        "DeepseekV4Attention.compress_ratio",
        "DeepseekV4Attention.compressed_cache_prefix",
        "DeepseekV4Attention.indexer",
        "DeepseekV4Attention.max_num_batched_tokens",
        "DeepseekV4Attention.padded_heads",
        "DeepseekV4Attention.scale",
        "DeepseekV4Attention.swa_cache_layer",
        "DeepseekV4Attention.topk_indices_buffer",
        "DeepseekV4Attention.window_size",
        "DeepseekV4Indexer.indexer_op",
    ),
    "models.deepseek_v41.nvidia.flashmla": (
        "DeepseekV4FlashMLAAttention.forward_mqa(self, q, kv, positions, output)",
        "DeepseekV4FlashMLAAttention.get_padded_num_q_heads(cls, num_heads)",
    ),
    "models.deepseek_v41.nvidia.model": (
        "DeepseekV4DecoderLayer",
        "DeepseekV4FlashMLAAttention",
        "_select_dsv4_attn_cls(vllm_config)",
    ),
    "models.deepseek_v41.sparse_mla": (
        "DeepseekV4FlashMLAMetadata.block_size",
        "DeepseekV4FlashMLAMetadata.block_table",
    ),
}

# A child of vLLM's logger, so that lines appear among vLLM's own.
logger: logging.Logger = logging.getLogger("vllm.cupy_mla")


def register() -> None:
    """Register the backend in the vLLM of this process, as `CUPY_MLA_VLLM` says. It may be called more than once.

    Raises:
        ValueError: `CUPY_MLA_VLLM` has an unknown value.
    """
    mode = os.environ.get("CUPY_MLA_VLLM") or "custom"
    require_choice("CUPY_MLA_VLLM", mode, MODES)
    if mode == "off":
        return
    folder = sources("vllm")
    if not is_served(folder):
        return
    _register_backend(mode, folder)
    if mode == "override" and meets(folder, DEEPSEEK_V4, "vLLM's DeepSeek-V4", logger):
        _register_model("deepseek_v4", "DeepseekV4ForCausalLM")
    if mode == "override" and meets(folder, DEEPSEEK_V41, "vLLM's DeepSeek-V4.1", logger):
        _register_model("deepseek_v41", "DeepseekV41ForCausalLM")


def _register_backend(mode: str, folder: Path) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = f"{__name__}.sparse_mla.CupyMLASparseBackend"
    if mode == "custom" and meets(folder, DENSE_MLA, "vLLM's dense MLA", logger):
        path = f"{__name__}.custom.CupyMLABackend"
    for place in PLACES[mode]:
        register_backend(AttentionBackendEnum.__members__.get(place, place), path)


def _register_model(module: str, model: str) -> None:
    """Let vLLM load a model class from our module, which it imports only then."""
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model(model, f"{__name__}.{module}:{model}")


def is_served(package: Path) -> bool:
    """Whether a vLLM has all that the sparse backend needs. If not, a warning says what is missing.

    Args:
        package: the folder of the package `vllm`.
    """
    lacking = missing(package, SPARSE_MLA)
    if lacking:
        more = f"; and {len(lacking) - NAMED} more" if len(lacking) > NAMED else ""
        logger.warning(
            "cupy_mla serves vLLM %s and leaves this one alone, nothing is registered. Missing: %s%s",
            SERVED, "; ".join(lacking[:NAMED]), more,
        )  # fmt: skip
    return not lacking
