"""Front door with FlashMLA's names and signatures: a drop-in for the module `flash_mla`::

    from cupy_mla import flash_mla          # instead of: import flash_mla

Takes torch, CuPy and NumPy arrays. Beyond FlashMLA: any head count from 1 to 128, any topk and block size, lengths
and an extra cache for the V3.2 layout as well, sparse decode on a bf16 paged cache, dense decode over FP8 rows and with
an attention sink, GPUs from sm_80 on, and CPUs.

Source: FlashMLA's Python interface as it ships in vLLM 0.22.1 and in sgl-flash-mla 1.0, and vLLM's
`flash_mla_with_kvcache_fp8`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from . import layouts
from .calls.operation import operation, traced_by_torch
from .checks.options import require_bool, require_choice, require_scale, shown
from .checks.validate import require_d_v
from .cuda.program import Plan
from .ops import attention, dense
from .typing import A, AnyArray, CallScale

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "flash_mla_with_kvcache_fp8",
    "get_mla_metadata",
    "get_mla_metadata_dense_fp8",
]

LOG2_E = math.log2(math.e)
# The layouts by the names that `kv_format` has for them.
KV_FORMATS = {"V32": "v32_fp8", "V32_NO_ROPE": "v32_nope_fp8", "V4": "v4_fp8", "V41": "v41_fp8"}

Shapes = tuple[int, ...]


@dataclass
class FlashMLASchedMeta:
    """The schedule of decode calls. All must have the shapes of the first one.

    Attributes:
        shapes: the values of `FACTS` that the schedule was planned for; None before the first call.
        num_splits: splits of each query's rows that the caller prescribes; None: chosen at each call.
        batch_invariant: as for `cupy_mla.sparse_decode`.
        plan: the first call's kernel leaves in it, on the GPU, how it divided its lists or its requests, and the next
            calls load it.
    """

    shapes: Shapes | None = None
    num_splits: int | None = None
    batch_invariant: bool = False
    plan: Plan = field(default_factory=Plan, repr=False, compare=False)


def get_mla_metadata(*args: Any, batch_invariant: bool = False, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An empty schedule for `flash_mla_with_kvcache`, which fills it at its first call.

    Take a new one for each step, and use it for all layers of the step. The first call finds out where index lists
    without lengths end, or how long requests are, and how to divide them over the GPU. Later calls divide theirs in the
    same way. If their lists or lengths differ, they are slower but not wrong. In a captured CUDA graph the first call
    finds it out at each replay.

    As in FlashMLA, positional and other keyword arguments are accepted and ignored, and the second value of the
    returned pair is None.

    Args:
        batch_invariant: calls with this schedule give a request the same bits whatever else is in the batch; see
            `cupy_mla.sparse_decode`.

    Raises:
        TypeError: `batch_invariant` is no bool.

    Example:
        >>> schedule, _ = cupy_mla.get_mla_metadata()
    """
    return FlashMLASchedMeta(batch_invariant=require_bool("batch_invariant", batch_invariant)), None


