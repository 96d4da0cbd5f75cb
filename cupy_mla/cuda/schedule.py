"""How many parts a query's rows are split into (split-KV), so that a small batch fills the GPU."""

from __future__ import annotations

from functools import lru_cache

# In steps of the attention kernel's main loop: what a block costs besides its steps (Q, prologue, results), and what
# a merge of split results costs as a launch of its own.
BLOCK_OVERHEAD = 2.0
COMBINE_OVERHEAD = 3.0


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
        combine = COMBINE_OVERHEAD + 0.5 * splits * max(1.0, blocks / slots) if splits > 1 else 0.0
        return waves * (-(-steps // splits) + BLOCK_OVERHEAD) + combine

    return min(range(1, max(1, min(steps, 2 * slots)) + 1), key=time)
