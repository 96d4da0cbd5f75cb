"""DeepSeek-V4.1 in vLLM on our attention and index operations, as DeepSeek-V4 in `deepseek_v4`.

Layers read the compressed rows of the last layer before them that has some, and attend the rows that the last indexer
before them chose. On GPUs other than compute capability 10.x vLLM stores V4's rows, of 584 bytes, and FP8 keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM
from vllm.models.deepseek_v41 import attention as stock_layers
from vllm.models.deepseek_v41.nvidia import flashmla as stock
from vllm.models.deepseek_v41.nvidia import model as layers

from ...typing import ModelKind
from .v4_layers import V4Attention

if TYPE_CHECKING:
    from ..untyped import Untyped as StockAttention
else:
    StockAttention = stock.DeepseekV4FlashMLAAttention

__all__ = ["CupyMLADeepseekV41Attention", "DeepseekV41ForCausalLM"]

stock_attention_of: Any = layers._select_dsv4_attn_cls


class CupyMLADeepseekV41Attention(V4Attention, StockAttention):
    """vLLM's attention layer with our attention and choice of rows."""

    model: ModelKind = "v41"

    def compressed(self, step: dict[str, Any]) -> tuple[Any, Any]:
        if self.compress_ratio == 0:
            return None, None
        return step[self.compressed_cache_prefix], self._compressed_kv_cache()


def attention_of(vllm_config: Any) -> Any:
    """The class of V4.1's attention layers: ours in the place of FlashMLA's, else what vLLM says. vLLM's stays under
    prefill context parallelism, and where it stores V4.1's own rows, of 528 bytes."""
    chosen = stock_attention_of(vllm_config)
    apart = vllm_config.parallel_config.prefill_context_parallel_size > 1
    if chosen is not stock.DeepseekV4FlashMLAAttention or apart or stock_layers._use_v41_mxfp8_kv_record():
        return chosen
    return CupyMLADeepseekV41Attention


layers._select_dsv4_attn_cls = attention_of
