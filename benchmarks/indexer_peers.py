"""The indexer's peers: DeepGEMM's logits and vLLM's compiled top-k, in a folder that `get_indexer_peers.sh` filled.

Two versions cannot be loaded by one process, so each is timed by a process of its own (`indexer.py`).
"""

from __future__ import annotations

import lzma
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

LIBRARY = "vllm_C.so"
WORKSPACE_BYTES = 1 << 20  # of vLLM's top-k


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
