"""Anchors beside the chain: encoded between two versions, uploaded in the background, then recorded."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import BinaryIO

from weightwire import codec
from weightwire.chain import ANCHOR, ChainWriter, Commit, DataFile, Shortcut, create_until_taken, seal, shortcut_path
from weightwire.delta import Delta, anchor
from weightwire.errors import WeightwireError
from weightwire.publisher.anchor_schedule import AnchorSchedule
from weightwire.publisher.publish_context import PublishContext
from weightwire.weights import Weights, nbytes_of

__all__ = ["Anchors", "EncodedAnchor"]


@dataclass(frozen=True)
class EncodedAnchor:
    """An anchor that is not uploaded yet. `spool` holds its bytes until then."""

    data: Delta
    spool: BinaryIO


class Anchors:
    def __init__(self, context: PublishContext) -> None:
        self._context = context
        self.schedule = AnchorSchedule(every=context.settings.anchor_every)
        self._writer: ChainWriter | None = None  # of HEAD.json, after the first commit
        self._hinted: tuple[int, str] | None = None  # version and anchor in HEAD.json

    def is_due(self, weights_bytes: int) -> bool:
        return not self._context.background.is_running("anchor") and self.schedule.is_due(weights_bytes)

    async def add(self, commit: Commit, published: Weights) -> None:
        """Encodes an anchor from the published weights, which must not change meanwhile. Uploads in the background."""
        self.schedule = self.schedule.restarted()
        made = await self.encode(commit, published)
        if made is not None:
            self._context.background.start(self._upload_and_record(commit, made), "anchor")

    async def encode(self, commit: Commit, published: Weights, *, part: bool = False) -> EncodedAnchor | None:
        """Encodes an anchor, or a `part` of one, for `upload`. Returns None after a failure, with a warning."""
        spool = tempfile.TemporaryFile()  # noqa: SIM115 (closed after the upload)
        try:
            async with self._context.stage("encode", commit.version, ANCHOR) as encoding:
                settings = self._context.settings
                progress = settings.progress("encode", nbytes_of(published))
                made = await self._context.runtime.run_in_thread(
                    anchor, published, spool=spool, threads=settings.threads, progress=progress, part=part
                )
                encoding.nbytes = made.nbytes
                codec.trim()
        except BaseException as problem:
            spool.close()
            if not isinstance(problem, WeightwireError | OSError | MemoryError):
                raise
            self._warn(commit.version, problem)
            return None
        return EncodedAnchor(made, spool)

    async def upload(self, commit: Commit, made: EncodedAnchor, rank: int = 0) -> DataFile | None:
        """Uploads it and returns its file; None after a failure, with a warning."""
        uploader = self._context.uploader
        with made.spool:
            try:
                file = await uploader.name(ANCHOR, commit.version, commit.epoch, made.data, rank)
                await uploader.put(file, made.data)
            except WeightwireError as problem:
                self._warn(commit.version, problem)
                return None
        return file

    async def _upload_and_record(self, commit: Commit, made: EncodedAnchor) -> None:
        file = await self.upload(commit, made)
        if file is not None:
            await self.record(commit, (file,))

    async def record(self, commit: Commit, files: tuple[DataFile, ...]) -> None:
        """Creates the record by which followers find an anchor. All of its files must be uploaded."""
        try:
            await self._create_shortcut(commit, files)
        except WeightwireError as problem:
            self._warn(commit.version, problem)

    async def _create_shortcut(self, commit: Commit, files: tuple[DataFile, ...]) -> None:
        shortcut = Shortcut(run=commit.run, version=commit.version, kind="anchor", after=commit.after, files=files)
        context = self._context
        signer = context.settings.signer
        sealed = seal(shortcut, signer.key if signer else None)
        path = shortcut_path(sealed)
        await create_until_taken(context.bucket, path, sealed.data, context.runtime, context.warn, tries=5)
        self.schedule = self.schedule.after_shortcut(shortcut, path)
        if self._writer is not None:
            self.hint(self._writer)

    def hint(self, writer: ChainWriter) -> None:
        """Writes HEAD.json in the background, for the newest version and anchor."""
        self._writer = writer
        if not self._context.background.is_running("hint"):
            self._context.background.start(self._write_hints(writer), "hint")

    async def _write_hints(self, writer: ChainWriter) -> None:
        """Writes HEAD.json until nothing has changed meanwhile: followers without list permission have only this."""
        if self._hinted is None and not self.schedule.newest and (known := await writer.chain.read_hint()):
            self.schedule = replace(self.schedule, newest=self.schedule.newest or known.anchor)
        while (now := (writer.next_version - 1, self.schedule.newest)) != self._hinted:
            self._hinted = now
            await writer.hint(self.schedule.newest)

    def _warn(self, version: int, problem: BaseException) -> None:
        why = problem.message if isinstance(problem, WeightwireError) else problem
        self._context.warn(f"version {version}: no anchor was written ({why})")
