"""`unpack` on an emulated Hopper GPU, of every layout."""

from __future__ import annotations

import numpy as np
import pytest

from .. import oracle
from ..ops import test_mxfp4 as of_mxfp4
from ..ops import test_unpack as of_operation
from .again import again


@of_operation.every_format
@pytest.mark.parametrize(("num_blocks", "block_size", "gap"), [(3, 2, 1), (1, 61, 0)])
def test_rows(kind, rng, fmt, num_blocks: int, block_size: int, gap: int) -> None:
    of_operation.check(kind, rng, fmt, num_blocks, block_size, gap, np.int64 if gap else np.int32)


@pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4], ids=lambda fmt: fmt.name)
def test_every_code_and_every_scale(kind, rng, fmt) -> None:
    of_operation.test_every_code_and_every_scale(kind, rng, fmt)


test_no_blocks = again(of_operation.test_no_rows)
test_mxfp4 = again(of_mxfp4.test_unpack_rows, (1,), (64,))
