"""A trainer of one process: it holds all weights, and does everything itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weightwire.chain import ChainWriter, Commit, Run, Sealed
from weightwire.delta import State
from weightwire.errors import WeightwireError
from weightwire.publisher.anchors import Anchors
from weightwire.publisher.encoded_version import encode_version, upload_version
from weightwire.publisher.host_copies import HostCopies
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_process import Taken, next_capture
from weightwire.publisher.takeover import Session, Takeover
from weightwire.weights import Dtype, Schema, Tensor, Weights, schema_of_weights

__all__ = ["SingleProcess"]


class SingleProcess:
    def __init__(self, context: PublishContext) -> None:
        self._context = context
        self._takeover = Takeover(context)
        self._anchors = Anchors(context)
        self._session: Session | None = None
        self._copies: HostCopies[Publication] | None = None  # before there is a session
        self._aliases: Mapping[str, str] = {}

    @property
    def run_record(self) -> Run | None:
        return self._session.writer.run if self._session else None

    @property
    def version(self) -> int | None:
        return self._session.writer.next_version - 1 if self._session else None

    @property
    def state(self) -> State | None:
        return self._session.state if self._session else None

    @property
    def dtypes(self) -> dict[str, Dtype]:
        return {name: tensor.dtype for name, tensor in self.copies.published.items()} if self.copies else {}

    @property
    def copies(self) -> HostCopies[Publication] | None:
        return self._session.copies if self._session else self._copies

    @property
    def writer(self) -> ChainWriter | None:
        return self._session.writer if self._session else None

    # --- start ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Takes over the run, if there is one or a base to start one from; else the first publish starts it."""
        session = await self._takeover.find()
        if session is not None:
            self._go_on(session)

    def _go_on(self, session: Session) -> None:
        self._session = session
        if session.path is not None:
            self._anchors.schedule = self._anchors.schedule.after_path(session.path)

    async def _begin(self, schema: Schema, aliases: Mapping[str, str]) -> WeightwireError | None:
        """Starts the run, unless that has been done. Returns what keeps it from it."""
        if self._session is not None or self._context.lifecycle.failure is not None:
            return self._context.lifecycle.failure
        try:
            self._go_on(
                await self._context.uploader.patiently(lambda: self._takeover.begin(schema, aliases, self._copies))
            )
        except WeightwireError as problem:
            return problem
        return None

    # --- captures ------------------------------------------------------------------------------------------------

    @property
    def is_joined(self) -> bool:
        return True

    async def join(self, weights: Weights, aliases: Mapping[str, str]) -> None:
        pass

    def share(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights

    def skip(self) -> None:
        pass

    def capture(self, publication: Publication, weights: Weights) -> None:
        copies = self.copies
        if copies is None:
            copies = self._copies = self._takeover.allocate(schema_of_weights(weights))
        copies.capture(weights, publication)
        self._aliases = publication.aliases

    async def take(self) -> Taken | None:
        return await next_capture(self._context, lambda: self.copies, self._begin_with_captured)

    async def _begin_with_captured(self) -> WeightwireError | None:
        assert self.copies is not None
        return await self._begin(schema_of_weights(self.copies.latest), self._aliases)

    async def offer(self, publication: Publication, weights: Weights) -> Taken:
        if self.copies is None:
            self._copies = await self._context.runtime.run_in_thread(
                self._takeover.allocate, schema_of_weights(weights)
            )
        problem = await self._begin(schema_of_weights(weights), publication.aliases)
        assert self.copies is not None
        try:
            return Taken(publication, self.copies.check(weights), self.copies, problem)
        except WeightwireError as changed:
            return Taken(publication, {}, self.copies, changed)

    # --- versions ------------------------------------------------------------------------------------------------

    async def make_version(self, taken: Taken) -> Sealed[Commit]:
        session, context = self._session, self._context
        assert session is not None
        writer = session.writer
        async with encode_version(context, taken, writer.next_version, session.state) as encoded:
            files, stages = await upload_version(context, taken, encoded, writer.epoch)
            commit = await context.uploader.patiently(
                lambda: writer.prepare(
                    kind=encoded.kind,
                    after=encoded.data.after,
                    changed=encoded.data.changed if session.state else 0,
                    step=taken.publication.step,
                    metrics=taken.publication.metrics,
                    stages=stages,
                    files=files,
                ),
                lambda: taken.copies.waiting,
            )
            async with context.stage("commit", encoded.version):
                await writer.send(commit)
            self._session = replace(session, state=encoded.after)
        self._anchors.schedule = self._anchors.schedule.after_commit(commit.record)
        return commit

    async def follow_up(self, commit: Sealed[Commit]) -> None:
        session = self._session
        assert session is not None
        self._anchors.hint(session.writer)
        if self._anchors.is_due(session.writer.run.nbytes):
            await self._anchors.add(commit.record, session.copies.published)

    def leave(self) -> None:
        pass
