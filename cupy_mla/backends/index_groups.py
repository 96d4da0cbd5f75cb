"""Index lists that several layers share. One layer's indexer chooses positions, which are converted to slots once.

GLM-5.2 and 5.3 have an indexer in every fourth layer. The layers up to the next one use its list. Layers of
DeepSeek-V4.1 share lists, and compressed caches, in the same way. All layers of a group have one block table, so a
position has the same slot for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..bridges import Place, describe, require_cupy
from ..checks.options import require_instance, require_integer, shown
from ..config import SparseMLAConfig
from ..dtypes import INT32
from ..metadata.sparse_mla import FP8SeparatePrefillDecode, SparseMLAMetadata
from ..metadata.swa import SparseSWAMetadata
from ..ops.compressed import compute_global_topk_indices_and_lens
from ..ops.indices import convert_to_front, convert_to_slots_and_ends
from ..typing import AnyArray


def layer_sources(num_layers: int, sources: Iterable[int]) -> tuple[int | None, ...]:
    """For each layer the layer whose list (or compressed cache) it uses: the last source up to the layer itself.

    Args:
        num_layers: layers of the model.
        sources: layers that have a list (or compressed cache) of their own: those with an indexer; `index_source` or
            `kv_source` of DeepSeek-V4.1.

    Returns:
        a source for each layer; None for layers before the first source.

    Raises:
        TypeError, ValueError: a source is no layer.

    Example:
        >>> cupy_mla.layer_sources(8, [2, 5])
        (None, None, 2, 2, 2, 5, 5, 5)
        >>> glm = [i for i in range(78) if max(i - 3 + 1, 0) % 4 == 0]  # GLM-5.2: offset 3, frequency 4
        >>> glm[:6], len(glm), cupy_mla.layer_sources(78, glm)[3:8]
        ([0, 1, 2, 6, 10, 14], 21, (2, 2, 2, 6, 6))
    """
    num_layers = require_integer("num_layers", num_layers, 0)
    if not isinstance(sources, Iterable):
        raise TypeError(f"sources: expected numbers of layers, as [2, 8], got {shown(sources)}")
    own = {require_integer("sources", i, 0, num_layers - 1, "layers of the model") for i in sources}
    found: list[int | None] = []
    for layer in range(num_layers):
        found.append(layer if layer in own else found[-1] if found else None)
    return tuple(found)


@dataclass(frozen=True, eq=False)
class PhysicalTopk:
    """What an index layer chose in a step, for the backends of all layers that use it.

    Attributes:
        logical_topk_indices: [T, K] int32 positions in each token's request, as they were chosen.
        physical_topk_indices: [T, K] int32 slots, or for prefills over an FP8 cache rows of the workspace into which
            they are gathered; with `valid_counts` without gaps. For V4 and V4.1 layers [Td, K]: only decode tokens have
            slots.
        lens: [T] or [Td] int32, where each list of `physical_topk_indices` ends.
        metadata: the step's.
    """

    logical_topk_indices: AnyArray
    physical_topk_indices: AnyArray
    lens: AnyArray
    metadata: SparseMLAMetadata

    def of(self, metadata: SparseMLAMetadata | None) -> PhysicalTopk:
        """Check that it is of the step of `metadata`; returns itself.

        Raises:
            ValueError: it is of another step.
        """
        if metadata is not self.metadata:
            raise ValueError("topk_indices: converted for another step than metadata's")
        return self


class IndexGroups:
    """Converts what index layers choose, once for each of them in a step.

    A step begins with `build`. `put` converts an index layer's list, and `get` returns it for each layer of the group,
    the index layer among them. What `get` returns takes the place of `topk_indices` in `SparseMLAImpl.forward_mqa` or
    in a `DeepseekV4Layer`. One list is kept at a time, at a fixed address, so all layers of a group must run before the
    next index layer.

    `put` may run on another stream of the GPU than the layers, if that stream waits for the index layer and for the
    layers before it. If it did, `get` makes the caller's current stream wait for the conversion.

    Args:
        config: the layers (V4.1: those of one compress ratio) and the engine's maxima.
        sources: for each layer of the model the index layer whose list it uses, as `layer_sources` returns them.
        place: where the device arrays live; see `SparseMLAMetadataBuilder`.

    Attributes:
        config, sources: as given.

    Raises:
        TypeError, ValueError: an argument is none, or the layers have no chosen rows.

    Example:
        >>> config = cupy_mla.SparseMLAConfig(8, topk=2, block_size=4, max_num_batched_tokens=8, max_model_len=8)
        >>> chosen = np.array([[5, 0]], np.int32)
        >>> groups = cupy_mla.IndexGroups(config, cupy_mla.layer_sources(6, [1, 4]), cupy_mla.Place.of(chosen))
        >>> batch = cupy_mla.BatchMetadata([0, 1], [6], [[1, 2]], [9], [5])  # a decode at position 5
        >>> groups.build(cupy_mla.SparseMLAMetadataBuilder(config).build(batch))
        >>> groups.put(1, chosen).physical_topk_indices.tolist()
        [[9, 4]]
        >>> groups.get(3) is groups.get(1)
        True
    """

    def __init__(
        self, config: SparseMLAConfig, sources: Sequence[int | None], place: tuple[str, int] = ("numpy", -1)
    ) -> None:
        require_instance("config", config, SparseMLAConfig)
        if not config.has_topk:
            raise ValueError(f"config: layers of compress ratio {config.compress_ratio} have no chosen rows")
        self.config: SparseMLAConfig = config
        self.sources: tuple[int | None, ...] = tuple(sources)
        self._place = Place.from_pair(place)
        tokens = config.max_num_batched_tokens
        if config.is_v4:
            tokens = min(tokens, config.max_num_seqs * (1 + config.num_speculative_tokens))
        self._slots = self._place.empty((tokens, config.topk_width), INT32)
        self._lens = self._place.empty((tokens,), INT32)
        self._metadata: SparseMLAMetadata | None = None
        self._swa: SparseSWAMetadata | None = None
        self._held: tuple[int | None, PhysicalTopk | None] = (None, None)
        self._stream = 0  # that the list was converted on
        self._ready: Any = None

    def build(self, metadata: SparseMLAMetadata, swa_metadata: SparseSWAMetadata | None = None) -> None:
        """Begin a step.

        Args:
            metadata: of the step, of these layers.
            swa_metadata: of the step, of V4.1's (or V4's) layers.

        Raises:
            TypeError, ValueError: one is missing, or too many.
        """
        require_instance("metadata", metadata, SparseMLAMetadata)
        if self.config.is_v4:
            require_instance("swa_metadata", swa_metadata, SparseSWAMetadata)
        elif swa_metadata is not None:
            raise ValueError("swa_metadata: expected None for layers without a sliding window")
        self._metadata, self._swa, self._held = metadata, swa_metadata, (None, None)

    def put(self, layer: int, topk_indices: AnyArray, valid_counts: AnyArray | None = None) -> PhysicalTopk:
        """Convert what an index layer chose, on the caller's current stream.

        Args:
            layer: the index layer.
            topk_indices: [T, topk_width] int32, as `SparseMLAImpl.forward_mqa` or `DeepseekV4Layer` take them.
            valid_counts: as for `SparseMLAImpl.forward_mqa`.

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape or device, the layer is no index layer, or no
                step has begun.
        """
        source = self._source(layer)
        if source != layer:
            raise ValueError(f"layer: {layer} has no list of its own, it uses that of layer {source}")
        metadata = self._metadata
        if metadata is None:
            raise ValueError("layer: no step has begun, call build first")
        chosen = self._place.admit(describe("topk_indices", topk_indices))
        chosen.require(INT32, metadata.num_actual_tokens, self.config.topk_width)
        if self._swa is not None:
            if valid_counts is not None:
                raise ValueError("valid_counts: expected None for layers with a sliding window")
            tokens = self._swa.num_decode_tokens
            slots, lens = self._slots[:tokens], self._lens[:tokens]
            decode_slots(self.config, self._swa, metadata, topk_indices, slots, lens)
        else:
            tokens = metadata.num_actual_tokens
            slots, lens = self._slots[:tokens], self._lens[:tokens]
            if valid_counts is not None:
                self._place.admit(describe("valid_counts", valid_counts)).require(INT32, tokens)
            to_slots(metadata, topk_indices, valid_counts, slots, lens)
        found = PhysicalTopk(topk_indices, slots, lens, metadata)
        self._held = layer, found
        self._mark()
        return found

    def get(self, layer: int) -> PhysicalTopk:
        """The list that a layer uses in this step.

        Raises:
            TypeError, ValueError: the layer uses no list, or the last list that was put is not that of its index layer.
        """
        source, (held, found) = self._source(layer), self._held
        if found is None or held != source:
            has = "none yet" if found is None else f"that of layer {held}"
            raise ValueError(f"layer: {layer} uses the list of layer {source}, this step has {has}")
        if self._place.on_gpu:
            stream = self._place.stream()
            if stream != self._stream:
                require_cupy("a CUDA array").cuda.runtime.streamWaitEvent(stream, self._ready.ptr)
        return found

    def _source(self, layer: int) -> int:
        layer = require_integer("layer", layer, 0, len(self.sources) - 1, "layers of the model")
        source = self.sources[layer]
        if source is None:
            raise ValueError(f"layer: {layer} uses no list")
        return source

    def _mark(self) -> None:
        """Record an event behind the conversion on the current stream."""
        if not self._place.on_gpu:
            return
        cuda = require_cupy("a CUDA array").cuda
        self._stream = self._place.stream()
        with cuda.Device(self._place.device):
            self._ready = self._ready or cuda.Event(disable_timing=True)
            cuda.runtime.eventRecord(self._ready.ptr, self._stream)


def to_slots(
    metadata: SparseMLAMetadata, chosen: Any, valid_counts: Any, slots: Any, ends: Any, tokens: slice = slice(None)
) -> None:
    """Convert chosen positions [T, K] to slots, for layers of V3.2's kind.

    Args:
        chosen: [T, K] int32 positions.
        valid_counts: [T] int32 how many entries of each token's list are attended: the first ones that have a slot,
            which go to the front. None: all are, and keep their places.
        slots: [T, K] int32, written.
        ends: [T] int32 where each list of slots ends, written.
        tokens: the tokens whose lists are converted.
    """
    extra = metadata.fp8_extra_metadata
    prefill = extra.prefill if isinstance(extra, FP8SeparatePrefillDecode) else None
    given = (
        metadata.req_id_per_token[tokens], metadata.block_table, chosen[tokens], metadata.block_size,
        prefill.request_ids[tokens] if prefill else None, prefill.workspace_starts if prefill else None,
    )  # fmt: skip
    if valid_counts is None:
        convert_to_slots_and_ends(*given, out=slots[tokens], ends=ends[tokens])
    else:  # a count says where a list ends only if there is no gap before: vLLM has gaps between pools and tail
        convert_to_front(*given, valid_counts[tokens], out=slots[tokens], counts=ends[tokens])


def decode_slots(
    config: SparseMLAConfig, swa: SparseSWAMetadata, metadata: SparseMLAMetadata, chosen: Any, slots: Any, lens: Any
) -> None:
    """Convert compressed positions that decode tokens chose to `slots` [Td, topk], and write their numbers to
    `lens`."""
    tokens = swa.num_decode_tokens
    compute_global_topk_indices_and_lens(
        chosen[:tokens], swa.token_to_req_indices[:tokens], metadata.block_table, config.rows_per_block,
        swa.is_valid_token[:tokens], out=slots, lens=lens,
    )  # fmt: skip
