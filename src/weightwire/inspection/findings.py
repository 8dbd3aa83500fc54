"""The findings of a verification: problems, and counts of intact data. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from weightwire.chain import ANCHOR, Commit, DataFile, Folder, Run, Shortcut, commit_path
from weightwire.errors import WeightwireError

__all__ = ["Findings", "Problem", "ProgressListener", "ReadProgress", "Verification", "VersionFiles"]

ProgressListener = Callable[[int, int], None]
"""Called with the bytes read so far and the total."""


@dataclass(frozen=True)
class Problem:
    """One problem. `path` is relative to the run."""

    version: int | None
    path: str
    what: str


@dataclass(frozen=True)
class Verification:
    """The result of a verification."""

    run: str
    head: int  # newest version
    whole: int  # the chain is intact up to this version; -1 if its first commit is missing or damaged
    files: int  # intact data files
    nbytes: int  # their size
    gone: int  # files that retention deleted
    below: int  # retention may delete data below this version
    rebuilt: tuple[tuple[int, int], ...]  # first and last version of each range of rebuilt weights
    compared: int  # anchors that were equal to the result of the deltas
    problems: tuple[Problem, ...]
    signed: bool = False  # the run has keys

    @property
    def fine(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class VersionFiles:
    """The files that lead to a version, as described by the record at `path`."""

    version: int
    path: str
    kind: str
    before: str
    after: str
    files: tuple[DataFile, ...]

    @property
    def is_beside(self) -> bool:
        """Whether it is a shortcut: the chain does not need it."""
        return self.path.startswith(Folder.SHORTCUTS)

    @classmethod
    def of_commit(cls, commit: Commit) -> VersionFiles:
        path = commit_path(commit.version)
        return cls(commit.version, path, commit.kind, commit.before, commit.after, commit.files)

    @classmethod
    def of_shortcut(cls, shortcut: Shortcut, path: str) -> VersionFiles:
        return cls(shortcut.version, path, ANCHOR, "", shortcut.after, shortcut.files)


@dataclass
class Findings:
    """Collects the findings of a verification."""

    url: str  # URL of the bucket
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
        """Counts an intact file."""
        self.files += 1
        self.nbytes += file.size

    def note_rebuilt(self, version: int) -> None:
        if self.rebuilt and self.rebuilt[-1][1] >= version - 1:
            self.rebuilt[-1] = self.rebuilt[-1][0], version
        else:
            self.rebuilt.append((version, version))

    def result(self, run: Run, head: int, whole: int, below: int) -> Verification:
        return Verification(
            run=run.run,
            head=head,
            whole=whole,
            files=self.files,
            nbytes=self.nbytes,
            gone=self.gone,
            below=below,
            rebuilt=tuple(self.rebuilt),
            compared=self.compared,
            problems=tuple(sorted(set(self.problems), key=_in_order)),
            signed=bool(run.keys),
        )


class ReadProgress:
    """Counts the bytes that were read, and reports them."""

    def __init__(self, report: ProgressListener) -> None:
        self._report = report
        self._done = 0
        self.total = 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._report(self._done, self.total)


def _in_order(problem: Problem) -> tuple[int, str, str]:
    return -1 if problem.version is None else problem.version, problem.path, problem.what
