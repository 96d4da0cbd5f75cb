"""The sparse backend for vLLM. vLLM's sparse MLA backends share everything but the attention itself.

Ours are

- the attention, over FP8 and bf16 caches, for any number of heads. Prefills over an FP8 cache run as `sparse_decode`,
  which reads FP8 rows in place. Decodes of short contexts attend over all rows, without lists, if that is faster
  (`short.py`);
- in DeepSeek-V3.2 and GLM-5 the choice of rows (`indexer.py`);
- the cache write, where vLLM leaves it to the backend: in GLM-5.3-Flash and under prefill context parallelism. Layers
  of DeepSeek-V3.2 write rows by a fused kernel of vLLM's.

vLLM's own remain the conversion of positions to slots, once for the layers that share an indexer, and the dense
attention of prefills of at most topk tokens.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.layers.attention import sparse_mla_attention as common
from vllm.v1.attention.backend import AttentionCGSupport, max_decode_query_len
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view, triton_filter_and_convert_dcp_index

from ...backends.sparse_mla import SparseMLABackend
from ...layouts import BF16_512, BF16_576, V32_FP8
from ...ops.attention import sparse_decode, sparse_prefill
from ...ops.cache import concat_and_cache_mla
from ...typing import CacheLayout
from . import indexer, short, warm
from .query import whole

if TYPE_CHECKING:
    from ..untyped import Untyped as StockBackend
    from ..untyped import Untyped as StockBuilder
    from ..untyped import Untyped as StockImpl
else:
    StockBackend = FlashMLASparseBackend
    StockBuilder = common.SparseMLACommonMetadataBuilder
    StockImpl = common.SparseMLACommonImpl

WRITTEN = ("auto", "bfloat16", "fp8_ds_mla")  # cache types that `do_kv_cache_update` can write


class CupyMLASparseBackend(StockBackend):
    """The backend. Its name stays FLASHMLA_SPARSE: for that name vLLM takes `fp8` as `fp8_ds_mla`."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "fp8_ds_mla", "fp8"]

    @staticmethod
    def get_builder_cls() -> type[CupyMLASparseBuilder]:
        return CupyMLASparseBuilder

    @staticmethod
    def get_impl_cls() -> type[CupyMLASparseImpl]:
        return CupyMLASparseImpl

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether attention runs. `supports_combination` and `indexer.adopt` check what else a layer needs."""
        return SparseMLABackend.supports_compute_capability(capability.major, capability.minor)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why a layer cannot be served; None if it can."""
        if head_size == 512 and device_capability.major not in indexer.DEEP_GEMM:
            major, minor = device_capability.major, device_capability.minor
            return (
                "models without RoPE have an indexer of vLLM's, which needs DeepGEMM: it has kernels for compute "
                f"capability 9.0, 10.x and 12.x; this GPU has {major}.{minor}"
            )
        config = get_current_vllm_config_or_none()
        if config is not None and config.attention_config.hisparse_config is not None:
            return "HiSparse not supported: it has rows outside of the cache"
        model = None if config is None else config.model_config
        if head_size == 512 and model is not None and getattr(model.hf_text_config, "qk_rope_head_dim", 64) != 0:
            return "head size 512 is served for models without RoPE alone"
        return None

    @classmethod
    def validate_configuration(
        cls, *layer: Any, use_pcp: bool = False, use_dcp: bool = False, **more: Any
    ) -> list[str]:
        """All reasons why a layer cannot be served."""
        stock: Any = super()
        reasons: list[str] = stock.validate_configuration(*layer, use_pcp=use_pcp, use_dcp=use_dcp, **more)
        if use_pcp and use_dcp:
            reasons.append(
                "prefill together with decode context parallelism not supported: a rank would attend prefills over its "
                "own rows alone"
            )
        return reasons


class CupyMLASparseBuilder(StockBuilder):
    """The metadata builder of vLLM's sparse MLA backends. It adds the decodes that need no lists.

    Requests of few query tokens count as decodes, up to the same numbers as in vLLM's own backends on Hopper.
    `sparse_decode` serves them as well. If one counted as a prefill, the decodes beside it would run as
    `sparse_prefill`, too.
    """

    _stock_build: Any = common.SparseMLACommonMetadataBuilder.build
    metadata_cls: Any = common.SparseMLACommonMetadata
    _cudagraph_support: Any = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parallel = self.vllm_config.parallel_config
        self.heads: int = self.model_config.get_num_attention_heads(parallel)
        self._init_reorder_batch_threshold(
            128 if self.heads in (16, 32) else 256,
            supports_spec_as_decode=True,
            supports_dcp_with_varlen=parallel.cp_kv_cache_interleave_size == 1,
        )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        built = self._stock_build(common_prefix_len, common_attn_metadata, fast_build)
        config = self.vllm_config
        if self.dcp_world_size == 1 and not self.use_pcp:  # with several ranks each has a part of the rows
            layout = BF16_576 if self.mla_dims.qk_rope_head_dim else BF16_512
            if self.kv_cache_spec.cache_dtype_str == "fp8_ds_mla":
                layout = V32_FP8
            longest = max_decode_query_len(config)
            dense = short.dense_decodes(self, common_attn_metadata, layout, self.heads, longest)
            setattr(built, short.NAME, dense)
        return built


