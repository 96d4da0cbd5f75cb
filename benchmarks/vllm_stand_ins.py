"""What vLLM takes from TileLang, CuTe DSL and a newer NCCL, by torch and Triton, and a loader of random weights.

These packages are larger than all of vLLM that is packed. DeepSeek-V4's and V4.1's hyper-connections come from
TileLang, V4's compressor from CuTe DSL, as does the merge of what ranks choose that share rows (decode context
parallelism). What these ranks attend is added up by vLLM's PyNccl, which needs a later NCCL than torch 2.11 has. None
of that is attention. With `VLLM_STAND_INS=1` vLLM's own torch operations and Triton kernels of the same results run
instead, ours and vLLM's engine alike; `vllm_engine.py` has vLLM load this as a plug-in, in each process.
"""

from __future__ import annotations

import importlib
import os
import sys
import zlib
from types import ModuleType
from typing import Any

import torch

LOADER = "random"  # name of the loader for vLLM's `load_format`


def register() -> None:
    """Replace what needs those packages, unless the environment says nothing of it. May be called again."""
    if os.environ.get("VLLM_STAND_INS") != "1":
        return
    mhc = importlib.import_module("vllm.model_executor.kernels.mhc.tilelang")
    vars(mhc).update(
        mhc_pre_tilelang=pre, mhc_pre_broadcast_tilelang=pre_of_one, mhc_fused_post_pre_tilelang=post_and_pre,
        mhc_post_tilelang=reference("post"), hc_head_fused_kernel_tilelang=head, mhc_pre_delayed_tilelang=delayed_pre,
        mhc_fused_post_pre_delayed_tilelang=delayed_post_and_pre,
    )  # fmt: skip
    compressor: Any = ModuleType("vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl")
    compressor._SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL = compress
    sys.modules[compressor.__name__] = compressor
    importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")._merge_dcp_topk_global = merge
    # Without PyNccl, which vLLM turns off without a word where NCCL is older than 2.29.7, its own writes no result.
    communicators = importlib.import_module("vllm.distributed.device_communicators.cuda_communicator")
    communicators.CudaCommunicator.reduce_scatter = communicators.DeviceCommunicatorBase.reduce_scatter
    register_loader()


# --- DeepSeek-V4's and V4.1's hyper-connections, V4's compressor ----------------------------------------------


