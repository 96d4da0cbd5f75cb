"""Seconds until an engine's kernels are ready: compiled from nothing, and taken from CuPy's disk cache.

python benchmarks/warm_up.py [--quick] [--only REGEX] [--limit SECONDS]

A row is a model, with all kinds of its layers on one GPU, as the vLLM plug-in tells `cupy_mla.warmup` of them: an
engine of SEQS requests, TOKENS tokens a step and contexts of LENGTH tokens, without speculation. Each time is of a
process of its own: `cold_s` with an empty folder CUPY_CACHE_DIR, `warm_s` with the folder that the cold one has just
filled. Timed is the call of `warmup` alone. Imports and the CUDA context, which an engine has by then, are made
before. `cores` are those that the process may use; `warmup` compiles 16 kernels at a time at most. A warm process that
compiles anything makes the program fail. Writes warm_up.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
from harness import Options, Record

from cupy_mla import warmup
from cupy_mla.config import LayerConfig
from cupy_mla.integrations.vllm import warm

SEQS, TOKENS, LENGTH = 256, 8192, 163840
HEADS, TOPK, V4_TOPK, V4_WINDOW = 128, 2048, 512, 128
ENGINE = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_seqs=SEQS, max_num_batched_tokens=TOKENS), speculative_config=None,
    model_config=SimpleNamespace(
        max_model_len=LENGTH, hf_config=SimpleNamespace(index_topk=V4_TOPK, sliding_window=V4_WINDOW)
    ),
)  # fmt: skip
CONFIGS: dict[str, Sequence[LayerConfig]] = {
    "V3.2, FP8 cache": [warm.layers_of(ENGINE, HEADS, TOPK, "v32_fp8", rope=True)],
    "V3.2, bf16 cache": [warm.layers_of(ENGINE, HEADS, TOPK, "bf16", rope=True)],
    "V4": warm.v4_layers_of(ENGINE, HEADS, "v4"),
    "V4.1": warm.v4_layers_of(ENGINE, HEADS, "v41"),
    "V3, bf16 cache": [warm.dense_layers_of(ENGINE, HEADS, fp8=False)],
}
QUICK = "V3.2, FP8 cache"


def timed(case: str) -> dict[str, Any]:
    """Of this process: the number of kernels that are loaded then, how many sources and seconds of the call. Kernels
    that differ in how they are launched have the same source, and one file."""
    cupy.cuda.Device(0).use()
    cupy.cuda.Device(0).synchronize()  # makes the context
    began = time.perf_counter()
    kernels = warmup.warmup(CONFIGS[case], 0)
    seconds = round(time.perf_counter() - began, 2)
    return {"kernels": len(kernels), "sources": len({(k.source, k.target) for k in kernels}), "seconds": seconds}


def in_process(case: str, folder: str) -> dict[str, Any]:
    """What is `timed` of a new process with this disk cache."""
    command = [sys.executable, __file__, "--process", case]
    env = os.environ | {"CUPY_CACHE_DIR": folder}
    out = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def measure(record: Record, case: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cold = in_process(case, folder)
        made = {path.name for path in Path(folder).iterdir()}
        warm_one = in_process(case, folder)
        more = {path.name for path in Path(folder).iterdir()} - made
    if more or len(made) < cold["sources"] or warm_one["kernels"] != cold["kernels"]:
        record.wrong.append(f"{case}: {cold['kernels']} kernels, {len(made)} files; then {warm_one}, {len(more)} files")
    cores = len(os.sched_getaffinity(0))
    row = {"kernels": cold["kernels"], "cold_s": cold["seconds"], "warm_s": warm_one["seconds"], "cores": cores}
    record.add_row({"case": case, **row}, " ".join(f"{value:9}" for value in row.values()))


def main() -> None:
    parser = Options.parser(__doc__)
    parser.add_argument("--process", metavar="CASE", help="be one of the processes that are timed")
    arguments = vars(parser.parse_args())
    process = arguments.pop("process")
    if process is not None:
        print(json.dumps(timed(process)))
        return
    options = Options(**arguments)
    record = Record("warm_up", options, "kernels,cold s,warm s,cores")
    for case in CONFIGS:
        if record.wants(case) and (not options.quick or case == QUICK):
            measure(record, case)
    print(record.write())


if __name__ == "__main__":
    main()
