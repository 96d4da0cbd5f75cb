"""The batch of an engine's step as NumPy arrays: checks, the split into decodes and prefills, and reshapes.

Nothing here touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import arrays
from ..bridges import describe, require_array
from ..checks.options import (
    LARGEST_INT,
    require_bool,
    require_instance,
    require_integer,
    require_together,
    shown,
)
from ..checks.values import check_written_once, first_of, stray_block
from ..dtypes import INT32, INT64
from ..typing import A

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


# Dtype and number of axes of each array of a `BatchMetadata`.
_FIELDS: dict[str, tuple[np.dtype, int]] = {
    "query_start_loc": (INT32, 1),
    "seq_lens": (INT32, 1),
    "block_table": (INT32, 2),
    "slot_mapping": (INT64, 1),
    "positions": (INT64, 1),
    "replay_start": (INT32, 1),
    "left_visible": (INT32, 1),
    "right_visible": (INT32, 1),
}

PREFILL_WORKSPACE_SEQUENCES = 5  # so many sequences of the greatest length fit the workspace of gathered rows


@dataclass(frozen=True, eq=False, init=False)
class BatchMetadata:
    """R requests and T query tokens, decodes before prefills. The arrays are checked here and nowhere else.

    Tokens behind those of the last request pad the batch to the size of a captured CUDA graph. They attend over
    nothing.

    Attributes:
        query_start_loc: [R + 1] where each request's tokens start; the first is 0, the last at most T.
        seq_lens: [R] tokens of each sequence, those of this step included; upper bounds where only the device knows
            them (see `SparseMLAMetadataBuilder.build`).
        block_table: [R, M] blocks of each sequence, in order. Entries behind a sequence's last block are not read.
        slot_mapping: [T] slot of the cache to which each token is written; negative: none. Its length is T.
        positions: [T] position of each token in its sequence.
        replay_start: [R] first position of each sequence of which the sliding-window cache has a row. It is above 0 for
            sequences whose prefix was cached without such rows; None: 0 for all. Only `SparseSWAMetadataBuilder` reads
            this and the next two.
        left_visible, right_visible: [T] how many positions of its image stand before each token and behind it, 0 for
            tokens of text. Both None: there are no images.

    All are NumPy arrays or sequences of integers. They become int32, `slot_mapping` and `positions` int64.

    Raises:
        TypeError: an array does not hold integers, or is on a GPU.
        ValueError: rows of several lengths, lengths that do not add up, offsets that go down, more query tokens than a
            sequence is long, a number that cannot be negative, or values that do not fit the type.
    """

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    positions: np.ndarray
    replay_start: np.ndarray | None
    left_visible: np.ndarray | None
    right_visible: np.ndarray | None

    def __init__(
        self,
        query_start_loc: ArrayLike,
        seq_lens: ArrayLike,
        block_table: ArrayLike,
        slot_mapping: ArrayLike,
        positions: ArrayLike,
        *,
        replay_start: ArrayLike | None = None,
        left_visible: ArrayLike | None = None,
        right_visible: ArrayLike | None = None,
    ) -> None:
        require_together(left_visible=left_visible, right_visible=right_visible)
        given = (query_start_loc, seq_lens, block_table, slot_mapping, positions)
        optional = (replay_start, left_visible, right_visible)
        for (name, (dtype, ndim)), values in zip(_FIELDS.items(), (*given, *optional), strict=True):
            absent = values is None and name in ("replay_start", "left_visible", "right_visible")
            object.__setattr__(self, name, None if absent else _integers(name, values, dtype, ndim))
        starts = self.query_start_loc
        if len(starts) == 0 or starts[0] != 0:
            got = f"{starts[0]} as the first of {len(starts)}" if len(starts) else "none"
            raise ValueError(f"query_start_loc: expected R + 1 offsets from 0 on, got {got}")
        down = np.flatnonzero(self.query_lens < 0)
        if down.size:
            r = int(down[0])
            raise ValueError(
                f"query_start_loc: offsets must not go down, got {starts[r]} and then {starts[r + 1]} at request {r}"
            )
        for name in ("seq_lens", "block_table"):
            length = len(getattr(self, name))
            if length != len(starts) - 1:
                raise ValueError(
                    f"{name}: query_start_loc gives {len(starts) - 1} entries, one a request, got {length}"
                )
        tokens = len(self.slot_mapping)
        if tokens < starts[-1]:
            raise ValueError(f"slot_mapping: query_start_loc gives {starts[-1]} entries, one a token, got {tokens}")
        if len(self.positions) != tokens:
            raise ValueError(f"positions: slot_mapping gives {tokens} entries, one a token, got {len(self.positions)}")
        written = np.flatnonzero(self.slot_mapping[starts[-1] :] >= 0)
        if written.size:
            t = int(starts[-1] + written[0])
            raise ValueError(
                f"slot_mapping: token {t} goes to slot {self.slot_mapping[t]}, but tokens from {starts[-1]} on pad the "
                "batch and cannot be written"
            )
        self._check_optional()
        short = np.flatnonzero(self.seq_lens < self.query_lens)
        if short.size:
            r = int(short[0])
            raise ValueError(
                f"seq_lens: request {r} has {self.query_lens[r]} query tokens in a sequence of {self.seq_lens[r]}"
            )

    def _check_optional(self) -> None:
        for what, length, names in (
            ("request", self.num_reqs, ("replay_start",)),
            ("token", self.num_actual_tokens, ("left_visible", "right_visible")),
        ):
            for name in names:
                values = getattr(self, name)
                if values is None:
                    continue
                if len(values) != length:
                    raise ValueError(f"{name}: expected {length} entries, one a {what}, got {len(values)}")
                if values.min(initial=0) < 0:
                    raise ValueError(f"{name}: {what} {int(values.argmin())} has {values.min()}, which is negative")

    @property
    def num_reqs(self) -> int:
        """Requests, R."""
        return len(self.seq_lens)

    @property
    def num_actual_tokens(self) -> int:
        """Query tokens, T, padding included."""
        return len(self.slot_mapping)

    @cached_property
    def query_lens(self) -> np.ndarray:
        """[R] query tokens of each request."""
        return np.diff(self.query_start_loc)

    @cached_property
    def token_requests(self) -> np.ndarray:
        """int32 request of each query token, without padding."""
        return np.repeat(np.arange(self.num_reqs, dtype=INT32), self.query_lens)

    @cached_property
    def token_positions(self) -> np.ndarray:
        """int64 position of each query token in its sequence, by the lengths, without padding."""
        request = self.token_requests
        return self.seq_lens[request] - self.query_start_loc[request + 1] + np.arange(len(request))

    @cached_property
    def max_query_len(self) -> int:
        """Query tokens of the request that has most; 0 without requests."""
        return int(self.query_lens.max(initial=0))

    @cached_property
    def max_seq_len(self) -> int:
        """Tokens of the longest sequence; 0 without requests."""
        return int(self.seq_lens.max(initial=0))

    def check_cache(self, block_size: int, num_blocks: int | None = None, window: int | None = None) -> None:
        """Check the batch against a paged cache.

        Args:
            block_size: tokens a block of the cache.
            num_blocks: blocks of the cache; None leaves slots and blocks unchecked.
            window: tokens over which each query token attends, itself included. Blocks before them are not checked.

        Raises:
            TypeError, ValueError: a setting is no integer or out of its range.
            ValueError: the block table is too narrow for a sequence, or a slot or a block of a sequence lies beyond the
                cache. With `cupy_mla.set_checks(True)` also: two tokens go to one slot, or a token that is written has
                a position outside its sequence.
        """
        block_size = require_integer("block_size", block_size, 1)
        if num_blocks is not None:
            num_blocks = require_integer("num_blocks", num_blocks, 0)
        if window is not None:
            window = require_integer("window", window, 1)
        width = self.block_table.shape[1]
        if self.max_seq_len > width * block_size:
            r = int(self.seq_lens.argmax())
            raise ValueError(
                f"block_table: request {r} has {self.max_seq_len} tokens, which take "
                f"{-(-self.max_seq_len // block_size)} blocks of {block_size}; the table is {width} wide"
            )
        if num_blocks is not None:
            require_blocks(self, self._first_of_windows(window), block_size, num_blocks)
            slots = num_blocks * block_size
            if self.slot_mapping.max(initial=-1) >= slots:
                t = int(self.slot_mapping.argmax())
                slot = self.slot_mapping[t]
                raise ValueError(f"slot_mapping: token {t} goes to slot {slot}, the cache has {slots} slots")
        if arrays.CHECK_VALUES:
            check_written_once("slot_mapping", self.slot_mapping)
            lens = np.repeat(self.seq_lens, self.query_lens)
            written, positions = self.slot_mapping[: len(lens)] >= 0, self.positions[: len(lens)]
            outside = first_of(written & ((positions < 0) | (positions >= lens)))
            if outside is not None:
                token = outside[0]
                raise ValueError(
                    f"positions: token {token} has position {positions[token]}, its sequence {lens[token]} tokens"
                )

    def _first_of_windows(self, window: int | None) -> np.ndarray:
        """[R] the first position that each request's windows reach; without windows 0."""
        if window is None:
            return np.zeros_like(self.seq_lens)
        return self.from_replay_start(np.maximum(self.seq_lens - self.query_lens - window + 1, 0))

    def from_replay_start(self, first: np.ndarray) -> np.ndarray:
        """The first positions that windows of the first requests reach, not before `replay_start`."""
        if self.replay_start is None:
            return first
        requests = len(first)
        return np.minimum(np.maximum(first, self.replay_start[:requests]), self.seq_lens[:requests])


