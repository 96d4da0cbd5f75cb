"""Compiles ahead what the layers of a config need, so that no request waits for NVRTC."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any, cast

import numpy as np

from ..bridges import Place, require_cupy
from ..checks.options import require_instance, require_integer
from ..config import DenseMLAConfig, SparseMLAConfig
from ..cuda import all_kernels, driver, logits, logits_sm90, topk
from ..cuda.attention.kernels import dense_cluster_sm90, dense_combine, dense_fp8_sm90, dense_sm90, dense_whole_sm90
from ..cuda.driver import Gpu
from ..cuda.kernel import Kernel
from ..cuda.paging import ceil_div
from ..dtypes import BFLOAT16
from ..layouts import INDEXER_FP8, Layout
from ..metadata.compressed import compressed_list_width
from ..ops.attention import sparse_decode, sparse_prefill
from ..ops.cache import empty_cache
from ..ops.dense import dense_decode
from ..ops.swa import combined_width, window_width
from ..typing import DenseLayout, PagedLayout

SM_SCALE = 1.0  # no kernel depends on it
MOST_QUERIES = 2048  # no choice of a kernel depends on how many more there are
EVERY_NUMBER = 300  # of queries up to this one may have a kernel of its own; from here on powers of two do
THREADS = 8  # that compile
DENSE = dense_cluster_sm90, dense_whole_sm90, dense_sm90, dense_fp8_sm90


def warmup(config: SparseMLAConfig | DenseMLAConfig, device: int = 0) -> list[Kernel]:
    """Compile (or take from CuPy's disk cache) and load the kernels that layers of a config need, on one GPU.

    Calls their operations once each, and attention at all small numbers of query tokens and every power of two up to
    the config's maxima, with index lists without a valid entry, of V3.2's kind with and without lengths, and over all
    rows of requests that have none. Which kernel runs depends on such numbers; whatever these calls load is ready
    afterwards in this process, and on disk for others. Where layers have an indexer, every kernel is loaded that its
    steps may run. Layers without one, of a `DenseMLAConfig`, need `dense_decode` alone. Uses a few hundred MB of GPU
    memory for a moment, from a pool of its own.

    Args:
        config: the layers and the engine's maxima.
        device: the GPU.

    Returns:
        the kernels loaded on that GPU, those of earlier calls included.

    Raises:
        TypeError, ValueError: an argument is none.
        RuntimeError: CuPy, a GPU or NVRTC is missing.
    """
    from concurrent.futures import ThreadPoolExecutor  # takes long to import

    from ..ops.table import Wanted
    from .cases import cases

    if not isinstance(config, DenseMLAConfig):
        require_instance("config", config, SparseMLAConfig)
    device = require_integer("device", device, 0)
    cupy = require_cupy("warmup")
    memory = cupy.cuda.MemoryPool()  # ends with this call, and goes back to the driver
    with cupy.cuda.Device(device), cupy.cuda.using_allocator(memory.malloc):
        wanted = dense_kernels(driver.gpu(device), config.layout)
        if isinstance(config, SparseMLAConfig):
            for case in cases(np.random.default_rng(0), Wanted((config.layout, config.layout_of_compressed))):
                if case.operation.function not in (sparse_decode, sparse_prefill, dense_decode):
                    case.run(cupy.asarray)
            _attention(cupy, config)
            wanted += indexer_kernels(driver.gpu(device), config)
        _dense(cupy, config)
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
            list(threads.map(lambda kernel: kernel.load(device), wanted))
        cupy.cuda.Device(device).synchronize()
    return [kernel for kernel in all_kernels() if kernel.loaded(device)]


def indexer_kernels(gpu: Gpu, config: SparseMLAConfig) -> list[Kernel]:
    """The kernels of selections of any sizes and of any heads of an indexer, whose keys come gathered or from the paged
    cache; none for layers without an indexer, or that choose all keys."""
    if not config.has_topk or config.max_index_keys <= config.index_topk:
        return []
    modules = {logits.PORTABLE: logits, logits.SM90: logits_sm90}
    blocks_aligned = config.keys_per_block * INDEXER_FP8.token_bytes % 16 == 0
    found = [kernel for kernel in topk.kernels() if not kernel.defines.get("BF16")]
    for paged, aligned in ((False, True), (True, blocks_aligned)):
        name = logits.choose(gpu.capability, aligned, logits.asked_kernel()).kernel
        for kernel in modules[name].kernels():
            is_for = [kernel.defines.get(define) for define in ("PAGED", "ALIGNED", "COMPACT")]
            of_v41 = kernel.defines.get("MXFP4") or kernel.defines.get("CANDIDATES")
            if is_for == [paged, aligned, False] and (config.model == "v41" or not of_v41):
                found.append(kernel)
    return [kernel for kernel in found if kernel.suits(gpu.capability)]


def dense_kernels(gpu: Gpu, layout: Layout) -> list[Kernel]:
    """The kernels for Hopper of dense decode: which of them serves a call depends on its requests and on the table."""
    constants = layout.defines().items()
    of_rows = [kernel for module in DENSE for kernel in module.kernels() if constants <= kernel.defines.items()]
    ours = {"FP8_PARTIALS": int(layout.quantized), "HALF_ITEMS": int(layout.half)}.items()
    merges = [kernel for kernel in dense_combine.kernels() if ours <= kernel.defines.items()]
    return [kernel for kernel in (*of_rows, *merges) if kernel.suits(gpu.capability)]


def _attention(cupy: ModuleType, config: SparseMLAConfig) -> None:
    layout, of_compressed = config.layout, config.layout_of_compressed
    heads, d_qk = config.num_heads, layout.d_qk
    place = Place.of(cupy.zeros(0, np.float32))
    cache = empty_cache(layout, 1, config.block_size, place)
    sink = cupy.zeros(heads, np.float32) if config.is_v4 else None
    compressed = compressed_list_width(config)
    windows = window_width(config.window, config.max_image_tokens)
    decode_tokens = config.max_num_seqs * (1 + config.num_speculative_tokens)
    for b in query_tokens(config.max_num_batched_tokens if config.use_mixed_batch else decode_tokens):
        q, indices = (
            _zeros(cupy, b, 1, heads, d_qk),
            _nothing(cupy, b, 1, windows if config.is_v4 else config.topk_width),
        )
        for length in _lengths(cupy, config, b):
            more: dict[str, Any] = {"attn_sink": sink, "topk_length": length, "layout": layout.name}
            sparse_decode(q, cache, indices, SM_SCALE, **more)
            if config.has_compressed_rows:
                sparse_decode(
                    q, cache, indices, SM_SCALE, **more, extra_topk_length=length,
                    extra_k_cache=empty_cache(of_compressed, 1, config.rows_per_block, place),
                    extra_indices=_nothing(cupy, b, 1, compressed), extra_layout=cast(PagedLayout, of_compressed.name),
                )  # fmt: skip
    width = combined_width(compressed, config.window, config.max_image_tokens) if config.is_v4 else config.topk_width
    for tokens in query_tokens(config.max_num_batched_tokens):
        for length in _lengths(cupy, config, tokens):
            sparse_prefill(
                _zeros(cupy, tokens, heads, d_qk), _zeros(cupy, 1, 1, d_qk), _nothing(cupy, tokens, 1, width),
                SM_SCALE, attn_sink=sink, topk_length=length,
            )  # fmt: skip


def _lengths(cupy: ModuleType, config: SparseMLAConfig, tokens: int) -> list[Any]:
    """Lengths of the lists of so many query tokens: V4's layers always give them, callers of V3.2's may leave them out
    (None), and either way may have kernels of its own."""
    lengths = cupy.zeros(tokens, np.int32)
    return [lengths] if config.is_v4 else [None, lengths]


def _dense(cupy: ModuleType, config: SparseMLAConfig | DenseMLAConfig) -> None:
    """Decodes over all rows, of requests that are as long as they may be by their block tables, and have no row."""
    layout = config.layout
    width = ceil_div(config.max_model_len, config.block_size)
    cache = empty_cache(layout, 1, config.block_size, Place.of(cupy.zeros(0, np.float32)))
    table = cupy.zeros(width, np.int32)
    for b in query_tokens(config.max_num_seqs):
        tables, lens = cupy.broadcast_to(table, (b, width)), cupy.zeros(b, np.int32)
        for tokens in range(1, 2 + config.num_speculative_tokens):
            q = _zeros(cupy, b, tokens, config.num_heads, layout.d_qk, dtype=layout.values)
            dense_decode(q, cache, tables, lens, SM_SCALE, layout=cast(DenseLayout, layout.name))


def query_tokens(most: int) -> list[int]:
    """Numbers of query tokens up to `most` (or what makes a difference), of which each may have another kernel."""
    most = min(most, MOST_QUERIES)
    powers = (1 << n for n in range((most - 1).bit_length()))
    return sorted({*range(1, min(most, EVERY_NUMBER) + 1), *powers, most})


def _zeros(cupy: ModuleType, *shape: int, dtype: np.dtype = BFLOAT16) -> Any:
    """Zeros of which only one row exists."""
    return cupy.broadcast_to(cupy.zeros(shape[-1:], dtype), shape)


def _nothing(cupy: ModuleType, *shape: int) -> Any:
    """Index lists without a valid entry."""
    return cupy.broadcast_to(cupy.full(shape[-1:], -1, np.int32), shape)
