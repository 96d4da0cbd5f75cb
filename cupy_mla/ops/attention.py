"""Sparse attention over chosen KV rows: `sparse_prefill` on flat bf16 rows, `sparse_decode` on a paged cache.

Their docstrings say what is computed.

Source: DeepSeek-V3.2 (DeepSeek Sparse Attention); the functions' contracts are FlashMLA's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from .. import arrays, layouts
from ..arguments import Decode, Prefill
from ..arrays import Array
from ..bridges import bind
from ..calls.operation import differentiable, operation
from ..checks.options import require_bool, require_integer, require_scale, require_together
from ..checks.validate import ALIGNMENT, QUANTIZED, cache_layout, require_cache, require_d_v, require_heads
from ..checks.values import check_lists
from ..cuda import attention as cuda
from ..cuda import driver
from ..cuda.attention.choose import require_known
from ..cuda.attention.divide import MAX_SPLITS
from ..cuda.attention.problem import Problem
from ..cuda.program import Plan
from ..dtypes import BFLOAT16, FLOAT32, INT32
from ..layouts import D_V
from ..reference import attention as reference
from ..typing import A, AnyArray, CacheLayout, CallScale, PagedLayout
from .scales import require_q, scale_of_q, scale_of_rows

__all__ = ["plan_splits", "sparse_decode", "sparse_prefill"]

HEAD_DIMS = (576, 512)
# The layouts of flat rows, by whether these are quantized, and their width.
FLAT = {
    (quantized, d_qk): layouts.by_name(name, d_qk)
    for quantized, name in ((False, "bf16"), (True, "plain_fp8"))
    for d_qk in HEAD_DIMS
}


@operation
@differentiable("out")
def sparse_prefill(
    q: A,
    kv: AnyArray,
    indices: AnyArray,
    sm_scale: float,
    *,
    d_v: int = 512,
    attn_sink: AnyArray | None = None,
    topk_length: AnyArray | None = None,
    out: A | None = None,
    q_scale: CallScale | None = None,
    k_scale: CallScale | None = None,
) -> tuple[A, A, A]:
    """Sparse attention of query tokens over a flat array of KV rows, bf16 or e4m3 with one scale.

    For each query token and head, over the rows j of the token's index list that are valid::

        logit[j]   = sm_scale * dot(q, kv[j])
        max_logits = max_j logit[j]
        lse        = log(sum_j exp(logit[j]))
        out        = sum_j exp(logit[j] - lse) * kv[j, :512]

    where q is q times `q_scale` if it is e4m3, and kv[j] is kv[j] times `k_scale` if rows are.

    - Entries that are negative or not below s_kv are invalid: such a row is never read and contributes nothing. Those
      at or after the token's `topk_length` are not looked at; a length of 0 or less leaves none, one beyond topk all.
    - A row listed twice counts twice. The order of a list does not matter but for rounding.
    - With a sink s the head's out is multiplied by `1 / (1 + exp(s - lse))`, as if the softmax had one more row
      of logit s and value 0. The sink changes neither lse nor max_logits.
    - A token without a valid row has out 0, max_logits -inf and lse +inf, whatever the sink.
    - NaN and infinity in valid rows reach the token's results, those in all other rows do not.

    Products are summed in float32; weights are rounded to bfloat16 before they meet the values.

    Args:
        q: [s_q, h_q, d_qk] bfloat16, h_q 1 to 128, d_qk 576 or 512; any strides with a contiguous last axis. Over e4m3
            rows it may be float8_e4m3fn (or uint8 of the same bytes).
        kv: [s_kv, 1, d_qk] bfloat16, or float8_e4m3fn (or uint8) with rows at multiples of 16 bytes; V is the first 512
            values of a row.
        indices: [s_q, 1, topk] int32 row numbers, invalid where < 0 or >= s_kv.
        sm_scale: factor on the dot products before the softmax, the model's: of DeepSeek-V3.2 `192 ** -0.5`, by the 128
            + 64 values of a head before weights are absorbed, times the square of its yarn factor where it has one;
            of DeepSeek-V4 `512 ** -0.5`.
        d_v: value width, 512.
        attn_sink: [h_q] float32, natural-log units; -inf has no effect, +inf gives zero output.
        topk_length: [s_q] int32; entries of `indices` at or after it are not looked at.
        out: [s_q, h_q, 512] bfloat16, written in place when given.
        q_scale, k_scale: of an e4m3 q and of e4m3 rows: a positive number, or [1] or [] float32 on the device; default
            1.

    Returns:
        out [s_q, h_q, 512] bfloat16, max_logits and lse [s_q, h_q] float32 (natural logarithm), in the caller's
        kind of array on the caller's device; on a GPU in order on the caller's current stream.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        RuntimeError: CUDA arrays, and CuPy, a driver or NVRTC is missing.

    Example:
        >>> kv = np.zeros((10, 1, 576), bfloat16)
        >>> kv[:] = np.arange(10)[:, None, None]  # row j holds j
        >>> q = np.zeros((1, 2, 576), bfloat16)  # 1 query token, 2 heads, for which all rows weigh the same
        >>> indices = np.array([[[1, 4, -1]]], np.int32)  # rows 1 and 4, and an entry that counts as none
        >>> out, max_logits, lse = cupy_mla.sparse_prefill(q, kv, indices, sm_scale=192**-0.5)
        >>> out.shape, float(out[0, 0, 0])  # the mean of both rows
        ((1, 2, 512), 2.5)
        >>> lse.shape, round(float(lse[0, 0]), 4)  # log 2
        ((1, 2), 0.6931)
    """
    require_known()
    place, (q_, kv_, idx) = bind(q=q, kv=kv, indices=indices)
    sink, length, out_ = place.optional(attn_sink=attn_sink, topk_length=topk_length, out=out)
    require_d_v("d_v", d_v)
    scale = require_scale("sm_scale", sm_scale)
    s_q, h_q, d_qk = q_.require((BFLOAT16, *QUANTIZED), "s_q", "h_q", HEAD_DIMS).shape
    require_heads(h_q)
    layout = FLAT[kv_.dtype in QUANTIZED, d_qk]
    require_q(q_, layout, s_q, h_q, d_qk)
    kv_.require((BFLOAT16, *QUANTIZED), "s_kv", 1, d_qk)
    if layout.quantized and not kv_.aligned(ALIGNMENT):
        raise ValueError(f"kv: rows of {layout.name} must start at multiples of {ALIGNMENT} bytes in memory")
    kv_.without_axis(1)
    scales = scale_of_q(place, q_, q_scale), scale_of_rows(place, layout, k_scale)
    idx.require(INT32, s_q, 1, "topk").without_axis(1)
    _require_optional(sink, length, h_q, s_q)
    if arrays.CHECK_VALUES:
        check_lists(idx, kv_.shape[0], length)
    out_ = place.output("out", out_, (s_q, h_q, D_V), BFLOAT16)
    max_logits = place.output("max_logits", None, (s_q, h_q), FLOAT32)
    lse = place.output("lse", None, (s_q, h_q), FLOAT32)
    arguments = Prefill(layout, q_, kv_, idx, scale, *scales, sink, length, out_, max_logits, lse)
    place.call(cuda.sparse_prefill, reference.sparse_prefill, arguments)
    return out_.obj, max_logits.obj, lse.obj


@operation
def sparse_decode(
    q: A,
    k_cache: AnyArray,
    indices: AnyArray,
    sm_scale: float,
    *,
    attn_sink: AnyArray | None = None,
    topk_length: AnyArray | None = None,
    extra_k_cache: AnyArray | None = None,
    extra_indices: AnyArray | None = None,
    extra_topk_length: AnyArray | None = None,
    out: A | None = None,
    lse: A | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    q_scale: CallScale | None = None,
    k_scale: CallScale | None = None,
    layout: CacheLayout | None = None,
    extra_layout: PagedLayout | None = None,
) -> tuple[A, A]:
    """Sparse attention of query tokens over slots of a paged KV cache (FP8, NVFP4 or bf16), split-KV.

    For each query token and head, over the slots j of the token's index lists that are valid, row_j being the cache's
    row as numbers (`float(code) * scale`, bf16 values as they are), and q times `q_scale` where it is e4m3::

        logit[j] = sm_scale * dot(q, row_j)
        lse      = log(sum_j exp(logit[j]))
        out      = sum_j exp(logit[j] - lse) * row_j[:512]

    - With an extra cache one softmax runs over the slots of both lists: out and lse are of both together.
    - Slots that are negative or not below num_blocks * block_size are invalid: such a row is never read and contributes
      nothing. Entries at or after the request's `topk_length` are not looked at; a length of 0 or less leaves none, one
      beyond topk all.
    - A slot listed twice counts twice. The order of a list does not matter but for rounding.
    - With a sink s the head's out is multiplied by `1 / (1 + exp(s - lse))`, as if the softmax had one more row
      of logit s and value 0. The sink does not change lse.
    - A token without a valid row has out 0 and lse +inf, whatever the sink.
    - NaN and infinity in valid rows reach the token's results, those in all other rows do not.

    Products are summed in float32; weights are rounded to 16 bits before they meet the values.

    Args:
        q: [b, s_q, h_q, d_qk] bfloat16, h_q 1 to 128; s_q > 1 serves speculative decoding. Over PLAIN_FP8 rows it may
            be float8_e4m3fn (or uint8 of the same bytes).
        k_cache: [num_blocks, block_size, (1,) 656 | 584] uint8 or float8_e4m3fn, or [..., 576 | 512] bfloat16, or
            float8_e4m3fn or uint8 (PLAIN_FP8), or uint8 [..., 352] (V32_NVFP4), [..., 384] (V4_NVFP4); see `layout`.
            The block stride may exceed the block; it must be a multiple of 16 bytes.
        indices: [b, s_q, topk] int32 slots (`block * block_size + offset`), invalid where < 0 or beyond the cache.
        sm_scale: factor on the dot products before the softmax, the model's: see `sparse_prefill`.
        attn_sink: [h_q] float32, natural-log units.
        topk_length: [b] int32; entries of `indices` at or after it are not looked at.
        extra_k_cache, extra_indices, extra_topk_length: a second cache with its own block size and topk; one softmax
            runs over both row lists. It is of the same layout, or of the one that `extra_layout` names.
        out: [b, s_q, h_q, 512] bfloat16, written in place when given.
        lse: [b, h_q, s_q] float32, written in place when given.
        num_splits: splits of each query's rows, 1 to 1024, whose partial results are merged by lse; default: chosen
            from the shapes.
        batch_invariant: choose kernel and splits by heads, layout and topk alone, so that the bits of a request do not
            depend on what else is in the batch. Large batches are then split more, small ones less than is fastest.
        q_scale: of an e4m3 q: a positive number, or [1] or [] float32 on the device; default 1.
        k_scale: the same of PLAIN_FP8 rows, those of both caches.
        layout: the name of the caches' layout, as of `empty_cache`; default: told by `k_cache`.
        extra_layout: the name of the extra cache's layout, where it is another: [..., 288] uint8, "v41_fp4" or
            "v41_fp4_split" beside "v41_fp8", "v41_fp4_split" beside "v41_fp8_split".

    Returns:
        out [b, s_q, h_q, 512] bfloat16 and lse [b, h_q, s_q] float32 (natural logarithm).

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        RuntimeError: CUDA arrays, and CuPy, a driver or NVRTC is missing.

    Example:
        >>> cache = np.zeros((4, 64, 656), np.uint8)  # 4 blocks of 64 tokens in layout V32_FP8
        >>> kv_c, k_pe = np.ones((3, 512), bfloat16), np.zeros((3, 64), bfloat16)
        >>> cupy_mla.concat_and_cache_mla(kv_c, k_pe, cache, np.array([7, 130, 65]))
        >>> q = np.zeros((1, 1, 16, 576), bfloat16)  # 1 request, 1 query token, 16 heads
        >>> indices = np.array([[[130, 65, -1]]], np.int32)
        >>> out, lse = cupy_mla.sparse_decode(q, cache, indices, sm_scale=192**-0.5)
        >>> out.shape, float(out[0, 0, 0, 0])
        ((1, 1, 16, 512), 1.0)
        >>> lse.shape, round(float(lse[0, 0, 0]), 4)  # log 2
        ((1, 16, 1), 0.6931)
    """
    scale = require_scale("sm_scale", sm_scale)
    given = Given(
        q, k_cache, indices, attn_sink, topk_length, extra_k_cache, extra_indices, extra_topk_length, out, lse, q_scale,
        k_scale,
    )  # fmt: skip
    return decode(given, scale, num_splits, batch_invariant, door=Door(layout=layout, extra_layout=extra_layout))


@operation
def planned_decode(
    q: A,
    k_cache: AnyArray,
    indices: AnyArray,
    sm_scale: float,
    num_splits: int | None,
    plan: Plan,
    *,
    padded: bool = False,
    **others: Any,
) -> tuple[A, A]:
    """`sparse_decode` for the layers of one kind in a step, called by the backends. Calls with the same plan divide
    their lists in the same way, because lists end at the same places in all layers.

    Args:
        padded: as for `decode`.
        others: `layout` and `extra_layout`, as for `sparse_decode`, and arrays and `k_scale` under their names in
            `Given`.
    """
    scale = require_scale("sm_scale", sm_scale)
    door = Door(layout=others.pop("layout", None), extra_layout=others.pop("extra_layout", None))
    return decode(Given(q, k_cache, indices, **others), scale, num_splits, plan=plan, padded=padded, door=door)


class Given(NamedTuple):
    """The arrays of a decode as a front door gets them."""

    q: Any
    k_cache: Any
    indices: Any
    attn_sink: Any = None
    topk_length: Any = None
    extra_k_cache: Any = None
    extra_indices: Any = None
    extra_topk_length: Any = None
    out: Any = None
    lse: Any = None
    q_scale: Any = None
    k_scale: Any = None


class Door(NamedTuple):
    """What a front door (`sparse_decode`, `dense_decode`, `flash_mla`) says beside arrays and settings.

    Attributes:
        is_fp8_kvcache: whether `k_cache` is FP8, with which it must agree; None: not said.
        layout, extra_layout: names of the layouts of `k_cache` and `extra_k_cache`; None: not said.
        names: its names of arguments, where they differ, by their names here. For error messages.
    """

    is_fp8_kvcache: bool | None = None
    layout: str | None = None
    extra_layout: str | None = None
    names: Mapping[str, str] = MappingProxyType({})

    def name(self, argument: str) -> str:
        """Its name of an argument."""
        return self.names.get(argument, argument)

    def check_cache(
        self, cache: Array, q: Array, among: Sequence[layouts.Layout] = layouts.ATTENTION_LAYOUTS
    ) -> tuple[layouts.Layout, tuple[int, int, int]]:
        """Check `k_cache` against q and what the door says; its layout, and q's b, s_q and h_q."""
        layout = cache_layout(cache, among, asked=self.layout, asked_by=self.name("layout"))
        if self.is_fp8_kvcache is not None and self.is_fp8_kvcache != layout.quantized:
            raise ValueError(f"is_fp8_kvcache is {self.is_fp8_kvcache}, but k_cache has the layout {layout.name}")
        b, s_q, h_q, d_qk = require_q(q, layout, "b", "s_q", "h_q", HEAD_DIMS).shape
        require_heads(h_q)
        if layout.d_qk != d_qk:
            raise ValueError(f"k_cache: layout {layout.name} holds rows of {layout.d_qk}, q has d_qk {d_qk}")
        require_cache(cache, layout)
        return layout, (b, s_q, h_q)

    def extra_layout_of(self, extra: Array, main: layouts.Layout) -> layouts.Layout:
        """The layout of `extra_k_cache` beside a cache of layout `main`."""
        others, name = layouts.EXTRA_OF.get(main, ()), self.extra_layout
        if name is None and extra.shape[-1] not in {other.last_axis for other in others}:
            return main
        return cache_layout(extra, (main, *others), asked=name, asked_by=self.name("extra_layout"))


