"""The indexer's query quantization and logits in plain NumPy."""

from __future__ import annotations

import numpy as np

from ..arguments import CandidateKeys, PagedKeys, QuantizeQ, RaggedKeys
from ..dtypes import BFLOAT16, E4M3, E4M3_MAX, E5M2
from ..layouts import INDEXER_FP8, INDEXER_MXFP4
from . import mxfp4
from .cache import _ceil_log2
from .indexer import key_regions
from .indices import find_slots
from .quant import to_e4m3

D = INDEXER_FP8.d_qk
ROPE = 64  # values of a row that are rotated
CANDIDATE_BLOCK = 8  # keys
SCHEDULE_UNIT = 64  # keys
SCHEDULE_BLOCKS_AT = 5  # words of a share before the blocks of its first units
SHARES_AT_ONCE = 288  # up to so many shares of a schedule are equal
PARTS_OF_THIRDS = 0, 920, 975, 1000  # with more shares: where each third of them begins and ends, of 1000 units
AMAX_FLOOR = np.float32(1e-10)


@np.errstate(all="ignore")
def quantize_indexer_q(a: QuantizeQ) -> None:
    """RoPE, quantization and weights; see `cupy_mla.quantize_indexer_q` and `cupy_mla.quantize_indexer_q_mxfp4`."""
    values = a.q.astype(np.float32)
    if a.positions is not None and a.cos_sin_cache is not None:
        start = 0 if a.rope_first else D - ROPE
        part = values[..., start : start + ROPE]
        part[...] = _rotated(part, a.positions, a.cos_sin_cache.astype(np.float32), a.interleaved)
        values = values.astype(BFLOAT16).astype(np.float32)
    scales = np.ones(values.shape[:-1], np.float32)
    if a.scales is not None:
        a.codes[...], a.scales[...] = mxfp4.quantize(values)
    elif a.scale_format == "mxfp4":
        a.codes[...], scales = mxfp4.widen(*mxfp4.quantize(values))
    else:
        a.codes.view(E4M3)[...], scales = rounded(values, AMAX_FLOOR, a.scale_format)
    a.w[...] = a.weights.astype(np.float32) * scales * np.float32((a.q.shape[1] * D) ** -0.5)


