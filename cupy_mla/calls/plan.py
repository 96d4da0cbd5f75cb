"""Memory for plans (`cuda/program.py`): what the first call with a plan finds on the GPU, for those that come later.

A plan is made on one stream, by eager calls or within one capture, and serves calls there: those come after the one
that fills it. A call that finds no such plan makes one, in memory of its own, which others take once its launch is
submitted. So calls of several threads may share a plan, too. Memory comes from the library's allocator, in a capture
from the capture's pool, and goes back with the plan: whatever gets it next comes later on its stream.
"""

from __future__ import annotations

from typing import Any

from ..bridges import Library
from ..cuda import driver
from ..cuda.program import PLAN_BYTES, Plan
from .scratch import PER_THREAD_STREAM

# A plan serves so many calls, more than a model has layers. Then it is made again, for one schedule may serve all steps
# of a decode, whose lists grow.
MOST_CALLS = 128


class PlanMemory:
    """Plans of calls with a library's arrays on a GPU."""

    def __init__(self, library: Library, device: int) -> None:
        self._allocate = library.scratch_allocator()
        self._device = device

    def take(self, plan: Plan, key: tuple[Any, ...], stream: int, capturing: bool) -> tuple[int, bool, tuple[Any, ...]]:
        """A plan for a launch on a stream of the current GPU.

        Args:
            key: of `PlanField`.
            capturing: whether the stream is being captured.

        Returns:
            its address, whether an earlier launch has filled it, and what `plan.made` is to be once the launch is
            submitted: stream and sizes that the plan is for, its address, what holds its memory, calls with it.
        """
        where = self._device, stream, driver.capture_of(stream) if capturing else 0, key
        if plan.made:
            made_for, address, memory, calls = plan.made
            if made_for == where and calls < MOST_CALLS:
                return address, True, (where, address, memory, calls + 1)
        if stream == PER_THREAD_STREAM:  # one handle for many streams
            return 0, False, ()
        address, memory = self._allocate(PLAN_BYTES)
        return address, False, (where, address, memory, 1)
