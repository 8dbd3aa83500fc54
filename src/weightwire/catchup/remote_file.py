"""Reads parts of a delta or anchor in a bucket, without the rest of the file.

Every byte is verified: the head by its hash in the commit, each block by its hash in the head.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from weightwire.bucket import Bucket
from weightwire.chain import DataFile, denied_means_missing
from weightwire.delta import Delta
from weightwire.errors import CorruptDelta
from weightwire.weights import Rows

__all__ = ["RemoteFile"]

_VERIFY = "run `weightwire verify URL`"


class RemoteFile:
    """A data file whose head was read and verified. `delta` has its entries; its blocks must be read first."""

    def __init__(self, bucket: Bucket, file: DataFile, delta: Delta) -> None:
        self.delta = delta
        self._bucket = bucket
        self._file = file

    @classmethod
    async def open(cls, bucket: Bucket, file: DataFile) -> RemoteFile:
        """Reads the head. Raises CorruptDelta if it is not the one that the commit names."""
        where = f"{bucket.url}/{file.path}"
        if file.head is None:
            raise CorruptDelta(f"{where}: its commit has no hash of its head", hint="read the whole file")
        head = await _read(bucket, file, 0, file.head.size)
        if hashlib.sha256(head).hexdigest() != file.head.sha256:
            raise CorruptDelta(f"{where}: corrupt: the hash of its head does not match the record", hint=_VERIFY)
        delta = Delta.remote(lambda begin, end: head[begin:end], file.size, where)
        if len(delta.head) != len(head):
            raise CorruptDelta(f"{where}: corrupt: the size of its head does not match the record", hint=_VERIFY)
        return cls(bucket, file, delta)

    async def read(self, name: str, rows: Rows | None = None) -> Delta:
        """Reads a tensor, or some of its rows, with one request.

        The result holds the blocks that cover them, verified: `changes(base, result, name, rows)` lists what they
        change.
        """
        stack, blocks, head = self.delta.stack_of[name], self.delta.blocks_of(name, rows), len(self.delta.head)
        begin, end = stack.span(blocks)
        data = memoryview(await _read(self._bucket, self._file, head + begin, head + end))
        for index in blocks:
            first, last = stack.span(range(index, index + 1))
            self.delta.check_hash(stack, index, data[first - begin : last - begin])
        return replace(self.delta, fetch=lambda first, last: data[first - begin : last - begin])


async def _read(bucket: Bucket, file: DataFile, begin: int, end: int) -> bytes:
    buffer = bytearray(end - begin)
    if buffer:
        async with denied_means_missing(bucket, file.path):
            await bucket.read_into(file.path, memoryview(buffer), begin)
    return bytes(buffer)
