"""How a publisher gets hold of a run: reads it, rebuilds the published state, and claims it when there is a version.

A run is only claimed once the weights to be published are known to fit: whoever publishes in it goes on undisturbed
until then. A new run is started when its first data is in the bucket. Knows records and weights; publishes no version
but a base.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weightwire.bucket import probe_bucket
from weightwire.catchup import LOST_FOR_GOOD, ChainPath, Fetcher, around_lost_data, plan, restore_weights
from weightwire.chain import (
    BASE,
    HEAD,
    ChainReader,
    ChainWriter,
    Commit,
    Folder,
    Run,
    Sealed,
    SideFile,
    begin_run,
    read_run,
    side_path,
)
from weightwire.delta import State, digest
from weightwire.errors import (
    BucketError,
    CheckpointError,
    NoRun,
    UnsafeBucket,
    WeightwireError,
)
from weightwire.publisher.capture_gate import CaptureGate
from weightwire.publisher.host_copies import HostCopies
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.weights import Rows, Schema, Weights, check_schema, copy_weights, schema_of_weights

__all__ = ["Session", "Takeover", "UnclaimedRun"]

_OURS = {HEAD, *(folder.removesuffix("/") for folder in Folder)}


@dataclass(frozen=True)
class UnclaimedRun:
    """A run as it was found, not claimed. `head` is its newest commit.

    `copies.published` holds the weights of `state`, or nothing while there is none. `path` is the way to it from the
    newest anchor.
    """

    run: Run
    copies: HostCopies[Publication]
    head: Sealed[Commit] | None = None
    state: State | None = None
    path: ChainPath | None = None

    @property
    def after(self) -> str:
        return self.head.record.after if self.head else ""


@dataclass(frozen=True)
class Session:
    """A run that this publisher has claimed, and the state that it published last, which its copies hold.

    `path` is the way from the newest anchor to where it was claimed.
    """

    writer: ChainWriter
    state: State | None = None
    path: ChainPath | None = None


class Takeover:
    def __init__(self, context: PublishContext) -> None:
        self._bucket = context.bucket
        self._runtime = context.runtime
        self._settings = context.settings
        self._warn = context.warn
        self._side_files: tuple[SideFile, ...] | None = None  # once they are uploaded
        self._base: State | None = None  # once it is known

    # --- a run that is there -------------------------------------------------------------------------------------

    async def probe(self) -> Run | None:
        """The run, if there is one, in a bucket that can hold one."""
        if not self._settings.insist:
            await probe_bucket(self._bucket, self._runtime.token())
        run = await self.find_again()
        if run is None:
            await self._check_free()
        return run

    async def find_again(self) -> Run | None:
        """Another publisher may have started it meanwhile."""
        try:
            return await read_run(self._bucket)
        except NoRun:
            return None

    async def _check_free(self) -> None:
        """A directory that holds other things was hardly meant: a checkpoint, in place of the run's URL."""
        if not self._bucket.url.startswith("file:"):
            return
        for one in await self._bucket.list(""):
            if one.path.split("/")[0] not in _OURS:
                raise BucketError(f"{self._bucket.url}: holds other files, and no run", hint="name a new directory")

    async def read(self, run: Run, copies: HostCopies[Publication] | None = None) -> UnclaimedRun:
        """Rebuilds what was published last, into these copies if they fit, else into new ones."""
        self._check_mode(run)
        if copies is None:
            copies = await self._runtime.run_in_thread(self.allocate, run.schema)
        else:
            self.check_schema(schema_of_weights(copies.published), run)
        chain = ChainReader(self._bucket, run)
        head = await chain.read_head()
        if head is None or not head.record.after:
            return UnclaimedRun(run, copies, head)
        return await self._rebuild(chain, copies, head)

    def check_schema(self, weights: Schema, run: Run) -> None:
        check_schema(weights, run.schema, url=self._bucket.url)

    async def claim(self, run: Run) -> ChainWriter:
        """Fences off whoever published in it before."""
        self._check_mode(run)
        writer = ChainWriter(self._bucket, run, self._runtime, self._warn)
        await writer.take_over()
        return writer

    async def resume(self, writer: ChainWriter, found: UnclaimedRun) -> Session:
        """What was published last, rebuilt again where another publisher went on after the run was read."""
        head = writer.head
        after = head.record.after if head else ""
        if not after and self._settings.base is not None:
            return await self._begin_with_base(writer, found.copies, self._settings.base)
        if head is not None and after != found.after:
            found = await self._rebuild(writer.chain, found.copies, head)
        return Session(writer, found.state, found.path)

    def allocate(
        self, schema: Schema, rows: Mapping[str, Rows] | None = None, gate: CaptureGate | None = None
    ) -> HostCopies[Publication]:
        """Room for the weights of a run, or for some rows of them."""
        single, threads = self._settings.blocking, self._settings.threads
        return HostCopies(schema, rows=rows, single=single, threads=threads, dropped=_tell_dropped, gate=gate)

    def _check_mode(self, run: Run) -> None:
        if run.mode == "strict" and not self._bucket.strict:
            raise UnsafeBucket(
                f"{self._bucket.url}: nothing can be created safely through this URL, and the run counts on it",
                hint="publish through the URL that the run was started with (for Hugging Face: its S3 gateway)",
            )

    async def _rebuild(self, chain: ChainReader, copies: HostCopies[Publication], head: Sealed[Commit]) -> UnclaimedRun:
        """The published state: from the bucket, unless weights that were given are just that."""
        state = await self._given(copies, head.record.after)
        if state is not None:
            return UnclaimedRun(chain.run, copies, head, state, await plan(chain, head))
        return await self._restore(chain, copies, head)

    async def _given(self, copies: HostCopies[Publication], after: str) -> State | None:
        for given in (self._settings.published, self._settings.base):
            if given is not None and schema_of_weights(given) == schema_of_weights(copies.published):
                state = await self._runtime.run_in_thread(digest, given, threads=self._settings.threads)
                if state.hex == after:
                    await self._runtime.run_in_thread(copy_weights, given, copies.published)
                    return state
        return None

    async def _restore(self, chain: ChainReader, copies: HostCopies[Publication], head: Sealed[Commit]) -> UnclaimedRun:
        """From the bucket. Where that is damaged beyond repair, the next version must be an anchor, which heals it."""
        fetcher = Fetcher(self._bucket, self._runtime)
        base, threads = self._settings.base, self._settings.threads

        async def attempt() -> UnclaimedRun:
            path = await plan(chain, head, lost=fetcher.lost)
            state = await restore_weights(path, fetcher, copies.published, self._runtime, base=base, threads=threads)
            return UnclaimedRun(chain.run, copies, head, state, path)

        try:
            return await around_lost_data(fetcher, attempt, self._warn)
        except LOST_FOR_GOOD as problem:
            self._warn(f"{problem.message}; the next version will be an anchor, with all weights")
            return UnclaimedRun(chain.run, copies, head)

    # --- a new run -----------------------------------------------------------------------------------------------

    async def begin_from_base(self, base: Weights) -> tuple[UnclaimedRun, Session]:
        """Starts a run from weights that followers have already."""
        schema = schema_of_weights(base)
        copies = await self._runtime.run_in_thread(self.allocate, schema)
        await self._base_state(base)  # before anything is there: it takes a while
        writer = await self.start_run(schema, {})
        found = UnclaimedRun(writer.run, copies)
        return found, await self.resume(writer, found)

    async def start_run(self, schema: Schema, aliases: Mapping[str, str]) -> ChainWriter:
        """Creates the run and claims it; or claims the one that another has started meanwhile."""
        run = Run(
            run=self._runtime.token(),
            time=self._runtime.time(),
            mode="strict" if self._bucket.strict and not self._settings.insist else "single-writer",
            tensors={name: (dtype.name, shape) for name, (dtype, shape) in schema.items()},
            aliases=dict(aliases),
            files=await self.upload_side_files(),
        )
        run = await begin_run(self._bucket, run, self._runtime, self._warn)
        self.check_schema(schema, run)
        return await self.claim(run)

    async def _begin_with_base(self, writer: ChainWriter, copies: HostCopies[Publication], base: Weights) -> Session:
        state = await self._base_state(base)
        head = await writer.send(await writer.prepare(kind=BASE, after=state.hex, source=self._settings.source))
        await self._runtime.run_in_thread(copy_weights, base, copies.published)
        return Session(writer, state, ChainPath(head.record, head, ()))

    async def _base_state(self, base: Weights) -> State:
        if self._base is None:
            self._base = await self._runtime.run_in_thread(digest, base, threads=self._settings.threads)
        return self._base

    async def upload_side_files(self) -> tuple[SideFile, ...]:
        """Once."""
        if self._side_files is None:
            self._side_files = await self._upload_side_files()
        return self._side_files

    async def _upload_side_files(self) -> tuple[SideFile, ...]:
        uploaded = []
        for name, content in sorted(self._settings.files.items()):
            data = content if isinstance(content, bytes) else await self._runtime.run_in_thread(_read, content)
            sha256 = hashlib.sha256(data).hexdigest()
            try:
                uploaded.append(SideFile(name, side_path(name, sha256), len(data), sha256))
            except ValueError as problem:
                raise CheckpointError(f"side file {problem}", hint="rename it, or leave it out") from problem
            await self._bucket.put(uploaded[-1].path, data)
        return tuple(uploaded)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise CheckpointError(f"side file {path}: cannot be read ({problem})", hint="check the side files") from problem


def _tell_dropped(publication: Publication, by: Publication | None) -> None:
    """Of a capture that was never taken."""
    if by is not None:
        publication.supersede(by)
    else:
        publication.fail(
            WeightwireError(f"step {publication.step}: a later capture failed half way and spoilt this one")
        )
