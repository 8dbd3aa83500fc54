"""Errors of buckets: URLs, settings, and what directories, S3 stores and the Hub refuse."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from project.provocations.case import Answer, Case, Provocation, http_server, publish
from support.fake_hub import FakeHub
from support.memory_s3 import listing
from support.stores import NOWHERE, environment, use
from weightwire import AlreadyExists, Bucket, Publisher, open_bucket
from weightwire.bucket import GET_LIMIT, ForwardingBucket, ObjectInfo, object_store, probe_bucket
from weightwire.system import Runtime
from weightwire.upkeep import try_store

SECRETS = ("SECRET-KEY", "hf_secret", "hf_wrong")
"""What provocations pass as credentials. No message may repeat them."""

Work = Callable[[Bucket], Awaitable[object]]


def opens(url: str | Path, **variables: str) -> Provocation:
    """Opens a URL with these variables in the environment. An empty one is unset."""

    def provoke(case: Case) -> None:
        use(case.patch, variables)
        for name in (name for name, value in variables.items() if not value):
            case.patch.delenv(name)
        open_bucket(url)

    return provoke


# --- directories -------------------------------------------------------------------------------------------------


def directory(work: Work, fail: tuple[str, int] | None = None) -> Provocation:
    """Work on a directory; `fail` names a function of `os` and the error number that it fails with."""

    def provoke(case: Case) -> None:
        bucket = open_bucket(case.run)
        asyncio.run(bucket.put("a", b"1234"))
        if fail:
            name, number = fail

            def failing(*_: Any, **__: Any) -> None:
                raise OSError(number, os.strerror(number))

            case.patch.setattr(os, name, failing)
        asyncio.run(_awaited(work(bucket)))

    return provoke


async def _awaited(work: Awaitable[object]) -> None:
    await work


def file_instead_of_a_directory(case: Case) -> None:
    case.run.touch()
    asyncio.run(open_bucket(case.run).put("a", b""))


def directory_that_cannot_be_created(case: Case) -> None:
    case.run.touch()
    asyncio.run(open_bucket(case.run / "run").put("a", b""))


def symbolic_link(case: Case) -> None:
    case.run.mkdir()
    (case.run / "a").symlink_to(case.here)
    asyncio.run(open_bucket(case.run).get("a/b"))


def fifo_in_place_of_an_object(case: Case) -> None:
    case.run.mkdir()
    os.mkfifo(case.run / "a")
    asyncio.run(open_bucket(case.run).get("a"))


async def _too_large(bucket: Bucket) -> None:
    await bucket.put("a", b"1234")
    await bucket.get("a", 2)


# --- S3 ----------------------------------------------------------------------------------------------------------


def s3(status: int, code: str = "", message: str = "", work: Work | None = None) -> Provocation:
    """A store that answers every request with this error."""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode() if code else b""
    return _with_s3(lambda request: (status, {}, body), work)


def _with_s3(respond: Callable[[Any], Answer], work: Work | None = None) -> Provocation:
    def provoke(case: Case) -> None:
        case.patch.setitem(object_store._RETRIES, "max_retries", 0)
        with http_server(respond) as endpoint:
            use(case.patch, environment(endpoint, "key", SECRETS[0]))
            asyncio.run(_awaited((work or (lambda bucket: bucket.get("run.json")))(open_bucket("s3://bucket/run"))))

    return provoke


def _read(bucket: Bucket) -> Awaitable[None]:
    return bucket.read_into("a", memoryview(bytearray(100)))


def short_object(case: Case) -> None:
    def respond(request: Any) -> Answer:
        return 206, {"Content-Range": "bytes 0-49/50", "Last-Modified": "Tue, 01 Jan 2030 00:00:00 GMT"}, bytes(50)

    _with_s3(respond, _read)(case)


def listed(*keys: str, more: str = "") -> Provocation:
    """A store whose listings have these keys on every page."""
    body = listing([(key, 1) for key in keys], more).body

    def provoke(case: Case) -> None:
        case.patch.setattr(object_store, "_BATCH", 2)  # keys that are read before a repetition is noticed
        _with_s3(lambda request: (200, {}, body), lambda bucket: bucket.list(""))(case)

    return provoke


def refused_connection(case: Case) -> None:
    case.patch.setitem(object_store._RETRIES, "max_retries", 0)
    use(case.patch, environment(NOWHERE, "key", SECRETS[0]))
    asyncio.run(open_bucket("s3://bucket/run").get("run.json"))


def missing_credentials(case: Case) -> None:
    case.patch.setitem(object_store._RETRIES, "max_retries", 0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        case.patch.delenv(name, raising=False)
    case.patch.setenv("HOME", str(case.here))
    with http_server(lambda request: (404, {}, b"")) as endpoint:
        use(case.patch, {"AWS_METADATA_ENDPOINT": NOWHERE.replace("127.0.0.1:1", "169.254.0.1:1")})
        use(case.patch, {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"})
        case.patch.setitem(object_store._FOR_RECORDS, "connect_timeout", "100ms")
        asyncio.run(open_bucket("s3://bucket/run").get("run.json"))


def profile_without_boto3(case: Case) -> None:
    for name in object_store._CREDENTIALS:
        case.patch.delenv(name, raising=False)
    case.patch.setenv("AWS_PROFILE", "training")
    case.patch.setitem(sys.modules, "obstore.auth.boto3", None)
    open_bucket("s3://bucket/run")


def azure_without_an_account(case: Case) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_USE_EMULATOR"):
        case.patch.delenv(name, raising=False)
    open_bucket("az://container/run")


# --- stores that break their promise -----------------------------------------------------------------------------


class NonAtomicBucket:
    """A bucket in memory that creates objects without atomicity, each in its own way."""

    url, strict, poll_interval = "s3://bucket/run", True, 0.2

    def __init__(self, refuse: bool = False, replace: bool = True, lose: bool = False) -> None:
        self._objects: dict[str, bytes] = {}
        self._refuse, self._replace, self._lose = refuse, replace, lose

    async def create(self, path: str, data: bytes) -> None:
        there = path in self._objects
        if not there or self._replace:
            self._objects[path] = data
        if there and self._refuse:
            raise AlreadyExists("exists")

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        if self._lose:
            return await open_bucket("memory://empty/run").get(path)
        return self._objects[path]

    async def delete(self, path: str) -> None:
        self._objects.pop(path, None)


def non_atomic_bucket(**settings: bool) -> Provocation:
    return lambda case: asyncio.run(probe_bucket(NonAtomicBucket(**settings), "token"))  # type: ignore[arg-type]


class LyingBucket(ForwardingBucket):
    """A bucket in memory that answers these requests wrongly: `get`, `find`, `list` or `delete`."""

    def __init__(self, *lies: str) -> None:
        super().__init__(open_bucket(f"memory://{uuid4().hex}/run"))
        self.url = "s3://bucket/run"
        self._lies = lies

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        data = await super().get(path, limit)
        return data[::-1] if "get" in self._lies and "-" not in path else data

    async def find(self, path: str) -> ObjectInfo | None:
        found = await super().find(path)
        return replace(found, size=found.size + 1) if found and "find" in self._lies else found

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        return [] if "list" in self._lies else await super().list(prefix)

    async def delete(self, path: str) -> None:
        if "delete" not in self._lies:
            await super().delete(path)


def trial_of_a_store_that_lies_about(request: str) -> Provocation:
    def provoke(case: Case) -> None:
        runtime = Runtime()
        case.patch.setattr(runtime, "token", lambda: 32 * "0")
        trial = asyncio.run(try_store(LyingBucket(request), runtime))
        raise next(problem for problem in trial.results.values() if problem)

    return provoke


def run_opened_without_atomic_create(case: Case) -> None:
    """A run that was made with atomic create is opened through a URL without it."""
    publish(case)
    bucket = open_bucket(case.run)
    bucket.strict = False
    Publisher(bucket)


# --- the Hub -----------------------------------------------------------------------------------------------------


def hub(work: Callable[[FakeHub, Bucket], Awaitable[object]], status: int = 0, **variables: str) -> Provocation:
    """Work on a bucket of the Hub, which answers every request with `status` if there is one."""

    def provoke(case: Case) -> None:
        case.patch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        case.patch.setattr("huggingface_hub.utils._http.logger.warning", lambda *args: None)
        (case.here / "xet").mkdir()
        with FakeHub(case.here / "xet").running() as server:
            server.status = status
            home = {"HF_HOME": str(case.here), "HF_ENDPOINT": server.endpoint, "HF_TOKEN": server.token}
            use(case.patch, home | variables)
            asyncio.run(_awaited(work(server, open_bucket("hf://buckets/owner/name/run"))))

    return provoke


async def _overwritten(server: FakeHub, bucket: Bucket) -> None:
    await bucket.put("other", b"theirs")
    files = server.buckets["owner/name"]
    server.after_batch = lambda: files.update({"run/a": {**files["run/other"], "path": "run/a"}})
    await bucket.create("a", b"mine!!")


async def _half_overwritten(server: FakeHub, bucket: Bucket) -> None:
    await bucket.put("other", b"theirs")
    files = server.buckets["owner/name"]
    server.after_batch = lambda: files.update({"run/a": {**files["run/other"], "path": "run/a"}})
    await bucket.create("a", b"mine")


async def _lost_upload(server: FakeHub, bucket: Bucket) -> None:
    server.after_batch = lambda: server.buckets["owner/name"].clear()
    await bucket.put("a", b"1")


async def _created_twice(server: FakeHub, bucket: Bucket) -> None:
    await bucket.create("a", b"1")
    await bucket.create("a", b"1")


async def _read_too_much(server: FakeHub, bucket: Bucket) -> None:
    await bucket.put("a", b"1")
    await bucket.read_into("a", memoryview(bytearray(100)))


async def _missing_object(server: FakeHub, bucket: Bucket) -> None:
    await bucket.put("b", b"1")
    await bucket.get("a")


def missing_hub_client(case: Case) -> None:
    case.patch.setitem(sys.modules, "hf_xet", None)
    open_bucket("hf://buckets/owner/name/run")


PROVOCATIONS: list[Provocation] = [
    opens(""),
    opens(Path("s3://bucket/run")),
    opens("ftp://host/run"),
    opens("http://127.0.0.1:9000/bucket"),
    opens("s3://127.0.0.1:9000/bucket"),
    opens("s3:///run"),
    opens("s3://key:SECRET-KEY@bucket/run"),
    opens("s3://bucket/a//b"),
    opens("hf://owner/name"),
    opens("hf://buckets/owner/name", HF_ENDPOINT="https://user:hf_secret@hub.example"),
    opens("file://host/run"),
    opens("file:///run%00"),
    opens("~nobody-of-this-name/run"),
    azure_without_an_account,
    opens("s3://bucket/run", AWS_ENDPOINT_URL_S3="localhost:8333"),
    opens("s3://bucket/run", AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="", AWS_ENDPOINT_URL_S3=NOWHERE),
    profile_without_boto3,
    lambda case: asyncio.run(_awaited(open_bucket(case.run).list("commits"))),
    # Directories
    directory(lambda bucket: bucket.get("b")),
    directory(lambda bucket: bucket.create("a", b"")),
    directory(lambda bucket: bucket.read_into("a", memoryview(bytearray(10)))),
    directory(lambda bucket: bucket.put("b", b"1", 10)),
    directory(lambda bucket: bucket.put("b", b"1"), ("write", errno.ENOSPC)),
    directory(lambda bucket: bucket.put("b", b"1"), ("write", errno.EACCES)),
    directory(lambda bucket: bucket.put("b", b"1"), ("write", errno.EIO)),
    directory(lambda bucket: bucket.put("b" * 300, b"1")),
    directory(lambda bucket: bucket.create("b", b"1"), ("link", errno.EPERM)),
    symbolic_link,
    fifo_in_place_of_an_object,
    directory(lambda bucket: bucket.get("a", 2)),
    lambda case: asyncio.run(_too_large(open_bucket("memory://large/run"))),
    file_instead_of_a_directory,
    directory_that_cannot_be_created,
    # S3
    s3(403, "AccessDenied", "Access Denied."),
    s3(403, "RequestTimeTooSkewed", "The difference between the request time and the current time is too large."),
    s3(403, "InvalidAccessKeyId", "The access key ID does not exist."),
    s3(404, "NoSuchBucket", "The specified bucket does not exist"),
    s3(404, "NoSuchKey", "The specified key does not exist."),
    s3(412, work=lambda bucket: bucket.create("a", b"")),
    s3(416, "InvalidRange", "The requested range is not satisfiable", _read),
    s3(400, "KeyTooLongError", "Your key is too long"),
    s3(501, "NotImplemented", "A header you provided implies functionality that is not implemented"),
    s3(503, "SlowDown", "Please reduce your request rate."),
    s3(400, "AuthorizationHeaderMalformed", "The region 'us-east-1' is wrong; expecting 'eu-west-1'"),
    s3(409, "OperationConflict"),
    short_object,
    listed("run/a", more="again"),
    listed("run//a"),
    refused_connection,
    missing_credentials,
    # Stores that break their promise
    non_atomic_bucket(),
    non_atomic_bucket(refuse=True),
    non_atomic_bucket(refuse=True, replace=False, lose=True),
    *(trial_of_a_store_that_lies_about(request) for request in ("get", "find", "list", "delete")),
    run_opened_without_atomic_create,
    # The Hub
    hub(_overwritten),
    hub(_half_overwritten),
    hub(_lost_upload),
    hub(_created_twice),
    hub(_read_too_much),
    hub(_missing_object),
    hub(lambda server, bucket: _too_large(bucket)),
    hub(lambda server, bucket: bucket.get("a")),
    hub(lambda server, bucket: bucket.get("a"), HF_TOKEN=SECRETS[2]),
    hub(lambda server, bucket: bucket.get("a"), 429),
    hub(lambda server, bucket: bucket.get("a"), 503),
    hub(lambda server, bucket: bucket.get("a"), 422),
    missing_hub_client,
]
