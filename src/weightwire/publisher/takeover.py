"""How a publisher opens a run: it reads the run, rebuilds the published weights, and claims it for its first version.

A run is claimed only once the new weights are known to fit, so a mismatch does not disturb the current publisher. A new
run is started after its first data is in the bucket.
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
    ChainReader,
    ChainWriter,
    Commit,
    Run,
    Sealed,
    SideFile,
    Signer,
    begin_run,
    check_free,
    check_signer,
    read_run,
    side_path,
)
from weightwire.delta import State, digest
from weightwire.errors import (
    CheckpointError,
    NoRun,
    NotPublished,
    UnsafeBucket,
    Untrusted,
)
from weightwire.publisher.capture_gate import CaptureGate
from weightwire.publisher.host_copies import HostCopies
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.system import read_regular
from weightwire.weights import Rows, Schema, Weights, check_schema, copy_weights, nbytes_of, schema_of_weights

__all__ = ["Session", "Takeover", "UnclaimedRun"]


@dataclass(frozen=True)
class UnclaimedRun:
    """A run that was read but not claimed. `head` is its newest commit.

    `copies.published` holds the weights of `state`, if there is one. `path` leads to it from the newest anchor.
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
    """A run that this publisher has claimed. Its copies hold the weights of `state`.

    `path` leads from the newest anchor to the version at which it was claimed.
    """

    writer: ChainWriter
    state: State | None = None
    path: ChainPath | None = None


