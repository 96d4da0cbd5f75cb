"""The attention backend of DeepSeek-V3.2 layers: sparse MLA over a paged bf16 or FP8 cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple, overload

from ..arrays import Array
from ..bridges import Place, bind, describe
from ..checks.options import LARGEST_INT, require_bool, require_choice, require_instance, require_integer, require_scale
from ..checks.validate import QUANTIZED
from ..config import SparseMLAConfig
from ..dtypes import BFLOAT16, FLOAT32, INT32
from ..layouts import D_V, names
from ..metadata.batch import prefill_workspace_size
from ..metadata.sparse_mla import (
    DenseDecodes,
    FP8KernelMetadata,
    FP8SeparatePrefillDecode,
    SparseMLAMetadata,
    SparseMLAMetadataBuilder,
)
from ..ops.attention import planned_decode, sparse_prefill
from ..ops.dense import planned_dense_decode
from ..ops.gather import concat_mla_q, cp_gather_and_upconvert_fp8_kv_cache
from ..ops.scales import scale_of_rows
from ..typing import A, AnyArray, CacheLayout, CallScale, ModelKind
from .index_groups import PhysicalTopk, to_slots
from .steps import Step
from .workspace import Workspace


class SparseMLABackend:
    """What an engine wants to know before it chooses and sets up a backend."""

    name = "CUPY_MLA_SPARSE"
    supported_dtypes: tuple[str, ...] = ("bfloat16",)
    supported_kv_cache_dtypes: tuple[str, ...] = ("auto", "bfloat16", "fp8_ds_mla", "fp8", "fp8_e4m3", "nvfp4_ds_mla")
    supported_head_sizes: tuple[int, ...] = (576, 512)  # V3.2; V4, and V3.2's kind without RoPE
    least_compute_capability: tuple[int, int] = (8, 0)

    @staticmethod
    def is_mla() -> bool:
        return True

    @staticmethod
    def is_sparse() -> bool:
        return True

    @staticmethod
    def supports_block_size(block_size: int) -> bool:
        """Whether caches may have blocks of so many tokens: all sizes from 1 on."""
        return require_integer("block_size", block_size, -LARGEST_INT) >= 1

    @classmethod
    def supports_compute_capability(cls, major: int, minor: int) -> bool:
        given = require_integer("major", major, 0), require_integer("minor", minor, 0)
        return given >= cls.least_compute_capability

    @staticmethod
    def get_builder_cls() -> type[SparseMLAMetadataBuilder]:
        return SparseMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[SparseMLAImpl]:
        return SparseMLAImpl

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int = 1,
        head_size: int = 576,
        cache_dtype: CacheLayout = "auto",
        model: ModelKind | None = None,
    ) -> tuple[int, int, int]:
        """The shape [num_blocks, block_size, last axis] of a paged cache: bfloat16, or uint8 in FP8 layouts.

        Args:
            cache_dtype: the engine's name of the layout, or one of `SparseMLAConfig.cache_layout`.
            model: kind of the model, as of `SparseMLAConfig`.

        Raises:
            TypeError, ValueError: the backend does not support an argument.
        """
        num_blocks = require_integer("num_blocks", num_blocks, 0)
        block_size = require_integer("block_size", block_size, 1)
        if require_integer("num_kv_heads", num_kv_heads, 1) != 1:
            raise ValueError(f"num_kv_heads must be 1 (all query heads share a latent row), got {num_kv_heads}")
        if require_integer("head_size", head_size, 1) not in cls.supported_head_sizes:
            raise ValueError(f"head_size must be one of {cls.supported_head_sizes}, got {head_size}")
        require_choice("cache_dtype", cache_dtype, names())
        try:
            config = SparseMLAConfig(1, head_size, block_size=block_size, cache_layout=cache_dtype, model=model)
        except ValueError as error:
            given = f"head_size {head_size}, cache_dtype {cache_dtype!r} and model {model!r} do not go together"
            raise ValueError(f"{given}: {error}") from None
        return num_blocks, block_size, config.layout.last_axis


class _Lists(NamedTuple):
    """The rows over which query tokens attend, and the heads' sinks.

    Attributes:
        slots: [T, K] int32 slots, or rows of the workspace.
        ends: [T] int32 where each list ends.
        sinks: [h] float32, or None.
    """

    slots: Any
    ends: Any
    sinks: Any

    def part(self, tokens: slice) -> _Lists:
        """The lists of some query tokens."""
        return _Lists(self.slots[tokens], self.ends[tokens], self.sinks)


class _Rows(NamedTuple):
    """A layer's rows.

    Attributes:
        cache: the paged cache.
        told: what operations over it must be told, by their arguments' names: `layout`, `k_scale`.
    """

    cache: Any
    told: dict[str, Any]


class SparseMLAImpl:
    """The attention of one V3.2 layer. It keeps no state of its own: all layers of a model may share one.

    CUDA graphs: a captured `forward_mqa` allocates what its kernels need (lse, partial results, and the output where
    `out` is not given), and every replay writes there again. torch captures into a memory pool of the graph's own. With
    CuPy, warm up and capture under `cupy.cuda.using_allocator` of a pool that lives as long as the graph. Replays
    allocate nothing.

    Dense decodes: the decodes that metadata names in `dense_decodes` attend over all rows of their requests, by
    `cupy_mla.dense_decode`. Their index lists are neither converted nor read.

    Models without RoPE (d_qk 512): rows in layout BF16, PLAIN_FP8 and V32_NOPE_FP8 have 512 values. In other layouts
    they are V3.2's. The query is then padded with zeros for their RoPE part, which must be finite
    (`concat_and_cache_mla` writes zeros).

    Args:
        config: the layer and the engine's maxima.
        scale: factor on the dot products before the softmax; in DeepSeek-V3.2 `192 ** -0.5`, times the square of its
            yarn factor where it has one (see `cupy_mla.sparse_prefill`).
        workspace: scratch memory that layers share. What the largest batch needs is reserved here.

    Raises:
        ValueError: the config is not one of V3.2 layers.
    """

    def __init__(self, config: SparseMLAConfig, scale: float, workspace: Workspace) -> None:
        require_instance("config", config, SparseMLAConfig)
        require_instance("workspace", workspace, Workspace)
        if config.is_v4:
            raise ValueError("config: expected layers of a model of kind 'v32', got 'v4', as of d_qk 512 by default")
        self.config = config
        self.scale: float = require_scale("scale", scale)
        self.workspace = workspace
        self._told: dict[str, Any] = {} if config.layout.told else {"layout": config.layout.name}
        self._checked: SparseMLAMetadata | None = None  # all layers of a step are handed the same
        gathers = config.layout.quantized and not config.use_mixed_batch
        rows = prefill_workspace_size(config.max_model_len) if gathers else 0
        self._scratch(config.max_num_batched_tokens, True, rows)

    @overload
    def forward_mqa(
        self,
        q: A | tuple[A, A],
        kv_cache: AnyArray,
        metadata: SparseMLAMetadata,
        topk_indices: AnyArray | PhysicalTopk,
        *,
        valid_counts: AnyArray | None = None,
        sinks: AnyArray | None = None,
        k_scale: CallScale | None = None,
        out: A | None = None,
        return_lse: Literal[False] = False,
    ) -> A: ...

    @overload
    def forward_mqa(
        self,
        q: A | tuple[A, A],
        kv_cache: AnyArray,
        metadata: SparseMLAMetadata,
        topk_indices: AnyArray | PhysicalTopk,
        *,
        valid_counts: AnyArray | None = None,
        sinks: AnyArray | None = None,
        k_scale: CallScale | None = None,
        out: A | None = None,
        return_lse: Literal[True],
    ) -> tuple[A, A]: ...

    def forward_mqa(
        self,
        q: A | tuple[A, A],
        kv_cache: AnyArray,
        metadata: SparseMLAMetadata,
        topk_indices: AnyArray | PhysicalTopk,
        *,
        valid_counts: AnyArray | None = None,
        sinks: AnyArray | None = None,
        k_scale: CallScale | None = None,
        out: A | None = None,
        return_lse: bool = False,
    ) -> A | tuple[A, A]:
        """Attention of a step's query tokens over their chosen KV tokens, which the cache must already hold.

        Decodes of short contexts take the dense way where the metadata says so. All else goes over index lists.
        bf16 cache: one launch over slots; batches of decodes alone go to the decode kernel, which splits rows to fill
        the GPU, others to the prefill kernel over the flattened cache (to the decode kernel, too, when the cache's
        blocks have gaps between them). FP8 cache: as the metadata says, see `FP8SeparatePrefillDecode`.

        Args:
            q: [T, h, 576] bfloat16, or a pair ([T, h, 512], [T, h, 64]) of the absorbed query and its RoPE part. Of a
                model without RoPE [T, h, 512], or a pair whose second part is [T, h, 0].
            kv_cache: [num_blocks, block_size, (1,) 576] bfloat16, without RoPE [..., 512], or
                [num_blocks, block_size, (1,) 656 | 576 | 528 | 512 | 352] uint8 or float8_e4m3fn, as the config says.
            metadata: of this step, from `SparseMLAMetadataBuilder` with these layers' config; T is its number of
                tokens.
            topk_indices: [T, topk] int32 token positions in each token's request, and -1, anywhere, where there are
                fewer; with the config's kpool [T, topk + kpool - 1], from `expand_pools_and_append_tail`. Of layers
                that share a list what `IndexGroups.get` returns, which is not converted again.
            valid_counts: [T] int32 how many entries of each token's list are attended: the first ones that are not -1,
                whatever gaps are between them. `IndexerImpl` and vLLM give the number of all that are not -1. None: all
                of them are attended.
            sinks: [h] float32 a value of each head that its softmax divides by too, in natural-log units, of models
                that have them (HY-V4); None: none.
            k_scale: of PLAIN_FP8 rows, that of this layer: a positive number, or [1] or [] float32 on the device;
                None: 1. Prefills in separate mode attend over rows times the scale, rounded to bfloat16.
            out: [T, h, 512] bfloat16, written in place when given.
            return_lse: also return the logarithms that merge this with attention over other rows.

        Returns:
            [T, h, 512] bfloat16, and with `return_lse` also lse [T, h] float32, without the sinks. Rows of tokens that
            pad a batch with prefills hold anything.

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape, device or strides.
        """
        place, cache = self._check(q, kv_cache, metadata, topk_indices, valid_counts)
        scale_of_rows(place, self.config.layout, k_scale)
        layer = _Rows(kv_cache, self._told if k_scale is None else {**self._told, "k_scale": k_scale})
        tokens, heads, extra = metadata.num_actual_tokens, self.config.num_heads, metadata.fp8_extra_metadata
        out_, sinks_ = place.optional(out=out, sinks=sinks)
        if sinks_ is not None:
            sinks_.require(FLOAT32, heads)
        result = place.output("out", out_, (tokens, heads, D_V), BFLOAT16).obj
        lse = place.new("lse", (tokens, heads), FLOAT32).obj if require_bool("return_lse", return_lse) else None
        prefill = extra.prefill if isinstance(extra, FP8SeparatePrefillDecode) else None
        rows = max((chunk.chunk_tot_seqlen for chunk in prefill.chunks), default=0) if prefill else 0
        padded = self.config.d_qk < self.config.layout.d_qk
        concatenated, slots, ends, workspace = self._scratch(tokens, isinstance(q, tuple) or padded, rows)
        queries: Any = q
        if isinstance(q, tuple):
            queries, rope = q
            if self.config.d_qk > D_V:
                concat_mla_q(queries, rope, concatenated)
                queries = concatenated
        if padded:
            concatenated[..., :D_V], concatenated[..., D_V:] = queries, 0
            queries = concatenated
        dense = self._dense(place, metadata)
        listed = slice(0 if dense is None else dense.num_tokens, tokens)
        if dense is not None:
            self._attend_all(queries, layer, dense, sinks, result, lse)
        if listed.start == tokens:
            return result if lse is None else (result, lse)
        if isinstance(topk_indices, PhysicalTopk):
            slots, ends = topk_indices.physical_topk_indices, topk_indices.lens
        else:
            to_slots(metadata, topk_indices, valid_counts, slots, ends, listed)
        lists = _Lists(slots, ends, sinks)
        if isinstance(extra, FP8SeparatePrefillDecode):
            if dense is not None:
                extra = replace(extra, decode=None)
            self._forward_separate(queries, layer, extra, lists, workspace, result, lse)
        elif isinstance(extra, FP8KernelMetadata):
            self._decode(queries, layer, lists, extra, result, lse)
        else:
            self._forward_bf16(queries, layer, cache, metadata, lists, result, lse)
        return result if lse is None else (result, lse)

    def _dense(self, place: Place, metadata: SparseMLAMetadata) -> DenseDecodes | None:
        """The decodes that attend over all rows, or None. While a graph is captured there are such decodes only if no
        sequence can be longer than topk, so that it holds at every replay."""
        dense, always = metadata.dense_decodes, self.config.max_model_len <= self.config.topk
        if dense is None or always or not (place.on_gpu and place.is_capturing()):
            return dense
        return None

    def _attend_all(self, q: Any, layer: _Rows, dense: DenseDecodes, sinks: Any, out: Any, lse: Any) -> None:
        """Attention of decodes over all rows of their requests."""
        shape, end = (len(dense.seq_lens), dense.query_len), dense.num_tokens
        _, found = planned_dense_decode(
            q[:end].reshape(*shape, *q.shape[1:]), layer.cache, dense.block_table, dense.seq_lens, self.scale,
            dense.plan, attn_sink=sinks, out=out[:end].reshape(*shape, *out.shape[1:]), **layer.told,
        )  # fmt: skip
        if lse is not None:
            lse[:end].reshape(*shape, -1)[...] = found.swapaxes(1, 2)

    def _forward_bf16(
        self,
        q: Any,
        layer: _Rows,
        cache: Array,
        metadata: SparseMLAMetadata,
        lists: _Lists,
        out: Any,
        lse: Any,
    ) -> None:
        num_blocks, block_size, d_qk = cache.shape
        flat = num_blocks <= 1 or cache.strides[0] == block_size * cache.strides[1]
        if flat and metadata.max_query_len > 1 + self.config.num_speculative_tokens:
            rows = layer.cache.reshape(num_blocks * block_size, 1, d_qk)
            self._prefill(q, rows, lists, out, lse)
        else:
            self._decode(q, layer, lists, FP8KernelMetadata(), out, lse)

    def _forward_separate(
        self,
        q: Any,
        layer: _Rows,
        batch: FP8SeparatePrefillDecode,
        lists: _Lists,
        workspace: Any,
        out: Any,
        lse: Any,
    ) -> None:
        if batch.decode is not None:
            end = batch.num_decode_tokens
            of_decodes = None if lse is None else lse[:end]
            self._decode(
                q[:end], layer, lists.part(slice(end)), batch.decode.kernel_metadata, out[:end], of_decodes
            )  # fmt: skip
        for chunk in batch.prefill.chunks if batch.prefill else ():
            rows, tokens = workspace[: chunk.chunk_tot_seqlen], chunk.tokens_slice
            cp_gather_and_upconvert_fp8_kv_cache(
                layer.cache, rows, chunk.block_table, chunk.seq_lens, chunk.workspace_starts, **layer.told
            )
            of_chunk = None if lse is None else lse[tokens]
            self._prefill(q[tokens], rows[:, None], lists.part(tokens), out[tokens], of_chunk)

    def _decode(self, q: Any, layer: _Rows, lists: _Lists, kernel: FP8KernelMetadata, out: Any, lse: Any) -> None:
        """Attention of query tokens over the cache, each as a request of its own, because its list has an own end."""
        if len(q) == 0:
            return
        _, found = planned_decode(
            q[:, None], layer.cache, lists.slots[:, None], self.scale, kernel.num_splits, kernel.plan, padded=True,
            topk_length=lists.ends, out=out[:, None], attn_sink=lists.sinks, **layer.told,
        )  # fmt: skip
        if lse is not None:
            lse[...] = found[..., 0]

    def _prefill(self, q: Any, rows: Any, lists: _Lists, out: Any, lse: Any) -> None:
        """Attention of query tokens over flat rows. Ends are not passed: with them full lists take up to 3 % longer."""
        _, _, found = sparse_prefill(q, rows, lists.slots[:, None], self.scale, attn_sink=lists.sinks, out=out)
        if lse is not None:
            lse[...] = found

    def _scratch(self, tokens: int, with_q: bool, rows: int) -> list[Any]:
        """Scratch memory: the concatenated query if `with_q`, slots, the ends of lists, and gathered rows."""
        config = self.config
        return self.workspace.get_simultaneous(
            ((tokens if with_q else 0, config.num_heads, config.layout.d_qk), BFLOAT16),
            ((tokens, config.topk_width), INT32),
            ((tokens,), INT32),
            ((rows, config.layout.d_qk), BFLOAT16),
        )

    def _check(
        self, q: Any, kv_cache: Any, metadata: SparseMLAMetadata, topk_indices: Any, valid_counts: Any
    ) -> tuple[Place, Array]:
        """Check that the arguments fit the config and the batch; the place, and the cache's description. Operations
        check the rest."""
        shared = isinstance(topk_indices, PhysicalTopk)
        chosen = topk_indices.of(metadata).physical_topk_indices if shared else topk_indices
        place, (cache, topk) = bind(kv_cache=kv_cache, topk_indices=chosen)
        if place != self.workspace.place:
            raise ValueError(f"kv_cache: expected it where the workspace is, {self.workspace.place}, got {place}")
        if metadata is None or metadata is not self._checked:
            self._check_step(metadata)
        config, tokens = self.config, metadata.num_actual_tokens
        parts = [("q", config.d_qk, q)]
        if isinstance(q, tuple):
            if len(q) != 2:
                raise ValueError(f"q: expected an array or a pair of them, got a tuple of {len(q)}")
            parts = [("ql_nope", D_V, q[0]), ("q_pe", config.d_qk - D_V, q[1])]
        for name, width, part in parts:
            place.admit(describe(name, part)).require(BFLOAT16, tokens, config.num_heads, width)
        topk.require(INT32, tokens, config.topk_width)
        if valid_counts is not None:
            if shared:
                raise ValueError("valid_counts: expected None beside a list that IndexGroups has converted")
            place.admit(describe("valid_counts", valid_counts)).require(INT32, tokens)
        if len(cache.shape) == 4:
            cache.without_axis(2)
        dtypes = QUANTIZED if config.layout.quantized else BFLOAT16
        return place, cache.require(dtypes, "num_blocks", config.block_size, config.layout.last_axis)

    def _check_step(self, metadata: SparseMLAMetadata) -> None:
        """Check once a step that metadata is of these layers."""
        require_instance("metadata", metadata, SparseMLAMetadata)
        config, extra = self.config, metadata.fp8_extra_metadata
        step = Step(
            "metadata", metadata.num_reqs, metadata.num_actual_tokens, metadata.max_seq_len, metadata.block_table
        )
        step.require(
            config, self.workspace.place, block_size=metadata.block_size, topk=metadata.topk_tokens,
            compress_ratio=metadata.compress_ratio,
        )  # fmt: skip
        if (extra is not None) != config.layout.quantized:
            built_for, wanted = "bf16" if extra is None else "FP8", config.cache_layout
            raise ValueError(f"metadata: built for {built_for} caches, these layers have {wanted!r} (config)")
        self._checked = metadata
