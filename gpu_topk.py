"""Temporary: exactness and times of versions of topk.cu. `python gpu_topk.py`, no peers."""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))
import indexer
import torch
from harness import BEGAN, time_side_by_side

import cupy_mla
from cupy_mla.cuda import topk
from cupy_mla.cuda.kernel import Kernel
from cupy_mla.cuda.program import Launch

# rows, width, us of the best peer in the record, us of the version before, then threads, items, CTAs an SM, cluster
# ("s": streamed)
CASES = (
    (1, 4096, 4.03, 4.02, ((512, 8, 3, 1), (1024, 4, 1, 1), (256, 16, 3, 1))),
    (17, 7936, 5.73, 5.76, ((512, 16, 3, 1), (1024, 8, 1, 1), (512, 16, 2, 1))),
    (128, 8192, 6.89, 6.65, ((512, 16, 3, 1), (1024, 8, 1, 1))),
    (256, 4096, 7.72, 6.58, ((512, 8, 3, 1), (256, 16, 4, 1))),
    (1, 16064, 7.56, 6.84, ((1024, 16, 1, 1), (1024, 4, 1, 4), (1024, 8, 1, 2))),
    (93, 10944, 8.67, 7.24, ((1024, 12, 1, 1), (512, 24, 2, 1))),
    (16, 17664, 10.62, 8.25, ((1024, 20, 1, 1), (1024, 8, 1, 4), (1024, 4, 1, 8), (1024, 16, 1, 1, "s"))),
    (89, 23296, 13.11, 11.09, ((1024, 24, 1, 1), (1024, 16, 1, 1, "s"))),
    (8, 32768, 10.63, 7.90, ((1024, 4, 1, 8), (1024, 8, 1, 4), (1024, 16, 1, 1, "s"))),
    (64, 32768, 14.78, 11.27, ((1024, 16, 1, 2), (1024, 16, 1, 1, "s"), (512, 16, 2, 1, "s"))),
    (128, 32768, 18.53, 16.81, ((1024, 16, 1, 1, "s"), (512, 16, 2, 1, "s"))),
    (1, 131072, 13.42, 10.71, ((1024, 16, 1, 8), (1024, 16, 1, 8, "s"), (1024, 16, 1, 4, "s"), (1024, 16, 1, 1, "s"))),
    (8, 131072, 13.65, 10.98, ((1024, 16, 1, 8), (1024, 16, 1, 4, "s"))),
    (64, 131072, 32.9, 29.51, ((1024, 16, 1, 1, "s"), (1024, 16, 1, 2, "s"), (512, 16, 2, 1, "s"))),
    (128, 65536, 23.17, 26.55, ((1024, 16, 1, 1, "s"), (512, 16, 2, 1, "s"))),
    (144, 44032, 44.0, 29.97, ((1024, 16, 1, 1, "s"), (512, 16, 2, 1, "s"))),
    (518, 9408, 25.37, 18.34, ((512, 20, 2, 1),)),
    (4096, 8192, 101.46, 80.43, ((512, 16, 3, 1), (512, 16, 2, 1), (256, 32, 4, 1), (1024, 8, 2, 1))),
    (8192, 8192, 144.51, 118.59, ((512, 16, 3, 1), (256, 32, 4, 1))),
    (1047, 20032, 67.32, 65.94, ((512, 16, 2, 1, "s"), (1024, 20, 1, 1))),
    (4096, 32768, 337.22, 295.81, ((512, 16, 2, 1, "s"), (1024, 16, 1, 1, "s"))),
    (256, 131072, 104.23, 60.11, ((512, 16, 2, 1, "s"), (1024, 16, 1, 1, "s"))),
    (2048, 131072, 638.22, 403.94, ((512, 16, 2, 1, "s"),)),
)
# Where variants of the source stop: the times of their parts.
LEAVE = "if (part >= 0) { if (threadIdx.x == 0) p.out[row * p.out_stride] = int(X); return; }\n"
STOPS = {
    "guess": ("        const int count = fill_pool(", "least > 1e30f"),
    "filled": ("        if (pools_suffice(count, p.k)) {", "count"),
    "found": ("            uint32_t larger, equal;\n            held.compare", "threshold.order"),
}
HELD_STOPS = {
    "loaded": ("    const Threshold threshold = find_threshold<Scope::ROW>(held, p.k);\n    end_reading", "S"),
    "found": ("    const Chosen chosen = choose(held, threshold);\n", "threshold.order"),
    "chosen": ("    const auto column_of = ", "chosen.mask"),
}
SUM = "uint32_t sum = 0;\n#pragma unroll\nfor (int i = 0; i < ITEMS; ++i) sum += held.items[i];\n"


class Edited(Kernel):
    """A kernel whose source is changed: (what stands there, what takes its place), once each."""

    edits: tuple[tuple[str, str], ...] = ()

    @property
    def source(self) -> str:
        text = super().source
        for old, new in self.edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


def edited(shape: topk.Shape, *edits: tuple[str, str], **defines: int) -> Edited:
    plain = topk.kernel(shape, False)
    one = Edited(plain.file, plain.params, {**plain.defines, **defines}, archs=plain.archs, overlaps=True)
    one.edits = edits
    return one


def stop(marker: str, value: str) -> tuple[str, str]:
    before = LEAVE.replace("X", value)
    if value == "S":
        before = SUM + LEAVE.replace("X", "sum").replace("threadIdx.x == 0", "sum != 12345")
    if "chosen" in value:
        before = LEAVE.replace("X", value).replace("threadIdx.x == 0", "chosen.mask + chosen.before != 12345")
    return marker, before + marker


