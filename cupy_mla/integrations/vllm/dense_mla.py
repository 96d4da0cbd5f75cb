"""vLLM's backend for models without an indexer (DeepSeek-V3 and R1, Kimi K2).

Decodes run on our dense attention, over bf16 caches and FP8 caches with one scale, with blocks of any size. The cache
write, prefills and metadata stay vLLM's. With speculative decoding, the query tokens of a request share its rows.
Lengths are read on the device, so full CUDA graphs can hold decodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.attention import mla_attention as common
from vllm.v1.attention.backend import AttentionCGSupport

from ...backends.sparse_mla import SparseMLABackend
from ...cuda.program import Plan
from ...ops.dense import planned_dense_decode
from . import warm
from .query import whole

if TYPE_CHECKING:
    from ..untyped import Untyped as StockBackend
    from ..untyped import Untyped as StockBuilder
    from ..untyped import Untyped as StockImpl
else:
    StockBackend = common.MLACommonBackend
    StockBuilder = common.MLACommonMetadataBuilder
    StockImpl = common.MLACommonImpl


class CupyMLADenseBackend(StockBackend):
    """What vLLM wants to know before it chooses the backend for a layer."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_builder_cls() -> type[CupyMLADenseBuilder]:
        return CupyMLADenseBuilder

    @staticmethod
    def get_impl_cls() -> type[CupyMLADenseImpl]:
        return CupyMLADenseImpl

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return SparseMLABackend.supports_compute_capability(capability.major, capability.minor)


class CupyMLADenseBuilder(StockBuilder):
    """vLLM's metadata builder. All decodes of a batch have the same number of query tokens."""

    _cudagraph_support: Any = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: Any = common.QueryLenSupport.UNIFORM

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM creates builders before it captures graphs. Ranks that share rows attend with the heads of all of them.
        heads, fp8 = self.num_heads * self.dcp_world_size, self.kv_cache_spec.dtype.itemsize == 1
        warm.up([warm.dense_layers_of(self.vllm_config, heads, fp8)], self.device)


class CupyMLADenseImpl(StockImpl):
    """One layer's attention of decodes."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    lse_base_on_e: bool = True

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention [T, h, 512] of decode tokens; and lse [T, h] where ranks have parts of the rows, else None."""
        cache, decode = kv_c_and_k_pe_cache, attn_metadata.decode
        q = whole(q, cache.shape[-1])
        scales = {}
        if cache.dtype == torch.float8_e4m3fn:
            scales["k_scale"] = layer._k_scale
            if q.dtype == torch.float8_e4m3fn:
                scales["q_scale"] = layer._q_scale
        plan = vars(attn_metadata).setdefault("cupy_mla_plan", Plan())  # all layers of a step share it
        out, lse = planned_dense_decode(
            q.view(attn_metadata.num_decodes, -1, *q.shape[1:]), cache, decode.block_table, decode.seq_lens, self.scale,
            plan, **scales,
        )  # fmt: skip
        if not self.need_to_return_lse_for_decode:
            return out.flatten(0, 1), None
        lse = lse.transpose(1, 2).flatten(0, 1)
        # In vLLM's merge a rank without a row counts for nothing.
        return out.flatten(0, 1), lse.masked_fill(lse == torch.inf, -torch.inf)
