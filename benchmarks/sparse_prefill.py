"""Sparse prefill beside FlashMLA's: heads, widths, caches of three sizes, short lists, local lists, random lengths.

python benchmarks/sparse_prefill.py [--quick]
"""

from __future__ import annotations

import argparse

import torch
from harness import Record, flash_mla_peer
from rows import prefill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rows only")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    peer = flash_mla_peer()
    record = Record("sparse_prefill")
    for h in (128, 64, 16) if quick else (128, 64, 32, 16, 8):
        for d in (576, 512):
            for s_kv in (32768,) if quick else (8192, 32768, 131072):
                prefill(record, peer, h, d, s_kv)
    for topk in (512, 640):
        prefill(record, peer, 64, 512, 32768, topk, 4096)
    for h in (128, 64, 16):
        prefill(record, peer, h, 576, 32768, kind="local")
        prefill(record, peer, h, 576, 32768, kind="lengths")
    for name, heads in (("h 64 and 128", ("h 64 ", "h 128 ")), ("h <= 32", ("h 8 ", "h 16 ", "h 32 "))):
        ratio = record.geometric_mean(lambda case, heads=heads: any(h in case for h in heads))
        print(f"{name}: geometric mean {ratio:.2f}")
    record.write()


if __name__ == "__main__":
    main()
