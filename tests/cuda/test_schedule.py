"""How decode is cut up: splits, clusters, and which kernel they are planned for."""

import pytest

from cupy_mla.arrays import Place
from cupy_mla.cuda import attention, few_heads_sm90, prefill_sm90, sparse_decode_sm90
from cupy_mla.cuda.jit import Kernel
from cupy_mla.cuda.schedule import best_splits, shapes
from cupy_mla.layouts import BF16_576

# Clusters of 1, 2, ... 16 blocks that one H200 runs at a time.
H200 = (132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7)

# Splits that were within 10 % of the fastest on an H200 (132 SMs): blocks unsplit, blocks at a time, splits.
MEASURED = [
    (1, 264, range(16, 33)),
    (8, 264, range(16, 23)),
    (32, 264, range(8, 9)),
    (64, 264, range(4, 5)),
    (1, 132, range(22, 33)),
    (8, 132, range(16, 17)),
    (32, 132, range(4, 5)),
    (64, 132, range(2, 3)),
    (2, 132, range(22, 33)),
    (16, 132, range(8, 9)),
    (128, 132, range(1, 2)),
]


@pytest.mark.parametrize(("blocks", "slots", "good"), MEASURED)
def test_what_was_measured_to_be_fast(blocks, slots, good):
    assert best_splits(blocks, 64, slots) in good


@pytest.mark.parametrize("steps", [0, 1, 2, 63])
@pytest.mark.parametrize("blocks", [1, 7, 131, 132, 1000])
def test_bounds(blocks, steps):
    splits = best_splits(blocks, steps, 132)
    assert 1 <= splits <= max(1, steps)
    if blocks % 132 == 0:
        assert splits == 1


@pytest.mark.parametrize("kernels", [few_heads_sm90, sparse_decode_sm90])
@pytest.mark.parametrize("queries", [1, 3, 148, 5000])
@pytest.mark.parametrize("tiles", [0, 1, 2, 5, 33, 256, 4000])
def test_every_split_has_a_tile(kernels, queries, tiles):
    shape = kernels.best_shape(16, queries, tiles, H200, None)
    assert 1 <= shape.splits <= max(tiles, 1)
    assert shape.splits == shape.cluster * shape.parts
    assert kernels.best_shape(16, queries, tiles, H200, 7).splits == 7


def test_shapes():
    found = {(s.splits, s.cluster) for s in shapes((16,), 64, 64)}
    assert {(1, 1), (2, 1), (2, 2), (12, 12), (16, 16), (17, 1), (64, 16), (64, 1)} <= found
    assert not {(17, 17), (32, 32), (12, 6)} & found


@pytest.fixture
def h200(monkeypatch) -> Place:
    """Planning as on an H200, without one."""
    monkeypatch.setattr(Kernel, "clusters_at_once", lambda self, device: H200)
    monkeypatch.setattr(attention, "compute_capability", lambda device: 90)
    for module in (attention, prefill_sm90):
        monkeypatch.setattr(module, "num_sms", lambda device: H200[0])
    return Place("cupy", 0)


@pytest.mark.parametrize(("h_q", "pieces"), [(32, 8), (64, 4), (128, 4)])
def test_a_bf16_decode_is_planned_for_the_kernel_that_runs(h200, h_q, pieces):
    """Flat rows run the prefill kernel from so many pieces of work on, others the kernel for few heads."""
    tiles = -(-h_q // 64)
    for queries in (pieces // tiles - 1, pieces // tiles, 24):
        for flat in (False, True):
            name = attention.family(0, h_q, queries, True, BF16_576, prefill=False, flat=flat)
            assert name == ("sm90" if flat and queries * tiles >= pieces else "few_heads")
            planned = attention.plan_splits(h200, queries, h_q, 2048, BF16_576, flat=flat)
            if name == "sm90":
                assert planned == prefill_sm90.best_splits(h200, h_q, queries, 2048) > 1
            else:
                assert planned == few_heads_sm90.shape_of(h200, h_q, queries, 2048, None).splits
