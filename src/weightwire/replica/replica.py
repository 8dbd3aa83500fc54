"""A follower's local checkpoint, which is of exactly one version whatever happens.

    DIR/current -> checkpoints/<version>-<token>/   a Hugging Face checkpoint of one version, never changed
    DIR/work -> works/<token>/                      the follower's own state, changed in place: see `workdir`
        files/...                                     what else a checkpoint holds: config, tokenizer
    DIR/lock                                        held while the replica is open

Both links change at once, and what they lead to is complete by then. Engines that map files must load `current`: all
its weights are in one file, so that whoever has it open never sees two versions. Beside the work there are at most
`current`, the checkpoint handed out last, those that are lent, and one that is being made; opening a replica removes
all but `current`. Knows files, weights and deltas; no
bucket, no commit record and no event loop. One call at a time.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self

from weightwire.delta import Delta, State, digest, make_absolute, merge_absolute
from weightwire.errors import ForeignRun, ReplicaError, WeightwireError
from weightwire.replica.workdir import MODEL, Position, Workdir, different, to_json
from weightwire.system import Closeable, durable_files, to_the_end
from weightwire.weights import CheckpointWriter, Schema, Tensor, Weights

__all__ = ["Position", "Rebuild", "Replica", "SideFiles"]

SideFiles = Mapping[str, bytes | Path]
"""What a checkpoint holds besides weights: names relative to it, and the bytes or where to find them."""

_ABOUT, _FILES, _LOCK = "weightwire.json", "files", "lock"
_CURRENT, _WORK = "current", "work"
_FOLDERS = {_CURRENT: "checkpoints", _WORK: "works"}  # of what these links lead to
_OURS = re.compile(r"(\d+-)?[0-9a-f]{8}|\.?weightwire-.*|.*\.partial")  # what may be removed there
_MARK = b"weightwire replica 1\n"
_PAGE = 4096
_HINTS = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space, and go on")


class Replica(Closeable):
    """`with Replica.open(directory) as replica:`; where `position` is None it holds nothing and must be rebuilt.

    `trouble` then says in words why it holds nothing any more, if it did. A call that fails leaves the replica at the
    version it had, unless `position` is None afterwards.
    """

    def __init__(self, directory: Path, lock: int, threads: int | None) -> None:
        """Not to be called: see `open`."""
        self.directory = directory
        self._lock: int | None = lock
        self._threads = threads
        self._work: Workdir | None = None
        self._trouble: str | None = None
        self._shares_blocks = False  # that a page of the work may move when it is written to
        self._handed_out: str | None = None  # the checkpoint that `checkpoint` returned last
        self._lent: Counter[str] = Counter()  # checkpoints that somebody is loading, and how many do

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, threads: int | None = None) -> Self:
        """Locks and repairs what is there, and reads all weights once. Makes the directory if there is none."""
        path = Path(directory).absolute()
        with _using(path):
            replica = cls(path, _lock(path), threads)
            try:
                replica._recover()
            except BaseException:
                replica.close()
                raise
        return replica

    def close(self) -> None:
        """Lets go of the directory. Nothing is synced: the journal has it all."""
        self._work = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def position(self) -> Position | None:
        work = self._good()
        return work.position if work else None

    @property
    def state(self) -> State | None:
        work = self._good()
        return work.state if work else None

    @property
    def weights(self) -> Weights:
        """Read-only views, which show later versions too, also half of one: for nobody who keeps them."""
        work = self._good()
        return work.weights if work else {}

    @property
    def trouble(self) -> str | None:
        return self._work.lost if self._work and self._work.lost else self._trouble

    @property
    def journal_bytes(self) -> int:
        work = self._good()
        return sum(work.journal.values()) if work else 0

    # --- forward -------------------------------------------------------------------------------------------------

    def advance(self, deltas: Sequence[Delta], position: Position, after: str) -> Delta:
        """Goes on to a later version, by all of its files: one, several of as many ranks, or none if nothing changed.

        Everything is decoded and proven to lead to the state `after` before anything is written. Returns what changed
        in absolute values, as entries that are `coo` or, where much changed, `fresh`.
        """
        work = self._held()
        if position.run != work.position.run:
            raise ForeignRun(f"{self.directory}: holds run {work.position.run}, not {position.run}", hint="rebuild it")
        if position.version <= work.position.version:
            raise ReplicaError(
                f"{self.directory}: is at version {work.position.version}, and {position.version} is not after it",
                hint="a replica never goes back: rebuild it",
            )
        patch = make_absolute(work.weights, deltas, work.state, after, threads=self._threads)
        patch = replace(patch, where=f"version {position.version}")
        if self._shares_blocks:
            self._check_room(min(work.nbytes, _PAGE * patch.changed))
        # An interrupt comes out only afterwards: what is in the journal has happened.
        to_the_end(lambda stop: work.advance(patch, position))
        return patch

    def merge(self, patches: Sequence[Delta]) -> Delta:
        """One patch in place of several that `advance` returned one after the other, the last of them just now."""
        work = self._held()
        return merge_absolute(work.weights, patches, work.state, threads=self._threads)

    def _check_room(self, needed: int) -> None:
        """A page for which there is no room any more would be a SIGBUS, and not an error."""
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise ReplicaError(
                f"{self.directory}: {needed:,} bytes are needed, {free:,} are free", hint=_HINTS[errno.ENOSPC]
            )

    # --- to disk -------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Brings all changes to disk, and so does away with the journal."""
        with _using(self.directory):
            self._held().sync()

    def verify(self) -> None:
        """Reads all weights once more; a replica that no longer holds what it should is lost."""
        self._held().verify()

    def make_current(self) -> Path:
        """Makes `current` lead to a checkpoint of this version, if it does not yet; returns where that is now.

        It may be gone at the next call: whoever loads it has it from `checkpoint` or `lend`.
        """
        work, current = self._held(), self.directory / _CURRENT
        about = asdict(work.position) | {"state": work.state.hex}
        if not about.items() <= _read_about(current).items():
            self.sync()
            with _using(self.directory):
                self._make_checkpoint(work, about)
        return Path(os.path.realpath(current))

    def checkpoint(self) -> Path:
        """Makes `current` this version, and hands it out: the directory stays until the next one is handed out."""
        path = self.make_current()
        if path.name != self._handed_out:
            self._handed_out = path.name
            self._tidy(_CURRENT)
        return path

    def lend(self) -> Path:
        """Makes `current` this version, and lends it: the directory stays until it is given back."""
        path = self.make_current()
        self._lent[path.name] += 1
        return path

    def give_back(self, path: Path) -> None:
        """A directory that was lent is no longer needed."""
        self._lent[path.name] -= 1
        self._lent += Counter()  # without those that nobody has any more
        self._tidy(_CURRENT)

    def _make_checkpoint(self, work: Workdir, about: dict[str, Any]) -> None:
        folder = self.directory / _FOLDERS[_CURRENT]
        made = folder / f"{work.position.version}-{secrets.token_hex(4)}"
        durable_files.make_directory(folder)
        try:
            shutil.copytree(work.path / _FILES, made)
            self._shares_blocks = durable_files.clone_file(work.path / MODEL, made / MODEL)
            durable_files.write_file(made / _ABOUT, to_json(about | {"shares_blocks": self._shares_blocks}))
            durable_files.sync_tree(made)
            durable_files.point(self.directory / _CURRENT, f"{folder.name}/{made.name}")
        finally:
            self._tidy(_CURRENT)

    # --- from nothing --------------------------------------------------------------------------------------------

    def rebuild(self, schema: Schema, side_files: SideFiles | None = None) -> Rebuild:
        """Weights to be filled in, in place of what is held: see there."""
        if self._lock is None:
            raise ReplicaError(f"{self.directory}: the replica is closed", hint="open it again")
        for name in side_files or {}:
            _check_side_file(name)
        return Rebuild(self, schema, side_files or {}, self._threads)

    def _adopt(self, path: Path) -> None:
        """Takes on a complete work directory, in place of the one that is held."""
        work, link = Workdir.map(path, self._threads), self.directory / _WORK
        try:
            durable_files.point(link, f"{path.parent.name}/{path.name}")
        except BaseException:
            if _leads_to(link) == path.name and self._work:
                self._work.lost = "another state may have taken its place on disk"
            raise
        self._work, self._trouble, self._shares_blocks = work, None, False

    # --- after a crash -------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        for name in _FOLDERS:
            durable_files.remove(self.directory / f"{name}.partial")
            self._tidy(name)
        link = self.directory / _WORK
        if not link.is_symlink():
            return
        try:
            self._work = Workdir.open(link.resolve(), self._threads)
            self._shares_blocks = bool(_read_about(self.directory / _CURRENT).get("shares_blocks"))
        except (WeightwireError, ValueError, LookupError, TypeError, AttributeError, FileNotFoundError) as problem:
            reason = problem.message if isinstance(problem, WeightwireError) else f"{type(problem).__name__} {problem}"
            self._trouble = f"the replica is damaged, and was dropped: {reason}"
            durable_files.remove(link)
            self._tidy(_WORK)

    def _tidy(self, link: str) -> None:
        """Removes all that a link might lead to, but for what it does and what is in use.

        What cannot be removed now will be later, at the latest when the replica is opened again.
        """
        kept = {_leads_to(self.directory / link), self._handed_out, *self._lent}
        with suppress(OSError):
            for path in (self.directory / _FOLDERS[link]).iterdir():
                if path.name not in kept and _OURS.fullmatch(path.name):
                    durable_files.remove(path)

    # --- small things --------------------------------------------------------------------------------------------

    def _good(self) -> Workdir | None:
        return self._work if self._work and not self._work.lost else None

    def _held(self) -> Workdir:
        work = self._good()
        if self._lock is None:
            raise ReplicaError(f"{self.directory}: the replica is closed", hint="open it again")
        if work is None:
            raise ReplicaError(f"{self.directory}: {self.trouble or 'the replica holds nothing'}", hint="rebuild it")
        return work


