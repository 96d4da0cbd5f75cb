"""The lightning indexer as a backend: it chooses the rows over which each query token of a step attends."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arrays import Array
from ..bridges import Place, bind, describe, require_array
from ..checks.options import require_bool, require_choice, require_instance
from ..checks.validate import MULTIPLIED
from ..config import SparseMLAConfig
from ..dtypes import E5M2, FLOAT32, INT32, UINT8
from ..layouts import INDEXER_MXFP4
from ..metadata.batch import reshape_query_for_spec_decode
from ..metadata.indexer import (
    IndexerDecodeMetadata,
    IndexerMetadata,
    IndexerPrefillChunk,
    key_workspace_rows,
    queries_at_once,
    require_indexed,
)
from ..ops.cache import SCALE_FORMATS
from ..ops.candidates import BLOCK, select_candidate_rows
from ..ops.indexer import cp_gather_indexer_k_quant_cache, indexer_k_quant_and_cache, indexer_layout
from ..ops.logits import HEADS, D
from ..ops.pools import expand_pools_and_append_tail
from ..ops.topk import MAX_K, select_rows, select_rows_paged
from ..typing import A, AnyArray, ScaleFormat
from .steps import Step
from .workspace import Workspace


class IndexerImpl:
    """The indexer of DeepSeek-V3.2 layers, of V4's C4A layers, of V4.1's C1A and C2A layers, and of layers whose keys
    stand for pools of tokens. It keeps no state of its own: all layers may share one.

    Args:
        config: the layers and the engine's maxima.
        workspace: scratch memory that layers share. A warm-up call reserves what the largest batch needs.
        scale_format: of the keys, as for `indexer_k_quant_and_cache`.

    Raises:
        ValueError: layers of the config have no indexer, or choose more rows than `topk_indices` can.

    Example:
        >>> config = cupy_mla.SparseMLAConfig(16, topk=2, block_size=4, max_num_batched_tokens=8, max_model_len=8)
        >>> cache = np.zeros((3, 4, 132), np.uint8)  # 3 blocks of 4 tokens in layout INDEXER_FP8
        >>> place = cupy_mla.Place.of(cache)
        >>> builder = cupy_mla.IndexerMetadataBuilder(config, place)
        >>> impl = cupy_mla.IndexerImpl(config, cupy_mla.Workspace(place))
        >>> batch = cupy_mla.BatchMetadata([0, 3], [3], [[1, 2]], [4, 5, 6], [0, 1, 2])  # a prompt of 3 tokens
        >>> keys = np.repeat(np.array([[1], [-1], [2]], bfloat16), 128, axis=1)
        >>> q8, w = np.ones((3, 8, 128), float8_e4m3fn), np.ones((3, 8), np.float32)
        >>> chosen = np.zeros((8, 2), np.int32)
        >>> impl.forward(keys, q8, w, cache, builder.build(batch), chosen).tolist()
        [[0, -1], [0, 1], [0, 2]]
    """

    def __init__(self, config: SparseMLAConfig, workspace: Workspace, scale_format: ScaleFormat = "fp32") -> None:
        require_indexed(config)
        require_instance("workspace", workspace, Workspace)
        require_choice("scale_format", scale_format, SCALE_FORMATS)
        if config.index_topk > MAX_K:
            raise ValueError(f"config: the indexer chooses at most {MAX_K} rows, topk is {config.topk}")
        self.config = config
        self.workspace = workspace
        self._checked: IndexerMetadata | None = None  # the last one: all layers get the same in a step
        self.scale_format: ScaleFormat = scale_format
        numbers = workspace.place.empty((MAX_K,), INT32)
        numbers[...] = 1
        numbers[...] = numbers.cumsum(0)
        self._numbers: Any = numbers  # 1, 2, ... MAX_K on the device

    def forward(
        self,
        k: AnyArray | None,
        q8: AnyArray,
        w: AnyArray,
        kv_cache: AnyArray,
        metadata: IndexerMetadata | None,
        topk_indices_buffer: A,
        *,
        valid_counts: AnyArray | None = None,
        candidate_block_buffer: AnyArray | None = None,
        among_candidates: bool = False,
    ) -> A:
        """Pack a step's keys into the cache, and choose rows for each of its query tokens.

        Decodes get logits over the paged cache, for all query tokens of a request at once. Prefills get them chunk by
        chunk, over keys that are gathered into the workspace. No logits are made where no query token sees more keys
        than it chooses: for prefills, and for decodes outside of a captured CUDA graph, that holds for a step; for
        decodes in a captured graph it must hold for every sequence up to max_model_len.

        Args:
            k: [T, (1,) 128] bfloat16 keys, rotated. With compression, or pools of tokens (from `kpool_compress`), row t
                is the key that token t completes; rows of tokens that complete none are not read. None: the cache holds
                the step's keys already.
            q8: [T, H, 128] uint8 or float8_e4m3fn, float8_e5m2 if rounded to MXFP4, H a multiple of 8 up to 64, from
                `quantize_indexer_q`.
            w: [T, H] float32 weights of the heads, from `quantize_indexer_q`.
            kv_cache: [num_blocks, rows, (1,) 132] uint8 or float8_e4m3fn in layout INDEXER_FP8, or [..., 68] in layout
                INDEXER_MXFP4, as many rows a block as the config's block size has keys; written in place.
            metadata: of this step, from `IndexerMetadataBuilder` with these layers' config; T is its number of tokens.
                None for a warm-up, which reserves the workspace of the largest batch with as many heads as q8 has, and
                chooses nothing.
            topk_indices_buffer: [at least T, topk] int32. Row t is given token t's positions in its request, ascending,
                -1 behind the last: token positions, with compression those of compressed rows. Rows from T on are left
                as they are. With the config's kpool [at least T, topk + kpool - 1]: the tokens of chosen pools, and
                behind them those that make no whole pool.
            valid_counts: [T] int32, how many positions each row is given; written in place, with kpool alone.
            candidate_block_buffer: [at least T, C] int32, C up to 4096 and 8 * C at least topk. Row t is given the
                candidate blocks of token t (`candidate_blocks`). Layers of one step pass the same, those with
                `among_candidates` after the one that chooses. Keys of pools have none.
            among_candidates: choose among the keys of the blocks that an earlier layer of the step left in
                `candidate_block_buffer`. No other keys are read, and none are gathered.

        Returns:
            topk_indices_buffer[:T], which `SparseMLAImpl.forward_mqa` and `DeepseekV4Layer` take; of a warm-up T is the
            number of q8's tokens.

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape, device or strides.
        """
        place, (q, cache, chosen) = bind(q8=q8, kv_cache=kv_cache, topk_indices_buffer=topk_indices_buffer)
        if place != self.workspace.place:
            raise ValueError(f"q8: expected it where the workspace is, {self.workspace.place}, got {place}")
        tokens, heads, _ = q.require(MULTIPLIED, "T", HEADS, D).shape
        chosen.require(INT32, "tokens", self.config.topk_width).require_writable()
        candidates = self._candidates(place, candidate_block_buffer, among_candidates)
        if metadata is None:
            self._reserve(place, heads, 0 if candidates is None else candidates.shape[1])
            chosen.obj[...] = -1
            return chosen.obj[:tokens]
        indexer_layout(cache)
        if cache.shape[1] != self.config.keys_per_block:
            raise ValueError(
                f"kv_cache: expected {self.config.keys_per_block} rows a block (config), got {cache.shape[1]}"
            )
        place.admit(describe("w", w)).require(FLOAT32, tokens, heads)
        self._check(metadata, tokens, chosen.shape[0])
        if valid_counts is not None and metadata.token_context_lens is None:
            raise ValueError("valid_counts: expected None for layers without pools of tokens (config's kpool)")
        if k is not None:
            require_array("k", k)
            if k.shape[:1] != (tokens,):
                raise ValueError(f"k: expected the {tokens} tokens of metadata, got shape {list(k.shape)}")
            indexer_k_quant_and_cache(k, kv_cache, metadata.slot_mapping, self.scale_format)
        if candidates is not None and candidates.shape[0] < tokens:
            raise ValueError(
                f"candidate_block_buffer: expected room for {tokens} tokens, got {candidates.shape[0]} rows"
            )
        queries = _Queries(q.obj, w, kv_cache)
        into = _Chosen(chosen.obj[:tokens], None if candidates is None else candidates.obj)
        if among_candidates:
            self._select_among(metadata, queries, into)
        else:
            self._select(metadata, queries, into, valid_counts)
        return into.rows

    def _select(self, metadata: IndexerMetadata, queries: _Queries, chosen: _Chosen, valid_counts: Any) -> None:
        """Choose among all keys that the query tokens see."""
        decode, chunks, tokens = metadata.decode, metadata.prefill_chunks, len(chosen.rows)
        places = 0 if decode is None else _places(decode)
        rows = max((chunk.num_keys for chunk in chunks if not chunk.choose_all), default=0)
        num_blocks = 0 if chosen.blocks is None else chosen.blocks.shape[1]
        mxfp4 = queries.kv_cache.shape[-1] == INDEXER_MXFP4.last_axis
        keys, scales, pools, counts, *padded = self._scratch(rows, places, tokens, num_blocks, mxfp4)
        into = chosen if metadata.token_context_lens is None else _Chosen(pools)
        if decode is not None:
            end = slice(metadata.num_decode_tokens)
            short = decode.short and not self._is_capturing
            self._decode(decode, queries.part(end), into.part(end), padded, short)
        for chunk in chunks:
            part = chunk.tokens_slice
            self._prefill(chunk, queries.part(part), into.part(part), keys, scales)
        if metadata.num_prefills:  # behind them tokens may pad the batch, which choose nothing
            last = chunks[-1].tokens_slice.stop if chunks else 0
            padding = into.part(slice(max(last, metadata.num_decode_tokens), tokens))
            padding.rows[...] = -1
            if padding.blocks is not None:
                padding.blocks[...] = -1
        if metadata.token_context_lens is not None:
            expand_pools_and_append_tail(
                pools, metadata.token_context_lens, self.config.kpool, out=chosen.rows,
                lens=counts if valid_counts is None else valid_counts,
            )  # fmt: skip

    @property
    def _is_capturing(self) -> bool:
        place = self.workspace.place
        return place.on_gpu and place.is_capturing()

    def _candidates(self, place: Place, buffer: AnyArray | None, among_candidates: bool) -> Array | None:
        """Check the buffer of candidate blocks; its description, or None."""
        require_bool("among_candidates", among_candidates)
        if buffer is None:
            if among_candidates:
                raise ValueError("candidate_block_buffer: expected the one of the layer that chooses blocks, got None")
            return None
        if self.config.kpool > 1:
            raise ValueError("candidate_block_buffer: keys of pools (config's kpool) have no candidate blocks")
        candidates = place.admit(describe("candidate_block_buffer", buffer)).require(INT32, "tokens", "C")
        count = candidates.require_writable().shape[1]
        if not self.config.topk <= BLOCK * count <= BLOCK * MAX_K:
            raise ValueError(
                f"candidate_block_buffer: expected at most {MAX_K} blocks of {BLOCK} keys a token, and topk "
                f"{self.config.topk} keys at least, got {count} blocks"
            )
        return candidates

    def _select_among(self, metadata: IndexerMetadata, queries: _Queries, chosen: _Chosen) -> None:
        """Choose among the keys of candidate blocks."""
        if self.config.max_index_keys <= self.config.topk or (metadata.short and not self._is_capturing):
            self._choose_all(metadata.seen, _Chosen(chosen.rows))
            return
        select_candidate_rows(
            queries.q8, queries.kv_cache, queries.w, chosen.blocks[: len(chosen.rows)], metadata.seen, metadata.req_id,
            metadata.block_table, self.config.topk, max_workspace_bytes=self.config.max_workspace_bytes,
            out=chosen.rows,
        )  # fmt: skip

    def _decode(
        self, decode: IndexerDecodeMetadata, queries: _Queries, chosen: _Chosen, padded: list[Any], short: bool
    ) -> None:
        """Choose for the decode tokens. `padded`: room for the results of padded requests; `short`: no one sees more
        than topk keys."""
        if decode.choose_all or (short and decode.requires_padding):
            lens: Any = decode.context_lens
            lens = lens.reshape(-1)
            self._choose_all(lens[decode.token_rows] if decode.requires_padding else lens, chosen)
            return
        requests, topk = decode.block_table.shape[0], self.config.index_topk
        q8, w, to = queries.q8, queries.w, chosen
        if decode.requires_padding:
            rows, blocks = padded
            q8, w = self._padded(q8, decode.padded_rows), w[decode.padded_rows]
            to = _Chosen(rows, None if chosen.blocks is None else blocks)
        select_rows_paged(
            reshape_query_for_spec_decode(q8, requests), queries.kv_cache, w, decode.context_lens, decode.block_table,
            topk if short else decode.max_context_len, topk, max_workspace_bytes=self.config.max_workspace_bytes,
            schedule=decode.schedule, out=to.rows, blocks=to.blocks,
        )  # fmt: skip
        if decode.requires_padding:
            chosen.rows[...] = to.rows[decode.token_rows]
            if chosen.blocks is not None:
                chosen.blocks[...] = to.blocks[decode.token_rows]

    def _prefill(self, chunk: IndexerPrefillChunk, queries: _Queries, chosen: _Chosen, keys: Any, scales: Any) -> None:
        """Choose for the tokens of a chunk of prefills. `keys` and `scales`: room for those that are gathered."""
        if chunk.choose_all:
            ends: Any = chunk.ends
            self._choose_all(ends - chunk.starts, chosen)
            return
        keys, scales = keys[: chunk.num_keys], scales[: chunk.num_keys]
        if chunk.gathers:
            cp_gather_indexer_k_quant_cache(queries.kv_cache, keys, scales, chunk.block_table, chunk.cu_seq_lens)
        select_rows(
            queries.q8, keys, scales, queries.w, chunk.starts, chunk.ends, self.config.index_topk,
            max_workspace_bytes=self.config.max_workspace_bytes, out=chosen.rows, blocks=chosen.blocks,
        )  # fmt: skip

    def _choose_all(self, seen: Any, chosen: _Chosen) -> None:
        """Choose all keys, and all their blocks, for tokens that see `seen` [n] keys each: at most topk."""
        for to, count in ((chosen.rows, seen), (chosen.blocks, (seen + (BLOCK - 1)) // BLOCK)):
            if to is not None:
                numbers = self._numbers[: to.shape[1]]
                to[...] = numbers * (numbers <= count[:, None]) - 1  # 0 ... count - 1, then -1

    def _padded(self, q8: Any, rows: Any) -> Any:
        """Rows of q8, taken as bytes: CuPy keeps float8_e5m2, but has no kernels for it."""
        return q8.view(self.workspace.place.library.native_dtype(UINT8))[rows].view(q8.dtype)

    def _scratch(self, rows: int, places: int, tokens: int, blocks: int = 0, mxfp4: bool = False) -> list[Any]:
        """Scratch memory: gathered keys, their scales, chosen pools, their counts; rows and blocks of padded decodes.

        Args:
            rows: gathered keys.
            places: query tokens of decodes that are padded to one length.
            tokens: of the step.
            blocks: candidate blocks of a token.
            mxfp4: keys are gathered out of a cache of MXFP4.
        """
        topk, pooled = self.config.index_topk, tokens if self.config.kpool > 1 else 0
        return self.workspace.get_simultaneous(
            ((rows, D), E5M2 if mxfp4 else UINT8), ((rows,), FLOAT32), ((pooled, topk), INT32), ((pooled,), INT32),
            ((places, topk), INT32), ((places, blocks), INT32),
        )  # fmt: skip

    def _reserve(self, place: Place, heads: int, blocks: int) -> None:
        """Allocate what the largest batch needs: the workspace, and once what operations allocate, so that the
        library's pool has it."""
        config = self.config
        threshold = 1 + config.num_speculative_tokens
        places = config.max_num_seqs * threshold if threshold > 1 else 0
        rows = key_workspace_rows(config)
        self._scratch(rows, places, config.max_num_batched_tokens, blocks)
        queries = min(config.max_num_batched_tokens, queries_at_once(rows, config.max_workspace_bytes))
        logits = place.empty((queries, max(rows, 1)), FLOAT32)
        padded = place.empty((places, heads, D + 4), UINT8)
        scores = place.empty((queries, rows // BLOCK + 1), FLOAT32) if blocks else None
        del logits, padded, scores

    def _check(self, metadata: IndexerMetadata, tokens: int, rows: int) -> None:
        """Check that the arguments fit the config and the batch. Operations check the rest."""
        if metadata is not self._checked:
            require_instance("metadata", metadata, IndexerMetadata)
            requests = metadata.num_decodes + metadata.num_prefills
            step = Step("metadata", requests, metadata.num_actual_tokens, 0, metadata.slot_mapping)
            step.require(
                self.config, self.workspace.place, block_size=metadata.block_size, topk=metadata.topk_tokens,
                compress_ratio=metadata.compress_ratio, kpool=metadata.kpool,
            )  # fmt: skip
            self._checked = metadata
        if tokens != metadata.num_actual_tokens:
            raise ValueError(f"q8: expected the {metadata.num_actual_tokens} tokens of metadata, got {tokens}")
        if rows < tokens:
            raise ValueError(f"topk_indices_buffer: expected room for {tokens} tokens, got {rows} rows")


class _Queries(NamedTuple):
    """Some query tokens of a step: q8 [n, H, 128] and w [n, H], and the cache of their keys."""

    q8: Any
    w: Any
    kv_cache: Any

    def part(self, tokens: slice) -> _Queries:
        return _Queries(self.q8[tokens], self.w[tokens], self.kv_cache)


class _Chosen(NamedTuple):
    """Where the choice of query tokens is written: rows [n, topk]; candidate blocks [n, C], or None."""

    rows: Any
    blocks: Any = None

    def part(self, tokens: slice) -> _Chosen:
        return _Chosen(self.rows[tokens], None if self.blocks is None else self.blocks[tokens])


def _places(decode: IndexerDecodeMetadata) -> int:
    """Query tokens of decodes that are padded to one length; 0 where none are padded."""
    return decode.block_table.shape[0] * decode.query_len if decode.requires_padding else 0
