"""`unpack` on an emulated Hopper GPU, of every layout."""

from __future__ import annotations

import numpy as np
import pytest

from .. import oracle
from ..ops import test_mxfp4 as of_mxfp4
from ..ops import test_unpack as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@of_operation.every_format
@pytest.mark.parametrize(("num_blocks", "block_size", "gap"), [(3, 2, 1), (1, 61, 0)])
def test_rows(kind, rng, fmt, num_blocks: int, block_size: int, gap: int) -> None:
    of_operation.check(kind, rng, fmt, num_blocks, block_size, gap, np.int64 if gap else np.int32)


@pytest.mark.parametrize("fmt", [oracle.V32, oracle.V4], ids=lambda fmt: fmt.name)
def test_every_code_and_every_scale(kind, rng, fmt) -> None:
    of_operation.test_every_code_and_every_scale(kind, rng, fmt)


def test_no_blocks(kind) -> None:
    of_operation.test_no_rows(kind)


@pytest.mark.parametrize("block_size", [1, 64])
def test_mxfp4(kind, rng, block_size: int) -> None:
    of_mxfp4.test_unpack_rows(kind, rng, block_size)
