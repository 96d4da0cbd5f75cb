"""Compiles the kernels that the layers of a config need before they are used, so that no request waits for NVRTC."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any, cast

import numpy as np

from ..bridges import Place, require_cupy
from ..calls.operation import listing
from ..checks.options import require_instance, require_integer
from ..config import DenseMLAConfig, LayerConfig, SparseMLAConfig
from ..cuda import all_kernels, driver, indices, logits, logits_sm90, topk
from ..cuda.attention.choose import DENSE_KERNELS, PORTABLE, choosing_all
from ..cuda.attention.kernels import bf16_cluster_sm90, combine, dense_combine, fp8_sm90
from ..cuda.driver import Gpu
from ..cuda.kernel import Kernel
from ..cuda.paging import ceil_div
from ..dtypes import BFLOAT16, E5M2, UINT8
from ..layouts import INDEXER_FP8, Layout
from ..metadata.compressed import WIDTH_ALIGN, compressed_list_width
from ..ops.attention import sparse_decode, sparse_prefill
from ..ops.cache import empty_cache
from ..ops.dense import dense_decode
from ..ops.examples import Wanted
from ..ops.swa import combined_width, window_width
from ..ops.table import TABLE
from ..typing import DenseLayout, PagedLayout

SM_SCALE = 1.0  # no kernel depends on it
MOST_QUERIES = 2048  # more query tokens have no other candidates than so many
MOST_THREADS = 16  # that compile at a time
MANY_ROWS = 1 << 20  # of a cache that is larger than L2: prefills over it may sort lists
SELECTING = (logits.PORTABLE, logits.SM90, "topk")  # kernels of the indexer's selection


def warmup(
    config: LayerConfig | Sequence[LayerConfig], device: int = 0, *, progress: Callable[[int, int], None] | None = None
) -> list[Kernel]:
    """Compile (or take from CuPy's disk cache) and load the kernels that layers of a config need, on one GPU.

    Threads compile several kernels at a time. Afterwards they are loaded in this process, and compiled on disk for
    others. For a moment this takes a few hundred MB of GPU memory, from a pool of its own. `sparse_decode` with
    `batch_invariant`, which no backend calls, may need other kernels.

    Args:
        config: the layers and the engine's maxima; for a model with layers of several kinds, a config of each. One call
            with all takes less time than one for each.
        device: the GPU.
        progress: called whenever a kernel is ready, with the number of kernels that are ready, and of those that are
            known to be needed.

    Returns:
        all kernels that are loaded on that GPU, those of earlier calls included.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value.
        RuntimeError: CuPy, a GPU or NVRTC is missing.

    Example:
        >>> config = cupy_mla.SparseMLAConfig(128, cache_layout="v32_fp8")
        >>> cupy_mla.warmup.warmup(config, progress=lambda ready, known: print(ready, "of", known))  # doctest: +SKIP
    """
    configs = [*config] if isinstance(config, Sequence) and not isinstance(config, str) else [config]
    for one in configs:
        if not isinstance(one, DenseMLAConfig):
            require_instance("config", one, SparseMLAConfig)
    device = require_integer("device", device, 0)
    require_cupy("warmup")
    load_all(kernels_of(configs, device), device, min(MOST_THREADS, os.cpu_count() or 1), progress)
    return [kernel for kernel in all_kernels() if kernel.loaded(device)]


def load_all(
    kernels: Iterable[Kernel], device: int, threads: int, progress: Callable[[int, int], None] | None = None
) -> int:
    """Compile and load kernels on a GPU in threads, while `kernels` yields more; returns their number.

    Args:
        progress: as for `warmup`.
    """
    from concurrent.futures import Future, ThreadPoolExecutor, as_completed  # takes long to import

    loads: dict[Kernel, Future[Any]] = {}
    with ThreadPoolExecutor(threads) as pool:
        for kernel in kernels:
            if kernel not in loads:
                loads[kernel] = pool.submit(kernel.load, device)
        for ready, load in enumerate(as_completed(loads.values()), 1):
            load.result()
            if progress is not None:
                progress(ready, len(loads))
    return len(loads)


def kernels_of(configs: Sequence[LayerConfig], device: int) -> Iterator[Kernel]:
    """Every kernel that layers of some configs may launch on a GPU; some occur more than once.

    Example calls find them, but no call is made:

    - of attention, which chooses a kernel by sizes, calls with powers of two of query tokens up to the config's maxima,
      with and without lengths of lists, and dense decodes. Every kernel that is a candidate for one of them is needed:
      between these sizes the fastest changes often.
    - for layers of a `SparseMLAConfig`, one call of each other operation.

    Layers with an indexer get every kernel with which their steps may choose, and layers with large batches those that
    convert the lists of many tokens.

    The first kernels are those that tell how many clusters fit the GPU. The choice of others loads them. Those that
    take longest to compile, of attention, come next.
    """
    cupy, gpu = require_cupy("warmup"), driver.gpu(device)
    memory = cupy.cuda.MemoryPool()  # ends with this call, and goes back to the driver
    sparse = [config for config in configs if isinstance(config, SparseMLAConfig)]
    for config in configs:
        yield from (kernel for kernel in _cluster_kernels(config) if kernel.suits(gpu.capability))
    with cupy.cuda.Device(device), cupy.cuda.using_allocator(memory.malloc):
        for config in sparse:
            yield from _listed(_attention(cupy, config))
        for config in configs:
            yield from _listed(_dense(cupy, config))
            yield from dense_kernels(gpu, config.layout)
        for kernel in _listed(_others(cupy, sparse)):
            if any(_in_steps(config, kernel) for config in sparse):
                yield kernel
        for config in sparse:
            yield from indexer_kernels(gpu, config)
            yield from conversion_kernels(gpu, config)


def _listed(calls: Iterator[Callable[[], Any]]) -> Iterator[Kernel]:
    """The kernels of all candidates for calls, none of which is made."""
    for call in calls:
        with listing() as found, choosing_all():
            call()
        yield from found


def _cluster_kernels(config: LayerConfig) -> Iterator[Kernel]:
    """The kernels that `Gpu.clusters_at_once` is asked about."""
    yield fp8_sm90.cluster_kernel() if config.layout.quantized else bf16_cluster_sm90.cluster_kernel()
    if isinstance(config, SparseMLAConfig):
        yield from (bf16_cluster_sm90.cluster_kernel(), topk.cluster_kernel())


def _put(cupy: ModuleType, array: np.ndarray) -> Any:
    """A copy on the GPU. `asarray` takes no float8_e5m2."""
    if array.dtype != E5M2:
        return cupy.asarray(array)
    whole = cupy.asarray(array.view(UINT8).reshape(-1))
    return Place.of(whole).carve(whole, 0, array.shape, E5M2)


def _others(cupy: ModuleType, configs: Sequence[SparseMLAConfig]) -> Iterator[Callable[[], Any]]:
    """Calls of all operations but attention. Configs with the same layouts have the same calls."""
    put = partial(_put, cupy)
    for layouts in dict.fromkeys((config.layout, config.layout_of_compressed) for config in configs):
        for operation in TABLE:
            if not operation.training and operation.function not in (sparse_decode, sparse_prefill, dense_decode):
                for call in operation.calls(np.random.default_rng(0), Wanted(layouts)):
                    yield partial(operation.writer or operation.function, **operation.arguments(call, put))


def indexer_kernels(gpu: Gpu, config: SparseMLAConfig) -> list[Kernel]:
    """The kernels with which an indexer selects keys, gathered or in the paged cache, for any sizes and heads. None for
    layers without an indexer.

    Layers whose sequences are never longer than what they choose need them, too: keys of several requests are gathered
    side by side.
    """
    if not config.has_topk:
        return []
    modules = {logits.PORTABLE: logits, logits.SM90: logits_sm90}
    blocks_aligned = config.keys_per_block * INDEXER_FP8.token_bytes % 16 == 0
    found = [*topk.kernels()]
    for paged, aligned in ((False, True), (True, blocks_aligned)):
        name = logits.choose(gpu.capability, aligned, logits.asked_kernel())
        for kernel in modules[name].kernels():
            is_for = [kernel.defines.get(define) for define in ("PAGED", "ALIGNED", "COMPACT")]
            if is_for == [paged, aligned, False]:
                found.append(kernel)
    return [kernel for kernel in found if kernel.suits(gpu.capability) and _in_steps(config, kernel)]


def conversion_kernels(gpu: Gpu, config: SparseMLAConfig) -> list[Kernel]:
    """The kernels that convert index lists of the largest batches. The example calls have those of small ones."""
    tokens = max(config.max_num_batched_tokens, config.max_num_seqs * (1 + config.num_speculative_tokens))
    staged = indices.tokens_of_block(gpu, tokens) >= indices.STAGE_FROM_TOKENS
    kernels = [indices.convert_kernel(stage, front) for stage in indices.STAGES for front in (False, True)]
    return kernels if staged else []


def _in_steps(config: SparseMLAConfig, kernel: Kernel) -> bool:
    """Whether steps of a config's layers may run a kernel. Of the kernels that select keys, only V4.1's layers run
    those for keys of MXFP4 and candidates, and no layers those for bfloat16 logits."""
    if kernel.name not in SELECTING:
        return True
    of_v41 = kernel.defines.get("E5M2_KEYS") or kernel.defines.get("CANDIDATES")
    return not kernel.defines.get("BF16") and (not of_v41 or config.model == "v41")


def dense_kernels(gpu: Gpu, layout: Layout) -> list[Kernel]:
    """The kernels of dense decode for Hopper. Requests and block table decide which of them serves a call. Where none
    does, the merge of the portable kernel's splits: a call has it or not."""
    constants = layout.defines().items()
    modules = [module for name, module in DENSE_KERNELS.items() if name not in PORTABLE]
    of_rows = [kernel for module in modules for kernel in module.kernels() if constants <= kernel.defines.items()]
    ours = {"FP8_PARTIALS": int(layout.quantized), "HALF_ITEMS": int(layout.half)}.items()
    merges = [kernel for kernel in dense_combine.kernels() if ours <= kernel.defines.items()]
    return [kernel for kernel in (*of_rows, *merges) if kernel.suits(gpu.capability)] or [combine.kernel(layout.half)]


def _attention(cupy: ModuleType, config: SparseMLAConfig) -> Iterator[Callable[[], Any]]:
    """Calls of decode and prefill."""
    layout, of_compressed = config.layout, config.layout_of_compressed
    heads, d_qk = config.num_heads, layout.d_qk
    place = Place.of(cupy.zeros(0, np.float32))
    cache = empty_cache(layout, 1, config.block_size, place)
    sink = cupy.zeros(heads, np.float32) if config.is_v4 else None
    decode_tokens = config.max_num_seqs * (1 + config.num_speculative_tokens)
    decodes = query_tokens(config.max_num_batched_tokens if config.use_mixed_batch else decode_tokens)
    prefills = query_tokens(config.max_num_batched_tokens)
    # Arrays for the most tokens and the widest lists. Calls with fewer get views, which take less time to make.
    most, compressed = max(*decodes, *prefills), compressed_widths(config)
    images = sorted({0, config.max_image_tokens})
    windows = [window_width(config.window, seen) for seen in images] if config.is_v4 else [config.topk_width]
    qs, all_lengths = _zeros(cupy, most, 1, heads, d_qk), cupy.zeros(most, np.int32)
    lists = _nothing(cupy, most, 1, max(*windows, *compressed))
    extra: dict[str, Any] = {}
    if config.has_compressed_rows:
        extra = {
            "extra_k_cache": empty_cache(of_compressed, 1, config.rows_per_block, place),
            "extra_layout": cast(PagedLayout, of_compressed.name),
        }
    for b, window in product(decodes, windows):
        for length in _lengths(config, all_lengths[:b]):
            more: dict[str, Any] = {"attn_sink": sink, "topk_length": length, "layout": layout.name}
            yield partial(sparse_decode, qs[:b], cache, lists[:b, :, :window], SM_SCALE, **more)
            for width in compressed if extra else ():
                more |= {"extra_topk_length": length, "extra_indices": lists[:b, :, :width], **extra}
                yield partial(sparse_decode, qs[:b], cache, lists[:b, :, :window], SM_SCALE, **more)
    if config.is_v4:
        windows = [combined_width(rows, config.window, seen) for rows, seen in product(compressed, images)]
    qs, flat = _zeros(cupy, most, heads, d_qk), _zeros(cupy, MANY_ROWS, 1, d_qk)
    lists = _nothing(cupy, most, 1, max(windows))
    for tokens, width in product(prefills, windows):
        for length in _lengths(config, all_lengths[:tokens]):
            yield partial(
                sparse_prefill, qs[:tokens], flat, lists[:tokens, :, :width], SM_SCALE, attn_sink=sink,
                topk_length=length,
            )  # fmt: skip


def compressed_widths(config: SparseMLAConfig) -> list[int]:
    """Widths of the lists of compressed rows that layers may have beside their windows; [0]: they have none. Engines
    may have narrower lists for batches of shorter sequences where no indexer chooses."""
    widest = compressed_list_width(config)
    if config.has_topk or not widest:
        return [widest]
    return sorted({*(WIDTH_ALIGN << n for n in range((widest // WIDTH_ALIGN).bit_length())), widest})


def _lengths(config: SparseMLAConfig, lengths: Any) -> list[Any]:
    """Lengths of lists as calls give them. V4's layers always do. Callers of V3.2's may leave them out (None), which
    may change the kernel."""
    return [lengths] if config.is_v4 else [None, lengths]


def _dense(cupy: ModuleType, config: LayerConfig) -> Iterator[Callable[[], Any]]:
    """Calls of dense decode, with block tables for the longest sequences and requests without a row."""
    layout = config.layout
    width = ceil_div(config.max_model_len, config.block_size)
    cache = empty_cache(layout, 1, config.block_size, Place.of(cupy.zeros(0, np.float32)))
    requests, tokens = query_tokens(config.max_num_seqs), 1 + config.num_speculative_tokens
    qs = _zeros(cupy, max(requests), tokens, config.num_heads, layout.d_qk, dtype=layout.values)
    tables = cupy.broadcast_to(cupy.zeros(width, np.int32), (max(requests), width))
    lens = cupy.zeros(max(requests), np.int32)
    for b in requests:
        for n in range(1, 1 + tokens):
            yield partial(
                dense_decode, qs[:b, :n], cache, tables[:b], lens[:b], SM_SCALE, layout=cast(DenseLayout, layout.name)
            )  # fmt: skip


def query_tokens(most: int) -> list[int]:
    """Numbers of query tokens up to `most` that have all candidates of numbers between them."""
    most = min(most, MOST_QUERIES)
    return sorted({*(1 << n for n in range((most - 1).bit_length())), most})


def _zeros(cupy: ModuleType, *shape: int, dtype: np.dtype = BFLOAT16) -> Any:
    """An array of zeros whose rows share memory."""
    return cupy.broadcast_to(cupy.zeros(shape[-1:], dtype), shape)


def _nothing(cupy: ModuleType, *shape: int) -> Any:
    """Index lists without a valid entry, which share memory."""
    return cupy.broadcast_to(cupy.full(shape[-1:], -1, np.int32), shape)
