"""The attention backend of DeepSeek V4 and V4.1 layers: a sliding window, and rows of a compressed cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from ..bridges import Place, bind, describe
from ..checks.options import LARGEST_INT, require_instance, require_scale
from ..checks.validate import QUANTIZED
from ..config import SparseMLAConfig
from ..dtypes import BFLOAT16, INT32
from ..layouts import QUANTIZED_OF_V4, Layout
from ..metadata.compressed import compressed_list_width
from ..metadata.sparse_mla import SparseMLAMetadata
from ..metadata.swa import SparseSWAMetadata
from ..ops.attention import planned_decode, sparse_prefill
from ..ops.gather import dequantize_and_gather_k_cache
from ..ops.swa import combine_topk_swa_indices, combined_width
from ..typing import A, AnyArray, PagedLayout
from .index_groups import PhysicalTopk, decode_slots
from .steps import Step
from .workspace import Workspace

PREFILL_CHUNK_SIZE = 4  # so many prefills of the greatest length fit the workspace of gathered rows


@dataclass(frozen=True)
class DeepseekV4Layer:
    """One layer's state in a step. Its caches already hold the rows of the step's tokens.

    Attributes:
        swa_k_cache: [num_blocks, block_size, (1,) 584] uint8 or float8_e4m3fn, layout V4_FP8: one row a token. Rows of
            the config's other layouts have 528 bytes (V41_FP8, V41_FP8_SPLIT) or 384 (V4_NVFP4).
        attn_sink: [h] float32, natural-log units.
        k_cache: the compressed cache, with one row for every compress_ratio tokens, in the config's
            `compressed_layout` (288 bytes in V41_FP4 and V41_FP4_SPLIT); None for layers with a sliding window alone.
            In V4.1 several layers read the compressed cache of one layer: each is given that cache.
        topk_indices: for C4A (V4), C1A and C2A (V4.1) layers: [T, topk] int32 compressed positions that the indexer
            chose in each token's request, with -1 behind them. Layers that share a list get what `IndexGroups.get`
            returns, whose slots are known already.
    """

    swa_k_cache: AnyArray
    attn_sink: AnyArray
    k_cache: AnyArray | None = None
    topk_indices: AnyArray | PhysicalTopk | None = None


class Scratch(NamedTuple):
    """Scratch memory of a step.

    Attributes:
        rows: [rows of the largest chunk, d_qk] bfloat16, gathered rows of a chunk of prefills.
        combined, combined_lens: [tokens, width] int32 index lists of prefill tokens, and [tokens] int32 their lengths.
        slots, slot_lens: [tokens, topk] int32 chosen rows of decode tokens, and [tokens] int32 how many they are.
    """

    rows: Any
    combined: Any
    combined_lens: Any
    slots: Any
    slot_lens: Any


class DeepseekV4Impl:
    """The attention of V4 or V4.1 layers of one kind. It keeps no state of its own: all layers of that kind may share
    one.

    Args:
        config: the layers' kind (`model`, `compress_ratio`) and the engine's maxima. `block_size` counts the tokens of
            a block of the compressed cache.
        scale: factor on the dot products before the softmax, in DeepSeek-V4 and V4.1 `512 ** -0.5`.
        workspace: scratch memory that layers share. A warm-up call reserves what the largest batch needs.

    Raises:
        ValueError: the config is not one of V4 or V4.1 layers with FP8 or FP4 caches.
    """

    def __init__(self, config: SparseMLAConfig, scale: float, workspace: Workspace) -> None:
        require_instance("config", config, SparseMLAConfig)
        require_instance("workspace", workspace, Workspace)
        if config.layout not in QUANTIZED_OF_V4:
            raise ValueError(f"config: expected V4 layers with FP8 or FP4 rows, got layout {config.cache_layout!r}")
        self.config = config
        self.scale: float = require_scale("scale", scale)
        self.workspace = workspace
        self._layout, self._compressed_layout = config.layout, config.layout_of_compressed
        # The metadata that was checked last: all layers of a kind get the same in a step.
        self._checked: tuple[SparseSWAMetadata | None, SparseMLAMetadata | None] = (None, None)
        self._list_width = compressed_list_width(config)
        self._rows_of_longest = config.max_compressed_rows + config.window + config.max_num_batched_tokens
        if PREFILL_CHUNK_SIZE * self._rows_of_longest > LARGEST_INT:
            raise ValueError(
                f"config: int32 cannot count the workspace rows of {PREFILL_CHUNK_SIZE} prefills, each with those of "
                f"max_model_len {config.max_model_len}, window {config.window} and max_num_batched_tokens "
                f"{config.max_num_batched_tokens}"
            )

    def forward(
        self,
        q: AnyArray,
        layer: DeepseekV4Layer,
        swa_metadata: SparseSWAMetadata | None,
        metadata: SparseMLAMetadata | None,
        output: A,
    ) -> A:
        """Attention of a step's query tokens over their sliding windows and their compressed rows, in one softmax.

        Decodes run as `sparse_decode` over both caches, with each query token as a request. Prefills run as
        `sparse_prefill`, a few requests at a time, over rows that are gathered and dequantized into the workspace.

        Args:
            q: [T, h, 512] bfloat16, any strides with a contiguous last axis.
            layer: the layer's caches, sinks and chosen rows.
            swa_metadata: of this step, from `SparseSWAMetadataBuilder`; T is its number of tokens. None for a warm-up,
                which reserves the workspace of the largest batch and sets the output to zero.
            metadata: of this step, from `SparseMLAMetadataBuilder` with this layer's config; None for layers with a
                sliding window alone.
            output: [T, h, 512] bfloat16, written in place.

        Returns:
            output.

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape, device or strides, or is missing.
        """
        place, (q_, out) = bind(q=q, output=output)
        if place != self.workspace.place:
            raise ValueError(f"q: expected it where the workspace is, {self.workspace.place}, got {place}")
        tokens = q_.require(BFLOAT16, "T", self.config.num_heads, self.config.d_qk).shape[0]
        out.require(BFLOAT16, *q_.shape).require_writable()
        if swa_metadata is None:
            config = self.config
            decode_tokens = config.max_num_seqs * (1 + config.num_speculative_tokens)
            self._scratch(
                min(decode_tokens, config.max_num_batched_tokens), config.max_num_batched_tokens,
                min(config.max_num_seqs, PREFILL_CHUNK_SIZE) * self._rows_of_longest,
            )  # fmt: skip
            out.obj[...] = 0
            return output
        self._check(place, tokens, layer, swa_metadata, metadata)
        decode_tokens = swa_metadata.num_decode_tokens
        chunks = swa_metadata.get_prefill_chunk_plan(self.config.compress_ratio, PREFILL_CHUNK_SIZE)
        rows = max(((end - start) * width for start, end, _, width in chunks), default=0)
        scratch = self._scratch(decode_tokens, swa_metadata.num_prefill_tokens, rows)
        if decode_tokens:
            queries, to = q_.obj[:decode_tokens, None], out.obj[:decode_tokens, None]
            self._decode(queries, layer, swa_metadata, metadata, scratch, to)
        for chunk in chunks:
            self._prefill(chunk, q, layer, swa_metadata, metadata, scratch, output)
        return output

    def _decode(
        self,
        q: Any,
        layer: DeepseekV4Layer,
        swa: SparseSWAMetadata,
        metadata: SparseMLAMetadata | None,
        scratch: Scratch,
        out: Any,
    ) -> None:
        """Attention of decode tokens; q and out are [Td, 1, h, 512]."""
        extra_indices: Any = None
        extra_lens: Any = None
        extra_layout = None if metadata is None else self._compressed_layout.name
        chosen: Any = layer.topk_indices
        if metadata is not None and not self.config.has_topk:
            extra_indices, extra_lens = metadata.c128a_global_decode_topk_indices, metadata.c128a_decode_topk_lens
        elif metadata is not None:
            if isinstance(chosen, PhysicalTopk):
                slots, extra_lens = chosen.physical_topk_indices, chosen.lens
            else:
                slots, extra_lens = scratch.slots, scratch.slot_lens
                decode_slots(self.config, swa, metadata, chosen, slots, extra_lens)
            extra_indices = slots[:, None]
        schedule = swa.schedules[self.config.compress_ratio]
        planned_decode(
            q, layer.swa_k_cache, swa.decode_swa_indices, self.scale, schedule.num_splits, schedule.plan,
            attn_sink=layer.attn_sink, topk_length=swa.decode_swa_lens, extra_k_cache=layer.k_cache,
            extra_indices=extra_indices, extra_topk_length=extra_lens, out=out, layout=self._layout.name,
            extra_layout=extra_layout,
        )  # fmt: skip

    def _prefill(
        self,
        chunk: tuple[int, int, int, int],
        q: Any,
        layer: DeepseekV4Layer,
        swa: SparseSWAMetadata,
        metadata: SparseMLAMetadata | None,
        scratch: Scratch,
        output: Any,
    ) -> None:
        """Attention of a chunk of prefills.

        Args:
            chunk: the first prefill and the end; for each prefill, compressed rows in the workspace, and all its rows
                there. Behind the compressed rows stand those of the sliding windows.
        """
        config, (first, end, compressed, width) = self.config, chunk
        prefills, requests = slice(first, end), slice(swa.num_decodes + first, swa.num_decodes + end)
        tokens = slice(int(swa.query_start_loc_cpu[requests.start]), int(swa.query_start_loc_cpu[requests.stop]))
        count = tokens.stop - tokens.start
        if count == 0:
            return
        rows = scratch.rows[: (end - first) * width].reshape(end - first, width, config.d_qk)
        combined, combined_lens = scratch.combined[:count], scratch.combined_lens[:count]
        chosen = combined[:, :0]
        if metadata is not None:
            compressed_rows, lens = cast(AnyArray, layer.k_cache), cast(AnyArray, metadata.compressed_seq_lens)
            dequantize_and_gather_k_cache(
                rows, compressed_rows, lens[requests], None, metadata.block_table[requests], config.rows_per_block, 0,
                layout=cast(PagedLayout, self._compressed_layout.name),
            )  # fmt: skip
            if not config.has_topk:
                start = tokens.start - swa.num_decode_tokens
                chosen = cast(AnyArray, metadata.c128a_prefill_topk_indices)[start : start + count]
            else:
                shared = isinstance(layer.topk_indices, PhysicalTopk)
                lists: Any = layer.topk_indices
                chosen = (lists.logical_topk_indices if shared else lists)[tokens]
        dequantize_and_gather_k_cache(
            rows, layer.swa_k_cache, swa.prefill_seq_lens[prefills], swa.prefill_gather_lens[prefills],
            swa.block_table[requests], swa.block_size, compressed, layout=cast(PagedLayout, self._layout.name),
        )  # fmt: skip
        images: dict[str, Any] = {}
        if swa.left_visible is not None and swa.right_visible is not None:
            images = {"left_visible": swa.left_visible[tokens], "right_visible": swa.right_visible[tokens]}
        combine_topk_swa_indices(
            chosen, swa.query_start_loc[requests.start : requests.stop + 1], swa.prefill_seq_lens[prefills],
            swa.prefill_gather_lens[prefills], config.window, config.compress_ratio, self._list_width, width,
            compressed, **images, max_image_tokens=config.max_image_tokens, out=combined, lens=combined_lens,
        )  # fmt: skip
        sparse_prefill(
            q[tokens], rows.reshape(-1, 1, config.d_qk), combined[:, None], self.scale, attn_sink=layer.attn_sink,
            topk_length=combined_lens, out=output[tokens],
        )  # fmt: skip

    def _scratch(self, decode_tokens: int, prefill_tokens: int, rows: int) -> Scratch:
        """Scratch memory for a step of so many tokens, with `rows` for its largest chunk of prefills."""
        config = self.config
        slots = decode_tokens if config.has_topk else 0
        arrays = self.workspace.get_simultaneous(
            ((rows, config.d_qk), BFLOAT16),
            ((prefill_tokens, combined_width(self._list_width, config.window, config.max_image_tokens)), INT32),
            ((prefill_tokens,), INT32),
            ((slots, config.topk), INT32),
            ((slots,), INT32),
        )
        return Scratch(*arrays)

    def _check(
        self,
        place: Place,
        tokens: int,
        layer: DeepseekV4Layer,
        swa: SparseSWAMetadata,
        metadata: SparseMLAMetadata | None,
    ) -> None:
        """Check that the arguments fit the config and the batch. Operations check the rest."""
        require_instance("layer", layer, DeepseekV4Layer)
        if swa is not self._checked[0] or metadata is not self._checked[1]:
            self._check_step(place, swa, metadata)
            for field in ("max_model_len", "max_num_batched_tokens"):  # they bound the rows of a chunk of prefills
                got, most = getattr(swa.config, field), getattr(self.config, field)
                if got > most:
                    raise ValueError(f"swa_metadata: built for {field} {got}, these layers have {most} (config)")
            self._checked = swa, metadata
        config, ratio = self.config, self.config.compress_ratio
        if tokens != swa.num_decode_tokens + swa.num_prefill_tokens:
            batch = swa.num_decode_tokens + swa.num_prefill_tokens
            raise ValueError(f"q: expected the {batch} tokens of swa_metadata, got {tokens}")
        compressed = config.has_compressed_rows
        _require_given("layer.attn_sink", layer.attn_sink, True, ratio)
        _require_given("layer.k_cache", layer.k_cache, compressed, ratio)
        _require_given("layer.topk_indices", layer.topk_indices, config.has_topk, ratio)
        _require_cache(place, self._layout, "layer.swa_k_cache", layer.swa_k_cache, swa.block_size)
        if metadata is None:
            return
        _require_cache(place, self._compressed_layout, "layer.k_cache", layer.k_cache, config.rows_per_block)
        chosen = layer.topk_indices
        if isinstance(chosen, PhysicalTopk):
            chosen = chosen.of(metadata).logical_topk_indices
        if chosen is not None:
            place.admit(describe("layer.topk_indices", chosen)).require(INT32, tokens, config.topk)

    def _check_step(self, place: Place, swa: SparseSWAMetadata, metadata: SparseMLAMetadata | None) -> None:
        """Check once a step that both metadata are of one step of these layers."""
        config, ratio = self.config, self.config.compress_ratio
        require_instance("swa_metadata", swa, SparseSWAMetadata)
        requests, tokens = swa.num_decodes + swa.num_prefills, swa.num_decode_tokens + swa.num_prefill_tokens
        if ratio not in swa.schedules:
            kinds = tuple(swa.schedules)
            raise ValueError(f"swa_metadata: built for compress ratios {kinds}, these layers have {ratio}")
        built = {name: getattr(swa.config, name) for name in ("model", "window", "max_image_tokens")}
        Step("swa_metadata", requests, tokens, 0, swa.slot_mapping).require(config, place, **built)
        _require_given("metadata", metadata, config.has_compressed_rows, ratio)
        if metadata is None:
            return
        require_instance("metadata", metadata, SparseMLAMetadata)
        step = Step(
            "metadata", metadata.num_reqs, metadata.num_actual_tokens, metadata.max_seq_len, metadata.block_table
        )
        step.require(config, place, block_size=metadata.block_size, compress_ratio=metadata.compress_ratio)
        if (step.requests, step.tokens) != (requests, tokens):
            raise ValueError(
                f"metadata: expected the {requests} requests and {tokens} tokens of swa_metadata, got "
                f"{step.requests} and {step.tokens}"
            )
        lens, lists = metadata.c128a_decode_topk_lens, metadata.c128a_prefill_topk_indices
        if lens is not None and lists is not None:  # of C128A layers
            decode_tokens, width = lens.shape[0], lists.shape[1]
            if decode_tokens != swa.num_decode_tokens:
                raise ValueError(
                    f"metadata: expected the {swa.num_decode_tokens} decode tokens of swa_metadata, got "
                    f"{decode_tokens}: both are built with the same num_speculative_tokens"
                )
            if width != self._list_width:
                longest = config.max_model_len
                raise ValueError(
                    f"metadata: built for lists of {width} rows, those of max_model_len {longest} (config) have "
                    f"{self._list_width}"
                )


def _require_given(name: str, value: Any, wanted: bool, ratio: int) -> None:
    if (value is not None) != wanted:
        raise ValueError(f"{name}: expected {'one' if wanted else 'None'} for layers of compress ratio {ratio}")


def _require_cache(place: Place, layout: Layout, name: str, cache: Any, block_size: int) -> None:
    array = place.admit(describe(name, cache))
    if len(array.shape) == 4:
        array.without_axis(2)
    array.require(QUANTIZED, "num_blocks", block_size, layout.last_axis)
