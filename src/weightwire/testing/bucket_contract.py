"""The tests that every bucket must pass."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import pytest

from weightwire.bucket import Bucket, ObjectInfo
from weightwire.errors import AlreadyExists, BucketError, NotFound, TooLarge, Truncated
from weightwire.testing.bucket_names import BAD_PATHS, ODD_NAMES

__all__ = ["BucketContract", "Opener", "in_loop"]

Args = ParamSpec("Args")

Opener = Callable[[], Bucket]
"""Opens the same bucket with each call, as several processes would. The bucket is empty at first."""


def in_loop(test: Callable[Args, Coroutine[Any, Any, None]]) -> Callable[Args, None]:
    """Runs a test in a new event loop. Fails if the loop reports an unhandled error."""

    @functools.wraps(test)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> None:
        complaints: list[dict[str, Any]] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
            await test(*args, **kwargs)

        asyncio.run(main())
        assert not complaints

    return run


def is_same(found: bytes | bytearray, wanted: bytes | bytearray) -> bool:
    """Compares large objects. pytest would spend minutes on a byte-by-byte diff."""
    return found == wanted


def paths(found: object) -> list[str]:
    assert isinstance(found, list | tuple)
    return [entry.path for entry in found]


class BucketContract:
    """The tests. Inherit from this class and override the fixture `opener` to open your bucket:

        import pytest
        from mystore import MyBucket
        from weightwire.testing import BucketContract

        class TestMyBucket(BucketContract):
            @pytest.fixture
            def opener(self, tmp_path):
                return lambda: MyBucket(tmp_path)

    Every call of the opener must return the same bucket, empty at first. Errors must be weightwire's, with the path in
    the message. The create races are skipped for a bucket whose `strict` is False.
    """

    races = 5  # rounds of concurrent creates of one object
    odd_names: Sequence[str] = ODD_NAMES  # override it for a store that supports only some of them

    @pytest.fixture
    def opener(self) -> Opener:
        raise NotImplementedError("override the fixture `opener`: return a function that opens your bucket")

    @pytest.fixture
    def bucket(self, opener: Opener) -> Iterator[Bucket]:
        bucket = opener()
        yield bucket
        asyncio.run(bucket.close())

    def test_poll_interval_is_sensible(self, bucket: Bucket) -> None:
        assert 0 < bucket.poll_interval < 60

    # create

    @in_loop
    async def test_create_writes_a_new_object(self, bucket: Bucket) -> None:
        await bucket.create("commits/0.json", b"zero")

        assert await bucket.get("commits/0.json") == b"zero"

    @in_loop
    async def test_create_fails_if_the_object_exists(self, bucket: Bucket) -> None:
        await bucket.create("a", b"first")

        with pytest.raises(AlreadyExists, match="a: exists already"):
            await bucket.create("a", b"second")

        assert await bucket.get("a") == b"first"

    @in_loop
    async def test_create_fails_after_a_put(self, bucket: Bucket) -> None:
        await bucket.put("a", b"first")

        with pytest.raises(AlreadyExists):
            await bucket.create("a", b"second")

    @in_loop
    async def test_create_succeeds_after_a_delete(self, bucket: Bucket) -> None:
        await bucket.create("a/b", b"first")
        await bucket.delete("a/b")
        await bucket.create("a/b", b"second")

        assert await bucket.get("a/b") == b"second"

    @in_loop
    async def test_one_of_many_tasks_creates(self, opener: Opener) -> None:
        buckets = [opener() for _ in range(4)]
        if not buckets[0].strict:
            pytest.skip("single-writer bucket")
        for attempt in range(self.races):
            path, contents = f"race/{attempt}", [bytes([racer]) * 1000 for racer in range(8)]

            results = await asyncio.gather(
                *(buckets[racer % 4].create(path, content) for racer, content in enumerate(contents)),
                return_exceptions=True,
            )

            winners = [content for content, result in zip(contents, results, strict=True) if result is None]
            assert [await buckets[0].get(path)] == winners
            assert all(isinstance(result, AlreadyExists) for result in results if result is not None)

    def test_one_of_many_threads_creates(self, opener: Opener) -> None:
        if not opener().strict:
            pytest.skip("single-writer bucket")
        start, winners = threading.Barrier(8), list[bytes]()

        def race(content: bytes) -> None:
            async def create() -> None:
                bucket = opener()
                start.wait()
                try:
                    await bucket.create("race", content)
                except AlreadyExists:
                    return
                winners.append(content)

            asyncio.run(create())

        threads = [threading.Thread(target=race, args=(bytes([racer]),)) for racer in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [asyncio.run(opener().get("race"))] == winners

    # put

    @in_loop
    async def test_put_replaces_an_object(self, bucket: Bucket) -> None:
        await bucket.put("HEAD.json", b"a longer one")
        await bucket.put("HEAD.json", b"short")

        assert await bucket.get("HEAD.json") == b"short"

    @in_loop
    async def test_put_joins_buffers_in_order(self, bucket: Bucket) -> None:
        buffers: list[bytes | memoryview] = [b"one ", memoryview(b"two "), b"", memoryview(bytearray(b"three"))]

        await bucket.put("a", iter(buffers), 13)

        assert await bucket.get("a") == b"one two three"

    @in_loop
    async def test_put_accepts_buffers_of_any_shape(self, bucket: Bucket) -> None:
        nothing = np.empty((0, 3), np.float32).data

        await bucket.put("a", [memoryview(b"12345678").cast("I"), memoryview(b"1234").cast("B", (2, 2)), nothing])

        assert await bucket.get("a") == b"123456781234"
        await bucket.read_into("a", nothing)

    @in_loop
    async def test_put_allows_buffers_to_be_reused(self, bucket: Bucket) -> None:
        def reusing(memory: bytearray) -> Iterator[memoryview]:
            for number in range(20):
                memory[:] = bytes([number]) * len(memory)
                yield memoryview(memory)

        await bucket.put("a", reusing(bytearray(1_000_003)), 20_000_060)

        wanted = b"".join(bytes([n]) * 1_000_003 for n in range(20))
        assert is_same(await self.read(bucket, "a", 20_000_060), wanted)

    @pytest.mark.parametrize("form", ["bytes", "views", "small pieces"])
    @in_loop
    async def test_large_objects_round_trip(self, bucket: Bucket, form: str) -> None:
        data = os.urandom(20_000_001)
        step = len(data) if form == "views" else 700_001
        pieces = (memoryview(data)[start : start + step] for start in range(0, len(data), step))

        await bucket.put("large", data if form == "bytes" else pieces, None if form == "views" else len(data))

        assert is_same(await self.read(bucket, "large", len(data)), data)
        assert is_same(await self.read(bucket, "large", 9_000_000, 11_000_001), data[-9_000_000:])
        found = await bucket.find("large")
        assert found is not None
        assert found.size == len(data)

    @pytest.mark.parametrize("size", [0, 5, 30_000_000])
    @in_loop
    async def test_put_writes_nothing_if_the_size_is_wrong(self, bucket: Bucket, size: int) -> None:
        await bucket.put("a", b"before")

        with pytest.raises(BucketError, match=f"expected {size + 1:,} bytes to write, got {size:,}"):
            await bucket.put("a", [bytes(size)], size + 1)

        assert await bucket.get("a") == b"before"

    @pytest.mark.parametrize("size", [5, 30_000_000])
    @in_loop
    async def test_put_writes_nothing_if_the_iterable_raises(self, bucket: Bucket, size: int) -> None:
        def failing() -> Iterator[bytes]:
            yield bytes(size)
            raise ZeroDivisionError

        with pytest.raises((ZeroDivisionError, BucketError)):
            await bucket.put("a", failing())

        assert await bucket.find("a") is None
        assert not await bucket.list("")

    # get and read_into

    async def read(self, bucket: Bucket, path: str, size: int, start: int = 0) -> bytearray:
        memory = bytearray(size)
        await bucket.read_into(path, memoryview(memory), start)
        return memory

    @in_loop
    async def test_reads_any_range(self, bucket: Bucket) -> None:
        await bucket.put("a", b"0123456789")

        assert await self.read(bucket, "a", 10) == b"0123456789"
        assert await self.read(bucket, "a", 3) == b"012"
        assert await self.read(bucket, "a", 3, 4) == b"456"
        assert await self.read(bucket, "a", 1, 9) == b"9"
        assert await self.read(bucket, "a", 0, 5) == b""

    @in_loop
    async def test_reads_into_the_middle_of_a_buffer(self, bucket: Bucket) -> None:
        await bucket.put("a", b"0123")
        memory = bytearray(8)

        await bucket.read_into("a", memoryview(memory)[2:6])
        assert memory == b"\0\x000123\0\0"

        await bucket.read_into("a", memoryview(memory).cast("I")[1:])
        assert memory == b"\0\x00010123"

    @pytest.mark.parametrize(("size", "start"), [(11, 0), (5, 6), (1, 10), (1, 1000), (30_000_000, 0)])
    @in_loop
    async def test_reading_past_the_end_is_an_error(self, bucket: Bucket, size: int, start: int) -> None:
        await bucket.put("a", b"0123456789")

        with pytest.raises(Truncated) as caught:
            await self.read(bucket, "a", size, start)
        assert "a: " in str(caught.value)
        assert caught.value.hint

    @in_loop
    async def test_empty_objects_exist(self, bucket: Bucket) -> None:
        await bucket.create("created", b"")
        await bucket.put("put", b"")
        await bucket.put("put without pieces", [], 0)

        assert [(entry.path, entry.size) for entry in await bucket.list("")] == [
            ("created", 0),
            ("put", 0),
            ("put without pieces", 0),
        ]
        assert await bucket.get("created") == await bucket.get("put") == b""
        assert await self.read(bucket, "created", 0) == b""
        with pytest.raises(AlreadyExists):
            await bucket.create("put", b"")

    @in_loop
    async def test_missing_objects_are_not_found(self, bucket: Bucket) -> None:
        for _ in range(2):
            with pytest.raises(NotFound, match=r"commits/1\.json"):
                await bucket.get("commits/1.json")
            for size in (0, 10, 30_000_000):
                with pytest.raises(NotFound):
                    await self.read(bucket, "commits/1.json", size)
            assert await bucket.find("commits/1.json") is None
            assert not await bucket.list("commits/")
            await bucket.delete("commits/1.json")
            # Repeat after other objects came and went.
            await bucket.put("commits/2.json", b"")
            await bucket.delete("commits/2.json")
            await bucket.put("commit", b"")

    @in_loop
    async def test_a_small_read_is_bounded(self, bucket: Bucket) -> None:
        """Anyone with write access may put a large object in place of a record."""
        await bucket.put("a", b"12345")

        assert await bucket.get("a", 5) == b"12345"
        for limit in (4, 0):
            with pytest.raises(TooLarge, match=r"a: has more than \d bytes") as caught:
                await bucket.get("a", limit)
            assert caught.value.hint
        await bucket.put("a", b"")
        assert await bucket.get("a", 0) == b""

    @in_loop
    async def test_a_folder_is_not_an_object(self, bucket: Bucket) -> None:
        await bucket.put("a/b", b"")

        assert await bucket.find("a") is None
        with pytest.raises(NotFound):
            await bucket.get("a")
        await bucket.delete("a")
        assert await bucket.find("a/b") is not None

    @in_loop
    async def test_cancelled_read_stops_writing_to_the_buffer(self, bucket: Bucket) -> None:
        await bucket.put("large", bytes(40_000_000))
        memory = bytearray(b"\1") * 40_000_000
        task = asyncio.ensure_future(bucket.read_into("large", memoryview(memory)))
        while memory[0] and not task.done():
            await asyncio.sleep(0)

        task.cancel()
        await asyncio.wait([task])
        memory[:] = b"\2" * len(memory)
        await asyncio.sleep(0.1)
        gc.collect()

        assert not memory.strip(b"\2")

    @in_loop
    async def test_cancelled_put_stops_and_writes_nothing(self, bucket: Bucket) -> None:
        given = 0

        def endless() -> Iterator[bytes]:
            nonlocal given
            while given < 10_000:
                given += 1
                time.sleep(0.001)
                yield bytes(1_000)

        task = asyncio.ensure_future(bucket.put("a", endless()))
        while given < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])

        assert task.cancelled()
        assert given < 10_000
        assert not await bucket.list("")

    # list and find

    @in_loop
    async def test_list_is_recursive_and_sorted(self, bucket: Bucket) -> None:
        names = ["a/1", "a/10", "a/2", "a/b/c/d", "a-/1", "a.json", "ab/1", "b", "é", "Z"]
        await asyncio.gather(*(bucket.put(name, name.encode()) for name in names))

        assert paths(await bucket.list("")) == sorted(names)
        assert paths(await bucket.list("a/")) == ["a/1", "a/10", "a/2", "a/b/c/d"]
        assert paths(await bucket.list("a/b/")) == ["a/b/c/d"]
        assert paths(await bucket.list("ab/")) == ["ab/1"]
        assert paths(await bucket.list("b/")) == []
        assert [entry.size for entry in await bucket.list("a/")] == [3, 4, 3, 7]

    @pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", "a/../", "/a/", "a\0/"])
    @in_loop
    async def test_list_rejects_invalid_prefixes(self, bucket: Bucket, prefix: str) -> None:
        with pytest.raises(BucketError, match="is not a valid"):
            await bucket.list(prefix)

    @in_loop
    async def test_find_agrees_with_list(self, bucket: Bucket) -> None:
        before = time.time()
        await bucket.put("a/b", b"12345")

        found = await bucket.find("a/b")

        assert found is not None
        assert (found.path, found.size) == ("a/b", 5)
        # Some stores round to whole seconds, and their clock may differ.
        assert before - 10 < found.modified < time.time() + 10
        listed = (await bucket.list("a/"))[0]
        assert (listed.path, listed.size) == ("a/b", 5)
        assert abs(listed.modified - found.modified) < 2

    @in_loop
    async def test_modified_time_follows_the_last_write(self, bucket: Bucket) -> None:
        await bucket.put("a", b"1")
        first = await bucket.find("a")
        await asyncio.sleep(1.1)
        await bucket.put("a", b"2")
        second = await bucket.find("a")

        assert isinstance(first, ObjectInfo)
        assert isinstance(second, ObjectInfo)
        assert second.modified > first.modified

    # delete

    @in_loop
    async def test_delete_can_be_repeated(self, bucket: Bucket) -> None:
        await bucket.put("a/b", b"")
        await bucket.put("a/c", b"")

        await bucket.delete("a/b")
        await bucket.delete("a/b")

        assert paths(await bucket.list("")) == ["a/c"]
        with pytest.raises(NotFound):
            await bucket.get("a/b")

    # names

    @in_loop
    async def test_odd_names_work(self, bucket: Bucket) -> None:
        names = [f"{folder}{name}" for name in self.odd_names for folder in ("", f"{name[:40].strip('.')}-/")]
        await asyncio.gather(*(bucket.create(name, name.encode()) for name in names))

        assert paths(await bucket.list("")) == sorted(names)
        for name in names:
            assert await bucket.get(name) == name.encode()
            found = await bucket.find(name)
            assert found is not None
            assert found.path == name
        await asyncio.gather(*map(bucket.delete, names))
        assert not await bucket.list("")

    @pytest.mark.parametrize("path", BAD_PATHS)
    @in_loop
    async def test_invalid_paths_are_rejected(self, bucket: Bucket, path: str) -> None:
        for verb in (bucket.get, bucket.find, bucket.delete):
            with pytest.raises(BucketError, match="is not a valid object path"):
                await verb(path)
        with pytest.raises(BucketError, match="is not a valid object path"):
            await bucket.create(path, b"")
        with pytest.raises(BucketError, match="is not a valid object path"):
            await bucket.put(path, b"")
        with pytest.raises(BucketError, match="is not a valid object path"):
            await bucket.read_into(path, memoryview(bytearray(1)))

    # several clients

    @in_loop
    async def test_two_clients_see_the_same_objects(self, opener: Opener) -> None:
        writer, reader = opener(), opener()
        await writer.create("a", b"1")

        assert await reader.get("a") == b"1"
        assert paths(await reader.list("")) == ["a"]
        await reader.delete("a")
        assert await writer.find("a") is None

    @in_loop
    async def test_readers_see_the_old_or_the_new_object_whole(self, opener: Opener) -> None:
        writer, reader = opener(), opener()
        await writer.put("a", bytes(300_000))
        seen = set()

        async def read() -> None:
            for _ in range(20):
                data = await reader.get("a")
                seen.add(data[0])
                assert is_same(data, bytes([data[0]]) * 300_000)

        async def write() -> None:
            for number in range(1, 10):
                await writer.put("a", bytes([number]) * 300_000)

        await asyncio.gather(read(), write())
        assert seen <= set(range(10))

    def test_url_holds_no_secrets(self, bucket: Bucket) -> None:
        assert "://" in bucket.url or Path(bucket.url).is_absolute()
        assert not set("?#@") & set(bucket.url)
        assert not bucket.url.endswith("/")
