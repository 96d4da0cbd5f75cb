"""`pool_tail` on an emulated GPU: what it keeps of drafted tokens is what later pools need."""

from __future__ import annotations

from ..ops import test_pools as of_operation
from .again import again

test_drafted_tokens = again(of_operation.test_drafted_tokens_that_are_dropped)
