"""Context parallelism over real processes, with gloo on the CPU and with NCCL on GPUs, against one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import oracle
from tests.integrations import ranks
from tests.kinds import BF16, installed

if not installed("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

LENGTH, TOPK, HEADS, TOKENS, BLOCK_SIZE, SCALE = 500, 64, 12, 4, 16, 0.1

RANK = """
from cupy_mla.integrations.distributed import ContextParallel

interleave = int(sys.argv[3])
ranks = ContextParallel(interleave=interleave)
n = ranks.world_size
given = {name: torch.from_numpy(a) for name, a in np.load(f"{folder}/inputs.npz").items()}
rows, q = given["rows"].view(torch.bfloat16), given["q"].view(torch.bfloat16)
tokens = torch.arange(len(rows))
mine = tokens[tokens // interleave % n == me]
lens = ranks.local_seq_lens(torch.tensor([len(rows)], dtype=torch.int32, device=place))
assert int(lens[0]) == len(mine)
cache = torch.zeros(-(-len(mine) // BLOCK), BLOCK, 576, dtype=torch.bfloat16)
cache.view(-1, 576)[: len(mine)] = rows[mine]
cache, own_logits = cache.to(place), given["logits"][:, mine].contiguous().to(place)
heads = q.shape[1] // n
q = q[:, me * heads : (me + 1) * heads].to(place)
sink = given["sink"][me * heads : (me + 1) * heads].to(place)
few = given["few"].to(place)

def step():
    gathering = ranks.start_gathering(q)
    chosen = ranks.select(own_logits, cupy_mla.topk_indices(own_logits, TOPK), TOPK)
    first = torch.where(chosen == chosen[:, :1], chosen, -1)
    local, length = ranks.localize_topk(torch.where(few[:, None], first, chosen))
    out, lse = ranks.attend(gathering, cache, local, SCALE, topk_length=length, attn_sink=sink)
    everyones = ranks.gather_heads(q)
    partial, _, partial_lse = cupy_mla.sparse_prefill(everyones, cache.view(-1, 1, 576), local[:, None], SCALE)
    return chosen, out, lse, *ranks.merge(partial, partial_lse, sink)

results = step()
if backend == "nccl":  # the same in a CUDA graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for array in captured:
        array.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, results))
    del graph  # NCCL waits at its end for graphs that hold its calls
assert ranks.rank == me
names = ("chosen", "out", "lse", "out_of_prefill", "lse_of_prefill")
np.savez(f"{folder}/rank{me}.npz", **{n: a.cpu().float().numpy() for n, a in zip(names, results)})
"""


def run(folder: Path, backend: str, number: int, interleave: int) -> list[dict[str, np.ndarray]]:
    """What each rank found."""
    program = RANK.replace("BLOCK", str(BLOCK_SIZE)).replace("SCALE", str(SCALE)).replace("TOPK", str(TOPK))
    ranks.run(program, folder, backend, number, interleave)
    return [dict(np.load(folder / f"rank{r}.npz")) for r in range(number)]


def check(folder: Path, rng: np.random.Generator, backend: str, number: int, interleave: int) -> None:
    q = (10 * rng.standard_normal((TOKENS, HEADS, 576))).astype(BF16)
    rows = (0.1 * rng.standard_normal((LENGTH, 576))).astype(BF16)
    logits = np.maximum(rng.standard_normal((TOKENS, LENGTH), np.float32), 0.5)  # many are equal
    sink = rng.standard_normal(HEADS).astype(np.float32)
    few = np.array([False] * (TOKENS - 1) + [True])  # one row: the other ranks have none
    inputs = {"q": q.view(np.int16), "rows": rows.view(np.int16), "logits": logits, "sink": sink, "few": few}
    np.savez(folder / "inputs.npz", **inputs)
    found = run(folder, backend, number, interleave)
    chosen = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :TOPK], axis=1)
    for rank in found:
        np.testing.assert_array_equal(rank["chosen"], chosen)
    lists = chosen.copy()
    lists[-1, 1:] = -1
    out, _, lse = oracle.prefill(q, rows[:, None], lists[:, None], SCALE, sink)
    for suffix in ("", "_of_prefill"):
        oracle.assert_close(np.concatenate([rank[f"out{suffix}"] for rank in found], 1), out, "decode out")
        oracle.assert_close(np.concatenate([rank[f"lse{suffix}"] for rank in found], 1), lse, "decode lse")


@pytest.mark.long
@pytest.mark.parametrize(("number", "interleave"), [(2, 1), (3, 8)])
def test_processes(tmp_path: Path, rng, number: int, interleave: int) -> None:
    check(tmp_path, rng, "gloo", number, interleave)


@pytest.mark.gpu
def test_two_gpus(tmp_path: Path, rng) -> None:
    check(tmp_path, rng, "nccl", 2, 1)


def test_without_a_group() -> None:
    from cupy_mla.integrations.distributed import ContextParallel

    with pytest.raises(ValueError, match="init_process_group"):
        ContextParallel()
