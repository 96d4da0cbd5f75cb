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
from cupy_mla.cuda import structs, topk
from cupy_mla.cuda.kernel import Kernel
from cupy_mla.cuda.paging import divisor
from cupy_mla.cuda.program import Launch

# rows, width, us of the best peer in the record, best us of the versions before, then shapes beside the chosen one:
# threads, items, CTAs an SM, cluster ("s": streamed)
CASES = (
    (1, 4096, 4.03, 4.02, ()),
    (17, 7936, 5.73, 5.76, ()),
    (64, 8192, 6.7, 6.11, ()),
    (128, 8192, 6.89, 6.65, ((1024, 8, 1, 1),)),
    (256, 4096, 7.72, 6.58, ((512, 8, 3, 1),)),
    (1, 16064, 7.56, 6.84, ()),
    (12, 12864, 8.37, 7.50, ()),
    (93, 10944, 8.67, 7.24, ()),
    (16, 17664, 10.62, 8.25, ()),
    (89, 23296, 13.11, 11.01, ((1024, 16, 1, 1, "s"),)),
    (1, 32768, 10.39, 7.36, ()),
    (8, 32768, 10.63, 7.90, ((1024, 8, 1, 4),)),
    (13, 32768, 0, 0, ((1024, 4, 1, 8),)),
    (64, 32768, 14.78, 11.27, ((1024, 16, 1, 1, "s"), (512, 16, 2, 1, "s"))),
    (128, 32768, 18.53, 16.06, ((512, 16, 2, 1, "s"),)),
    (1, 131072, 13.42, 10.39, ()),
    (8, 131072, 13.65, 10.98, ((1024, 16, 1, 8, "s"), (1024, 16, 1, 4, "s"))),
    (16, 131072, 0, 0, ((1024, 16, 1, 8), (1024, 16, 1, 2, "s"))),
    (1, 1 << 20, 0, 0, ()),
    (64, 131072, 32.9, 26.41, ((1024, 16, 1, 1, "s"),)),
    (128, 65536, 23.17, 20.61, ((512, 16, 2, 1, "s"),)),
    (144, 44032, 44.0, 23.30, ()),
    (518, 9408, 25.37, 18.34, ((512, 24, 2, 1),)),
    (4096, 8192, 101.46, 80.43, ((512, 16, 2, 1),)),
    (8192, 8192, 144.51, 118.59, ()),
    (1047, 20032, 67.32, 65.94, ((1024, 20, 1, 1), (1024, 16, 1, 1, "s"))),
    (4096, 32768, 337.22, 274.62, ()),
    (256, 131072, 104.23, 52.36, ((1024, 16, 1, 1, "s"),)),
    (2048, 131072, 638.22, 340.56, ()),
)
# Where variants of the source stop: the times of their parts.
FOUND = "        items.set_pooled(pooled);\n        threshold = find_threshold(items, p.k);\n"
LEAVE = "if (threadIdx.x == 0) p.out[row * p.out_stride] = int(X); return;\n"
STOPS = {
    "filled": ("    if (pools_suffice(pooled, p.k)) {", "pooled", True),
    "found": (FOUND, "threshold.order", False),
    "ordered": ("    const Results results = results_of(p, row, of_row);\n    results.store(", "count", True),
}
# Chosen positions of rows in registers: side by side in shared memory first, then stored. Slots without that.
POSITIONS = "    if (p.table.blocks == nullptr) {\n        chosen.for_all("
SLOTS = "if (is_chosen) shared().chosen_columns[place - before] = column_of(v, i);"
AT_ONCE = "if (is_chosen) results.to[place] = results.slot_of(p, column_of(v, i));"
STORE = "results.store(p, before, count_chosen(threshold), [&](int i) { return shared().chosen_columns[i]; });"
COUNT = "if (above == 32 || rest < 1u << above) atomicAdd(&bins[rest >> shift], 1u);"
# What does not count goes into a word behind the bins: no branches.
NO_BRANCH = "atomicAdd(&bins[0] + (above == 32 || rest < 1u << above ? rest >> shift : uint32_t(BINS)), 1u);"


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


def variants_of_source() -> dict[tuple[topk.Shape, str], Edited]:
    made = {}
    for shape in (topk.MANY, topk.FEW):
        for name, (marker, value, in_front) in STOPS.items():
            leave = LEAVE.replace("X", value)
            made[shape, f"until {name}"] = edited(shape, (marker, leave + marker if in_front else marker + leave))
    for shape in dict.fromkeys((*topk.MANY_HELD, *topk.FEW_HELD, topk.MANY, topk.FEW)):
        made[shape, "no branch"] = edited(shape, (COUNT, NO_BRANCH))
    for shape in (*topk.MANY_HELD, *topk.FEW_HELD, *topk.HELD_BY_CLUSTERS):
        made[shape, "side by side"] = edited(
            shape, (POSITIONS, POSITIONS.replace("p.table.blocks == nullptr", "false"))
        )
    for shape in (topk.MANY_HELD[1], topk.FEW_HELD[1], topk.HELD_BY_CLUSTERS[0]):
        made[shape, "slots at once"] = edited(shape, (SLOTS, AT_ONCE), (STORE, ""))
    return made