def rounded(values: np.ndarray, floor: np.float32, scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    """Float32 values [..., 128] as e4m3 numbers, and their scales [...] float32. A scale is made of at least
    `floor`."""
    amax = np.fmax.reduce(np.abs(values), axis=-1, initial=np.float32(0))
    scales = np.maximum(amax, floor) / np.float32(E4M3_MAX)
    if scale_format == "ue8m0":
        scales = np.ldexp(np.float32(1), _ceil_log2(scales))
    return to_e4m3(values / scales[..., None]), scales


def _rotated(x: np.ndarray, positions: np.ndarray, cos_sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """x [T, H, ROPE] rotated by the angles of its tokens' positions. Tokens whose position has no angles stay
    unchanged."""
    known = (positions >= 0) & (positions < len(cos_sin))
    rows = cos_sin[positions[known]][:, None]
    cos, sin = rows[..., : ROPE // 2], rows[..., ROPE // 2 :]
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(ROPE // 2), slice(ROPE // 2, None))
    )
    a, b = x[known][..., first], x[known][..., second]
    out = x.copy()
    rotated = np.empty_like(x[known])
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = b * cos + a * sin
    out[known] = rotated
    return out


def indexer_logits(of: RaggedKeys, clean: bool, compact: bool, out: np.ndarray) -> None:
    """Logits of queries over ranges of key rows; see `cupy_mla.indexer_logits`."""
    keys = _numbers(of.k8)
    for i, (start, end) in enumerate(zip(of.starts.tolist(), of.ends.tolist(), strict=True)):
        begin, stop = max(start, 0), min(end, len(keys))
        first = begin if compact else 0  # the key of a row's first entry
        stop = min(stop, first + out.shape[1])
        if clean:
            out[i] = -np.inf
        if begin < stop:
            out[i, begin - first : stop - first] = _logits(of.q8[i], keys[begin:stop], of.ks[begin:stop], of.w[i])


def paged_indexer_logits(of: PagedKeys, clean: bool, out: np.ndarray) -> None:
    """Logits of queries over keys of a paged cache; see `cupy_mla.paged_indexer_logits`."""
    requests, n = of.q8.shape[:2]
    num_blocks, block_size, _ = of.cache.shape
    lens = visible_keys(of.lens, n).clip(0, out.shape[1])
    if clean:
        out[...] = -np.inf
    for r in range(requests):
        slots = find_slots(of.table, np.array(r), np.arange(lens[r].max(initial=0)), block_size)
        exists = (slots >= 0) & (slots < num_blocks * block_size)
        keys, scales = _keys_of(of.cache, slots[exists])
        for j in range(n):
            row, count = out[r * n + j], int(lens[r, j])
            row[:count] = -np.inf
            seen = exists[:count]
            first = seen.sum()
            row[:count][seen] = _logits(of.q8[r, j], keys[:first], scales[:first], of.w[r * n + j])


def candidate_logits(of: CandidateKeys, out: np.ndarray) -> None:
    """Logits of query tokens over candidate blocks of keys; see `cupy_mla.candidate_logits`."""
    num_blocks, block_size, _ = of.cache.shape
    out[...] = -np.inf
    positions = positions_of(of.candidates)
    for row, (request, end) in enumerate(zip(of.req_id.tolist(), of.lens.tolist(), strict=True)):
        seen = (positions[row] >= 0) & (positions[row] < end)
        slots = find_slots(of.table, np.array(request), positions[row], block_size)
        seen &= (slots >= 0) & (slots < num_blocks * block_size)
        seen[-(-max(end, 0) // CANDIDATE_BLOCK) * CANDIDATE_BLOCK :] = False  # a token has no more blocks than these
        out[row, seen] = _logits(of.q8[row], *_keys_of(of.cache, slots[seen]), of.w[row])


def positions_of(candidates: np.ndarray) -> np.ndarray:
    """Positions [T, 8 * C] int64 of the keys in candidate blocks [T, C]; negative for blocks that are -1."""
    first = candidates.astype(np.int64) * CANDIDATE_BLOCK
    positions = first[..., None] + np.arange(CANDIDATE_BLOCK)
    return positions.reshape(len(candidates), CANDIDATE_BLOCK * candidates.shape[1])


def _keys_of(cache: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The keys [n, 128] float64 in slots of a cache, and their factors [n] float32."""
    layout = INDEXER_MXFP4 if cache.shape[2] == INDEXER_MXFP4.last_axis else INDEXER_FP8
    block, offset = np.divmod(slots, cache.shape[1])
    codes, scale_bytes = (region[block, offset] for region in key_regions(layout, cache))
    if layout is INDEXER_MXFP4:
        return mxfp4.dequantize(codes, scale_bytes), np.ones(len(slots), np.float32)
    return _numbers(codes), scale_bytes.view(np.float32)[..., 0]


def paged_indexer_schedule(
    context_lens: np.ndarray, block_table: np.ndarray, max_context_len: int, block_size: int, out: np.ndarray
) -> None:
    """Shares of the units of keys; see `cupy_mla.paged_indexer_schedule`."""
    shares = len(out)
    keys = visible_keys(context_lens, 1).max(axis=1, initial=0).clip(0, max_context_len)
    units = -(-keys // SCHEDULE_UNIT)
    until = np.cumsum(units)
    total = int(until[-1]) if len(until) else 0
    out[:, :SCHEDULE_BLOCKS_AT] = 0
    out[:, SCHEDULE_BLOCKS_AT:] = -1
    for share in range(shares):
        first, stop = _begin_of_share(total, share, shares), _begin_of_share(total, share + 1, shares)
        if first == stop:
            continue
        request = int(np.searchsorted(until, first, side="right"))
        unit = first - int(until[request] - units[request])
        two = [request, request + 1][: len(keys) - request]
        out[share, : 3 + len(two)] = request, unit, stop - first, *keys[two]
        of_unit = [(r, u) for r in two for u in range(unit if r == request else 0, units[r])]
        for i, (r, u) in enumerate(of_unit[: out.shape[1] - SCHEDULE_BLOCKS_AT]):
            if (column := u * SCHEDULE_UNIT // block_size) < block_table.shape[1]:
                out[share, SCHEDULE_BLOCKS_AT + i] = block_table[r, column]


def _begin_of_share(total: int, share: int, shares: int) -> int:
    """The unit at which a share begins. Up to SHARES_AT_ONCE shares are equal; of more, PARTS_OF_THIRDS says."""
    if shares <= SHARES_AT_ONCE:
        return total * share // shares
    third = -(-shares // 3)
    number = min(share // third, 2)
    size = min(third, shares - number * third)
    before, until = PARTS_OF_THIRDS[number : number + 2]
    return total * (before * size + (until - before) * (share - number * third)) // (1000 * size)


def visible_keys(context_lens: np.ndarray, n: int) -> np.ndarray:
    """Keys that each of a request's n query tokens sees, [B, n] int64."""
    lens = context_lens.astype(np.int64)
    return lens if lens.ndim == 2 else lens[:, None] - n + 1 + np.arange(n)


def _numbers(a: np.ndarray) -> np.ndarray:
    """E5m2, or else e4m3, as float64."""
    return (a if a.dtype == E5M2 else a.view(E4M3)).astype(np.float64)


@np.errstate(all="ignore")
def _logits(q8: np.ndarray, keys: np.ndarray, scales: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Logits of one query token [H, D] over keys [n, D] float64. Dot products of e4m3 are exact, in any order; those of
    e5m2 where their products lie less than 2^46 apart."""
    dots = keys @ _numbers(q8).T
    return ((np.maximum(dots, 0) * w).sum(axis=1) + 0.0) * scales  # + 0.0 turns -0 into 0
