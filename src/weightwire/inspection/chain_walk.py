"""An audit under way: the chain from its first version, and every byte of data, held against what records say.

Knows records, hashes and the headers of files. Collects what is wrong instead of stopping at it; only the bucket itself
can fail. Changes nothing. The weights are none of its business: `audit` rebuilds them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from weightwire.bucket import Bucket, each
from weightwire.chain import (
    ANCHOR,
    DELTA,
    ChainReader,
    Commit,
    DataFile,
    Gc,
    Run,
    Sealed,
    Shortcut,
    back_versions,
    commit_path,
    shortcut_path,
)
from weightwire.delta import Delta
from weightwire.errors import CorruptDelta, NotFound, RunError, UnsupportedFormat, WeightwireError
from weightwire.system import Runtime
from weightwire.weights import LENGTH_SIZE, read_size

__all__ = ["ChainWalk", "Problem", "Progress", "Verification", "Way"]

_AHEAD = 64  # commits that are asked for at the same time
_AT_ONCE = 4  # files that are read at the same time
_PIECE = 16 << 20

_COMMIT = re.compile(r"commits/([0-9]{20})\.json")
_GC = re.compile(r"gc/([0-9]{20})\.json")

Progress = Callable[[int, int], None]
"""Hears how many bytes of how many have been read."""


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be. `path` is within the bucket."""

    version: int | None
    path: str
    what: str


