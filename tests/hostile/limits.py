"""Limits of time and memory for a block that handles hostile input."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["limited"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@contextmanager
def limited(seconds: int = 60, nbytes: int = 300 << 20) -> Iterator[None]:
    """Fails if the block takes longer, or if the memory of this process grows by more bytes (on Linux)."""

    def expire(*_: object) -> None:
        raise AssertionError(f"not done within {seconds} s")

    before = _peak()
    handler = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    grown = _peak(clear=False) - before
    assert grown < nbytes, f"it took {grown >> 20} MiB more"


def _peak(*, clear: bool = True) -> int:
    """The most memory since it was cleared."""
    if not _CLEAR.exists():
        return 0
    if clear:
        _CLEAR.write_text("5")
    found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
    return int(found[1]) << 10 if found else 0
