"""Models of Hugging Face transformers with an indexer, on paged caches and sparse attention::

    cache = PagedLatentCache(model.config, block_table, layout="v32_fp8")
    with sparse_attention(model):
        model(input_ids, past_key_values=cache, use_cache=True)       # prefill, and then token after token

    with sparse_attention(model, indexer_loss=1.0):                   # training: no cache
        model(input_ids, labels=input_ids, use_cache=False).loss.backward()

For `DeepseekV32ForCausalLM` and `GlmMoeDsaForCausalLM` (GLM-5); for `DeepseekV4ForCausalLM` with a `PagedV4Cache`.

transformers' own attention expands every cached row into a key and a value per head, and masks the rows that the
indexer did not choose; its indexer scores all keys in float32. Here the weights are absorbed, a paged cache holds one
latent row per token, and only the chosen rows are read. The indexer's keys are e4m3 in a paged cache of their own
(layout INDEXER_FP8), and the indexer returns positions in the request. Layers of GLM-5 that the config calls "shared"
use the rows chosen in the layer before them. Without a cache, as in training, attention is over the bfloat16 rows of
the forward pass, and everything has gradients (`transformers_training`). The model computes
projections, norms and RoPE itself.

Written against transformers 5.17 and 5.18.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from .. import arrays, layouts
from ..bridges import Place
from ..flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from ..layouts import D_V, INDEXER_FP8, Layout
from ..ops.absorb import absorb_q, split_kv_b_proj, v_up_proj
from ..ops.cache import concat_and_cache_mla, empty_cache
from ..ops.indexer import cp_gather_indexer_k_quant_cache, indexer_k_quant_and_cache
from ..ops.indices import convert_req_index_to_global_index
from ..ops.topk import select_rows, select_rows_paged
from .training import quantized_queries
from .transformers_training import IndexerLoss, UncachedRows, require_cache
from .transformers_v4 import PagedV4Cache, PagedV4Layer, attend_v4, choose_v4

if TYPE_CHECKING:
    from .untyped import Untyped as Cache
    from .untyped import Untyped as DynamicIndexedLayer
else:
    from transformers.cache_utils import Cache, DynamicIndexedLayer

__all__ = [
    "PagedLatentCache",
    "PagedLatentLayer",
    "PagedTokens",
    "PagedV4Cache",
    "PagedV4Layer",
    "recorded_rows",
    "sparse_attention",
]


@dataclass(frozen=True)
class _Step:
    """The n new tokens of each of R requests in one forward pass.

    Attributes:
        slots: [R * n] int64 cache slots of the new tokens, -1 for padding.
        request: [R * n] int32 request of each token.
        positions: [R, n] int64 their positions in the request, padding not counted.
        seen: [R, n] int32 tokens that each sees, itself included; 0 for padding.
        starts: [R + 1] int32 running sum of the requests' lengths.
    """

    slots: torch.Tensor
    request: torch.Tensor
    positions: torch.Tensor
    seen: torch.Tensor
    starts: torch.Tensor


class PagedTokens:
    """Where the tokens of R requests lie in the paged caches. All layers share one object. Padding gets no slot.

    Attributes:
        block_table: [R, M] int32 blocks of each request.
        block_size: tokens per block.
        length: number of tokens that each request has so far, padding included.
        step: the new tokens of the current forward pass.
    """

    def __init__(self, block_table: torch.Tensor, block_size: int) -> None:
        self.block_table: torch.Tensor = block_table.int()
        self.block_size = block_size
        self.length: int = 0
        self.step: _Step | None = None
        self._lengths = torch.zeros(len(block_table), dtype=torch.int64, device=block_table.device)  # without padding

    @property
    def capacity(self) -> int:
        """Number of tokens that a request's blocks hold."""
        return self.block_table.shape[1] * self.block_size

    def advance(self, mask: torch.Tensor, new: int) -> None:
        """Assign slots to the next `new` tokens of every request: a new forward pass begins.

        Args:
            mask: [R or 1, 1, new, all] bool, or float of 0 and less: the causal mask of this pass, whose last row says
                which tokens are padding.

        Raises:
            ValueError: the blocks are too few. Under `cupy_mla.set_checks`: a token does not see all tokens of its
                request up to itself.
        """
        if self.length + new > self.capacity:
            raise ValueError(f"block_table: has room for {self.capacity} tokens a request, got {self.length + new}")
        requests = len(self.block_table)
        seen_by_last = mask[:, 0, -1, -new:].expand(requests, -1)
        is_token = seen_by_last if mask.dtype == torch.bool else seen_by_last == 0
        positions = self._lengths[:, None] + is_token.cumsum(-1) - 1
        seen = (positions + 1).where(is_token, 0).int()
        if arrays.CHECK_VALUES:
            allowed = (mask if mask.dtype == torch.bool else mask == 0).expand(requests, -1, -1, -1).sum(-1)[:, 0]
            if not torch.equal(allowed.where(is_token, 0).int(), seen):
                raise ValueError("attention_mask: expected a causal one, in which nothing but padding is left out")
        self.length += new
        self._lengths = self._lengths + is_token.sum(-1)
        places = positions.clamp(min=0)
        blocks = self.block_table.long().gather(1, places // self.block_size)
        self.step = _Step(
            slots=(blocks * self.block_size + places % self.block_size).where(is_token, -1).flatten(),
            request=torch.arange(requests, dtype=torch.int32, device=mask.device).repeat_interleave(new),
            positions=positions,
            seen=seen,
            starts=torch.nn.functional.pad(self._lengths.cumsum(0), (1, 0)).int(),
        )

    @property
    def current(self) -> _Step:
        """The step of the current forward pass."""
        if self.step is None:
            raise RuntimeError("no forward pass has reached the first layer yet")
        return self.step

    def reset(self) -> None:
        """Forget all tokens."""
        self.length, self.step = 0, None
        self._lengths.zero_()


class PagedLatentLayer(DynamicIndexedLayer):
    """The caches of one layer in a `PagedLatentCache`.

    Attributes:
        kv_cache: [num_blocks, block_size, 1, 576] bfloat16 or [num_blocks, block_size, 1, 656] uint8.
        indexer_cache: [num_blocks, block_size, 132] uint8, keys of the layer's indexer; None where it has none.
        tokens: where tokens lie, shared with all layers.
    """

    is_croppable = False

    def __init__(self, layout: Layout, tokens: PagedTokens, num_blocks: int, indexed: bool = True) -> None:
        super().__init__()
        place = Place.of(tokens.block_table)
        self.kv_cache: torch.Tensor = empty_cache(layout, num_blocks, tokens.block_size, place)[:, :, None]
        self.indexer_cache: torch.Tensor | None = None
        if indexed:
            self.indexer_cache = empty_cache(INDEXER_FP8, num_blocks, tokens.block_size, place)
        self.tokens = tokens

    def update(self, kv_c: torch.Tensor, k_pe: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Pack this step's n tokens of every request: latent rows kv_c [R, n, 512] and RoPE parts k_pe [R, n, 64]."""
        concat_and_cache_mla(kv_c.flatten(0, 1), k_pe.flatten(0, 1), self.kv_cache, self.tokens.current.slots)
        return self.kv_cache, self.tokens.block_table

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Pack this step's keys of the indexer [R, n, 128]; returns the paged cache of all keys."""
        if self.indexer_cache is None:
            raise ValueError("this layer has no indexer")
        keys = indexer_key_states.flatten(0, 1).to(torch.bfloat16)
        indexer_k_quant_and_cache(keys, self.indexer_cache, self.tokens.current.slots)
        return self.indexer_cache

    def choose(self, q8: torch.Tensor, w: torch.Tensor, topk: int) -> torch.Tensor:
        """The rows that each query token of this step attends to, chosen by the keys in the cache.

        Args:
            q8: [R * n, H, 128] float8_e4m3fn. w: [R * n, H] float32. Both from `quantize_indexer_q`.
            topk: rows chosen per token.

        Returns:
            [R, n, k] int32 positions in the request, padding not counted, ascending, -1 behind the last; k is `topk`,
            or the tokens given so far where these are fewer.
        """
        if self.indexer_cache is None:
            raise ValueError("this layer has no indexer")
        step, table = self.tokens.current, self.tokens.block_table
        requests, new = step.seen.shape
        k = min(topk, self.tokens.length)
        if self.tokens.length <= topk:
            every = torch.arange(k, dtype=torch.int32, device=q8.device)
            return every.where(every < step.seen[..., None], -1)
        if new == 1:
            rows = select_rows_paged(
                q8[:, None], self.indexer_cache, w, step.seen[:, 0].contiguous(), table, self.tokens.capacity, k
            )
        else:
            most = requests * self.tokens.length
            keys = torch.empty(most, INDEXER_FP8.d_qk, dtype=torch.uint8, device=q8.device)
            scales = torch.empty(most, dtype=torch.float32, device=q8.device)
            cp_gather_indexer_k_quant_cache(self.indexer_cache, keys, scales, table, step.starts)
            starts = step.starts[:-1].repeat_interleave(new)
            rows = select_rows(q8, keys, scales, w, starts, starts + step.seen.flatten(), k)
        return rows.view(requests, new, k)

    def reset(self) -> None:
        """Forget all tokens; the blocks stay as they are and will be written over."""
        self.tokens.reset()

    def get_seq_length(self) -> int:
        return self.tokens.length

    def get_max_length(self) -> int:
        return self.tokens.capacity


class PagedLatentCache(Cache):
    """A model's paged latent cache, for `past_key_values`: a `PagedLatentLayer` per layer.

    Args:
        config: the model's configuration.
        block_table: [R, M] integers, the blocks of each request in order, on the model's device.
        num_blocks: number of blocks of the cache; default: one more than the largest in `block_table`.
        block_size: tokens per block.
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
        self.tokens: PagedTokens = PagedTokens(block_table, block_size)
        kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
        super().__init__(
            layers=[
                PagedLatentLayer(layouts.by_name(layout, d_qk), self.tokens, blocks, kind == "full") for kind in kinds
            ]
        )
        self.schedule: FlashMLASchedMeta = get_mla_metadata()[0]  # all layers of a step share it


@contextmanager
def sparse_attention(
    model: torch.nn.Module, *, indexer_loss: float | torch.Tensor | None = None
) -> Iterator[torch.nn.Module]:
    """While the context lasts, every attention layer of a model and its indexer run on this package.

    With a cache, for inference: weights are bfloat16, there are no gradients, and every call passes `past_key_values`:
    a `PagedLatentCache` for `DeepseekV32ForCausalLM` and `GlmMoeDsaForCausalLM`, a `PagedV4Cache` for
    `DeepseekV4ForCausalLM`. Without a cache (`use_cache=False`), for training and evaluation: everything has gradients;
    weights may be float32, but attention is computed in bfloat16.

    A token sees all tokens of its request up to itself, except padding. With a `PagedV4Cache` there must be no padding.
    Without a cache V4's padding may stand behind the tokens, and for the other models several sequences may be packed
    into a request, whose `position_ids` then start over. In V4 such sequences would see one another, as they do in
    transformers' own attention. Other masks and positions are an error under `cupy_mla.set_checks`, and not without.

    A call of the model without a cache may pass `chosen_rows`, by layer the rows that its indexer would choose, as
    `recorded_rows` records them in a pass with a cache.

    Args:
        model: the model, or a part of it.
        indexer_loss: coefficient of each indexer's loss (`cupy_mla.indexer_loss`), a mean over the tokens of a pass
            without a cache. Any backward through the model computes its gradients, too, for the indexer alone.
            `model.indexer_losses` has the last pass's losses by layer. None: indexers do not learn.

    Raises:
        ValueError: the model has no such layers. In a call: dropout of attention weights in training; a cache of
            another kind; `chosen_rows` with a cache, or for other tokens.
        TypeError: in a call: a projection whose weight is absorbed is no `torch.nn.Linear`.
        RuntimeError: in a call with a cache: an input or a weight requires a gradient.

    Example:
        >>> with sparse_attention(model, indexer_loss=1.0):  # a step of training
        ...     model(tokens, labels=tokens, use_cache=False).loss.backward()
        >>> sum(model.indexer_losses.values())
    """
    replaced: list[tuple[Any, Callable[..., Any]]] = [
        (m, forward) for m in model.modules() for kind, forward in FORWARDS.items() if isinstance(m, kind)
    ]
    if not replaced:
        names = ", ".join(kind.__name__ for kind in ATTENTIONS)
        raise ValueError(f"model: expected one with layers of {names}, got {type(model).__name__}")
    learning = None if indexer_loss is None else IndexerLoss(indexer_loss)
    if learning is not None:
        model.indexer_losses = learning.losses
    for module, forward in replaced:
        module.forward = MethodType(forward, module)
        module.indexer_loss = learning
    try:
        yield model
    finally:
        for module, _ in replaced:
            del module.forward, module.indexer_loss


@contextmanager
def recorded_rows(model: torch.nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Record the rows that a model's indexers choose while the context lasts. A pass without a cache over the same
    tokens can replay them: they are its `chosen_rows`.

    Call the backward after the context: with activation checkpointing it runs layers again, which would be recorded.

    Yields:
        a dict of layer: [R, n, k] int32 for all n tokens of the passes, filled when the context ends. For V3.2 and
        GLM-5 these are positions of tokens in their request, padding not counted; for V4 positions of compressed rows.
        -1: none.

    Example:
        >>> with sparse_attention(model), recorded_rows(model) as rows, torch.no_grad():
        ...     text = model.generate(prompt, past_key_values=cache)
        >>> with sparse_attention(model):
        ...     logits = model(text[:, :-1], chosen_rows=rows, use_cache=False).logits
    """
    passes: dict[int, list[torch.Tensor]] = {}
    rows: dict[int, torch.Tensor] = {}

    def kept(attention: Any) -> Any:
        """Register a hook that keeps the results of the layer's indexer."""
        of_layer = passes.setdefault(attention.layer_idx, [])
        indexer = getattr(getattr(attention, "compressor", attention), "indexer", None)
        return indexer and indexer.register_forward_hook(lambda _m, _a, chosen: of_layer.append(chosen))

    hooks = [kept(module) for module in model.modules() if isinstance(module, ATTENTIONS)]
    try:
        yield rows
    finally:
        for hook in filter(None, hooks):
            hook.remove()
    for layer, parts in passes.items():
        if parts:
            k = max(part.shape[-1] for part in parts)
            padded = [torch.nn.functional.pad(part, (0, k - part.shape[-1]), value=-1) for part in parts]
            rows[layer] = torch.cat(padded, 1).int()


def _attend(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    past_key_values: PagedLatentCache | None = None,
    position_ids: torch.Tensor | None = None,
    prev_topk_indices: torch.Tensor | None = None,
    chosen_rows: Mapping[int, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of hidden_states [R, n, hidden], and the rows [R, n, k] that it chose or was given."""
    requests, new, _ = hidden_states.shape
    if past_key_values is None:
        rows: Any = UncachedRows(self, hidden_states, attention_mask, position_ids, chosen_rows)
    else:
        require_cache(self, past_key_values, PagedLatentCache, hidden_states, chosen_rows)
        rows = past_key_values.layers[self.layer_idx]
        if self.layer_idx == 0:
            rows.tokens.advance(attention_mask, new)
            past_key_values.schedule = get_mla_metadata()[0]

    # The model's projections, norms and RoPE.
    q_latent = self.q_a_layernorm(self.q_a_proj(hidden_states))
    q = self.q_b_proj(q_latent).view(requests, new, self.num_heads, self.qk_head_dim)
    q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    kv_c, k_pe = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    cos, sin = position_embeddings
    q_pe, k_pe = deepseek.apply_rotary_pos_emb_interleave(q_pe, k_pe.unsqueeze(2), cos, sin, unsqueeze_dim=2)

    # Its new tokens are rows now; its indexer, or that of a layer before, chooses rows for each of them.
    rows.update(self.kv_a_layernorm(kv_c), k_pe.squeeze(2))
    topk = prev_topk_indices
    if self.indexer is not None:
        known = hidden_states.detach(), q_latent.detach()  # no more can be learned from the indexer's loss
        topk = self.indexer(*known, position_embeddings, attention_mask, position_ids, rows)
    if topk is None:
        raise ValueError("prev_topk_indices: a layer without an indexer needs the rows of a layer before it")

    # Sparse attention over latent rows, the key and value expansions moved to the query and the output.
    if not isinstance(self.kv_b_proj, torch.nn.Linear):
        raise TypeError(
            f"kv_b_proj: expected torch.nn.Linear, whose weight is absorbed, got {type(self.kv_b_proj).__name__}"
        )
    w_kv = self.kv_b_proj.weight.T.to(q.dtype)
    w_uk, w_uv = split_kv_b_proj(w_kv, self.num_heads, self.qk_nope_head_dim)
    q = torch.cat([absorb_q(q_nope.flatten(0, 1), w_uk), q_pe.flatten(0, 1)], -1)
    if past_key_values is None:
        out = rows.attend(q, topk, self.scaling)
    else:
        out = _attend_cached(rows, past_key_values.schedule, q, topk, self.scaling)
    heads = v_up_proj(out.view(requests * new, self.num_heads, self.kv_lora_rank).to(w_uv.dtype), w_uv)
    return self.o_proj(heads.reshape(requests, new, -1)), topk


def _attend_cached(
    cache: PagedLatentLayer, schedule: FlashMLASchedMeta, q: torch.Tensor, topk: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of queries q [R * n, h, 576] over rows topk [R, n, k] of each token."""
    step, table = cache.tokens.current, cache.tokens.block_table
    seen = topk.where(topk < step.seen[..., None], -1).int().flatten(0, 1)
    slots = convert_req_index_to_global_index(step.request, table, seen, cache.tokens.block_size)
    indices = slots.unsqueeze(1)
    if topk.shape[1] > 1 and cache.kv_cache.dtype == torch.bfloat16:
        return flash_mla_sparse_fwd(q, cache.kv_cache.flatten(0, 1), indices, scale)[0]
    out, _ = flash_mla_with_kvcache(
        q.unsqueeze(1), cache.kv_cache, None, None, D_V, schedule,
        softmax_scale=scale, is_fp8_kvcache=cache.kv_cache.dtype == torch.uint8, indices=indices,
    )  # fmt: skip
    return out


def _attend_v32(self: Any, *arguments: Any, **named: Any) -> tuple[torch.Tensor, None]:
    """Replaces `DeepseekV32Attention.forward`."""
    return _attend(self, *arguments, **named)[0], None


def _attend_glm(self: Any, *arguments: Any, **named: Any) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Replaces `GlmMoeDsaAttention.forward`, which also returns the chosen rows, for the next layer."""
    out, topk = _attend(self, *arguments, **named)
    return out, None, topk


def _choose(
    self: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    rows: PagedLatentLayer | UncachedRows,
    *,
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Replaces the forward of the model's indexer; keys and queries are e4m3. See `PagedLatentLayer.choose`."""
    cos, sin = position_embeddings
    q = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
    k = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
    rope = self.qk_rope_head_dim
    q_pe, k_pe = rotate(q[..., :rope], k[..., :rope], cos, sin, unsqueeze_dim=2)
    rows.update_indexer(torch.cat([k_pe, k[..., rope:]], -1).squeeze(2))
    weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float().flatten(0, 1)
    q = torch.cat([q_pe, q[..., rope:]], -1).to(torch.bfloat16).flatten(0, 1)
    if isinstance(rows, UncachedRows):
        rows.scores = q, rows.keys.flatten(0, 1), weights * (self.n_heads * self.head_dim) ** -0.5
    return rows.choose(*quantized_queries(q.detach(), weights.detach()), self.index_topk)


def _choose_v32(self: Any, *arguments: Any, **named: Any) -> torch.Tensor:
    return _choose(self, *arguments, **named, rotate=deepseek.apply_rotary_pos_emb)


def _choose_glm(self: Any, *arguments: Any, **named: Any) -> torch.Tensor:
    return _choose(self, *arguments, **named, rotate=glm.apply_rotary_pos_emb_interleave)


# Kind of module: the function that replaces its forward.
FORWARDS: dict[type, Callable[..., Any]] = {
    deepseek.DeepseekV32Attention: _attend_v32,
    deepseek.DeepseekV32Indexer: _choose_v32,
    glm.GlmMoeDsaAttention: _attend_glm,
    glm.GlmMoeDsaIndexer: _choose_glm,
    deepseek_v4.DeepseekV4Attention: attend_v4,
    deepseek_v4.DeepseekV4Indexer: choose_v4,
}
ATTENTIONS = tuple(kind for kind in FORWARDS if kind.__name__.endswith("Attention"))
