"""Reads the heat map of a run from the headers of its deltas. No weights are read.

Each header is read once. A delta that is missing or damaged leaves a gap: `weightwire verify` reports the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightwire.bucket import each
from weightwire.chain import DELTA, ChainReader, Commit, DataFile
from weightwire.delta import Delta, head_size
from weightwire.errors import BucketError, CorruptDelta, NoBucket, Unavailable, UnsupportedFormat
from weightwire.page.layers import HeatRow
from weightwire.page.run_view import HeatMap, column_of, heat_of, sampled
from weightwire.weights import LENGTH_SIZE, read_size

__all__ = ["HeatReader"]

_AT_ONCE = 16
_GUESS = 32 << 10  # bytes: nearly every header fits
_LARGEST = 16 << 20  # bytes: a larger header is treated as damage


class HeatReader:
    """`look` returns the heat map of these commits."""

    def __init__(self, chain: ChainReader, rows: Sequence[HeatRow]) -> None:
        self._chain, self._rows = chain, rows
        self._columns: dict[int, tuple[float, ...] | None] = {}

    async def look(self, commits: Sequence[Commit]) -> HeatMap:
        _, versions = sampled(commits)
        by_version = {commit.version: commit for commit in commits}

        async def read(version: int) -> None:
            try:
                self._columns[version] = column_of(self._rows, await self._changed(by_version[version]))
            except (NoBucket, Unavailable):
                raise
            except (BucketError, CorruptDelta, UnsupportedFormat):
                self._columns[version] = None

        wanted = [one for one in versions if by_version[one].kind == DELTA]
        await each([one for one in wanted if one not in self._columns], _AT_ONCE, read)
        self._columns = {one: self._columns[one] for one in wanted}
        return heat_of(commits, self._rows, self._columns)

    async def _changed(self, commit: Commit) -> dict[str, int]:
        """The number of changed weights in each tensor, summed over the files of all ranks."""
        changed: dict[str, int] = {}
        for file in commit.files:
            delta = await self._header(file)
            for name, entry in delta.entries.items():
                changed[name] = changed.get(name, 0) + entry.changed
        return changed

    async def _header(self, file: DataFile) -> Delta:
        where = self._chain.where(file.path)
        head = await self._bytes(file, 0, min(file.size, _GUESS))
        head = await self._up_to(file, head, read_size(head[:LENGTH_SIZE], where, total=file.size, error=CorruptDelta))
        head = await self._up_to(file, head, head_size(head, where, file.size))
        return Delta.remote(lambda begin, end: head[begin:end], file.size, where)

    async def _up_to(self, file: DataFile, head: bytes, size: int) -> bytes:
        if size > _LARGEST:
            raise CorruptDelta(f"{self._chain.where(file.path)}: the head of {size:,} bytes is too large")
        return head + await self._bytes(file, len(head), size) if size > len(head) else head

    async def _bytes(self, file: DataFile, begin: int, end: int) -> bytes:
        buffer = bytearray(end - begin)
        await self._chain.bucket.read_into(file.path, memoryview(buffer), begin)
        return bytes(buffer)
