"""How many splits are planned."""

import pytest

from cupy_mla.cuda.schedule import best_splits

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
