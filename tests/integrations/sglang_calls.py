"""Calls of the SGLang plug-in's functions, with what SGLang's metadata say. They need the stand-ins."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from cupy_mla.integrations.sglang import indexer


class Choosing:
    """Calls of our two hooks of the indexer, with what SGLang's metadata say.

    Args:
        topk: tokens that are chosen.
        keys: bytes [pages, 64, 132].
        more: attributes of SGLang's indexer.
    """

    def __init__(self, topk: int, keys: torch.Tensor, **more: Any) -> None:
        self.module = importlib.import_module("sglang.srt.layers.attention.dsa.dsa_indexer")
        self.indexer = self.module.Indexer(topk, **more)
        pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
        context = importlib.import_module("sglang.srt.model_executor.forward_context")
        self.pool = context.pool = pools.DSATokenToKVPool(keys)
        self.page_size = 64

    def paged(
        self, q8: torch.Tensor, weights: torch.Tensor, lens: list[int], seen: torch.Tensor, table: torch.Tensor, *,
        each: int = 1, fused: bool = True, verify: bool = False,
    ) -> Any:  # fmt: skip
        """Choose for `each` tokens of every request.

        Args:
            lens: of requests.
            seen: tokens that each token sees.
            table: a row for each token.
        """
        metadata = self._metadata(lens, [each] * len(lens), seen, table, "PAGED", not fused)
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: verify))
        stock = self.module.Indexer._get_topk_paged
        return indexer.get_topk_paged(stock, self.indexer, batch, 3, q8, weights, metadata)

    def ragged(
        self, q8: torch.Tensor, weights: torch.Tensor, query_lens: list[int], lens: list[int], table: torch.Tensor,
        form: str, out: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Choose for requests of so many query tokens and keys, in a form: "slots", "gathered" or "positions"."""
        begins = torch.tensor(lens, dtype=torch.int32).cumsum(0).int() - torch.tensor(lens, dtype=torch.int32)
        requests = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(query_lens)).int()
        seen = torch.cat([torch.arange(n - m + 1, n + 1) for m, n in zip(query_lens, lens, strict=True)]).int()
        metadata = self._metadata(
            lens, query_lens, seen, table, "PAGED" if form == "slots" else "RAGGED", form == "positions"
        )
        first = begins[requests.long()]
        metadata.requests, metadata.ranges = requests, (first, first + seen)
        metadata.attn_metadata.topk_indices_offset = first if form == "gathered" else None
        stock = self.module.Indexer._get_topk_ragged
        return indexer.get_topk_ragged(stock, self.indexer, False, None, 3, q8, weights, metadata, topk_result=out)

    def _metadata(
        self, lens: list[int], extend_lens: list[int], seen: torch.Tensor, table: torch.Tensor, method: str,
        unfused: bool,
    ) -> Any:  # fmt: skip
        module = importlib.import_module("sglang.srt.layers.attention.dsa.dsa_indexer_metadata")
        methods = importlib.import_module("sglang.srt.layers.attention.dsa.dsa_topk_backend").TopkTransformMethod
        return module.DSAIndexerMetadata(
            SimpleNamespace(page_size=self.page_size), methods[method], torch.tensor(lens, dtype=torch.int32),
            extend_lens, seen, table, force_unfused_topk=unfused,
        )  # fmt: skip