def get_mla_metadata_dense_fp8(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An empty schedule for `flash_mla_with_kvcache_fp8`; arguments are ignored, as those of `get_mla_metadata` are.

    Example:
        >>> schedule, _ = cupy_mla.get_mla_metadata_dense_fp8()
    """
    return get_mla_metadata()


def flash_mla_sparse_fwd(
    q: A,
    kv: AnyArray,
    indices: AnyArray,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: AnyArray | None = None,
    topk_length: AnyArray | None = None,
    out: A | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool = False,
) -> tuple[A, A, A]:
    """`cupy_mla.sparse_prefill` under FlashMLA's name, with the same arguments, results and errors.

    `lse = log(sum_j exp(sm_scale * q . kv_j))`, natural logarithm, over a token's valid rows; `attn_sink` scales out
    alone; a token without a valid row has out 0, max_logits -inf and lse +inf. `cupy_mla.sparse_prefill` says more.

    Args:
        use_legacy: chooses among FlashMLA's kernels; it changes nothing here.
        return_log2_lse: return lse in base 2, `lse * log2(e)`; max_logits are not changed.

    Example:
        >>> q, kv = np.zeros((1, 64, 576), bfloat16), np.ones((10, 1, 576), bfloat16)
        >>> out, max_logits, lse = cupy_mla.flash_mla_sparse_fwd(q, kv, np.array([[[1, 4]]], np.int32), 192**-0.5)
        >>> out.shape, float(out[0, 0, 0])
        ((1, 64, 512), 1.0)
    """
    require_bool("use_legacy", use_legacy)
    returns_log2 = require_bool("return_log2_lse", return_log2_lse)
    more = {} if out is None else {"out": out}
    lse: Any
    out, max_logits, lse = attention.sparse_prefill(
        q, kv, indices, sm_scale, d_v=d_v, attn_sink=attn_sink, topk_length=topk_length, **more
    )
    return out, max_logits, lse * LOG2_E if returns_log2 else lse  # a new array: autograd keeps lse


def flash_mla_with_kvcache(
    q: A,
    k_cache: AnyArray,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: AnyArray | None = None,
    attn_sink: AnyArray | None = None,
    extra_k_cache: AnyArray | None = None,
    extra_indices_in_kvcache: AnyArray | None = None,
    topk_length: AnyArray | None = None,
    extra_topk_length: AnyArray | None = None,
    out: A | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: CallScale | None = None,
    descale_k: CallScale | None = None,
) -> tuple[A, A]:
    """Decode on a paged cache: with `indices` `cupy_mla.sparse_decode`, without them `cupy_mla.dense_decode`. These say
    what is computed, shapes and dtypes.

    `lse = log(sum_j exp(softmax_scale * q . row_j))`, natural logarithm, over a token's valid slots of both caches, or
    over the rows of its request: where `causal`, query i of s_q sees the first `cache_seqlens - s_q + 1 + i`, else all.
    `attn_sink` scales out alone; a token without a row has out 0 and lse +inf.

    Args:
        block_table: [b, width] int32 blocks of each request; ignored in sparse mode (`indices` given).
        cache_seqlens: [b] int32 rows of each request; ignored in sparse mode.
        head_dim_v: value width, 512.
        tile_scheduler_metadata: from `get_mla_metadata`; a call with other shapes than the one it was planned for
            is an error.
        num_splits: must be None; kept for FlashMLA's signature.
        softmax_scale: default `d_qk ** -0.5`, as in FlashMLA. DeepSeek-V3.2's is another: see
            `cupy_mla.sparse_prefill`.
        causal: of dense mode, whether a query sees no row behind its own; must be False in sparse mode.
        is_fp8_kvcache: whether `k_cache` holds FP8 rows; must agree with `k_cache`; None: as `k_cache` says.
        indices: [b, s_q, topk] int32 slots; None: dense mode, which takes neither lengths of lists nor an extra cache.
        enable_batch_invariant: as `get_mla_metadata(batch_invariant=True)`.
        use_legacy: chooses among FlashMLA's kernels. With it `kv_format="V41"` is V41_FP8_SPLIT, which those kernels
            read; it changes nothing else.
        extra_k_cache: of the same layout as `k_cache`. Rows of 288 bytes beside V41_FP8 ones are V41_FP4, beside
            V41_FP8_SPLIT ones V41_FP4_SPLIT.
        kv_format: the layout of `k_cache`, with which it must agree: "V32" (V32_FP8), "V32_NO_ROPE" (V32_NOPE_FP8),
            "V4" (V4_FP8), "V41" (V41_FP8), or a name that `cupy_mla.empty_cache` takes. None: `k_cache` tells it,
            unless rows have 528 bytes.
        descale_q, descale_k: `q_scale` and `k_scale` of `cupy_mla.sparse_decode` and `cupy_mla.dense_decode`, of q
            in e4m3 and of rows in layout PLAIN_FP8.

    Returns:
        out [b, s_q, h_q, 512] bfloat16, lse [b, h_q, s_q] float32.

    Raises:
        TypeError, ValueError: as `cupy_mla.sparse_decode` or `cupy_mla.dense_decode`, and for a schedule planned for
            other shapes.

    Example:
        >>> q, cache = np.zeros((1, 1, 64, 576), bfloat16), np.zeros((4, 64, 1, 656), np.uint8)
        >>> schedule, _ = cupy_mla.get_mla_metadata()
        >>> out, lse = cupy_mla.flash_mla_with_kvcache(
        ...     q, cache, None, None, 512, schedule, softmax_scale=192**-0.5, is_fp8_kvcache=True,
        ...     indices=np.array([[[130, 65]]], np.int32),
        ... )
        >>> out.shape, lse.shape
        ((1, 1, 64, 512), (1, 64, 1))
    """
    meta = tile_scheduler_metadata
    if not isinstance(meta, FlashMLASchedMeta):
        raise TypeError(f"tile_scheduler_metadata must come from get_mla_metadata, got {type(meta).__name__}")
    if num_splits is not None:
        raise ValueError(
            f"num_splits must be None, the schedule lives in tile_scheduler_metadata, got {shown(num_splits)}"
        )
    batch_invariant = meta.batch_invariant
    if enable_batch_invariant is not False:
        batch_invariant |= require_bool("enable_batch_invariant", enable_batch_invariant)
    if use_legacy is not False and require_bool("use_legacy", use_legacy) and kv_format == "V41":
        kv_format = "v41_fp8_split"
    shapes = meta.shapes
    if shapes is None and not traced_by_torch():
        shapes = _shapes(q, k_cache, indices, extra_k_cache, extra_indices_in_kvcache, causal)
    settings = (
        head_dim_v, softmax_scale, causal, is_fp8_kvcache, batch_invariant, shapes, meta.num_splits, kv_format,
    )  # fmt: skip
    scales = {} if descale_q is None and descale_k is None else {"q_scale": descale_q, "k_scale": descale_k}
    if indices is None:
        _require_no_lists(
            topk_length=topk_length, extra_k_cache=extra_k_cache, extra_indices_in_kvcache=extra_indices_in_kvcache,
            extra_topk_length=extra_topk_length,
        )  # fmt: skip
        if block_table is None or cache_seqlens is None:
            raise ValueError(
                "indices is None, which asks for dense decode: block_table and cache_seqlens must be given"
            )
        sink = {} if attn_sink is None else {"attn_sink": attn_sink}
        others = {**sink, **scales} if out is None else {**sink, **scales, "out": out}
        results = _dense_with_kvcache(q, k_cache, block_table, cache_seqlens, meta.plan, settings, **others)
    else:
        absent = attn_sink is None and topk_length is None and extra_k_cache is None
        if absent and extra_indices_in_kvcache is None and extra_topk_length is None and out is None:
            others = scales  # the usual call, which has less host time without the arguments below
        else:
            others = {
                "attn_sink": attn_sink, "topk_length": topk_length, "extra_k_cache": extra_k_cache,
                "extra_indices": extra_indices_in_kvcache, "extra_topk_length": extra_topk_length, "out": out, **scales,
            }  # fmt: skip
        results = _with_kvcache(q, k_cache, indices, meta.plan, settings, **others)
    meta.shapes = shapes
    return results


def flash_mla_with_kvcache_fp8(
    q: A,
    k_cache: AnyArray,
    block_table: AnyArray,
    cache_seqlens: AnyArray,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: CallScale | None = None,
    descale_k: CallScale | None = None,
) -> tuple[A, A]:
    """Dense decode over e4m3 rows with one scale, under vLLM's name: `cupy_mla.dense_decode` over layout PLAIN_FP8.

    Args:
        q: [b, s_q, h_q, 576 | 512] float8_e4m3fn, or bfloat16 without `descale_q`.
        k_cache: [num_blocks, block_size, (1,) 576 | 512] float8_e4m3fn.
        block_table: [b, width] int32 blocks of each request.
        cache_seqlens: [b] int32 rows of each request.
        head_dim_v: value width, 512.
        tile_scheduler_metadata: from `get_mla_metadata_dense_fp8` or `get_mla_metadata`, one for the calls of a step.
            Anything else is ignored; then each call divides its rows anew, by lengths on the device.
        num_splits: ignored.
        softmax_scale: default `d_qk ** -0.5`.
        causal: whether a query sees no row behind its own.
        descale_q, descale_k: `q_scale` and `k_scale` of `cupy_mla.dense_decode`.

    Returns:
        out [b, s_q, h_q, 512] bfloat16, lse [b, h_q, s_q] float32.

    Raises:
        TypeError, ValueError: as `cupy_mla.dense_decode`, and where rows are of another layout.

    Example:
        >>> from ml_dtypes import float8_e4m3fn
        >>> q, cache = np.zeros((1, 1, 16, 576), float8_e4m3fn), np.ones((2, 64, 1, 576), float8_e4m3fn)
        >>> table, lens = np.array([[1, 0]], np.int32), np.array([100], np.int32)
        >>> out, lse = cupy_mla.flash_mla_with_kvcache_fp8(
        ...     q, cache, table, lens, 512, None, None, descale_q=1.0, descale_k=0.5
        ... )
        >>> out.shape, float(out[0, 0, 0, 0])
        ((1, 1, 16, 512), 0.5)
    """
    settings = head_dim_v, softmax_scale, causal, True, False, None, None, "plain_fp8"
    scales = {"q_scale": descale_q, "k_scale": descale_k}
    plan = tile_scheduler_metadata.plan if isinstance(tile_scheduler_metadata, FlashMLASchedMeta) else None
    return _dense_with_kvcache(q, k_cache, block_table, cache_seqlens, plan, settings, **scales)


# What a schedule is planned for: the axes of q, and sizes of other arrays; -1 for arrays that are not there.
FACTS = ("q", "q", "q", "q", "block_size", "is_fp8_kvcache", "topk", "extra_block_size", "extra_topk", "causal")


def _shapes(
    q: Any, k_cache: Any, indices: Any, extra_k_cache: Any = None, extra_indices: Any = None, causal: Any = False
) -> Shapes | None:
    """The values of `FACTS` for a call; None for arguments that the checks will refuse."""
    try:
        is_fp8 = k_cache.dtype.itemsize != 2
        b, s_q, h_q, d_qk = q.shape
        topk = -1 if indices is None else indices.shape[-1]
        extra_topk = -1 if extra_indices is None else extra_indices.shape[-1]
        extra_block = -1 if extra_k_cache is None else extra_k_cache.shape[1]
        return b, s_q, h_q, d_qk, k_cache.shape[1], int(is_fp8), topk, extra_block, extra_topk, int(causal)
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def _require_planned(planned: Shapes | None, shapes: Shapes | None) -> None:
    """Check that a schedule, if it is planned already, was planned for such a call."""
    if planned is None or shapes is None or planned == shapes:
        return
    for name, value, planned_for in zip(FACTS, shapes, planned, strict=True):
        if value != planned_for:
            this, other = (shapes[:4], planned[:4]) if name == "q" else (value, planned_for)
            raise ValueError(
                f"tile_scheduler_metadata was planned for {name} = {other}, this call has {this}; "
                "take a fresh one from get_mla_metadata"
            )


def _require_no_lists(**given: Any) -> None:
    """Check that a dense decode gets no argument that belongs to index lists."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} was given, but indices is None, which asks for dense decode: that has no lists")