def reference(part: str) -> Any:
    """vLLM's reference of a part of the hyper-connections, "pre" or "post"."""
    return vars(importlib.import_module("vllm.model_executor.kernels.mhc.torch"))[f"mhc_{part}_torch"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def pre(
    residual: torch.Tensor, *coefficients: Any, norm_weight: torch.Tensor | None = None, norm_eps: float = 1e-6,
    n_splits: int = 1, tile_n: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Mixes [T, n, 1] and [T, n, n], and a sublayer's input [T, hidden], of streams [T, n, hidden]."""
    post_mix, comb_mix, x = reference("pre")(residual, *coefficients)
    return post_mix, comb_mix, x if norm_weight is None else rms_norm(x, norm_weight, norm_eps)


def pre_of_one(
    x: torch.Tensor, fn: torch.Tensor, *coefficients: Any, fn_broadcast: Any = None, **more: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first layer's, whose streams are all the embeddings [T, hidden]; the streams come first."""
    residual = x[:, None].expand(-1, fn.shape[1] // x.shape[1], -1).contiguous()
    return residual, *pre(residual, fn, *coefficients, **more)


def post_and_pre(
    x: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, comb_mix: torch.Tensor, *coefficients: Any,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """A sublayer's output joins the streams, and the next one's input is taken of them."""
    residual = reference("post")(x, residual, post_mix, comb_mix)
    return residual, *pre(residual, *coefficients, **more)


def delayed_pre(
    residual: torch.Tensor, *coefficients: Any, norm_weight: torch.Tensor, norm_eps: float = 1e-6, **more: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `pre`, of V4.1: the input is mixed as the sublayer before said, and the mix for the next one comes last."""
    post_mix, comb_mix, x, next_mix = reference("pre_delayed")(residual, *coefficients, **more)
    return post_mix, comb_mix, rms_norm(x, norm_weight, norm_eps), next_mix


def delayed_post_and_pre(
    x: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, comb_mix: torch.Tensor, *coefficients: Any,
    capture_aux: bool = False, **more: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """As `post_and_pre`, of V4.1; the last result is the mean of the streams, for draft models."""
    residual = reference("post")(x, residual, post_mix, comb_mix)
    aux = residual.mean(1) if capture_aux else residual[:0, 0]
    return residual, *delayed_pre(residual, *coefficients, **more), aux


def head(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, rms_eps: float, eps: float
) -> torch.Tensor:
    """The model's output [T, hidden] of its streams [T, n, hidden], each with a gate of its own."""
    flat = streams.flatten(1).float()
    mixes = (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    gates = torch.sigmoid(mixes * scale + base) + eps
    return torch.einsum("tn,tnh->th", gates, streams.float()).to(streams.dtype)


def compress(*, store_full_kv: bool, store_full_fp8: bool, fp8_scale: Any, **step: Any) -> None:
    """vLLM's Triton kernel, which other GPUs run, over V4's FP8 rows."""
    assert not store_full_kv
    assert not store_full_fp8
    kernels = importlib.import_module("vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache")
    kernels.compress_norm_rope_store_triton(**step)


# --- ranks that share rows ------------------------------------------------------------------------------------


def merge(
    logits: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_tokens: int,
    dcp_rank: int,
    dcp_world_size: int,
    cp_interleave: int,
    row_starts: torch.Tensor | None = None,
) -> None:
    """Positions in a rank's own rows become those of the best of all ranks, in the sequence; -1 behind.

    Of equal logits the lower position is chosen.

    Args:
        logits: [T, columns] float32, of the rank's own rows.
        topk_indices: [T, topk_tokens] int32, -1 where there is none; is written.
        row_starts: [T] the column of a token's position 0; None: column 0.
    """
    if dcp_world_size <= 1:
        return
    group = importlib.import_module("vllm.distributed").get_dcp_group()
    packed = candidates(logits, topk_indices, dcp_rank, dcp_world_size, cp_interleave, row_starts)
    topk_indices.copy_(best(group.all_gather(packed, dim=1), topk_tokens))


def candidates(
    logits: torch.Tensor, chosen: torch.Tensor, rank: int, ranks: int, interleave: int, starts: torch.Tensor | None
) -> torch.Tensor:
    """A rank's [T, k, 2]: logits, and positions in the sequence as float32; -inf and -1 where there is none."""
    at = chosen.clamp(min=0)
    column = (at if starts is None else at + starts[:, None]).long()
    if logits.shape[1] == 0:
        logits = logits.new_zeros(len(logits), 1)
    scores = logits.gather(1, column.clamp_(max=logits.shape[1] - 1))
    places = at // interleave * (ranks * interleave) + rank * interleave + at % interleave
    none = chosen < 0
    return torch.stack([scores.masked_fill(none, -torch.inf), places.masked_fill(none, -1).float()], -1)


def best(gathered: torch.Tensor, k: int) -> torch.Tensor:
    """Positions [T, k] int32 of the best of candidates [T, n, 2]."""
    by_place = gathered[..., 1].sort(dim=1, stable=True)
    scores = gathered[..., 0].gather(1, by_place.indices).sort(dim=1, descending=True, stable=True)
    return by_place.values.gather(1, scores.indices[:, :k]).int()


# --- random weights -------------------------------------------------------------------------------------------


def weight_of(name: str, like: torch.Tensor) -> torch.Tensor:
    """Numbers for a parameter, the same in every process; their deviation lets logits spread as in a trained model.

    Norms are ones, integers (which expert a token gets) are what they are.
    """
    last = name.rpartition(".")[2]
    if not like.is_floating_point():
        return like
    if "norm" in name and like.ndim == 1:
        return torch.ones_like(like)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    gain = 1.0 if "embed" in name else 3.0 * like.shape[-1] ** -0.5 if "lm_head" in name else like.shape[-1] ** -0.5
    if like.ndim == 1 or last in ("ape", "attn_sink"):
        gain = 0.5
    return torch.randn(like.shape, generator=generator).mul_(gain).to(like.dtype)


def register_loader() -> None:
    """`load_format="random"`: weights of `weight_of`, without a checkpoint."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    if LOADER in loaders._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    @loaders.register_model_loader(LOADER)
    class RandomLoader(loaders.BaseModelLoader):  # type: ignore[name-defined,misc]
        def download_model(self, model_config: Any) -> None: ...

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            experts = model_config.hf_config.n_routed_experts
            for name, parameter in model.named_parameters():
                if name.endswith("tid2eid"):
                    every = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)
                    parameter.data.copy_(every * 7 % experts)
                else:
                    parameter.data.copy_(weight_of(name, parameter.data))
            if hasattr(model, "process_weights_after_loading"):
                model.process_weights_after_loading()
