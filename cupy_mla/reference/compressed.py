"""Index lists of compressed rows in plain NumPy."""

from __future__ import annotations

import numpy as np

from ..arguments import C128aLists, CompressedSlots
from .indices import LARGEST, find_slots
from .swa import positions_of, requests_of


def get_compressed_slot_mapping(a: CompressedSlots) -> None:
    """Slots of the rows that tokens own; see `cupy_mla.get_compressed_slot_mapping`."""
    token = np.arange(a.num_tokens)
    request = requests_of(token, a.query_start_loc)
    position = positions_of(token, request, a.query_start_loc, a.seq_lens)
    row = position // a.compress_ratio
    owned = (position >= 0) & ((position + 1) % a.compress_ratio == 0)
    owned &= row // a.interleave % a.world_size == a.rank
    if a.slot_mapping is not None:
        owned &= a.slot_mapping[: a.num_tokens] >= 0
    local = row // (a.world_size * a.interleave) * a.interleave + row % a.interleave
    a.out[...] = -1
    a.out[: a.num_tokens] = np.where(owned, find_slots(a.block_table, request, local, a.block_size), -1)


def build_c128a_topk_metadata(a: C128aLists) -> None:
    """Every complete row of each token; see `cupy_mla.build_c128a_topk_metadata`."""
    decodes = slice(a.num_decode_tokens)
    count = np.minimum((np.maximum(a.positions, -1) + 1) // a.compress_ratio, a.max_compressed_tokens)
    count[decodes][a.slot_mapping[decodes] < 0] = 0

    entry = np.arange(a.decode_indices.shape[1])
    slots = find_slots(a.block_table, a.token_to_req[decodes, None], entry[None], a.block_size)
    attended = (entry < count[decodes, None]) & (slots >= 0) & (slots <= LARGEST)
    a.decode_indices[decodes] = np.where(attended, slots, -1)
    a.decode_lens[decodes] = count[decodes]

    entry = np.arange(a.prefill_indices.shape[1])
    prefills = count[a.num_decode_tokens :, None]
    a.prefill_indices[: len(prefills)] = np.where(entry < prefills, entry, -1)