class Rebuild(Mapping[str, Tensor]):
    """New weights for a replica: `with replica.rebuild(...) as new:`, fill in `new[name].bits`, then `new.finish(...)`.

    All zeros at first, with room on disk for all of them. Until `finish` has returned the replica is as it was, and it
    stays so if the block ends without it.
    """

    def __init__(self, replica: Replica, schema: Schema, side_files: SideFiles, threads: int | None) -> None:
        """Not to be called: see `Replica.rebuild`."""
        self._replica = replica
        self._names = tuple(schema)
        self._side_files = side_files
        self._threads = threads
        self._path = replica.directory / _FOLDERS[_WORK] / secrets.token_hex(4)
        self._writer = CheckpointWriter(self._path, schema=schema)
        self._tensors: dict[str, Tensor] = {}
        self._open = False

    def __enter__(self) -> Self:
        with _using(self._replica.directory):
            durable_files.make_directory(self._path.parent)
            self._writer.__enter__()
        self._open = True
        self._tensors = {name: self._writer[name] for name in self._names}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tensors = {}
        if self._open:
            problem = error or _Unfinished()
            self._writer.__exit__(type(problem), problem, traceback)
            self._open = False

    def finish(self, position: Position, state: State) -> None:
        """Checks that the weights have this state, brings them to disk, and then makes them the replica's, at once."""
        if not self._open:
            raise ValueError("a rebuild can be finished once, inside its block")
        if name := different(digest(self._tensors, threads=self._threads), state):
            raise ReplicaError(
                f"{self._replica.directory}: tensor {name!r} was not filled in as it should be",
                hint="rebuild it once more",
            )
        self._open = False
        self._tensors = {}
        self._writer.__exit__(None, None, None)
        with _using(self._replica.directory):
            try:
                self._write_files()
                Workdir.complete(self._path, position, state)
                self._replica._adopt(self._path)
            finally:
                self._replica._tidy(_WORK)

    def _write_files(self) -> None:
        files = self._path / _FILES
        files.mkdir()
        for name, content in self._side_files.items():
            if not _is_ours(name):
                (files / name).parent.mkdir(parents=True, exist_ok=True)
                durable_files.write_file(files / name, content if isinstance(content, bytes) else content.read_bytes())
        durable_files.sync_tree(files)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _Unfinished(Exception):
    """A block that ended without `finish`."""


