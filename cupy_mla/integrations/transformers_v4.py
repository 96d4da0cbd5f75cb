"""DeepSeek-V4 of Hugging Face transformers on paged caches: what `transformers.sparse_attention` runs for its layers.

Each layer caches the rows of its sliding window; layers that compress cache, beside them, one row for 4 or 128 tokens,
and those that compress 4:1 (C4A) a key of their indexer for each of these rows. What is not a whole group of tokens yet
waits in a `_Pooler`. Projections, norms, RoPE and the weights of the compressors stay the model's own. Without a cache,
as in training, attention is over the bfloat16 rows of the pass, and everything has gradients.

Written against transformers 5.17 and 5.18.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from .. import arrays
from ..backends.deepseek_v4 import DeepseekV4Impl, DeepseekV4Layer
from ..backends.indexer import IndexerImpl
from ..backends.workspace import Workspace
from ..bridges import Place
from ..config import C4A, SparseMLAConfig
from ..layouts import INDEXER_FP8, V4_FP8
from ..metadata.batch import BatchMetadata
from ..metadata.indexer import IndexerMetadata, IndexerMetadataBuilder
from ..metadata.sparse_mla import SparseMLAMetadata, SparseMLAMetadataBuilder
from ..metadata.swa import SparseSWAMetadata, SparseSWAMetadataBuilder
from ..ops.attention import sparse_prefill
from ..ops.cache import empty_cache, quantize_and_insert_k_cache
from ..ops.swa import combine_topk_swa_indices
from .training import quantized_queries
from .transformers_training import Uncached, require_cache, select

if TYPE_CHECKING:
    from .untyped import Untyped as Cache
    from .untyped import Untyped as CacheLayerMixin
else:
    from transformers.cache_utils import Cache, CacheLayerMixin

SWA = 1
RATIOS = {"sliding_attention": SWA, "compressed_sparse_attention": C4A, "heavily_compressed_attention": 128}


class _Pooler:
    """State of a compressor between forward passes: the tokens of a group that is not complete yet, and, where groups
    overlap, the part of the last group that enters the next row."""

    def __init__(self) -> None:
        self.rows: int = 0  # made so far
        self.waiting: tuple[torch.Tensor, torch.Tensor] | None = None  # values and gates of tokens
        self.earlier: tuple[torch.Tensor, torch.Tensor] | None = None

    def pool(self, module: Any, hidden_states: torch.Tensor, overlap: bool) -> torch.Tensor | None:
        """Rows [R, n, d] that the tokens of hidden_states complete, normalised and rotated; None where there are none.

        Without overlap a row is the mean of its group's values, weighted by the softmax of their gates, value by value.
        With it the projections are twice as wide: the second half is of the own group, the first of the group before.
        """
        parts = (module.kv_proj(hidden_states), module.gate_proj(hidden_states))
        if self.waiting is not None:
            parts = tuple(torch.cat(both, 1) for both in zip(self.waiting, parts, strict=True))
        ratio, groups = module.compress_rate, parts[0].shape[1] // module.compress_rate
        self.waiting = tuple(part[:, groups * ratio :] for part in parts)
        if groups == 0:
            return None
        values, gates = (part[:, : groups * ratio].unflatten(1, (groups, ratio)) for part in parts)
        gates = gates + module.position_bias
        if overlap:
            d = module.head_dim
            of_next = (values[..., :d], gates[..., :d])
            if self.earlier is None:  # the first group has none before it
                self.earlier = (torch.zeros_like(of_next[0][:, :1]), torch.full_like(of_next[1][:, :1], -torch.inf))
            before = (torch.cat([e, n[:, :-1]], 1) for e, n in zip(self.earlier, of_next, strict=True))
            self.earlier = tuple(part[:, -1:] for part in of_next)
            values, gates = (torch.cat(both, 2) for both in zip(before, (values[..., d:], gates[..., d:]), strict=True))
        weights = gates.softmax(2, dtype=torch.float32).to(values.dtype)
        rows = module.kv_norm((values * weights).sum(2))
        first = ratio * torch.arange(self.rows, self.rows + groups, device=rows.device)[None]
        self.rows += groups
        cos, sin = module.rotary_emb(rows, position_ids=first, layer_type=module.rope_layer_type)
        rotated: torch.Tensor = apply_rotary_pos_emb(rows.unsqueeze(1), cos, sin).squeeze(1)
        return rotated


class PagedV4Layer(CacheLayerMixin):
    """The caches of one layer in a `PagedV4Cache`.

    Attributes:
        ratio: tokens per compressed row; 1: the layer has only a sliding window.
        swa_k_cache: [num_blocks, swa_block_size, 584] uint8 in layout V4_FP8.
        k_cache: [num_blocks, block_size // ratio, 584] uint8, compressed rows; None with ratio 1.
        indexer_cache: [num_blocks, block_size // 4, 132] uint8, keys of the indexer; None but with ratio 4.
        cache: the cache that the layer belongs to.
    """

    is_sliding = False

    def __init__(self, ratio: int, cache: Any) -> None:
        super().__init__()
        self.ratio: int = ratio
        self.cache: Any = cache
        swa, compressed = cache.configs[SWA], cache.configs[ratio]
        place, blocks = Place.of(torch.empty(0, device=cache.device)), cache.num_blocks
        self.swa_k_cache: torch.Tensor = empty_cache(V4_FP8, blocks[SWA], swa.rows_per_block, place)
        self.k_cache: torch.Tensor | None = None
        self.indexer_cache: torch.Tensor | None = None
        if ratio > 1:
            self.k_cache = empty_cache(V4_FP8, blocks[ratio], compressed.rows_per_block, place)
        if ratio == C4A:
            self.indexer_cache = empty_cache(INDEXER_FP8, blocks[C4A], compressed.rows_per_block, place)
        self.reset()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: `__init__` has allocated the caches."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a PagedV4Cache is for models within `sparse_attention`")

    def reset(self) -> None:
        """Forget all tokens; the blocks stay as they are and will be written over."""
        self.poolers: dict[str, _Pooler] = {"compressor": _Pooler(), "indexer": _Pooler()}
        self.cache.length = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return self.cache.configs[SWA].max_model_len


class PagedV4Cache(Cache):
    """The paged caches of a DeepSeek-V4 model, for `past_key_values`. Requests have equal lengths, without padding.

    Args:
        config: the model's configuration.
        swa_block_table: [R, M] integers, the blocks of each request in the sliding windows' caches.
        block_table: [R, M'] the same for the caches of compressed rows and of the indexers' keys.
        swa_block_size: tokens per block of the sliding windows' caches.
        block_size: tokens per block of the other caches, before compression; a multiple of all compress ratios.
        max_num_batched_tokens: most query tokens of a forward pass, all requests together; workspaces grow with it.
            Default: as many as the blocks hold.
        device: device of the model.

    Attributes:
        length: number of tokens that each request has so far.
    """

    def __init__(
        self,
        config: Any,
        swa_block_table: torch.Tensor,
        block_table: torch.Tensor,
        *,
        swa_block_size: int = 64,
        block_size: int = 256,
        max_num_batched_tokens: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device: torch.device = torch.device(device)
        self.length: int = 0
        ratios = [RATIOS[kind] for kind in config.layer_types]
        tables = {ratio: (block_table, block_size) for ratio in ratios if ratio > 1}
        tables[SWA] = (swa_block_table, swa_block_size)
        capacity = min(table.shape[1] * size for table, size in tables.values())
        requests = len(swa_block_table)
        tokens = requests * capacity if max_num_batched_tokens is None else max_num_batched_tokens
        place = Place.of(torch.empty(0, device=self.device))
        workspace = Workspace(place)
        self.configs: dict[int, SparseMLAConfig] = {
            ratio: SparseMLAConfig(
                config.num_attention_heads, d_qk=config.head_dim, cache_layout="v4_fp8", topk=config.index_topk,
                block_size=size, max_num_seqs=requests, max_num_batched_tokens=tokens, max_model_len=capacity,
                compress_ratio=ratio, window=config.sliding_window, model="v4",
            )
            for ratio, (_, size) in tables.items()
        }  # fmt: skip
        self.num_blocks: dict[int, int] = {ratio: int(table.max()) + 1 for ratio, (table, _) in tables.items()}
        self.impls: dict[int, DeepseekV4Impl] = {
            ratio: DeepseekV4Impl(settings, config.head_dim**-0.5, workspace)
            for ratio, settings in self.configs.items()
        }
        self._tables = {ratio: table.cpu().numpy() for ratio, (table, _) in tables.items()}
        self._swa_builder = SparseSWAMetadataBuilder(self.configs[SWA], place, tables)
        self._builders = {r: SparseMLAMetadataBuilder(c, place) for r, c in self.configs.items() if r > 1}
        self.indexer: IndexerImpl | None = None
        if C4A in self.configs:
            self.indexer = IndexerImpl(self.configs[C4A], workspace)
            self._index_builder = IndexerMetadataBuilder(self.configs[C4A], place)
        self.swa: SparseSWAMetadata | None = None
        self.compressed: dict[int, SparseMLAMetadata] = {}
        self.index: IndexerMetadata | None = None
        super().__init__(layers=[PagedV4Layer(ratio, self) for ratio in ratios])

    def advance(self, new: int, position_ids: torch.Tensor) -> None:
        """Plan the forward pass of the next `new` tokens of every request.

        Raises:
            ValueError: the blocks are too few, or the tokens more than `max_num_batched_tokens`. Under
                `cupy_mla.set_checks`: positions do not go on from the tokens before, as where requests are padded.
        """
        settings, requests = self.configs[SWA], len(self._tables[SWA])
        positions = np.arange(self.length, self.length + new)
        if self.length + new > settings.max_model_len:
            raise ValueError(
                f"block_table: has room for {settings.max_model_len} tokens a request, got {self.length + new}"
            )
        if arrays.CHECK_VALUES and not (position_ids.cpu().numpy() == positions).all():
            raise ValueError("position_ids: expected those of tokens without padding")
        batches = {}
        for ratio, table in self._tables.items():
            size = self.configs[ratio].block_size
            slots = table[:, positions // size] * size + positions % size
            batches[ratio] = BatchMetadata(
                new * np.arange(requests + 1), np.full(requests, self.length + new), table, slots.reshape(-1),
                np.tile(positions, requests),
            )  # fmt: skip
        self.swa = self._swa_builder.build(batches[SWA])
        self.compressed = {ratio: builder.build(batches[ratio]) for ratio, builder in self._builders.items()}
        if self.indexer is not None:
            self.index = self._index_builder.build(batches[C4A])
        self.length += new

    def per_token(self, rows: torch.Tensor, ratio: int, new: int) -> torch.Tensor:
        """For each token the row of its group, [R * new, d], out of the rows [R, n, d] that this step completed."""
        first = (self.length - new) // ratio
        group = torch.arange(self.length - new, self.length, device=rows.device) // ratio - first
        return rows[:, group.clamp(max=rows.shape[1] - 1)].flatten(0, 1)


class UncachedV4Rows(Uncached):
    """Rows of one forward pass of a layer, of tokens and compressed. It is used in passes without a cache, where a
    `PagedV4Layer` is used with one. Padding may stand behind the tokens. Each request is one sequence.
    """

    def __init__(
        self,
        attention: Any,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        chosen_rows: Mapping[int, torch.Tensor] | None,
    ) -> None:
        super().__init__(attention, hidden_states, mask, chosen_rows)
        self.ratio: int = 0 if attention.compressor is None else attention.compressor.compress_rate
        if arrays.CHECK_VALUES:
            if not (position_ids == torch.arange(hidden_states.shape[1], device=position_ids.device)).all():
                raise ValueError("position_ids: expected those of one sequence, without padding before its tokens")
            if not self.tokens[:, 0].all() or (self.tokens.int().diff(dim=-1) > 0).any():
                raise ValueError("attention_mask: expected one without padding before tokens")

    def seen(self) -> torch.Tensor:
        """[R, n] int32 compressed rows that each token sees; 0 for padding."""
        place = torch.arange(1, self.tokens.shape[1] + 1, dtype=torch.int32, device=self.tokens.device)
        return (place // self.ratio).where(self.tokens, 0)

    def choose(self, q8: torch.Tensor, w: torch.Tensor, keys: torch.Tensor, topk: int) -> torch.Tensor:
        """See `choose_v4`; keys [R, N, 128] bfloat16."""
        if self.given is not None:
            return self.given
        requests, new = self.tokens.shape
        starts = keys.shape[1] * torch.arange(requests, dtype=torch.int32, device=keys.device).repeat_interleave(new)
        k = min(topk, keys.shape[1])
        return select(q8, w, keys, starts, self.seen().flatten(), k).view(requests, new, k)

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, compressed: torch.Tensor, chosen: torch.Tensor, attention: Any
    ) -> torch.Tensor:
        """Attention of each token over its window and the compressed rows that were chosen for it.

        Args:
            q: [R, n, h, 512].
            kv: [R, n, 512] rows of tokens.
            compressed: [R, N, 512].
            chosen: [R, n, k] int32 compressed rows of each token, -1: none.
            attention: the layer.

        Returns:
            [R, n, h, 512] bfloat16.
        """
        requests, new = self.tokens.shape
        count, scale = compressed.shape[1], attention.scaling
        flat_q, rows = q.flatten(0, 1).to(torch.bfloat16), torch.cat([compressed, kv], 1).to(torch.bfloat16)
        lengths = torch.full((requests,), new, dtype=torch.int32, device=q.device)
        first = new * torch.arange(requests + 1, dtype=torch.int32, device=q.device)
        lists, ends = combine_topk_swa_indices(
            chosen.flatten(0, 1), first, lengths, lengths,
            attention.sliding_window, self.ratio if chosen.shape[-1] else 0, chosen.shape[-1], count + new, count,
        )  # fmt: skip
        ends = ends.where(self.tokens.flatten(), 0)
        out, _, lse = sparse_prefill(
            flat_q, rows.flatten(0, 1)[:, None], lists[:, None], scale, attn_sink=attention.sinks.float(),
            topk_length=ends,
        )  # fmt: skip
        if self.learns:
            there = (chosen >= 0) & (chosen < self.seen()[..., None])
            first = count * torch.arange(requests, dtype=torch.int32, device=q.device)[:, None, None]
            lists = (chosen + first).where(there, -1).flatten(0, 1)[:, None]
            of_chosen = rows[:, :count].flatten(0, 1)[:, None]
            out = self.attach(out, flat_q, of_chosen, lists, lse, scale)
        return out.view_as(q)


def attend_v4(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Any = None,
    chosen_rows: Mapping[int, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Replaces `DeepseekV4Attention.forward`. hidden_states: [R, n, hidden]; the cache: a `PagedV4Cache` or None."""
    requests, new, _ = hidden_states.shape
    if past_key_values is None:
        uncached = UncachedV4Rows(self, hidden_states, attention_mask, position_ids, chosen_rows)
    else:
        require_cache(self, past_key_values, PagedV4Cache, hidden_states, chosen_rows)
        if self.layer_idx == 0:
            past_key_values.advance(new, position_ids)
    cos, sin = position_embeddings[self.rope_layer_type]

    q_latent = self.q_a_norm(self.q_a_proj(hidden_states))
    q = self.q_b_norm(self.q_b_proj(q_latent).view(requests, new, self.num_heads, self.head_dim))
    q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)
    kv = self.kv_norm(self.kv_proj(hidden_states)).unsqueeze(2)
    kv = apply_rotary_pos_emb(kv, cos, sin, unsqueeze_dim=2).squeeze(2)

    if past_key_values is None:
        compressed, chosen = _compress(self, uncached, hidden_states, q_latent, position_ids)
        out = uncached.attend(q, kv, compressed, chosen, self).to(q.dtype)
    else:
        out = _attend_cached(self, past_key_values, hidden_states, q_latent, q, kv, position_ids)
    out = apply_rotary_pos_emb(out, cos, -sin, unsqueeze_dim=2)
    groups = self.o_a_proj(out.reshape(requests, new, self.config.o_groups, -1)).flatten(2)
    return self.o_b_proj(groups), None


def _compress(
    self: Any, rows: UncachedV4Rows, hidden_states: torch.Tensor, q_latent: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compressed rows [R, N, 512] of a pass without a cache, and those [R, n, k] int32 that each token attends."""
    requests, new, _ = hidden_states.shape
    if rows.ratio == 0 or new < rows.ratio:
        none = torch.empty(requests, new, 0, dtype=torch.int32, device=hidden_states.device)
        return hidden_states.new_empty(requests, 0, self.head_dim), none
    indexer = getattr(self.compressor, "indexer", None)
    compressed: Any = _Pooler().pool(self.compressor, hidden_states, overlap=indexer is not None)
    if indexer is None:
        every = torch.arange(compressed.shape[1], dtype=torch.int32, device=compressed.device)
        return compressed, every.expand(requests, new, -1)
    known = hidden_states.detach(), q_latent.detach()  # no more can be learned from the indexer's loss
    return compressed, indexer(*known, position_ids, rows, self.layer_idx).int()


def _attend_cached(
    self: Any,
    cache: PagedV4Cache,
    hidden_states: torch.Tensor,
    q_latent: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    """Attention [R, n, h, 512] of queries q, over a cache that gets the rows kv [R, n, 512] and what they complete."""
    layer: PagedV4Layer = cache.layers[self.layer_idx]
    new, ratio, swa = kv.shape[1], layer.ratio, cache.swa
    if swa is None:
        raise RuntimeError("no forward pass has reached the first layer yet")
    quantize_and_insert_k_cache(kv.flatten(0, 1), layer.swa_k_cache, swa.slot_mapping)
    metadata = chosen = None
    if layer.k_cache is not None:
        metadata = cache.compressed[ratio]
        rows = layer.poolers["compressor"].pool(self.compressor, hidden_states, overlap=ratio == C4A)
        if rows is not None:
            of_tokens = cache.per_token(rows, ratio, new).to(torch.bfloat16)
            quantize_and_insert_k_cache(of_tokens, layer.k_cache, metadata.slot_mapping)
    if ratio == C4A:
        topk = self.compressor.indexer(hidden_states, q_latent, position_ids, cache, self.layer_idx)
        missing = cache.configs[C4A].topk - topk.shape[-1]
        chosen = torch.nn.functional.pad(topk.int().flatten(0, 1), (0, missing), value=-1)
    state = DeepseekV4Layer(layer.swa_k_cache, self.sinks.float(), layer.k_cache, chosen)
    out = cache.impls[ratio].forward(q.flatten(0, 1), state, swa, metadata, torch.empty_like(q.flatten(0, 1)))
    return out.view_as(q)


def choose_v4(
    self: Any,
    hidden_states: torch.Tensor,
    q_residual: torch.Tensor,
    position_ids: torch.Tensor,
    past_key_values: Any,
    layer_idx: int,
) -> torch.Tensor:
    """Replaces `DeepseekV4Indexer.forward`, on a `PagedV4Cache` or `UncachedV4Rows`. Keys and queries are e4m3.

    Returns:
        [R, n, k] int32 compressed positions, ascending, -1 behind the last; k is topk, or the compressed rows without
        a cache where these are fewer.
    """
    requests, new, _ = hidden_states.shape
    cos, sin = self.rotary_emb(hidden_states, position_ids=position_ids, layer_type=self.rope_layer_type)
    angles = torch.cat([cos, sin], -1).expand(requests, -1, -1).flatten(0, 1)
    q = self.q_b_proj(q_residual).view(requests * new, self.num_heads, self.head_dim)
    weights = self.scorer.weights_proj(hidden_states).flatten(0, 1)
    q8, w = quantized_queries(
        q.detach().to(torch.bfloat16), weights.detach(), positions=torch.arange(len(q), device=q.device),
        cos_sin_cache=angles, rope_first=False, interleaved=True,
    )  # fmt: skip
    if isinstance(past_key_values, UncachedV4Rows):
        q = apply_rotary_pos_emb(q.unflatten(0, (requests, new)), cos, sin, unsqueeze_dim=2).flatten(0, 1)
        of_pass: Any = _Pooler().pool(self, hidden_states, overlap=True)
        k, factor = of_pass.to(torch.bfloat16), (self.num_heads * self.head_dim) ** -0.5
        past_key_values.scores = q.to(torch.bfloat16), k.flatten(0, 1), weights.float() * factor
        return past_key_values.choose(q8, w, k.detach(), self.index_topk)
    layer: PagedV4Layer = past_key_values.layers[layer_idx]
    if past_key_values.indexer is None or layer.indexer_cache is None:
        raise ValueError(f"layer_idx: layer {layer_idx} has no indexer")
    rows = layer.poolers["indexer"].pool(self, hidden_states, overlap=True)
    keys = None if rows is None else past_key_values.per_token(rows, C4A, new).to(torch.bfloat16)
    chosen = torch.empty(len(q), self.index_topk, dtype=torch.int32, device=q.device)
    past_key_values.indexer.forward(keys, q8, w, layer.indexer_cache, past_key_values.index, chosen)
    return chosen.view(requests, new, -1)
