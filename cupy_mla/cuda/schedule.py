"""How many parts a query's rows are split into (split-KV), so that a small batch fills the GPU."""

from __future__ import annotations

from functools import lru_cache

# In steps of the attention kernel's main loop (about 4 us on an H200): what a block costs besides its steps (Q, first
# rows, results), what the launch that merges splits costs, and what each split adds to it, once and a block. Fitted to
# 2048 rows at 16, 64 and 128 heads, batch 1 to 64, 1 to 64 splits: what is chosen is within 10 % of the best of those.
BLOCK_OVERHEAD = 2.0
COMBINE_OVERHEAD = 0.5
SPLIT_OVERHEAD, SPLIT_OVERHEAD_PER_BLOCK = 0.08, 0.01


@lru_cache(maxsize=4096)
def best_splits(blocks: int, steps: int, slots: int) -> int:
    """The number of splits with the least estimated time.

    Args:
        blocks: blocks of an unsplit launch (queries times head tiles).
        steps: main-loop steps of the longest query.
        slots: blocks that the GPU runs at a time.

    Returns:
        1 when the blocks fill the GPU, at most one split a step.
    """

    def time(splits: int) -> float:
        waves = -(-blocks * splits // slots)
        work = waves * (-(-steps // splits) + BLOCK_OVERHEAD)
        if splits == 1:
            return work
        return work + COMBINE_OVERHEAD + splits * (SPLIT_OVERHEAD + SPLIT_OVERHEAD_PER_BLOCK * blocks)

    return min(range(1, max(1, min(steps, 2 * slots)) + 1), key=time)
