"""`merge_ranks` on an emulated GPU: more ranks than it loads at a time, and ranks without rows."""

from __future__ import annotations

import numpy as np

from ..kinds import BF16
from ..ops import test_context_parallel as of_operation
from .again import again

test_ranks = again(of_operation.test_merge_attention, (9, 4, 2, BF16), (9, 4, 2, np.dtype(np.float32)))
test_nan = again(of_operation.test_nan_of_a_rank_with_rows_is_seen)
