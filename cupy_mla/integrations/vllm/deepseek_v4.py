"""DeepSeek-V4 in vLLM on our attention and index operations.

vLLM's V4 layers call functions that their module has imported by name. When this module is imported, those names are
bound to ours. vLLM's model registry takes V4's model class from here, so that happens only if a V4 model is loaded.
Queries keep the padded heads that the layers allocate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.models import deepseek_v4 as stock
from vllm.models.deepseek_v4.nvidia import flashmla as layers

from ...ops import compressed, swa
from ...ops.attention import sparse_decode, sparse_prefill
from ...ops.gather import dequantize_and_gather_k_cache
from . import warm

if TYPE_CHECKING:
    from ..untyped import Untyped as StockModel
else:
    StockModel = stock.DeepseekV4ForCausalLM


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    *,
    indices: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    **dense: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse_decode` with FlashMLA's keywords. Those for dense attention and for FlashMLA's schedule are ignored."""
    return sparse_decode(
        q, k_cache, indices, softmax_scale, attn_sink=attn_sink, topk_length=topk_length, extra_k_cache=extra_k_cache,
        extra_indices=extra_indices_in_kvcache, extra_topk_length=extra_topk_length, out=out,
    )  # fmt: skip


def compute_global_topk_indices_and_lens(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Our operation. vLLM passes the requests of all tokens of a batch; those of the first tokens are used."""
    requests = token_to_req_indices[: len(topk_indices)]
    return compressed.compute_global_topk_indices_and_lens(
        topk_indices, requests, block_table, block_size, is_valid_token
    )


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    **images: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Our operation, with vLLM's keywords for tokens of images. `out` is the pair of both results."""
    rows, lens = out or (None, None)
    return swa.combine_topk_swa_indices(
        topk_indices, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N, **images,
        out=rows, lens=lens,
    )  # fmt: skip


OURS: dict[str, Callable[..., Any]] = {
    "flash_mla_sparse_fwd": sparse_prefill,
    "flash_mla_with_kvcache": flash_mla_with_kvcache,
    "combine_topk_swa_indices": combine_topk_swa_indices,
    "compute_global_topk_indices_and_lens": compute_global_topk_indices_and_lens,
    "dequantize_and_gather_k_cache": dequantize_and_gather_k_cache,
}
vars(layers).update(OURS)


class DeepseekV4ForCausalLM(StockModel):
    """vLLM's model. When it is created, before weights are loaded, the kernels of its layers are compiled."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for kind in warm.v4_layers_of(vllm_config):
            warm.up(kind, torch.device(vllm_config.device_config.device_type))