def require_blocks(batch: BatchMetadata, first: np.ndarray, block_size: int, num_blocks: int) -> None:
    """Check that the cache has the blocks of the positions from first[r] on of each of the first requests.

    Raises:
        ValueError: it has not.
    """
    table = batch.block_table[: len(first), : -(-batch.max_seq_len // block_size)]
    at = stray_block(table, first, batch.seq_lens[: len(first)], block_size, num_blocks)
    if at is not None:
        r, m = at
        raise ValueError(f"block_table: block {m} of request {r} is {table[at]}, the cache has {num_blocks} blocks")


def _integers(name: str, values: Any, dtype: np.dtype, ndim: int) -> np.ndarray:
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, got a masked array")
    try:
        given = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name}: expected rows of one length, got {shown(values)}: {error}") from error
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"{name}: expected an array on the host, got {shown(values)}: {error}") from error
    if given.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} axes, got shape {list(given.shape)}")
    if given.size == 0:
        return np.zeros(given.shape, dtype)
    if not np.issubdtype(given.dtype, np.integer):
        raise TypeError(f"{name}: expected integers, got dtype {given.dtype}")
    if not np.can_cast(given.dtype, dtype):
        limits = np.iinfo(dtype)
        if given.min() < limits.min or given.max() > limits.max:
            raise ValueError(f"{name}: expected values that fit {dtype.name}, got {given.min()} to {given.max()}")
    return given.astype(dtype, copy=False)