NO_DOOR = Door()


def decode(
    given: Given,
    scale: float | None,
    num_splits: int | None,
    batch_invariant: bool = False,
    plan: Plan | None = None,
    padded: bool = False,
    door: Door = NO_DOOR,
) -> tuple[Any, Any]:
    """The body of `sparse_decode`, for the front doors, too.

    Args:
        scale: `sm_scale`, checked; None: FlashMLA's default, `d_qk ** -0.5`.
        plan: calls whose lists end at the same places may share it.
        padded: lists are padded with -1 behind `topk_length`. So the lengths need not decide how the call is divided:
            most lists are full, and those of the other layers of a step end at the same places.
    """
    q, k_cache, indices, attn_sink, topk_length, extra_k_cache, extra_indices, extra_topk_length, *rest = given
    out, lse, q_scale, k_scale = rest
    require_known()
    extra_name = door.name("extra_indices")
    of_extra = extra_k_cache is not None or extra_indices is not None or extra_topk_length is not None
    if of_extra or door.extra_layout is not None:
        require_together(**{"extra_k_cache": extra_k_cache, extra_name: extra_indices})
        if door.extra_layout is not None and extra_k_cache is None:
            raise ValueError(f"{door.name('extra_layout')} was given without extra_k_cache")
        if extra_topk_length is not None and extra_indices is None:
            raise ValueError(f"extra_topk_length was given without extra_k_cache and {extra_name}")
    place, (q_, cache, idx) = bind(q=q, k_cache=k_cache, indices=indices)
    sink, length, extra, extra_idx, extra_length, out_, lse_ = place.optional(
        attn_sink=attn_sink, topk_length=topk_length, extra_k_cache=extra_k_cache, **{extra_name: extra_indices},
        extra_topk_length=extra_topk_length, out=out, lse=lse,
    )  # fmt: skip
    layout, (b, s_q, h_q) = door.check_cache(cache, q_)
    idx.require(INT32, b, s_q, "topk")
    _require_optional(sink, length, h_q, b)
    extra_layout = layout
    if extra is not None and extra_idx is not None:
        extra_layout = door.extra_layout_of(extra, layout)
        require_cache(extra, extra_layout)
        extra_idx.require(INT32, b, s_q, "extra_topk")
        if extra_length is not None:
            extra_length.require(INT32, b)
    q_scale = scale_of_q(place, q_, q_scale, door.name("q_scale"))
    k_scale = scale_of_rows(place, layout, k_scale, door.name("k_scale"))
    batch_invariant = require_bool("batch_invariant", batch_invariant)
    if num_splits is not None:
        num_splits = require_integer("num_splits", num_splits, 1, MAX_SPLITS)
    if arrays.CHECK_VALUES:
        check_lists(idx, cache.shape[0] * cache.shape[1], length)
        if extra is not None and extra_idx is not None:
            check_lists(extra_idx, extra.shape[0] * extra.shape[1], extra_length)
    out_ = place.output("out", out_, (b, s_q, h_q, D_V), BFLOAT16)
    lse_ = place.output("lse", lse_, (b, h_q, s_q), FLOAT32)
    scale = layout.d_qk**-0.5 if scale is None else scale
    arguments = Decode(
        layout, q_, cache, idx, scale, q_scale, k_scale, sink, length, extra, extra_idx, extra_length,
        extra_layout if extra_layout is not layout else None, num_splits, out_, lse_, batch_invariant, plan, padded,
    )  # fmt: skip
    place.call(cuda.sparse_decode, reference.sparse_decode, arguments)
    return out_.obj, lse_.obj


