"""What every bucket must do, whatever store is behind it."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, ParamSpec

import numpy as np
import pytest

from weightwire.bucket import Bucket, ObjectInfo
from weightwire.errors import AlreadyExists, BucketError, NotFound, Truncated
from weightwire.testing.bucket_names import BAD_PATHS, ODD_NAMES

__all__ = ["BucketContract", "Opener", "in_loop"]

Args = ParamSpec("Args")

Opener = Callable[[], Bucket]
"""Opens the same empty bucket again and again, as several processes would."""


def in_loop(test: Callable[Args, Coroutine[Any, Any, None]]) -> Callable[Args, None]:
    """Runs a test in an event loop of its own, in which nothing may go wrong unseen."""

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
    """For large objects: where these differ, pytest would look for the differences byte by byte, for minutes."""
    return found == wanted


def paths(found: object) -> list[str]:
    assert isinstance(found, list | tuple)
    return [entry.path for entry in found]


class BucketContract:
    """The tests. Inherit from it, and say with the fixture `opener` how to open one of your own:

        import pytest
        from mystore import MyBucket
        from weightwire.testing import BucketContract

        class TestMyBucket(BucketContract):
            @pytest.fixture
            def opener(self, tmp_path):
                return lambda: MyBucket(tmp_path)

    Whatever the opener returns must be the same bucket, empty at first. Errors must be those of weightwire, with the
    path in the message. A bucket whose `strict` is False is not asked to let only one of several writers create.
    """

    races = 5  # attempts at creating the same object at the same time
    odd_names: Sequence[str] = ODD_NAMES  # a store that cannot keep them all apart says which ones it can

    @pytest.fixture
    def opener(self) -> Opener:
        raise NotImplementedError("override the fixture `opener`: it returns a function that opens your bucket")

    @pytest.fixture
    def bucket(self, opener: Opener) -> Iterator[Bucket]:
        bucket = opener()
        yield bucket
        asyncio.run(bucket.close())

    def test_says_how_often_it_may_be_polled(self, bucket: Bucket) -> None:
        assert 0 < bucket.poll_interval < 60

    # create

    @in_loop
    async def test_creates_what_is_not_there(self, bucket: Bucket) -> None:
        await bucket.create("commits/0.json", b"zero")

        assert await bucket.get("commits/0.json") == b"zero"

    @in_loop
    async def test_does_not_create_what_is_there(self, bucket: Bucket) -> None:
        await bucket.create("a", b"first")

        with pytest.raises(AlreadyExists, match="a: exists"):
            await bucket.create("a", b"second")

        assert await bucket.get("a") == b"first"

    @in_loop
    async def test_does_not_create_what_was_put(self, bucket: Bucket) -> None:
        await bucket.put("a", b"first")

        with pytest.raises(AlreadyExists):
            await bucket.create("a", b"second")

    @in_loop
    async def test_creates_what_was_deleted(self, bucket: Bucket) -> None:
        await bucket.create("a/b", b"first")
        await bucket.delete("a/b")
        await bucket.create("a/b", b"second")

        assert await bucket.get("a/b") == b"second"

    @in_loop
    async def test_of_many_tasks_one_creates(self, opener: Opener) -> None:
        buckets = [opener() for _ in range(4)]
        if not buckets[0].strict:
            pytest.skip("for a single writer")
        for attempt in range(self.races):
            path, contents = f"race/{attempt}", [bytes([racer]) * 1000 for racer in range(8)]

            results = await asyncio.gather(
                *(buckets[racer % 4].create(path, content) for racer, content in enumerate(contents)),
                return_exceptions=True,
            )

            winners = [content for content, result in zip(contents, results, strict=True) if result is None]
            assert [await buckets[0].get(path)] == winners
            assert all(isinstance(result, AlreadyExists) for result in results if result is not None)

    def test_of_many_threads_one_creates(self, opener: Opener) -> None:
        if not opener().strict:
            pytest.skip("for a single writer")
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
    async def test_put_replaces(self, bucket: Bucket) -> None:
        await bucket.put("HEAD.json", b"a longer one")
        await bucket.put("HEAD.json", b"short")

        assert await bucket.get("HEAD.json") == b"short"

    @in_loop
    async def test_puts_buffers_one_after_the_other(self, bucket: Bucket) -> None:
        buffers: list[bytes | memoryview] = [b"one ", memoryview(b"two "), b"", memoryview(bytearray(b"three"))]

        await bucket.put("a", iter(buffers), 13)

        assert await bucket.get("a") == b"one two three"

    @in_loop
    async def test_puts_buffers_of_any_shape(self, bucket: Bucket) -> None:
        nothing = np.empty((0, 3), np.float32).data

        await bucket.put("a", [memoryview(b"12345678").cast("I"), memoryview(b"1234").cast("B", (2, 2)), nothing])

        assert await bucket.get("a") == b"123456781234"
        await bucket.read_into("a", nothing)

    @in_loop
    async def test_puts_from_memory_that_is_used_again(self, bucket: Bucket) -> None:
        def reusing(memory: bytearray) -> Iterator[memoryview]:
            for number in range(20):
                memory[:] = bytes([number]) * len(memory)
                yield memoryview(memory)

        await bucket.put("a", reusing(bytearray(1_000_003)), 20_000_060)

        wanted = b"".join(bytes([n]) * 1_000_003 for n in range(20))
        assert is_same(await self.read(bucket, "a", 20_000_060), wanted)

    @pytest.mark.parametrize("form", ["bytes", "views", "small pieces"])
    @in_loop
    async def test_large_objects_go_there_and_back(self, bucket: Bucket, form: str) -> None:
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
    async def test_writes_nothing_if_it_was_given_less_than_announced(self, bucket: Bucket, size: int) -> None:
        await bucket.put("a", b"before")

        with pytest.raises(BucketError, match=f"was to have {size + 1:,} bytes, but {size:,} were given"):
            await bucket.put("a", [bytes(size)], size + 1)

        assert await bucket.get("a") == b"before"

    @pytest.mark.parametrize("size", [5, 30_000_000])
    @in_loop
    async def test_writes_nothing_if_the_data_fails(self, bucket: Bucket, size: int) -> None:
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
    async def test_an_object_that_is_too_short_is_an_error(self, bucket: Bucket, size: int, start: int) -> None:
        await bucket.put("a", b"0123456789")

        with pytest.raises(Truncated) as caught:
            await self.read(bucket, "a", size, start)
        assert "a: " in str(caught.value)
        assert caught.value.hint

    @in_loop
    async def test_empty_objects_are_objects(self, bucket: Bucket) -> None:
        await bucket.create("created", b"")
        await bucket.put("put", b"")
        await bucket.put("put in no pieces", [], 0)

        assert [(entry.path, entry.size) for entry in await bucket.list("")] == [
            ("created", 0),
            ("put", 0),
            ("put in no pieces", 0),
        ]
        assert await bucket.get("created") == await bucket.get("put") == b""
        assert await self.read(bucket, "created", 0) == b""
        with pytest.raises(AlreadyExists):
            await bucket.create("put", b"")

    @in_loop
    async def test_what_is_not_there_is_not_found(self, bucket: Bucket) -> None:
        for _ in range(2):
            with pytest.raises(NotFound, match=r"commits/1\.json"):
                await bucket.get("commits/1.json")
            for size in (0, 10, 30_000_000):
                with pytest.raises(NotFound):
                    await self.read(bucket, "commits/1.json", size)
            assert await bucket.find("commits/1.json") is None
            assert not await bucket.list("commits/")
            await bucket.delete("commits/1.json")
            # The same once there is something else.
            await bucket.put("commits/2.json", b"")
            await bucket.delete("commits/2.json")
            await bucket.put("commit", b"")

    @in_loop
    async def test_a_folder_is_no_object(self, bucket: Bucket) -> None:
        await bucket.put("a/b", b"")

        assert await bucket.find("a") is None
        with pytest.raises(NotFound):
            await bucket.get("a")
        await bucket.delete("a")
        assert await bucket.find("a/b") is not None

    @in_loop
    async def test_whoever_is_cancelled_gets_his_buffer_back(self, bucket: Bucket) -> None:
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
    async def test_a_put_that_is_cancelled_stops(self, bucket: Bucket) -> None:
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
    async def test_lists_by_folder_at_any_depth_in_order(self, bucket: Bucket) -> None:
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
    async def test_refuses_prefixes_that_are_no_folder(self, bucket: Bucket, prefix: str) -> None:
        with pytest.raises(BucketError, match="cannot be"):
            await bucket.list(prefix)

    @in_loop
    async def test_finds_what_a_listing_says(self, bucket: Bucket) -> None:
        before = time.time()
        await bucket.put("a/b", b"12345")

        found = await bucket.find("a/b")

        assert found is not None
        assert (found.path, found.size) == ("a/b", 5)
        # Some stores tell whole seconds, some have a clock of their own.
        assert before - 10 < found.modified < time.time() + 10
        listed = (await bucket.list("a/"))[0]
        assert (listed.path, listed.size) == ("a/b", 5)
        assert abs(listed.modified - found.modified) < 2

    @in_loop
    async def test_times_follow_the_last_write(self, bucket: Bucket) -> None:
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
    async def test_deletes_and_deletes_again(self, bucket: Bucket) -> None:
        await bucket.put("a/b", b"")
        await bucket.put("a/c", b"")

        await bucket.delete("a/b")
        await bucket.delete("a/b")

        assert paths(await bucket.list("")) == ["a/c"]
        with pytest.raises(NotFound):
            await bucket.get("a/b")

    # names

    @in_loop
    async def test_odd_names_are_names(self, bucket: Bucket) -> None:
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
    async def test_refuses_paths_that_some_store_would_misread(self, bucket: Bucket, path: str) -> None:
        for verb in (bucket.get, bucket.find, bucket.delete):
            with pytest.raises(BucketError, match="cannot be the path of an object"):
                await verb(path)
        with pytest.raises(BucketError, match="cannot be the path of an object"):
            await bucket.create(path, b"")
        with pytest.raises(BucketError, match="cannot be the path of an object"):
            await bucket.put(path, b"")
        with pytest.raises(BucketError, match="cannot be the path of an object"):
            await bucket.read_into(path, memoryview(bytearray(1)))

    # two at a time

    @in_loop
    async def test_all_who_open_it_see_the_same(self, opener: Opener) -> None:
        writer, reader = opener(), opener()
        await writer.create("a", b"1")

        assert await reader.get("a") == b"1"
        assert paths(await reader.list("")) == ["a"]
        await reader.delete("a")
        assert await writer.find("a") is None

    @in_loop
    async def test_readers_see_all_of_an_object_or_the_one_before(self, opener: Opener) -> None:
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

    def test_never_says_where_it_came_from(self, bucket: Bucket) -> None:
        assert "://" in bucket.url
        assert not set("?#@") & set(bucket.url)
        assert not bucket.url.endswith("/")
