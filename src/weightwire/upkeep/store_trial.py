"""Tries out a store: lists, writes, reads, creates twice and deletes, and measures latency, bandwidth and clock.

Writes only under `probe/` and deletes what it wrote. If it is killed, `weightwire gc` or the next trial removes the
rest. Decides nothing: `weightwire doctor` explains the results.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from weightwire.bucket import Bucket, ObjectInfo, is_probe, probe_bucket
from weightwire.chain import RUN, AccessRole, Folder, Verb, access_of, commit_path, denied_means_missing, is_run_missing
from weightwire.errors import AlreadyExists, BucketError, NoBucket, NotFound, PermissionDenied, Unavailable
from weightwire.system import Runtime
from weightwire.upkeep.retention import DAY

__all__ = ["Operation", "StoreTrial", "Transfer", "measure_download", "try_roles", "try_store"]

Operation = Literal["list", "write", "read", "create", "delete"]

Result = TypeVar("Result")

_REQUESTS = 5
_CONTENT = b"weightwire doctor"
_UNRELIABLE = "use another store: this one does not report what it holds"
# Transfers grow until one takes long enough to measure: a slow line is not kept busy for minutes.
_SIZES = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
_LONG_ENOUGH = 0.5  # seconds


@dataclass(frozen=True)
class Transfer:
    """An upload or download that was measured."""

    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / max(self.seconds, 1e-6)


@dataclass
class StoreTrial:
    """The results. An operation that was not tried is not in `results`; None means that it works.

    `denied` is what `try_roles` found out about the key: pairs of a verb and a path of the table of permissions.
    """

    url: str
    strict: bool
    results: dict[Operation, BucketError | None] = field(default_factory=dict)
    denied: set[tuple[Verb, str]] = field(default_factory=set)
    latency: float | None = None  # seconds
    clock_offset: float | None = None  # seconds that the store's clock is ahead of this machine's
    upload: Transfer | None = None
    download: Transfer | None = None

    @property
    def unreachable(self) -> BucketError | None:
        """Why no request can succeed."""
        problem = self.results.get("list")
        return problem if isinstance(problem, Unavailable | NoBucket) else None

    def works(self, operation: Operation) -> bool:
        return operation in self.results and self.results[operation] is None


async def try_store(bucket: Bucket, runtime: Runtime) -> StoreTrial:
    """Tries every operation. The first write creates a missing directory or Hub bucket, as a publisher would."""
    trial = StoreTrial(bucket.url, bucket.strict)
    # The smallest folder that the keys of all roles may list.
    await _try(trial, "list", bucket.list(Folder.EPOCHS))
    if trial.unreachable:
        return trial
    probe = f"{Folder.PROBE}{runtime.token()}"
    try:
        began = runtime.time()
        await _try(trial, "write", bucket.put(probe, _CONTENT))
        if not trial.works("write"):
            await _read_only(trial, bucket, runtime)
            return trial
        found = await _try(trial, "read", _read_back(bucket, probe))
        if found is not None:
            trial.clock_offset = found.modified - (began + runtime.time()) / 2
            trial.latency = await _latency(bucket, runtime, probe)
        await _check_listing(trial, bucket, probe, len(_CONTENT))
        await _try(trial, "create", probe_bucket(bucket, runtime.token()))
        await _try(trial, "delete", _delete(trial, bucket, probe))
        if trial.works("read") and trial.works("delete"):
            # Only now: without delete permission the data would stay in the bucket.
            await _measure(trial, bucket, runtime, probe)
            await _try(trial, "delete", _delete(trial, bucket, probe))
            if trial.works("list"):
                await _remove_leftovers(bucket, found)
    finally:
        with suppress(BucketError):
            await bucket.delete(probe)
    return trial


async def try_roles(bucket: Bucket, runtime: Runtime, trial: StoreTrial) -> None:
    """Finds out what the key must not do, as far as requests can tell that change nothing.

    They list empty folders, delete objects that do not exist, and create a commit that exists, with its own bytes.
    """
    token = runtime.token()
    tried = {(verb, one.path) for role in AccessRole for one in access_of(role) for verb in one.verbs}
    for verb, path in sorted(tried):
        if verb is Verb.LIST:
            await _try_access(trial, verb, path, bucket.list(f"{path}{token}/"))
        elif verb is Verb.DELETE:
            await _try_access(trial, verb, path, bucket.delete(f"{path}{token}"))
    if trial.works("create"):
        await _try_access(trial, Verb.CREATE, Folder.COMMITS, _create_again(bucket))


async def _try_access(trial: StoreTrial, verb: Verb, path: str, attempt: Awaitable[object]) -> None:
    try:
        await attempt
    except PermissionDenied:
        trial.denied.add((verb, path))
    except BucketError:
        pass  # the key may be fine; `try_store` reports what is wrong with the store


async def _create_again(bucket: Bucket) -> None:
    path = commit_path(0)
    with suppress(NotFound, AlreadyExists):
        async with denied_means_missing(bucket, path):
            data = await bucket.get(path)
        await bucket.create(path, data)


async def measure_download(bucket: Bucket, runtime: Runtime, path: str, size: int) -> Transfer | None:
    """Reads the beginning of an object of this size. None if it cannot be read."""
    buffer = memoryview(bytearray(min(size, _SIZES[-1])))
    try:
        return await _grow(runtime, len(buffer), lambda nbytes: bucket.read_into(path, buffer[:nbytes]))
    except BucketError:
        return None


async def _try(trial: StoreTrial, operation: Operation, attempt: Awaitable[Result]) -> Result | None:
    try:
        result = await attempt
    except BucketError as problem:
        trial.results[operation] = problem
        return None
    trial.results[operation] = None
    return result


async def _read_only(trial: StoreTrial, bucket: Bucket, runtime: Runtime) -> None:
    """Without a probe object, run.json is the only path to read. If it does not exist, the store still answered."""

    async def read() -> None:
        try:
            await bucket.get(RUN)
        except NotFound:
            pass
        except PermissionDenied:
            # A key with the permissions of one role lists only some folders, and is denied what does not exist.
            if not await is_run_missing(bucket) or await _lists_everything(bucket):
                raise

    await _try(trial, "read", read())
    if trial.works("read"):
        trial.latency = await _latency(bucket, runtime, RUN)


async def _lists_everything(bucket: Bucket) -> bool:
    try:
        await bucket.list("")
    except PermissionDenied:
        return False
    return True


async def _read_back(bucket: Bucket, probe: str) -> ObjectInfo:
    data, found = await bucket.get(probe), await bucket.find(probe)
    if data != _CONTENT:
        raise BucketError(f"{bucket.url}/{probe}: holds other bytes than were written", hint=_UNRELIABLE)
    return _checked(bucket, probe, found, len(_CONTENT))


async def _check_listing(trial: StoreTrial, bucket: Bucket, probe: str, nbytes: int) -> None:
    """Checks that the probe is listed with the size that was written. Skipped if this key cannot list it."""

    async def check() -> None:
        try:
            listed = {one.path: one for one in await bucket.list(Folder.PROBE)}
        except PermissionDenied:  # a publisher needs to list other folders only
            return
        _checked(bucket, probe, listed.get(probe), nbytes)

    if trial.works("list"):
        await _try(trial, "list", check())


def _checked(bucket: Bucket, probe: str, found: ObjectInfo | None, nbytes: int) -> ObjectInfo:
    if found is None:
        raise NotFound(f"{bucket.url}/{probe}: not found after it was written", hint="use a consistent store")
    if found.size != nbytes:
        raise BucketError(
            f"{bucket.url}/{probe}: has {nbytes:,} bytes, but the store reports {found.size:,}", hint=_UNRELIABLE
        )
    return found


async def _delete(trial: StoreTrial, bucket: Bucket, probe: str) -> None:
    """Deletes the probe and checks that it is gone: some stores accept the request and keep the object."""
    await bucket.delete(probe)
    try:
        await bucket.get(probe)
    except (NotFound, PermissionDenied):  # S3 denies what is missing if the key cannot list
        pass
    else:
        raise _still_there(bucket, probe, "read")
    if trial.works("list") and any(one.path == probe for one in await bucket.list(Folder.PROBE)):
        raise _still_there(bucket, probe, "listed")


def _still_there(bucket: Bucket, probe: str, done: str) -> BucketError:
    return BucketError(f"{bucket.url}/{probe}: can still be {done} after it was deleted", hint=_UNRELIABLE)


async def _latency(bucket: Bucket, runtime: Runtime, path: str) -> float | None:
    """The median of a few small requests."""
    seconds = []
    with suppress(BucketError):
        for _ in range(_REQUESTS):
            began = runtime.clock()
            await bucket.find(path)
            seconds.append(runtime.clock() - began)
    return statistics.median(seconds) if seconds else None


async def _measure(trial: StoreTrial, bucket: Bucket, runtime: Runtime, probe: str) -> None:
    data = memoryview(os.urandom(_SIZES[-1]))  # random: a store or a line may compress
    with suppress(BucketError):
        trial.upload = await _grow(runtime, len(data), lambda nbytes: bucket.put(probe, [data[:nbytes]], nbytes))
        await _check_listing(trial, bucket, probe, trial.upload.nbytes)
        trial.download = await measure_download(bucket, runtime, probe, trial.upload.nbytes)


async def _grow(runtime: Runtime, most: int, transfer: Callable[[int], Awaitable[None]]) -> Transfer:
    for size in _SIZES:
        nbytes = min(size, most)
        began = runtime.clock()
        await transfer(nbytes)
        measured = Transfer(nbytes, runtime.clock() - began)
        if nbytes == most or measured.seconds >= _LONG_ENOUGH:
            break
    return measured


async def _remove_leftovers(bucket: Bucket, probe: ObjectInfo | None) -> None:
    """Deletes the probe objects of killed processes. Times are the store's."""
    with suppress(BucketError):
        for one in await bucket.list(Folder.PROBE):
            if probe is not None and is_probe(one.path) and probe.modified - one.modified >= DAY:
                await bucket.delete(one.path)