class Takeover:
    def __init__(self, context: PublishContext) -> None:
        self._bucket = context.bucket
        self._runtime = context.runtime
        self._settings = context.settings
        self._adapter_files = context.adapter_files
        self._signer = context.settings.signer
        self._warn = context.warn
        self._side_files: tuple[SideFile, ...] | None = None  # set once they are uploaded
        self._base: State | None = None  # set once it is known

    # --- an existing run -----------------------------------------------------------------------------------------

    async def probe(self) -> Run | None:
        """Checks that the bucket can hold a run. Returns the run, if there is one."""
        if not self._settings.insist:
            await probe_bucket(self._bucket, self._runtime.token())
        run = await self.find_again()
        if run is None:
            await check_free(self._bucket)
        return run

    async def find_again(self) -> Run | None:
        """The run, if it exists by now: another publisher may have started it."""
        try:
            return await read_run(self._bucket)
        except NoRun:
            return None

    async def read(self, run: Run, copies: HostCopies[Publication] | None = None) -> UnclaimedRun:
        """Rebuilds the published weights, into the given copies or into new ones."""
        self._check_may_continue(run)
        if copies is None:
            copies = await self._runtime.run_in_thread(self.allocate, run.schema)
        else:
            self.check_schema(schema_of_weights(copies.published), run)
        chain = ChainReader(self._bucket, run, self._signer.trust if self._signer else None)
        await chain.check_not_rolled_back()  # now, when the publisher is made, and again with the claim
        head = await chain.read_head()
        if head is None or not head.record.after:
            return UnclaimedRun(run, copies, head)
        return await self._rebuild(chain, copies, head)

    def check_schema(self, weights: Schema, run: Run) -> None:
        check_schema(weights, run.schema, url=self._bucket.url)

    async def claim(self, run: Run) -> ChainWriter:
        """Claims the run and fences off its previous publisher."""
        self._check_may_continue(run)
        writer = ChainWriter(self._bucket, run, self._runtime, self._warn, self._signer)
        if self._signer is not None and await writer.chain.read_head() is None:
            await self._check_own(run, self._signer)
        await writer.take_over()
        return writer

    async def resume(self, writer: ChainWriter, found: UnclaimedRun) -> Session:
        """Continues from the newest version, which is rebuilt if another publisher added versions meanwhile."""
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
        """Allocates copies for the weights of a run, or for some of their rows."""
        single, threads = self._settings.blocking, self._settings.threads
        return HostCopies(schema, rows=rows, single=single, threads=threads, dropped=_finish_dropped, gate=gate)

    def _check_may_continue(self, run: Run) -> None:
        """Checks that this publisher may continue the run: through this URL, and with its key."""
        if run.mode == "strict" and not self._bucket.strict:
            raise UnsafeBucket(
                f"{self._bucket.url}: this URL has no atomic create, which the run requires",
                hint="publish through the URL that the run was started with (for Hugging Face: its S3 gateway)",
            )
        check_signer(self._bucket.url, run, self._signer)

    async def _check_own(self, run: Run, signer: Signer) -> None:
        """Checks run.json before the first signature, which vouches for it: a stranger may have put it there."""
        if run.keys != (signer.key.public.hex,) or run.files != await self.upload_side_files():
            raise Untrusted(
                f"{self._bucket.url}: run.json names other keys or side files than this publisher",
                hint="delete run.json if no publisher needs it, or publish under another URL",
            )

    async def _rebuild(self, chain: ChainReader, copies: HostCopies[Publication], head: Sealed[Commit]) -> UnclaimedRun:
        """Rebuilds the published weights: from `published` or `base` if they match, otherwise from the bucket."""
        state = await self._given(copies, head.record.after)
        if state is not None:
            return UnclaimedRun(chain.run, copies, head, state, await plan(chain, head))
        return await self._restore(chain, copies, head)

    async def _given(self, copies: HostCopies[Publication], after: str) -> State | None:
        for given in (self._settings.published, self._settings.base):
            if given is not None and schema_of_weights(given) == schema_of_weights(copies.published):
                settings, total = self._settings, nbytes_of(given)
                state = await self._runtime.run_in_thread(
                    digest, given, threads=settings.threads, progress=settings.progress("verify", total)
                )
                if state.hex == after:
                    read = settings.progress("read", total)
                    await self._runtime.run_in_thread(copy_weights, given, copies.published, read)
                    return state
        return None

    async def _restore(self, chain: ChainReader, copies: HostCopies[Publication], head: Sealed[Commit]) -> UnclaimedRun:
        """Restores from the bucket. If its data is lost, the next version is an anchor, which heals the run."""
        fetcher = Fetcher(self._bucket, self._runtime)
        base, threads = self._settings.base, self._settings.threads

        async def attempt() -> UnclaimedRun:
            path = await plan(chain, head, lost=fetcher.lost)
            state = await restore_weights(
                path,
                fetcher,
                copies.published,
                self._runtime,
                base=base,
                threads=threads,
                progress=self._settings.progress,
            )
            return UnclaimedRun(chain.run, copies, head, state, path)

        try:
            return await around_lost_data(fetcher, attempt, self._warn)
        except LOST_FOR_GOOD as problem:
            self._warn(f"{problem.message}; the next version will be an anchor with all weights")
            return UnclaimedRun(chain.run, copies, head)

    # --- a new run -----------------------------------------------------------------------------------------------

    async def begin_from_base(self, base: Weights) -> tuple[UnclaimedRun, Session]:
        """Starts a run from weights that followers already have."""
        schema = schema_of_weights(base)
        copies = await self._runtime.run_in_thread(self.allocate, schema)
        await self._base_state(base)  # before anything is created, because it takes a while
        writer = await self.start_run(schema, {})
        found = UnclaimedRun(writer.run, copies)
        return found, await self.resume(writer, found)

    async def start_run(self, schema: Schema, aliases: Mapping[str, str]) -> ChainWriter:
        """Creates and claims the run. If another publisher created it meanwhile, claims that one."""
        run = Run(
            run=self._runtime.token(),
            time=self._runtime.time(),
            mode="strict" if self._bucket.strict and not self._settings.insist else "single-writer",
            tensors={name: (dtype.name, shape) for name, (dtype, shape) in schema.items()},
            aliases=dict(aliases),
            files=await self.upload_side_files(),
            keys=(self._signer.key.public.hex,) if self._signer else (),
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
        """Uploads them once."""
        if self._side_files is None:
            self._side_files = await self._upload_side_files()
        return self._side_files

    async def _upload_side_files(self) -> tuple[SideFile, ...]:
        uploaded = []
        for name, content in sorted({**self._adapter_files, **self._settings.files}.items()):
            data = content if isinstance(content, bytes) else await self._runtime.run_in_thread(_read, content)
            sha256 = hashlib.sha256(data).hexdigest()
            try:
                uploaded.append(SideFile(name, side_path(name, sha256), len(data), sha256))
            except ValueError as problem:
                raise CheckpointError(f"side file {problem}", hint="rename it or leave it out") from problem
            await self._bucket.put(uploaded[-1].path, data)
        return tuple(uploaded)


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as problem:
        raise CheckpointError(f"side file {path}: cannot be read ({problem})", hint="check the side files") from problem


def _finish_dropped(publication: Publication, by: Publication | None) -> None:
    """Finishes the publication of a capture that was never taken."""
    if by is not None:
        publication.supersede(by)
    else:
        publication.fail(NotPublished(f"{publication.name}: a later capture failed halfway and overwrote it"))
