"""The arguments of operations that have many, as one value: made once by `ops`, taken by both twins.

A field is an `Array` for a launcher, and a NumPy view of the same memory for the reference (`Place.call`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from .layouts import Layout

Operand: TypeAlias = Any  # an `Array`, or a NumPy view


class QuantizeQ(NamedTuple):
    """Of `quantize_indexer_q` and `quantize_indexer_q_mxfp4`, which have them under the same names.

    Attributes:
        scale_format: "fp32", "ue8m0" or "mxfp4".
        codes, w: the results; codes are e4m3, or with `scales` e2m1.
        scales: a result as well, or None.
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
    scales: Operand | None = None


class RaggedKeys(NamedTuple):
    """Queries of the indexer, and keys in rows, of which each query sees a range.

    Attributes:
        q8: [M, H, 128] e4m3 queries.
        k8: [N, 128] e4m3 keys.
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
    """Queries of the indexer, and requests' keys in a paged cache.

    Attributes:
        q8: [B, n, H, 128] e4m3 queries.
        cache: [num_blocks, block_size, 132] in layout INDEXER_FP8, or 68 in INDEXER_MXFP4.
        w: [B * n, H] float32 weights of the heads.
        lens: [B] or [B, n] int32 keys that a request's query tokens see.
        table: [B, width] int32 blocks of each request.
        schedule: [shares, 32] int32, how a launcher deals out the keys; it changes no result.
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
        q8: [T, H, 128] e4m3 queries.
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
        k: rows of each query.
        max_workspace_bytes: most memory that logits take.
        out: [queries, k] int32, is written.
        blocks: [queries, C] int32, is given candidate blocks; None: nobody asks.
    """

    k: int
    max_workspace_bytes: int
    out: Operand
    blocks: Operand | None = None


class PooledKeys(NamedTuple):
    """Of `kpool_compress`, which has them under the same names.

    Attributes:
        out: the result.
    """

    k: Operand
    gate: Operand
    ape: Operand
    tail: Operand
    tail_blocks: Operand
    query_start_loc: Operand
    seq_lens: Operand
    out: Operand


class SwaWindows(NamedTuple):
    """Of `compute_swa_indices_and_lens`, which has them under the same names.

    Attributes:
        out, lens: the results.
    """

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
    """Of `combine_topk_swa_indices`.

    Attributes:
        rows, compressed_rows: of a request in the workspace; M and N there.
        left_visible, right_visible: [T] int32, or None.
        most: entries that a window may have.
        out, lens: the results.
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
    """Of `get_compressed_slot_mapping`, which has most of them under the same names.

    Attributes:
        slot_mapping: [at least num_tokens] int64, or None.
        world_size, rank, interleave: the ranks that share the rows out, and which of them this is.
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
    """Of `build_c128a_topk_metadata`, which has them under the same names."""

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
    """Of `convert_req_index_to_global_index` and its relatives, which have the first seven under the same names.

    Attributes:
        block_stride_rows: rows from a block's first row to the next block's; None: `block_size`.
        valid_counts: [T] int32, how many entries of each row are not -1; None: nobody asks.
        ends: [T] int32, the place behind each row's last entry that is not -1; None: nobody asks.
        is_valid_token: [T] bool; tokens that are not valid count 0. None: all are.
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


class Prefill(NamedTuple):
    """Of `sparse_prefill`: shapes and dtypes are those of `cupy_mla.sparse_prefill`, without axes of length 1.

    Attributes:
        layout: of the rows.
        q_scale, k_scale: what an e4m3 q and rows of layout PLAIN_FP8 are multiplied by: a float, or one float32.
        sink: [h_q], or None.
        length: [s_q], or None.
        out, max_logits, lse: are written.
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
    """Of `sparse_decode`: shapes and dtypes are those of `cupy_mla.sparse_decode`, without axes of length 1.

    Attributes:
        layout: of the cache.
        q_scale, k_scale: what an e4m3 q and rows of layout PLAIN_FP8 are multiplied by: a float, or one float32.
        sink: [h_q], or None.
        length: [b], of the main lists, or None.
        extra, extra_indices, extra_length: of the second cache, or None.
        extra_layout: of the second cache, where it is another than the first's; else None.
        num_splits: splits of each query's rows; None: to be chosen.
        out, lse: are written; None until `ops` has checked all else.
    """

    layout: Layout
    q: Operand
    cache: Operand
    indices: Operand
    sm_scale: float
    q_scale: Operand = 1.0
    k_scale: Operand = 1.0
    sink: Operand = None
    length: Operand = None
    extra: Operand = None
    extra_indices: Operand = None
    extra_length: Operand = None
    extra_layout: Layout | None = None
    num_splits: int | None = None
    out: Operand = None
    lse: Operand = None


class PrefillBackward(NamedTuple):
    """Of `sparse_prefill_backward`: shapes and dtypes are those of `cupy_mla.sparse_prefill_backward`, but kv
    [s_kv, d_qk] and indices [s_q, topk].

    Attributes:
        sink: [h_q], or None. length: [s_q], or None.
        d_lse: [s_q, h_q], or None.
        accumulate: add to what dkv holds.
        dq, dkv, d_sink: are written; d_sink is None without a sink.
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
    """Of `dense_decode`: shapes and dtypes are those of `cupy_mla.dense_decode`, without axes of length 1.

    Attributes:
        layout: of the cache.
        q_scale, k_scale: what an e4m3 q and rows of layout PLAIN_FP8 are multiplied by: a float, or one float32.
        window: rows that a query sees at most, the last ones; 0: all.
        sink: [h_q], or None.
        num_splits: splits of each request's rows; None: to be chosen.
        out, lse: are written.
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


class Target(NamedTuple):
    """Of `attention_target`, `dense_attention_target` and `dense_lse`: shapes and dtypes are those of these functions,
    but kv [s_kv, d_qk] and indices [s_q, topk].

    Attributes:
        lse: [s_q, h_q], or None: it is what is asked for.
        indices, length, starts, ends: lists [s_q, topk], and their lengths [s_q] or None; or the ranges of rows [s_q].
        sink: [h_q], or None.
        out: is written.
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
    """Of `indexer_loss` and `dense_indexer_loss`: shapes and dtypes are those of these, but indices [T, topk].

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
