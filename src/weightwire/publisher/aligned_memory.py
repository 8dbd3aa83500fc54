"""Memory aligned to cache lines, on which the kernel is fastest."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

__all__ = ["CACHE_LINE", "aligned_memory", "passing_memory"]

CACHE_LINE = 64  # bytes


def aligned_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """At least `nbytes` bytes, never zero. Their pages are not touched yet."""
    memory = np.empty(nbytes + CACHE_LINE, np.uint8)
    return memory[-memory.ctypes.data % CACHE_LINE :]


def passing_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """At least `nbytes` bytes that go back to the system as soon as they are freed. The allocator would keep them."""
    pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8)
