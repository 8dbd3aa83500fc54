"""Object stores as buckets: S3 and compatible stores, Google Cloud Storage, Azure, and memory, through obstore.

Settings come from the environment. Large objects are transferred in parts. A create is one conditional request.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from weightwire.bucket.bucket import GET_LIMIT, ObjectInfo
from weightwire.bucket.concurrency import each, flat, in_thread, pieces
from weightwire.bucket.paths import check_path, check_prefix
from weightwire.bucket.store_errors import StoreRequest, explain, explain_settings
from weightwire.errors import BucketError, NotFound, PermissionDenied, TooLarge, Truncated, Unavailable

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

__all__ = ["ObjectStoreBucket", "open_object_store"]

Result = TypeVar("Result")
_UploadPart = bytes | bytearray | memoryview

# Objects of more than _SINGLE parts are transferred _AT_ONCE parts at a time, smaller ones in one request.
_PART = 8 << 20
_AT_ONCE = 8
_SINGLE = 2
_CHUNK = 256 << 10
# S3 allows at most 10,000 parts.
_MOST_PARTS = 9_000
_UNKNOWN_SIZE = 160 << 30

# Few retries: the callers of a bucket retry as well, and know better for how long.
_RETRIES: RetryConfig = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
# A record is a few kilobytes and needs a short timeout. Data may take long as long as bytes flow. Nothing is read while
# a part is uploaded, so the read timeout must cover the slowest upload of one part.
_FOR_RECORDS: ClientConfig = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=20)}
_FOR_DATA: ClientConfig = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=60),
    "timeout": timedelta(hours=1),
}

# The sources of S3 credentials that obstore reads itself.
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)

_LAST_REQUESTS = 5.0  # seconds, at most, to end cancelled requests; milliseconds are usual
_RECORD = 1 << 20  # bytes of a put that may be a record
_BATCH = 1000
_BATCH_SECONDS = 120.0  # for one batch of a listing, with all retries
_MOST_LISTED = 10_000_000  # objects in a listing, which is held in memory
_LYING = "check the endpoint, and any proxy or cache in front of the store"

_memories: dict[str, MemoryStore] = {}


def open_object_store(kind: str, host: str, prefix: str) -> ObjectStoreBucket:
    """Opens a bucket or container, with credentials and endpoint from the environment."""
    url = f"{kind}://{host}/{prefix}".rstrip("/")
    if kind == "memory":
        store = _memories.setdefault(host, MemoryStore())
        return ObjectStoreBucket(url, prefix, kind, store, store)
    try:
        credentials = _from_profile(url) if kind == "s3" else None
        records, data = (_connect(kind, host, options, credentials) for options in (_FOR_RECORDS, _FOR_DATA))
    except (BaseError, ValueError) as problem:
        raise explain_settings(problem, kind, url) from None
    return ObjectStoreBucket(url, prefix, kind, records, data)


class ObjectStoreBucket:
    """A `Bucket` in an object store."""

    url: str
    strict = True
    poll_interval = 0.2

    def __init__(self, url: str, prefix: str, kind: str, records: ObjectStore, data: ObjectStore) -> None:
        self.url = url
        self._kind = kind
        self._prefix = f"{prefix}/" if prefix else ""
        self._records = records
        self._data = data
        self._requests: WeakSet[asyncio.Future[Any]] = WeakSet()  # that obstore still works on

    async def create(self, path: str, data: bytes) -> None:
        key = self._key(path)
        with self._failing(path, "put"):
            await self._send(obstore.put_async(self._records, key, data, mode="create"))

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        key, stop = self._key(path), threading.Event()
        part = max(_PART, -(-(size or _UNKNOWN_SIZE) // _MOST_PARTS))
        if isinstance(data, bytes) and len(data) <= _RECORD and size in (None, len(data)):
            with self._failing(path, "put"):  # unlike a thread, this can be cancelled while the store is silent
                await self._send(obstore.put_async(self._records, key, data, use_multipart=False))
            return
        with self._failing(path, "put"):
            # In a thread: the data may be computed while it is sent.
            await in_thread(lambda: self._upload(key, _parts(pieces(data, path, size, stop), part), part), stop)

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        key, where = self._key(path), f"{self.url}/{path}"
        with self._failing(path, "get"):
            result = await self._send(obstore.get_async(self._records, key))
            if result.meta["size"] > limit:
                raise TooLarge.at(where, limit)
            data = bytearray()
            async for chunk in self._chunks(result):
                data += chunk
                if len(data) > limit:  # the store lied about the size
                    raise TooLarge.at(where, limit)
            return bytes(data)

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        view = flat(buffer)
        if not view:
            if await self.find(path) is None:
                raise NotFound.at(f"{self.url}/{path}")
            return

        async def read(offset: int) -> None:
            await self._read(path, view[offset : offset + _PART], start + offset)

        with self._failing(path, "get"):
            await each(range(0, len(view), _PART), _AT_ONCE, read)

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        folder = (self._prefix + check_prefix(prefix)).rstrip("/")
        found: dict[str, ObjectInfo] = {}
        with self._failing(prefix, "list"):
            async for batch in self._batches(folder, prefix):
                known = len(found)
                found.update((meta["path"], self._describe(meta)) for meta in batch)
                if len(found) == known or known > _MOST_LISTED:
                    raise self._endless(prefix)
        # Web consoles create objects that stand for folders. They are listed under the folder's own name.
        inside = (entry for key, entry in found.items() if not folder or key.startswith(f"{folder}/"))
        return sorted(inside, key=lambda entry: entry.path)

    async def _batches(self, folder: str, prefix: str) -> AsyncIterator[Sequence[ObjectMeta]]:
        """Parts of a listing, none of which may take forever: a store may send empty pages without end."""
        batches = obstore.list(self._records, folder or None, chunk_size=_BATCH)
        while True:
            try:
                async with asyncio.timeout(_BATCH_SECONDS):
                    batch = await self._send(batches.__anext__())
            except TimeoutError:
                raise self._endless(prefix) from None
            except StopAsyncIteration:
                return
            yield batch

    def _endless(self, prefix: str) -> BucketError:
        return BucketError(f"{self.url}/{prefix}: the listing does not end", hint=_LYING)

    async def find(self, path: str) -> ObjectInfo | None:
        key = self._key(path)
        try:
            with self._failing(path, "get"):
                return self._describe(await self._send(obstore.head_async(self._records, key)))
        except NotFound:
            return None

    async def delete(self, path: str) -> None:
        key = self._key(path)
        with suppress(NotFound), self._failing(path, "delete"):
            await self._send(obstore.delete_async(self._records, key))

    async def close(self) -> None:
        """Waits until obstore is done with all requests, also with those that were cancelled a moment ago.

        One of its threads that needs the interpreter while that exits would crash the process.
        """
        until = time.monotonic() + _LAST_REQUESTS
        while self._requests and time.monotonic() < until:
            await asyncio.sleep(0.001)
            MemoryStore()  # any call: obstore's threads put down references that only its next call gives back

    async def _send(self, request: Awaitable[Result]) -> Result:
        """Awaits a request of obstore. Obstore holds a reference to it as long as it works on it."""
        future = asyncio.ensure_future(request)
        self._requests.add(future)
        try:
            return await future
        finally:
            del request, future  # the traceback of an error must not hold one

    async def _chunks(self, result: GetResult) -> AsyncIterator[bytes]:
        stream = result.stream(min_chunk_size=_CHUNK)
        while True:
            try:
                yield await self._send(stream.__anext__())
            except StopAsyncIteration:
                return

    def _key(self, path: str) -> str:
        return self._prefix + check_path(path)

    def _describe(self, meta: ObjectMeta) -> ObjectInfo:
        return ObjectInfo(meta["path"].removeprefix(self._prefix), meta["size"], meta["last_modified"].timestamp())

    @contextmanager
    def _failing(self, path: str, request: StoreRequest) -> Iterator[None]:
        try:
            yield
        except (BaseError, FileNotFoundError, NotImplementedError) as problem:
            # Not `from problem`: a traceback would print its debug output.
            raise explain(problem, self._kind, f"{self.url}/{path}", request) from None
        except BaseException as problem:
            # A Rust panic is not an Exception and would end the event loop.
            if type(problem).__name__ != "PanicException":
                raise
            raise BucketError(
                f"{self.url}/{path}: obstore failed ({problem})", hint="report this as a bug of obstore"
            ) from None

    async def _read(self, path: str, view: memoryview, start: int) -> None:
        end = start + len(view)
        result = await self._send(obstore.get_async(self._data, self._key(path), options={"range": (start, end)}))
        if result.range != (start, end):
            raise Truncated.at(f"{self.url}/{path}", result.range[1], end)
        filled = 0
        async for chunk in self._chunks(result):
            if filled + len(chunk) > len(view):  # the store lied about the range
                raise Unavailable(f"{self.url}/{path}: the store sent more bytes than were requested", hint=_LYING)
            view[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        if filled != len(view):
            raise Unavailable(f"{self.url}/{path}: the connection closed during the download", hint="try again")

    def _upload(self, key: str, parts: Iterator[_UploadPart], size: int) -> None:
        first = list(islice(parts, _SINGLE + 1))
        if len(first) <= _SINGLE:
            obstore.put(self._data, key, iter(first), use_multipart=False)
        else:
            every = chain(first, parts)
            first = []
            obstore.put(self._data, key, every, use_multipart=True, chunk_size=size, max_concurrency=_AT_ONCE)


def _parts(views: Iterable[memoryview], size: int) -> Iterator[_UploadPart]:
    """The same bytes in parts of equal size, which some stores require.

    Mutable memory is copied: the producer may reuse it for the next piece.
    """
    part = bytearray()
    for view in views:
        while view:
            if not part and len(view) >= size and isinstance(view.obj, bytes):
                yield view[:size]
                view = view[size:]
                continue
            taken = view[: size - len(part)]
            part += taken
            view = view[len(taken) :]
            if len(part) == size:
                yield part
                part = bytearray()
    if part:
        yield part


# From the environment


def _connect(kind: str, host: str, options: ClientConfig, credentials: Any) -> ObjectStore:
    if kind == "s3":
        return _connect_s3(host, options, credentials)
    if kind == "gs":
        return GCSStore(host, client_options=options, retry_config=_RETRIES)
    if not os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") and not os.environ.get("AZURE_STORAGE_USE_EMULATOR"):
        raise BucketError(f"az://{host}: the storage account is not set", hint="set AZURE_STORAGE_ACCOUNT_NAME")
    endpoint = _first("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    return AzureStore(host, client_options=_allowing(endpoint, options), retry_config=_RETRIES)


def _connect_s3(host: str, options: ClientConfig, credentials: Any) -> S3Store:
    # Not every S3-compatible store supports bulk deletes, and we delete one by one.
    config: S3Config = {"conditional_put": "etag", "disable_bulk_delete": True}
    endpoint = _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    if endpoint or "AWS_ENDPOINT_URL_S3" in os.environ:
        # Set under this name: the variable overrides all other settings, even if it is empty. obstore panics if the
        # value is not an address.
        config["aws_endpoint_url_s3"] = _check_endpoint(endpoint)
    options, bundle = _allowing(endpoint, options), os.environ.get("AWS_CA_BUNDLE")
    if bundle and Path(bundle).is_file():
        options = {**options, "root_certificate": Path(bundle).read_bytes()}
    return S3Store(host, config=config, client_options=options, retry_config=_RETRIES, credential_provider=credentials)


def _first(*variables: str) -> str:
    return next(filter(None, map(os.environ.get, variables)), "")


def _check_endpoint(endpoint: str) -> str:
    if not re.fullmatch(r"https?://[^\s/@]+(/[^\s@]*)?", endpoint):
        raise BucketError(
            "AWS_ENDPOINT_URL or AWS_ENDPOINT_URL_S3 is not a server address",
            hint="set it to something like https://s3.example.com, without a user or password, or unset it",
        )
    return endpoint


def _allowing(endpoint: str, options: ClientConfig) -> ClientConfig:
    """Allows plain HTTP if the user named an http:// endpoint."""
    return {**options, "allow_http": True} if endpoint.startswith("http://") else options


def _from_profile(url: str) -> Any:
    """The credentials that boto3 finds in ~/.aws, if the environment has none. obstore does not read that file."""
    profile = os.environ.get("AWS_PROFILE")
    if _first(*_CREDENTIALS) or not (profile or Path("~/.aws").expanduser().is_dir()):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if not profile:
            return None
        raise PermissionDenied(
            f"{url}: AWS_PROFILE needs boto3, which is not installed", hint="pip install boto3"
        ) from None
    try:
        return Boto3CredentialProvider()
    except Exception as problem:  # boto3's errors have nothing in common
        raise PermissionDenied(
            f"{url}: no credentials found ({problem})", hint="check AWS_PROFILE and ~/.aws"
        ) from problem
