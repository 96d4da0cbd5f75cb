"""Operations of an indexer whose keys stand for pools of `kpool` neighbouring tokens (GLM-5.3-Flash).

Tokens `i * kpool` to `i * kpool + kpool - 1` of a sequence are pool i. Its key is made when the last of them is there.
A query token at position p sees the `(p + 1) // kpool` complete pools. Its list has the tokens of the chosen pools, and
always the `(p + 1) % kpool` tokens behind the last complete pool (the tail).

Keys of complete pools lie in the indexer's cache like keys of tokens, `block_size // kpool` in a block. Tokens of a
pool that is not complete yet wait in a ring, one for each request, where token i has place `i % ring`. A ring of at
least `kpool + num_speculative_tokens` tokens has all that is needed when drafted tokens are dropped.

Source: GLM-5.3-Flash (Glm5Next) of transformers; the contracts are those of vLLM's backend.
"""

from __future__ import annotations

from .. import arrays
from ..arguments import PooledKeys
from ..bridges import bind
from ..calls.operation import operation
from ..checks.options import LARGEST_INT, require_integer
from ..checks.values import check_lengths, check_offsets
from ..cuda import pools as cuda
from ..dtypes import BFLOAT16, FLOAT32, INT32
from ..reference import pools as reference
from ..typing import A, AnyArray

__all__ = ["expand_pools_and_append_tail", "kpool_compress"]

D = 128  # values of a key


@operation
def kpool_compress(
    k: A,
    gate: AnyArray,
    ape: AnyArray,
    tail: AnyArray,
    tail_blocks: AnyArray,
    query_start_loc: AnyArray,
    seq_lens: AnyArray,
    *,
    out: A | None = None,
) -> A:
    """Keys of the pools that a step's tokens complete. Tokens that later steps need are written to the rings.

    A pool's key is, value by value, the mean of its tokens' keys, weighted by the softmax of `gate + ape` over the pool
    (token j of it has `ape[j]`); rounded to bfloat16, multiplied by the Hadamard matrix of 128 (Sylvester's order) over
    sqrt(128), and rounded to bfloat16 again. `indexer_k_quant_and_cache` packs it, with slots from
    `get_compressed_slot_mapping(..., compress_ratio=kpool)`. The indexer's queries meet it after the same transform.

    Args:
        k: [T, 128] bfloat16 keys of the step's tokens, normalised, any strides with a contiguous last axis.
        gate: [T, 128] bfloat16 their gates, `linear(hidden, gate_weight)`.
        ape: [kpool, 128] float32 added to the gates of each place in a pool.
        tail: [B, 2, ring, 128] bfloat16 rings of keys and gates, with ring >= kpool; written in place.
        tail_blocks: [R] int32 ring of each request; a request whose number is not in 0 .. B - 1 has no ring.
        query_start_loc: [R + 1] int32 first token of each request. Tokens behind the last request belong to none.
        seq_lens: [R] int32 tokens of each sequence, those of this step included.
        out: [T, 128] bfloat16, written in place when given.

    Returns:
        [T, 128] bfloat16: row t is the key of the pool that token t completes; zeros if it completes none, or if the
        pool's earlier tokens are in no ring.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: `query_start_loc` goes down or a length is negative.

    Example:
        >>> k, gate = np.ones((5, 128), bfloat16), np.zeros((5, 128), bfloat16)
        >>> ape, tail = np.zeros((4, 128), np.float32), np.zeros((1, 2, 4, 128), bfloat16)
        >>> ring, starts, lengths = np.array([0], np.int32), np.array([0, 5], np.int32), np.array([5], np.int32)
        >>> keys = cupy_mla.kpool_compress(k, gate, ape, tail, ring, starts, lengths)
        >>> keys[:, 0].tolist(), int(tail[0, 0, 0, 0])  # tokens 0 to 3 are a pool; token 4 waits in place 0
        ([0.0, 0.0, 0.0, 11.3125, 0.0], 1)
    """
    place, (k_, gate_, ape_, rings, blocks, starts, seq) = bind(
        k=k, gate=gate, ape=ape, tail=tail, tail_blocks=tail_blocks, query_start_loc=query_start_loc, seq_lens=seq_lens
    )
    (out_,) = place.optional(out=out)
    tokens = k_.require(BFLOAT16, "T", D).shape[0]
    gate_.require(BFLOAT16, tokens, D)
    kpool = ape_.require(FLOAT32, "kpool", D).shape[0]
    ring = rings.require(BFLOAT16, "B", 2, "ring", D).require_writable().shape[2]
    if not 1 <= kpool <= ring:
        raise ValueError(f"ape: expected pools of 1 to {ring} tokens, as many as a ring of tail holds, got {kpool}")
    if rings.strides[1:3] != (ring * D, D):
        raise ValueError(f"tail: rings must have no gaps, got strides {list(rings.strides)} (in items)")
    requests = seq.require(INT32, "R").shape[0]
    blocks.require(INT32, requests)
    starts.require(INT32, requests + 1)
    out_ = place.output("out", out_, (tokens, D), BFLOAT16)
    if arrays.CHECK_VALUES:
        check_offsets(starts)
        check_lengths(seq)
    place.call(
        cuda.kpool_compress, reference.kpool_compress, PooledKeys(k_, gate_, ape_, rings, blocks, starts, seq, out_)
    )
    return out_.obj


