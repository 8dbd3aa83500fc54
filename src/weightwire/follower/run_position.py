"""Where a replica stands in its run: the version held and the newest version seen, which must share a history."""

from __future__ import annotations

from weightwire.catchup import ChainPath
from weightwire.chain import RUN, ChainReader, Commit, Run, Sealed, read_run, rolled_back
from weightwire.errors import BrokenChain, BucketError, PermissionDenied, TooLarge, Untrusted, WeightwireError
from weightwire.follower.follow_context import FollowContext
from weightwire.follower.seen_head import SeenHead
from weightwire.replica import Position
from weightwire.weights import schema_of_weights

__all__ = ["RunPosition"]

_RECHECK = 15.0  # seconds


class RunPosition:
    """`open` finds the run and the replica's version in it. Call `advance` for each version reached.

    `chain` and `commit` are None until the replica's version is found in the run.
    """

    def __init__(self, context: FollowContext) -> None:
        self.run: Run | None = None  # once it has been read
        self.chain: ChainReader | None = None
        self.commit: Sealed[Commit] | None = None  # of the version that the replica holds
        self.head = -1
        self.is_sought = False  # it is not known yet whether the run has the replica's version
        self._context = context
        self._bucket, self._replica = context.bucket, context.replica
        self._reached: Sealed[Commit] | None = None  # never go below it, even if the replica is lost
        self.seen = SeenHead(context)
        self._rechecked = context.runtime.clock()
        self._warned: set[str] = set()  # `open` may be called again and again

    @property
    def version(self) -> int | None:
        return self.commit.record.version if self.commit else None

    def describe_lag(self) -> str:
        """For warnings: "2 versions behind", or nothing if the replica holds the newest version seen."""
        behind = self.head - self.version if self.version is not None else 0
        return f"{behind} version{'' if behind == 1 else 's'} behind" if behind > 0 else ""

    @property
    def is_outdated(self) -> bool:
        """Whether the replica no longer holds `commit`: it was lost, or an update was interrupted after it advanced."""
        held = self._replica.position
        return self.commit is not None and (held is None or held.commit != self.commit.sha256)

    def advance(self, commit: Sealed[Commit]) -> None:
        """Records that the replica has reached a version."""
        self.commit = self._reached = commit

    def close(self) -> None:
        """Forgets the run, which may have been replaced. The next `open` reads it again."""
        self.chain = None

    async def reopen(self) -> ChainReader:
        """Reads the position from the replica again."""
        self.chain = self.commit = None
        return await self.open()

    async def open(self) -> ChainReader:
        """Finds the run, and the replica's version in it."""
        if self.chain is not None:
            return self.chain
        held = self._replica.position
        self.is_sought = held is not None
        try:
            self.chain = await self._open(held)
        except WeightwireError as problem:
            if not _may_pass(problem):
                self.is_sought = False  # the heartbeat reports the trouble, and data is kept no longer
            raise
        self.is_sought = False
        return self.chain

    async def _open(self, held: Position | None) -> ChainReader:
        run = self.run = await read_run(self._bucket)
        chain = ChainReader(self._bucket, run, self.seen.open(run, held.run if held else None, self._bucket.url))
        if self._replica.trouble:
            self._warn_once(self._replica.trouble)
        if held is not None and held.run != run.run:
            self._warn_once(f"this replica belongs to run {held.run[:12]}; rebuilding it for run {run.run[:12]}")
            self.commit = self._reached = None
        elif held is not None:
            commit = chain.remember(await self._find(held, chain))
            await self._check_trusted(commit, chain)
            self.advance(commit)
            self.head = held.version
        return chain

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._context.warn(message)

    async def _find(self, held: Position, chain: ChainReader) -> Sealed[Commit]:
        """The commit of the version that the replica holds."""
        commit = await chain.read(held.version)
        if commit is None:
            raise rolled_back(f"{self._bucket.url}: does not have version {held.version}, which this replica holds")
        if commit.sha256 != held.commit:
            raise rolled_back(f"{self._bucket.url}: its version {held.version} is not the one that this replica holds")
        self._check_schema(chain.run)
        return commit

    async def _check_trusted(self, held: Sealed[Commit], chain: ChainReader) -> None:
        """Checks a version that was fetched before this replica had trusted keys; otherwise, only run.json."""
        if chain.authority is None:
            return
        if held.record.version <= self.seen.version:
            await chain.prove_run(held)  # with a forged one, no later version could be trusted
            return
        head = await chain.read_head()
        if head is None or await chain.prove(head, held.record.version) != held.sha256:
            raise Untrusted(
                f"{self._bucket.url}: no trusted key signed version {held.record.version}, which this replica holds",
                hint="follow into a new directory",
            )

    def _check_schema(self, run: Run) -> None:
        if schema_of_weights(self._replica.weights) != dict(run.schema):
            raise BrokenChain(
                f"{self._bucket.url}/{RUN}: names other tensors than this replica of the same run",
                hint="restore run.json: it must never change",
            )

    async def recheck(self, chain: ChainReader) -> None:
        """Checks now and then that the run still exists. Without new versions, nothing else would notice."""
        now = self._context.runtime.clock()
        if self.commit is None or now - self._rechecked < _RECHECK:
            return
        self._rechecked = now
        commit = await chain.read(self.commit.record.version)
        if commit is None or commit.sha256 != self.commit.sha256:
            self.close()
            await self.open()

    def leads_on(self, path: ChainPath) -> bool:
        """Whether a path leads past the version held, and not back before a version reached earlier."""
        version = path.target.record.version
        if self.commit is not None:
            return version > self.commit.record.version
        return version >= max(self.seen.held, self._reached.record.version if self._reached else -1)

    async def check_history(self, chain: ChainReader, path: ChainPath) -> None:
        """Checks that a rebuilt version is a successor of the version reached before."""
        reached = self._reached
        if path.start is None or reached is None:
            return
        version, target = reached.record.version, path.target
        if version > target.record.version or await chain.prove(target, version) != reached.sha256:
            raise rolled_back(
                f"{self._bucket.url}: its newest version does not follow from version {version}, which was held here"
            )


def _may_pass(problem: WeightwireError) -> bool:
    """Whether the bucket may answer later."""
    return isinstance(problem, BucketError) and not isinstance(problem, PermissionDenied | TooLarge)
