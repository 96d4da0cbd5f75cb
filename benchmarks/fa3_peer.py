"""FlashAttention 3 as the peer of bf16 decode: of sparse decode with pages of one row, whose page tables are the lists;
of dense decode with pages of 64 rows.

Its library is `fa3.so.xz` (shared/peers/get_fa3.sh) in the folder CUPY_MLA_PEER_FA3, by default .peer-fa3.
"""

from __future__ import annotations

import lzma
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import NO_PEER, ROOT, Call

D_V = 512
Set = dict[str, torch.Tensor]


@cache
def fa3_peer() -> Any:
    """Its operations; the program ends where there are none, with status NO_PEER."""
    packed = Path(os.environ.get("CUPY_MLA_PEER_FA3", ROOT / ".peer-fa3")) / "fa3.so.xz"
    if not packed.exists():
        print(f"FlashAttention 3 was not found: {packed}", file=sys.stderr)
        sys.exit(NO_PEER)
    with tempfile.NamedTemporaryFile(suffix=".so") as library, lzma.open(packed) as file:
        shutil.copyfileobj(file, library)
        library.flush()
        torch.ops.load_library(library.name)
    return torch.ops._vllm_fa3_C


def fa3_calls(sets: list[Set], valid: int | None = None) -> list[Call]:
    """One decode a set. All calls share one schedule, which is planned in the first.

    Args:
        valid: the entries of each list that are rows, the first ones; None: all.
    """
    planned: list[torch.Tensor | None] = [None]
    return [_call(s, planned, number == 0, valid) for number, s in enumerate(sets)]


def _call(s: Set, planned: list[torch.Tensor | None], plans: bool, valid: int | None) -> Callable[[], torch.Tensor]:
    """A decode of an input set, [b, s_q, h, 512]: each query is a request of its own."""
    q, rows, lists = s["q"], s["k_cache"], s["indices"].flatten(0, 1)
    (b, s_q, h, d), topk = q.shape, lists.shape[-1]
    lines, rows = q.flatten(0, 1), rows.view(-1, 1, 1, d)
    q_nope, q_rope = lines[..., :D_V], lines[..., D_V:]
    starts = torch.arange(b * s_q + 1, device=q.device, dtype=torch.int32)
    lengths = torch.full((b * s_q,), topk if valid is None else valid, device=q.device, dtype=torch.int32)
    ops = fa3_peer()

    def run() -> torch.Tensor:
        if plans:
            planned[:] = [
                ops.get_scheduler_metadata(
                    b * s_q, 1, topk, h, 1, d - D_V, D_V, q.dtype, lengths, starts, None, None, None, None, 1, 0,
                    True, -1, -1, False, 0, None, 0,
                )
            ]  # fmt: skip
        out, *_ = ops.fwd(
            q_rope, rows[..., D_V:], rows[..., :D_V], None, None, q_nope, None, starts, None, None, None, lengths, 1,
            topk, lists, None, None, None, None, None, None, None, None, d**-0.5, True, -1, -1, 0.0, True, planned[0],
            0, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return out.view(b, s_q, h, D_V)

    return run


def fa3_dense_calls(sets: list[Set]) -> list[Call]:
    """One dense decode a set, [b, s_q, h, 512]. All calls share one schedule, which is planned in the first."""
    planned: list[torch.Tensor | None] = [None]
    return [_dense_call(s, planned, number == 0) for number, s in enumerate(sets)]


def _dense_call(s: Set, planned: list[torch.Tensor | None], plans: bool) -> Callable[[], torch.Tensor]:
    q, rows, table, lengths = s["q"], s["k_cache"], s["table"], s["lengths"]
    (b, s_q, h, d), (_, page, _, _) = q.shape, rows.shape
    lines, longest = q.flatten(0, 1), table.shape[1] * page
    q_nope, q_rope = lines[..., :D_V], lines[..., D_V:]
    starts = s_q * torch.arange(b + 1, device=q.device, dtype=torch.int32)
    ops = fa3_peer()

    def run() -> torch.Tensor:
        if plans:
            planned[:] = [
                ops.get_scheduler_metadata(
                    b, s_q, longest, h, 1, d - D_V, D_V, q.dtype, lengths, starts, None, None, None, None, page, 0,
                    True, -1, -1, False, 0, None, 0,
                )
            ]  # fmt: skip
        out, *_ = ops.fwd(
            q_rope, rows[..., D_V:], rows[..., :D_V], None, None, q_nope, None, starts, None, None, None, lengths,
            s_q, longest, table, None, None, None, None, None, None, None, None, d**-0.5, True, -1, -1, 0.0, True,
            planned[0], 0, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return out.view(b, s_q, h, D_V)

    return run
