"""Context parallelism on `torch.distributed`: NCCL between GPUs, gloo between processes on the CPU.

Each rank holds a part of every request's rows (`cupy_mla.ops.context_parallel` says which) and, by tensor parallelism,
a part of the heads. For attention, each rank gathers the queries of all heads and attends over its own rows. The
partial results are then exchanged, and each rank merges those of its own heads::

    ranks = ContextParallel(group)
    gathering = ranks.start_gathering(q)                 # beside the indexer
    chosen = ranks.select(logits, positions, k)          # indexer: top-k of all ranks' keys
    local, length = ranks.localize_topk(chosen)          # of those, this rank's
    out, lse = ranks.attend(gathering, cache, slots, sm_scale, topk_length=length)

No method waits for a GPU. With NCCL a CUDA graph can therefore capture all of them, after a first call has connected
the ranks. Delete the graph before `destroy_process_group`, which would wait for it. All ranks must call the same
methods in the same order, with equally many query tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..checks.options import require_integer
from ..layouts import D_V
from ..ops.attention import sparse_decode
from ..ops.context_parallel import globalize_topk, local_seq_lens, localize_topk, merge_attention, merge_topk

# bfloat16 values that ranks exchange per query token and head: the output, the lse (a float32, two values), and six
# that are unused, so that each row starts at a multiple of 16 bytes.
ROW = D_V + 8

_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # newer torch, older torch


class Gathering:
    """A gathering of queries that is under way: the result of `ContextParallel.start_gathering`."""

    def __init__(self, q: torch.Tensor, work: dist.Work | None) -> None:
        self._q, self._work = q, work

    def wait(self) -> torch.Tensor:
        """The queries [T, world_size * h, d]. Kernels launched from now on run after the queries have arrived."""
        if self._work is not None:
            self._work.wait()
        return self._q


class ContextParallel:
    """Context parallelism for one rank of a process group.

    Attributes:
        group: the process group; None: all processes.
        world_size: number of ranks.
        rank: number of this rank.
        interleave: number of neighbouring tokens of a request that lie on the same rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, interleave: int = 1) -> None:
        """
        Args:
            group: the process group; None: all processes.
            interleave: number of neighbouring tokens of a request that lie on the same rank.

        Raises:
            TypeError, ValueError: `interleave` is no positive integer.
            ValueError: torch.distributed is not initialised, or this process is no member of the group.
        """
        if not dist.is_initialized():
            raise ValueError("call torch.distributed.init_process_group first")
        self.group = group
        self.world_size: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)
        self.interleave: int = require_integer("interleave", interleave, 1)
        if self.rank < 0:
            raise ValueError("group: this process is none of its ranks")

    def local_seq_lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """How many tokens of each request lie on this rank: `cupy_mla.local_seq_lens`."""
        return local_seq_lens(seq_lens, self.world_size, self.rank, self.interleave)

    def localize_topk(self, topk_indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen positions that lie on this rank, as positions in its cache: `cupy_mla.localize_topk`."""
        return localize_topk(topk_indices, self.world_size, self.rank, self.interleave)

    def select(self, logits: torch.Tensor, positions: torch.Tensor, k: int) -> torch.Tensor:
        """The k keys with the largest logits among those of all ranks.

        Args:
            logits: [T, width] float32 of this rank's keys.
            positions: [T, K] int32, the result of `cupy_mla.topk_indices` on `logits`. K must be the same on all ranks,
                and k at least for the result to be exact.
            k: number of keys, 1 to 4096.

        Returns:
            [T, k] int32 positions in the requests, ascending, -1 behind the last; the same on all ranks.
        """
        sent = positions.new_empty((2, *positions.shape))
        globalize_topk(
            logits, positions, self.world_size, self.rank, self.interleave,
            values=sent[0].view(torch.float32), out=sent[1],
        )  # fmt: skip
        found = sent.new_empty((self.world_size, *sent.shape))
        _all_gather(found.flatten(0, 1), sent, group=self.group)
        return merge_topk(found[:, 0].view(torch.float32), found[:, 1], k)

    def gather_heads(self, q: torch.Tensor) -> torch.Tensor:
        """The queries of all ranks' heads.

        Args:
            q: [T, h, d] of this rank's heads. It is not copied if heads are the outer axis in memory.

        Returns:
            [T, world_size * h, d]; heads are the outer axis in memory.
        """
        return self._gather(q, False).wait()

    def start_gathering(self, q: torch.Tensor) -> Gathering:
        """`gather_heads` that runs beside the kernels launched next. `attend` takes the result and waits for it."""
        return self._gather(q, True)

    def _gather(self, q: torch.Tensor, beside: bool) -> Gathering:
        sent = q.transpose(0, 1).contiguous()
        heads, tokens, d = sent.shape
        gathered = sent.new_empty((self.world_size * heads, tokens, d))
        work = _all_gather(gathered.view(torch.uint8), sent.view(torch.uint8), group=self.group, async_op=beside)
        return Gathering(gathered.transpose(0, 1), work)

    def attend(
        self,
        q: torch.Tensor | Gathering,
        k_cache: torch.Tensor,
        indices: torch.Tensor,
        sm_scale: float,
        *,
        topk_length: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of this rank's heads over the rows of all ranks.

        Args:
            q: [T, h, d_qk] bfloat16 of this rank's heads, or the result of `start_gathering` of these.
            k_cache: this rank's rows, as for `cupy_mla.sparse_decode`.
            indices: [T, K] int32 slots of this rank's cache.
            sm_scale: factor on the dot products before the softmax.
            topk_length: [T] int32 lengths of lists; entries behind them are not read.
            attn_sink: [h] float32 of this rank's heads.

        Returns:
            out [T, h, 512] bfloat16 and lse [T, h] float32 of this rank's heads.

        Raises:
            TypeError, ValueError: as `cupy_mla.sparse_decode`.
        """
        everyones = q.wait() if isinstance(q, Gathering) else self.gather_heads(q)
        tokens, heads, _ = everyones.shape
        sent = everyones.new_empty((heads, tokens, ROW))
        out, lse = _parts(sent)
        sparse_decode(
            everyones[:, None], k_cache, indices[:, None], sm_scale, topk_length=topk_length, out=out[:, None],
            lse=lse[:, :, None],
        )  # fmt: skip
        return self._merge(sent, attn_sink)

    def merge(
        self, out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of this rank's heads over the rows of all ranks, from each rank's attention over its own rows.

        `attend` includes this step. Call it after any other attention of `gather_heads`' queries, for instance
        `cupy_mla.sparse_prefill`.

        Args:
            out: [T, world_size * h, 512] bfloat16 over this rank's rows, without the sink.
            lse: [T, world_size * h] float32; infinite where a query token has no row on this rank.
            attn_sink: [h] float32 of this rank's heads.

        Returns:
            out [T, h, 512] bfloat16 and lse [T, h] float32 of this rank's heads.
        """
        tokens, heads, _ = out.shape
        sent = out.new_empty((heads, tokens, ROW))
        for part, given in zip(_parts(sent), (out, lse), strict=True):
            part.copy_(given)
        return self._merge(sent, attn_sink)

    def _merge(self, sent: torch.Tensor, attn_sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Send each rank the partial results of its heads, rows [heads, T, ROW], and merge those received."""
        got = torch.empty_like(sent)
        dist.all_to_all_single(got.view(torch.uint8), sent.view(torch.uint8), group=self.group)
        outs, lses = _parts(got.unflatten(0, (self.world_size, -1)))
        return merge_attention(outs, lses, attn_sink)


def _parts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of out [..., T, heads, 512] and lse [..., T, heads] in rows [..., heads, T, ROW]."""
    lse = rows[..., D_V : D_V + 2].view(torch.float32)[..., 0]
    return rows[..., :D_V].transpose(-3, -2), lse.transpose(-2, -1)
