"""Scratch memory that calls leave to the next ones: to allocate and free it in each call takes 1.5 us of the host.

A call takes a block for its stream, and gives it back once its last launch is submitted. Whichever call takes it next,
of any thread, launches on the same stream, so its kernels come after those that still use the block. While a call has a
block no other call has it, also not one of another thread or of a signal handler. (A block may outlive its stream. If
the driver uses the handle again, the new stream must come after the old one's work, as for CuPy's and torch's pools.)

Blocks come from the driver: they belong to no pool that its owner may empty, unmap or capture into. They are never
freed, which would wait for the GPU. Not kept is the memory of calls

- that are captured: their graph may run at any time, so they get memory of the capture's pool;
- on CUDA's per-thread default stream, which is one handle for many streams;
- that need more than a block, or for which there is no block left, or no memory in the driver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableSequence
from functools import cache
from typing import Any

from ..bridges import Library
from ..cuda import driver

BLOCK_BYTES = 1 << 24  # partial results of most calls take at most 9 MB
MAX_BLOCKS = 8  # of a GPU, for each library
PER_THREAD_STREAM = 2  # cudaStreamPerThread

# Its address, what it is appended to once all is launched, and what holds it.
Scratch = tuple[int, MutableSequence[Any], Any]

_NOWHERE: deque[Any] = deque(maxlen=0)  # what is appended is gone


class ScratchMemory:
    """Scratch memory on a GPU, of calls with a library's arrays.

    Args:
        library: whose allocator serves what is not kept.
    """

    def __init__(self, library: Library) -> None:
        self._allocate = library.scratch_allocator()
        self._free: dict[int, list[Scratch]] = {}  # blocks that no call has, by stream
        self._left = MAX_BLOCKS

    def take(self, nbytes: int, stream: int, capturing: bool) -> Scratch:
        """At least so many bytes of the current GPU, for launches on a stream.

        Args:
            capturing: whether the stream is being captured.
        """
        if nbytes <= BLOCK_BYTES and not capturing:
            try:
                return self._free[stream].pop()
            except (KeyError, IndexError):
                if self._left and stream != PER_THREAD_STREAM:
                    block = driver.allocate(BLOCK_BYTES)
                    if block is not None:
                        self._left -= 1
                        return block, self._free.setdefault(stream, []), None
                    self._left = 0  # a pool may have memory where the driver has none; to ask each time takes long
        address, memory = self._allocate(nbytes)
        return address, _NOWHERE, memory


@cache
def scratch_memory(library: Library, device: int) -> ScratchMemory:
    """The scratch memory on a GPU of calls with a library's arrays."""
    return ScratchMemory(library)
