"""What a verification finds: problems, and what was found to be as it should be. Reads nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from weightwire.chain import ANCHOR, Commit, DataFile, Folder, Shortcut, commit_path
from weightwire.errors import WeightwireError

__all__ = ["Findings", "Problem", "ProgressListener", "ReadProgress", "Verification", "Way"]

ProgressListener = Callable[[int, int], None]
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
        return self.path.startswith(Folder.SHORTCUTS)

    @classmethod
    def of_commit(cls, commit: Commit) -> Way:
        path = commit_path(commit.version)
        return cls(commit.version, path, commit.kind, commit.before, commit.after, commit.files)

    @classmethod
    def of_shortcut(cls, shortcut: Shortcut, path: str) -> Way:
        return cls(shortcut.version, path, ANCHOR, "", shortcut.after, shortcut.files)


@dataclass
class Findings:
    """What has been found so far. Nothing stops at a problem: all of them are collected."""

    url: str  # of the bucket
    problems: list[Problem] = field(default_factory=list)
    files: int = 0
    nbytes: int = 0
    gone: int = 0
    compared: int = 0
    rebuilt: list[tuple[int, int]] = field(default_factory=list)

    def add(self, version: int | None, path: str, what: str | WeightwireError) -> None:
        if isinstance(what, WeightwireError):
            what = what.message.removeprefix(f"{self.url}/{path}: ")
        self.problems.append(Problem(version, path, what))

    def accept(self, file: DataFile) -> None:
        """A file that is as it was published."""
        self.files += 1
        self.nbytes += file.size

    def note_rebuilt(self, version: int) -> None:
        if self.rebuilt and self.rebuilt[-1][1] >= version - 1:
            self.rebuilt[-1] = self.rebuilt[-1][0], version
        else:
            self.rebuilt.append((version, version))

    def result(self, run: str, head: int, whole: int, below: int) -> Verification:
        return Verification(
            run=run,
            head=head,
            whole=whole,
            files=self.files,
            nbytes=self.nbytes,
            gone=self.gone,
            below=below,
            rebuilt=tuple(self.rebuilt),
            compared=self.compared,
            problems=tuple(sorted(set(self.problems), key=_in_order)),
        )


class ReadProgress:
    """Counts the bytes that have been read, and tells of them."""

    def __init__(self, tell: ProgressListener) -> None:
        self._tell = tell
        self._done = 0
        self.total = 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._tell(self._done, self.total)


def _in_order(problem: Problem) -> tuple[int, str, str]:
    return -1 if problem.version is None else problem.version, problem.path, problem.what