def shape_of(threads: int, items: int, per_sm: int, cluster: int, how: str = "") -> topk.Shape:
    return topk.Shape(threads, items, per_sm, how == "s", cluster > 1)


def label(shape: topk.Shape, cluster: int) -> str:
    return f"{shape.threads}/{shape.items}/{shape.per_sm}/{cluster}" + "/s" * shape.streamed


def main() -> None:
    of_source = variants_of_source()
    chosen = {case[:2]: topk.choose(case[0], case[1], 132, True) for case in CASES}
    shapes = dict.fromkeys([*(s for s, _ in chosen.values()), *(shape_of(*v) for case in CASES for v in case[4])])

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

    tables: list = []  # of blocks, for slots

    def patched(gpu, logits, bounds, k, table, *rest):
        if tables:
            blocks = tables[0]
            table = structs.BLOCK_TABLE(
                blocks=blocks.data_ptr(), stride=blocks.shape[1], num_requests=logits.rows, width=blocks.shape[1],
                block_size=divisor(64),
            )  # fmt: skip
        made = launches(gpu, logits, bounds, k, table, *rest)
        if picked:
            kernel, cluster = picked
            made = [Launch(kernel, (logits.rows * cluster, 1, 1), made[0].params, cluster)]
        return made

    topk._launches = patched
    torch.manual_seed(1)
    torch.zeros(1, device="cuda")
    print(
        "case: peer of the record, best before | threads/items/CTAs an SM/cluster us, s: streamed; the first is chosen"
    )
    for rows, width, peer, before, variants in CASES:
        sets = [torch.randn(rows, width, device="cuda") for _ in range(3 if rows * width < 1 << 27 else 2)]
        sets[0] = (sets[0] * 16).round() / 16  # ties
        if rows > 256 or (width == 131072 and rows == 256):
            ends = torch.arange(width - rows + 1, width + 1, device="cuda", dtype=torch.int32)
        else:
            ends = torch.full((rows,), width, device="cuda", dtype=torch.int32)
        shown = []
        shape, cluster = chosen[rows, width]
        every = [(label(shape, cluster), topk.kernel(shape, False), cluster, True)]
        every += [("/".join(map(str, v)), topk.kernel(shape_of(*v), False), v[3], True) for v in variants]
        parts = (rows, width) in ((4096, 32768), (128, 65536), (256, 131072), (1047, 20032))
        every += [
            (name, k, cluster, "until" not in name and "slots" not in name)
            for (s, name), k in of_source.items()
            if s == shape and (parts or "until" not in name)
        ]
        every.append(("slots", every[0][1], cluster, False))
        for name, kernel, cluster, whole in every:
            picked[:] = kernel, cluster
            blocks = torch.arange(-(-width // 64), device="cuda", dtype=torch.int32).repeat(rows, 1) + 7
            tables[:] = [blocks] if "slots" in name else []
            cupy_mla.topk_indices.signatures.forget()
            try:
                wrong = 0
                for s in sets[:2] if whole else ():
                    got = cupy_mla.topk_indices(s, 2048, None, ends)
                    for row in range(0, rows, max(rows // 12, 1)):
                        want = indexer.sorted_topk(s[row, : int(ends[row])])
                        wrong += not torch.equal(got[row, : len(want)].long(), want)
                        wrong += not bool((got[row, len(want) :] == -1).all())
                if name == "slots":
                    got = cupy_mla.topk_indices(sets[0], 2048, None, ends)
                    tables.clear()
                    cupy_mla.topk_indices.signatures.forget()
                    want = cupy_mla.topk_indices(sets[0], 2048, None, ends)
                    wrong += not torch.equal(got, torch.where(want < 0, want, want + 7 * 64))
                    tables[:] = [blocks]
                    cupy_mla.topk_indices.signatures.forget()
                calls = [lambda s=s, ends=ends: cupy_mla.topk_indices(s, 2048, None, ends) for s in sets]
                shown.append(f"{name} {time_side_by_side(calls)[0]:.2f}" + (f" WRONG {wrong}" if wrong else ""))
            except Exception as error:
                shown.append(f"{name} failed: {str(error)[:80]}")
        print(f"{rows} x {width}: {peer}, {before} | {'; '.join(shown)}", flush=True)
        del sets
    picked.clear()
    tables.clear()
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
