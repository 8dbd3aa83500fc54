"""Reads the anchors that a sweep relies on: deleting older data is safe only if these can replace it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weightwire.bucket import ObjectInfo
from weightwire.catchup import FileClaim, Start, anchors_of, check_data_file
from weightwire.chain import ANCHOR, ChainReader, Commit, DataFile, Shortcut, commit_path, missing_commit
from weightwire.errors import NotFound, Truncated
from weightwire.system import Runtime
from weightwire.upkeep.retention import is_there

__all__ = ["AnchorCheck", "Damage", "VerifiedFiles"]

_MOST_DAMAGED = 64

VerifiedFiles = set[tuple[DataFile, float]]
"""Files that were found intact, with their `modified` time: a replaced file is read again."""


@dataclass(frozen=True)
class Damage:
    """A file of an anchor that does not hold what its record says."""

    path: str
    why: str


class AnchorCheck:
    """The anchors of one sweep. Every file is read at most once."""

    def __init__(
        self, chain: ChainReader, runtime: Runtime, objects: Iterable[ObjectInfo], verified: VerifiedFiles
    ) -> None:
        self._chain, self._runtime = chain, runtime
        self._objects = {one.path: one for one in objects}
        self._verified = verified
        self.damaged: dict[str, Damage] = {}  # by path

    @property
    def sizes(self) -> Mapping[str, int]:
        """The files that are there, without damaged ones."""
        return {path: one.size for path, one in self._objects.items() if path not in self.damaged}

    @property
    def is_over(self) -> bool:
        """Whether so many files are damaged that it is not worth reading more. Then nothing may be deleted."""
        return len(self.damaged) >= _MOST_DAMAGED

    async def is_intact(self, version: int, shortcuts: Iterable[Shortcut]) -> bool:
        """Whether one of the anchors of a version is intact. Reads them until one is."""
        commit = await self._chain.read(version)
        if commit is None:
            raise missing_commit(self._chain.where(commit_path(version)), "; nothing was deleted")
        starts = sorted(anchors_of(commit.record, shortcuts), key=lambda start: isinstance(start, Shortcut))
        for start in starts:
            if is_there(start.files, self.sizes) and await self._is_whole(start):
                return True
            if self.is_over:
                break
        return False

    async def _is_whole(self, start: Start) -> bool:
        record = commit_path(start.version) if isinstance(start, Commit) else "its shortcut"
        claim = FileClaim(record, ANCHOR, "", start.after)
        for file in start.files:
            key = file, self._objects[file.path].modified
            if key in self._verified:
                continue
            why = await self._check(file, claim)
            if why is not None:
                self.damaged[file.path] = Damage(file.path, why)
                return False
            self._verified.add(key)
        return True

    async def _check(self, file: DataFile, claim: FileClaim) -> str | None:
        try:
            return await check_data_file(self._chain.bucket, self._runtime, file, claim)
        except NotFound:
            return "missing"
        except Truncated:
            return "shorter than its record says"
