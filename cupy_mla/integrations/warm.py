"""Warm-up for engines: compiles the kernels before the first request, once per model, process and GPU. Warns of
GPUs for which the engine has better ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cache

import torch

from ..config import LayerConfig, SparseMLAConfig
from ..warmup import warmup

SECONDS = 3.0  # least time between two lines of the log

_ready: set[tuple[tuple[LayerConfig, ...], int]] = set()


def up(kinds: Sequence[LayerConfig], device: torch.device, logger: logging.Logger) -> None:
    """Compile and load the kernels of a model's layers, unless this process has done so. On the CPU nothing is done.

    Args:
        kinds: the kinds of layers.
        device: the device on which they run.
        logger: the engine's logger, for progress: a line at the start, one every few seconds, and one at the end.
    """
    if device.type != "cuda":
        return
    number = torch.cuda.current_device() if device.index is None else device.index
    if (tuple(kinds), number) in _ready:
        return
    _ready.add((tuple(kinds), number))
    _warn_of_portable_kernels(number, logger)
    what = "; ".join(map(_described, kinds))
    logger.info("cupy_mla makes the kernels of %s ready: some 20 s on 16 cores where they are not compiled yet", what)
    start = told = time.perf_counter()

    def progress(ready: int, known: int) -> None:
        nonlocal told
        if time.perf_counter() > told + SECONDS:
            told = time.perf_counter()
            logger.info("cupy_mla: %d of %d kernels are ready", ready, known)

    kernels = warmup(kinds, number, progress=progress)
    logger.info("cupy_mla: %d kernels are ready after %.1f s", len(kernels), time.perf_counter() - start)


def _described(layers: LayerConfig) -> str:
    what = f"{layers.num_heads} heads over {layers.cache_layout} rows"
    if isinstance(layers, SparseMLAConfig):
        what += f", topk {layers.topk}"
        if layers.has_compressed_rows:
            what += f", compressed {layers.compress_ratio}:1"
    return what


@cache
def _warn_of_portable_kernels(number: int, logger: logging.Logger) -> None:
    """Say once if the engine's own kernels should be faster: those that are made for GPUs newer than Hopper."""
    major, minor = torch.cuda.get_device_capability(number)
    if major >= 10:
        logger.warning(
            "cupy_mla: on compute capability %d.%d attention runs on the portable kernels, which were compiled but "
            "never measured there. The engine's own backends have kernels made for it. Without CUPY_MLA_VLLM=override "
            "or CUPY_MLA_SGLANG=override, and with another --attention-backend, they run.",
            major, minor,
        )  # fmt: skip