def plan_splits(
    q: AnyArray,
    indices: AnyArray,
    extra_indices: AnyArray | None = None,
    *,
    quantized: bool = True,
    batch_invariant: bool = False,
) -> int:
    """How many splits `sparse_decode` would choose for each query's rows. On the CPU 1.

    0 means that it would divide all rows of the call evenly over the GPU, so that splits may end anywhere in a list.

    Args:
        q, indices, extra_indices, batch_invariant: as for `sparse_decode`.
        quantized: whether the cache is FP8. Blocks of a bf16 cache are taken to have no gaps between them.

    Returns:
        the number of splits.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or device.

    Example:
        >>> q, indices = np.zeros((1, 1, 16, 576), bfloat16), np.zeros((1, 1, 2048), np.int32)
        >>> cupy_mla.plan_splits(q, indices)  # on the CPU
        1
    """
    require_known()
    quantized = require_bool("quantized", quantized)
    batch_invariant = require_bool("batch_invariant", batch_invariant)
    place, (q_, idx) = bind(q=q, indices=indices)
    (extra_idx,) = place.optional(extra_indices=extra_indices)
    b, s_q, h_q, d_qk = q_.require(BFLOAT16, "b", "s_q", "h_q", HEAD_DIMS).shape
    entries = idx.require(INT32, b, s_q, "topk").shape[-1]
    more = 0 if extra_idx is None else extra_idx.require(INT32, b, s_q, "extra_topk").shape[-1]
    layout = next(a for a in layouts.ATTENTION_LAYOUTS if (a.quantized, a.d_qk) == (quantized, d_qk))
    if not place.on_gpu:
        return 1
    problem = Problem(
        driver.gpu(place.device), layout, False, h_q, b * s_q, entries, more, flat=extra_idx is None,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    return cuda.decode_splits(problem)


def _require_optional(sink: Array | None, length: Array | None, h_q: int, b: int) -> None:
    if sink is not None:
        sink.require(FLOAT32, h_q)
    if length is not None:
        length.require(INT32, b)
