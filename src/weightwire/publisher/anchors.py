"""Anchors beside the chain: encoded between two versions, uploaded behind the next ones, and hinted at."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import BinaryIO

from weightwire.chain import ANCHOR, ChainWriter, Commit, DataFile, Shortcut, create_until_taken, seal, shortcut_path
from weightwire.delta import Delta, anchor
from weightwire.errors import WeightwireError
from weightwire.publisher.anchor_schedule import AnchorSchedule
from weightwire.publisher.publish_context import PublishContext
from weightwire.weights import Weights

__all__ = ["Anchors", "EncodedAnchor"]


@dataclass(frozen=True)
class EncodedAnchor:
    """An anchor that is not uploaded yet. `spool` holds its bytes, and is closed when it is."""

    data: Delta
    spool: BinaryIO


class Anchors:
    def __init__(self, context: PublishContext) -> None:
        self._context = context
        self.schedule = AnchorSchedule(every=context.settings.anchor_every)

    def is_due(self, weights_bytes: int) -> bool:
        return not self._context.background.is_running("anchor") and self.schedule.is_due(weights_bytes)

    async def add(self, commit: Commit, published: Weights) -> None:
        """Encoded now, from the published weights, which must not change meanwhile; uploaded behind what comes next."""
        self.schedule = self.schedule.restarted()
        made = await self.encode(commit, published)
        if made is not None:
            self._context.background.start(self._upload_and_record(commit, made), "anchor")

    async def encode(self, commit: Commit, published: Weights, *, part: bool = False) -> EncodedAnchor | None:
        """An anchor of a version, or a `part` of one, for `upload`; None if that failed, which has been told."""
        spool = tempfile.TemporaryFile()  # noqa: SIM115 (closed when it has been uploaded)
        try:
            async with self._context.stage("encode", commit.version) as encoding:
                made = await self._context.runtime.run_in_thread(
                    anchor, published, spool=spool, threads=self._context.settings.threads, part=part
                )
                encoding.nbytes = made.nbytes
        except BaseException as problem:
            spool.close()
            if not isinstance(problem, WeightwireError | OSError | MemoryError):
                raise
            self._warn(commit.version, problem)
            return None
        return EncodedAnchor(made, spool)

    async def upload(self, commit: Commit, made: EncodedAnchor, rank: int = 0) -> DataFile | None:
        """Its file; None if that failed, which has been told."""
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
        """Creates the record that lets followers find an anchor whose files are all there."""
        try:
            await self._create_shortcut(commit, files)
        except WeightwireError as problem:
            self._warn(commit.version, problem)

    async def _create_shortcut(self, commit: Commit, files: tuple[DataFile, ...]) -> None:
        shortcut = Shortcut(run=commit.run, version=commit.version, kind="anchor", after=commit.after, files=files)
        sealed = seal(shortcut)
        path = shortcut_path(sealed)
        context = self._context
        await create_until_taken(context.bucket, path, sealed.data, context.runtime, context.warn, tries=5)
        self.schedule = self.schedule.after_shortcut(shortcut, path)

    def hint(self, writer: ChainWriter) -> None:
        """Writes HEAD.json, unless that is still under way."""
        if not self._context.background.is_running("hint"):
            self._context.background.start(writer.hint(self.schedule.newest), "hint")

    def _warn(self, version: int, problem: BaseException) -> None:
        why = problem.message if isinstance(problem, WeightwireError) else problem
        self._context.warn(f"no anchor for version {version} ({why})")
