"""Parts of a file in a bucket are as trustworthy as a whole file, whatever the store returns."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from support.failing_bucket import Troubled, in_memory
from weightwire import CorruptDelta, Delta, NotFound, Truncated, WeightwireError, diff
from weightwire.catchup import RemoteFile
from weightwire.chain.record_paths import data_path
from weightwire.chain.records import DataFile, FileHead
from weightwire.delta import changes

Arrays = dict[str, Any]

OLD: Arrays = {
    "large": np.zeros((12_000, 1000), np.uint8),  # three blocks
    **{f"expert.{k}": np.full((40, 64), k, np.uint16) for k in range(8)},  # one stack
    "bias": np.zeros(9, np.float32),
}


def changed() -> Arrays:
    new = {name: array.copy() for name, array in OLD.items()}
    for row in (5, 4000, 11_999):
        new["large"][row, row % 1000] = 1
    new["expert.3"][7, 9] = 999
    new["bias"][1] = 2.0
    return new


MADE = diff(OLD, changed())


@dataclass
class LyingStore:
    """A store with the file, which returns other bytes for some of them."""

    bucket: Troubled
    file: DataFile
    data: bytes

    async def lie(self, data: bytes) -> None:
        await self.bucket.inner.delete(self.file.path)
        await self.bucket.inner.put(self.file.path, data)


async def stored(made: Delta = MADE) -> LyingStore:
    bucket, data = in_memory(), made.to_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    head = FileHead(len(made.head), hashlib.sha256(made.head).hexdigest())
    file = DataFile(data_path("delta", 2, 1, 0, sha256), len(data), sha256, 0, head)
    await bucket.inner.put(file.path, data)
    return LyingStore(bucket, file, data)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


def test_some_rows_are_read_with_one_request_for_their_blocks() -> None:
    async def scene() -> tuple[list[int], list[Any]]:
        store = await stored()
        remote = await RemoteFile.open(store.bucket, store.file)
        store.bucket.asked.clear()
        part = await remote.read("large", (3999, 4001))
        positions, _ = changes(OLD, part, "large", (3999, 4001))
        return positions.tolist(), store.bucket.asked

    positions, calls = asyncio.run(scene())
    assert positions == [4000 * 1000]
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["large", "expert.3", "expert.4", "bias"])
def test_a_tensor_is_read_without_the_others(name: str) -> None:
    async def scene() -> list[int]:
        store = await stored()
        begin, end = MADE.byte_range(name)
        hole = bytes(len(MADE.head))
        await store.lie(
            store.data[: len(hole)] + bytes(begin - len(hole)) + store.data[begin:end] + bytes(len(store.data) - end)
        )
        part = await (await RemoteFile.open(store.bucket, store.file)).read(name)
        return list(changes(OLD, part, name)[0])

    assert asyncio.run(scene()) == np.flatnonzero(changed()[name].reshape(-1) != OLD[name].reshape(-1)).tolist()


def test_every_flipped_byte_of_the_head_is_found() -> None:
    async def scene() -> int:
        store, found = await stored(), 0
        for at in range(0, len(MADE.head), 7):
            await store.lie(flipped(store.data, at))
            with pytest.raises(CorruptDelta, match="hash of its head does not match"):
                await RemoteFile.open(store.bucket, store.file)
            found += 1
        return found

    assert asyncio.run(scene()) > 50


@pytest.mark.parametrize("name", ["large", "expert.5", "bias"])
def test_every_flipped_byte_of_a_block_is_found(name: str) -> None:
    async def scene() -> None:
        store = await stored()
        for at in range(*MADE.byte_range(name)):
            await store.lie(flipped(store.data, at))
            remote = await RemoteFile.open(store.bucket, store.file)
            with pytest.raises(CorruptDelta, match="its hash does not match the index"):
                await remote.read(name)

    asyncio.run(scene())


def test_blocks_that_change_places_are_found() -> None:
    async def scene() -> None:
        store = await stored()
        a, b = MADE.byte_range("large", (0, 1)), MADE.byte_range("large", (4000, 4001))
        size = min(a[1] - a[0], b[1] - b[0])
        data = bytearray(store.data)
        data[a[0] : a[0] + size], data[b[0] : b[0] + size] = data[b[0] : b[0] + size], data[a[0] : a[0] + size]
        await store.lie(bytes(data))
        remote = await RemoteFile.open(store.bucket, store.file)
        for rows in ((0, 1), (4000, 4001)):
            with pytest.raises(CorruptDelta):
                await remote.read("large", rows)
        await remote.read("large", (11_000, 12_000))

    asyncio.run(scene())


def test_the_head_of_another_file_is_found() -> None:
    async def scene() -> None:
        store = await stored()
        await store.lie(diff(OLD, {**changed(), "bias": OLD["bias"]}).to_bytes())
        with pytest.raises(CorruptDelta):
            await RemoteFile.open(store.bucket, store.file)

    asyncio.run(scene())


@pytest.mark.parametrize("keep", [0, 100, len(MADE.head), len(MADE.head) + 3])
def test_a_shorter_file_is_an_error(keep: int) -> None:
    async def scene() -> None:
        store = await stored()
        await store.lie(store.data[:keep])
        with pytest.raises(WeightwireError) as caught:
            await (await RemoteFile.open(store.bucket, store.file)).read("large")
        assert isinstance(caught.value, CorruptDelta | Truncated | NotFound)

    asyncio.run(scene())


def test_a_commit_that_names_a_part_of_the_head_is_refused() -> None:
    async def scene() -> None:
        store = await stored()
        for size in (8, 100, len(MADE.head) - 1, len(MADE.head) + 1):
            head = FileHead(size, hashlib.sha256(store.data[:size]).hexdigest())
            file = DataFile(store.file.path, store.file.size, store.file.sha256, 0, head)
            with pytest.raises(CorruptDelta):
                await RemoteFile.open(store.bucket, file)

    asyncio.run(scene())


def test_a_commit_without_the_hash_of_the_head_is_refused() -> None:
    async def scene() -> None:
        store = await stored()
        file = DataFile(store.file.path, store.file.size, store.file.sha256)
        with pytest.raises(CorruptDelta, match="no hash of its head"):
            await RemoteFile.open(store.bucket, file)

    asyncio.run(scene())
