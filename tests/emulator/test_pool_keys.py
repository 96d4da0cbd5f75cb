"""`pool_keys` on an emulated GPU: pools of this step, of the ring, of both; drafted tokens; no ring."""

from __future__ import annotations

from ..ops import test_pools as of_operation
from .again import again

test_keys = again(of_operation.test_prompts_in_portions_and_decodes, (1, 1), (4, 8), (3, 5))
test_no_ring = again(of_operation.test_requests_without_a_ring_and_tokens_of_none)
test_rounded_means = again(of_operation.test_a_mean_is_rounded_before_its_transform)