def require_sparse(head_dim_v: Any, causal: Any) -> None:
    """Check settings of sparse decode."""
    require_d_v("head_dim_v", head_dim_v)
    if require_bool("causal", causal):
        raise ValueError("causal must be False when indices is given: the index list says what is attended")


def layout_of(kv_format: Any) -> str | None:
    """The layout that `kv_format` names, or a layout's own name."""
    if kv_format is None:
        return None
    if isinstance(kv_format, str) and kv_format.lower() in (layout.name for layout in layouts.EXTRA_LAYOUTS):
        raise ValueError(
            f"kv_format: {kv_format!r} is a format of extra caches alone: give such a cache as extra_k_cache, "
            'beside k_cache with kv_format="V41"'
        )
    require_choice("kv_format", kv_format, (*KV_FORMATS, *layouts.names(layouts.DENSE_LAYOUTS)))
    return KV_FORMATS.get(kv_format, kv_format)


# FlashMLA's names of arguments, by those of `attention.decode` and `dense.decode`.
NAMES = {
    "q_scale": "descale_q", "k_scale": "descale_k", "layout": "kv_format", "extra_indices": "extra_indices_in_kvcache",
    "seq_lens": "cache_seqlens",
}  # fmt: skip

# Below, `settings` are head_dim_v, softmax_scale, causal, is_fp8_kvcache, batch_invariant, the shapes that the schedule
# is planned for, its num_splits, and kv_format.


