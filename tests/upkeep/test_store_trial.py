"""What a trial of a store finds out, and what it leaves behind."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from support.clocked_bucket import Clocked, clocked, first_weights, publish, run
from support.failing_bucket import Act, Troubled, denied, failed, in_memory
from weightwire.bucket.bucket import GET_LIMIT, ObjectInfo
from weightwire.bucket.registry import open_bucket
from weightwire.errors import AlreadyExists, NoBucket, NotFound, PermissionDenied, Unavailable, UnsafeBucket
from weightwire.system.runtime import Runtime
from weightwire.testing import in_loop
from weightwire.upkeep.retention import DAY
from weightwire.upkeep.store_trial import (
    Operation,
    StoreTrial,
    Transfer,
    _latency,
    _remove_leftovers,
    measure_download,
    try_store,
)

ALL = {"list": None, "write": None, "read": None, "create": None, "delete": None}


def tried(bucket: Clocked | Troubled) -> StoreTrial:
    return run(try_store(bucket, Runtime()))


@in_loop
async def test_directory_works_and_stays_empty(tmp_path: Path) -> None:
    bucket = open_bucket(tmp_path)
    trial = await try_store(bucket, Runtime())

    assert trial.results == ALL
    assert trial.unreachable is None
    assert trial.latency is not None
    assert trial.clock_offset == pytest.approx(0, abs=60)  # a stalled machine
    assert trial.upload
    assert trial.download
    assert trial.upload.nbytes == trial.download.nbytes >= 256 << 10
    assert list(tmp_path.iterdir()) == []


def test_objects_of_a_run_are_not_touched() -> None:
    bucket = clocked()
    publish(bucket, first_weights(), 2)
    before = {path: run(bucket.get(path)) for path in bucket.paths()}
    bucket.log.clear()

    tried(bucket)

    assert {path: run(bucket.get(path)) for path in bucket.paths()} == before
    assert all(path.startswith("probe/") for _, path in bucket.log)


def test_clock_offset_is_the_stores_time_minus_ours() -> None:
    bucket = clocked()
    bucket.now = Runtime().time() + 1000
    assert tried(bucket).clock_offset == pytest.approx(1000, abs=60)


def test_unreachable_store_is_asked_once() -> None:
    bucket = in_memory()
    bucket.trouble("list", "", failed, 9)
    trial = tried(bucket)

    assert isinstance(trial.unreachable, Unavailable)
    assert len(bucket.asked) == 1


def test_missing_bucket_is_unreachable() -> None:
    trial = StoreTrial("s3://x", True, {"list": NoBucket("no")})
    assert trial.unreachable


def test_store_that_denies_a_list_is_reachable() -> None:
    assert StoreTrial("s3://x", True, {"list": PermissionDenied("no")}).unreachable is None


def test_operation_that_was_not_tried_does_not_work() -> None:
    assert not StoreTrial("s3://x", True).works("read")


def test_read_only_key_reads_run_json() -> None:
    bucket = clocked()
    publish(bucket, first_weights(), 1)
    bucket.read_only = True
    trial = tried(bucket)

    assert isinstance(trial.results["write"], PermissionDenied)
    assert trial.works("read")
    assert trial.latency is not None
    assert (trial.clock_offset, trial.upload, trial.download) == (None, None, None)
    assert "create" not in trial.results


def test_read_only_key_without_a_run_can_read() -> None:
    bucket = clocked()
    bucket.read_only = True
    assert tried(bucket).works("read")


def test_key_without_read_permission_cannot_read() -> None:
    bucket = in_memory()
    bucket.trouble("put create get find read_into", "", denied, 99)
    trial = tried(bucket)

    assert isinstance(trial.results["read"], PermissionDenied)
    assert trial.latency is None
    assert bucket.count("find") == 0


def test_key_without_delete_permission_leaves_only_small_objects() -> None:
    bucket = in_memory()
    bucket.trouble("delete", "", denied, 99)
    trial = tried(bucket)

    assert isinstance(trial.results["delete"], PermissionDenied)
    assert trial.upload is None
    assert sum(one.size for one in run(bucket.inner.list(""))) < 1000


def test_store_without_atomic_create_is_unsafe() -> None:
    class Overwriting(Troubled):
        async def create(self, path: str, data: bytes) -> None:
            await self.inner.put(path, data)

    bucket = Overwriting(in_memory().inner)
    assert isinstance(tried(bucket).results["create"], UnsafeBucket)
    assert run(bucket.list("")) == []


class Lying(Troubled):
    """Forwards everything, and answers wrongly about probes from a size on."""

    def __init__(self, *lies: str, smallest: int = 0) -> None:
        super().__init__(in_memory().inner)
        self._lies, self._smallest = lies, smallest
        self._kept: dict[str, tuple[bytes, ObjectInfo]] = {}  # deleted, but still shown

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        if path in self._kept and "keeps reading" in self._lies:
            return self._kept[path][0]
        data = await super().get(path, limit)
        return data[::-1] if "other bytes" in self._lies and path.count("-") == 0 else data

    async def find(self, path: str) -> ObjectInfo | None:
        found = await super().find(path)
        return self._resized(found) if found and "wrong size found" in self._lies else found

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        listed = [
            self._resized(one) if "wrong size listed" in self._lies else one for one in await super().list(prefix)
        ]
        if "lists nothing" in self._lies:
            return []
        return [*listed, *(one for _, one in self._kept.values() if "keeps listing" in self._lies)]

    async def delete(self, path: str) -> None:
        found = await self.inner.find(path)
        if found and found.size >= self._smallest:
            self._kept[path] = await self.inner.get(path), found
        await super().delete(path)

    def _resized(self, one: ObjectInfo) -> ObjectInfo:
        less = 2 * ("smaller" in self._lies)
        return replace(one, size=one.size + (1 - less) * (one.size >= self._smallest))


@pytest.mark.parametrize(
    ("lie", "operation", "message"),
    [
        ("other bytes", "read", "holds other bytes than were written"),
        ("wrong size found", "read", "has 17 bytes, but the store reports 18"),
        ("wrong size listed", "list", "has 17 bytes, but the store reports 18"),
        ("lists nothing", "list", "not found after it was written"),
        ("keeps reading", "delete", "can still be read after it was deleted"),
        ("keeps listing", "delete", "can still be listed after it was deleted"),
    ],
)
def test_store_that_lies_is_found_out(lie: str, operation: Operation, message: str) -> None:
    trial = tried(Lying(lie))
    problem = trial.results[operation]
    assert problem
    assert message in problem.message
    assert problem.hint
    assert [name for name in ALL if not trial.works(cast(Operation, name))] == [operation]


@pytest.mark.parametrize(("lie", "operation"), [("wrong size listed", "list"), ("keeps reading", "delete")])
def test_store_that_lies_about_large_objects_is_found_out(lie: str, operation: Operation) -> None:
    trial = tried(Lying(lie, smallest=200 << 10))
    assert trial.results[operation]
    assert [name for name in ALL if not trial.works(cast(Operation, name))] == [operation]


def test_store_that_reports_smaller_sizes_is_found_out() -> None:
    problem = tried(Lying("wrong size listed", "smaller")).results["list"]
    assert problem
    assert "has 17 bytes, but the store reports 16" in problem.message


def test_store_that_returns_other_bytes_is_not_measured() -> None:
    trial = tried(Lying("other bytes"))
    assert (trial.upload, trial.download, trial.latency, trial.clock_offset) == (None, None, None, None)


def test_store_that_keeps_deleted_objects_gets_no_large_ones() -> None:
    bucket = Lying("keeps reading")
    assert tried(bucket).upload is None
    assert bucket.count("put") == 1


def test_key_without_list_permission_can_delete() -> None:
    """S3 answers such a key with 403 for an object that is gone."""

    class Blind(Troubled):
        async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
            try:
                return await super().get(path, limit)
            except NotFound as problem:
                raise PermissionDenied("denied") from problem

    bucket = Blind(in_memory().inner)
    bucket.trouble("list", "", denied, 99)
    trial = tried(bucket)
    assert isinstance(trial.results["list"], PermissionDenied)
    assert [name for name in ALL if not trial.works(cast(Operation, name))] == ["list"]
    assert bucket.count("list") == 1


def test_delete_that_cannot_be_checked_is_not_called_ok() -> None:
    bucket = in_memory()

    async def fail_after_delete(act: Act) -> Any:
        if bucket.count("delete") == 3:  # two by the probe of create
            raise Unavailable("the line is down")
        return await act()

    bucket.trouble("get", "", fail_after_delete, 99)
    assert isinstance(tried(bucket).results["delete"], Unavailable)


def test_probe_objects_are_deleted_after_a_day() -> None:
    bucket = clocked()
    old, young, foreign = "probe/" + 32 * "0", "probe/" + 32 * "1", "probe/results.csv"
    bucket.write(old, b"left by a killed process")
    bucket.write(foreign, b"the user's own file")
    bucket.now += 23 * 3600
    bucket.write(young, b"of a process that may still run")
    bucket.now += 2 * 3600
    tried(bucket)

    assert bucket.paths() == [young, foreign]


def test_cancelled_trial_deletes_its_objects() -> None:
    async def cancel() -> list[str]:
        inner = in_memory().inner

        class Hanging(Troubled):
            async def create(self, path: str, data: bytes) -> None:
                task.cancel()
                await asyncio.sleep(60)

        bucket = Hanging(inner)
        task = asyncio.ensure_future(try_store(bucket, Runtime()))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bucket.count("put") == 1
        return [one.path for one in await inner.list("")]

    assert asyncio.run(cancel()) == []


@in_loop
async def test_download_is_measured_on_small_and_missing_objects() -> None:
    bucket = in_memory()
    await bucket.put("a", bytes(1000))
    measured = await measure_download(bucket, Runtime(), "a", 1000)

    assert measured
    assert measured.nbytes == 1000
    assert bucket.count("read_into") == 1
    assert await measure_download(bucket, Runtime(), "b", 1000) is None


class Slow(Runtime):
    """Every look at the clock is some time after the one before."""

    def __init__(self, *steps: float) -> None:
        super().__init__()
        self.seconds = 0.0
        self.steps = itertools.cycle(steps or (1.0,))

    def clock(self) -> float:
        self.seconds += next(self.steps)
        return self.seconds

    time = clock


@in_loop
async def test_slow_line_gets_only_the_smallest_transfer() -> None:
    trial = await try_store(in_memory(), Slow())

    assert trial.upload == trial.download == Transfer(256 << 10, 1.0)
    assert trial.upload.rate == 256 << 10


class Recording(Troubled):
    """Notes the sizes of uploads and downloads, and the last upload."""

    def __init__(self) -> None:
        super().__init__(in_memory().inner)
        self.uploads: list[int] = []
        self.downloads: list[int] = []
        self.last = b""

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        if size is not None:
            self.last = b"".join(cast(Iterable[bytes], data))
            data = [self.last]
            self.uploads.append(size)
        await super().put(path, data, size)

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        self.downloads.append(buffer.nbytes)
        await super().read_into(path, buffer, start)


@in_loop
@pytest.mark.parametrize(("seconds", "count"), [(0.4, 4), (0.5, 1)])
async def test_transfers_grow_until_one_takes_half_a_second(seconds: float, count: int) -> None:
    bucket = Recording()
    trial = await try_store(bucket, Slow(seconds))
    sizes = [256 << 10, 1 << 20, 4 << 20, 16 << 20][:count]
    assert bucket.uploads == bucket.downloads == sizes
    assert trial.upload
    assert trial.upload.nbytes == sizes[-1]
    assert len(zlib.compress(bucket.last[: 1 << 18], 1)) > 1 << 18  # a line that compresses would seem faster


@in_loop
async def test_at_most_16_mb_of_a_large_object_are_downloaded() -> None:
    bucket = Recording()
    await bucket.put("a", bytes(17 << 20))
    measured = await measure_download(bucket, Slow(0.1), "a", 1 << 50)
    assert measured
    assert (measured.nbytes, bucket.downloads[-1]) == (16 << 20, 16 << 20)


def test_transfer_that_took_no_time_has_a_rate() -> None:
    assert Transfer(5, 0.0).rate == 5e6


@in_loop
async def test_latency_is_the_median_of_five_requests() -> None:
    bucket = in_memory()
    runtime = Slow(0, 9, 0, 1, 0, 2, 0, 3, 0, 50)
    assert await _latency(bucket, runtime, "a") == 3
    assert bucket.count("find") == 5


@in_loop
@pytest.mark.parametrize(("answers", "seconds"), [(2, 2.0), (0, None)])
async def test_latency_is_measured_until_a_request_fails(answers: int, seconds: float | None) -> None:
    bucket = in_memory()

    async def stop_answering(act: Act) -> Any:
        if bucket.count("find") > answers:
            raise Unavailable("the line is down")
        return await act()

    bucket.trouble("find", "", stop_answering, 99)
    assert await _latency(bucket, Slow(0, 1, 0, 3), "a") == seconds


def test_clocks_are_compared_in_the_middle_of_the_request() -> None:
    bucket = clocked()
    bucket.now = 110.0
    assert run(try_store(bucket, Slow(100, 20))).clock_offset == 0.0


@pytest.mark.parametrize("verb", ["put", "read_into"])
def test_transfer_that_fails_is_not_measured(verb: str) -> None:
    bucket = in_memory()

    async def fail_if_large(act: Act) -> Any:
        if bucket.count("delete") >= 3:  # the small probe and two of create
            raise Unavailable("the line is down")
        return await act()

    bucket.trouble(verb, "", fail_if_large, 99)
    trial = tried(bucket)
    assert trial.download is None
    assert (trial.upload is None) == (verb == "put")
    assert trial.results == ALL


def test_leftover_that_cannot_be_deleted_is_ignored() -> None:
    bucket = in_memory()
    left = "probe/" + 32 * "0"
    run(bucket.put(left, b""))
    bucket.trouble("delete", left, denied, 99)
    [found] = run(bucket.list("probe/"))
    run(_remove_leftovers(bucket, replace(found, modified=found.modified + DAY)))
    assert bucket.count("delete", left) == 1


@pytest.mark.parametrize(("age", "stays"), [(DAY, False), (DAY - 1, True)])
def test_leftover_is_deleted_when_it_is_a_day_old(age: float, stays: bool) -> None:
    bucket = in_memory()
    run(bucket.put("probe/" + 32 * "0", b""))
    [left] = run(bucket.list("probe/"))
    run(_remove_leftovers(bucket, replace(left, modified=left.modified + age)))
    assert bool(run(bucket.list("probe/"))) == stays


def test_lost_replies_of_creates_are_not_taken_for_unsafe() -> None:
    bucket = in_memory()

    class Forgetful(Troubled):
        async def create(self, path: str, data: bytes) -> None:
            await self.inner.create(path, data)
            raise AlreadyExists(path)

    assert tried(Forgetful(bucket.inner)).works("create")
