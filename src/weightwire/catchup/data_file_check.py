"""Checks a data file against its record without its weights: every byte against the hash, then the header.

Streams the file, so memory stays small. `verify` and `gc` use the same check.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from weightwire.bucket import Bucket
from weightwire.chain import ANCHOR, DELTA, DataFile, unlisted_means_missing
from weightwire.delta import Delta, State, head_size
from weightwire.errors import CorruptDelta, UnsupportedFormat, WeightwireError
from weightwire.system import Runtime
from weightwire.weights import LENGTH_SIZE, read_size

__all__ = ["FileClaim", "check_data_file", "hash_object"]

_PIECE = 16 << 20


@dataclass(frozen=True)
class FileClaim:
    """What a record says about its files. `record` names it in problems."""

    record: str
    kind: str
    before: str
    after: str

    def contradiction(self, delta: Delta) -> str | None:
        """How a file contradicts its record; None if it does not. One of several parts names no state."""
        if delta.kind != self.kind:
            return f"not a file of kind {self.kind}"
        before = self.before if self.kind == DELTA else ""
        for found, expected, what in ((delta.before, before, "starts from"), (delta.after, self.after, "leads to")):
            if found and found != expected:
                return f"{what} another state than {self.record} names"
        if self.kind == ANCHOR and delta.after and delta.advance(State({})).hex != self.after:
            return "its tensors do not have the state that it names"
        return None


async def check_data_file(
    bucket: Bucket,
    runtime: Runtime,
    file: DataFile,
    claim: FileClaim,
    on_read: Callable[[int], None] = lambda nbytes: None,
) -> str | None:
    """What is wrong with a file; None if nothing is.

    Raises the errors of the bucket, such as NotFound.
    """
    sha256, beginning = await hash_object(bucket, runtime, file.path, file.size, on_read)
    if sha256 != file.sha256:
        return "corrupt: its hash does not match the record"
    if file.head is not None and hashlib.sha256(beginning[: file.head.size]).hexdigest() != file.head.sha256:
        return "corrupt: the hash of its head does not match the record"
    where = f"{bucket.url}/{file.path}"
    try:
        delta = Delta.remote(lambda begin, end: beginning[begin:end], file.size, where)
    except (CorruptDelta, UnsupportedFormat) as problem:
        return problem.message.removeprefix(f"{where}: ")
    return claim.contradiction(delta)


async def hash_object(
    bucket: Bucket, runtime: Runtime, path: str, size: int, on_read: Callable[[int], None]
) -> tuple[str, bytes]:
    """The hash of an object, and its first bytes with the head of a delta."""
    whole, beginning = hashlib.sha256(), b""
    buffer = memoryview(bytearray(min(_PIECE, size)))
    wanted = LENGTH_SIZE
    for begin in range(0, size, _PIECE):
        piece = buffer[: min(_PIECE, size - begin)]
        async with unlisted_means_missing(bucket, path):
            await bucket.read_into(path, piece, begin)
        await runtime.run_in_thread(whole.update, piece)
        if len(beginning) < wanted:
            beginning += bytes(piece)
            wanted = _head_size(beginning, size)
        on_read(len(piece))
    return whole.hexdigest(), beginning


def _head_size(beginning: bytes, total: int) -> int:
    """The bytes that the parser needs, as far as the first bytes of the file tell."""
    try:
        size = read_size(beginning, "", total=total)
        return size if size > len(beginning) else head_size(beginning, "", total)
    except WeightwireError:
        return 0  # the parser reports the problem
