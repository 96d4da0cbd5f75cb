"""The backend for vLLM 0.33, whose sparse MLA backends share their metadata and all but the attention itself.

Ours are the cache write and the attention, over FP8 and bf16 caches and for any number of heads. Index conversion and
the indexer stay vLLM's, and so does the dense attention that it gives to prefills of at most topk tokens. Prefills over
an FP8 cache go to the decode kernel, which reads FP8 rows in place. Decodes of short contexts attend over all rows,
without lists, where that is faster (`short.py`).
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.functional import pad
from vllm.model_executor.layers.attention import sparse_mla_attention as common
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

from ...backends.sparse_mla import SparseMLABackend
from ...layouts import BF16_512, BF16_576, V32_FP8
from ...ops.attention import sparse_decode, sparse_prefill
from ...ops.gather import concat_mla_q
from . import cache_write, short

if TYPE_CHECKING:
    from ..untyped import Untyped as StockBackend
    from ..untyped import Untyped as StockBuilder
    from ..untyped import Untyped as StockImpl
else:
    StockBackend = FlashMLASparseBackend
    StockBuilder = common.SparseMLACommonMetadataBuilder
    StockImpl = common.SparseMLACommonImpl


PAGE = 64  # most rows of a page, as vLLM's FP8 caches have them


class CupyMLASparseBackend(StockBackend):
    """Its name stays FLASHMLA_SPARSE: by that name vLLM knows that `fp8` means `fp8_ds_mla`."""

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
        return SparseMLABackend.supports_compute_capability(capability.major, capability.minor)


class CupyMLASparseBuilder(StockBuilder):
    """The metadata that all of vLLM's sparse MLA backends have, and the decodes that take no lists."""

    _stock_build: Any = common.SparseMLACommonMetadataBuilder.build
    metadata_cls: Any = common.SparseMLACommonMetadata
    _cudagraph_support: Any = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        built = self._stock_build(common_prefix_len, common_attn_metadata, fast_build)
        config = self.vllm_config
        # A rank of several has a part of the rows; HiSparse has them elsewhere.
        if self.dcp_world_size == 1 and not self.use_pcp and config.attention_config.hisparse_config is None:
            layout = BF16_576 if self.mla_dims.qk_rope_head_dim else BF16_512
            if self.kv_cache_spec.cache_dtype_str == "fp8_ds_mla":
                layout = V32_FP8
            heads = self.model_config.get_num_attention_heads(config.parallel_config)
            setattr(built, short.NAME, short.dense_decodes(self, common_attn_metadata, layout, heads))
        return built


class CupyMLASparseImpl(StockImpl):
    """One layer's attention.

    Args:
        sinks: [heads of this rank] float32 attention sinks of models that have them (HY-V4). Such layers do without
            context parallelism, whose merge of ranks would count them once a rank, and without dense prefills, which
            would leave them out.
    """

    _stock_forward_mqa: Any = common.SparseMLACommonImpl.forward_mqa
    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    lse_base_on_e: bool = True

    def __init__(self, *args: Any, sinks: torch.Tensor | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sinks: torch.Tensor | None = sinks
        self.fp8: bool = self.kv_cache_dtype == "fp8_ds_mla"
        if (self.fp8 and self.qk_rope_head_dim == 0) or sinks is not None:
            # Without RoPE its workspace is narrower than the rows of such a cache.
            self.supports_dense_mha_prefill: bool = False
        if sinks is not None:
            self.supports_dcp = False

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
        cache_write.write(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dense = short.dense_decodes_of(attn_metadata)
        if dense is None:
            return self._stock_forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        query = _whole(q, BF16_576.d_qk if self.fp8 else kv_c_and_k_pe_cache.shape[-1])
        return short.attend(query, kv_c_and_k_pe_cache, dense, self.scale, self.sinks), None

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
        """Attention over the first `valid_counts` of each token's rows; they count from the cache's first row."""
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        query = _whole(q, BF16_576.d_qk if self.fp8 else rows.shape[-1])
        if self.fp8 or is_decode:
            pages = rows.view(-1, gcd(len(rows), PAGE), rows.shape[-1])  # of a power of two, which saves divisions
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
        return out, lse.masked_fill(lse == torch.inf, -torch.inf)  # of a rank without a row, for vLLM's merge


def _whole(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], width: int) -> torch.Tensor:
    """The query in one piece, with zeros for the RoPE part of cache rows that a model without RoPE leaves empty."""
    if not isinstance(q, tuple):
        whole = q
    elif q[1].shape[-1]:
        nope, rope = q
        whole = nope.new_empty((*nope.shape[:2], nope.shape[-1] + rope.shape[-1]))
        concat_mla_q(nope, rope, whole)
    else:
        whole = q[0].contiguous()
    missing = width - whole.shape[-1]
    return pad(whole, (0, missing)) if missing else whole
