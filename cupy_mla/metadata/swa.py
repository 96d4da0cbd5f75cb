"""Metadata of the sliding-window cache, which every layer of DeepSeek V4 and V4.1 has. It is built once a step for all
layers.

Every device array is a view of a buffer that is allocated once, at a fixed address, and sized by the config's maxima.
So a captured CUDA graph can read it at every replay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import HOST
from ..bridges import Place
from ..checks.options import require_bool, require_instance, require_integer, shown
from ..config import RATIOS, SparseMLAConfig
from ..dtypes import BOOL, INT32, INT64
from ..ops.swa import compute_prefill_gather_lens, compute_swa_indices_and_lens, window_width
from ..typing import AnyArray
from .batch import BatchMetadata, require_blocks, split_decodes_and_prefills
from .sparse_mla import FP8KernelMetadata, check_batch, fill, fill_table, known_on_device
from .uploads import Uploads


@dataclass(frozen=True)
class SparseSWAMetadata:
    """One step's batch of R requests and T query tokens: first Td tokens of decodes, then Tp tokens of P prefills.

    Attributes:
        block_table: [R, M] int32 blocks of the sliding-window cache, M fixed by the config.
        slot_mapping: [T] int64 slot of each token's row.
        block_size: tokens a block.
        seq_lens: [R] int32.
        query_start_loc: [R + 1] int32.
        query_start_loc_cpu: the same on the host, NumPy.
        is_valid_token: [T] bool, False for tokens whose slot is negative: they pad the batch.
        token_to_req_indices: [T] int32 request of each token.
        replay_start: [R] int32 first position of each sequence of which the cache has a row; 0: it has all.
        left_visible, right_visible: [T] int32 positions of its image before each token and behind it; None if the
            config's max_image_tokens is 0.
        decode_swa_indices: [Td, 1, window + max_image_tokens] int32 slots of each decode token's window, -1 behind its
            length.
        decode_swa_lens: [Td] int32.
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens: how the batch is split.
        prefill_seq_lens: [P] int32.
        prefill_gather_lens: [P] int32 tokens at the end of each prefill's sequence that the windows of its query tokens
            reach.
        prefill_seq_lens_cpu, prefill_gather_lens_cpu: the same on the host, NumPy; upper bounds if only the device
            knows the lengths of sequences.
        schedules: by compress ratio: the schedule that decodes of all layers of a kind share.
        config: the builder's.
    """

    block_table: AnyArray
    slot_mapping: AnyArray
    block_size: int
    seq_lens: AnyArray
    query_start_loc: AnyArray
    query_start_loc_cpu: np.ndarray
    is_valid_token: AnyArray
    token_to_req_indices: AnyArray
    replay_start: AnyArray
    left_visible: AnyArray | None
    right_visible: AnyArray | None
    decode_swa_indices: AnyArray
    decode_swa_lens: AnyArray
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    prefill_seq_lens: AnyArray
    prefill_gather_lens: AnyArray
    prefill_seq_lens_cpu: np.ndarray
    prefill_gather_lens_cpu: np.ndarray
    schedules: dict[int, FP8KernelMetadata]
    config: SparseMLAConfig

    def get_prefill_chunk_plan(
        self, compress_ratio: int, prefill_chunk_size: int, has_compressed: bool | None = None
    ) -> list[tuple[int, int, int, int]]:
        """Divide the prefills into chunks of consecutive requests, whose rows are gathered at a time.

        A chunk's workspace is [end - start, M, d_qk]: each request has N rows for its compressed rows, and behind them
        those for the tokens that its windows reach. A chunk has as many requests as fit the workspace of
        `prefill_chunk_size` requests of the greatest length that the config allows. So chunks of short sequences have
        more requests.

        Args:
            compress_ratio: of the layers.
            prefill_chunk_size: requests of the greatest lengths that the workspace holds.
            has_compressed: whether the layers gather compressed rows; None: as layers of that ratio in the config's
                model do.

        Returns:
            (start, end, N, M) of each chunk, in order; requests counted from the first prefill.

        Raises:
            TypeError, ValueError: an argument has the wrong type, models of this kind have no layers of this ratio, or
                layers of ratio 0 are to gather compressed rows.
        """
        model = self.config.model
        prefill_chunk_size = require_integer("prefill_chunk_size", prefill_chunk_size, 1)
        compress_ratio = require_integer("compress_ratio", compress_ratio, 0)
        if compress_ratio not in RATIOS[model]:
            raise ValueError(f"compress_ratio must be among {RATIOS[model]}, got {compress_ratio}")
        if has_compressed is None:
            has_compressed = compress_ratio > RATIOS[model][0]
        if require_bool("has_compressed", has_compressed) and compress_ratio == 0:
            raise ValueError("has_compressed: layers of compress_ratio 0 have no compressed rows, got True")
        compressed = self.prefill_seq_lens_cpu // compress_ratio if has_compressed else 0 * self.prefill_seq_lens_cpu
        most = -(-self.config.max_model_len // compress_ratio) if has_compressed else 0
        most += self.config.window + self.config.max_num_batched_tokens
        chunks: list[tuple[int, int, int, int]] = []
        start = rows = tail = 0
        for end, (n, gathered) in enumerate(
            zip(compressed.tolist(), self.prefill_gather_lens_cpu.tolist(), strict=True), start=1
        ):
            wider = max(rows, n), max(tail, gathered)
            if end - 1 > start and (end - start) * sum(wider) > prefill_chunk_size * most:
                chunks.append((start, end - 1, rows, rows + tail))
                start, wider = end - 1, (n, gathered)
            rows, tail = wider
        if self.num_prefills:
            chunks.append((start, self.num_prefills, rows, rows + tail))
        return chunks


class SparseSWAMetadataBuilder:
    """Builds `SparseSWAMetadata` from batches, into the same device arrays each time.

    A metadata object is valid until the next `build`, which rewrites the arrays behind it (on a GPU in order on the
    caller's current stream). `build` never waits for the device.

    Args:
        config: the engine's maxima, the window, and the block size of the sliding-window cache.
        place: where the device arrays live; see `SparseMLAMetadataBuilder`.
        compress_ratios: the kinds of layers that the model has; None: all that models of its kind may have.
        num_blocks: blocks of the cache, against which slots and block tables are checked; None: they are not checked.

    Attributes:
        config, num_blocks: as given.
        decode_threshold: a decode has at most so many query tokens. Decodes of a batch may have different numbers.

    Raises:
        ValueError: the config is not one of V4 or V4.1 layers, or a compress ratio is none of that model: 1, 4 and 128,
            or 0, 1 and 2.
    """

    def __init__(
        self,
        config: SparseMLAConfig,
        place: tuple[str, int] = ("numpy", HOST),
        compress_ratios: Iterable[int] | None = None,
        num_blocks: int | None = None,
    ) -> None:
        require_instance("config", config, SparseMLAConfig)
        num_blocks = None if num_blocks is None else require_integer("num_blocks", num_blocks, 0)
        if not config.is_v4:
            raise ValueError(f"config: expected V4 layers, got a model of kind {config.model!r}")
        kinds = RATIOS[config.model]
        try:
            ratios = list(kinds if compress_ratios is None else compress_ratios)
        except TypeError:
            got = shown(compress_ratios)
            raise TypeError(f"compress_ratios: expected some of {kinds}, as [{kinds[1]}], got {got}") from None
        self._kinds = tuple(dict.fromkeys(require_integer("compress_ratios", ratio, 0) for ratio in ratios))
        if not self._kinds or not set(self._kinds) <= set(kinds):
            raise ValueError(f"compress_ratios must be among {kinds}, got {self._kinds}")
        self.config = config
        self.num_blocks = num_blocks
        self.decode_threshold: int = 1 + config.num_speculative_tokens
        requests, tokens = config.max_num_seqs, config.max_num_batched_tokens
        decode_tokens = min(tokens, requests * self.decode_threshold)
        width = -(-config.max_model_len // config.block_size)
        image_tokens = tokens if config.max_image_tokens else 0
        place = Place.from_pair(place)
        self._buffers = Uploads(
            place,
            {
                "query_start_loc": ((requests + 1,), INT32),
                "seq_lens": ((requests,), INT32),
                "slot_mapping": ((tokens,), INT64),
                "token_to_req": ((tokens,), INT32),
                "is_valid_token": ((tokens,), BOOL),
                "replay_start": ((requests,), INT32),
                "left_visible": ((image_tokens,), INT32),
                "right_visible": ((image_tokens,), INT32),
                "block_table": ((requests, width), INT32),  # last: only its used rows go up
            },
        )
        self._decode_indices = place.empty((decode_tokens, window_width(config.window, config.max_image_tokens)), INT32)
        self._decode_lens = place.empty((decode_tokens,), INT32)
        self._gather_lens = place.empty((requests,), INT32)
        for array in (self._decode_indices, self._decode_lens, self._gather_lens):
            array[...] = 0

    def build(self, batch: BatchMetadata, *, seq_lens: AnyArray | None = None) -> SparseSWAMetadata:
        """The metadata of one step.

        Args:
            batch: with the block table and the slots of the sliding-window cache. Blocks that no window of the batch
                reaches any more are not read. If only the device knows the lengths of sequences, `seq_lens` are upper
                bounds.
            seq_lens: [R] int32 lengths of the sequences where the device arrays live; see
                `SparseMLAMetadataBuilder.build`.

        Raises:
            ValueError: the batch exceeds a maximum of the config (an image `max_image_tokens`, too), its block table is
                too narrow for a sequence, or a slot or a block of a sequence lies beyond the cache (with `num_blocks`
                given). The arrays stay as they were.
        """
        config = self.config
        check_batch(config, batch, self.num_blocks, config.window)
        known = known_on_device(self._buffers.place, batch, seq_lens=seq_lens)
        counts = split_decodes_and_prefills(batch, self.decode_threshold)
        num_decodes, num_prefills, decode_tokens, _ = counts
        if decode_tokens > len(self._decode_lens):
            raise ValueError(f"batch: expected at most {len(self._decode_lens)} decode tokens, got {decode_tokens}")
        self._check_images(batch, num_decodes)
        self._buffers.upload(lambda host: self._write(host, batch))
        self._buffers.put(known)

        device, requests, tokens = self._buffers.arrays, batch.num_reqs, batch.num_actual_tokens
        starts, lengths = device["query_start_loc"][: requests + 1], device["seq_lens"][:requests]
        table = device["block_table"][:requests]
        token_to_req, is_valid = device["token_to_req"][:tokens], device["is_valid_token"][:tokens]
        replay_start, left, right = device["replay_start"][:requests], None, None
        images: dict[str, Any] = {}
        if config.max_image_tokens:
            left, right = device["left_visible"][:tokens], device["right_visible"][:tokens]
            images = {"left_visible": left[:decode_tokens], "right_visible": right[:decode_tokens]}
        self._decode_lens[decode_tokens:] = 0
        indices, lens = compute_swa_indices_and_lens(
            starts, lengths, token_to_req[:decode_tokens], is_valid[:decode_tokens], table, config.block_size,
            config.window, replay_start=replay_start, **images, max_image_tokens=config.max_image_tokens,
            out=self._decode_indices[:decode_tokens], lens=self._decode_lens[:decode_tokens],
        )  # fmt: skip
        gather_lens = compute_prefill_gather_lens(
            lengths, starts, num_decodes, config.window, replay_start=replay_start,
            out=self._gather_lens[:num_prefills],
        )  # fmt: skip
        gather_lens_cpu = compute_prefill_gather_lens(
            batch.seq_lens, batch.query_start_loc, num_decodes, config.window, replay_start=batch.replay_start
        )
        return SparseSWAMetadata(
            block_table=table,
            slot_mapping=device["slot_mapping"][:tokens],
            block_size=config.block_size,
            seq_lens=lengths,
            query_start_loc=starts,
            query_start_loc_cpu=batch.query_start_loc,
            is_valid_token=is_valid,
            token_to_req_indices=token_to_req,
            replay_start=replay_start,
            left_visible=left,
            right_visible=right,
            decode_swa_indices=indices[:, None],
            decode_swa_lens=lens,
            num_decodes=num_decodes,
            num_prefills=num_prefills,
            num_decode_tokens=decode_tokens,
            num_prefill_tokens=counts[3],
            prefill_seq_lens=lengths[num_decodes:],
            prefill_gather_lens=gather_lens,
            prefill_seq_lens_cpu=batch.seq_lens[num_decodes:],
            prefill_gather_lens_cpu=gather_lens_cpu,
            schedules={ratio: FP8KernelMetadata() for ratio in self._kinds},
            config=config,
        )

    def _check_images(self, batch: BatchMetadata, num_decodes: int) -> None:
        """Check that no image is larger than the lists allow, and that the cache has the blocks in which those of
        decodes begin. Prefills see no rows before their gathered ones."""
        if batch.left_visible is None or batch.right_visible is None:
            return
        most, window = self.config.max_image_tokens, self.config.window
        if most == 0:
            raise ValueError("batch: has tokens of images, the config's max_image_tokens is 0")
        left = batch.left_visible.astype(np.int64)
        tokens = left + batch.right_visible + 1
        if tokens.max(initial=0) > most:
            t = int(tokens.argmax())
            raise ValueError(
                f"batch: token {t} is of an image of {tokens[t]} tokens, the config's max_image_tokens is {most}"
            )
        if self.num_blocks is None:
            return
        first = batch.seq_lens[:num_decodes].astype(np.int64)
        of_decodes = slice(batch.query_start_loc[num_decodes])
        reached = batch.token_positions[of_decodes] - np.maximum(left, window - 1)[of_decodes]
        np.minimum.at(first, batch.token_requests[of_decodes], reached)
        first = np.maximum(batch.from_replay_start(first), 0)
        require_blocks(batch, first, self.config.block_size, self.num_blocks)

    def _write(self, host: dict[str, np.ndarray], batch: BatchMetadata) -> int:
        """Fill the host's copies. Entries behind the batch get values that a captured graph can read safely."""
        fill(host["query_start_loc"], batch.query_start_loc, batch.num_actual_tokens)
        fill(host["seq_lens"], batch.seq_lens, 0)
        fill(host["slot_mapping"], batch.slot_mapping, -1)
        fill(host["token_to_req"], batch.token_requests, 0)
        fill(host["is_valid_token"], batch.slot_mapping >= 0, 0)
        fill(host["replay_start"], () if batch.replay_start is None else batch.replay_start, 0)
        if self.config.max_image_tokens:
            fill(host["left_visible"], () if batch.left_visible is None else batch.left_visible, 0)
            fill(host["right_visible"], () if batch.right_visible is None else batch.right_visible, 0)
        return fill_table(host["block_table"], batch)