class CupyMLASparseImpl(StockImpl):
    """One layer's attention.

    Args:
        sinks: [heads of this rank] float32 attention sinks, in models that have them (HY-V4). Such layers have no
            context parallelism, whose merge would count the sinks once for each rank, and no dense prefills, which
            would ignore them.
    """

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    lse_base_on_e: bool = True

    def __init__(self, *args: Any, sinks: torch.Tensor | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sinks: torch.Tensor | None = sinks
        self.fp8: bool = self.kv_cache_dtype == "fp8_ds_mla"
        if (self.fp8 and self.qk_rope_head_dim == 0) or sinks is not None:
            # Without RoPE vLLM's workspace for dense prefills is narrower than the rows of an FP8 cache.
            self.supports_dense_mha_prefill: bool = False
        if sinks is not None:
            self.supports_dcp = False
            if self.dcp_world_size > 1:
                raise NotImplementedError("attention sinks with decode context parallelism")
        self.vllm_config: Any = get_current_vllm_config()
        self._profiled: bool = False  # whether vLLM's profiling run has come by
        if kwargs.get("indexer") is not None:
            indexer.adopt(kwargs["indexer"])

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Compile kernels: vLLM calls this for each layer after it has loaded the weights, and before it measures free
        memory."""
        layout: CacheLayout = "v32_fp8" if self.fp8 else "bf16"
        lists = self.topk_indices_buffer
        layers = warm.layers_of(
            self.vllm_config, self.num_heads * self.dcp_world_size, lists.shape[1], layout,
            rope=self.qk_rope_head_dim > 0,
        )  # fmt: skip
        warm.up([layers], lists.device)

    def prepare_for_batch(self, attn_metadata: Any) -> None:
        """DeepSeek-V3.2's and GLM-5's layers call this before a step. The first one without metadata is vLLM's
        profiling run; vLLM may have others later, as to capture graphs."""
        stock: Any = super()
        stock.prepare_for_batch(attn_metadata)
        if attn_metadata is None and not self._profiled and not short.captured():
            self._profiled = True
            self.reserve_workspace()

    def reserve_workspace(self) -> None:
        """Allocate and free what the largest batch needs in a layer, from the query to the result. In vLLM's profiling
        run, in which attention does not run, this makes the memory count."""
        shape = self.vllm_config.scheduler_config.max_num_batched_tokens, self.num_heads * self.dcp_world_size
        parts = self.qk_head_dim, BF16_576.d_qk  # before and after the product with W_UK
        whole, result = BF16_576.d_qk, BF16_512.d_qk
        device = self.topk_indices_buffer.device
        _ = [torch.empty((*shape, n), dtype=torch.bfloat16, device=device) for n in (*parts, whole, result)]

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write a step's rows into the cache. In a profiling run, without a cache, it does nothing.

        Raises:
            ValueError: our operation cannot write a cache of this type.
        """
        if kv_cache.numel() == 0:
            return
        if kv_cache_dtype not in WRITTEN:
            raise ValueError(f"kv_cache_dtype: expected one of {WRITTEN}, got {kv_cache_dtype!r}")
        concat_and_cache_mla(kv_c_normed, k_pe, kv_cache, slot_mapping.flatten())

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention [T, h, 512] of a step; and lse [T, h] where ranks have parts of the rows, else None."""
        cache, step = kv_c_and_k_pe_cache, attn_metadata
        dense = short.dense_decodes_of(step)
        if dense is not None:
            query = whole(q, BF16_576.d_qk if self.fp8 else cache.shape[-1])
            return short.attend(query, cache, dense, self.scale, self.sinks), None
        tokens = len(q[0] if isinstance(q, tuple) else q)
        lists, (_, stride) = self.topk_indices_buffer[:tokens], flat_kv_row_view(cache, step.block_size)
        if self.dcp_world_size > 1:
            slots, counts = triton_filter_and_convert_dcp_index(
                step.req_id_per_token[:tokens], step.block_table, lists, self.dcp_world_size, self.dcp_rank,
                step.cp_kv_cache_interleave_size, step.block_size, stride, lists.shape[1], return_valid_counts=True,
            )  # fmt: skip
        else:  # once for the layers that share an indexer
            slots, counts = self._convert_logical_to_physical_topk(
                lists, step, block_stride_rows=stride, return_valid_counts=True
            )
        return self._forward_mqa_kernel(
            q, cache, slots, counts, layer=layer, block_size=step.block_size,
            is_decode=step.num_decode_tokens >= tokens,
        )  # fmt: skip

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over the first `valid_counts` entries of each token's list `topk_indices` of slots."""
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        query = whole(q, BF16_576.d_qk if self.fp8 else rows.shape[-1])
        if self.fp8 or is_decode:
            pages = rows.view(-1, gcd(len(rows), warm.PAGE), rows.shape[-1])  # blocks of a power of two save divisions
            out, lse = sparse_decode(
                query[:, None], pages, topk_indices[:, None], self.scale, attn_sink=self.sinks, topk_length=valid_counts
            )
            out, lse = out[:, 0], lse[..., 0]
        else:
            out, _, lse = sparse_prefill(
                query, rows[:, None], topk_indices[:, None], self.scale, attn_sink=self.sinks, topk_length=valid_counts
            )
        if not self.need_to_return_lse_for_decode:
            return out, None
        # In vLLM's merge a rank without a row counts for nothing.
        return out, lse.masked_fill(lse == torch.inf, -torch.inf)
