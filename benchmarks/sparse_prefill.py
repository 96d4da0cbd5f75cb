"""Sparse prefill beside FlashMLA's: heads, widths, caches of three sizes, short lists, local lists, random lengths.

python benchmarks/sparse_prefill.py [--quick] [--only REGEX]

Writes sparse_prefill.json and sparse_prefill.png.
"""

from __future__ import annotations

import torch
from cases import PREFILL, judge
from harness import Options, Record, flash_mla_peer
from report import plot_prefill
from rows import prefill


def main() -> None:
    options = Options.parse(__doc__)
    quick = options.quick
    torch.manual_seed(0)
    peer = flash_mla_peer()
    record = Record("sparse_prefill", options)
    for h in (128, 64, 16) if quick else (128, 64, 32, 16, 8):
        for d in (576, 512):
            for s_kv in (32768,) if quick else (8192, 32768, 131072):
                prefill(record, peer, h, d, s_kv)
    for topk in (512, 640):
        prefill(record, peer, 64, 512, 32768, topk, 4096)
    for h in (128, 64, 16):
        prefill(record, peer, h, 576, 32768, kind="local")
        prefill(record, peer, h, 576, 32768, kind="lengths")
    judge(PREFILL, record.rows)
    path = record.write()
    print(path, plot_prefill(path))


if __name__ == "__main__":
    main()
