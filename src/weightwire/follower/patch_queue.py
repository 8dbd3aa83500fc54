"""Patches of absolute values that engines have not taken yet. Its size is bounded even if no engine takes updates."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from weightwire.chain import Commit, Sealed
from weightwire.delta import Delta
from weightwire.follower.update import Update
from weightwire.replica import Replica
from weightwire.system import Runtime

__all__ = ["PatchQueue"]

_FEW = 1 << 20  # bytes of patches that are always kept


class PatchQueue:
    """The patches from the last update taken to the version held. Callers must hold the replica's lock."""

    def __init__(self, replica: Replica, runtime: Runtime) -> None:
        self._replica = replica
        self._runtime = runtime
        self._patches: list[Delta] | None = None  # since the last update taken; None: all weights must be loaded
        self._taken: str | None = None  # the commit hash of the last update taken
        self._to_be_loaded = False  # the last update taken had no patch
        self._more = asyncio.Event()  # there is an update to take

    @property
    def nbytes(self) -> int:
        return sum(patch.nbytes for patch in self._patches or ())

    async def add(self, patch: Delta) -> None:
        """Adds the patch to the next version."""
        if self._patches is None:
            return
        self._patches.append(patch)
        most = max(self._replica.nbytes // 4, _FEW)
        if self.nbytes > most:
            merged = await self._merge(self._patches)
            self._patches = [merged] if merged.nbytes <= most else None

    def drop(self) -> None:
        """Drops all patches: the next update must be loaded."""
        self._patches = None

    def announce(self) -> None:
        """Wakes `wait`: there is an update to take."""
        self._more.set()

    async def take(self, commit: Sealed[Commit]) -> Update | None:
        """The changes from the last update taken to `commit`, which the replica holds, or None."""
        if self._taken == commit.sha256:
            return None
        patch = None if self._patches is None else await self._merge(self._patches)
        self._begin_with(commit)
        self._to_be_loaded = patch is None
        record = commit.record
        return Update(record.version, record.step, record.after, patch, record.metrics, record.time)

    def load(self, commit: Sealed[Commit] | None) -> None:
        """A checkpoint of `commit` was handed out.

        If the last update had no patch, the engine loads this checkpoint, so the next patch starts here.
        """
        if self._to_be_loaded:
            self._begin_with(commit)
            self._to_be_loaded = False

    def _begin_with(self, commit: Sealed[Commit] | None) -> None:
        self._patches, self._taken = [], commit.sha256 if commit else None

    async def wait(self, commit: Sealed[Commit] | None, timeout: float) -> None:
        """Waits until there is an update to take, or for `timeout` seconds."""
        if commit is not None and self._taken != commit.sha256:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):  # `wait_for` of Python 3.11 can swallow a cancellation
                await self._more.wait()
        self._more.clear()

    async def _merge(self, patches: list[Delta]) -> Delta:
        if len(patches) == 1:
            return patches[0]
        return await self._runtime.run_in_thread(self._replica.merge, patches)
