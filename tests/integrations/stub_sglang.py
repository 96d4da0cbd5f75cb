"""Stand-ins of what the plug-in needs of SGLang 0.5.23, as a package `sglang` that can be imported. Their methods
return what tells that SGLang's own code would have run."""

from __future__ import annotations

from pathlib import Path

from .stub_vllm import write_package

FILES = {
    "srt/plugins/hook_registry": """
        from enum import Enum

        class HookType(Enum):
            AFTER = "after"
            AROUND = "around"
            REPLACE = "replace"

        class HookRegistry:
            hooks = {}

            @classmethod
            def register(cls, target, hook, hook_type=None, *, source=None):
                cls.hooks[target.removeprefix("sglang.srt.layers.attention.")] = hook, hook_type.name
        """,
    "srt/layers/attention/dsa_backend": """
        class DSAMetadata:
            page_size: int
            topk_indices_offset: object = None

        class DeepseekSparseAttnBackend:
            def __init__(self, model_runner, skip_prefill=False):
                self.device, self.num_q_heads, self.dsa_index_topk = model_runner.device, 64, 2048
                self.physical_page_size, self.max_context_len, self.qk_rope_head_dim = 64, 9000, model_runner.rope
                self.kv_cache_dim = model_runner.kv_cache_dim
                self.dsa_prefill_impl, self.dsa_decode_impl = model_runner.impls

            def _forward_flashmla_sparse(
                self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length=None, attn_sink=None
            ):
                pass

            def _forward_flashmla_kv(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1):
                pass
        """,
    "srt/layers/attention/dsa/dsa_indexer": """
        class Indexer:
            def __init__(self, topk, budget=1 << 40, **more):
                self.index_topk, self.budget, self.n_heads, self.dsa_enable_prefill_cp = topk, budget, 8, False
                self.num_init_tokens = self.num_local_tokens = 0
                vars(self).update(more)

            @staticmethod
            def _get_index_k_read_buffer(pool, layer_id):
                return pool.pages(layer_id)

            def _get_mqa_logits_budget_bytes(self, device_index):
                return self.budget

            def _get_topk_paged(self, forward_batch, layer_id, q_fp8, weights, metadata):
                return "paged by SGLang"

            def _get_topk_ragged(
                self, enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata, topk_result=None
            ):
                return "ragged by SGLang", topk_result
        """,
    "srt/layers/attention/dsa/dsa_indexer_metadata": """
        from dataclasses import dataclass

        @dataclass
        class DSAIndexerMetadata:
            attn_metadata: object
            topk_transform_method: object
            lens: object  # of all that follow, of requests
            extend_lens: list
            seen: object  # of tokens
            table: object  # of tokens in decodes, of requests in prefills
            ranges: object = None
            requests: object = None
            force_unfused_topk: bool = False

            def get_dsa_extend_len_cpu(self):
                return self.extend_lens

            def get_indexer_kvcache_range(self):
                return self.ranges

            def get_indexer_seq_len(self):
                return self.lens

            def get_indexer_seq_len_cpu(self):
                return self.lens

            def get_logical_page_table(self):
                return self.table

            def get_page_table_64(self):
                return self.table

            def get_seqlens_expanded(self):
                return self.seen

            def get_seqlens_int32(self):
                return self.lens

            def get_token_to_batch_idx(self):
                return self.requests
        """,
    "srt/layers/attention/dsa/dsa_topk_backend": """
        from enum import IntEnum, auto

        class TopkTransformMethod(IntEnum):
            PAGED = auto()
            RAGGED = auto()
        """,
    "srt/layers/attention/deepseek_v4_backend": """
        class DeepseekV4AttnBackend:
            trtllm_attn: bool = False
            mega_attn: bool = False

            def __init__(self, model_runner, skip_prefill=False):
                self.model_runner, self.device = model_runner, model_runner.device
                self.token_to_kv_pool, self.max_context_len = model_runner.token_to_kv_pool, 9000
                self._flash_mla_with_kvcache = "FlashMLA's"
                self.present_ratios, self.index_topk, self.is_dsv41 = model_runner.ratios, 512, model_runner.is_dsv41
        """,
    "srt/mem_cache/deepseek_v4_memory_pool": """
        class DeepSeekV4TokenToKVPool:
            def __init__(self, layout, layouts):
                self.sliding_window, self.kv_layout, self.layouts = 128, layout, layouts

            def compressed_kv_layout(self, compress_ratio):
                return self.layouts[compress_ratio]

            def get_swa_key_layout(self):
                return self.kv_layout
        """,
    "kernels/ops/attention/dsv4/kv_layout": """
        from enum import Enum

        class KVLayout(str, Enum):
            V4 = "v4"
            V41 = "v41"
            V41_NEW = "v41_new"
            V41_FP4 = "v41_fp4"
            V41_FP4_NEW = "v41_fp4_new"
            UNIFORM_FP8 = "uniform_fp8"

            @property
            def is_fp4(self):
                return "FP4" in self.name
        """,
    "srt/mem_cache/memory_pool": """
        class DSATokenToKVPool:
            index_page_size = 64

            def __init__(self, keys):
                self.keys = keys  # [pages, 64, 132]

            def pages(self, layer_id):
                return self.keys.view(len(self.keys), -1)

            def get_index_k_scale_buffer(self, layer_id, seq_len_tensor, page_indices, seq_len_sum, max_seq_len):
                import torch

                assert (seq_len_sum, max_seq_len) == (int(seq_len_tensor.sum()), int(seq_len_tensor.max()))
                pages, keys, scales = self.pages(layer_id), [], []
                for length, table in zip(seq_len_tensor.tolist(), page_indices):
                    rows = pages[table.long()]
                    keys.append(rows[:, : 64 * 128].reshape(-1, 128)[:length])
                    scales.append(rows[:, 64 * 128 :].reshape(-1, 4)[:length])
                return torch.cat(keys), torch.cat(scales)
        """,
    "srt/layers/radix_attention": """
        class RadixAttention:
            tp_q_head_num: int
            head_dim: int
        """,
    "srt/model_executor/forward_batch_info": """
        class ForwardMode:
            def is_target_verify(self):
                raise NotImplementedError
        """,
    "srt/model_executor/forward_context": """
        pool = None

        def get_token_to_kv_pool():
            return pool
        """,
    "srt/runtime_context": """
        from types import SimpleNamespace

        kernel = SimpleNamespace(dsa_prefill_backend="flashmla_sparse", dsa_decode_backend="fa3")
        parallel = SimpleNamespace(attn_tp_size=1)
        platform = SimpleNamespace(is_sm120=False)

        def get_exec():
            return SimpleNamespace(kernel=kernel)

        def get_parallel():
            return parallel

        def get_platform():
            return platform
        """,
}


def write(folder: Path) -> Path:
    """Write the stand-ins into a folder; that of the package."""
    package = write_package(folder / "sglang", FILES)
    for path in (package, *package.rglob("*")):
        if path.is_dir():
            (path / "__init__.py").touch()
    return package
