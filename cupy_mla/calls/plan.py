"""Memory for plans (`cuda/program.py`): the first call with a plan fills it on the GPU, later calls load it.

A plan serves the calls of one stream, either eager ones or those of one capture. They are in order there, so a later
call finds the plan filled. A call that finds no plan for its stream makes one in memory of its own. Other calls get it
once the launch that fills it is submitted, so several threads may share a plan.

The memory comes from the library's allocator, in a capture from the capture's pool. It is freed with the plan, and
whoever gets it next comes later on the stream.
"""

from __future__ import annotations

from typing import Any

from ..bridges import Library
from ..cuda import driver
from ..cuda.program import PLAN_BYTES, Plan
from .scratch import PER_THREAD_STREAM

# A plan serves so many calls, more than a model has layers. Then a new one is made, because one schedule may serve many
# steps, and their lists grow.
MOST_CALLS = 128


class PlanMemory:
    """Plans of calls with a library's arrays on a GPU."""

    def __init__(self, library: Library, device: int) -> None:
        self._allocate = library.scratch_allocator()
        self._device = device

    def take(self, plan: Plan, key: tuple[Any, ...], stream: int, capturing: bool) -> tuple[int, bool, tuple[Any, ...]]:
        """A plan for a launch on a stream of the current GPU.

        Args:
            key: as of `PlanField`.
            capturing: whether the stream is being captured.

        Returns:
            the plan's address; whether an earlier launch has filled it; and the value of `plan.made` once the launch is
            submitted: what the plan is for (stream, sizes), its address, the owner of its memory, the number of calls.
        """
        where = self._device, stream, driver.capture_of(stream) if capturing else 0, key
        if plan.made:
            made_for, address, memory, calls = plan.made
            if made_for == where and calls < MOST_CALLS:
                return address, True, (where, address, memory, calls + 1)
        if stream == PER_THREAD_STREAM:  # one handle for many streams, whose calls are in no order
            return 0, False, ()
        address, memory = self._allocate(PLAN_BYTES)
        return address, False, (where, address, memory, 1)
