"""New weights for a replica, filled in beside the old ones, which they then replace at once."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from weightwire.delta import State, digest
from weightwire.errors import ReplicaError
from weightwire.replica.checkpoint_store import FILES
from weightwire.replica.disk_errors import explained
from weightwire.replica.linked_folder import LinkedFolder
from weightwire.replica.workdir import Position, Workdir, different
from weightwire.system import durable_files, read_regular
from weightwire.weights import ABOUT_FILE, CheckpointWriter, HeldWeights, Schema, is_side_file_name, is_weights_file

__all__ = ["Rebuild", "SideFiles"]

SideFiles = Mapping[str, bytes | Path]
"""Side files by name: relative to the checkpoint, with their bytes or a path to them."""


class Rebuild(HeldWeights):
    """New weights for a replica: `with replica.rebuild(...) as new:`, fill in `new[name].bits`, then `new.finish(...)`.

    The weights start as zeros, with disk space allocated. The replica does not change before `finish`.
    """

    def __init__(
        self,
        works: LinkedFolder,
        schema: Schema,
        side_files: SideFiles,
        adopt: Callable[[Path], None],
        threads: int | None,
    ) -> None:
        """Use `Replica.rebuild`."""
        for name in side_files:
            _check_side_file(name)
        self._works = works
        self._directory = works.folder.parent
        self._adopt = adopt  # makes a complete directory the replica's own
        self._names = tuple(schema)
        self._side_files = side_files
        self._threads = threads
        self._path = works.folder / secrets.token_hex(4)
        self._writer = CheckpointWriter(self._path, schema=schema)
        super().__init__({})
        self._open = False

    def __enter__(self) -> Self:
        with explained(self._directory):
            durable_files.make_directory(self._path.parent)
            self._writer.__enter__()
        self._open = True
        self._hold({name: self._writer[name] for name in self._names})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hold({})
        if self._open:
            problem = error or _Unfinished()
            self._writer.__exit__(type(problem), problem, traceback)
            self._open = False

    def finish(self, position: Position, state: State) -> None:
        """Checks that the weights have this state, syncs them to disk, and makes them the replica's."""
        if not self._open:
            raise ValueError("a rebuild can be finished once, inside its block")
        if name := different(digest(self, threads=self._threads), state):
            raise ReplicaError(
                f"{self._directory}: tensor {name!r} does not have the expected digest",
                hint="rebuild the replica again",
            )
        self._open = False
        self._hold({})
        self._writer.__exit__(None, None, None)
        with explained(self._directory):
            try:
                self._write_files()
                Workdir.complete(self._path, position, state)
                self._adopt(self._path)
            finally:
                self._works.tidy()

    def _write_files(self) -> None:
        files = self._path / FILES
        files.mkdir()
        for name, content in self._side_files.items():
            if not _is_ours(name):
                (files / name).parent.mkdir(parents=True, exist_ok=True)
                durable_files.write_file(files / name, content if isinstance(content, bytes) else read_regular(content))
        durable_files.sync_tree(files)


class _Unfinished(Exception):
    """A block that ended without `finish`."""


# --- side files --------------------------------------------------------------------------------------------------


def _check_side_file(name: str) -> None:
    """Rejects names that lead out of the checkpoint: they come from a bucket."""
    if not is_side_file_name(name):
        raise ReplicaError(
            f"{name!r}: not a valid name for a side file", hint="use a relative path inside the checkpoint"
        )


def _is_ours(name: str) -> bool:
    """Whether a side file would conflict with a file that weightwire writes, such as an index of shards."""
    return name == ABOUT_FILE or is_weights_file(name)
