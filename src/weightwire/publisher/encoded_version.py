"""The next version, encoded and uploaded, but not yet committed: it can still be given up."""

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
from weightwire.weights import copy_weights

__all__ = ["FIRST_EPOCH", "FIRST_VERSION", "EncodedVersion", "encode_version", "upload_version"]

FIRST_EPOCH, FIRST_VERSION = 1, 1
"""What the first data of a new run is named for, before there is a run: version 0 is its fence."""


@dataclass(frozen=True)
class EncodedVersion:
    """`after` is the state that it leads to."""

    data: Delta
    kind: str
    version: int
    after: State
    timing: StageTiming


@asynccontextmanager
async def encode_version(
    context: PublishContext, taken: Taken, version: int, before: State | None, *, part: bool = False
) -> AsyncIterator[EncodedVersion]:
    """Moves the published copy forward, so that what was captured is free again, and encodes what changed.

    If it is given up, the copy is put back. Without a state `before`, it is an anchor. `part` says that the copy is
    only a part of the model's weights.
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
    published, threads = taken.copies.published, context.settings.threads
    await context.runtime.run_in_thread(copy_weights, taken.weights, published)
    taken.copies.release_all()
    taken.publication.check()
    return await context.runtime.run_in_thread(anchor, published, spool=spool, threads=threads, part=part)


async def _encode_delta(
    context: PublishContext, taken: Taken, before: State, part: bool, advances: list[CopyAdvance]
) -> Delta:
    copies, threads = taken.copies, context.settings.threads

    def advance() -> None:  # in a thread, which ends even if nobody waits for it any more: the way back is kept
        advances.append(advance_copy(copies.published, taken.weights, threads=threads, done=copies.release))

    await context.runtime.run_in_thread(advance)
    taken.publication.check()
    return await context.runtime.run_in_thread(advances[0].diff, before, threads=threads, part=part)


async def upload_version(
    context: PublishContext, taken: Taken, encoded: EncodedVersion, epoch: int, rank: int = 0
) -> tuple[tuple[DataFile, ...], dict[str, StageTiming]]:
    """Its file, or none where nothing changed; and how long each stage took so far."""
    stages = {**taken.publication.stages, "encode": encoded.timing}
    if not encoded.data.entries:
        return (), stages
    async with context.stage("upload", encoded.version) as uploading:
        uploading.nbytes = encoded.data.nbytes
        file = await context.uploader.name(encoded.kind, encoded.version, epoch, encoded.data, rank)
        await context.uploader.retry(lambda: context.uploader.put(file, encoded.data), lambda: taken.copies.waiting)
    return (file,), {**stages, "upload": uploading.timing}
