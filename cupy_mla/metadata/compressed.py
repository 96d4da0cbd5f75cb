"""Fields of a step's metadata for layers with compressed rows, of DeepSeek V4 (C4A, C128A) and V4.1 (C1A, C2A). Their
buffers stand at fixed addresses."""

from __future__ import annotations

from typing import Any

from ..arrays import aligned_up
from ..bridges import Place
from ..config import C128A, SparseMLAConfig
from ..dtypes import INT32, INT64
from ..ops.compressed import build_c128a_topk_metadata, get_compressed_slot_mapping
from .batch import BatchMetadata, split_decodes_and_prefills

WIDTH_ALIGN = 128  # entries: the width of C128A's lists is a multiple


def c128a_width(config: SparseMLAConfig) -> int:
    """Width of C128A's index lists: the rows of the longest sequence, rounded up to a multiple of 128."""
    return aligned_up(config.max_compressed_rows, WIDTH_ALIGN)


def compressed_list_width(config: SparseMLAConfig) -> int:
    """Width of the lists of compressed rows that V4 and V4.1 layers have beside their windows; 0: they have none."""
    if not config.has_compressed_rows:
        return 0
    return config.topk if config.has_topk else c128a_width(config)


class CompressedRows:
    """Computes the fields of metadata about compressed rows on the device, in order on the caller's current stream.

    Args:
        config: of layers that have compressed rows.
        place: where the arrays live.
    """

    def __init__(self, config: SparseMLAConfig, place: Place) -> None:
        self.config = config
        tokens, threshold = config.max_num_batched_tokens, 1 + config.num_speculative_tokens
        self._slots = _filled(place, (tokens,), INT64, -1)
        if config.compress_ratio == C128A:
            width, decode_tokens = c128a_width(config), min(tokens, config.max_num_seqs * threshold)
            self._decode = _filled(place, (decode_tokens, width), INT32, -1)
            self._lens = _filled(place, (decode_tokens,), INT32, 0)
            self._prefill = _filled(place, (tokens, width), INT32, -1)

    def fields(self, batch: BatchMetadata, device: dict[str, Any]) -> dict[str, Any]:
        """Fields of `SparseMLAMetadata` for a batch whose arrays are on the device."""
        config, requests, tokens = self.config, batch.num_reqs, batch.num_actual_tokens
        table = device["block_table"][:requests]
        slots = get_compressed_slot_mapping(
            tokens, device["query_start_loc"][: requests + 1], device["seq_lens"][:requests], table,
            config.rows_per_block, config.compress_ratio, self._slots, slot_mapping=device["slot_mapping"],
        )  # fmt: skip
        fields = {"slot_mapping": slots, "compressed_seq_lens": device["compressed_seq_lens"][:requests]}
        if config.compress_ratio != C128A:
            return fields
        _, _, decode_tokens, _ = split_decodes_and_prefills(batch, 1 + config.num_speculative_tokens)
        self._lens[decode_tokens:] = 0
        decode, lens, prefill = build_c128a_topk_metadata(
            device["positions"][:tokens], config.compress_ratio, decode_tokens, device["req_id_per_token"][:tokens],
            table, config.rows_per_block, device["slot_mapping"][:tokens], self._decode, self._lens, self._prefill,
            config.max_compressed_rows,
        )  # fmt: skip
        return fields | {
            "c128a_global_decode_topk_indices": decode[:, None],
            "c128a_decode_topk_lens": lens,
            "c128a_prefill_topk_indices": prefill,
        }


def _filled(place: Place, shape: tuple[int, ...], dtype: Any, value: int) -> Any:
    array = place.empty(shape, dtype)
    array[...] = value
    return array
