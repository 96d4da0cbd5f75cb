"""`python -m cupy_mla`: a self-check; `python -m cupy_mla warmup`: compile the kernels of a config ahead."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from .bridges import require_cupy
from .checks.options import require_choice
from .config import RATIOS, DenseMLAConfig, LayerConfig, SparseMLAConfig
from .layouts import DENSE_LAYOUTS, OF_V41, QUANTIZED_OF_V4, QUANTIZED_OF_V32, Layout, by_name, names
from .selfcheck import report
from .selfcheck.warmup import warmup
from .typing import ModelKind

CHECK = """Says what is installed, which kernels this GPU gets and how long they take to compile, and compares a small
call of every operation with the NumPy reference. Exit status: 0 all is well, 1 something is wrong, 2 there is no GPU to
use, and NumPy is what runs."""
WARMUP = """Compiles what the layers of a config need into CuPy's disk cache (CUPY_CACHE_DIR, else
~/.cupy/kernel_cache), with a line for each kernel. Exit status: 0 done, 1 there is no such config or no such
GPU, 2 there is no GPU to use."""


def parser() -> argparse.ArgumentParser:
    check = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    check.add_argument("--device", type=int, help="check this GPU only")
    check.add_argument("--verbose", action="store_true", help="print every kernel and call")
    top = argparse.ArgumentParser(prog="python -m cupy_mla", parents=[check], description=CHECK)
    commands = top.add_subparsers(dest="command", metavar="check|warmup")
    commands.add_parser(
        "check", parents=[check], description=CHECK, help="say whether this machine is fit (the default)"
    )
    warm = commands.add_parser("warmup", description=WARMUP, help="compile the kernels of a config ahead")
    layouts = f"cache layouts: {', '.join(names())}, with --dense also fp16 (default: v32_fp8)"
    warm.add_argument("--heads", type=int, required=True, help="query heads on a rank")
    warm.add_argument("--layout", nargs="+", default=["v32_fp8"], help=layouts)
    warm.add_argument("--dense", action="store_true", help="layers without an indexer: dense_decode alone")
    warm.add_argument(
        "--compressed-layout", help="layout of V4.1's compressed caches: v41_fp4 beside v41_fp8 (default: as --layout)"
    )
    for name, default, what in (
        ("--d-qk", 576, "width of the rows of bf16 and plain_fp8 caches"),
        ("--topk", 2048, "tokens that the indexer chooses for each query token"),
        ("--speculative-tokens", 0, "query tokens that a decode has beyond its first"),
        ("--max-num-seqs", 256, "most requests in a batch"),
    ):
        choices = (576, 512) if name == "--d-qk" else None
        warm.add_argument(name, type=int, default=default, choices=choices, help=f"{what} (default: {default})")
    warm.add_argument(
        "--block-size", type=int, help="tokens a block of the cache (default: 64, and 256 for V4's compressed caches)"
    )  # fmt: skip
    warm.add_argument(
        "--model",
        choices=("v32", "v4", "v41"),
        help="kind of the model (default: v41 for its own layouts, v4 for V4's and for bf16 rows of 512, else v32)",
    )
    warm.add_argument(
        "--compress-ratio", type=int, nargs="+", help="kinds of V4 or V4.1 layers (default: all of the model)"
    )
    warm.add_argument("--kpool", type=int, default=1, help="tokens of a pool of the indexer's keys (default: 1)")
    warm.add_argument("--device", type=int, default=argparse.SUPPRESS, help="the GPU (default: 0)")
    return top


def configs(options: argparse.Namespace) -> Iterator[LayerConfig]:
    """The configs that the command line of `warmup` names."""
    for name in options.layout:
        require_choice("layout", name, names(DENSE_LAYOUTS) if options.dense else names())
        layout = by_name(name, options.d_qk)
        if options.dense:
            block_size = 64 if options.block_size is None else options.block_size
            yield DenseMLAConfig(
                options.heads, layout.d_qk, block_size, name, options.max_num_seqs,
                num_speculative_tokens=options.speculative_tokens,
            )  # fmt: skip
            continue
        kinds: tuple[tuple[ModelKind, tuple[Layout, ...]], ...] = (
            ("v41", OF_V41), ("v4", QUANTIZED_OF_V4), ("v32", QUANTIZED_OF_V32)
        )  # fmt: skip
        model: ModelKind | None = options.model or next((kind for kind, of in kinds if layout in of), None)
        d_qk = min(options.d_qk, layout.d_qk) if model == "v32" else layout.d_qk
        for ratio in options.compress_ratio or RATIOS[model] if model in ("v4", "v41") else [1]:
            compressed = model in ("v4", "v41") and ratio > RATIOS[model][0]
            block_size = options.block_size if options.block_size is not None else 256 if compressed else 64
            yield SparseMLAConfig(
                options.heads, d_qk, topk=options.topk, kpool=options.kpool, block_size=block_size, cache_layout=name,
                max_num_seqs=options.max_num_seqs, num_speculative_tokens=options.speculative_tokens,
                compress_ratio=ratio, model=model, compressed_layout=options.compressed_layout,
            )  # fmt: skip


def show_progress(ready: int, known: int) -> None:
    print(f"\r{ready} of {known} kernels are ready", end="" if ready < known else "\n", file=sys.stderr, flush=True)


def run_warmup(options: argparse.Namespace) -> int:
    try:
        wanted = list(configs(options))
    except ValueError as error:
        print(error, file=sys.stderr)
        return report.WRONG
    try:
        cupy = require_cupy("warmup")
        report.nvrtc_version()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return report.NO_GPU
    device = getattr(options, "device", 0)
    missing = report.no_such_gpu(cupy, device)
    if missing:
        print(missing, file=sys.stderr)
        return report.WRONG
    kernels = warmup(wanted, device, progress=show_progress)
    print(f"{len(kernels)} kernels are compiled")
    return report.ALL_WELL


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.command == "warmup":
        return run_warmup(options)
    return report.run(getattr(options, "device", None), getattr(options, "verbose", False))


if __name__ == "__main__":
    sys.exit(main())
