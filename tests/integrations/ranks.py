"""Runs a program in several processes at once, which find each other by `torch.distributed`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
START = """
import sys
import numpy as np
import torch, torch.distributed as dist
import cupy_mla

folder, backend = sys.argv[1:3]
dist.init_process_group(backend)
me = dist.get_rank()
place = f"cuda:{me}" if backend == "nccl" else "cpu"
if backend == "nccl":
    torch.cuda.set_device(me)
"""
END = """
dist.destroy_process_group()
"""


def start(number: int, *program: str) -> subprocess.CompletedProcess[str]:
    """Run so many processes of a program, a file or `-m` and a module, and its arguments."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}", *program]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def run(program: str, folder: Path, backend: str, ranks: int, *arguments: object) -> None:
    """Run what comes between START and END; it knows `folder`, `backend`, its rank `me` and the device `place`.

    Args:
        backend: "gloo", on the CPU, or "nccl", a GPU a process; skips the test where there are fewer GPUs.
        arguments: sys.argv[3:].
    """
    if backend == "nccl":
        import torch

        if torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs")
    file = folder / "rank.py"
    file.write_text(START + program + END)
    done = start(ranks, str(file), str(folder), backend, *map(str, arguments))
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if "rank" in line)[:3000]
