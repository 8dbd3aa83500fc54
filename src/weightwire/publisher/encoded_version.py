"""The next version, encoded and uploaded but not committed: it can still be given up."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO

from weightwire.chain import ANCHOR, DELTA, DataFile, StageTiming
from weightwire.delta import Delta, State, anchor
from weightwire.publisher.copy_advance import CopyAdvance, advance_copy
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_process import Taken

__all__ = ["FIRST_EPOCH", "FIRST_VERSION", "EncodedVersion", "encode_version", "upload_version"]

FIRST_EPOCH, FIRST_VERSION = 1, 1
"""The epoch and version of a new run's first data. Version 0 is the fence."""


@dataclass(frozen=True)
class EncodedVersion:
    """An encoded version. `after` is the state of its weights."""

    data: Delta
    kind: str
    version: int
    after: State
    timing: StageTiming


@asynccontextmanager
async def encode_version(
    context: PublishContext, taken: Taken, version: int, before: State | None, *, part: bool = False
) -> AsyncIterator[EncodedVersion]:
    """Updates the published copy, which frees the capture, and encodes the change.

    The copy is restored if the block raises. Without a state `before`, it encodes an anchor. `part` means that the copy
    holds only a part of the model's weights.
    """
    advances: list[CopyAdvance] = []
    with tempfile.TemporaryFile() as spool:
        try:
            async with context.stage("encode", version) as encoding:
                if before is None:
                    data = await _encode_anchor(context, taken, spool, part)
                else:
                    data = await _encode_delta(context, taken, before, part, advances)
                encoding.nbytes = data.nbytes
            kind, after = ANCHOR if before is None else DELTA, data.advance(before or State({}))
            yield EncodedVersion(data, kind, version, after, encoding.timing)
        except BaseException:
            for advance in advances:
                await context.runtime.run_in_thread(advance.undo)
            raise


async def _encode_anchor(context: PublishContext, taken: Taken, spool: BinaryIO, part: bool) -> Delta:
    published, settings, runtime = taken.copies.published, context.settings, context.runtime
    total = published.nbytes
    await runtime.run_in_thread(published.copy_from, taken.weights, settings.progress("read", total))
    taken.copies.release_all()
    taken.publication.check()
    progress = settings.progress("encode", total)
    return await runtime.run_in_thread(
        anchor, published, spool=spool, threads=settings.threads, progress=progress, part=part
    )


async def _encode_delta(
    context: PublishContext, taken: Taken, before: State, part: bool, advances: list[CopyAdvance]
) -> Delta:
    copies, settings = taken.copies, context.settings
    progress = settings.progress("encode", copies.published.nbytes)

    def advance() -> None:  # runs to its end even if this is cancelled, so the result is kept for undo
        advances.append(
            advance_copy(
                copies.published, taken.weights, threads=settings.threads, done=copies.release, progress=progress
            )
        )

    await context.runtime.run_in_thread(advance)
    taken.publication.check()
    return await context.runtime.run_in_thread(advances[0].diff, before, part=part)


async def upload_version(
    context: PublishContext, taken: Taken, encoded: EncodedVersion, epoch: int, rank: int = 0
) -> tuple[tuple[DataFile, ...], dict[str, StageTiming]]:
    """Uploads a version. Returns its files (empty if nothing changed) and the timings so far."""
    stages = {**taken.publication.stages, "encode": encoded.timing}
    if not encoded.data.stacks:
        return (), stages
    async with context.stage("upload", encoded.version) as uploading:
        uploading.nbytes = encoded.data.nbytes
        file = await context.uploader.name(encoded.kind, encoded.version, epoch, encoded.data, rank)
        await context.uploader.retry(lambda: context.uploader.put(file, encoded.data), lambda: taken.copies.waiting)
    return (file,), {**stages, "upload": uploading.timing}