@dataclass(frozen=True)
class Verification:
    """What was found."""

    run: str
    head: int  # the newest version
    whole: int  # the version up to which the chain is whole; -1 if not even the first is there
    files: int  # of data, that are as they were published
    nbytes: int  # of these
    gone: int  # files that retention has deleted
    below: int  # the version below which it may
    rebuilt: tuple[tuple[int, int], ...]  # from which version to which the weights were rebuilt
    compared: int  # anchors that were found to hold what the deltas lead to
    problems: tuple[Problem, ...]

    @property
    def fine(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Way:
    """Files that lead to a version, and what the record at `path` says of them."""

    version: int
    path: str
    kind: str
    before: str
    after: str
    files: tuple[DataFile, ...]

    @property
    def is_beside(self) -> bool:
        """Whether the chain goes on without it."""
        return self.path.startswith("shortcuts/")

    @classmethod
    def of(cls, commit: Commit) -> Way:
        path = commit_path(commit.version)
        return cls(commit.version, path, commit.kind, commit.before, commit.after, commit.files)


@dataclass
class ChainWalk:
    """An audit under way."""

    bucket: Bucket
    runtime: Runtime
    run: Run
    progress: Progress
    head: int = -1
    below: int = 0
    ways: list[Way] = field(default_factory=list)  # by version; a commit comes before the anchors of its version
    problems: list[Problem] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)  # of the commits, by version
    sizes: dict[str, int] = field(default_factory=dict)
    rebuilt: list[tuple[int, int]] = field(default_factory=list)
    compared: int = 0
    gone: int = 0
    files: int = 0
    nbytes: int = 0
    _done: int = 0
    _total: int = 0

    def __post_init__(self) -> None:
        self.chain = ChainReader(self.bucket, self.run)

    def result(self) -> Verification:
        return Verification(
            run=self.run.run,
            head=self.head,
            whole=len(self.hashes) - 1,
            files=self.files,
            nbytes=self.nbytes,
            gone=self.gone,
            below=self.below,
            rebuilt=tuple(self.rebuilt),
            compared=self.compared,
            problems=tuple(sorted(set(self.problems), key=_in_order)),
        )

    def add(self, version: int | None, path: str, what: str | WeightwireError) -> None:
        if isinstance(what, WeightwireError):
            what = what.message.removeprefix(f"{self.chain.where(path)}: ")
        self.problems.append(Problem(version, path, what))

    def read(self, nbytes: int) -> None:
        self._done += nbytes
        self.progress(self._done, self._total)

    # --- the chain -----------------------------------------------------------------------------------------------

    async def walk(self) -> None:
        """From the first version to the newest, or to where the chain breaks."""
        listed = [_COMMIT.fullmatch(one.path) for one in await self.bucket.list("commits/")]
        self.head = max((int(matched[1]) for matched in listed if matched), default=-1)
        parent: Sealed[Commit] | None = None
        while (version := len(self.hashes)) <= self.head:
            try:
                found = await self.chain.read_after(parent, min(_AHEAD, self.head + 1 - version))
            except (RunError, UnsupportedFormat) as problem:
                self.add(version, commit_path(version), problem)
                return
            if not found:
                self.add(version, commit_path(version), "is missing, though later versions are there")
                return
            for parent in found:
                self._accept(parent)

    def _accept(self, commit: Sealed[Commit]) -> None:
        record = commit.record
        path = commit_path(record.version)
        for version, sha256 in zip(back_versions(record.version), record.back, strict=True):
            if self.hashes[version] != sha256:
                self.add(record.version, path, f"names another commit of version {version} than there is")
        self.hashes.append(commit.sha256)
        self.ways.append(Way.of(record))

    # --- what there is -------------------------------------------------------------------------------------------

    async def list_data(self) -> None:
        """Shortcuts, then data, then gc records: what is deleted meanwhile has been announced by then."""
        shortcuts = [one.path for one in await self.bucket.list("shortcuts/")]
        for folder in ("deltas/", "anchors/"):
            self.sizes |= {one.path: one.size for one in await self.bucket.list(folder)}
        await self._read_below()
        anchors = [await self._read_shortcut(path) for path in shortcuts]
        self.ways += [way for way in anchors if way is not None]
        self.ways.sort(key=lambda way: (way.version, way.path))  # "commits/" comes before "shortcuts/"
        self._total = sum(self.sizes.get(file.path, 0) for way in self.ways for file in way.files)
        self._total += sum(file.size for file in self.run.files)

    async def _read_below(self) -> None:
        listed = [_GC.fullmatch(one.path) for one in await self.bucket.list("gc/")]
        for number in sorted((int(matched[1]) for matched in listed if matched), reverse=True):
            if number <= self.below:
                return
            path = f"gc/{number:020d}.json"
            try:
                record = self.chain.unseal(await self.bucket.get(path), Gc, path).record
            except (RunError, UnsupportedFormat) as problem:
                self.add(None, path, problem)
                continue
            if record.below == number and number <= self.head:
                self.below = number
                return
            self.add(None, path, f"speaks of version {record.below}")

    async def _read_shortcut(self, path: str) -> Way | None:
        try:
            sealed = self.chain.unseal(await self.bucket.get(path), Shortcut, path)
        except NotFound:
            return None  # retention was faster
        except (RunError, UnsupportedFormat) as problem:
            self.add(None, path, problem)
            return None
        shortcut = sealed.record
        version = shortcut.version
        what = "says something else than its name" if shortcut_path(sealed) != path else None
        what = what or await self._contradiction(shortcut)
        if what is not None:
            self.add(version, path, what)
        if what is not None or version >= len(self.hashes):
            return None
        return Way(version, path, ANCHOR, "", shortcut.after, shortcut.files)

    async def _contradiction(self, shortcut: Shortcut) -> str | None:
        """Between a shortcut and the chain. Past where that breaks there is nothing to hold it against."""
        version = shortcut.version
        if version < len(self.hashes):
            same = shortcut.after == self.ways[version].after
            return None if same else "leads to another state than the commit of its version"
        if version > self.head and await self.bucket.find(commit_path(version)) is None:
            return "leads to a version that does not exist"
        return None

    # --- data ----------------------------------------------------------------------------------------------------

    async def check_side_files(self) -> None:
        for side in self.run.files:
            found = await self.bucket.find(side.path)
            if found is None:
                self.add(None, side.path, "is missing")
            elif found.size != side.size:
                self.add(None, side.path, _wrong_size(found.size, side.size))
            elif (await self._hash(side.path, side.size))[0] != side.sha256:
                self.add(None, side.path, "its bytes are not those that were published")

    async def check_data(self) -> None:
        async def check(job: tuple[Way, DataFile]) -> None:
            way, file = job
            if not await self.is_there(way, file):
                return
            try:
                sha256, beginning = await self._hash(file.path, file.size)
            except NotFound:
                await self.miss(way, file)
                return
            if sha256 != file.sha256:
                self.add(way.version, file.path, "its bytes are not those that were published")
                return
            try:
                delta = Delta.remote(lambda begin, end: beginning[begin:end], file.size, self.chain.where(file.path))
            except (CorruptDelta, UnsupportedFormat) as problem:
                self.add(way.version, file.path, problem)
                return
            self.check_header(way, file, delta)

        await each([(way, file) for way in self.ways for file in way.files], _AT_ONCE, check)

    async def is_there(self, way: Way, file: DataFile) -> bool:
        size = self.sizes.get(file.path)
        if size is None:
            await self.miss(way, file)
        elif size != file.size:
            self.add(way.version, file.path, _wrong_size(size, file.size))
        return size == file.size

    async def miss(self, way: Way, file: DataFile) -> None:
        """It may have been deleted just now; then there is a gc record that says so."""
        if way.version >= self.below:
            await self._read_below()
        if way.version < self.below:
            self.gone += 1
        else:
            self.add(way.version, file.path, "is missing")

    def check_header(self, way: Way, file: DataFile, delta: Delta) -> bool:
        what = _contradiction(way, delta)
        if what is not None:
            self.add(way.version, file.path, what)
            return False
        self.files += 1
        self.nbytes += file.size
        return True

    async def _hash(self, path: str, size: int) -> tuple[str, bytes]:
        """Of all bytes of an object; and its first ones, as far as a header goes."""
        whole, beginning = hashlib.sha256(), b""
        buffer = memoryview(bytearray(min(_PIECE, size)))
        wanted = LENGTH_SIZE
        for begin in range(0, size, _PIECE):
            piece = buffer[: min(_PIECE, size - begin)]
            await self.bucket.read_into(path, piece, begin)
            await self.runtime.run_in_thread(whole.update, piece)
            if len(beginning) < wanted:
                beginning += bytes(piece)
                wanted = _header_size(beginning, size)
            self.read(len(piece))
        return whole.hexdigest(), beginning


def _in_order(problem: Problem) -> tuple[int, str, str]:
    return -1 if problem.version is None else problem.version, problem.path, problem.what


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