def split_decodes_and_prefills(
    batch: BatchMetadata, decode_threshold: int = 1, require_uniform: bool = False
) -> tuple[int, int, int, int]:
    """Where the decodes of a batch end and its prefills begin, by the rules of vLLM.

    - A request is a decode if it has at most `decode_threshold` query tokens and, with `require_uniform`, as many as
      the first request.
    - A request without tokens, which pads the batch, is a decode too. With `require_uniform` it is one only if all
      others of the batch are decodes like the first one, or if the threshold is 1 and no request has more.
    - The first request that is no decode, and all behind it, are prefills.
    - Tokens that pad the batch count as prefill tokens; without prefills, as decode tokens.

    Returns:
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens.

    Example:
        >>> starts, lengths = np.array([0, 1, 2, 12]), np.array([41, 8, 10])  # two decodes and a prefill of 10 tokens
        >>> positions = np.array([40, 7, *range(10)])
        >>> batch = cupy_mla.BatchMetadata(starts, lengths, np.arange(9).reshape(3, 3), positions, positions)
        >>> cupy_mla.split_decodes_and_prefills(batch)
        (2, 1, 2, 10)
    """
    require_instance("batch", batch, BatchMetadata)
    decode_threshold = require_integer("decode_threshold", decode_threshold, 1)
    require_bool("require_uniform", require_uniform)
    lens = batch.query_lens
    is_decode = lens <= decode_threshold
    one_token_at_most = decode_threshold == 1 and is_decode.all()
    if require_uniform and len(lens) and not one_token_at_most:
        is_like_first = lens == lens[0]
        if not (is_like_first | (lens == 0)).all():
            is_decode &= is_like_first
    if is_decode.all():
        return len(lens), 0, batch.num_actual_tokens, 0
    num_decodes = int(is_decode.argmin())
    num_decode_tokens = int(batch.query_start_loc[num_decodes])
    return num_decodes, len(lens) - num_decodes, num_decode_tokens, batch.num_actual_tokens - num_decode_tokens


