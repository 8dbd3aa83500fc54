"""What engines have not taken yet, as patches of absolute values: bounded, however long nobody takes any."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from weightwire.chain import Commit, Sealed
from weightwire.delta import Delta
from weightwire.follower.update import Update
from weightwire.replica import Replica
from weightwire.system import Runtime
from weightwire.weights import nbytes_of

__all__ = ["PatchQueue"]

_FEW = 1 << 20  # bytes of patches that are always worth keeping


class PatchQueue:
    """Patches from the update taken last to what the replica holds; whoever calls it has the replica to himself."""

    def __init__(self, replica: Replica, runtime: Runtime) -> None:
        self._replica = replica
        self._runtime = runtime
        self._patches: list[Delta] | None = None  # since the update taken last; None: all weights must be loaded
        self._taken: str | None = None  # hash of the commit
        self._to_be_loaded = False  # the update taken last had no patch
        self._more = asyncio.Event()  # there is something to take

    @property
    def nbytes(self) -> int:
        return sum(patch.nbytes for patch in self._patches or ())

    async def add(self, patch: Delta) -> None:
        """One version further."""
        if self._patches is None:
            return
        self._patches.append(patch)
        # What nobody takes must not grow without end.
        most = max(nbytes_of(self._replica.weights) // 4, _FEW)
        if self.nbytes > most:
            merged = await self._merge(self._patches)
            self._patches = [merged] if merged.nbytes <= most else None

    def drop(self) -> None:
        """No patch leads to what the replica holds: it must be loaded."""
        self._patches = None

    def announce(self) -> None:
        """There is something to take."""
        self._more.set()

    async def take(self, commit: Sealed[Commit]) -> Update | None:
        """What is new since the update taken last, now that the replica holds `commit`; None if nothing is."""
        if self._taken == commit.sha256:
            return None
        patch = None if self._patches is None else await self._merge(self._patches)
        self._begin_with(commit)
        self._to_be_loaded = patch is None
        record = commit.record
        return Update(record.version, record.step, record.after, patch, record.metrics, record.time)

    def load(self, commit: Sealed[Commit] | None) -> None:
        """A checkpoint of what the replica holds was handed out.

        Whoever was told to load all weights has them from there: the next patch starts where it is.
        """
        if self._to_be_loaded:
            self._begin_with(commit)
            self._to_be_loaded = False

    def _begin_with(self, commit: Sealed[Commit] | None) -> None:
        self._patches, self._taken = [], commit.sha256 if commit else None

    async def wait(self, commit: Sealed[Commit] | None, timeout: float) -> None:
        """Until there is something to take, or some time has gone by."""
        if commit is not None and self._taken != commit.sha256:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._more.wait(), timeout)
        self._more.clear()

    async def _merge(self, patches: list[Delta]) -> Delta:
        if len(patches) == 1:
            return patches[0]
        return await self._runtime.run_in_thread(self._replica.merge, patches)
