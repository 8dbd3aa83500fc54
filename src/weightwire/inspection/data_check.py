"""Every byte of a run's data, held against what its records say.

Knows hashes and the headers of files, not weights: `verify` rebuilds those. Collects what is wrong instead of stopping
at it; only the bucket itself can fail. Changes nothing.
"""

from __future__ import annotations

import hashlib

from weightwire.bucket import each
from weightwire.chain import DELTA, DataFile, Folder
from weightwire.delta import Delta
from weightwire.errors import CorruptDelta, NotFound, UnsupportedFormat, WeightwireError
from weightwire.inspection.chain_walk import ChainWalk
from weightwire.inspection.findings import ReadProgress, Way
from weightwire.system import Runtime
from weightwire.weights import LENGTH_SIZE, read_size

__all__ = ["DataCheck"]

_AT_ONCE = 4  # files that are read at the same time
_PIECE = 16 << 20


class DataCheck:
    """The data that the ways of a chain lead through, and the side files of its run."""

    def __init__(self, walk: ChainWalk, runtime: Runtime, progress: ReadProgress) -> None:
        self._walk, self._bucket, self._findings = walk, walk.bucket, walk.findings
        self._runtime, self.progress = runtime, progress
        self._sizes: dict[str, int] = {}

    async def list_data(self) -> None:
        """Shortcuts, then data, then gc records: what is deleted meanwhile has been announced by then."""
        shortcuts = [one.path for one in await self._bucket.list(Folder.SHORTCUTS)]
        for folder in (Folder.DELTAS, Folder.ANCHORS):
            self._sizes |= {one.path: one.size for one in await self._bucket.list(folder)}
        await self._walk.read_below()
        await self._walk.read_shortcuts(shortcuts)
        total = sum(self._sizes.get(file.path, 0) for way in self._walk.ways for file in way.files)
        self.progress.total = total + sum(file.size for file in self._walk.run.files)

    async def check_side_files(self) -> None:
        for side in self._walk.run.files:
            found = await self._bucket.find(side.path)
            if found is None:
                self._findings.add(None, side.path, "is missing")
            elif found.size != side.size:
                self._findings.add(None, side.path, _wrong_size(found.size, side.size))
            elif (await self._hash(side.path, side.size))[0] != side.sha256:
                self._findings.add(None, side.path, "its bytes are not those that were published")

    async def check_all(self) -> None:
        files = [(way, file) for way in self._walk.ways for file in way.files]
        await each(files, _AT_ONCE, lambda job: self._check(*job))

    async def _check(self, way: Way, file: DataFile) -> None:
        if not await self.is_there(way, file):
            return
        try:
            sha256, beginning = await self._hash(file.path, file.size)
        except NotFound:
            await self.miss(way, file)
            return
        if sha256 != file.sha256:
            self._findings.add(way.version, file.path, "its bytes are not those that were published")
            return
        where = self._walk.chain.where(file.path)
        try:
            delta = Delta.remote(lambda begin, end: beginning[begin:end], file.size, where)
        except (CorruptDelta, UnsupportedFormat) as problem:
            self._findings.add(way.version, file.path, problem)
            return
        self.check_header(way, file, delta)

    async def is_there(self, way: Way, file: DataFile) -> bool:
        size = self._sizes.get(file.path)
        if size is None:
            await self.miss(way, file)
        elif size != file.size:
            self._findings.add(way.version, file.path, _wrong_size(size, file.size))
        return size == file.size

    async def miss(self, way: Way, file: DataFile) -> None:
        """It may have been deleted just now; then there is a gc record that says so."""
        if way.version >= self._walk.below:
            await self._walk.read_below()
        if way.version < self._walk.below:
            self._findings.gone += 1
        else:
            self._findings.add(way.version, file.path, "is missing")

    def check_header(self, way: Way, file: DataFile, delta: Delta) -> bool:
        what = _contradiction(way, delta)
        if what is not None:
            self._findings.add(way.version, file.path, what)
            return False
        self._findings.accept(file)
        return True

    async def _hash(self, path: str, size: int) -> tuple[str, bytes]:
        """Of all bytes of an object; and its first ones, as far as a header goes."""
        whole, beginning = hashlib.sha256(), b""
        buffer = memoryview(bytearray(min(_PIECE, size)))
        wanted = LENGTH_SIZE
        for begin in range(0, size, _PIECE):
            piece = buffer[: min(_PIECE, size - begin)]
            await self._bucket.read_into(path, piece, begin)
            await self._runtime.run_in_thread(whole.update, piece)
            if len(beginning) < wanted:
                beginning += bytes(piece)
                wanted = _header_size(beginning, size)
            self.progress.add(len(piece))
        return whole.hexdigest(), beginning


def _header_size(beginning: bytes, total: int) -> int:
    try:
        return read_size(beginning, "", total=total)
    except WeightwireError:
        return 0  # whoever parses it says what is wrong


def _wrong_size(size: int, published: int) -> str:
    return f"has {size:,} bytes, and {published:,} were published"


def _contradiction(way: Way, delta: Delta) -> str | None:
    """Between a file and the record that names it. A part of several does not know the state of all."""
    if delta.kind != way.kind:
        return f"is no {way.kind}"
    before = way.before if way.kind == DELTA else ""
    for said, meant, what in ((delta.before, before, "starts from"), (delta.after, way.after, "leads to")):
        if said and said != meant:
            return f"{what} another state than {way.path} says"
    return None
