"""Metadata of sparse MLA layers: what a batch means to the attention backend, as device arrays.

For DeepSeek V3.2's layers, and next to `swa` for the compressed caches of V4's and V4.1's. Built once a step and shared
by all layers. Every device array is a view of a buffer that is allocated once, at a fixed address, and sized by the
config's maxima, so that a captured CUDA graph can read it at every replay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from ..arrays import HOST
from ..bridges import Place, describe
from ..checks.options import require_instance, require_integer
from ..checks.values import check_bounds
from ..config import SparseMLAConfig
from ..cuda.program import Plan
from ..dtypes import INT32, INT64
from ..ops.dense import faster_than_lists
from ..typing import AnyArray
from .batch import BatchMetadata, prefill_workspace_size, split_decodes_and_prefills, split_prefill_chunks
from .compressed import CompressedRows
from .uploads import Uploads


@dataclass
class FP8KernelMetadata:
    """The schedule of one FP8 decode launch, shared by all layers of a step; of V4's by all of one kind.

    Attributes:
        num_splits: splits of each query's rows that are asked for; None: chosen at each launch.
        plan: memory on the GPU in which the first layer's launch leaves how it divided its lists, for the other layers,
            whose lists end at the same places.
    """

    num_splits: int | None = None
    plan: Plan = field(default_factory=Plan, repr=False, compare=False)


@dataclass(frozen=True)
class FP8DecodeMetadata:
    """The decodes of a batch in separate mode; all have the same number of query tokens.

    Attributes:
        seq_lens: [num_decodes] int32.
        kernel_metadata: the schedule of their launch.
        decode_query_len: query tokens of each decode (requests without tokens, which pad a batch, aside). 1 where
            tokens that pad the batch do not make up whole decodes: each token is then a decode of its own.
    """

    seq_lens: AnyArray
    kernel_metadata: FP8KernelMetadata
    decode_query_len: int


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive prefills whose sequences fit the workspace together.

    Attributes:
        seq_lens: [n] int32.
        tokens_slice: their query tokens in the batch.
        block_table: [n, M] int32.
        req_start_idx: the first of them, as a request of the batch.
        workspace_starts: [n] int32 first workspace row of each, from 0 in every chunk.
        chunk_tot_seqlen: workspace rows of the chunk.
    """

    seq_lens: AnyArray
    tokens_slice: slice
    block_table: AnyArray
    req_start_idx: int
    workspace_starts: AnyArray
    chunk_tot_seqlen: int


@dataclass(frozen=True)
class FP8PrefillMetadata:
    """The prefills of a batch in separate mode.

    Attributes:
        seq_lens: [num_prefills] int32.
        request_ids: [T] int32, for every token of the batch the number of its prefill, -1 for decode tokens.
        workspace_starts: [num_prefills] int32, see `PrefillChunk`.
        chunks: consecutive prefills that fit the workspace together, in order.
    """

    seq_lens: AnyArray
    request_ids: AnyArray
    workspace_starts: AnyArray
    chunks: list[PrefillChunk]


