"""Anchors beside the chain: encoded between two versions, uploaded behind the next ones, and hinted at."""

from __future__ import annotations

import tempfile
from typing import BinaryIO

from weightwire.chain import ANCHOR, ChainWriter, Commit, DataFile, Shortcut, seal, settle, shortcut_path
from weightwire.delta import Delta, anchor
from weightwire.errors import WeightwireError
from weightwire.publisher.anchor_schedule import AnchorSchedule
from weightwire.publisher.publish_context import PublishContext
from weightwire.weights import Weights

__all__ = ["Anchors"]


class Anchors:
    def __init__(self, context: PublishContext) -> None:
        self._context = context
        self.schedule = AnchorSchedule(every=context.settings.anchor_every)

    def is_due(self, weights_bytes: int) -> bool:
        return not self._context.background.is_running("anchor") and self.schedule.is_due(weights_bytes)

    async def add(self, commit: Commit, published: Weights) -> None:
        """Encoded now, from the published weights, which must not change meanwhile; uploaded behind what comes next."""
        self.schedule = self.schedule.restarted()
        spool = tempfile.TemporaryFile()  # noqa: SIM115 (closed when it has been uploaded)
        try:
            async with self._context.stage("encode", commit.version) as encoding:
                made = await self._context.runtime.run_in_thread(
                    anchor, published, spool=spool, threads=self._context.settings.threads
                )
                encoding.nbytes = made.nbytes
        except BaseException as problem:
            spool.close()
            if not isinstance(problem, WeightwireError | OSError | MemoryError):
                raise
            self.warn(commit.version, problem)
            return
        self._context.background.start(self._upload(commit, made, spool), "anchor")

    async def _upload(self, commit: Commit, made: Delta, spool: BinaryIO) -> None:
        uploader = self._context.uploader
        try:
            file = await uploader.name(ANCHOR, commit.version, commit.epoch, made)
            await uploader.put(file, made)
            await self.record(commit, (file,))
        except WeightwireError as problem:
            self.warn(commit.version, problem)
        finally:
            spool.close()

    async def record(self, commit: Commit, files: tuple[DataFile, ...]) -> None:
        """Creates the record that lets followers find an anchor whose files are all there."""
        shortcut = Shortcut(run=commit.run, version=commit.version, kind="anchor", after=commit.after, files=files)
        sealed = seal(shortcut)
        path = shortcut_path(sealed)
        context = self._context
        await settle(context.bucket, path, sealed.data, context.runtime, context.warn, tries=5)
        self.schedule = self.schedule.after_shortcut(shortcut, path)

    def hint(self, writer: ChainWriter) -> None:
        """Writes HEAD.json, unless that is still under way."""
        if not self._context.background.is_running("hint"):
            self._context.background.start(writer.hint(self.schedule.newest), "hint")

    def warn(self, version: int, problem: BaseException) -> None:
        why = problem.message if isinstance(problem, WeightwireError) else problem
        self._context.warn(f"no anchor for version {version} ({why})")
