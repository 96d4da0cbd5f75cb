"""The backward of sparse attention beside cuDNN's and TileLang's, and the indexer's loss beside that backward.

python benchmarks/training.py [--quick] [--only REGEX] [--limit SECONDS] [--long]

Peers come from packs (`backward_peers.py`): cuDNN frontend's kernels for SM90, TileLang's as Megatron-Core ships them,
with 32 heads a CTA, and with 64. TileLang's kernels multiply 16 heads at least; 8 heads are padded for them, which is
not timed. Those with 32 heads a CTA, the slowest, are left out of the rows that `--long` adds. All take the same out
and lse, of our forward, and are timed in turn. A call of theirs includes what it needs besides its main kernel:
clearing of float32 sums, delta, rounding. Ours includes the sorting of the lists.

Lists are causal: token i lists `min(i + 1, 2048)` of the rows up to its own. "random": any of these, in any order.
"ascending": the same in order. "local": of the newest 4096, in any order; 64 neighbours choose mostly the same.

Columns of a row of the backward, besides times in us:

    ratio      the best peer's time / ours
    tflops     2 * s * h * topk * (3 * 576 + 2 * 512) / ours; `valid` is the share of entries that lists have
    dq, dkv    norm of the difference of the first peer's from ours, relative; `training_accuracy.py` has the
               distances from float64
    same_bits  who gives the same dkv twice
    peak_gb    memory that a call of ours takes beside its results

`loss` rows have the time of `attention_target` and `indexer_loss` with all gradients, `ours_us`, beside that of the
attention's backward of the same lists, `peer_us`. `warm-up` rows are of all causal rows: `dense_attention_target` and
`dense_indexer_loss`, given the attention's lse, beside a backward over lists of all causal rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import backward_peers
import torch
from backward_peers import D_QK, D_V, SCALE, TOPK, Backward, Inputs
from cases import TRAINING, judge
from harness import DIFFERENCE, NO_PEER, Options, Record, difference, load_kernels, peak_bytes, times_in_turn
from inputs import causal_lists, normal

import cupy_mla

ATTENTION = r"(backward|finite_rows|attention_target|bf16_(cluster_)?sm90)(?!.*D_QK=512)"
KERNELS = rf"{ATTENTION}|indexer/(indexer_loss|loss_)|range_lists"
INDEX_HEADS = 64
MANY, FEW = (64, 128), (8, 16, 32)
SIZES, SHORTER, LONG = (4096, 16384, 32768), (4096, 16384), 131072  # tokens
TOKEN_HEAD_BYTES = 4 * 2 * D_QK + 2 * 2 * D_V + 256  # that a row holds: q, dq thrice, out, dout, and what is small


class Case(NamedTuple):
    """A row: of which work, tokens, heads and lists."""

    work: str
    s: int
    h: int
    lists: str

    @property
    def name(self) -> str:
        if self.work == "backward":
            return f"backward h {self.h} s {self.s} topk {TOPK} {self.lists}"
        return f"{self.work} H {INDEX_HEADS} h {self.h} s {self.s}{f' topk {TOPK}' * (self.work == 'loss')}"


def cases(quick: bool, long: bool) -> Iterator[Case]:
    """The important ones first; those of one size and kind of lists are neighbours."""
    sizes = SIZES[:1] if quick else (*SIZES, LONG) if long else SIZES
    for kind in ("random", "local"):
        for s in sizes:
            for h in MANY:
                yield Case("backward", s, h, kind)
                if kind == "random" and s in SIZES:
                    yield Case("loss", s, h, kind)
            if s in SHORTER:
                yield from (Case("backward", s, h, kind) for h in FEW)
    for s in SHORTER[: 1 if quick else None]:
        yield from (Case("warm-up", s, h, "all") for h in MANY)
        yield from (Case("backward", s, h, "ascending") for h in MANY)


def inputs(lists: torch.Tensor, h: int, factor: int = 1) -> Inputs:
    """Unit normal kv and dout, and q so many times as large, with the out and lse of our forward."""
    s = len(lists)
    q, kv, dout = factor * normal(s, h, D_QK), normal(s, 1, D_QK), normal(s, h, D_V)
    out, _, lse = cupy_mla.sparse_prefill(q, kv, lists[:, None], SCALE)
    return Inputs(q, kv, lists, out, lse, dout)


def backward(a: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours."""
    dq, dkv, _ = cupy_mla.sparse_prefill_backward(a.q, a.kv, a.lists[:, None], a.out, a.lse, a.dout, SCALE)
    return dq, dkv


