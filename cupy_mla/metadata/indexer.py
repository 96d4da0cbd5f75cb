"""Metadata of the lightning indexer: the keys that each query token of a batch sees, and chunks of prefills whose
logits fit the memory.

It is built once a step for all layers that have an indexer: those of DeepSeek V3.2, V4's C4A, V4.1's C1A and C2A. Every
device array is a view of a buffer that is allocated once, at a fixed address, and sized by the config's maxima. So a
captured CUDA graph can read it at every replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays import HOST
from ..bridges import Place
from ..checks.options import LARGEST_INT, require_instance, require_integer
from ..config import CHOSEN, SparseMLAConfig, one_of
from ..cuda.driver import gpu
from ..cuda.logits_sm90 import shares_of_step
from ..dtypes import FLOAT32, INT32, INT64
from ..ops.compressed import get_compressed_slot_mapping
from ..ops.logits import SCHEDULE_WORDS, paged_indexer_schedule
from ..typing import AnyArray
from .batch import PREFILL_WORKSPACE_SEQUENCES, BatchMetadata, split_decodes_and_prefills
from .sparse_mla import check_batch, fill, fill_table, known_on_device
from .uploads import Uploads

LOGITS_ALIGN = 4  # rows of logits are a multiple of so many float32


@dataclass(frozen=True)
class IndexerDecodeMetadata:
    """The decodes of a batch: B requests, padded to n query tokens each.

    Attributes:
        block_table: [B, M] int32.
        context_lens: keys that each query token sees: [B] int32 if n is 1, else [B, n]; 0 for padding.
        query_len: n, the query tokens of the longest decode.
        requires_padding: some decodes have fewer query tokens than n.
        padded_rows: [B * n] int64 the decode token at each place of [B, n], 0 for padding.
        token_rows: [Td] int64 the place in [B, n] of each decode token.
        max_context_len: keys of the longest sequence that the config allows.
        choose_all: no sequence that the config allows has more keys than a query token chooses.
        short: in this step no query token sees more keys than it chooses, by the host's upper bounds. Then no logits
            are computed, except in a captured CUDA graph, whose replays may have longer sequences.
        schedule: from `paged_indexer_schedule`; None where no kernel takes one.
    """

    block_table: AnyArray
    context_lens: AnyArray
    query_len: int
    requires_padding: bool
    padded_rows: AnyArray
    token_rows: AnyArray
    max_context_len: int
    choose_all: bool
    short: bool
    schedule: AnyArray | None


@dataclass(frozen=True)
class IndexerPrefillChunk:
    """Query tokens of n consecutive prefills, whose keys fit the workspace and whose logits fit the limit.

    It has all query tokens of these prefills, or a part of those of one prefill.

    Attributes:
        block_table: [n, M] int32.
        cu_seq_lens: [n + 1] int32 where the keys of each prefill start in the workspace.
        num_keys: keys of these prefills.
        tokens_slice: the chunk's query tokens in the batch.
        starts, ends: [tokens] int32 the range of keys in the workspace that each query token sees.
        gathers: the keys must be gathered for this chunk. Else an earlier chunk has gathered them, or none are needed.
        choose_all: no query token of the chunk sees more keys than it chooses, so no logits are needed.
    """

    block_table: AnyArray
    cu_seq_lens: AnyArray
    num_keys: int
    tokens_slice: slice
    starts: AnyArray
    ends: AnyArray
    gathers: bool
    choose_all: bool


@dataclass(frozen=True)
class IndexerMetadata:
    """One step's batch of T query tokens, for every layer with an indexer: Td of decodes, which stand first.

    Attributes:
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens: how the batch is split.
        num_actual_tokens: T.
        slot_mapping: [T] int64 the slot of each token's key; -1 for tokens that complete no compressed row or pool.
        block_size: tokens a block.
        compress_ratio, kpool: of the config; a key stands for so many tokens.
        topk_tokens: tokens that each query token chooses; with compression, rows.
        token_context_lens: [T] int32 tokens that each query token sees, itself included; None where kpool is 1.
        decode: None without decode tokens.
        prefill_chunks: in order; they hold every prefill token once.
        seen: [T] int32 keys that each query token sees, 0 for tokens that pad.
        req_id: [T] int32 request of each query token, 0 for tokens that pad.
        block_table: [R, M] int32 of all requests.
        short: in this step no query token sees more keys than it chooses, by the host's upper bounds.
    """

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_actual_tokens: int
    slot_mapping: AnyArray
    block_size: int
    compress_ratio: int
    kpool: int
    topk_tokens: int
    token_context_lens: AnyArray | None
    decode: IndexerDecodeMetadata | None
    prefill_chunks: list[IndexerPrefillChunk]
    seen: AnyArray
    req_id: AnyArray
    block_table: AnyArray
    short: bool


class _Chunk(NamedTuple):
    """An `IndexerPrefillChunk` on the host.

    Attributes:
        first, end: its requests in the batch.
        tokens: its query tokens in the batch.
        cu_start: where its `cu_seq_lens` start among those of all chunks.
    """

    first: int
    end: int
    tokens: slice
    cu_start: int


class _Split(NamedTuple):
    """A batch split into decodes and chunks of prefills, on the host.

    Attributes:
        counts: decodes, prefills, decode tokens, prefill tokens.
        seen: keys of its request that each query token sees. Tokens that pad decodes see 0; others that pad are left
            out.
        decodes: requests up to the last decode with tokens, and requests that are made of padding tokens.
        decode_len: query tokens of the longest decode.
        places: [Td] the place of each decode token in [decodes, decode_len].
        chunks: of the prefills.
        cu_seq_lens: those of all chunks.
        key_starts: for each query token, without padding, where the keys of its request start in the workspace.
    """

    counts: tuple[int, int, int, int]
    seen: np.ndarray
    decodes: int
    decode_len: int
    places: np.ndarray
    chunks: list[_Chunk]
    cu_seq_lens: np.ndarray
    key_starts: np.ndarray


class IndexerMetadataBuilder:
    """Builds `IndexerMetadata` from batches, into the same device arrays each time.

    A metadata object is valid until the next `build`, which rewrites the arrays behind it (on a GPU in order on the
    caller's current stream). `build` never waits for the device. Replays of a captured step read what the last `build`
    wrote. Its batch must have as many decodes with as many query tokens as the captured one, and prefills that are
    divided into the same chunks; sequences may have any lengths.

    Args:
        config: the layers and the engine's maxima; `block_size` counts tokens.
        place: where the device arrays live; see `SparseMLAMetadataBuilder`.
        num_blocks: blocks of the cache, against which slots and block tables are checked; None: they are not checked.

    Attributes:
        config, num_blocks: as given.
        decode_threshold: a decode has at most so many query tokens. Decodes of a batch may have different numbers.

    Raises:
        ValueError: layers of the config have no indexer.

    Example:
        >>> config = cupy_mla.SparseMLAConfig(16, topk=32, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
        >>> batch = cupy_mla.BatchMetadata([0, 1, 21], [41, 20], [[3], [7]], range(21), [40, *range(20)])
        >>> metadata = cupy_mla.IndexerMetadataBuilder(config).build(batch)  # a decode and a prompt of 20 tokens
        >>> metadata.decode.context_lens.tolist()
        [41]
        >>> chunk, = metadata.prefill_chunks
        >>> chunk.ends[:3].tolist(), chunk.choose_all
        ([1, 2, 3], True)
    """

    def __init__(
        self, config: SparseMLAConfig, place: tuple[str, int] = ("numpy", HOST), num_blocks: int | None = None
    ) -> None:
        require_indexed(config)
        self.config = config
        self.num_blocks: int | None = None if num_blocks is None else require_integer("num_blocks", num_blocks, 0)
        self.decode_threshold: int = 1 + config.num_speculative_tokens
        requests, tokens = config.max_num_seqs, config.max_num_batched_tokens
        width = -(-config.max_model_len // config.block_size)
        self._buffers = Uploads(
            Place.from_pair(place),
            {
                "slot_mapping": ((tokens,), INT64),
                "own_slots": ((tokens if _keys_apart(config) else 0,), INT64),
                "token_context_lens": ((tokens if config.kpool > 1 else 0,), INT32),
                "context_lens": ((requests * self.decode_threshold,), INT32),
                "padded_rows": ((requests * self.decode_threshold,), INT64),
                "token_rows": ((min(tokens, requests * self.decode_threshold),), INT64),
                "cu_seq_lens": ((2 * requests,), INT32),
                "query_start_loc": ((requests + 1,), INT32),
                "token_to_req": ((tokens,), INT64),
                "from_end": ((tokens,), INT32),
                "req_id": ((tokens,), INT32),
                "seen": ((tokens,), INT32),
                "starts": ((tokens,), INT32),
                "ends": ((tokens,), INT32),
                "block_table": ((requests, width), INT32),  # last: only its used rows go up
            },
        )
        self._schedule = self._schedule_buffer()

    def build(self, batch: BatchMetadata, *, seq_lens: AnyArray | None = None) -> IndexerMetadata:
        """The metadata of one step.

        Tokens that pad a batch of decodes are decodes that see no keys. Tokens that pad prefills are in no chunk.

        Args:
            batch: with the block table and the slots of the cache of keys. Where keys stand for several tokens, their
                slots are computed from the block table instead. If only the device knows the lengths of sequences,
                `seq_lens` are upper bounds.
            seq_lens: [R] int32 lengths of the sequences where the device arrays live; see
                `SparseMLAMetadataBuilder.build`.

        Raises:
            ValueError: the batch exceeds a maximum of the config, its block table is too narrow for a sequence, or a
                slot or a block of a sequence lies beyond the cache (with `num_blocks` given). The arrays stay as they
                were.
        """
        config = self.config
        check_batch(config, batch, self.num_blocks)
        known = known_on_device(self._buffers.place, batch, seq_lens=seq_lens)
        split = self._split(batch)
        if split.decodes > config.max_num_seqs:
            raise ValueError(
                f"batch: expected at most {config.max_num_seqs} decodes (config), with tokens that pad it "
                f"{split.decodes}"
            )
        self._buffers.upload(lambda host: self._write(host, batch, split))
        if known:
            self._recompute(batch, split, known["seq_lens"])
        tokens = batch.num_actual_tokens
        return IndexerMetadata(
            *split.counts,
            num_actual_tokens=tokens,
            slot_mapping=self._buffers.arrays["slot_mapping"][:tokens],
            block_size=config.block_size,
            compress_ratio=config.compress_ratio,
            kpool=config.kpool,
            topk_tokens=config.topk,
            token_context_lens=self._buffers.arrays["token_context_lens"][:tokens] if config.kpool > 1 else None,
            decode=self._decode(split) if split.counts[2] else None,
            prefill_chunks=self._prefill(split),
            seen=self._buffers.arrays["seen"][:tokens],
            req_id=self._buffers.arrays["req_id"][:tokens],
            block_table=self._buffers.arrays["block_table"][: batch.num_reqs],
            short=bool(split.seen.max(initial=0) <= config.index_topk),
        )

    def _split(self, batch: BatchMetadata) -> _Split:
        counts = split_decodes_and_prefills(batch, self.decode_threshold)
        num_decodes, _, decode_tokens, _ = counts
        request, token = batch.token_requests, np.arange(len(batch.token_requests))
        padding = max(decode_tokens - len(request), 0)
        seen = (batch.token_positions + 1) // self.config.tokens_per_key

        of_decodes = slice(decode_tokens - padding)
        decodes = int(request[of_decodes][-1]) + 1 if decode_tokens > padding else 0
        decode_len = max(int(batch.query_lens[:decodes].max(initial=0)), 1)
        places = request[of_decodes] * decode_len + token[of_decodes] - batch.query_start_loc[request[of_decodes]]
        if padding:
            places = np.append(places, decodes * decode_len + np.arange(padding))
            seen = np.append(seen, np.zeros(padding, seen.dtype))
            decodes += -(-padding // decode_len)

        # Requests without query tokens need no keys.
        keys = np.where(batch.query_lens > 0, batch.seq_lens // self.config.tokens_per_key, 0)
        portions = split_indexer_chunks(
            batch.query_lens[num_decodes:], keys[num_decodes:], key_workspace_rows(self.config),
            self.config.max_workspace_bytes,
        )  # fmt: skip
        chunks: list[_Chunk] = []
        sums, sums_len, key_starts = [np.zeros(0, INT32)], 0, np.zeros(batch.num_reqs, INT32)
        for portion in portions:
            first, end = num_decodes + portion.first, num_decodes + portion.end
            if not (chunks and chunks[-1].first == first):
                ends = np.cumsum(keys[first:end])
                key_starts[first:end] = ends - keys[first:end]
                sums.append(np.concatenate([[0], ends]).astype(INT32))
                cu_start, sums_len = sums_len, sums_len + len(sums[-1])
            base = int(batch.query_start_loc[first])
            chunks.append(_Chunk(first, end, slice(base + portion.start, base + portion.stop), cu_start))
        return _Split(counts, seen, decodes, decode_len, places, chunks, np.concatenate(sums), key_starts[request])

    def _write(self, host: dict[str, np.ndarray], batch: BatchMetadata, split: _Split) -> int:
        """Fill the host's copies. Entries behind the batch get values that a captured graph can read safely."""
        config, decode_tokens = self.config, split.counts[2]
        slots = batch.slot_mapping
        if _keys_apart(config):
            slots = get_compressed_slot_mapping(
                batch.num_actual_tokens, batch.query_start_loc, batch.seq_lens, batch.block_table,
                config.keys_per_block, config.tokens_per_key, slot_mapping=batch.slot_mapping,
            )  # fmt: skip
            fill(host["own_slots"], batch.slot_mapping, -1)
        fill(host["slot_mapping"], slots, -1)
        for name in ("context_lens", "padded_rows"):
            host[name][...] = 0
        host["context_lens"][split.places] = split.seen[:decode_tokens]
        host["padded_rows"][split.places] = np.arange(decode_tokens)
        fill(host["token_rows"], split.places, 0)
        fill(host["cu_seq_lens"], split.cu_seq_lens, 0)
        tokens, lens = len(split.key_starts), batch.token_positions + 1  # tokens that each query token sees
        if config.kpool > 1:
            fill(host["token_context_lens"], lens, 0)
        fill(host["starts"], split.key_starts, 0)
        fill(host["ends"], split.key_starts + split.seen[:tokens], 0)
        fill(host["query_start_loc"], batch.query_start_loc, batch.num_actual_tokens)
        fill(host["token_to_req"], batch.token_requests, 0)
        fill(host["req_id"], batch.token_requests, 0)
        fill(host["seen"], split.seen, 0)
        fill(host["from_end"], lens - batch.seq_lens[batch.token_requests], 0)
        return fill_table(host["block_table"], batch)

    def _recompute(self, batch: BatchMetadata, split: _Split, seq_lens: Any) -> None:
        """Compute on the device what follows from lengths that only the device knows: the keys that query tokens see,
        and the slots of this step's keys."""
        config, device, tokens = self.config, self._buffers.arrays, len(split.key_starts)
        decode_tokens = min(split.counts[2], tokens)
        lens = seq_lens[device["token_to_req"][:tokens]] + device["from_end"][:tokens]
        seen = lens // config.tokens_per_key
        device["seen"][:tokens] = seen
        device["ends"][:tokens] = device["starts"][:tokens] + seen
        if config.kpool > 1:
            device["token_context_lens"][:tokens] = lens
        device["context_lens"][device["token_rows"][:decode_tokens]] = seen[:decode_tokens]
        if _keys_apart(config):
            requests = batch.num_reqs
            get_compressed_slot_mapping(
                batch.num_actual_tokens, device["query_start_loc"][: requests + 1], seq_lens,
                device["block_table"][:requests], config.keys_per_block, config.tokens_per_key, device["slot_mapping"],
                slot_mapping=device["own_slots"],
            )  # fmt: skip

    @property
    def _choose_all(self) -> bool:
        """Whether no sequence that the config allows has more keys than a query token chooses."""
        return self.config.max_index_keys <= self.config.index_topk

    def _shares(self, queries: int) -> int | None:
        """The shares of a schedule for decodes of so many query tokens; None where no kernel takes one."""
        place = self._buffers.place
        if not place.on_gpu or self._choose_all:
            return None
        return shares_of_step(gpu(place.device), queries, self.config.keys_per_block)

    def _schedule_buffer(self) -> Any:
        """Memory for schedules. Only `paged_indexer_schedule` may write it, because kernels read it while earlier
        launches still run."""
        shares = self._shares(1)
        return None if shares is None else self._buffers.place.empty((shares, SCHEDULE_WORDS), INT32)

    def _scheduled(self, lens: Any, table: Any, queries: int) -> Any:
        """The schedule for decodes of so many query tokens, or None."""
        shares = self._shares(queries)
        if shares is None:
            return None
        keys, rows = self.config.max_index_keys, self.config.keys_per_block
        return paged_indexer_schedule(lens, table, keys, rows, shares, out=self._schedule)

    def _decode(self, split: _Split) -> IndexerDecodeMetadata:
        device, n = self._buffers.arrays, split.decode_len
        places, tokens = split.decodes * n, split.counts[2]
        lens, table = device["context_lens"][:places], device["block_table"][: split.decodes]
        lens = lens if n == 1 else lens.reshape(split.decodes, n)
        return IndexerDecodeMetadata(
            block_table=table,
            context_lens=lens,
            query_len=n,
            requires_padding=places != tokens,
            padded_rows=device["padded_rows"][:places],
            token_rows=device["token_rows"][:tokens],
            max_context_len=self.config.max_index_keys,
            choose_all=self._choose_all,
            short=bool(split.seen[:tokens].max(initial=0) <= self.config.index_topk),
            schedule=self._scheduled(lens, table, n),
        )

    def _prefill(self, split: _Split) -> list[IndexerPrefillChunk]:
        device, chunks = self._buffers.arrays, []
        gathered = -1  # the first request of those whose keys are in the workspace
        for first, end, tokens, cu_start in split.chunks:
            choose_all = bool(split.seen[tokens].max() <= self.config.index_topk)
            gathers = not choose_all and gathered != first
            gathered = first if gathers else gathered
            cu_end = cu_start + end - first + 1
            chunks.append(
                IndexerPrefillChunk(
                    block_table=device["block_table"][first:end],
                    cu_seq_lens=device["cu_seq_lens"][cu_start:cu_end],
                    num_keys=int(split.cu_seq_lens[cu_end - 1]),
                    tokens_slice=tokens,
                    starts=device["starts"][tokens],
                    ends=device["ends"][tokens],
                    gathers=gathers,
                    choose_all=choose_all,
                )
            )
        return chunks


class Portion(NamedTuple):
    """A chunk of prefills: query tokens `start` to `stop` of the requests `first` to `end`, counted from the first
    token of the first request."""

    first: int
    end: int
    start: int
    stop: int


def split_indexer_chunks(
    query_lens: np.ndarray, key_lens: np.ndarray, workspace_rows: int, max_workspace_bytes: int
) -> list[Portion]:
    """Divide prefills into portions of consecutive requests, each as long as possible: its keys fit the workspace, and
    its logits the limit. If a single request exceeds the limit, its query tokens are divided, too, into parts of at
    least one.

    Args:
        query_lens: [P] query tokens of each request (host).
        key_lens: [P] keys of each request. The workspace has room for those of any single request.
        workspace_rows: keys that the workspace holds.
        max_workspace_bytes: limit for a portion's logits: float32, one for each of its queries and each of its keys.
    """
    portions = []
    first, requests = 0, len(query_lens)
    while first < requests:
        end, queries, keys = first + 1, int(query_lens[first]), int(key_lens[first])
        while end < requests:
            more, wider = queries + int(query_lens[end]), keys + int(key_lens[end])
            if wider > workspace_rows or more > queries_at_once(wider, max_workspace_bytes):
                break
            end, queries, keys = end + 1, more, wider
        step = queries_at_once(keys, max_workspace_bytes)
        portions += [Portion(first, end, q, min(q + step, queries)) for q in range(0, queries, step)]
        first = end
    return portions


def queries_at_once(keys: int, max_workspace_bytes: int) -> int:
    """The number of queries whose logits over so many keys fit the limit; at least 1."""
    row = max(-(-keys // LOGITS_ALIGN), 1) * LOGITS_ALIGN
    return max(max_workspace_bytes // (row * FLOAT32.itemsize), 1)


def key_workspace_rows(config: SparseMLAConfig) -> int:
    """Keys that the workspace of prefills holds: those of a few sequences of the greatest length."""
    return PREFILL_WORKSPACE_SEQUENCES * config.max_index_keys


def _keys_apart(config: SparseMLAConfig) -> bool:
    """Whether a key stands for several tokens, so that keys have other slots than tokens."""
    return config.has_compressed_rows or config.kpool > 1


def require_indexed(config: SparseMLAConfig) -> None:
    """Check that the layers of a config have an indexer.

    Raises:
        TypeError, ValueError: it is no config, or its layers have no indexer.
    """
    require_instance("config", config, SparseMLAConfig)
    if not config.has_topk:
        raise ValueError(
            f"config: layers with an indexer of a model of kind {config.model!r} have compress_ratio "
            f"{one_of(CHOSEN[config.model])}, got {config.compress_ratio}"
        )
    if key_workspace_rows(config) > LARGEST_INT:
        raise ValueError(
            f"config: int32 cannot count the keys of {PREFILL_WORKSPACE_SEQUENCES} sequences of max_model_len "
            f"{config.max_model_len}"
        )
