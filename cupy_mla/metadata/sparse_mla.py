"""Metadata of sparse MLA layers: what the attention backend needs to know of a batch, as device arrays.

It serves DeepSeek V3.2's layers and, together with that of `swa`, the compressed caches of V4 and V4.1. It is built
once a step for all layers. Every device array is a view of a buffer that is allocated once, at a fixed address, and
sized by the config's maxima. So a captured CUDA graph can read it at every replay.
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
    """How a step's decodes over FP8 rows are divided. All layers of the step share it; in V4 all of one kind.

    Attributes:
        num_splits: splits of each query's rows that the engine prescribes; None: chosen at each launch.
        plan: the first layer's launch leaves in it, on the GPU, how it divided its lists. The lists of the other layers
            end at the same places, so these load it.
    """

    num_splits: int | None = None
    plan: Plan = field(default_factory=Plan, repr=False, compare=False)


@dataclass(frozen=True)
class FP8DecodeMetadata:
    """The decodes of a batch in separate mode; all have the same number of query tokens.

    Attributes:
        seq_lens: [num_decodes] int32.
        kernel_metadata: the schedule of their launch.
        decode_query_len: query tokens of each decode; requests that pad the batch have none. 1 if tokens that pad the
            batch do not make up whole decodes: then each token is a decode of its own.
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
        req_start_idx: the number of the first one in the batch.
        workspace_starts: [n] int32 first workspace row of each; 0 for the first one of every chunk.
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
        request_ids: [T] int32 number of the prefill of every token of the batch, -1 for decode tokens.
        workspace_starts: [num_prefills] int32, see `PrefillChunk`.
        chunks: consecutive prefills that fit the workspace together, in order.
    """

    seq_lens: AnyArray
    request_ids: AnyArray
    workspace_starts: AnyArray
    chunks: list[PrefillChunk]


@dataclass(frozen=True)
class FP8SeparatePrefillDecode:
    """Separate mode: decodes run as `sparse_decode` over FP8 rows, prefills as `sparse_prefill` over gathered bf16
    rows."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    decode: FP8DecodeMetadata | None = None
    prefill: FP8PrefillMetadata | None = None


@dataclass(frozen=True)
class DenseDecodes:
    """Decodes that attend over all rows of their requests. They need no index lists.

    They are the first tokens of the batch, `query_len` for each request.

    Attributes:
        seq_lens: [B] int32, 0 for requests that are made of padding tokens.
        block_table: [B, W] int32, W the blocks of topk tokens.
        query_len: query tokens of each.
        plan: the first layer's launch leaves in it, on the GPU, how it divided the rows, and the other layers load it.
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
        slot_mapping: [T] int64 the slot of each token's row. With a compressed cache the slot of the row that the token
            completes; -1 for tokens that complete none or pad the batch.
        block_table: [R, M] int32, M fixed by the config; -1 behind the blocks that the batch gave.
        req_id_per_token: [T] int32 request of each token; 0 for tokens that pad the batch.
        block_size: tokens a block.
        topk_tokens: KV tokens chosen for each query token.
        fp8_extra_metadata: None for a bf16 cache and for V4 layers.
        fp8_use_mixed_batch: the whole batch runs as `sparse_decode` over FP8 rows, each token as a request.
        dense_decodes: the decodes that attend over all rows of their requests, without index lists; None: there are
            none. With the config's `dense_when_short` there are some if all decodes have the same number of query
            tokens, no sequence of theirs has more than topk tokens by the host's upper bounds, and attention without
            lists is faster. In batches with prefills, decodes must also be launched apart from these, as in separate
            mode. While a CUDA graph is captured the backend uses them only if the config's `max_model_len` is at most
            topk, because the choice must hold at every replay.
        compress_ratio: of the config.
        compressed_seq_lens: [R] int32 complete compressed rows of each sequence; None without a compressed cache.
        c128a_global_decode_topk_indices: [Td, 1, W] int32 slots of all rows over which a decode token attends, -1
            behind them. W is the number of rows of the longest sequence, rounded up to a multiple of 128. This and the
            next two are None unless rows are compressed 128:1.
        c128a_decode_topk_lens: [Td] int32 how many slots these are, 0 for tokens that pad the batch.
        c128a_prefill_topk_indices: [Tp, W] int32 the same for prefill tokens, as numbers of rows of the request.
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
    """A batch in separate mode, on the host.

    Attributes:
        counts: decodes, prefills, decode tokens, prefill tokens.
        chunks: the first request and the end of each chunk of prefills, in the batch.
        workspace_starts: the first workspace row of each prefill.
        chunk_rows: workspace rows of each chunk.
    """

    counts: tuple[int, int, int, int]
    chunks: list[tuple[int, int]] = field(default_factory=list)
    workspace_starts: np.ndarray = field(default_factory=lambda: np.zeros(0, INT32))
    chunk_rows: list[int] = field(default_factory=list)


class _Dense(NamedTuple):
    """`DenseDecodes` on the host.

    Attributes:
        requests: decodes, with those that are made of padding tokens.
        live: decodes without those.
        query_len: query tokens of each.
    """

    requests: int
    live: int
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
        num_blocks: blocks of the cache, against which slots and block tables are checked; None: they are not checked.

    Attributes:
        config, num_blocks: as given.
        decode_threshold: a decode has at most so many query tokens.
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
            batch: the step's batch. If only the device knows the lengths of sequences, its `seq_lens` are upper bounds.
            seq_lens: [R] int32 lengths of the sequences where the device arrays live. They replace those of the batch
                and must not be greater, which is checked only under `cupy_mla.set_checks`.
            positions: [T] int64 positions of the tokens where the device arrays live. They replace those of the batch.
                Only C128A layers read positions.

        Raises:
            ValueError: the batch exceeds a maximum of the config, its block table is too narrow for a sequence, or a
                slot or a block of a sequence lies beyond the cache (with `num_blocks` given). The arrays stay as they
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
        """The decodes that attend over all rows, or None: see `SparseMLAMetadata.dense_decodes`."""
        config = self.config
        if not config.dense_when_short:
            return None
        counts = split_decodes_and_prefills(batch, self.decode_threshold, True) if mode is None else mode.counts
        decodes, prefills, tokens, _ = counts
        lens = batch.query_lens[:decodes]
        live = int(np.count_nonzero(lens))  # requests that pad the batch are the last ones
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
        """Fill the host's copies. Entries behind the batch get values that a captured graph can read safely."""
        requests, tokens = batch.num_reqs, batch.num_actual_tokens
        req_id = batch.token_requests
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
    """Check lengths [R] and positions [T] that the caller gave as device arrays; returns them by name.

    Raises:
        TypeError, ValueError: an array has the wrong type, shape or device.
        IndexError: a sequence is longer than the batch says; checked under `cupy_mla.set_checks`.
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
    """Write values at the start of a buffer, and `rest` into all entries behind them."""
    buffer[: len(values)] = values
    buffer[len(values) :] = rest


def fill_table(buffer: np.ndarray, batch: BatchMetadata) -> int:
    """Write a batch's block table into the first rows of a buffer; returns the number of these rows.

    If the buffer is wider than the table, the rest of a row is -1. If it is narrower, no sequence reaches the columns
    that are left out.
    """
    requests, width = batch.num_reqs, min(batch.block_table.shape[1], buffer.shape[1])
    buffer[:requests, :width] = batch.block_table[:, :width]
    buffer[:requests, width:] = -1
    return requests