def split_prefill_chunks(seq_lens: ArrayLike, workspace_size: int, request_offset: int = 0) -> list[tuple[int, int]]:
    """Divide prefills into chunks of consecutive requests whose sequences fit the workspace, each as long as possible.

    Args:
        seq_lens: [P] sequence lengths (host).
        workspace_size: rows of the workspace.
        request_offset: added to every bound, for requests that do not start the batch.

    Returns:
        (first request, end) of each chunk, in order.

    Raises:
        TypeError, ValueError: lengths are no integers or negative, or one sequence alone is longer than the workspace.

    Example:
        >>> cupy_mla.split_prefill_chunks(np.array([300, 500, 400]), workspace_size=1000)
        [(0, 2), (2, 3)]
    """
    workspace_size = require_integer("workspace_size", workspace_size, 0)
    request_offset = require_integer("request_offset", request_offset, 0)
    lens = _integers("seq_lens", seq_lens, INT32, 1)
    if lens.min(initial=0) < 0:
        raise ValueError(f"seq_lens: a length cannot be negative, got {lens.min()}")
    chunks = []
    start = rows = 0
    for r, length in enumerate(lens.tolist()):
        if length > workspace_size:
            raise ValueError(
                f"seq_lens: request {request_offset + r} has {length} tokens, "
                f"the prefill workspace has {workspace_size} rows"
            )
        if rows + length > workspace_size:
            chunks.append((request_offset + start, request_offset + r))
            start, rows = r, 0
        rows += length
    if len(lens):
        chunks.append((request_offset + start, request_offset + len(lens)))
    return chunks


def prefill_workspace_size(max_model_len: int) -> int:
    """Rows of the workspace into which the sequences of prefills are gathered.

    Raises:
        TypeError, ValueError: `max_model_len` is no integer, or int32 cannot count the rows.

    Example:
        >>> cupy_mla.prefill_workspace_size(max_model_len=4096)
        20480
    """
    most = LARGEST_INT // PREFILL_WORKSPACE_SEQUENCES
    return PREFILL_WORKSPACE_SEQUENCES * require_integer(
        "max_model_len", max_model_len, 1, most, "so that int32 counts them"
    )


def reshape_query_for_spec_decode(q: A, batch_size: int) -> A:
    """View the query tokens [T, h, d] of `batch_size` decodes of equal length as [batch_size, T / batch_size, h, d].

    Raises:
        ValueError: T is no multiple of `batch_size`.

    Example:
        >>> cupy_mla.reshape_query_for_spec_decode(np.zeros((6, 16, 576), bfloat16), batch_size=3).shape
        (3, 2, 16, 576)
    """
    batch_size = require_integer("batch_size", batch_size, 1)
    require_array("q", q)
    tokens_of_all: Any = q
    shape = q.shape
    if len(shape) < 2:
        raise ValueError(f"q: expected shape [T, h, d], got {list(shape)}")
    tokens = shape[0]
    if tokens % batch_size:
        raise ValueError(f"q: {tokens} tokens cannot be shared out evenly among {batch_size} decodes")
    return tokens_of_all.reshape(batch_size, tokens // batch_size, *shape[1:])


def reshape_attn_output_for_spec_decode(attn_output: A) -> A:
    """View the attention output [b, s, h, d] of decodes as [b * s, h, d], one row a query token.

    Raises:
        ValueError: the strides do not allow a view.

    Example:
        >>> cupy_mla.reshape_attn_output_for_spec_decode(np.zeros((3, 2, 16, 512), bfloat16)).shape
        (6, 16, 512)
    """
    a = describe("attn_output", attn_output)
    if len(a.shape) != 4:
        raise ValueError(f"attn_output: expected shape [b, s, h, d], got {list(a.shape)}")
    b, s = a.shape[:2]
    if b > 1 and s > 1 and a.strides[0] != s * a.strides[1]:
        raise ValueError(f"attn_output: the first two axes cannot be viewed as one, strides are {list(a.strides)}")
    return a.obj.reshape(b * s, *a.shape[2:])