def _door(is_fp8: bool | None, kv_format: str | None, extra_k_cache: Any = None) -> attention.Door:
    """What the caller says about the caches, with FlashMLA's names of arguments."""
    if is_fp8 is not None:
        require_bool("is_fp8_kvcache", is_fp8)
    layout, extra = layout_of(kv_format), None
    if extra_k_cache is not None and getattr(extra_k_cache, "shape", (None,))[-1] == layouts.V41_FP4.last_axis:
        extra = layouts.FP4_BESIDE.get(layout)
    return attention.Door(is_fp8, layout, extra, NAMES)


@operation
def _with_kvcache(
    q: Any, k_cache: Any, indices: Any, plan: Plan | None, settings: tuple[Any, ...], **others: Any
) -> tuple[Any, Any]:
    """The sparse decode.

    Args:
        others: the other fields of `ops.attention.Given`.
    """
    head_dim_v, softmax_scale, causal, is_fp8, batch_invariant, planned, num_splits, kv_format = settings
    require_sparse(head_dim_v, causal)
    given = attention.Given(q, k_cache, indices, **others)
    door = _door(is_fp8, kv_format, given.extra_k_cache)
    _require_planned(planned, _shapes(q, k_cache, indices, given.extra_k_cache, given.extra_indices))
    if given.topk_length is not None or given.extra_topk_length is not None or given.extra_k_cache is not None:
        plan = None  # with lengths or an extra cache the lists of later calls may end elsewhere
    scale = None if softmax_scale is None else require_scale("softmax_scale", softmax_scale)
    return attention.decode(given, scale, num_splits, batch_invariant, plan, door=door)


@operation
def _dense_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    plan: Plan | None,
    settings: tuple[Any, ...],
    **others: Any,
) -> tuple[Any, Any]:
    """The dense decode.

    Args:
        others: the other fields of `ops.dense.Given`.
    """
    head_dim_v, softmax_scale, causal, is_fp8, batch_invariant, planned, num_splits, kv_format = settings
    require_d_v("head_dim_v", head_dim_v)
    causal = require_bool("causal", causal)
    door = _door(is_fp8, kv_format)
    _require_planned(planned, _shapes(q, k_cache, None, causal=causal))
    scale = None if softmax_scale is None else require_scale("softmax_scale", softmax_scale)
    given = dense.Given(q, k_cache, block_table, cache_seqlens, **others)
    return dense.decode(given, scale, causal, None, num_splits, batch_invariant, door, plan)
