"""The peers of the backward of sparse attention: TileLang's kernels as Megatron-Core ships them, and cuDNN frontend's.

`get_backward_peers.sh` packs them as `backward_*.tar.xz`; the folder CUPY_MLA_PEER_BACKWARD (default .peer-backward)
has these. Its kernels are compiled, for 64 and 128 heads, a topk of 2048 and the scale that is here. To compile
TileLang's for other heads, into the cache of a folder where its pack was unpacked (CUDA_HOME names a CUDA toolkit):

    python benchmarks/backward_peers.py FOLDER HEADS ...
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

D_QK, D_V, TOPK, SCALE = 576, 512, 2048, 192**-0.5
FOLDER = Path(os.environ.get("CUPY_MLA_PEER_BACKWARD", Path(__file__).resolve().parent.parent / ".peer-backward"))
FEWEST_HEADS = 16  # that TileLang's kernels multiply; fewer are padded
Backward = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class Inputs(NamedTuple):
    """What a backward takes.

    Attributes:
        q, dout, out: [s, h, 576] and twice [s, h, 512] bfloat16.
        kv: [s, 1, 576] bfloat16.
        lists: [s, topk] int32, -1 behind the last entry.
        lse: [s, h] float32, natural logarithm.
    """

    q: torch.Tensor
    kv: torch.Tensor
    lists: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor


class TileLang:
    """Megatron-Core's kernels: delta, the backward, which adds to rows by atomics in float32, and rounding.

    Args:
        heads: of a CTA, at most: 32 as Megatron-Core calls it; with 64 the settings are those of TileLang's example.
    """

    version = "Megatron-Core 0.19.2, TileLang 0.1.15"

    def __init__(self, heads: int) -> None:
        self.name = "tilelang" if heads == 32 else f"tilelang_{heads}"
        self.least = 1 if heads == 32 else heads
        self._settings = {"max_block_h": 32} if heads == 32 else {"max_block_h": 64, "num_stages": 0, "threads": 256}
        self.kernels = cache(self._kernels)

    def serves(self, heads: int) -> bool:
        return heads >= self.least

    def _kernels(self, heads: int) -> tuple[Any, Any, Any]:
        """Those for so many heads, from TileLang's cache where they are in it."""
        from megatron.core.transformer.experimental_attention_variant.ops import tilelang_sparse_mla_bwd as ops
        from tilelang import tvm

        # What is found in the cache changes which arguments its builder takes for results, a part of the next key.
        ops.preprocess.out_idx, ops.bwd.out_idx, ops.postprocess.out_idx = [-1], [-2], [-1]
        with tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}):
            backward = ops.bwd(heads, D_V, D_QK - D_V, TOPK, 1, SCALE, **self._settings)
            return ops.preprocess(heads, D_V), backward, ops.postprocess(D_V, D_QK - D_V, 1)

    def backward(self, a: Inputs) -> Backward:
        """A call that returns dq and dkv; heads that it pads are padded before."""
        q, out, dout, lse = (_padded(x, FEWEST_HEADS)[None] for x in (a.q, a.out, a.dout, a.lse * math.log2(math.e)))
        kv, lists, heads = a.kv[None], a.lists[None, :, None], a.q.shape[1]
        delta, backward, rounded = self.kernels(q.shape[2])

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            dkv = torch.zeros(kv.shape, device="cuda", dtype=torch.float32)
            dq = backward(q, kv, dout, lists, lse, delta(out, dout), dkv)
            return dq[0, :, :heads], rounded(dkv)[0]

        return call


class Cudnn:
    """cuDNN frontend's kernels for SM90: delta, the backward, which adds to rows by float32 reductions, and rounding.

    Args:
        folder: where its pack was unpacked.
    """

    name, version = "cudnn", "cuDNN frontend 1.32.0"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _kernels(self) -> Any:
        import tvm_ffi

        ctypes.CDLL(str(self._folder / "cudnn/libcute_dsl_runtime.so"), ctypes.RTLD_GLOBAL)
        return tvm_ffi.load_module(str(self._folder / "cudnn/dsa.so"))

    def serves(self, heads: int) -> bool:
        return heads in (64, 128)

    def backward(self, a: Inputs) -> Backward:
        """A call that returns dq and dkv."""
        (s, heads, _), padded = a.q.shape, -(-len(a.q) // 64) * 64
        before, after = self._kernels["dsa_pre"], self._kernels["dsa_post"]
        main = self._kernels[f"dsa_main_h{heads}_k{a.lists.shape[1]}"]
        sink = torch.full((heads,), -math.inf, device="cuda")
        q, kv, out, dout, lse, lists = a.q[None], a.kv[None], a.out[None], a.dout[None], a.lse[None], a.lists[None]

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            delta, lse2 = (torch.empty(1, padded, heads, device="cuda") for _ in range(2))
            sums, d_sink = torch.zeros(1, 1, padded * D_QK, device="cuda"), torch.zeros(heads, device="cuda")
            dq, dkv = torch.empty_like(q), torch.empty_like(kv)
            before(out, dout, delta, lse, lse2, sink, d_sink, None, None, None)
            main(q, kv, dout, lse2, delta, dq, sums, lists, None, SCALE)
            after(sums, dkv, s)
            return dq[0], dkv[0]

        return call


def _padded(x: torch.Tensor, heads: int) -> torch.Tensor:
    """With heads of zeros up to so many."""
    missing = max(heads - x.shape[1], 0)
    return torch.cat([x, x.new_zeros(len(x), missing, *x.shape[2:])], 1) if missing else x


def unpacked() -> Path | None:
    """A new folder with what the packs hold; None where there are none."""
    packs = sorted(FOLDER.glob("backward_*.tar.xz"))
    if not packs:
        return None
    folder = Path(tempfile.mkdtemp())
    running = [subprocess.Popen(["tar", "xJf", pack, "-C", folder]) for pack in packs]
    for pack, process in zip(packs, running, strict=True):
        if process.wait():
            sys.exit(f"{pack} cannot be unpacked")
    return folder


def use(folder: Path) -> None:
    """Let Python find what is in a folder of unpacked packs. Both hold the same tvm_ffi, of which one may be loaded."""
    site = next(folder / name for name in ("site", "cudnn_site") if (folder / name).is_dir())
    sys.path.insert(0, str(site))
    os.environ["TILELANG_CACHE_DIR"] = str(folder / "tlcache")


def peers(folder: Path) -> list[TileLang | Cudnn]:
    """All that the packs hold. Libraries are loaded once they are called."""
    use(folder)
    tilelang = [TileLang(32), TileLang(64)] if (folder / "tlcache").is_dir() else []
    return [*([Cudnn(folder)] if (folder / "cudnn").is_dir() else []), *tilelang]


if __name__ == "__main__":
    use(Path(sys.argv[1]))
    for number in map(int, sys.argv[2:]):
        TileLang(32).kernels(number)
        print(f"compiled for {number} heads", flush=True)
