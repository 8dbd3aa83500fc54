"""Checks every byte of a run's data against its records.

Checks hashes and file headers; `verify` rebuilds the weights. Collects problems instead of raising them; only errors of
the bucket are raised.
"""

from __future__ import annotations

from weightwire.bucket import each
from weightwire.catchup import FileClaim, check_data_file, hash_object
from weightwire.chain import ANCHOR, BASE, DataFile, Folder, SideFile, commit_path, find_or_list
from weightwire.delta import Delta
from weightwire.errors import NotFound
from weightwire.inspection.chain_walk import ChainWalk
from weightwire.inspection.findings import ReadProgress, VersionFiles
from weightwire.system import Runtime

__all__ = ["DataCheck"]

_AT_ONCE = 4  # files read at the same time


class DataCheck:
    """The data files of a chain, and the side files of its run."""

    def __init__(self, walk: ChainWalk, runtime: Runtime, progress: ReadProgress) -> None:
        self._walk, self._bucket, self._findings = walk, walk.bucket, walk.findings
        self._runtime, self.progress = runtime, progress
        self._sizes: dict[str, int] = {}
        self._gone: set[str] = set()  # files that retention deleted

    async def list_data(self) -> None:
        """Lists shortcuts, then data, then gc records: the gc records then cover every deletion until now."""
        shortcuts = [one.path for one in await self._bucket.list(Folder.SHORTCUTS)]
        for folder in (Folder.DELTAS, Folder.ANCHORS):
            self._sizes |= {one.path: one.size for one in await self._bucket.list(folder)}
        await self._walk.read_below()
        await self._walk.read_shortcuts(shortcuts)
        total = sum(self._sizes.get(file.path, 0) for entry in self._walk.files for file in entry.files)
        self.progress.total = total + sum(file.size for file in self._walk.run.files)

    async def check_side_files(self) -> None:
        for side in self._walk.run.files:
            found = await find_or_list(self._bucket, side.path)
            if found is None:
                self._findings.add(None, side.path, "missing")
            elif found.size != side.size:
                self._findings.add(None, side.path, _wrong_size(found.size, side.size))
            elif await self._hash(side) != side.sha256:
                self._findings.add(None, side.path, "corrupt: its hash does not match the record")

    async def _hash(self, side: SideFile) -> str:
        return (await hash_object(self._bucket, self._runtime, side.path, side.size, self.progress.add))[0]

    async def check_all(self) -> None:
        files = [(entry, file) for entry in self._walk.files for file in entry.files]
        await each(files, _AT_ONCE, lambda job: self._check(*job))

    async def _check(self, entry: VersionFiles, file: DataFile) -> None:
        if not await self.is_there(entry, file):
            return
        try:
            what = await check_data_file(self._bucket, self._runtime, file, _claim(entry), self.progress.add)
        except NotFound:
            await self.miss(entry, file)
            return
        self._note(entry, file, what)

    async def is_there(self, entry: VersionFiles, file: DataFile) -> bool:
        size = self._sizes.get(file.path)
        if size is None:
            await self.miss(entry, file)
        elif size != file.size:
            self._findings.add(entry.version, file.path, _wrong_size(size, file.size))
        return size == file.size

    async def miss(self, entry: VersionFiles, file: DataFile) -> None:
        """Records a missing file, unless a gc record says that retention may have deleted it."""
        if entry.version >= self._walk.below:
            await self._walk.read_below()
        if entry.version < self._walk.below:
            self._findings.gone += 1
            self._gone.add(file.path)
        else:
            self._findings.add(entry.version, file.path, "missing")

    def check_newest(self) -> None:
        """Checks that retention left what the newest version needs: anyone with write access can add its records."""
        is_reachable, last = True, None
        for last in self._walk.files:
            is_whole = not any(file.path in self._gone for file in last.files)
            if last.kind == BASE or (last.kind == ANCHOR and is_whole):
                is_reachable = True
            elif not is_whole and not last.is_beside:
                is_reachable = False
        if last is not None and not is_reachable:
            what = "cannot be rebuilt: retention deleted data that it needs, and no later anchor is there"
            self._findings.add(last.version, commit_path(last.version), what)

    def check_header(self, entry: VersionFiles, file: DataFile, delta: Delta) -> bool:
        return self._note(entry, file, _claim(entry).contradiction(delta))

    def _note(self, entry: VersionFiles, file: DataFile, what: str | None) -> bool:
        if what is None:
            self._findings.accept(file)
        else:
            self._findings.add(entry.version, file.path, what)
        return what is None


def _claim(entry: VersionFiles) -> FileClaim:
    return FileClaim(entry.path, entry.kind, entry.before, entry.after)


def _wrong_size(size: int, published: int) -> str:
    return f"has {size:,} bytes, but {published:,} were published"