@operation
def expand_pools_and_append_tail(
    pool_ids: A, seq_lens: AnyArray, kpool: int, *, out: A | None = None, lens: AnyArray | None = None
) -> tuple[A, A]:
    """Positions of the tokens of chosen pools, in the pools' order, and behind them those of each token's tail.

    A list has no gaps: the tail follows the last chosen pool, and -1 the tail. (In vLLM the tail starts at column
    `n * kpool`, with -1 before it. `SparseMLAImpl.forward_mqa` takes such lists, too.)

    Args:
        pool_ids: [T, n] int32 pools that were chosen for each query token, each once. Entries that are no complete pool
            of its context, such as -1, are left out.
        seq_lens: [T] int32 tokens that each query token sees, itself included: its position + 1.
        kpool: tokens of a pool.
        out: [T, n * kpool + kpool - 1] int32, written in place when given.
        lens: [T] int32, written in place when given.

    Returns:
        [T, n * kpool + kpool - 1] int32 positions, and [T] int32 how many each list has. `SparseMLAImpl.forward_mqa`
        takes them as `topk_indices` and `valid_counts`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, device or strides; nothing is written.
        IndexError: under `cupy_mla.set_checks`: a length is negative.

    Example:
        >>> pools, seen = np.array([[2, 0], [1, -1]], np.int32), np.array([14, 8], np.int32)
        >>> positions, lens = cupy_mla.expand_pools_and_append_tail(pools, seen, kpool=4)
        >>> positions.tolist(), lens.tolist()
        ([[8, 9, 10, 11, 0, 1, 2, 3, 12, 13, -1], [4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1]], [10, 4])
    """
    kpool = require_integer("kpool", kpool, 1)
    place, (chosen, seen) = bind(pool_ids=pool_ids, seq_lens=seq_lens)
    out_, lens_ = place.optional(out=out, lens=lens)
    tokens, n = chosen.require(INT32, "T", "n").shape
    if n * kpool + kpool - 1 > LARGEST_INT:
        raise ValueError(f"kpool: int32 cannot count the tokens of {n} pools of {kpool}")
    seen.require(INT32, tokens)
    out_ = place.output("out", out_, (tokens, n * kpool + kpool - 1), INT32)
    lens_ = place.output("lens", lens_, (tokens,), INT32)
    if arrays.CHECK_VALUES:
        check_lengths(seen)
    place.call(
        cuda.expand_pools_and_append_tail, reference.expand_pools_and_append_tail, chosen, seen, kpool, out_, lens_
    )  # fmt: skip
    return out_.obj, lens_.obj
