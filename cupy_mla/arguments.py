"""The arguments of operations with many arguments, as one value. `ops` makes it, and both twins take it.

An array is an `Array` for a launcher, and a NumPy view of the same memory for the reference (`Place.call`). Shapes and
dtypes that are not given here are those of the operation's docstring.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from .layouts import Layout

Operand: TypeAlias = Any  # an `Array`, or a NumPy view


class RowScales(NamedTuple):
    """How rows that are packed get their scales.

    Attributes:
        round_up: float32 ones to powers of two, e4m3 ones to the next e4m3 number, not to the nearest.
        least: the smallest UE8M0 scale, a power of two; or float32 scale that is not rounded up, one or 0.
        of_call: the scale of all rows, for layouts whose scale is an argument.
    """

    round_up: bool
    least: float
    of_call: Operand | float = 1.0


class QuantizeQ(NamedTuple):
    """The arguments of `quantize_indexer_q` and `quantize_indexer_q_mxfp4`, under the same names.

    Attributes:
        scale_format: "fp32", "ue8m0" or "mxfp4".
        codes, w: results; codes are e4m3, of "mxfp4" e5m2, or with `scales` e2m1.
        scales: a result, or None.
    """

    q: Operand
    weights: Operand
    positions: Operand | None
    cos_sin_cache: Operand | None
    rope_first: bool
    interleaved: bool
    scale_format: str
    codes: Operand
    w: Operand
    scales: Operand | None


class RaggedKeys(NamedTuple):
    """Queries of the indexer, and keys in rows. Each query sees a range of them.

    Attributes:
        q8: [M, H, 128] e4m3 or e5m2 queries.
        k8: [N, 128] e4m3 or e5m2 keys.
        ks: [N] float32 scales of the keys.
        w: [M, H] float32 weights of the heads.
        starts, ends: [M] int32 ranges of keys.
    """

    q8: Operand
    k8: Operand
    ks: Operand
    w: Operand
    starts: Operand
    ends: Operand


class PagedKeys(NamedTuple):
    """Queries of the indexer, and the keys of their requests in a paged cache.

    Attributes:
        q8: [B, n, H, 128] e4m3 or e5m2 queries.
        cache: [num_blocks, block_size, 132] in layout INDEXER_FP8, or 68 in INDEXER_MXFP4.
        w: [B * n, H] float32 weights of the heads.
        lens: [B] or [B, n] int32 keys that a request's query tokens see.
        table: [B, width] int32 blocks of each request.
        schedule: [shares, 32] int32 how the kernel divides the keys over CTAs, or None. It changes no result.
    """

    q8: Operand
    cache: Operand
    w: Operand
    lens: Operand
    table: Operand
    schedule: Operand | None


class CandidateKeys(NamedTuple):
    """Query tokens of the indexer, and the candidate blocks of 8 keys that each of them sees in a paged cache.

    Attributes:
        q8: [T, H, 128] e4m3 or e5m2 queries.
        cache: as in `PagedKeys`.
        w: [T, H] float32 weights of the heads.
        candidates: [T, C] int32 numbers of blocks in the token's request, ascending, -1 behind the last.
        lens: [T] int32 keys that each token sees.
        req_id: [T] int32 rows of the block table.
        table: [R, width] int32 blocks of each request.
    """

    q8: Operand
    cache: Operand
    w: Operand
    candidates: Operand
    lens: Operand
    req_id: Operand
    table: Operand


class Selection(NamedTuple):
    """What is chosen for each query, and where it is written.

    Attributes:
        k: rows that a query chooses.
        max_workspace_bytes: limit of the memory for logits.
        out: [queries, k] int32, the result.
        blocks: [queries, C] int32, a result: candidate blocks; None: they are not asked for.
    """

    k: int
    max_workspace_bytes: int
    out: Operand
    blocks: Operand | None = None


class PooledKeys(NamedTuple):
    """The arguments of `kpool_compress`, under the same names, and the result `out`."""

    k: Operand
    gate: Operand
    ape: Operand
    tail: Operand
    tail_blocks: Operand
    query_start_loc: Operand
    seq_lens: Operand
    out: Operand


class SwaWindows(NamedTuple):
    """The arguments of `compute_swa_indices_and_lens`, under the same names, and the results `out` and `lens`."""

    query_start_loc: Operand
    seq_lens: Operand
    token_to_req: Operand
    is_valid_token: Operand
    block_table: Operand
    block_size: int
    window_size: int
    replay_start: Operand | None
    left_visible: Operand | None
    right_visible: Operand | None
    out: Operand
    lens: Operand


class CombinedLists(NamedTuple):
    """The arguments of `combine_topk_swa_indices`.

    Attributes:
        rows, compressed_rows: all rows and compressed rows of a request in the workspace; its M and N.
        left_visible, right_visible: [T] int32, or None.
        most: entries that a window may have.
        out, lens: results.
    """

    topk_indices: Operand
    query_start_loc: Operand
    seq_lens: Operand
    gather_lens: Operand
    window_size: int
    compress_ratio: int
    topk: int
    rows: int
    compressed_rows: int
    left_visible: Operand | None
    right_visible: Operand | None
    most: int
    out: Operand
    lens: Operand


class CompressedSlots(NamedTuple):
    """The arguments of `get_compressed_slot_mapping`, most of them under the same names.

    Attributes:
        slot_mapping: [at least num_tokens] int64, or None.
        world_size, rank, interleave: the number of ranks, this rank, and how many consecutive rows go to one rank.
        out: the result.
    """

    num_tokens: int
    query_start_loc: Operand
    seq_lens: Operand
    block_table: Operand
    block_size: int
    compress_ratio: int
    slot_mapping: Operand | None
    world_size: int
    rank: int
    interleave: int
    out: Operand


class C128aLists(NamedTuple):
    """The arguments of `build_c128a_topk_metadata`, under the same names."""

    positions: Operand
    compress_ratio: int
    num_decode_tokens: int
    token_to_req: Operand
    block_table: Operand
    block_size: int
    slot_mapping: Operand
    decode_indices: Operand
    decode_lens: Operand
    prefill_indices: Operand
    max_compressed_tokens: int


class Conversion(NamedTuple):
    """The arguments of `convert_req_index_to_global_index` and of operations like it. The first seven have the same
    names.

    Attributes:
        block_stride_rows: rows from a block's first row to the next block's; None: `block_size`.
        valid_counts: [T] int32, a result: how many entries of each row are not -1; None: it is not asked for.
        ends: [T] int32, a result: the place behind each row's last entry that is not -1; None: it is not asked for.
        is_valid_token: [T] bool; a token that is not valid has a count of 0. None: all are valid.
        to_front: each row's entries that are not -1 are moved to its front, in their order, and counted.
        most: [T] int32, with `to_front`: how many entries of each row are kept; 0 and below: none. None: all are.
    """

    req_id: Operand
    block_table: Operand
    token_indices: Operand
    block_size: int
    prefill_request_ids: Operand | None
    prefill_workspace_starts: Operand | None
    out: Operand
    block_stride_rows: int | None = None
    valid_counts: Operand | None = None
    ends: Operand | None = None
    is_valid_token: Operand | None = None
    to_front: bool = False
    most: Operand | None = None


class Prefill(NamedTuple):
    """The arguments of `sparse_prefill`, in its shapes without axes of length 1.

    Attributes:
        layout: of the rows.
        q_scale, k_scale: factors on an e4m3 q and on rows of layout PLAIN_FP8: a float, or an array of one float32.
        sink: [h_q], or None.
        length: [s_q], or None.
        out, max_logits, lse: results.
    """

    layout: Layout
    q: Operand
    kv: Operand
    indices: Operand
    sm_scale: float
    q_scale: Operand
    k_scale: Operand
    sink: Operand
    length: Operand
    out: Operand
    max_logits: Operand
    lse: Operand


class Decode(NamedTuple):
    """The arguments of `sparse_decode`, in its shapes without axes of length 1.

    Attributes:
        layout: of the cache.
        q_scale, k_scale: factors on an e4m3 q and on rows of layout PLAIN_FP8: a float, or an array of one float32.
        sink: [h_q], or None.
        length: [b] lengths of the main lists, or None.
        extra, extra_indices, extra_length: the extra cache, its lists and their lengths, or None.
        extra_layout: of the extra cache where it differs from `layout`; else None.
        num_splits: splits of each query's rows; None: to be chosen.
        out, lse: results.
        batch_invariant: as for `sparse_decode`.
        plan, padded: as for `ops.attention.decode`.
    """

    layout: Layout
    q: Operand
    cache: Operand
    indices: Operand
    sm_scale: float
    q_scale: Operand
    k_scale: Operand
    sink: Operand
    length: Operand
    extra: Operand
    extra_indices: Operand
    extra_length: Operand
    extra_layout: Layout | None
    num_splits: int | None
    out: Operand
    lse: Operand
    batch_invariant: bool
    plan: Any
    padded: bool


class PrefillBackward(NamedTuple):
    """The arguments of `sparse_prefill_backward`, in its shapes, but kv [s_kv, d_qk] and indices [s_q, topk].

    Attributes:
        sink: [h_q], or None.
        length: [s_q], or None.
        d_lse: [s_q, h_q], or None.
        accumulate: add to what dkv holds.
        dq, dkv, d_sink: results; d_sink is None without a sink.
    """

    q: Operand
    kv: Operand
    indices: Operand
    out: Operand
    lse: Operand
    dout: Operand
    sm_scale: float
    sink: Operand
    length: Operand
    d_lse: Operand
    accumulate: bool
    max_workspace_bytes: int
    dq: Operand
    dkv: Operand
    d_sink: Operand


class DenseDecode(NamedTuple):
    """The arguments of `dense_decode`, in its shapes without axes of length 1.

    Attributes:
        layout: of the cache.
        q_scale, k_scale: factors on an e4m3 q and on rows of layout PLAIN_FP8: a float, or an array of one float32.
        window: a query sees at most so many rows, the last ones; 0: all.
        sink: [h_q], or None.
        num_splits: splits of each request's rows; None: to be chosen.
        out, lse: results.
        batch_invariant: as for `dense_decode`.
        plan: as for `ops.dense.decode`.
    """

    layout: Layout
    q: Operand
    cache: Operand
    block_table: Operand
    seq_lens: Operand
    sm_scale: float
    q_scale: Operand
    k_scale: Operand
    causal: bool
    window: int
    sink: Operand
    num_splits: int | None
    out: Operand
    lse: Operand
    batch_invariant: bool
    plan: Any


class Target(NamedTuple):
    """The arguments of `attention_target`, `dense_attention_target` and `dense_lse`, in their shapes, but kv [s_kv,
    d_qk] and indices [s_q, topk].

    Attributes:
        lse: [s_q, h_q]; None for `dense_lse`, which computes it.
        indices, length, starts, ends: lists [s_q, topk], and their lengths [s_q] or None; or the ranges of rows [s_q].
        sink: [h_q], or None.
        out: the result.
    """

    q: Operand
    kv: Operand
    sm_scale: float
    lse: Operand
    sink: Operand
    indices: Operand
    length: Operand
    starts: Operand
    ends: Operand
    out: Operand


class IndexerLoss(NamedTuple):
    """Arguments of `indexer_loss` and `dense_indexer_loss`, in their shapes and dtypes, but indices is [T, topk].

    Attributes:
        indices, length, starts, ends: lists [T, topk], and their lengths [T] or None; or the ranges of keys [T].
        counted: [T], or None.
        scale_format: of e4m3 queries and keys, "fp32" or "ue8m0"; None: they are not rounded.
        loss, dq_index, dk_index, dw: are written; the last three only with `gradients`, and None without.
    """

    q_index: Operand
    k_index: Operand
    w: Operand
    target: Operand
    indices: Operand
    length: Operand
    starts: Operand
    ends: Operand
    loss_coeff: float
    counted: Operand
    per_token: bool
    relu: bool
    scale_format: str | None
    gradients: bool
    accumulate: bool
    max_workspace_bytes: int
    loss: Operand
    dq_index: Operand
    dk_index: Operand
    dw: Operand
