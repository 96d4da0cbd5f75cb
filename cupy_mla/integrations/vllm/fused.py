"""Norms, RoPE, quantization and cache writes of DeepSeek-V3.2's and GLM-5's layers, for GPUs below capability 8.9.

vLLM's two Triton kernels for these do not compile there, because Triton has no e4m3 below 8.9. Ours have the same names
and parameters, write the same bytes, and are made of torch's operations. Numbers stay float32 from the norm to the
code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import layer_norm, rms_norm
from vllm.v1.attention.ops import common

from ...layouts import INDEXER_FP8, V32_FP8
from ...ops.cache import concat_and_cache_mla

MAX = 448.0  # the largest e4m3 number
LEAST = 1e-4  # magnitudes below it are scaled like it, so that no scale is 0


def replace(layers: Any) -> None:
    """Bind the names in the layers' module to our functions, and keep vLLM from compiling its kernels at warm-up."""
    layers.fused_norm_rope, layers.fused_q = fused_norm_rope, fused_q
    kernel: Any = common._PACK_SEQ_TRITON_KERNEL  # of stock indexers
    kernel.get_warmup_keys = lambda **_: []


def fused_norm_rope(
    positions: torch.Tensor,
    q_c: torch.Tensor,
    q_rms_norm_w: torch.Tensor,
    q_rms_eps: float,
    kv_c: torch.Tensor,
    kv_rms_norm_w: torch.Tensor,
    kv_rms_eps: float,
    k_pe: torch.Tensor,
    k_rope_cos_sin_cache: torch.Tensor,
    index_k: torch.Tensor | None,
    index_k_layer_norm_w: torch.Tensor | None,
    index_k_layer_norm_bias: torch.Tensor | None,
    index_k_layer_norm_eps: float,
    index_k_rope_cos_sin_cache: torch.Tensor | None,
    topk_indices_buffer: torch.Tensor,
    slot_mapping: torch.Tensor | None = None,
    indexer_slot_mapping: torch.Tensor | None = None,
    indexer_k_cache: torch.Tensor | None = None,
    mla_kv_cache: torch.Tensor | None = None,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    kv_c_out: torch.Tensor | None = None,
    k_pe_out: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """The normalised queries [T, q]. Latent rows and the indexer's keys are written to their outputs and caches.

    Args:
        topk_indices_buffer: its first T rows become -1 if the layer has an indexer.
        slot_mapping: [T] int64, or longer; tokens with negative slots are written to no cache.
        mla_kv_cache: [blocks, block_size, 576] bfloat16, or [..., 656] in layout V32_FP8.
        others: arguments for other cache types, GPUs and kinds of parallelism, which are not used.
    """
    tokens = len(positions)
    query = rms_norm(q_c, q_c.shape[-1:], q_rms_norm_w, q_rms_eps)
    latent = rms_norm(kv_c.float(), kv_c.shape[-1:], kv_rms_norm_w.float(), kv_rms_eps)
    rope = rotated(k_pe, angles(k_rope_cos_sin_cache, positions), interleaved=True)
    for to, numbers in ((kv_c_out, latent), (k_pe_out, rope)):
        if to is not None:
            to.copy_(numbers)
    if slot_mapping is not None and mla_kv_cache is not None:
        _write_latent(mla_kv_cache, latent, rope, slot_mapping[:tokens])
    if not has_indexer:
        return query
    topk_indices_buffer[:tokens] = -1
    if slot_mapping is not None and indexer_k_cache is not None:
        assert index_k is not None
        assert index_k_rope_cos_sin_cache is not None
        key = layer_norm(
            index_k.float(), index_k.shape[-1:], index_k_layer_norm_w, index_k_layer_norm_bias, index_k_layer_norm_eps
        )
        key = rotated(key, angles(index_k_rope_cos_sin_cache, positions), index_rope_interleave)
        slots = slot_mapping if indexer_slot_mapping is None else indexer_slot_mapping
        _write_keys(indexer_k_cache, key, slots[:tokens].where(slot_mapping[:tokens] >= 0, -1))
    return query


def fused_q(
    positions: torch.Tensor,
    q_pe: torch.Tensor,
    q_pe_cos_sin_cache: torch.Tensor,
    index_q: torch.Tensor | None,
    index_q_cos_sin_cache: torch.Tensor | None,
    ql_nope: torch.Tensor,
    q_scale: torch.Tensor,
    index_weights: torch.Tensor | None,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    quantize_mqa: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """The indexer's queries [T, h, 128] e4m3 and weights [T, h] float32, or None without an indexer; and q_pe
    rotated."""
    if quantize_mqa:
        raise NotImplementedError("attention of ours takes no FP8 queries over sparse rows")
    q_pe = rotated(q_pe, angles(q_pe_cos_sin_cache, positions)[:, None], interleaved=True).to(q_pe.dtype)
    if not has_indexer:
        return None, None, q_pe
    assert index_q is not None
    assert index_q_cos_sin_cache is not None
    assert index_weights is not None
    query = rotated(index_q, angles(index_q_cos_sin_cache, positions)[:, None], index_rope_interleave)
    scale = power_of_two(query.abs().amax(-1).clamp(min=LEAST) / MAX)
    weights = index_weights.float() * scale * index_weights_softmax_scale * index_weights_head_scale
    return (query / scale[..., None]).to(torch.float8_e4m3fn), weights, q_pe


def angles(cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotations of tokens as complex numbers [T, r / 2]. A row of `cos_sin` has r / 2 cosines and as many sines."""
    return torch.complex(*cos_sin[positions].float().chunk(2, -1))


def rotated(x: torch.Tensor, by: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [..., d] in float32, with its first r values rotated by complex numbers [..., r / 2].

    Args:
        interleaved: values 2i and 2i + 1 are a pair, else i and i + r / 2.
    """
    half = by.shape[-1]
    x = x.float()
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        parts = [torch.view_as_real(torch.view_as_complex(turned.unflatten(-1, (half, 2))) * by).flatten(-2)]
    else:
        product = torch.complex(turned[..., :half], turned[..., half:]) * by
        parts = [product.real, product.imag]
    parts += [rest] if rest.shape[-1] else []
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below each positive float32."""
    return ((x.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)


def _write_latent(cache: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor) -> None:
    if cache.dtype == torch.bfloat16:
        concat_and_cache_mla(latent.bfloat16(), rope.bfloat16(), cache, slots)
        return
    if cache.shape[-1] != V32_FP8.last_axis:
        raise NotImplementedError(f"cache rows of {cache.shape[-1]} values of {cache.dtype}")
    tiles = latent.unflatten(-1, (V32_FP8.num_scales, V32_FP8.scale_tile))
    scales = power_of_two((tiles.abs().amax(-1, keepdim=True) * (1 / MAX)).clamp(min=LEAST))
    codes = (tiles / scales).to(torch.float8_e4m3fn).flatten(-2)
    parts = (codes, scales.flatten(-2), rope.bfloat16())
    rows = torch.cat([part.view(torch.uint8) for part in parts], -1)
    _write(slots, cache.shape[1], (cache.view(torch.uint8), rows))


def _write_keys(cache: torch.Tensor, key: torch.Tensor, slots: torch.Tensor) -> None:
    """A block has the codes of all its keys, then their scales."""
    scales = power_of_two(key.abs().amax(-1, keepdim=True).clamp(min=LEAST) / MAX)
    codes = (key / scales).to(torch.float8_e4m3fn)
    cache, width = cache.view(torch.uint8), INDEXER_FP8.d_qk
    blocks, block_size, _ = cache.shape
    stride, start = cache.stride(0), cache.storage_offset()
    of_codes = cache.as_strided((blocks, block_size, width), (stride, width, 1), start)
    of_scales = cache.as_strided((blocks, block_size, 4), (stride, 4, 1), start + block_size * width)
    _write(slots, block_size, (of_codes, codes.view(torch.uint8)), (of_scales, scales.view(torch.uint8)))


def _write(slots: torch.Tensor, block_size: int, *parts: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write rows [T, n] to their slots in places [blocks, block_size, n]. Tokens with negative slots write nothing.

    Only the device knows which these are, and the step may be in a graph, so no token can be left out. Such a token
    writes what the first other token writes, to the same slot. If there is no other token, it writes what is in slot 0
    already.
    """
    written = slots >= 0
    of = torch.where(written, torch.arange(len(slots), device=slots.device), written.int().argmax())
    slots = slots[of].clamp(min=0)
    block, offset = slots // block_size, slots % block_size
    for places, rows in parts:
        places[block, offset] = torch.where(written[of, None], rows[of], places[block, offset])
