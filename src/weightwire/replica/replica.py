"""A follower's local checkpoint, which is of exactly one version whatever happens.

    DIR/current -> checkpoints/<version>-<token>/   a Hugging Face checkpoint of one version, never changed
    DIR/work -> works/<token>/                      the follower's own state, changed in place: see `workdir`
        files/...                                     what else a checkpoint holds: config, tokenizer
    DIR/lock                                        held while the replica is open

Both links change at once, and what they lead to is complete by then. Engines that map files must load `current`: all
its weights are in one file, so that whoever has it open never sees two versions. Beside the work there are at most
`current`, the checkpoint handed out last, those that are lent, and one that is being made; opening a replica removes
all but `current`. Knows files, weights and deltas; no bucket, no commit record and no event loop. One call at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from weightwire.delta import Delta, State, make_absolute, merge_absolute
from weightwire.errors import ForeignRun, ReplicaError, WeightwireError
from weightwire.replica.checkpoint_store import CheckpointStore
from weightwire.replica.disk_errors import check_room, explained
from weightwire.replica.linked_folder import LinkedFolder
from weightwire.replica.rebuild import Rebuild, SideFiles
from weightwire.replica.workdir import Position, Workdir
from weightwire.system import Closeable, durable_files, to_the_end
from weightwire.weights import Schema, Weights

__all__ = ["Replica"]

_LOCK = "lock"
_MARK = b"weightwire replica 1\n"
_PAGE = 4096


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
        self._works = LinkedFolder(directory / "work", "works")
        self._checkpoints = CheckpointStore(directory)

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, threads: int | None = None) -> Self:
        """Locks and repairs what is there, and reads all weights once. Makes the directory if there is none."""
        path = Path(directory).absolute()
        with explained(path):
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
            check_room(self.directory, min(work.nbytes, _PAGE * patch.changed))
        # An interrupt comes out only afterwards: what is in the journal has happened.
        to_the_end(lambda stop: work.advance(patch, position))
        return patch

    def merge(self, patches: Sequence[Delta]) -> Delta:
        """One patch in place of several that `advance` returned one after the other, the last of them just now."""
        work = self._held()
        return merge_absolute(work.weights, patches, work.state, threads=self._threads)

    # --- to disk -------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Brings all changes to disk, and so does away with the journal."""
        with explained(self.directory):
            self._held().sync()

    def verify(self) -> None:
        """Reads all weights once more; a replica that no longer holds what it should is lost."""
        self._held().verify()

    def make_current(self) -> Path:
        """Makes `current` lead to a checkpoint of this version, if it does not yet; returns where that is now.

        It may be gone at the next call: whoever loads it has it from `checkpoint` or `lend`.
        """
        work = self._held()
        if self._checkpoints.is_of(work):
            return self._checkpoints.path
        self.sync()
        try:
            with explained(self.directory):
                return self._checkpoints.make(work)
        finally:
            self._shares_blocks = self._checkpoints.shares_blocks

    def checkpoint(self) -> Path:
        """Makes `current` this version, and hands it out: the directory stays until the next one is handed out."""
        self.make_current()
        return self._checkpoints.hand_out()

    def lend(self) -> Path:
        """Makes `current` this version, and lends it: the directory stays until it is given back."""
        self.make_current()
        return self._checkpoints.lend()

    def give_back(self, path: Path) -> None:
        """A directory that was lent is no longer needed."""
        self._checkpoints.give_back(path)

    # --- from nothing --------------------------------------------------------------------------------------------

    def rebuild(self, schema: Schema, side_files: SideFiles | None = None) -> Rebuild:
        """Weights to be filled in, in place of what is held: see there."""
        if self._lock is None:
            raise ReplicaError(f"{self.directory}: the replica is closed", hint="open it again")
        return Rebuild(self._works, schema, side_files or {}, self._adopt, self._threads)

    def _adopt(self, path: Path) -> None:
        """Takes on a complete work directory, in place of the one that is held."""
        work = Workdir.map(path, self._threads)
        try:
            self._works.point(path)
        except BaseException:
            if self._works.target == path.name and self._work:
                self._work.lost = "another state may have taken its place on disk"
            raise
        self._work, self._trouble, self._shares_blocks = work, None, False

    # --- after a crash -------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        self._checkpoints.recover()
        self._works.recover()
        link = self._works.link
        if not link.is_symlink():
            return
        try:
            self._work = Workdir.open(link.resolve(), self._threads)
            self._shares_blocks = self._checkpoints.shares_blocks
        except (WeightwireError, ValueError, LookupError, TypeError, AttributeError, FileNotFoundError) as problem:
            reason = problem.message if isinstance(problem, WeightwireError) else f"{type(problem).__name__} {problem}"
            self._trouble = f"the replica is damaged, and was dropped: {reason}"
            durable_files.remove(link)
            self._works.tidy()

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


# --- the directory -----------------------------------------------------------------------------------------------


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
