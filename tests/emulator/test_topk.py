"""`topk` on an emulated Hopper GPU, at sizes that the operations' example calls do not have."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import topk_indices
from cupy_mla.cuda import driver
from cupy_mla.cuda.topk import MOST_ORDERED, choose

from ..ops.test_topk import ADVERSARIAL, KS, adversarial, by_sort


@pytest.mark.long(sample=2)
@pytest.mark.parametrize(
    ("rows", "width", "streamed", "ctas"),
    [
        (3, 6001, False, 1), (1, 13_300, False, 4), (1, 60_000, False, 4), (4, 34_000, True, 1), (7, 17_002, True, 1),
        (13, 17_500, True, 1), (19, 18_001, True, 1), (7, 70_000, True, 1), (1, 133_000, True, 4),
    ],
)  # fmt: skip
def test_rows(emulated, kind, rng, rows: int, width: int, streamed: bool, ctas: int) -> None:
    """Rows of one CTA or of clusters, in registers or streamed; of any logits, whole and by ranges."""
    shape, cluster = choose(driver.gpu(0), rows, width, 2048)
    assert (shape.streamed, cluster) == (streamed, ctas)
    names = rng.choice(["random", "random", *ADVERSARIAL], rows)
    logits = np.stack(
        [rng.standard_normal(width, np.float32) if n == "random" else adversarial(rng, n, width) for n in names]
    )
    of_any, ends = rng.integers(0, width // 9, rows, dtype=np.int32), rng.integers(0, width + 9, rows, dtype=np.int32)
    ends[0] = width
    there = kind.put(logits)
    for starts, k in ((None, 2048), (of_any, int(rng.choice(KS)))):
        got = kind.take(topk_indices(there, k, kind.put(starts), kind.put(ends)))
        for i in range(rows):
            row = logits[i, 0 if starts is None else starts[i] : ends[i]]
            np.testing.assert_array_equal(got[i], by_sort(row, k), err_msg=f"{names[i]}, {len(row)} logits, k {k}")


@pytest.mark.long(sample=1)
@pytest.mark.parametrize(("rows", "width", "ctas"), [(5, 24_000, 1), (4, 70_000, 1), (7, 70_000, 1), (1, 63_000, 4)])
def test_short_rows_in_wide_arrays(emulated, kind, rng, rows: int, width: int, ctas: int) -> None:
    """NaN and infinity beyond ends do not show, also where logits up to the width are loaded first."""
    assert choose(driver.gpu(0), rows, width, 2048)[1] == ctas
    logits = rng.standard_normal((rows, width), np.float32)
    for most in (0, 2047, 2049, 5000, 17_000, width // 2 + 1):
        ends = (most - rng.integers(0, min(most, 9) + 1, rows)).astype(np.int32)
        ends[0] = most
        beyond = np.arange(width) >= ends[:, None]
        there = kind.put(np.where(beyond, rng.choice(np.array([np.nan, np.inf], np.float32)), logits))
        got = kind.take(topk_indices(there, 2048, None, kind.put(ends)))
        for i in range(rows):
            np.testing.assert_array_equal(got[i], by_sort(logits[i, : ends[i]], 2048), err_msg=f"{ends[i]} of {width}")


@pytest.mark.long
@pytest.mark.parametrize("width", [MOST_ORDERED, MOST_ORDERED + 1])
def test_longest_rows_with_chunks(emulated, kind, rng, width: int) -> None:
    """A pool has numbers for so many columns; longer rows have a kernel without them."""
    shape = choose(driver.gpu(0), 7, width, 512)[0]
    assert shape.ordered == (width == MOST_ORDERED)
    logits = rng.standard_normal((7, width), np.float32)
    logits[1, -700:] += 9
    starts = np.array([0, 1, 2, 3, 5, 0, 4], np.int32)
    got = kind.take(topk_indices(kind.put(logits), 512, kind.put(starts), None))
    for i in range(7):
        np.testing.assert_array_equal(got[i], by_sort(logits[i, starts[i] :], 512))
