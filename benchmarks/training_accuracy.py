"""How far gradients of sparse attention are from float64: ours, cuDNN's and TileLang's.

python benchmarks/training_accuracy.py [--only REGEX] [--limit SECONDS]

Lists are causal and random, and peers come from packs, as in `training.py`. q, kv and dout are unit normal; "q 4x" has
queries four times as large, so that the weights of a list are peaked. All get the same bfloat16 `out` and float32 `lse`
of our forward. The reference is computed in float64 from q, kv and dout, with a softmax of its own.

Prints ‖x - ref‖ / ‖ref‖ of x = dq and dkv. Writes training_accuracy.json: `dq` and `dkv` are of ours, both bfloat16,
`float32_dkv` of ours without the last rounding, `portable_`, `cudnn_`, `tilelang_` and `tilelang_64_` before these
names of other kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from backward_peers import D_V, SCALE, TOPK, Backward, Inputs
from harness import Options, Record, load_kernels
from inputs import causal_lists
from training import KERNELS, backward, called, inputs, packed_peers, portable

import cupy_mla

SIZES, HEADS = (512, 4096), (16, 64, 128)  # tokens
FARTHEST = {1: 4.5e-3, 4: 7.7e-3}  # of ours, by the factor of q: cosine differences of 1e-5 and 3e-5
ELEMENTS = 1 << 25  # of the scores in float64 at a time


class Case(NamedTuple):
    """A row: tokens, heads, and how many times unit normal q is."""

    s: int
    h: int
    factor: int

    @property
    def name(self) -> str:
        return f"gradients h {self.h} s {self.s} topk {TOPK} q {self.factor}x"


def cases() -> list[Case]:
    return [*(Case(s, h, 1) for s in SIZES for h in HEADS), *(Case(SIZES[-1], h, 4) for h in HEADS)]


def in_float64(a: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """dq [s, h, 576] and dkv [s, 576] of lists in which each token has a row, and no row twice."""
    rows = a.kv[:, 0].double()
    dq, dkv = [], torch.zeros_like(rows)
    step = max(1, ELEMENTS // (a.q.shape[1] * len(rows)))
    for q, dout, lists in zip(*(x.split(step) for x in (a.q, a.dout, a.lists)), strict=True):
        q, dout, places = q.double(), dout.double(), lists.long().masked_fill(lists < 0, len(rows))
        listed = torch.zeros(len(q), len(rows) + 1, device=q.device, dtype=torch.bool).scatter_(1, places, True)
        p = (SCALE * (q @ rows.T)).masked_fill(~listed[:, None, :-1], -torch.inf).softmax(-1)
        dp = dout @ rows[:, :D_V].T
        ds = SCALE * p * (dp - (p * dp).sum(-1, keepdim=True))
        dq.append(ds @ rows)
        dkv += ds.flatten(0, 1).T @ q.flatten(0, 1)
        dkv[:, :D_V] += p.flatten(0, 1).T @ dout.flatten(0, 1)
    return torch.cat(dq), dkv


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference, relative, in float64."""
    parts = zip(got.reshape(want.shape).split(512), want.split(512), strict=True)
    return float(sum((x.double() - y).square().sum() for x, y in parts) ** 0.5 / want.norm())


def float32_rows(a: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, with dkv in float32."""
    dq, dkv, _ = cupy_mla.sparse_prefill_backward(
        a.q, a.kv, a.lists[:, None], a.out, a.lse, a.dout, SCALE, dkv_dtype="float32"
    )
    return dq, dkv


def accuracy_row(record: Record, peers: list[Any], case: Case, a: Inputs) -> None:
    """A row of all kernels."""
    theirs = {peer.name: call for peer in peers if peer.serves(case.h) and (call := called(record, peer, a))}
    calls: dict[str, Backward] = {"": partial(backward, a), "float32": partial(float32_rows, a)}
    calls |= {"portable": partial(portable, a), **theirs}
    wants = in_float64(a)
    row: dict[str, Any] = {"case": case.name}
    for name, call in calls.items():
        for gradient, got, want in zip(("dq", "dkv"), call(), wants, strict=True):
            if (name, gradient) != ("float32", "dq"):
                row[f"{name}_{gradient}".removeprefix("_")] = distance(got, want)
    if not all(row[name] < FARTHEST[case.factor] for name in ("dq", "dkv", "float32_dkv")):  # NaN is not near either
        record.wrong.append(f"{case.name}: farther from float64 than {FARTHEST[case.factor]}")
        print(f"WRONG {record.wrong[-1]}")
    columns = ("dq", "cudnn_dq", "tilelang_dq", "dkv", "float32_dkv", "cudnn_dkv", "tilelang_dkv")
    record.add_row(row, " ".join(f"{row[name]:9.2e}" if name in row else " " * 9 for name in columns))


def main() -> None:
    options = Options.parse(__doc__)
    peers = packed_peers()
    load_kernels(KERNELS)
    torch.manual_seed(0)
    record = Record("training_accuracy", options, "dq,cuDNN,TileLang,dkv,float32,cuDNN,TileLang")
    record.note("peers", {peer.name: peer.version for peer in peers})
    for case in cases():
        if record.wants(case.name):
            torch.cuda.empty_cache()
            lists = causal_lists("random", case.s, TOPK)
            accuracy_row(record, peers, case, inputs(lists, case.h, case.factor))
    print(record.write())


if __name__ == "__main__":
    main()
