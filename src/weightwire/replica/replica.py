"""A follower's local checkpoint. It holds exactly one version at any time, also after a crash.

    DIR/current -> checkpoints/<version>-<token>/   a Hugging Face checkpoint of one version, never changed
    DIR/work -> works/<token>/                      the follower's own state, changed in place: see `workdir`
        files/...                                     side files: config, tokenizer
    DIR/lock                                        held while the replica is open

Both links change atomically, and only to complete directories. Engines that map files must load `current`: all its
weights are in one file, so a process that has it open never sees two versions. Beside the work directory there are at
most `current`, the last checkpoint handed out, the lent ones, and one in the making. Opening a replica removes all but
`current`. Not thread-safe: one call at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from weightwire.delta import DecodedBlocks, Delta, State, make_absolute, merge_absolute
from weightwire.errors import ForeignRun, ReplicaError, WeightwireError
from weightwire.replica.checkpoint_store import CheckpointStore
from weightwire.replica.current_refresh import CurrentRefresh
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
    """`with Replica.open(directory) as replica:`. If `position` is None, it holds nothing and must be rebuilt.

    `trouble` is then the reason, if it held something before. A failed call leaves the version unchanged, unless
    `position` is None afterwards.
    """

    def __init__(self, directory: Path, lock: int, threads: int | None) -> None:
        """Use `open`."""
        self.directory = directory
        self._lock: int | None = lock
        self._threads = threads
        self._work: Workdir | None = None
        self._trouble: str | None = None
        self._shares_blocks = False  # a write may need a new disk block (copy on write)
        self._works = LinkedFolder(directory / "work", "works")
        self._checkpoints = CheckpointStore(directory)

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, threads: int | None = None) -> Self:
        """Locks the directory, repairs it after a crash, and verifies all weights. Creates it if needed."""
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
        """Unlocks the directory. Needs no sync: all changes are in the journal."""
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
        """Read-only views of the live memory, which `advance` changes. Do not keep them."""
        work = self._good()
        return work.weights if work else {}

    @property
    def nbytes(self) -> int:
        """The size of all weights."""
        work = self._good()
        return work.weights_nbytes if work else 0

    @property
    def trouble(self) -> str | None:
        return self._work.lost if self._work and self._work.lost else self._trouble

    @property
    def journal_bytes(self) -> int:
        work = self._good()
        return sum(work.journal.values()) if work else 0

    # --- forward -------------------------------------------------------------------------------------------------

    def advance(self, deltas: Sequence[Delta], position: Position, after: str) -> Delta:
        """Advances to a later version. `deltas` are the parts of its ranks, or empty if nothing changed.

        Decodes all of them and checks that they give the state `after` before it writes anything. Returns the changes
        as absolute values, in `coo` entries, or `fresh` ones where much changed.
        """
        work = self._held()
        if position.run != work.position.run:
            raise ForeignRun(f"{self.directory}: holds run {work.position.run}, not {position.run}", hint="rebuild it")
        held = work.position.version
        if position.version <= held:
            raise ReplicaError(
                f"{self.directory}: already at version {held}, so version {position.version} cannot be applied",
                hint="rebuild the replica",
            )
        decoded: DecodedBlocks = []
        patch = make_absolute(work.weights, deltas, work.state, after, threads=self._threads, decoded=decoded)
        patch = replace(patch, where=f"version {position.version}")
        if self._shares_blocks:
            check_room(self.directory, min(work.nbytes, _PAGE * patch.changed))
        # Interrupts are raised afterwards: a version in the journal counts as applied.
        to_the_end(lambda stop: work.advance(patch, position, decoded))
        return patch

    def merge(self, patches: Sequence[Delta]) -> Delta:
        """Merges consecutive patches that `advance` returned, up to the current version."""
        work = self._held()
        return merge_absolute(work.weights, patches, work.state, threads=self._threads)

    # --- to disk -------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Writes all changes to disk and empties the journal."""
        with explained(self.directory):
            self._held().sync()

    def verify(self) -> None:
        """Reads and checks all weights. A replica with a wrong digest is lost."""
        self._held().verify()

    def make_current(self) -> Path:
        """Makes `current` a checkpoint of this version, if it is not yet, and returns its directory.

        The next call may remove the directory. To load it, use `checkpoint` or `lend`.
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

    def begin_refresh(self) -> CurrentRefresh | None:
        """Begins to make `current` this version while the replica advances. None if `make_current` must do it.

        Call `make_beside` of the result in another thread, then `finish_refresh`.
        """
        work = self._held()
        with explained(self.directory):
            return self._checkpoints.begin_beside(work)

    def finish_refresh(self, refresh: CurrentRefresh, *, is_made: bool = True) -> None:
        """Replaces `current` with what was made, unless it has been replaced meanwhile. Shortens the journal."""
        work = self._good()
        if not self._checkpoints.is_making(refresh):
            durable_files.remove(refresh.made)
            return
        with explained(self.directory):
            is_same = work is not None and work.memory is refresh.saved.memory
            self._checkpoints.end_beside(refresh, adopt=is_made and is_same)
            self._shares_blocks = self._checkpoints.shares_blocks
            if work is not None and is_same:
                work.finish(refresh.saved)

    def checkpoint(self) -> Path:
        """Makes `current` this version and returns its directory, which stays until the next `checkpoint`."""
        self.make_current()
        return self._checkpoints.hand_out()

    def lend(self) -> Path:
        """Makes `current` this version and returns its directory, which stays until `give_back`."""
        self.make_current()
        return self._checkpoints.lend()

    def give_back(self, path: Path) -> None:
        """Returns a directory from `lend`, which may then be removed."""
        self._checkpoints.give_back(path)

    # --- from nothing --------------------------------------------------------------------------------------------

    def rebuild(self, schema: Schema, side_files: SideFiles | None = None) -> Rebuild:
        """New weights to fill in, which then replace those held. See `Rebuild`."""
        if self._lock is None:
            raise ReplicaError(f"{self.directory}: the replica is closed", hint="open it again")
        return Rebuild(self._works, schema, side_files or {}, self._adopt, self._threads)

    def _adopt(self, path: Path) -> None:
        """Replaces the work directory with another complete one."""
        work = Workdir.map(path, self._threads)
        try:
            self._works.point(path)
        except BaseException:
            if self._works.target == path.name and self._work:
                self._work.lost = "another version may have replaced it on disk"
            raise
        self._work, self._trouble, self._shares_blocks = work, None, False

    # --- after a crash -------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        self._checkpoints.recover()
        self._works.recover()
        link, target = self._works.link, self._works.target
        if not link.is_symlink():
            return
        try:
            if target is None:
                raise ReplicaError(f"{link}: leads out of the replica", hint="rebuild the replica")
            self._work = Workdir.open(self._works.folder / target, self._threads)
            self._shares_blocks = self._checkpoints.shares_blocks
        except (WeightwireError, ValueError, FileNotFoundError) as problem:
            reason = problem.message if isinstance(problem, WeightwireError) else f"{type(problem).__name__} {problem}"
            self._trouble = f"the replica was damaged and has been dropped: {reason}"
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
    """Locks a directory for this replica. Refuses one that holds other files."""
    directory.mkdir(parents=True, exist_ok=True)
    found = {path.name for path in directory.iterdir() if not path.name.startswith(".")} - {"lost+found"}
    if found and _LOCK not in found:
        raise ReplicaError(f"{directory}: already holds other files", hint="use a new directory for the replica")
    lock = durable_files.lock_file(directory / _LOCK)
    if lock is None:
        raise ReplicaError(
            f"{directory}: in use by another follower", hint="stop that follower, or use another directory"
        )
    mark = os.pread(lock, len(_MARK), 0)
    begun = mark.rstrip(b"\0")  # after a power cut the end may be missing, or zero
    if mark != _MARK and (found - {_LOCK} or not _MARK.startswith(begun)):
        os.close(lock)
        raise ReplicaError(f"{directory}: not a replica", hint="use a new directory for the replica")
    try:
        os.pwrite(lock, _MARK, 0)
        os.fsync(lock)
        if mark != _MARK:
            durable_files.sync_directory(directory)  # without the lock, other files would look like somebody else's
    except BaseException:
        os.close(lock)
        raise
    return lock
