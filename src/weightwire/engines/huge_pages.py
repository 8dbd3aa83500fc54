"""Moves weights in host memory to huge pages.

A patch writes to places all over the weights. With pages of 4 KiB, a quarter of its time is spent on finding them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

__all__ = ["move_to_huge_pages"]

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE = 2 << 20  # bytes; on ARM, a larger huge page needs more and is left out
_COLLAPSE = 25  # MADV_COLLAPSE: at once, not in the background. Linux 6.1


def move_to_huge_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Returns how many bytes were moved. Where the system does not offer it, nothing happens: it only costs time."""
    if sys.platform != "linux" or not _is_offered():
        return 0
    storages = [one.untyped_storage() for one in tensors if one.device.type == "cpu"]
    ranges = {storage.data_ptr(): storage.nbytes() for storage in storages}
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    moved = 0
    for start, size in ranges.items():
        first, last = -(-start // _HUGE) * _HUGE, (start + size) // _HUGE * _HUGE
        if first < last:
            madvise(first, last - first, mmap.MADV_HUGEPAGE)
            moved += last - first if madvise(first, last - first, _COLLAPSE) == 0 else 0
    return moved


def _is_offered() -> bool:
    try:
        return "[never]" not in _SETTING.read_text()
    except OSError:
        return False
