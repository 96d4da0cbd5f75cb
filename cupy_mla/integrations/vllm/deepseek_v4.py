"""DeepSeek-V4 in vLLM on our attention and index operations.

vLLM's V4 layers have no choice of backend: a function of their module says which class their attention has. When this
module is imported, that name is bound to ours, which answers with our class where vLLM would take FlashMLA's. vLLM's
model registry takes V4's model class from here, so that happens only if a V4 model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM
from vllm.models.deepseek_v4.nvidia import flashmla as stock
from vllm.models.deepseek_v4.nvidia import model as layers

from ...typing import ModelKind
from .v4_layers import V4Attention

if TYPE_CHECKING:
    from ..untyped import Untyped as StockAttention
else:
    StockAttention = stock.DeepseekV4FlashMLAAttention

__all__ = ["CupyMLADeepseekV4Attention", "DeepseekV4ForCausalLM"]

stock_attention_of: Any = layers._select_dsv4_attn_cls


class CupyMLADeepseekV4Attention(V4Attention, StockAttention):
    """vLLM's attention layer with our attention and choice of rows."""

    model: ModelKind = "v4"

    def compressed(self, step: dict[str, Any]) -> tuple[Any, Any]:
        return step.get(self.prefix), self.kv_cache


def attention_of(vllm_config: Any) -> Any:
    """The class of V4's attention layers: ours in the place of FlashMLA's, else what vLLM says."""
    chosen = stock_attention_of(vllm_config)
    return CupyMLADeepseekV4Attention if chosen is stock.DeepseekV4FlashMLAAttention else chosen


layers._select_dsv4_attn_cls = attention_of
