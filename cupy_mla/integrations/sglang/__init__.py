"""The plug-in for SGLang: models of the DeepSeek-V3.2 kind on this package's attention and indexer, and the decodes of
DeepSeek-V4 and V4.1.

SGLang calls `register` in each of its processes: setup.cfg names it in the entry-point group `sglang.srt.plugins`.
With `CUPY_MLA_SGLANG=override` this package replaces, by SGLang's own hooks,

- the attention of `flashmla_sparse` and `flashmla_kv`, which `--dsa-prefill-backend` and `--dsa-decode-backend` select
  (`attention.py`);
- where one of these is selected, the indexer's logits and top-k (`indexer.py`);
- in DeepSeek-V4 and V4.1, attention over the paged caches (`deepseek_v4.py`).

Unset, or with `off`, nothing changes. Neither does anything in an SGLang that lacks a name on which this module relies:
one warning then says what is missing. SGLang's sources are read for that, not imported.
"""

from __future__ import annotations

import logging
import os

from ...checks.options import require_choice
from ..contract import Needs, meets, sources

MODES = ("off", "override")
BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer"
V4_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend"

# What `attention` and `indexer` need of SGLang.
NEEDS: Needs = {
    "srt.plugins.hook_registry": (
        "HookRegistry.register(cls, target, hook, hook_type)",
        "HookType.AFTER",
        "HookType.AROUND",
        "HookType.REPLACE",
    ),
    "srt.layers.attention.dsa_backend": (
        "DeepseekSparseAttnBackend._forward_flashmla_sparse"
        "(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length, attn_sink)",
        "DeepseekSparseAttnBackend._forward_flashmla_kv"
        "(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1)",
        "DeepseekSparseAttnBackend.__init__(self, model_runner)",
        "DeepseekSparseAttnBackend.device",
        "DeepseekSparseAttnBackend.dsa_decode_impl",
        "DeepseekSparseAttnBackend.dsa_index_topk",
        "DeepseekSparseAttnBackend.dsa_prefill_impl",
        "DeepseekSparseAttnBackend.kv_cache_dim",
        "DeepseekSparseAttnBackend.max_context_len",
        "DeepseekSparseAttnBackend.num_q_heads",
        "DeepseekSparseAttnBackend.physical_page_size",
        "DeepseekSparseAttnBackend.qk_rope_head_dim",
        "DSAMetadata.page_size",
        "DSAMetadata.topk_indices_offset",
    ),
    "srt.layers.attention.dsa.dsa_indexer": (
        "Indexer._get_topk_paged(self, forward_batch, layer_id, q_fp8, weights, metadata)",
        "Indexer._get_topk_ragged"
        "(self, enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata, topk_result)",
        "Indexer._get_index_k_read_buffer(pool, layer_id)",
        "Indexer._get_mqa_logits_budget_bytes(self, device_index)",
        "Indexer.dsa_enable_prefill_cp",
        "Indexer.index_topk",
        "Indexer.n_heads",
        "Indexer.num_init_tokens",
        "Indexer.num_local_tokens",
    ),
    "srt.layers.attention.dsa.dsa_indexer_metadata": (
        "DSAIndexerMetadata.attn_metadata",
        "DSAIndexerMetadata.force_unfused_topk",
        "DSAIndexerMetadata.get_dsa_extend_len_cpu(self)",
        "DSAIndexerMetadata.get_indexer_kvcache_range(self)",
        "DSAIndexerMetadata.get_indexer_seq_len(self)",
        "DSAIndexerMetadata.get_indexer_seq_len_cpu(self)",
        "DSAIndexerMetadata.get_logical_page_table(self)",
        "DSAIndexerMetadata.get_page_table_64(self)",
        "DSAIndexerMetadata.get_seqlens_expanded(self)",
        "DSAIndexerMetadata.get_seqlens_int32(self)",
        "DSAIndexerMetadata.get_token_to_batch_idx(self)",
        "DSAIndexerMetadata.topk_transform_method",
    ),
    "srt.layers.attention.dsa.dsa_topk_backend": ("TopkTransformMethod.PAGED", "TopkTransformMethod.RAGGED"),
    "srt.layers.radix_attention": ("RadixAttention.head_dim", "RadixAttention.tp_q_head_num"),
    "srt.model_executor.forward_batch_info": ("ForwardMode.is_target_verify(self)",),
    "srt.model_executor.forward_context": ("get_token_to_kv_pool()",),
    "srt.mem_cache.memory_pool": (
        "DSATokenToKVPool.get_index_k_scale_buffer"
        "(self, layer_id, seq_len_tensor, page_indices, seq_len_sum, max_seq_len)",
        "DSATokenToKVPool.index_page_size",
    ),
    "srt.runtime_context": ("get_exec()",),
}
# What `deepseek_v4` needs beyond that.
V4_NEEDS: Needs = {
    "srt.layers.attention.deepseek_v4_backend": (
        "DeepseekV4AttnBackend.__init__(self, model_runner)",
        "DeepseekV4AttnBackend._flash_mla_with_kvcache",
        "DeepseekV4AttnBackend.device",
        "DeepseekV4AttnBackend.index_topk",
        "DeepseekV4AttnBackend.is_dsv41",
        "DeepseekV4AttnBackend.max_context_len",
        "DeepseekV4AttnBackend.mega_attn",
        "DeepseekV4AttnBackend.model_runner",
        "DeepseekV4AttnBackend.present_ratios",
        "DeepseekV4AttnBackend.token_to_kv_pool",
        "DeepseekV4AttnBackend.trtllm_attn",
    ),
    "srt.mem_cache.deepseek_v4_memory_pool": (
        "DeepSeekV4TokenToKVPool.compressed_kv_layout(self, compress_ratio)",
        "DeepSeekV4TokenToKVPool.get_swa_key_layout(self)",
        "DeepSeekV4TokenToKVPool.sliding_window",
    ),
    "kernels.ops.attention.dsv4.kv_layout": (
        "KVLayout.V4",
        "KVLayout.V41",
        "KVLayout.V41_NEW",
        "KVLayout.is_fp4(self)",
    ),
    "srt.runtime_context": ("get_parallel()", "get_platform()"),
}

logger: logging.Logger = logging.getLogger(__name__)


def register() -> None:
    """Hook this process's SGLang, if `CUPY_MLA_SGLANG` says so.

    Raises:
        ValueError: `CUPY_MLA_SGLANG` is neither "off" nor "override".
    """
    mode = os.environ.get("CUPY_MLA_SGLANG") or "off"
    require_choice("CUPY_MLA_SGLANG", mode, MODES)
    if mode == "off":
        return
    package = sources("sglang")
    if not meets(package, NEEDS, "SGLang", logger):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import attention, deepseek_v4, indexer

    hooks = [
        (f"{BACKEND}._forward_flashmla_sparse", attention.forward_flashmla_sparse, HookType.REPLACE),
        (f"{BACKEND}._forward_flashmla_kv", attention.forward_flashmla_kv, HookType.AROUND),
        (f"{BACKEND}.__init__", attention.warm_up, HookType.AFTER),
        (f"{INDEXER}._get_topk_paged", indexer.get_topk_paged, HookType.AROUND),
        (f"{INDEXER}._get_topk_ragged", indexer.get_topk_ragged, HookType.AROUND),
    ]
    if meets(package, V4_NEEDS, "SGLang's DeepSeek-V4", logger):
        hooks.append((f"{V4_BACKEND}.__init__", deepseek_v4.replace, HookType.AFTER))
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)
