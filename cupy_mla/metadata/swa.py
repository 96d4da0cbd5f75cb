"""Metadata of DeepSeek V4's sliding-window cache, which every V4 layer has: built once a step, shared by all layers.

Every device array is a view of a buffer that is allocated once, at a fixed address, and sized by the config's maxima,
so that a captured CUDA graph can read it at every replay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..arrays import HOST
from ..bridges import Place
from ..checks.options import require_instance, require_integer, shown
from ..config import SparseMLAConfig
from ..dtypes import BOOL, INT32, INT64
from ..ops.swa import compute_prefill_gather_lens, compute_swa_indices_and_lens
from ..typing import AnyArray
from .batch import BatchMetadata, split_decodes_and_prefills
from .sparse_mla import FP8KernelMetadata, check_batch, fill, fill_table, known_on_device
from .uploads import Uploads

LAYER_KINDS = (1, 4, 128)  # compress ratios: sliding window alone, C4A, C128A


@dataclass(frozen=True)
class SparseSWAMetadata:
    """One step's batch of R requests and T query tokens: Td of decodes, which stand first, and Tp of P prefills.

    Attributes:
        block_table: [R, M] int32 blocks of the sliding-window cache, M fixed by the config.
        slot_mapping: [T] int64, where this step's tokens go.
        block_size: tokens a block.
        seq_lens: [R] int32.
        query_start_loc: [R + 1] int32.
        query_start_loc_cpu: the same on the host, NumPy.
        is_valid_token: [T] bool, False for tokens that pad the batch (slot negative).
        token_to_req_indices: [T] int32 request of each token.
        decode_swa_indices: [Td, 1, window] int32 slots of each decode token's window, -1 past its length.
        decode_swa_lens: [Td] int32.
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens: how the batch is split.
        prefill_seq_lens: [P] int32.
        prefill_gather_lens: [P] int32 tokens at the end of each prefill's sequence that its queries' windows reach.
        schedules: by compress ratio, the schedule of the decode launches of each kind of layer, shared by its layers.
    """

    block_table: AnyArray
    slot_mapping: AnyArray
    block_size: int
    seq_lens: AnyArray
    query_start_loc: AnyArray
    query_start_loc_cpu: np.ndarray
    is_valid_token: AnyArray
    token_to_req_indices: AnyArray
    decode_swa_indices: AnyArray
    decode_swa_lens: AnyArray
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    prefill_seq_lens: AnyArray
    prefill_gather_lens: AnyArray
    schedules: dict[int, FP8KernelMetadata]


class SparseSWAMetadataBuilder:
    """Builds `SparseSWAMetadata` from batches, into the same device arrays each time.

    A metadata object is valid until the next `build`, which rewrites the arrays behind it (on a GPU in order on the
    caller's current stream). `build` never waits for the device.

    Args:
        config: the engine's maxima, the window, and the block size of the sliding-window cache.
        place: where the device arrays live; see `SparseMLAMetadataBuilder`.
        compress_ratios: the kinds of layers that the model has.
        num_blocks: blocks of the cache, to check slots and block tables against; None leaves them
            unchecked.

    Attributes:
        config, num_blocks: as given.
        decode_threshold: most query tokens of a decode; decodes of a batch may differ in theirs.

    Raises:
        ValueError: the config is not one of V4 layers, or a compress ratio is none of 1, 4 and 128.
    """

    def __init__(
        self,
        config: SparseMLAConfig,
        place: tuple[str, int] = ("numpy", HOST),
        compress_ratios: Iterable[int] = LAYER_KINDS,
        num_blocks: int | None = None,
    ) -> None:
        require_instance("config", config, SparseMLAConfig)
        num_blocks = None if num_blocks is None else require_integer("num_blocks", num_blocks, 0)
        if not config.is_v4:
            raise ValueError(f"config: expected V4 layers, got a model of kind {config.model!r}")
        try:
            ratios = list(compress_ratios)
        except TypeError:
            got = shown(compress_ratios)
            raise TypeError(f"compress_ratios: expected some of {LAYER_KINDS}, as [4], got {got}") from None
        self._kinds = tuple(dict.fromkeys(require_integer("compress_ratios", ratio, 1) for ratio in ratios))
        if not self._kinds or not set(self._kinds) <= set(LAYER_KINDS):
            raise ValueError(f"compress_ratios must be among {LAYER_KINDS}, got {self._kinds}")
        self.config = config
        self.num_blocks = num_blocks
        self.decode_threshold: int = 1 + config.num_speculative_tokens
        requests, tokens = config.max_num_seqs, config.max_num_batched_tokens
        decode_tokens = min(tokens, requests * self.decode_threshold)
        width = -(-config.max_model_len // config.block_size)
        place = Place.from_pair(place)
        self._buffers = Uploads(
            place,
            {
                "query_start_loc": ((requests + 1,), INT32),
                "seq_lens": ((requests,), INT32),
                "slot_mapping": ((tokens,), INT64),
                "token_to_req": ((tokens,), INT32),
                "is_valid_token": ((tokens,), BOOL),
                "block_table": ((requests, width), INT32),  # last: only its used rows go up
            },
        )
        self._decode_indices = place.empty((decode_tokens, config.window), INT32)
        self._decode_lens = place.empty((decode_tokens,), INT32)
        self._gather_lens = place.empty((requests,), INT32)
        for array in (self._decode_indices, self._decode_lens, self._gather_lens):
            array[...] = 0

    def build(self, batch: BatchMetadata, *, seq_lens: AnyArray | None = None) -> SparseSWAMetadata:
        """The metadata of one step.

        Args:
            batch: with the block table and the slots of the sliding-window cache; blocks that no window of the batch
                reaches any more are not read. Where the device alone knows how long sequences are, with upper bounds
                for `seq_lens`.
            seq_lens: [R] int32 where the device arrays live, the lengths instead of the batch's; see
                `SparseMLAMetadataBuilder.build`.

        Raises:
            ValueError: the batch exceeds a maximum of the config, its block table is too narrow for a sequence, or a
                slot or a block of a sequence lies beyond the cache (with `num_blocks` given); the arrays stay as they
                were.
        """
        config = self.config
        check_batch(config, batch, self.num_blocks, config.window)
        known = known_on_device(self._buffers.place, batch, seq_lens=seq_lens)
        counts = split_decodes_and_prefills(batch, self.decode_threshold)
        num_decodes, num_prefills, decode_tokens, _ = counts
        if decode_tokens > len(self._decode_lens):
            raise ValueError(f"batch: expected at most {len(self._decode_lens)} decode tokens, got {decode_tokens}")
        self._buffers.upload(lambda host: self._write(host, batch))
        self._buffers.put(known)

        device, requests, tokens = self._buffers.arrays, batch.num_reqs, batch.num_actual_tokens
        starts, lengths = device["query_start_loc"][: requests + 1], device["seq_lens"][:requests]
        table = device["block_table"][:requests]
        token_to_req, is_valid = device["token_to_req"][:tokens], device["is_valid_token"][:tokens]
        self._decode_lens[decode_tokens:] = 0
        indices, lens = compute_swa_indices_and_lens(
            starts, lengths, token_to_req[:decode_tokens], is_valid[:decode_tokens], table, config.block_size,
            config.window, out=self._decode_indices[:decode_tokens], lens=self._decode_lens[:decode_tokens],
        )  # fmt: skip
        gather_lens = compute_prefill_gather_lens(
            lengths, starts, num_decodes, config.window, out=self._gather_lens[:num_prefills]
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
            decode_swa_indices=indices[:, None],
            decode_swa_lens=lens,
            num_decodes=num_decodes,
            num_prefills=num_prefills,
            num_decode_tokens=decode_tokens,
            num_prefill_tokens=counts[3],
            prefill_seq_lens=lengths[num_decodes:],
            prefill_gather_lens=gather_lens,
            schedules={ratio: FP8KernelMetadata() for ratio in self._kinds},
        )

    def _write(self, host: dict[str, np.ndarray], batch: BatchMetadata) -> int:
        """Fill the host's copies; entries past the batch with values that are safe for a captured graph to read."""
        requests, tokens = batch.num_reqs, batch.num_actual_tokens
        fill(host["query_start_loc"], batch.query_start_loc, tokens)
        fill(host["seq_lens"], batch.seq_lens, 0)
        fill(host["slot_mapping"], batch.slot_mapping, -1)
        fill(host["token_to_req"], np.repeat(np.arange(requests, dtype=INT32), batch.query_lens), 0)
        fill(host["is_valid_token"], batch.slot_mapping >= 0, 0)
        return fill_table(host["block_table"], batch)
