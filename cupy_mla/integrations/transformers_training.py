"""Models of transformers in training: the passes without a cache of `sparse_attention`, which have gradients.

Attention is over the bfloat16 rows of one forward pass, one request after the other. Indexers choose rows by FP8
scores, as in serving. They learn from a loss of their own (`cupy_mla.indexer_loss`), or not at all. No state is kept
from one layer or pass to the next, so that activation checkpointing may run a layer again at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import arrays
from ..ops.attention import sparse_prefill
from ..ops.topk import select_rows
from .training import quantized_keys, with_loss

__all__ = [
    "IndexerLoss",
    "Scores",
    "Uncached",
    "UncachedRows",
    "require_cache",
    "select",
]

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q_index, k_index and w of `cupy_mla.indexer_loss`


@dataclass(frozen=True)
class IndexerLoss:
    """The losses of a model's indexers.

    Attributes:
        coefficient: factor on the gradient of each layer's loss.
        losses: layer: its loss in the last forward pass, without the coefficient; [] float32, detached.
    """

    coefficient: float | torch.Tensor
    losses: dict[int, torch.Tensor] = field(default_factory=dict)


def require_cache(
    attention: Any, cache: Any, kind: type, hidden_states: torch.Tensor, chosen_rows: Mapping[int, torch.Tensor] | None
) -> None:
    """Check that a layer's pass with a cache is supported.

    Raises:
        ValueError: the cache is of another kind, or `chosen_rows` is given.
        RuntimeError: the layer's input or a weight requires a gradient.
    """
    if not isinstance(cache, kind):
        raise ValueError(
            f"past_key_values: expected a {kind.__name__}, got {type(cache).__name__}; a pass without a cache, as in "
            "training, takes use_cache=False"
        )
    if chosen_rows is not None:
        raise ValueError("chosen_rows: only a pass without a cache takes them")
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (hidden_states, *attention.parameters()))
    if wanted:
        raise RuntimeError(
            "past_key_values: no gradient goes through a cache: train with use_cache=False, or call under "
            "torch.no_grad()"
        )


def require_trainable(attention: Any) -> None:
    """Check that a pass without a cache computes the same as the layer's own attention.

    Raises:
        ValueError: the layer is in training and has dropout of attention weights.
    """
    if attention.training and attention.attention_dropout:
        raise ValueError(
            f"attention_dropout: expected 0 in training, got {attention.attention_dropout}: weights are not in memory"
        )


def given_rows(attention: Any, chosen_rows: Mapping[int, torch.Tensor] | None, tokens: tuple[int, int]) -> Any:
    """The layer's rows [R, n, k] in `chosen_rows`; None where its indexer chooses by itself.

    Raises:
        ValueError: their shape is not that of these [R, n] tokens.
    """
    rows = None if chosen_rows is None else chosen_rows.get(attention.layer_idx)
    if rows is not None and (rows.ndim != 3 or rows.shape[:2] != tokens):
        raise ValueError(
            f"chosen_rows: expected [{tokens[0]}, {tokens[1]}, k] of layer {attention.layer_idx}, got "
            f"{list(rows.shape)}"
        )
    return rows


def is_token(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """[R, n] bool, False for padding. A token that does not see itself in the mask is padding.

    Args:
        mask: [R or 1, 1, n, n], bool or float of 0 and less; None: there is no padding.
        like: [R, n, hidden], from which shape and device are taken.

    Raises:
        ValueError: the mask has another shape, for instance that of a pass with a cache.
    """
    requests, new, _ = like.shape
    if mask is None:
        return torch.ones(requests, new, dtype=torch.bool, device=like.device)
    if mask.ndim != 4 or mask.shape[-2:] != (new, new):
        raise ValueError(f"attention_mask: expected [R, 1, {new}, {new}] or none, got {list(mask.shape)}")
    seen = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    return (seen if mask.dtype == torch.bool else seen == 0).expand(requests, -1)


def select(
    q8: torch.Tensor, w: torch.Tensor, keys: torch.Tensor, starts: torch.Tensor, seen: torch.Tensor, k: int
) -> torch.Tensor:
    """The rows that an indexer chooses for each token by FP8 scores, as in serving.

    Args:
        q8: [T, H, 128] float8_e4m3fn. w: [T, H] float32. Both from `quantize_indexer_q`.
        keys: [R, N, 128] bfloat16, detached.
        starts: [T] int32 first key, of the R * N, that a token scores. seen: [T] int32 number of keys that it scores.
        k: rows chosen per token, up to N.

    Returns:
        [T, k] int32 rows, counted from `starts`, ascending, -1 behind the last.
    """
    if keys.shape[1] <= k:
        every = torch.arange(k, dtype=torch.int32, device=q8.device)
        return every.where(every < seen[:, None], -1)
    k8, scales = quantized_keys(keys.flatten(0, 1).contiguous())
    return select_rows(q8, k8, scales, w, starts, starts + seen, k)


class Uncached:
    """One layer's forward pass without a cache.

    Attributes:
        tokens: [R, n] bool, False for padding.
        given: [R, n, k] rows given by the caller; None where the indexer chooses.
        scores: the indexer's queries, keys and weights, for its loss; None for a layer without an indexer.
    """

    def __init__(
        self,
        attention: Any,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None,
        chosen_rows: Mapping[int, torch.Tensor] | None,
    ) -> None:
        require_trainable(attention)
        requests, new, _ = hidden_states.shape
        self._layer: int = attention.layer_idx
        self._learning: IndexerLoss | None = attention.indexer_loss
        self.scores: Scores | None = None
        self.given: torch.Tensor | None = given_rows(attention, chosen_rows, (requests, new))
        self.tokens: torch.Tensor = is_token(mask, hidden_states)

    @property
    def learns(self) -> bool:
        """Whether the layer has an indexer and the indexer a loss."""
        return self._learning is not None and self.scores is not None

    def attach(self, out: torch.Tensor, *attention: Any) -> torch.Tensor:
        """The attention's result with the indexer's loss attached, where it learns.

        Args:
            attention: the arguments of `sparse_indexer_loss` behind the indexer's.
        """
        if self._learning is not None and self.scores is not None:
            out, self._learning.losses[self._layer] = with_loss(
                out, self._learning.coefficient, self.scores, *attention
            )
        return out


class UncachedRows(Uncached):
    """Latent rows of one forward pass of a layer. It is used like a `PagedLatentLayer`, in passes without a cache.

    Several sequences may be packed into a request, where its mask keeps them apart, or, without a mask, its positions.

    Attributes:
        first: [R, n] int32 first token that each token sees, counted in its request.
        seen: [R, n] int32 number of tokens that it sees from there on, itself included; 0 for padding.
    """

    def __init__(
        self,
        attention: Any,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        chosen_rows: Mapping[int, torch.Tensor] | None,
    ) -> None:
        super().__init__(attention, hidden_states, mask, chosen_rows)
        requests, new, _ = hidden_states.shape
        tokens, place = self.tokens, torch.arange(new, device=hidden_states.device)
        if mask is None:
            if position_ids is None:
                raise ValueError("position_ids: expected them where there is no attention_mask")
            seen = (position_ids + 1).expand(requests, -1)
        else:
            allowed = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
            seen = allowed.sum(-1).expand(requests, -1)
            if arrays.CHECK_VALUES:
                before = place[:, None] - place  # places from a token back to another
                in_range = (before >= 0) & (before < seen[..., None])
                if not torch.equal(allowed & tokens[..., None], in_range & tokens[..., None]):
                    raise ValueError("attention_mask: expected a causal one, in which each token sees a range")
        self.seen: torch.Tensor = seen.where(tokens, 0).int()
        self.first: torch.Tensor = (place + 1 - self.seen).int()

    def update(self, kv_c: torch.Tensor, k_pe: torch.Tensor) -> None:
        """Set the pass's rows: latent parts kv_c [R, n, 512] and RoPE parts k_pe [R, n, 64]."""
        self.rows: torch.Tensor = torch.cat([kv_c, k_pe], -1).to(torch.bfloat16)

    def update_indexer(self, keys: torch.Tensor) -> None:
        """Set the indexer's keys of the pass, [R, n, 128]."""
        self.keys: torch.Tensor = keys.to(torch.bfloat16)

    def choose(self, q8: torch.Tensor, w: torch.Tensor, topk: int) -> torch.Tensor:
        """As `PagedLatentLayer.choose`, but rows are counted from the first token that a token sees."""
        if self.given is not None:
            return self.given
        k = min(topk, self.seen.shape[1])
        rows = select(q8, w, self.keys.detach(), self._starts(), self.seen.flatten(), k)
        return rows.view(*self.seen.shape, k)

    def attend(self, q: torch.Tensor, topk: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention [R * n, h, 512] of queries q [R * n, h, 576] over rows topk [R, n, k] of each token."""
        there = (topk >= 0) & (topk < self.seen[..., None])
        lists = (topk.int().flatten(0, 1) + self._starts()[:, None]).where(there.flatten(0, 1), -1)[:, None]
        attention = (q.to(torch.bfloat16), self.rows.flatten(0, 1)[:, None], lists)
        out, _, lse = sparse_prefill(*attention, scale)
        return self.attach(out, *attention, lse, scale)

    def _starts(self) -> torch.Tensor:
        """[R * n] int32 row of the first token that each sees."""
        requests, new = self.seen.shape
        of_request = new * torch.arange(requests, dtype=torch.int32, device=self.seen.device)
        return (self.first + of_request[:, None]).flatten()
