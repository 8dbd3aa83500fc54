"""Encoded blocks in memory or in a temporary file, read as one sequence of bytes."""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from weightwire.errors import CorruptDelta, OutputError

__all__ = ["AGAIN", "BlockData", "Pieces", "Spool", "Spooled", "read_exactly"]

AGAIN = "the delta is damaged: fetch it or make it again"


@dataclass(frozen=True, slots=True)
class Spooled:
    """An encoded block in a temporary file."""

    file: IO[bytes]
    start: int
    size: int

    def __len__(self) -> int:
        return self.size

    def read(self, begin: int, end: int) -> bytes:
        return read_exactly(self.file, self.start + begin, self.start + end, "temporary file")


class Spool:
    """Keeps encoded blocks in a temporary file instead of in memory.

    The file must be open for reading and writing, and stay open while the blocks are used. Blocks are appended, by any
    number of threads.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._end = file.seek(0, os.SEEK_END)
        self._lock = threading.Lock()

    def keep(self, data: bytes) -> Spooled:
        rest = memoryview(data)
        with self._lock:
            start = at = self._end
            self._end += len(rest)
        try:
            while rest:
                written = os.pwrite(self._file.fileno(), rest, at)
                at, rest = at + written, rest[written:]
        except OSError as problem:
            raise OutputError(
                f"temporary file: cannot be written ({problem.strerror})", hint="set TMPDIR to a disk with more space"
            ) from problem
        return Spooled(self._file, start, len(data))


BlockData = bytes | Spooled


def read_exactly(file: IO[bytes], begin: int, end: int, where: str) -> bytes:
    """All bytes from `begin` to before `end`. Does not use the position of the file, so threads can share it."""
    data = os.pread(file.fileno(), end - begin, begin)
    while len(data) < end - begin:
        more = os.pread(file.fileno(), end - begin - len(data), begin + len(data))
        if not more:
            raise CorruptDelta(f"{where}: truncated while it was read", hint=AGAIN)
        data += more
    return data


class Pieces:
    """Many pieces, read as one sequence of bytes."""

    def __init__(self, pieces: Sequence[BlockData]) -> None:
        self._pieces = pieces
        self._starts = [0]
        for piece in pieces:
            self._starts.append(self._starts[-1] + len(piece))

    def fetch(self, begin: int, end: int) -> bytes | memoryview:
        first = bisect.bisect_right(self._starts, begin) - 1
        last = bisect.bisect_left(self._starts, end)
        found = [self._piece(index, begin, end) for index in range(first, last)]
        return found[0] if len(found) == 1 else b"".join(found)

    def _piece(self, index: int, begin: int, end: int) -> bytes | memoryview:
        """The bytes of one piece within a range."""
        piece, start = self._pieces[index], self._starts[index]
        begin, end = max(begin - start, 0), min(end - start, len(piece))
        if isinstance(piece, Spooled):
            return piece.read(begin, end)
        return piece if (begin, end) == (0, len(piece)) else memoryview(piece)[begin:end]