# --- side files --------------------------------------------------------------------------------------------------


def _check_side_file(name: str) -> None:
    """They come from a bucket: none may lead out of the checkpoint."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ReplicaError(f"{name!r} cannot be the name of a side file", hint="it must stay inside the checkpoint")


def _is_ours(name: str) -> bool:
    """Files that would contradict the one that holds the weights, as those of a checkpoint that once was in shards."""
    return name == _ABOUT or name.endswith((".safetensors", ".safetensors.index.json"))


def _read_about(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself; nothing if it is not one of ours."""
    try:
        about = json.loads((checkpoint / _ABOUT).read_bytes())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) and (checkpoint / MODEL).is_file() else {}


# --- the directory -----------------------------------------------------------------------------------------------


def _leads_to(link: Path) -> str | None:
    return os.path.basename(os.readlink(link)) if link.is_symlink() else None


def _lock(directory: Path) -> int:
    """Makes a directory ours, for as long as the lock is held. One that holds something else is left alone."""
    directory.mkdir(parents=True, exist_ok=True)
    found = {path.name for path in directory.iterdir() if not path.name.startswith(".")} - {"lost+found"}
    if found and _LOCK not in found:
        raise ReplicaError(f"{directory}: holds other files already", hint="name a new directory for the replica")
    lock = durable_files.lock_file(directory / _LOCK)
    if lock is None:
        raise ReplicaError(
            f"{directory}: is in use by another follower", hint="stop that one, or name another directory"
        )
    mark = os.pread(lock, len(_MARK), 0)
    if mark != _MARK and (found - {_LOCK} or not _MARK.startswith(mark)):
        os.close(lock)
        raise ReplicaError(f"{directory}: is no replica", hint="name a new directory for the replica")
    try:
        os.pwrite(lock, _MARK, 0)
        os.fsync(lock)
    except BaseException:
        os.close(lock)
        raise
    return lock


@contextmanager
def _using(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise ReplicaError(
            f"{problem.filename or directory}: {problem.strerror or problem}",
            hint=_HINTS.get(problem.errno or 0, "check that the directory is on a disk that works, and may be written"),
        ) from problem
