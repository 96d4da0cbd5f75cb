"""What the plug-in says in vLLM's log once a process, however many layers there are."""

from __future__ import annotations

from functools import cache

from vllm.platforms import current_platform

from . import logger


@cache
def portable_kernels() -> None:
    """Warn that a GPU newer than Hopper has kernels of vLLM's which are faster than ours."""
    gpu = current_platform.get_device_capability()
    if gpu is not None and gpu.major >= 10:
        logger.warning(
            "cupy_mla: on compute capability %d.%d attention runs on the portable kernels, which were compiled but "
            "never measured there. vLLM's own backends have kernels made for it: CUPY_MLA_VLLM=off, or another "
            "--attention-backend, keeps them.",
            gpu.major, gpu.minor,
        )  # fmt: skip


@cache
def stock_indexer(lacking: str) -> None:
    """Warn that layers with our attention keep vLLM's indexer, because of something that our operations lack."""
    logger.warning("cupy_mla leaves the indexer to vLLM: ours serves none with %s", lacking)