@dataclass(frozen=True)
class FP8SeparatePrefillDecode:
    """Separate mode: decodes go to the FP8 decode kernel, prefills to the bf16 prefill kernel over gathered rows."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    decode: FP8DecodeMetadata | None = None
    prefill: FP8PrefillMetadata | None = None


@dataclass(frozen=True)
class DenseDecodes:
    """Decodes that attend over all rows of their requests, in place of index lists that would name them.

    They are the first tokens of the batch, `query_len` a request.

    Attributes:
        seq_lens: [B] int32, 0 of requests that tokens which pad the batch stand for.
        block_table: [B, W] int32, of as many blocks as topk tokens take.
        query_len: query tokens of each.
        plan: memory on the GPU in which the first layer's launch leaves how it divided rows, for the other layers.
    """

    seq_lens: AnyArray
    block_table: AnyArray
    query_len: int
    plan: Plan = field(default_factory=Plan, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """Query tokens, B * query_len."""
        return len(self.seq_lens) * self.query_len


@dataclass(frozen=True)
class SparseMLAMetadata:
    """One step's batch of R requests and T query tokens, for every sparse MLA layer.

    Attributes:
        num_reqs, max_query_len, max_seq_len, num_actual_tokens: as of the batch.
        query_start_loc: [R + 1] int32.
        slot_mapping: [T] int64, where this step's tokens go; of a compressed cache, where the rows go that they
            complete, -1 for tokens that complete none or pad the batch.
        block_table: [R, M] int32, M fixed by the config; -1 past the blocks that the batch gave.
        req_id_per_token: [T] int32, the request of each token; 0 for tokens that pad the batch.
        block_size: tokens a block.
        topk_tokens: KV tokens chosen for each query token.
        fp8_extra_metadata: None for a bf16 cache and for V4 layers.
        fp8_use_mixed_batch: the whole batch goes to the FP8 decode kernel, one query a token.
        dense_decodes: the decodes where these attend over all rows of their requests, without index lists; None where
            they take lists. That is decided by the host's upper bounds of sequences' lengths: with the config's
            `dense_when_short`, decodes of equally many query tokens each, of sequences of at most topk tokens, take the
            dense way where it is faster. In batches with prefills so do the decodes that are launched apart from these,
            as in separate mode. In a captured CUDA graph they take it only where no sequence can be longer than topk
            (the config's `max_model_len`), since the choice must hold at every replay.
        compress_ratio: of the config.
        compressed_seq_lens: [R] int32 complete compressed rows of each sequence; None without a compressed cache.
        c128a_global_decode_topk_indices: [Td, 1, W] int32 slots of all rows that a decode token attends, -1 past them,
            W the rows of the longest sequence, rounded up to a multiple of 128; None unless compressed 128:1.
        c128a_decode_topk_lens: [Td] int32 how many these are, 0 for tokens that pad the batch.
        c128a_prefill_topk_indices: [Tp, W] int32 the same for prefill tokens, as rows of the request.
    """

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: AnyArray
    slot_mapping: AnyArray
    block_table: AnyArray
    req_id_per_token: AnyArray
    block_size: int
    topk_tokens: int
    fp8_extra_metadata: FP8KernelMetadata | FP8SeparatePrefillDecode | None = None
    fp8_use_mixed_batch: bool = False
    dense_decodes: DenseDecodes | None = None
    compress_ratio: int = 1
    compressed_seq_lens: AnyArray | None = None
    c128a_global_decode_topk_indices: AnyArray | None = None
    c128a_decode_topk_lens: AnyArray | None = None
    c128a_prefill_topk_indices: AnyArray | None = None


@dataclass(frozen=True)
class _SeparateMode:
    """A batch in separate mode, on the host."""

    counts: tuple[int, int, int, int]  # decodes, prefills, decode tokens, prefill tokens
    chunks: list[tuple[int, int]] = field(default_factory=list)  # first request of the batch, end
    workspace_starts: np.ndarray = field(default_factory=lambda: np.zeros(0, INT32))  # of all prefills
    chunk_rows: list[int] = field(default_factory=list)


class _Dense(NamedTuple):
    """Decodes that take the dense way."""

    requests: int  # those that tokens which pad the batch stand for included
    live: int  # those that are there
    query_len: int


class SparseMLAMetadataBuilder:
    """Builds `SparseMLAMetadata` from batches, into the same device arrays each time.

    A metadata object is valid until the next `build`, which rewrites the arrays behind it (on a GPU in order on the
    caller's current stream). `build` never waits for the device. It is not captured in a CUDA graph: replays read what
    the last `build` wrote.

    Args:
        config: the layers and the engine's maxima.
        place: where the device arrays live: (kind of array, device), for instance ("torch", 0), ("cupy", 0) or
            ("numpy", cupy_mla.arrays.HOST); `Place.of(array)` gives that of an array.
        num_blocks: blocks of the cache, to check slots and block tables against; None leaves them
            unchecked.

    Attributes:
        config, num_blocks: as given.
        decode_threshold: most query tokens of a decode.
    """

    def __init__(
        self, config: SparseMLAConfig, place: tuple[str, int] = ("numpy", HOST), num_blocks: int | None = None
    ) -> None:
        require_instance("config", config, SparseMLAConfig)
        num_blocks = None if num_blocks is None else require_integer("num_blocks", num_blocks, 0)
        self.config = config
        self.num_blocks = num_blocks
        self.decode_threshold: int = 1 + config.num_speculative_tokens
        requests, tokens = config.max_num_seqs, config.max_num_batched_tokens
        width = -(-config.max_model_len // config.block_size)
        self._dense_width: int = min(width, -(-config.topk // config.block_size))  # blocks of the longest
        place = Place.from_pair(place)
        self._compressed = CompressedRows(config, place) if config.has_compressed_rows else None
        self._buffers = Uploads(
            place,
            {
                "query_start_loc": ((requests + 1,), INT32),
                "seq_lens": ((requests,), INT32),
                "dense_lens": ((requests,), INT32),
                "slot_mapping": ((tokens,), INT64),
                "req_id_per_token": ((tokens,), INT32),
                "prefill_request_ids": ((tokens,), INT32),
                "prefill_workspace_starts": ((requests,), INT32),
                "positions": ((tokens,), INT64),
                "compressed_seq_lens": ((requests,), INT32),
                "block_table": ((requests, width), INT32),  # last: only its used rows go up
            },
        )

    def build(
        self, batch: BatchMetadata, *, seq_lens: AnyArray | None = None, positions: AnyArray | None = None
    ) -> SparseMLAMetadata:
        """The metadata of one step.

        Args:
            batch: where the device alone knows how long sequences are, with upper bounds for `seq_lens`.
            seq_lens: [R] int32 where the device arrays live, the lengths of sequences instead of the batch's. None of
                them may be greater than the batch says, which only `cupy_mla.set_checks` looks at.
            positions: [T] int64 there, the tokens' places instead of the batch's. C128A layers alone read them.

        Raises:
            ValueError: the batch exceeds a maximum of the config, its block table is too narrow for a sequence, or a
                slot or a block of a sequence lies beyond the cache (with `num_blocks` given); the arrays stay as they
                were.
        """
        config = self.config
        check_batch(config, batch, self.num_blocks)
        known = known_on_device(self._buffers.place, batch, seq_lens=seq_lens, positions=positions)
        separate = config.layout.quantized and not config.is_v4 and not config.use_mixed_batch
        mode = self._separate_mode(batch) if separate else None
        dense = self._dense(batch, mode)
        self._buffers.upload(lambda host: self._write(host, batch, mode, dense))
        self._buffers.put(known)
        if "seq_lens" in known and dense is not None:
            self._buffers.put({"dense_lens": known["seq_lens"][: dense.live]})
        if "seq_lens" in known and config.has_compressed_rows:
            self._buffers.put({"compressed_seq_lens": known["seq_lens"] // config.compress_ratio})

        device, requests, tokens = self._buffers.arrays, batch.num_reqs, batch.num_actual_tokens
        extra: FP8KernelMetadata | FP8SeparatePrefillDecode | None = None
        if mode is not None:
            extra = self._separate(batch, mode)
        elif config.use_mixed_batch:
            extra = FP8KernelMetadata()
        fields = {"slot_mapping": device["slot_mapping"][:tokens]}
        if self._compressed is not None:
            fields = self._compressed.fields(batch, device)
        return SparseMLAMetadata(
            num_reqs=requests,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            num_actual_tokens=tokens,
            query_start_loc=device["query_start_loc"][: requests + 1],
            block_table=device["block_table"][:requests],
            req_id_per_token=device["req_id_per_token"][:tokens],
            block_size=config.block_size,
            topk_tokens=config.topk,
            fp8_extra_metadata=extra,
            fp8_use_mixed_batch=config.use_mixed_batch,
            dense_decodes=None if dense is None else self._dense_decodes(dense),
            compress_ratio=config.compress_ratio,
            **fields,
        )

    def _separate_mode(self, batch: BatchMetadata) -> _SeparateMode:
        counts = split_decodes_and_prefills(batch, self.decode_threshold, require_uniform=True)
        num_decodes, num_prefills = counts[:2]
        if num_prefills == 0:
            return _SeparateMode(counts)
        lens = batch.seq_lens[num_decodes:]
        chunks = split_prefill_chunks(lens, prefill_workspace_size(self.config.max_model_len), num_decodes)
        starts, rows = [], []
        for first, end in chunks:
            ends = np.cumsum(batch.seq_lens[first:end])
            starts.append(ends - batch.seq_lens[first:end])
            rows.append(int(ends[-1]))
        return _SeparateMode(counts, chunks, np.concatenate(starts).astype(INT32), rows)

    def _dense(self, batch: BatchMetadata, mode: _SeparateMode | None) -> _Dense | None:
        """The decodes that take the dense way, None where they take index lists."""
        config = self.config
        if not config.dense_when_short:
            return None
        counts = split_decodes_and_prefills(batch, self.decode_threshold, True) if mode is None else mode.counts
        decodes, prefills, tokens, _ = counts
        lens = batch.query_lens[:decodes]
        live = int(np.count_nonzero(lens))  # requests that pad the batch stand last
        query_len = int(lens.max(initial=0))
        if live == 0 or (prefills and mode is None) or (lens[:live] != query_len).any() or tokens % query_len:
            return None
        requests = tokens // query_len
        if requests > config.max_num_seqs or batch.seq_lens[:live].max() > config.topk:
            return None
        shape = requests, query_len, config.num_heads
        faster = faster_than_lists(self._buffers.place, config.layout, shape, self._dense_width, config.block_size)
        return _Dense(requests, live, query_len) if faster else None

    def _dense_decodes(self, dense: _Dense) -> DenseDecodes:
        device, requests = self._buffers.arrays, dense.requests
        table = device["block_table"][:requests, : self._dense_width]
        return DenseDecodes(device["dense_lens"][:requests], table, dense.query_len)

    def _write(
        self, host: dict[str, np.ndarray], batch: BatchMetadata, mode: _SeparateMode | None, dense: _Dense | None
    ) -> int:
        """Fill the host's copies; entries past the batch with values that are safe for a captured graph to read."""
        requests, tokens = batch.num_reqs, batch.num_actual_tokens
        req_id = np.repeat(np.arange(requests, dtype=INT32), batch.query_lens)
        fill(host["query_start_loc"], batch.query_start_loc, tokens)
        fill(host["seq_lens"], batch.seq_lens, 0)
        fill(host["dense_lens"], () if dense is None else batch.seq_lens[: dense.live], 0)
        fill(host["slot_mapping"], batch.slot_mapping, -1)
        fill(host["req_id_per_token"], req_id, 0)
        num_decodes = requests if mode is None else mode.counts[0]
        fill(host["prefill_request_ids"], np.maximum(req_id - num_decodes, -1), -1)
        fill(host["positions"], batch.positions, 0)
        fill(host["compressed_seq_lens"], batch.seq_lens // self.config.tokens_per_row, 0)
        fill(host["prefill_workspace_starts"], () if mode is None else mode.workspace_starts, 0)
        return fill_table(host["block_table"], batch)

    def _separate(self, batch: BatchMetadata, mode: _SeparateMode) -> FP8SeparatePrefillDecode:
        device, requests = self._buffers.arrays, batch.num_reqs
        num_decodes, num_prefills, decode_tokens, _ = mode.counts
        decode = prefill = None
        if decode_tokens:
            query_len = max(int(batch.query_lens[:num_decodes].max(initial=0)), 1)
            if decode_tokens % query_len:
                query_len = 1
            decode = FP8DecodeMetadata(device["seq_lens"][:num_decodes], FP8KernelMetadata(), query_len)
        if num_prefills:
            prefill = FP8PrefillMetadata(
                seq_lens=device["seq_lens"][num_decodes:requests],
                request_ids=device["prefill_request_ids"][: batch.num_actual_tokens],
                workspace_starts=device["prefill_workspace_starts"][:num_prefills],
                chunks=[
                    PrefillChunk(
                        seq_lens=device["seq_lens"][first:end],
                        tokens_slice=slice(int(batch.query_start_loc[first]), int(batch.query_start_loc[end])),
                        block_table=device["block_table"][first:end],
                        req_start_idx=first,
                        workspace_starts=device["prefill_workspace_starts"][first - num_decodes : end - num_decodes],
                        chunk_tot_seqlen=rows,
                    )
                    for (first, end), rows in zip(mode.chunks, mode.chunk_rows, strict=True)
                ],
            )
        return FP8SeparatePrefillDecode(*mode.counts, decode, prefill)


def check_batch(
    config: SparseMLAConfig, batch: BatchMetadata, num_blocks: int | None, window: int | None = None
) -> None:
    """Check a batch against the config's maxima and its cache; `window` as of `BatchMetadata.check_cache`."""
    require_instance("batch", batch, BatchMetadata)
    for what, got, most in (
        ("requests", batch.num_reqs, config.max_num_seqs),
        ("query tokens", batch.num_actual_tokens, config.max_num_batched_tokens),
        ("tokens in a sequence", batch.max_seq_len, config.max_model_len),
    ):
        if got > most:
            raise ValueError(f"batch: expected at most {most} {what} (config), got {got}")
    batch.check_cache(config.block_size, num_blocks, window)


def known_on_device(place: Place, batch: BatchMetadata, **given: AnyArray | None) -> dict[str, Any]:
    """Those of lengths [R] and positions [T] that the device has and the caller gave, checked.

    Raises:
        TypeError, ValueError: an array has the wrong type, shape or device.
        IndexError: under `cupy_mla.set_checks`: a sequence is longer than the batch says.
    """
    dtypes: dict[str, np.dtype] = {"seq_lens": INT32, "positions": INT64}
    lengths = {"seq_lens": batch.num_reqs, "positions": batch.num_actual_tokens}
    found = {}
    for name, value in given.items():
        if value is not None:
            found[name] = place.admit(describe(name, value)).require(dtypes[name], lengths[name])
    if arrays.CHECK_VALUES and "seq_lens" in found:
        check_bounds(found["seq_lens"], batch.seq_lens)
    return {name: array.obj for name, array in found.items()}


def fill(buffer: np.ndarray, values: Any, rest: int) -> None:
    """Write values at the start of a buffer and `rest` in all entries after them."""
    buffer[: len(values)] = values
    buffer[len(values) :] = rest


def fill_table(buffer: np.ndarray, batch: BatchMetadata) -> int:
    """Write a batch's block table into the first rows of a buffer; returns how many these are.

    Where the buffer is wider, -1 stands behind the table; where it is narrower, no sequence reaches what is left out.
    """
    requests, width = batch.num_reqs, min(batch.block_table.shape[1], buffer.shape[1])
    buffer[:requests, :width] = batch.block_table[:, :width]
    buffer[:requests, width:] = -1
    return requests
