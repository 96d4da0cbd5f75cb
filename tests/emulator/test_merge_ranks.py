"""`merge_ranks` on an emulated GPU: more ranks than it loads at a time, and ranks without rows."""

from __future__ import annotations

import numpy as np
import pytest

from ..kinds import BF16
from ..ops import test_context_parallel as of_operation
from .emulator import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)])
def test_ranks(kind, rng, dtype):
    of_operation.test_merge_attention(kind, rng, 9, 4, 2, dtype)


def test_nan(kind):
    of_operation.test_nan_of_a_rank_with_rows_is_seen(kind)
