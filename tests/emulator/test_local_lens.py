"""`local_lens` on an emulated GPU, up to the longest lengths."""

from __future__ import annotations

from ..ops import test_context_parallel as of_operation
from .again import again

test_lengths = again(of_operation.test_local_seq_lens, (3, 1, 5), (1024, 1023, 1 << 20))
test_longest = again(of_operation.test_longest_lengths)
