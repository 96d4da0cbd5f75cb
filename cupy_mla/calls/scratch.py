"""Scratch memory that is kept from call to call: to allocate and free it in each call takes 1.5 us of host time.

A call takes a block for its stream, and gives it back once its last launch is submitted. The next call that takes it,
of any thread, launches on the same stream, so its kernels run after those that still use the block. While a call has a
block no other call has it, not even one of a signal handler. A block may outlive its stream. If the driver uses the
handle again, the new stream must come after the old one's work, as for CuPy's and torch's pools.

Blocks come from the driver, so they belong to no pool whose owner may empty it, unmap it or capture into it. They are
never freed, because that would wait for the GPU. The library's allocator serves calls

- that are captured: their graph may run at any time, so their memory comes from the capture's pool;
- on CUDA's per-thread default stream, which is one handle for many streams;
- that need more than a block, or find no block and no memory in the driver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableSequence
from functools import cache
from typing import Any

from ..bridges import Library
from ..cuda import driver

BLOCK_BYTES = 1 << 24  # partial results of most calls take at most 9 MB
MAX_BLOCKS = 8  # of each GPU and library
PER_THREAD_STREAM = 2  # cudaStreamPerThread

# Memory of a call: its address; the list to which the call appends it in the end; what keeps it allocated until then.
Scratch = tuple[int, MutableSequence[Any], Any]

_NOWHERE: deque[Any] = deque(maxlen=0)  # the list of memory that is not kept


class ScratchMemory:
    """Scratch memory on a GPU for calls with arrays of `library`."""

    def __init__(self, library: Library) -> None:
        self._allocate = library.scratch_allocator()
        self._free: dict[int, list[Scratch]] = {}  # blocks that no call has, by stream
        self._blocks_left = MAX_BLOCKS  # that may still be allocated

    def take(self, nbytes: int, stream: int, capturing: bool) -> Scratch:
        """At least so many bytes of the current GPU, for launches on a stream.

        Args:
            capturing: whether the stream is being captured.
        """
        if nbytes <= BLOCK_BYTES and not capturing:
            try:
                return self._free[stream].pop()
            except (KeyError, IndexError):
                if self._blocks_left and stream != PER_THREAD_STREAM:
                    block = driver.allocate(BLOCK_BYTES)
                    if block is not None:
                        self._blocks_left -= 1
                        return block, self._free.setdefault(stream, []), None
                    self._blocks_left = 0  # the library's pool may still have memory; to ask the driver again is slow
        address, memory = self._allocate(nbytes)
        return address, _NOWHERE, memory


@cache
def scratch_memory(library: Library, device: int) -> ScratchMemory:
    """The `ScratchMemory` of a library and a GPU."""
    return ScratchMemory(library)
