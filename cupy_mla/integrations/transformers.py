"""DeepSeek-V3.2 in Hugging Face transformers on paged latent caches and sparse attention::

    cache = PagedLatentCache(model.config, block_table, layout="v32_fp8")
    with sparse_attention(model):
        model(input_ids, past_key_values=cache, use_cache=True)       # prefill, and then token after token

transformers' own attention expands every cached row into a key and a value a head and masks what the indexer did not
choose. Here the weights are absorbed, the cache holds one latent row a token in blocks, and only the chosen rows are
read. Projections, norms, RoPE and the indexer stay the model's own.

Written against transformers 5.17 and 5.18.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicIndexedLayer
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek

from .. import layouts
from ..flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from ..layouts import Layout
from ..ops.absorb import absorb_q, split_kv_b_proj, v_up_proj
from ..ops.cache import concat_and_cache_mla


class PagedLatentLayer(DynamicIndexedLayer):
    """One layer's share of a `PagedLatentCache`; its indexer's keys are cached as transformers does it.

    Attributes:
        kv_cache: [num_blocks, block_size, 1, 576] bfloat16 or [num_blocks, block_size, 1, 656] uint8.
        length: tokens cached so far, the same for every request.
    """

    is_croppable = False

    def __init__(self, layout: Layout, block_table: torch.Tensor, num_blocks: int, block_size: int) -> None:
        super().__init__()
        dtype = torch.uint8 if layout.quantized else torch.bfloat16
        shape = (num_blocks, block_size, 1, layout.last_axis)
        self.kv_cache: torch.Tensor = torch.empty(shape, dtype=dtype, device=block_table.device)
        self.block_table = block_table
        self.length: int = 0

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens lie in the cache: int64 slots of request-local positions [R, n]."""
        block_size = self.kv_cache.shape[1]
        return self.block_table.gather(1, positions // block_size) * block_size + positions % block_size

    def update(self, kv_c: torch.Tensor, k_pe: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Pack the next n tokens of every request: latent rows kv_c [R, n, 512] and RoPE parts k_pe [R, n, 64]."""
        requests, new = kv_c.shape[:2]
        stop = self.length + new
        if stop > self.get_max_length():
            raise ValueError(f"block_table: has room for {self.get_max_length()} tokens a request, got {stop}")
        slots = self.slots(torch.arange(self.length, stop, device=kv_c.device).expand(requests, new))
        concat_and_cache_mla(kv_c.flatten(0, 1), k_pe.flatten(0, 1), self.kv_cache, slots.flatten())
        self.length = stop
        return self.kv_cache, self.block_table

    def reset(self) -> None:
        """Forget all tokens; the blocks stay as they are and will be written over."""
        self.length = 0
        self.indexer_keys: Any = None  # dropped, since they grow by concatenation (transformers 5.17 keeps them)
        self.is_indexer_initialized = False

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.block_table.shape[1] * self.kv_cache.shape[1]


class PagedLatentCache(Cache):
    """A model's paged latent cache, one `PagedLatentLayer` a layer, for `past_key_values`.

    Args:
        config: the model's configuration.
        block_table: [R, M] int64, the blocks of each request in order, on the model's device.
        num_blocks: blocks the cache has; default: one more than the largest in `block_table`.
        block_size: tokens a block.
        layout: "bf16" or "v32_fp8".
    """

    def __init__(
        self,
        config: Any,
        block_table: torch.Tensor,
        *,
        num_blocks: int | None = None,
        block_size: int = 64,
        layout: str = "bf16",
    ) -> None:
        d_qk = config.kv_lora_rank + config.qk_rope_head_dim
        blocks = int(block_table.max()) + 1 if num_blocks is None else num_blocks
        super().__init__(
            layers=[
                PagedLatentLayer(layouts.by_name(layout, d_qk), block_table, blocks, block_size)
                for _ in range(config.num_hidden_layers)
            ]
        )
        self.schedules: dict[torch.Size, FlashMLASchedMeta] = {}

    def schedule(self, indices: torch.Tensor) -> FlashMLASchedMeta:
        """The decode schedule for index lists of this shape, which all layers share."""
        return self.schedules.setdefault(indices.shape, get_mla_metadata()[0])


@contextmanager
def sparse_attention(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """While the context lasts, every attention layer of a `DeepseekV32ForCausalLM` runs on this package.

    For inference only, with weights in bfloat16 and `past_key_values=PagedLatentCache(...)` at every call.
    """
    layers = [m for m in model.modules() if isinstance(m, deepseek.DeepseekV32Attention)]
    if not layers:
        raise ValueError(f"model: expected one with DeepseekV32Attention layers, got {type(model).__name__}")
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    try:
        yield model
    finally:
        for layer in layers:
            del layer.forward


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    past_key_values: PagedLatentCache,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What `DeepseekV32Attention.forward` computes, on hidden_states [R, n, hidden]."""
    cache: PagedLatentLayer = past_key_values.layers[self.layer_idx]
    requests, new, _ = hidden_states.shape

    # The model's projections, norms and RoPE.
    q_latent = self.q_a_layernorm(self.q_a_proj(hidden_states))
    q = self.q_b_proj(q_latent).view(requests, new, self.num_heads, self.qk_head_dim)
    q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    kv_c, k_pe = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    cos, sin = position_embeddings
    q_pe, k_pe = deepseek.apply_rotary_pos_emb_interleave(q_pe, k_pe.unsqueeze(2), cos, sin, unsqueeze_dim=2)

    # Its new tokens go into the paged cache; its indexer chooses rows for each of them.
    cache.update(self.kv_a_layernorm(kv_c), k_pe.squeeze(2))
    mask = attention_mask[:, 0]
    topk = self.indexer(hidden_states, q_latent, position_embeddings, mask, position_ids, past_key_values).long()
    # Where fewer rows may be seen than topk, the indexer fills up with rows that the mask forbids.
    seen = mask.expand(requests, -1, -1).gather(-1, topk)
    slots = cache.slots(topk.flatten(1)).view_as(topk)
    indices = slots.where(seen if seen.dtype == torch.bool else seen == 0, -1).flatten(0, 1).int()

    # Sparse attention over latent rows, the key and value expansions moved to the query and the output.
    w_uk, w_uv = split_kv_b_proj(self.kv_b_proj.weight.T, self.num_heads, self.qk_nope_head_dim)
    q = torch.cat([absorb_q(q_nope.flatten(0, 1), w_uk), q_pe.flatten(0, 1)], -1)
    if new > 1 and cache.kv_cache.dtype == torch.bfloat16:
        out, _, _ = flash_mla_sparse_fwd(q, cache.kv_cache.flatten(0, 1), indices.unsqueeze(1), self.scaling)
    else:
        indices = indices.unsqueeze(1)
        out, _ = flash_mla_with_kvcache(
            q.unsqueeze(1), cache.kv_cache, None, None, self.kv_lora_rank, past_key_values.schedule(indices),
            softmax_scale=self.scaling, is_fp8_kvcache=cache.kv_cache.dtype == torch.uint8, indices=indices,
        )  # fmt: skip
    heads = v_up_proj(out.view(requests * new, self.num_heads, self.kv_lora_rank), w_uv)
    return self.o_proj(heads.reshape(requests, new, -1)), None
