"""A new `current`, made beside the next versions: from the last one and the journal, not from weights that change."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

from weightwire.delta import Delta, digest, write_absolute
from weightwire.errors import ReplicaError
from weightwire.replica.checkpoint_about import CheckpointAbout
from weightwire.replica.disk_errors import check_room, explained
from weightwire.replica.workdir import Saved, different, tensors_of, version_of
from weightwire.system import durable_files
from weightwire.weights import ABOUT_FILE, weights_file_name

__all__ = ["CurrentRefresh"]

_PAGE = 4096
_THREADS = 1  # the next versions are decoded meanwhile


class CurrentRefresh:
    """Call `make` in any thread, then `Replica.finish_refresh`. What `make` reads does not change meanwhile.

    It also writes the model to disk, so that the journal records up to `saved` are not needed any more.
    """

    def __init__(self, base: Path, about: CheckpointAbout, made: Path, saved: Saved) -> None:
        """`base` is `current`, and `about` its metadata. `saved` has all records since its version."""
        self.made = made
        self.saved = saved
        self._base = base
        self._about = about

    def make_beside(self) -> None:
        """Makes the checkpoint of `saved` and verifies all its weights. Leaves nothing after an error."""
        self.saved.flush()
        with explained(self.made):
            try:
                self._make()
            except BaseException:
                durable_files.remove(self.made)
                raise

    def _make(self) -> None:
        patches = [Delta.open(record) for record in self.saved.records if version_of(record) > self._about.version]
        file = weights_file_name(self.saved.state.tensors)
        durable_files.copy_tree(self._base, self.made, without=(file, ABOUT_FILE))
        is_shared = durable_files.clone_file(self._base / file, self.made / file)
        if is_shared:
            check_room(self.made.parent, _PAGE * sum(patch.changed for patch in patches))
        self._apply(patches, self.made / file)
        position = self.saved.position
        about = CheckpointAbout(
            position.run,
            position.version,
            position.commit,
            self.saved.state.hex,
            shares_blocks=is_shared and bool(self._about.shares_blocks),
        )
        durable_files.write_file(self.made / ABOUT_FILE, about.to_json())
        durable_files.sync_tree(self.made)

    def _apply(self, patches: Sequence[Delta], model: Path) -> None:
        with model.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        weights = tensors_of(memory, str(model))
        for patch in patches:
            write_absolute(weights, patch, threads=_THREADS)
        if name := different(digest(weights, threads=_THREADS), self.saved.state):
            raise ReplicaError(
                f"{self._base}: tensor {name!r} was damaged", hint="it is made from the weights next time"
            )
        durable_files.flush(memory, model)
