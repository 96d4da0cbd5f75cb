"""The same tokens through training, prefill and decode, to the same bits; lists of serving are replayed in training."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

import cupy_mla

from .cases import latent, queries, sinks
from .kinds import BF16, NumPy

BLOCK_SIZE = 16
SCALE = 0.05


def causal_lists(rng: np.random.Generator, places: np.ndarray, topk: int) -> np.ndarray:
    """[T, topk] positions in a token's own sequence up to its own place in it, in any order, -1 anywhere. The last
    list is as long as can be."""
    lists = np.full((len(places), topk), -1, np.int32)
    most = rng.integers(1, topk + 1, len(places))
    most[-1] = topk
    for row, place, count in zip(lists, places, most, strict=True):
        chosen = rng.permutation(place + 1)[:count]
        row[rng.permutation(topk)[: len(chosen)]] = chosen
    return lists


def check_forwards_agree(
    kind: NumPy,
    rng: np.random.Generator,
    h_q: int,
    lengths: tuple[int, ...],
    topk: int,
    num_splits: int | None = 1,
    autograd: bool = True,
    *,
    d_qk: int = 576,
    newest: int | None = None,
    options: bool = False,
) -> None:
    """Over sequences of such lengths, packed in training, in blocks of a cache in serving.

    Args:
        autograd: training is looked at, too, where arrays are torch's; emulated calls cannot be custom operations.
        newest: so many tokens of each sequence attend, the last ones; None: all.
        options: with sinks, and lists that end at a length.
    """
    tokens, blocks = sum(lengths), [-(-n // BLOCK_SIZE) for n in lengths]
    sequence = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    first = np.cumsum([0, *lengths[:-1]], dtype=np.int32)
    table = np.full((len(lengths), max(blocks)), -1, np.int32)
    free = rng.permutation(sum(blocks) + 3).astype(np.int32)
    for row, count in zip(table, blocks, strict=True):
        row[:count], free = free[:count], free[count:]
    place = np.arange(tokens) - first[sequence]
    slot_mapping = table[sequence, place // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + place % BLOCK_SIZE

    attend = place >= np.array(lengths)[sequence] - (newest or tokens)
    count = int(attend.sum())
    q, kv = kind.put(queries(rng, count, 1, h_q, d_qk)), kind.put(latent(rng, tokens, d_qk).astype(BF16))
    held = np.full((sum(blocks) + 3, BLOCK_SIZE, d_qk), np.nan, BF16)
    if d_qk == 512:
        held.reshape(-1, d_qk)[slot_mapping] = kind.take(kv)
    cache = kind.put(held)
    if d_qk == 576:
        cupy_mla.concat_and_cache_mla(kv[:, :512], kv[:, 512:], cache, kind.put(slot_mapping))
    chosen = [kind.put(x) for x in (sequence[attend], table, causal_lists(rng, place[attend], topk))]
    slots = cupy_mla.convert_req_index_to_global_index(*chosen, BLOCK_SIZE)
    rows = cupy_mla.convert_req_index_to_global_index(*chosen, BLOCK_SIZE, chosen[0], kind.put(first))
    check_rows_of_slots(kind.take(rows), kind.take(slots), slot_mapping)

    sink = kind.put(sinks(rng, h_q)) if options else None
    length = kind.put(np.append(rng.integers(0, topk, count - 1), topk).astype(np.int32)) if options else None

    def settings(part: slice) -> dict[str, Any]:
        return {"attn_sink": sink, "topk_length": None if length is None else length[part]}

    def decode(part: slice) -> list[bytes]:
        out, lse = cupy_mla.sparse_decode(
            q[part], cache, slots[part, None], SCALE, num_splits=num_splits, batch_invariant=True,
            **settings(part),
        )  # fmt: skip
        return bits(kind, out[:, 0], lse[:, :, 0])

    def prefill(part: slice) -> list[bytes]:
        out, _, lse = cupy_mla.sparse_prefill(q[part, 0], kv[:, None], rows[part, None], SCALE, **settings(part))
        return bits(kind, out, lse)

    every, late = slice(None), slice(count - 3, count)
    assert decode(every) == prefill(every)
    assert decode(late) == prefill(late)
    assert all(alone in whole for alone, whole in zip(decode(late), decode(every), strict=True))
    if autograd and kind.name.startswith("torch"):
        check_training(q[:, 0], kv[:, None], rows[:, None], prefill(every), kind, **settings(every))


def check_rows_of_slots(rows: np.ndarray, slots: np.ndarray, slot_mapping: np.ndarray) -> None:
    """Rows of a training's arrays are also found by the slots into which their tokens were written."""
    row_of_slot = np.full(slot_mapping.max() + 1, -1, np.int32)
    row_of_slot[slot_mapping] = np.arange(len(slot_mapping))
    assert np.array_equal(np.where(slots >= 0, row_of_slot[slots], -1), rows)


def check_training(q: Any, kv: Any, rows: Any, want: list[bytes], kind: NumPy, **more: Any) -> None:
    """The forward that keeps what a backward needs has the same bits, also compiled and checkpointed, and gradients of
    the replayed lists."""
    torch, checkpoint = (importlib.import_module(name) for name in ("torch", "torch.utils.checkpoint"))
    given = [x.detach().clone().requires_grad_() for x in (q, kv)]
    found: list[list[bytes]] = []

    def forward(q: Any, kv: Any) -> tuple[Any, Any]:
        out, _, lse = cupy_mla.sparse_prefill(q, kv, rows, SCALE, **more)
        return out, lse

    def noted(q: Any, kv: Any) -> tuple[Any, Any]:
        results = forward(q, kv)
        found.append(bits(kind, *results))
        return results

    def checkpointed(q: Any, kv: Any) -> tuple[Any, Any]:
        with checkpoint.set_checkpoint_early_stop(False):  # so that the second forward returns
            results: tuple[Any, Any] = checkpoint.checkpoint(noted, q, kv, use_reentrant=False)
        return results

    torch._dynamo.reset()
    compiled, gradients = torch.compile(forward, fullgraph=True, backend="aot_eager"), []
    for run in (forward, compiled, checkpointed):
        out, lse = run(*given)
        assert bits(kind, out, lse) == want, run
        gradients.append(torch.autograd.grad(out.float().square().sum(), given))
        assert all(x.isfinite().all() and x.any() for x in gradients[-1])
    assert found == [want, want], "the second forward of a checkpoint"
    assert all(bits(kind, *others) == bits(kind, *gradients[0]) for others in gradients)
    torch._dynamo.reset()


def bits(kind: NumPy, *arrays: Any) -> list[bytes]:
    return [np.ascontiguousarray(kind.take(x)).tobytes() for x in arrays]
