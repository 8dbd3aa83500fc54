"""Where a replica stands in the run that it follows: the version it holds, the newest one seen, and that both belong
to one history."""

from __future__ import annotations

from weightwire.catchup import ChainPath
from weightwire.chain import RUN, ChainReader, Commit, Run, Sealed, read_run
from weightwire.errors import BrokenChain
from weightwire.follower.follow_context import FollowContext
from weightwire.replica import Position
from weightwire.weights import schema_of_weights

__all__ = ["RunPosition"]

_RECHECK = 15.0  # seconds
_ROLLED_BACK = "the bucket was rolled back or replaced: follow it into a new directory"


class RunPosition:
    """`open` finds the run and the replica's place in it; `advance` is told of each version that was reached.

    `chain` and `commit` are None as long as it is not known where the replica stands.
    """

    def __init__(self, context: FollowContext) -> None:
        self.run: Run | None = None  # as soon as it has been read, wherever the replica stands in it
        self.chain: ChainReader | None = None
        self.commit: Sealed[Commit] | None = None  # of the version that the replica holds
        self.head = -1
        self._context = context
        self._bucket, self._replica = context.bucket, context.replica
        self._reached: Sealed[Commit] | None = None  # never to go back behind it, even if the replica is lost
        self._rechecked = context.runtime.clock()

    @property
    def version(self) -> int | None:
        return self.commit.record.version if self.commit else None

    @property
    def is_outdated(self) -> bool:
        """The replica holds something else: it has just been lost, or was moved on by what was then interrupted."""
        held = self._replica.position
        return self.commit is not None and (held is None or held.commit != self.commit.sha256)

    def advance(self, commit: Sealed[Commit]) -> None:
        """The replica has reached a version."""
        self.commit = self._reached = commit

    def close(self) -> None:
        """Another run may have taken the place of this one: the next `open` looks again."""
        self.chain = None

    async def reopen(self) -> ChainReader:
        """Reads from the replica what it holds, instead of trusting what was known."""
        self.chain = self.commit = None
        return await self.open()

    async def open(self) -> ChainReader:
        """Finds the run, and where this replica stands in it."""
        if self.chain is not None:
            return self.chain
        run = self.run = await read_run(self._bucket)
        chain = ChainReader(self._bucket, run)
        held = self._replica.position
        if self._replica.trouble:
            self._context.warn(self._replica.trouble)
        if held is not None and held.run != run.run:
            self._context.warn(f"this replica is of run {held.run[:12]}; rebuilding it for {run.run[:12]}")
            self.commit = self._reached = None
        elif held is not None:
            self.advance(chain.remember(await self._find(held, chain)))
            self.head = held.version
        self.chain = chain
        return chain

    async def _find(self, held: Position, chain: ChainReader) -> Sealed[Commit]:
        """The commit of what the replica holds."""
        commit = await chain.read(held.version)
        if commit is None:
            raise BrokenChain(
                f"{self._bucket.url}: has no version {held.version}, which this replica holds; it stays as it is",
                hint=_ROLLED_BACK,
            )
        if commit.sha256 != held.commit:
            raise BrokenChain(
                f"{self._bucket.url}: has another version {held.version} than this replica; it stays as it is",
                hint=_ROLLED_BACK,
            )
        self._check_schema(chain.run)
        return commit

    def _check_schema(self, run: Run) -> None:
        if schema_of_weights(self._replica.weights) != dict(run.schema):
            raise BrokenChain(
                f"{self._bucket.url}/{RUN}: names other tensors than this replica of the same run has; "
                "it stays as it is",
                hint="run.json must never change: restore it",
            )

    async def recheck(self, chain: ChainReader) -> None:
        """Nothing new may also mean that the run is gone, or another: now and then it is looked at again."""
        now = self._context.runtime.clock()
        if self.commit is None or now - self._rechecked < _RECHECK:
            return
        self._rechecked = now
        commit = await chain.read(self.commit.record.version)
        if commit is None or commit.sha256 != self.commit.sha256:
            self.close()
            await self.open()

    def leads_on(self, path: ChainPath) -> bool:
        """Whether a path leads past the version held, and not back behind one that was reached before."""
        version = path.target.record.version
        if self.commit is not None:
            return version > self.commit.record.version
        return self._reached is None or version >= self._reached.record.version

    async def check_history(self, chain: ChainReader, path: ChainPath) -> None:
        """That a path from nothing leads to what follows from the version that was reached before."""
        reached = self._reached
        if path.start is None or reached is None:
            return
        version, target = reached.record.version, path.target
        if version > target.record.version or await chain.prove(target, version) != reached.sha256:
            raise BrokenChain(
                f"{self._bucket.url}: does not have the version {version} that was here; it stays as it is",
                hint=_ROLLED_BACK,
            )