def portable(a: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The portable kernel."""
    with cupy_mla.forced("portable"):
        return backward(a)


def called(record: Record, peer: Any, a: Inputs) -> Backward | None:
    """A peer's call that was made once; None, printed and noted, where it fails."""
    try:
        call: Backward = peer.backward(a)
        call()
        torch.cuda.synchronize()
    except Exception as error:  # what a peer cannot do is a result, too
        failure = f"h {a.q.shape[1]} s {len(a.q)}: {type(error).__name__}: {str(error)[:300]}"
        record.note(f"{peer.name} fails", failure)
        print(f"{peer.name} fails: {failure}", flush=True)
        return None
    return call


def repeats_of(s: int) -> int:
    """How often a row of so many tokens is timed."""
    return 6 if s <= 4096 else 3 if s < LONG else 2


def backward_row(record: Record, peers: list[Any], case: Case, a: Inputs) -> None:
    """A row of the backward."""
    peers = [peer for peer in peers if peer.serves(case.h) and (case.s < LONG or peer.name != "tilelang")]
    theirs = {peer.name: call for peer in peers if (call := called(record, peer, a))}
    if not theirs:
        return
    calls: dict[str, Backward] = {"ours": partial(backward, a), **theirs}
    if case.s in SHORTER and case.h in MANY and case.lists == "random":
        calls["portable"] = partial(portable, a)
    row: dict[str, Any] = {**case._asdict(), "case": case.name, "valid": float((a.lists >= 0).float().mean())}
    want = calls["ours"]()
    same = []
    for name, call in calls.items():
        got = call()
        apart = {key: difference(x, y) for key, x, y in zip(("dq", "dkv"), want, got, strict=True)}
        if not max(apart.values()) < DIFFERENCE:
            record.wrong.append(f"{case.name}: ours and {name} differ by {apart}")
            print(f"WRONG {record.wrong[-1]}")
        row |= apart if name == next(iter(theirs)) else {}
        same += [name] * torch.equal(got[1], call()[1])
        del got
    if not {*calls} & {"ours", "portable"} <= {*same}:
        record.wrong.append(f"{case.name}: only {same} give the same bits twice")
    del want
    row |= {"same_bits": ", ".join(same), "peak_gb": round(peak_bytes(calls["ours"]) / 1e9, 3)}
    times = dict(zip(calls, times_in_turn([*calls.values()], repeats_of(case.s), 1), strict=True))
    best = min(times[name] for name in theirs)
    row |= {f"{name}_us": round(time, 1) for name, time in times.items()}
    row |= {"peer_us": round(best, 1), "ratio": round(best / times["ours"], 3)}
    row["tflops"] = round(2 * case.s * case.h * TOPK * (3 * D_QK + 2 * D_V) / times["ours"] / 1e6, 1)
    figures = f"{row['ratio']:9.2f} {row['tflops']:9.0f} {row['dq']:9.1e} {row['dkv']:9.1e} {row['peak_gb']:9.2f}"
    shown = " ".join(f"{name} {time / 1e3:.2f}" for name, time in times.items())
    record.add_row(row, f"{figures} ms: {shown}; same bits: {row['same_bits']}")


def loss_row(record: Record, case: Case, a: Inputs) -> None:
    """A row of the indexer's loss: over the lists, or in the warm-up over all causal rows."""
    q_index, k_index = normal(case.s, INDEX_HEADS, 128), normal(case.s, 128)
    w = normal(case.s, INDEX_HEADS).float() * (INDEX_HEADS * 128) ** -0.5
    ends = torch.arange(1, case.s + 1, device=a.q.device, dtype=torch.int32)
    ranges, lists = (torch.zeros_like(ends), ends), a.lists[:, None]
    if case.work == "loss":
        target = partial(cupy_mla.attention_target, a.q, a.kv, lists, a.lse, SCALE)
        loss = partial(cupy_mla.indexer_loss, q_index, k_index, w, target(), lists)
    else:
        target = partial(cupy_mla.dense_attention_target, a.q, a.kv, a.lse, SCALE, *ranges)
        loss = partial(cupy_mla.dense_indexer_loss, q_index, k_index, w, target(), *ranges)
    if not all(torch.equal(x, y) for x, y in zip(loss(), loss(), strict=True)):
        record.wrong.append(f"{case.name}: not the same bits twice")
    peak = peak_bytes(loss)
    times = times_in_turn([target, loss, partial(backward, a)], repeats_of(case.s), 1)
    ours, ratio = sum(times[:2]), times[2] / sum(times[:2])
    row = {**case._asdict(), "case": case.name, "ours_us": round(ours, 1), "ratio": round(ratio, 3)}
    row |= {name: round(time, 1) for name, time in zip(("target_us", "loss_us", "peer_us"), times, strict=True)}
    shown = "target {:.2f} loss {:.2f} backward {:.2f}".format(*(time / 1e3 for time in times))
    record.add_row({**row, "peak_gb": round(peak / 1e9, 3)}, f"{ratio:9.2f} {peak / 1e9:39.2f} ms: {shown}")


def packed_peers() -> list[Any]:
    """All that the packs hold. Where there are none, the program ends with the status NO_PEER."""
    folder = backward_peers.unpacked()
    if folder is None:
        print(f"{backward_peers.FOLDER} has no packs of peers", file=sys.stderr)
        sys.exit(NO_PEER)
    return backward_peers.peers(folder)


def main() -> None:
    parser = Options.parser(__doc__)
    parser.add_argument("--long", action="store_true", help=f"rows of {LONG} tokens, too")
    arguments = vars(parser.parse_args())
    long, options = arguments.pop("long"), Options(**arguments)
    peers = packed_peers()
    load_kernels(KERNELS)
    record = Record("training", options, "ratio,TFLOP/s,dq,dkv,peak GB")
    record.note("peers", {peer.name: peer.version for peer in peers})
    wanted = (case for case in cases(options.quick, long) if record.wants(case.name))
    for (kind, s), of_lists in groupby(wanted, lambda case: (case.lists, case.s)):
        lists = causal_lists(kind, s, s if kind == "all" else TOPK)
        for h, of_inputs in groupby(of_lists, lambda case: case.h):
            torch.cuda.empty_cache()
            if s * h * TOKEN_HEAD_BYTES > torch.cuda.mem_get_info()[0]:
                print(f"h {h} s {s}: more memory than is free")
                continue
            a = inputs(lists, h)
            for case in of_inputs:
                if case.work == "backward":
                    backward_row(record, peers, case, a)
                else:
                    loss_row(record, case, a)
            del a
    judge(TRAINING, record.rows)
    print(record.write())


if __name__ == "__main__":
    main()
