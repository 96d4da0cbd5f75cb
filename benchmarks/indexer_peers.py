"""The indexer's peers: DeepGEMM's logits and vLLM's compiled top-k, in a folder that `get_indexer_peers.sh` filled.

Two versions cannot be loaded by one process, so each is timed by a process of its own: a `PeerProcess`.
"""

from __future__ import annotations

import lzma
import multiprocessing
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from harness import NO_PEER, ROOT

LIBRARY = "vllm_C.so"
WORKSPACE_BYTES = 1 << 20  # of vLLM's top-k
FOLDERS = os.environ.get("CUPY_MLA_INDEXER_PEERS", f"{ROOT}/.peer-indexer:{ROOT}/.peer-indexer-033").split(":")
SPAWN = multiprocessing.get_context("spawn")


def unpack(folder: Path) -> Path:
    """`deep_gemm.tar.xz` and `vllm_C.so.xz` of a folder, unpacked into a new one of its name."""
    unpacked = Path(tempfile.mkdtemp()) / folder.name
    with tarfile.open(folder / "deep_gemm.tar.xz") as archive:
        archive.extractall(unpacked, filter="data")
    (unpacked / LIBRARY).write_bytes(lzma.decompress((folder / f"{LIBRARY}.xz").read_bytes()))
    return unpacked


class Peers:
    """What an unpacked folder holds.

    Attributes:
        names: of vLLM's top-k kernels for decode that are there.
    """

    def __init__(self, unpacked: Path, topk: bool = True) -> None:
        os.environ.setdefault("DG_JIT_CACHE_DIR", str(Path(tempfile.gettempdir()) / "deep_gemm_cache"))
        sys.path.insert(0, str(unpacked))
        import deep_gemm

        self._gemm: Any = deep_gemm
        self._legacy = hasattr(deep_gemm, "fp8_mqa_logits")
        if not topk:
            return
        torch.ops.load_library(str(unpacked / LIBRARY))
        self._ops = torch.ops._C
        self._workspace = torch.zeros(WORKSPACE_BYTES, device="cuda", dtype=torch.uint8)
        self.names = [n for n in ("persistent_topk", "cooperative_topk") if hasattr(self._ops, n)] + ["per_row"]

    def logits(
        self, q8: torch.Tensor, k8: torch.Tensor, ks: torch.Tensor, w: torch.Tensor, starts: torch.Tensor, ends: Any
    ) -> torch.Tensor:
        """Logits, -inf not written."""
        if self._legacy:
            return self._gemm.fp8_mqa_logits(q8, (k8, ks), w, starts, ends, clean_logits=False)
        return self._gemm.fp8_fp4_mqa_logits((q8, None), (k8, ks), w, starts, ends, len(k8))

    def schedule(self, lens: torch.Tensor) -> torch.Tensor:
        """What the paged logits need of the lengths; made once a step, outside of what is timed."""
        return self._gemm.get_paged_mqa_logits_metadata(lens, 64, self._gemm.get_num_sms())

    def paged_logits(
        self, q8: torch.Tensor, cache: torch.Tensor, w: torch.Tensor, lens: torch.Tensor, table: torch.Tensor,
        schedule: torch.Tensor, longest: int,
    ) -> torch.Tensor:  # fmt: skip
        """Logits over the paged cache, -inf not written."""
        cache = cache.unsqueeze(2)
        if self._legacy:
            return self._gemm.fp8_paged_mqa_logits(
                q8, cache, w, lens, table, schedule, longest, clean_logits=False
            )  # fmt: skip
        return self._gemm.fp8_fp4_paged_mqa_logits((q8, None), cache, w, lens, table, schedule, longest)

    def topk_prefill(
        self, logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        self._ops.top_k_per_row_prefill(
            logits, starts, ends, out, len(logits), logits.stride(0), logits.stride(1), out.shape[1]
        )
        return out

    def topk_decode(self, name: str, logits: torch.Tensor, lens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Top-k of rows [B * n] of lengths [B, n] by one of `names`."""
        if name == "per_row":
            self._ops.top_k_per_row_decode(
                logits, lens.shape[1], lens, out, len(logits), logits.stride(0), logits.stride(1), out.shape[1]
            )
        else:
            getattr(self._ops, name)(logits, lens, out, self._workspace, out.shape[1], logits.shape[1])
        return out


@contextmanager
def complaining(who: str) -> Iterator[None]:
    """Print what a peer says when it cannot serve a call."""
    try:
        yield
    except (RuntimeError, TypeError, AttributeError) as error:  # the last one: an operation that this version lacks
        print(f"{who}: {str(error)[:200]}", file=sys.stderr, flush=True)


def answer_each(pipe: Connection, answer: Callable[[Any], Any]) -> None:
    """What a peer's process does: it says that it is ready, then answers one question after the other."""
    pipe.send("ready")
    while True:
        pipe.send(answer(pipe.recv()))
        torch.cuda.empty_cache()


class PeerProcess:
    """A version of the peers. `ask` it one question at a time.

    Args:
        folder: unpacked.
        serve: what runs there, with a pipe and the folder: it ends with `answer_each`.
    """

    def __init__(self, folder: Path, serve: Callable[[Connection, Path], None]) -> None:
        self.name = folder.name
        self._pipe, pipe = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(pipe, folder), daemon=True)
        self.process.start()
        pipe.close()

    def answer(self, deadline: float) -> Any:
        """Of the last question; None where the process has ended or is too late."""
        try:
            return self._pipe.recv() if self._pipe.poll(max(deadline - time.monotonic(), 0)) else None
        except (EOFError, OSError):
            return None

    def ask(self, question: Any, deadline: float) -> dict[str, Any]:
        """What it says to a question, by the peers' names and versions."""
        try:
            self._pipe.send(question)
        except OSError:
            return {}
        return {f"{name} ({self.name})": said for name, said in (self.answer(deadline) or {}).items()}


def unpacked() -> list[Path]:
    """The folders of FOLDERS that are there. A program ends where there are none, with status NO_PEER."""
    with ThreadPoolExecutor() as pool:
        folders = list(pool.map(unpack, (Path(folder) for folder in FOLDERS if Path(folder).is_dir())))
    if not folders:
        print("no peer: CUPY_MLA_INDEXER_PEERS names no folder that get_indexer_peers.sh filled", file=sys.stderr)
        sys.exit(NO_PEER)
    return folders


def ready(processes: list[PeerProcess], deadline: float) -> list[PeerProcess]:
    """Those that have come up. A program ends where none has."""
    up = [process for process in processes if process.answer(deadline) == "ready"]
    if not up:
        sys.exit("no peer came up")
    return up
