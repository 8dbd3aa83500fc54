"""Whether a follower that starts now can get the newest version of a run.

Reads records, and looks up the files that lead to the newest version. Reads no data and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weightwire.bucket import Bucket, each
from weightwire.catchup import ChainPath, missing_side_file, plan
from weightwire.chain import (
    BASE,
    ChainReader,
    Commit,
    DataFile,
    Run,
    SideFile,
    check_free,
    find_or_list,
    read_run,
)
from weightwire.errors import NoRun, WeightwireError

__all__ = ["Readiness", "read_readiness"]

_AT_ONCE = 16


@dataclass(frozen=True)
class Readiness:
    """What a follower finds. `run` is None if nothing was published, `version` if nothing was committed."""

    run: Run | None = None
    version: int | None = None
    files: tuple[DataFile, ...] = ()  # to download
    base: str | None = None  # the checkpoint that the run starts from, if the follower needs it
    lost: tuple[str, ...] = ()  # missing or truncated files that another path avoids
    problem: WeightwireError | None = None  # why the newest version cannot be read

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


async def read_readiness(bucket: Bucket) -> Readiness:
    try:
        run = await _find_run(bucket)
    except WeightwireError as problem:
        return Readiness(problem=problem)
    if run is None:
        return Readiness()
    try:
        return await _examine(ChainReader(bucket, run))
    except WeightwireError as problem:
        return Readiness(run, problem=problem)


async def _find_run(bucket: Bucket) -> Run | None:
    """Raises if the bucket cannot hold a run."""
    try:
        return await read_run(bucket)
    except NoRun:
        await check_free(bucket)
        return None


async def _examine(chain: ChainReader) -> Readiness:
    head = await chain.read_head()
    if head is None or not head.record.after:
        return Readiness(chain.run)
    version, lost = head.record.version, set[str]()
    while True:
        try:
            path = await plan(chain, head, lost=lost)
        except WeightwireError as problem:
            return Readiness(chain.run, version, lost=tuple(sorted(lost)), problem=problem)
        files = _files(path)
        missing = await _missing(chain.bucket, files)
        if not missing:
            break
        lost |= missing
    start = path.start
    base = start.source if isinstance(start, Commit) and start.kind == BASE else None
    missing = await _missing(chain.bucket, chain.run.files)
    side = next((file for file in chain.run.files if file.path in missing), None)
    missing_file = missing_side_file(chain.where(side.path), side.name) if side else None
    return Readiness(chain.run, version, files, base, tuple(sorted(lost)), missing_file)


def _files(path: ChainPath) -> tuple[DataFile, ...]:
    first = path.start.files if path.start else ()
    return (*first, *(file for commit in path.commits for file in commit.record.files))


async def _missing(bucket: Bucket, files: Iterable[DataFile | SideFile]) -> set[str]:
    """The paths of files that do not exist or have another size."""
    missing: set[str] = set()

    async def look(file: DataFile | SideFile) -> None:
        found = await find_or_list(bucket, file.path)
        if found is None or found.size != file.size:
            missing.add(file.path)

    await each(files, _AT_ONCE, look)
    return missing
