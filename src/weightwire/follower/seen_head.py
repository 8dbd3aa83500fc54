"""The newest version that a follower with trusted keys has seen. It never accepts a run without that version."""

from __future__ import annotations

import msgspec

from weightwire.chain import ChainReader, Commit, Run, Sealed, Trust, rolled_back
from weightwire.errors import ForeignRun, Untrusted
from weightwire.follower.follow_context import FollowContext
from weightwire.replica import SeenRun

__all__ = ["SeenHead"]


class SeenHead:
    """Call `open` with the run, then `see` for each new head. Does nothing for a follower without trusted keys."""

    def __init__(self, context: FollowContext) -> None:
        self._directory = context.replica.directory
        self._settings = context.trust
        self._runtime = context.runtime
        self._seen: SeenRun | None = None

    @property
    def version(self) -> int:
        """The newest version seen, or -1."""
        return self._seen.version if self._seen else -1

    @property
    def held(self) -> int:
        """The newest version that the replica has held, or -1."""
        return self._seen.held if self._seen else -1

    def open(self, run: Run, held_run: str | None, url: str) -> Trust | None:
        """The keys to trust. Raises if the URL has another run than before, or one without keys."""
        if not self._settings.is_active:
            return None
        self._seen = self._seen or SeenRun.read(self._directory)
        known = self._seen.run if self._seen else held_run
        if known is not None and known != run.run:
            raise ForeignRun(
                f"{url}: holds run {run.run[:12]}, but this replica has followed run {known[:12]}",
                hint="the bucket was replaced: if that is intended, follow it into a new directory",
            )
        if not run.keys:
            raise Untrusted(
                f"{url}: this run is not signed",
                hint="start a new run with --key FILE: a key cannot be added to this one",
            )
        pinned = self._seen.pinned if self._seen else run.keys
        return Trust(self._settings.keys | {*(pinned if self._settings.pins else ())})

    async def see(self, chain: ChainReader, head: Sealed[Commit]) -> None:
        """Remembers a trusted head. Raises if it does not follow from the one seen before."""
        if chain.authority is None:
            return
        seen, version = self._seen, head.record.version
        if seen is not None:
            self.check_shown(version, chain.bucket.url)
            known = head.sha256 if version == seen.version else await chain.prove(head, seen.version)
            if known != seen.commit:
                raise rolled_back(
                    f"{chain.bucket.url}: its newest version does not follow from version {seen.version}, seen before"
                )
            if version > seen.version:
                await chain.authority.check_keys_since(head.record, seen.change)
        if seen is None or version > seen.version:
            pinned = seen.pinned if seen else chain.run.keys if self._settings.pins else ()
            newer = SeenRun(
                run=chain.run.run,
                version=version,
                commit=head.sha256,
                change=await chain.authority.change_before(head.record),
                held=self.held,
                pinned=tuple(pinned),
            )
            await self._write(newer)

    async def hold(self, version: int) -> None:
        """Remembers a version that the replica holds: never serve an older one, even if its weights get lost."""
        if self._seen is not None and version > self._seen.held:
            await self._write(msgspec.structs.replace(self._seen, held=version))

    async def _write(self, newer: SeenRun) -> None:
        await self._runtime.run_in_thread(newer.write, self._directory)
        self._seen = newer  # if it could not be written, the next look tries again

    def check_shown(self, newest: int, url: str) -> None:
        """Raises if the newest version in the bucket is older than the one seen."""
        if newest < self.version:
            raise rolled_back(f"{url}: does not have version {self.version} any more, which was seen before")
