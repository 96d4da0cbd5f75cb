"""`block_scores` on an emulated GPU: ties, infinities, NaN, and ranges that begin anywhere."""

from __future__ import annotations

from ..ops import test_candidates as of_operation
from .again import again

test_blocks = again(of_operation.test_blocks, (9, 1), (300, 5), (3001, 64))
test_blocks_beside_rows = again(of_operation.test_blocks_beside_rows, (1 << 20,), (1,))
