"""How a publisher gets hold of a run: probes the bucket, starts the run or takes it over, rebuilds the published state.

Knows records and weights; publishes no version but a base.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightwire.bucket import probe_bucket
from weightwire.catchup import ChainPath, Fetcher, around_lost_data, copy_weights, plan, restore_weights, schema_of
from weightwire.chain import BASE, ChainWriter, Run, SideFile, begin_run, read_run, side_path
from weightwire.delta import State, digest
from weightwire.errors import (
    BucketError,
    CheckpointError,
    CorruptDelta,
    DataGone,
    NoRun,
    SchemaChanged,
    Truncated,
    UnsafeBucket,
    WeightwireError,
)
from weightwire.publisher.capture_gate import CaptureGate
from weightwire.publisher.host_copies import HostCopies, Rows
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.weights import Schema, Weights, schema_of_weights

__all__ = ["Session", "Takeover", "check_schema"]

_OURS = {"anchors", "commits", "deltas", "epochs", "files", "gc", "probe", "replicas", "shortcuts", "HEAD.json"}


@dataclass(frozen=True)
class Session:
    """A run that this publisher has taken over, and what it published last.

    `copies.published` holds the weights of `state`, or nothing while there is none. `path` is the way from the newest
    anchor to where this publisher took over.
    """

    writer: ChainWriter
    copies: HostCopies[Publication]
    state: State | None = None
    path: ChainPath | None = None


class Takeover:
    def __init__(self, context: PublishContext) -> None:
        self._bucket = context.bucket
        self._runtime = context.runtime
        self._settings = context.settings
        self._warn = context.warn

    async def find(self) -> Session | None:
        """The run that is there, or one that starts from the base; None where the first publish must start one."""
        run = await self._look()
        if run is not None:
            return await self._take_over(run, None)
        if self._settings.base is None:
            return None
        return await self.begin(schema_of_weights(self._settings.base), {}, None)

    async def claim(self) -> ChainWriter | None:
        """The run that is there, taken over as it is: what was published is not rebuilt. None where there is none."""
        run = await self._look()
        return None if run is None else await self._claim(run)

    async def _look(self) -> Run | None:
        if not self._settings.insist:
            await probe_bucket(self._bucket, self._runtime.token())
        try:
            return await read_run(self._bucket)
        except NoRun:
            await self._check_free()
            return None

    async def _check_free(self) -> None:
        """A directory that holds other things was hardly meant: a checkpoint, in place of the run's URL."""
        if not self._bucket.url.startswith("file:"):
            return
        for one in await self._bucket.list(""):
            if one.path.split("/")[0] not in _OURS:
                raise BucketError(f"{self._bucket.url}: holds other files, and no run", hint="name a new directory")

    async def begin(
        self, schema: Schema, aliases: Mapping[str, str], copies: HostCopies[Publication] | None
    ) -> Session:
        """Starts a run, or takes over the one that another has started meanwhile."""
        return await self._take_over(await self._begin_run(schema, aliases), copies)

    async def begin_with_nothing(self, schema: Schema, aliases: Mapping[str, str]) -> ChainWriter:
        """The same for who holds only some rows of each tensor: nothing is rebuilt."""
        run = await self._begin_run(schema, aliases)
        check_schema(schema, schema_of(run), self._bucket.url)
        return await self._claim(run)

    async def _begin_run(self, schema: Schema, aliases: Mapping[str, str]) -> Run:
        run = Run(
            run=self._runtime.token(),
            time=self._runtime.time(),
            mode="strict" if self._bucket.strict and not self._settings.insist else "single-writer",
            tensors={name: (dtype.name, shape) for name, (dtype, shape) in schema.items()},
            aliases=dict(aliases),
            files=await self._upload_side_files(),
        )
        return await begin_run(self._bucket, run, self._runtime, self._warn)

    def allocate(
        self, schema: Schema, rows: Mapping[str, Rows] | None = None, gate: CaptureGate | None = None
    ) -> HostCopies[Publication]:
        """Room for the weights of a run, or for some rows of them."""
        single, threads = self._settings.blocking, self._settings.threads
        return HostCopies(schema, rows=rows, single=single, threads=threads, dropped=_tell_dropped, gate=gate)

    async def _take_over(self, run: Run, copies: HostCopies[Publication] | None) -> Session:
        self._check_mode(run)
        schema = schema_of(run)
        if copies is None:
            copies = await self._runtime.run_in_thread(self.allocate, schema)
        else:
            check_schema(schema_of_weights(copies.published), schema, self._bucket.url)
        return await self._rebuild(await self._claim(run), copies)

    def _check_mode(self, run: Run) -> None:
        if run.mode == "strict" and not self._bucket.strict:
            raise UnsafeBucket(
                f"{self._bucket.url}: nothing can be created safely through this URL, and the run counts on it",
                hint="publish through the URL that the run was started with (for Hugging Face: its S3 gateway)",
            )

    async def _claim(self, run: Run) -> ChainWriter:
        self._check_mode(run)
        writer = ChainWriter(self._bucket, run, self._runtime, self._warn)
        await writer.take_over()
        return writer

    async def _rebuild(self, writer: ChainWriter, copies: HostCopies[Publication]) -> Session:
        """The published state: from the bucket, unless weights that were given are just that."""
        assert writer.head is not None
        if not writer.head.record.after:
            if self._settings.base is None:
                return Session(writer, copies)
            return await self._begin_with_base(writer, copies, self._settings.base)
        state = await self._given(copies, writer.head.record.after)
        if state is not None:
            return Session(writer, copies, state, await plan(writer.chain, writer.head))
        return await self._restore(writer, copies)

    async def _given(self, copies: HostCopies[Publication], after: str) -> State | None:
        for given in (self._settings.published, self._settings.base):
            if given is not None and schema_of_weights(given) == schema_of_weights(copies.published):
                state = await self._runtime.run_in_thread(digest, given, threads=self._settings.threads)
                if state.hex == after:
                    await self._runtime.run_in_thread(copy_weights, given, copies.published)
                    return state
        return None

    async def _restore(self, writer: ChainWriter, copies: HostCopies[Publication]) -> Session:
        """From the bucket. Where that is damaged beyond repair, the next version must be an anchor, which heals it."""
        head = writer.head
        assert head is not None
        fetcher = Fetcher(self._bucket, self._runtime)
        base, threads = self._settings.base, self._settings.threads

        async def attempt() -> Session:
            path = await plan(writer.chain, head, lost=fetcher.lost)
            state = await restore_weights(path, fetcher, copies.published, self._runtime, base=base, threads=threads)
            return Session(writer, copies, state, path)

        try:
            return await around_lost_data(fetcher, attempt, self._warn)
        except (DataGone, CorruptDelta, Truncated) as problem:
            self._warn(f"{problem.message}; the next version will be an anchor, with all weights")
            return Session(writer, copies)

    async def _begin_with_base(self, writer: ChainWriter, copies: HostCopies[Publication], base: Weights) -> Session:
        state = await self._runtime.run_in_thread(digest, base, threads=self._settings.threads)
        head = await writer.send(await writer.prepare(kind=BASE, after=state.hex, source=self._settings.source))
        await self._runtime.run_in_thread(copy_weights, base, copies.published)
        return Session(writer, copies, state, ChainPath(head.record, head, ()))

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


def check_schema(weights: Mapping[str, Any], run: Schema, url: str) -> None:
    different = [name for name in {*weights, *run} if weights.get(name) != run.get(name)]
    if different:
        raise SchemaChanged(
            f"tensor {min(different)!r}: is not as in the run at {url}",
            hint="a run's names, dtypes and shapes are fixed: start a new run under another URL",
        )


def _tell_dropped(publication: Publication, by: Publication | None) -> None:
    """Of a capture that was never taken."""
    if by is not None:
        publication.supersede(by)
    else:
        publication.fail(
            WeightwireError(f"step {publication.step}: a later capture failed half way and spoilt this one")
        )
