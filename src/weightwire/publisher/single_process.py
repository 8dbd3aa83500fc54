"""A trainer with one process, which holds all weights.

It claims a run only when it has weights that fit. Until then, another publisher of the run is not disturbed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weightwire.chain import DELTA, ChainWriter, Commit, DataFile, Run, Sealed, StageTiming
from weightwire.delta import State
from weightwire.errors import Fenced, WeightwireError
from weightwire.publisher.anchors import Anchors
from weightwire.publisher.encoded_version import (
    FIRST_EPOCH,
    FIRST_VERSION,
    EncodedVersion,
    encode_version,
    upload_version,
)
from weightwire.publisher.host_copies import HostCopies
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_process import Taken, next_capture
from weightwire.publisher.takeover import Session, Takeover, UnclaimedRun
from weightwire.weights import Dtype, Tensor, Weights, schema_of_weights

__all__ = ["SingleProcess"]


class SingleProcess:
    def __init__(self, context: PublishContext) -> None:
        self._context = context
        self._takeover = Takeover(context)
        self._anchors = Anchors(context)
        self._copies: HostCopies[Publication] | None = None
        self._found: UnclaimedRun | None = None
        self._writer: ChainWriter | None = None  # set once the found run is claimed
        self._session: Session | None = None

    @property
    def run_record(self) -> Run | None:
        return self._session.writer.run if self._session else self._found.run if self._found else None

    @property
    def version(self) -> int | None:
        if self._session is not None:
            return self._session.writer.next_version - 1
        return self._found.head.record.version if self._found and self._found.head else None

    @property
    def state(self) -> State | None:
        return self._session.state if self._session else self._found.state if self._found else None

    @property
    def dtypes(self) -> dict[str, Dtype]:
        return self._copies.published.dtypes if self._copies else {}

    @property
    def copies(self) -> HostCopies[Publication] | None:
        return self._copies

    @property
    def writer(self) -> ChainWriter | None:
        return self._session.writer if self._session else self._writer

    # --- start ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Reads the run if it exists, or starts one from a base. Otherwise the first version starts it."""
        run, base = await self._takeover.probe(), self._context.settings.base
        if run is not None:
            self._find(await self._takeover.read(run))
        elif base is not None:
            found, session = await self._takeover.begin_from_base(base)
            self._find(found)
            self._set_session(session)

    def _find(self, found: UnclaimedRun) -> None:
        self._found, self._copies = found, found.copies

    def _set_session(self, session: Session) -> None:
        self._session = session
        if session.path is not None:
            self._anchors.schedule = self._anchors.schedule.after_path(session.path)

    async def _begin(self) -> WeightwireError | None:
        """Claims the run, unless that is done or there is none yet. Returns the error that prevents it."""
        lifecycle = self._context.lifecycle
        if self._session is not None or lifecycle.failure is not None:
            return lifecycle.failure
        try:
            await self._claim()
        except Fenced as problem:
            lifecycle.fail(problem)
            return problem
        except WeightwireError as problem:
            return problem
        return None

    async def _claim(self) -> None:
        retry, takeover = self._context.uploader.retry, self._takeover
        found = self._found or await self._look_again()
        if found is None:  # the first version starts it
            await retry(takeover.upload_side_files)
            return
        if self._writer is None:  # only once: every claim adds a version to the run
            self._writer = await retry(lambda: takeover.claim(found.run))
        writer = self._writer
        self._set_session(await retry(lambda: takeover.resume(writer, found)))

    async def _look_again(self) -> UnclaimedRun | None:
        """Looks for a run that another publisher started meanwhile."""
        retry, takeover = self._context.uploader.retry, self._takeover
        run = await retry(takeover.find_again)
        if run is None:
            return None
        found = await retry(lambda: takeover.read(run, self._copies))
        self._find(found)
        return found

    # --- captures ------------------------------------------------------------------------------------------------

    @property
    def is_joined(self) -> bool:
        return True

    async def join(self, weights: Weights, aliases: Mapping[str, str]) -> None:
        pass

    def own_rows(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights

    def skip(self) -> None:
        pass

    def capture(self, publication: Publication, weights: Weights) -> None:
        if self._copies is None:
            self._copies = self._takeover.allocate(schema_of_weights(weights))
        self._copies.capture(weights, publication)

    async def take(self) -> Taken | None:
        return await next_capture(self._context, lambda: self._copies, self._begin)

    async def offer(self, publication: Publication, weights: Weights) -> Taken:
        copies = self._copies
        if copies is None:
            copies = self._copies = await self._context.runtime.run_in_thread(
                self._takeover.allocate, schema_of_weights(weights)
            )
        try:
            checked = copies.check(weights)
        except WeightwireError as problem:
            return Taken(publication, {}, copies, problem)
        return Taken(publication, checked, copies, await self._begin())

    # --- versions ------------------------------------------------------------------------------------------------

    async def make_version(self, taken: Taken) -> Sealed[Commit]:
        session = self._session
        if session is None:
            return await self._make_first_version(taken)
        writer = session.writer
        async with encode_version(self._context, taken, writer.next_version, session.state) as encoded:
            uploaded = await upload_version(self._context, taken, encoded, writer.epoch)
            return await self._commit(session, taken, encoded, *uploaded)

    async def _make_first_version(self, taken: Taken) -> Sealed[Commit]:
        """Uploads the data before it starts the run: if that is interrupted, the URL is still free for other weights.

        Once run.json may exist, an interrupt waits for the commit.
        """
        async with encode_version(self._context, taken, FIRST_VERSION, None) as encoded:
            uploaded = await upload_version(self._context, taken, encoded, FIRST_EPOCH)
            return await self._context.background.finish(self._start_run(taken, encoded, uploaded), "start")

    async def _start_run(
        self, taken: Taken, encoded: EncodedVersion, uploaded: tuple[tuple[DataFile, ...], Mapping[str, StageTiming]]
    ) -> Sealed[Commit]:
        context, schema = self._context, schema_of_weights(taken.copies.published)
        writer = await context.uploader.retry(lambda: self._takeover.start_run(schema, taken.publication.aliases))
        session = self._session = Session(writer)
        if (writer.next_version, writer.epoch) != (
            FIRST_VERSION,
            FIRST_EPOCH,
        ):  # another publisher started the run first
            encoded = replace(encoded, version=writer.next_version)
            uploaded = await upload_version(context, taken, encoded, writer.epoch)
        return await self._commit(session, taken, encoded, *uploaded)

    async def _commit(
        self,
        session: Session,
        taken: Taken,
        encoded: EncodedVersion,
        files: tuple[DataFile, ...],
        stages: Mapping[str, StageTiming],
    ) -> Sealed[Commit]:
        writer, publication = session.writer, taken.publication
        commit = await self._context.uploader.retry(
            lambda: writer.prepare(
                kind=encoded.kind,
                after=encoded.data.after,
                changed=encoded.data.changed if encoded.kind == DELTA else 0,
                step=publication.step,
                metrics=publication.metrics,
                stages=stages,
                files=files,
            ),
            lambda: taken.copies.waiting,
        )
        async with self._context.stage("commit", encoded.version):
            await writer.send(commit)
        self._session = replace(session, state=encoded.after)
        self._anchors.schedule = self._anchors.schedule.after_commit(commit.record)
        return commit

    async def follow_up(self, commit: Sealed[Commit]) -> None:
        if self._session is not None and self._copies is not None:
            writer = self._session.writer
            self._anchors.hint(writer)
            if self._anchors.is_due(self._copies.published.nbytes):
                await self._anchors.add(commit.record, self._copies.published)

    def leave(self) -> None:
        pass
