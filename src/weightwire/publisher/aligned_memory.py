"""Memory aligned to cache lines, on which the kernel is fastest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["CACHE_LINE", "aligned_memory"]

CACHE_LINE = 64  # bytes


def aligned_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """At least `nbytes` bytes, never zero. Their pages are not touched yet."""
    memory = np.empty(nbytes + CACHE_LINE, np.uint8)
    return memory[-memory.ctypes.data % CACHE_LINE :]