DEPTH, ROOM = "DEPTH = 4", "CAPACITY = STREAMED ? 8192"
LIST = "        if (count > NEAR || count == 0) return;\n"


def variants_of_source() -> dict[tuple[topk.Shape, str], Edited]:
    made = {}
    for shape, stops in ((topk.MANY, STOPS), (topk.FEW, STOPS), (topk.MANY_HELD[1], HELD_STOPS)):
        for name, (marker, value) in stops.items():
            made[shape, f"until {name}"] = edited(shape, stop(marker, value))
    made[topk.MANY_HELD[1], "no list"] = edited(topk.MANY_HELD[1], (LIST, "return;\n"))
    for depth in (2, 8):
        for shape in (topk.MANY, topk.FEW):
            made[shape, f"depth {depth}"] = edited(shape, (DEPTH, f"DEPTH = {depth}"))
    for depth in (1, 2):
        edits = (DEPTH, f"DEPTH = {depth}"), (ROOM, ROOM.replace("8192", "6144"))
        made[topk.MANY, f"three CTAs, depth {depth}"] = edited(topk.MANY, *edits, PER_SM=3)
    return made


def shape_of(threads: int, items: int, per_sm: int, cluster: int, how: str = "") -> topk.Shape:
    return topk.Shape(threads, items, per_sm, how == "s", cluster > 1)


def main() -> None:
    of_source = variants_of_source()
    shapes = dict.fromkeys(shape_of(*v) for case in CASES for v in case[4])

    def load(kernel):
        try:
            kernel.load(0)
        except Exception as error:
            print(f"{kernel}: {str(error)[:300]}")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(load, [*(topk.kernel(s, False) for s in shapes), *of_source.values()]))
    print(f"loaded after {time.monotonic() - BEGAN:.1f} s", flush=True)
    signal.alarm(26)
    picked: list = []
    launches = topk._launches

    def patched(gpu, logits, *rest):
        made = launches(gpu, logits, *rest)
        if picked:
            kernel, cluster = picked
            made = [Launch(kernel, (logits.rows * cluster, 1, 1), made[0].params, cluster)]
        return made

    topk._launches = patched
    torch.manual_seed(1)
    torch.zeros(1, device="cuda")
    print("case: peer of the record, version before | threads/items/CTAs an SM/cluster us, s: streamed")
    for rows, width, peer, before, variants in CASES:
        sets = [torch.randn(rows, width, device="cuda") for _ in range(3 if rows * width < 1 << 27 else 2)]
        sets[0] = (sets[0] * 16).round() / 16  # ties
        if rows > 256 or (width == 131072 and rows == 256):
            ends = torch.arange(width - rows + 1, width + 1, device="cuda", dtype=torch.int32)
        else:
            ends = torch.full((rows,), width, device="cuda", dtype=torch.int32)
        shown = []
        every = [("/".join(map(str, v)), topk.kernel(shape_of(*v), False), v[3], True) for v in variants]
        if (rows, width) in ((4096, 32768), (64, 131072), (4096, 8192), (256, 131072)):
            shape = shape_of(*variants[0])
            every += [(name, k, 1, "until" not in name) for (s, name), k in of_source.items() if s == shape]
        for name, kernel, cluster, whole in every:
            picked[:] = kernel, cluster
            cupy_mla.topk_indices.signatures.forget()
            try:
                wrong = 0
                for s in sets[:2] if whole else ():
                    got = cupy_mla.topk_indices(s, 2048, None, ends)
                    for row in range(0, rows, max(rows // 12, 1)):
                        want = indexer.sorted_topk(s[row, : int(ends[row])])
                        wrong += not torch.equal(got[row, : len(want)].long(), want)
                        wrong += not bool((got[row, len(want) :] == -1).all())
                calls = [lambda s=s, ends=ends: cupy_mla.topk_indices(s, 2048, None, ends) for s in sets]
                shown.append(f"{name} {time_side_by_side(calls)[0]:.2f}" + (f" WRONG {wrong}" if wrong else ""))
            except Exception as error:
                shown.append(f"{name} failed: {str(error)[:80]}")
        print(f"{rows} x {width}: {peer}, {before} | {'; '.join(shown)}", flush=True)
        del sets
    picked.clear()
    cupy_mla.topk_indices.signatures.forget()
    adversarial()
    print(f"all after {time.monotonic() - BEGAN:.1f} s", flush=True)


def adversarial() -> None:
    """Rows that a sample tells little about, through the shapes that are chosen."""
    import numpy as np

    from tests.ops.test_topk import ADVERSARIAL
    from tests.ops.test_topk import adversarial as draw

    rng = np.random.default_rng()
    wrong = []
    for rows, n in ((1, 200_003), (3, 70_001), (150, 33_000), (140, 9000), (20, 6000)):
        for name in ADVERSARIAL:
            row = draw(rng, name, n)
            k = int(rng.choice([63, 2048, 4096]))
            got = cupy_mla.topk_indices(torch.from_numpy(row).cuda().repeat(rows, 1), k)
            order = np.argsort(np.where(np.isnan(row), np.inf, -row), kind="stable")
            order = np.concatenate([order[~np.isnan(row[order])], np.flatnonzero(np.isnan(row))])
            want = torch.from_numpy(np.sort(order[:k])).cuda()
            if not bool((got.long() == want).all()):
                wrong.append((rows, n, name, k))
    print("adversarial rows:", wrong or "exact", flush=True)


if __name__ == "__main__":
    main()
