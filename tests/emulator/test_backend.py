"""The backends of V3.2 and V4.1 on an emulated Hopper GPU: steps of a batch."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cupy_mla.metadata import uploads

from ..backends import v4_steps
from ..backends.test_sparse_mla import PATHS, Engine, assert_result, make_step


class _Staging:
    """In the place of pinned memory."""

    def __init__(self, device: int, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)

    def free(self) -> bool:
        return True

    def copy(self, to: int, size: int, stream: int) -> None:
        ctypes.memmove(to, self.bytes.ctypes.data, size)


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("path", PATHS)
def test_steps(emulated, kind, rng, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(uploads, "_Staging", _Staging)
    engine = Engine(kind, path, 8)
    for query_lens in ([1, 1, 1], [1, 1, 6, 3]):
        step = make_step(rng, 8, query_lens)
        assert_result(engine.run(step), step.want)
        counts = (step.topk_indices >= 0).sum(axis=1).astype(np.int32)
        assert_result(engine.run(step, counts=counts), step.want)
    assert "convert" in emulated.launched


@pytest.mark.long(sample=1)
@pytest.mark.parametrize("images", [False, True])
def test_steps_of_v41(emulated, kind, rng, monkeypatch: pytest.MonkeyPatch, images: bool) -> None:
    """Layers of ratios 0, 1 and 2; a decode and prefills, one of them short."""
    monkeypatch.setattr(uploads, "_Staging", _Staging)
    model = v4_steps.v41(heads=8, window=20, swa_block=16, block=32, images=12 if images else 0)
    engine = v4_steps.Engine(kind, model)
    step = v4_steps.make_step(rng, model, [1, 6, 3], [90, 40, 3], images=images, replay=images)
    v4_steps.check(engine.run(step), step)
    assert {"swa_decode", "gather_lens", "combine_swa", "compressed_slots", "gather_tail"} <= set(emulated.launched)
